"""`featcal-hf demo`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("demo")
@click.option("--work-dir", type=click.Path(path_type=Path), help="Keep the demonstration's models here.")
def demo_command(work_dir: Path | None) -> None:
    """Train, merge and calibrate small real models, offline, and show what calibration recovers."""
    from featcal_hf.demo import demo

    demo(work_dir)
