"""`featcal-hf card`."""

from __future__ import annotations

from pathlib import Path

import click

from featcal_hf.card import write_card
from featcal_hf.commands.options import TALKING, open_console, options, show_notes


@click.command("card")
@options(
    [
        click.argument("model_dir", type=click.Path(path_type=Path)),
        click.option("--template", type=click.Path(path_type=Path), help="A jinja2 template in place of ours."),
        *TALKING,
    ]
)
def card_command(model_dir: Path, template: Path | None, verbosity: int, quiet: bool) -> None:
    """Write the model card of the calibrated model in MODEL_DIR again.

    What you wrote between its markers stays, and so does a README.md of your own.
    """
    console = open_console(verbosity)
    report = write_card(model_dir, template=template)
    if not quiet:
        show_notes(console, report.notes)
        console.print(f"Wrote {report.path}", highlight=False, soft_wrap=True)
