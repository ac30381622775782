"""`featcal-hf eval`."""

from __future__ import annotations

from pathlib import Path

import click

from featcal_hf.commands.options import (
    COMPUTING,
    READING,
    RECIPE,
    TALKING,
    open_console,
    options,
    show_notes,
    stages,
    usable_device,
)
from featcal_hf.eval_report import EVALUATION
from featcal_hf.eval_table import show_evaluation
from featcal_hf.evaluation import ROWS, evaluate
from featcal_hf.mapping import read_mapping


@click.command("eval")
@options(
    [
        RECIPE,
        click.argument("model_dir", type=click.Path(path_type=Path)),
        click.option("--merged", type=click.Path(path_type=Path), help="The merged model, to compare with."),
        click.option("--experts", is_flag=True, help="Measure each task's expert too, and the drift from it."),
        click.option("--rows", type=click.IntRange(min=1), default=ROWS, show_default=True, help="Rows of each task."),
        click.option("--split", help="Read rows from this split; replaces the recipe's."),
        click.option("--batch-size", type=click.IntRange(min=1), help="Rows in one forward; replaces the recipe's."),
        click.option(
            "--output", type=click.Path(path_type=Path), help=f"Write the report here, not to MODEL_DIR/{EVALUATION}."
        ),
        click.option(
            "--lm-eval",
            metavar="TASKS",
            help="Run these tasks (a,b,c) of EleutherAI's harness on both models, in place of the recipe's lm_eval.",
        ),
        click.option("--no-lm-eval", is_flag=True, help="Leave out the harness tasks that the recipe names."),
        click.option(
            "--lm-eval-results",
            multiple=True,
            metavar="[MODEL=]FILE",
            help="Add a results file of the harness; MODEL is expert, merged or calibrated.",
        ),
        *READING,
        click.option("--random-seed", type=int, help="The seed that calibration was given in place of the recipe's."),
        *TALKING,
        *COMPUTING,
    ]
)
def eval_command(
    recipe: Path,
    model_dir: Path,
    merged: Path | None,
    experts: bool,
    rows: int,
    split: str | None,
    batch_size: int | None,
    output: Path | None,
    lm_eval: str | None,
    no_lm_eval: bool,
    lm_eval_results: tuple[str, ...],
    mapped: tuple[str, ...],
    cache_dir: str | None,
    trust_remote_code: bool,
    random_seed: int | None,
    verbosity: int,
    quiet: bool,
    device: str | None,
    cuda: bool,
) -> None:
    """Did it help? Measure the calibrated model in MODEL_DIR on rows of RECIPE's tasks that calibration didn't use."""
    console = open_console(verbosity)
    report = evaluate(
        recipe,
        model_dir,
        merged,
        experts=experts,
        rows=rows,
        split=split,
        batch_size=batch_size,
        output=output,
        device=usable_device(device, cuda),
        cache_dir=cache_dir,
        trust_remote_code=trust_remote_code,
        random_seed=random_seed,
        mapping=read_mapping(mapped),
        lm_eval=_harness_tasks(lm_eval, no_lm_eval),
        lm_eval_results=lm_eval_results,
        on_stage=stages(console, quiet),
    )
    if not quiet:
        show_evaluation(console, report)
        show_notes(console, report.notes)
        console.print(f"Wrote {output or model_dir / EVALUATION}", highlight=False, soft_wrap=True)
        if report.card is not None:
            console.print(f"Wrote {report.card}, the model card, with these results", highlight=False, soft_wrap=True)


def _harness_tasks(named: str | None, none: bool) -> list[str] | None:
    if none and named is not None:
        raise click.UsageError("--lm-eval and --no-lm-eval say two things; give one of them.")
    if named is None:
        return [] if none else None
    return [task.strip() for task in named.split(",") if task.strip()]
