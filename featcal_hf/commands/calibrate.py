"""`featcal-hf calibrate` and `featcal-hf check`, which take the same flags."""

from __future__ import annotations

from pathlib import Path

import click

from featcal_hf.commands.options import (
    COMPUTING,
    MODEL,
    PARKING,
    leave_warnings_to_the_plan,
    open_console,
    options,
    show_notes,
    show_push,
    stages,
    usable_device,
)
from featcal_hf.mapping import read_mapping
from featcal_hf.preparation import Prepared, plan_of, prepare
from featcal_hf.progress import step_progress
from featcal_hf.ranks import ALONE, Ranks
from featcal_hf.run import calibrate
from featcal_hf.summary import show_plan, show_result, show_verdict


@click.command("calibrate")
@options(
    [
        *MODEL,
        click.option(
            "--write-model-card/--no-write-model-card",
            default=True,
            help="Write README.md, the model card, at the end.",
        ),
        click.option("--push-to-hub", metavar="REPO_ID", help="Push the result to this repository on the Hub."),
        *COMPUTING,
        *PARKING,
    ]
)
@click.option("--restart", is_flag=True, help="Drop what a stopped run has finished, and begin anew.")
@click.pass_context
def calibrate_command(
    context: click.Context,
    recipe: Path,
    model_dir: Path,
    output: Path | None,
    mapped: tuple[str, ...],
    cache_dir: str | None,
    trust_remote_code: bool,
    random_seed: int | None,
    verbosity: int,
    quiet: bool,
    write_model_card: bool,
    push_to_hub: str | None,
    device: str | None,
    cuda: bool,
    activation_memory: int | None,
    restart: bool,
) -> None:
    """Calibrate the merged model in MODEL_DIR towards the experts of RECIPE, in place or into --output."""
    ranks = context.find_object(Ranks) or ALONE
    quiet_here = quiet or not ranks.is_first
    console = open_console(verbosity)
    leave_warnings_to_the_plan(quiet_here)
    place = ranks.place(usable_device(device, cuda))

    def show(prepared: Prepared) -> None:
        if not quiet_here:
            show_plan(console, prepared, plan_of(prepared, activation_memory))

    with step_progress(console, quiet_here) as on_step:
        report = calibrate(
            recipe,
            model_dir,
            output,
            device=place,
            cache_dir=cache_dir,
            trust_remote_code=trust_remote_code,
            random_seed=random_seed,
            mapping=read_mapping(mapped),
            write_model_card=write_model_card,
            activation_memory=activation_memory,
            push_to_hub=push_to_hub,
            restart=restart,
            on_stage=stages(console, quiet_here),
            on_prepared=show,
            on_step=on_step,
            ranks=ranks,
        )
    if not ranks.is_first:
        return
    if quiet:
        show_verdict(console, report)
    else:
        show_result(console, report)
        show_notes(console, report.card.notes if report.card is not None else [])
        console.print(f"Wrote {output or model_dir}", highlight=False, soft_wrap=True)
        console.print(f"See it: featcal-hf report {output or model_dir}", highlight=False, soft_wrap=True)
    if report.pushed is not None:
        show_push(console, report.pushed, quiet)


@click.command("check")
@options([*MODEL, *COMPUTING, *PARKING])
def check_command(
    recipe: Path,
    model_dir: Path,
    output: Path | None,
    mapped: tuple[str, ...],
    cache_dir: str | None,
    trust_remote_code: bool,
    random_seed: int | None,
    verbosity: int,
    quiet: bool,
    device: str | None,
    cuda: bool,
    activation_memory: int | None,
) -> None:
    """Find every error that can be found without running, and show what a run would do and take."""
    console = open_console(verbosity)
    leave_warnings_to_the_plan(quiet)
    prepared = prepare(
        recipe,
        model_dir,
        output,
        device=usable_device(device, cuda),
        cache_dir=cache_dir,
        trust_remote_code=trust_remote_code,
        random_seed=random_seed,
        mapping=read_mapping(mapped),
        on_stage=stages(console, quiet),
    )
    show_plan(console, prepared, plan_of(prepared, activation_memory))
