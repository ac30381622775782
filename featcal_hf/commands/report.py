"""`featcal-hf report`."""

from __future__ import annotations

from pathlib import Path

import click

from featcal_hf.commands.options import TALKING, open_console, options
from featcal_hf.report import report


@click.command("report")
@options(
    [
        click.argument("model_dir", type=click.Path(path_type=Path)),
        click.argument("more", nargs=-1, type=click.Path(path_type=Path)),
        click.option(
            "--output",
            type=click.Path(path_type=Path),
            help="The report's folder; by default MODEL_DIR/featcal_report, or ./featcal_report for several.",
        ),
        *TALKING,
    ]
)
def report_command(model_dir: Path, more: tuple[Path, ...], output: Path | None, verbosity: int, quiet: bool) -> None:
    """See it: a page with figures about the calibrated model in MODEL_DIR; with MORE folders, runs compared."""
    console = open_console(verbosity)
    page = report(model_dir, *more, output=output)
    if not quiet:
        console.print(f"Wrote {page}", highlight=False, soft_wrap=True)
