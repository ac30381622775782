"""The command line: flags to one public function each."""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import datasets
import torch
from rich.console import Console

from featcal_hf import __version__
from featcal_hf.errors import FeatCalError, RecipeError
from featcal_hf.eval_report import EVALUATION
from featcal_hf.eval_table import show_evaluation
from featcal_hf.evaluation import ROWS, evaluate
from featcal_hf.mapping import read_mapping
from featcal_hf.merge import SHARD_SIZE, merge
from featcal_hf.progress import step_progress
from featcal_hf.run import Prepared, calibrate, plan_of, prepare
from featcal_hf.summary import show_plan, show_result

BAD_RECIPE, FAILED, INTERRUPTED = 2, 1, 130
MALLOPT_MMAP_THRESHOLD, RETURNED_BYTES = -3, 4 * 2**20


class DefaultToCalibrate(click.Group):
    """`featcal-hf RECIPE MODEL_DIR` is `featcal-hf calibrate RECIPE MODEL_DIR`, so that it reads like mergekit's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert the command where the first argument is none."""
        own = {option for parameter in self.get_params(ctx) for option in parameter.opts}
        if args and args[0] not in self.commands and args[0] not in own:
            args = ["calibrate", *args]
        return super().parse_args(ctx, args)


_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_RECIPE = click.argument("recipe", type=click.Path(path_type=Path))
_READING: list[_Decorator] = [
    click.option(
        "--map",
        "mapped",
        multiple=True,
        metavar="ID=PATH",
        help="Read a model or dataset of the recipe from a local path; or a YAML or JSON file of ids and paths.",
    ),
    click.option("--transformers-cache", "cache_dir", help="Override storage path for downloaded models."),
    click.option(
        "--trust-remote-code/--no-trust-remote-code",
        default=False,
        help="Trust remote code from huggingface repos (danger).",
    ),
]
_TALKING: list[_Decorator] = [
    click.option("-v", "verbosity", count=True, help="Verbose logging (repeat for more verbosity)."),
    click.option("--quiet", is_flag=True, help="Suppress progress and other non-essential output."),
]
_COMPUTING: list[_Decorator] = [
    click.option("--device", default=None, help="Compute on this device: cpu, cuda, cuda:1, mps, xpu, auto."),
    click.option("--cuda/--no-cuda", default=False, help="Compute on the GPU; same as --device cuda."),
    click.option("--num-threads", "-j", type=int, help="Number of threads to use for parallel CPU operations."),
]
_MODEL: list[_Decorator] = [
    _RECIPE,
    click.argument("model_dir", type=click.Path(path_type=Path)),
    click.option("--output", type=click.Path(path_type=Path), help="Write the result to a new folder."),
    *_READING,
    click.option("--random-seed", type=int, help="Seed for choosing rows; replaces the recipe's."),
    *_TALKING,
]


def _options(options: list[_Decorator]) -> _Decorator:
    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@click.group(cls=DefaultToCalibrate, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="featcal-hf")
def cli() -> None:
    """Repair a merged model: calibrate its features towards its experts', block by block, in closed form.

    Run `mergekit-yaml recipe.yml ./merged` first, then `featcal-hf recipe.yml ./merged`.
    """


@cli.command("calibrate")
@_options([*_MODEL, *_COMPUTING])
def calibrate_command(
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
    num_threads: int | None,
) -> None:
    """Calibrate the merged model in MODEL_DIR towards the experts of RECIPE, in place or into --output."""
    console = _console(verbosity)
    _leave_warnings_to_the_plan(quiet)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    place = _device(device, cuda)

    def show(prepared: Prepared) -> None:
        if not quiet:
            show_plan(console, prepared, plan_of(prepared))

    with step_progress(console, quiet) as on_step:
        report = calibrate(
            recipe,
            model_dir,
            output,
            device=place,
            cache_dir=cache_dir,
            trust_remote_code=trust_remote_code,
            random_seed=random_seed,
            mapping=read_mapping(mapped),
            on_stage=_stages(console, quiet),
            on_prepared=show,
            on_step=on_step,
        )
    if not quiet:
        show_result(console, report)
        console.print(f"Wrote {output or model_dir}", highlight=False, soft_wrap=True)


@cli.command("check")
@_options([*_MODEL, *_COMPUTING])
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
    num_threads: int | None,
) -> None:
    """Find every error that can be found without running, and show what a run would do and take."""
    console = _console(verbosity)
    _leave_warnings_to_the_plan(quiet)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    _device(device, cuda)
    prepared = prepare(
        recipe,
        model_dir,
        output,
        cache_dir=cache_dir,
        trust_remote_code=trust_remote_code,
        random_seed=random_seed,
        mapping=read_mapping(mapped),
        on_stage=_stages(console, quiet),
    )
    show_plan(console, prepared, plan_of(prepared))


@cli.command("eval")
@_options(
    [
        _RECIPE,
        click.argument("model_dir", type=click.Path(path_type=Path)),
        click.option("--merged", type=click.Path(path_type=Path), help="The merged model, to compare with."),
        click.option("--experts", is_flag=True, help="Measure each task's expert too, and the drift from it."),
        click.option("--rows", type=click.IntRange(min=1), default=ROWS, show_default=True, help="Rows of each task."),
        click.option("--split", help="Read rows from this split; replaces the recipe's."),
        click.option("--batch-size", type=click.IntRange(min=1), help="Rows in one forward; replaces the recipe's."),
        click.option(
            "--output", type=click.Path(path_type=Path), help=f"Write the report here, not to MODEL_DIR/{EVALUATION}."
        ),
        click.option("--lm-eval", help="Run these tasks (a,b,c) of EleutherAI's harness on both models."),
        click.option(
            "--lm-eval-results",
            multiple=True,
            metavar="[MODEL=]FILE",
            help="Add a results file of the harness; MODEL is expert, merged or calibrated.",
        ),
        *_READING,
        click.option("--random-seed", type=int, help="The seed that calibration was given in place of the recipe's."),
        *_TALKING,
        *_COMPUTING,
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
    lm_eval_results: tuple[str, ...],
    mapped: tuple[str, ...],
    cache_dir: str | None,
    trust_remote_code: bool,
    random_seed: int | None,
    verbosity: int,
    quiet: bool,
    device: str | None,
    cuda: bool,
    num_threads: int | None,
) -> None:
    """Did it help? Measure the calibrated model in MODEL_DIR on rows of RECIPE's tasks that calibration didn't use."""
    console = _console(verbosity)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    report = evaluate(
        recipe,
        model_dir,
        merged,
        experts=experts,
        rows=rows,
        split=split,
        batch_size=batch_size,
        output=output,
        device=_device(device, cuda),
        cache_dir=cache_dir,
        trust_remote_code=trust_remote_code,
        random_seed=random_seed,
        mapping=read_mapping(mapped),
        lm_eval=[task.strip() for task in lm_eval.split(",") if task.strip()] if lm_eval else (),
        lm_eval_results=lm_eval_results,
        on_stage=_stages(console, quiet),
    )
    if not quiet:
        show_evaluation(console, report)
        console.print(f"Wrote {output or model_dir / EVALUATION}", highlight=False, soft_wrap=True)


@cli.command("merge")
@_options(
    [
        _RECIPE,
        click.argument("out", type=click.Path(path_type=Path)),
        *_READING,
        click.option("--out-shard-size", default=SHARD_SIZE, show_default=True, help="Bytes per output shard."),
        click.option(
            "--copy-tokenizer/--no-copy-tokenizer", default=True, help="Copy the base's tokenizer, processor."
        ),
        click.option(
            "--write-model-card/--no-write-model-card", default=True, help="Output README.md and mergekit_config.yml."
        ),
        click.option("--random-seed", type=int, help="Seed for reproducible use of randomized merge methods."),
        *_TALKING,
        *_COMPUTING,
    ]
)
def merge_command(
    recipe: Path,
    out: Path,
    mapped: tuple[str, ...],
    cache_dir: str | None,
    trust_remote_code: bool,
    out_shard_size: str,
    copy_tokenizer: bool,
    write_model_card: bool,
    random_seed: int | None,
    verbosity: int,
    quiet: bool,
    device: str | None,
    cuda: bool,
    num_threads: int | None,
) -> None:
    """Merge the models of RECIPE into the new folder OUT, with mergekit's methods.

    For architectures that mergekit-yaml can't merge, or of which it writes a part: CLIP, ViT, DINOv2, BERT, Whisper.
    """
    console = _console(verbosity)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    with step_progress(console, quiet) as on_step:
        report = merge(
            recipe,
            out,
            out_shard_size=out_shard_size,
            device=_device(device, cuda),
            cache_dir=cache_dir,
            trust_remote_code=trust_remote_code,
            random_seed=random_seed,
            copy_tokenizer=copy_tokenizer,
            write_model_card=write_model_card,
            mapping=read_mapping(mapped),
            on_stage=_stages(console, quiet),
            on_step=on_step,
        )
    if not quiet:
        copied = f", {len(report.copied)} copied" if report.copied else ""
        console.print(
            f"{report.merged} tensors merged{copied} in {report.seconds:.0f} s", highlight=False, soft_wrap=True
        )
        console.print(f"Wrote {out}", highlight=False, soft_wrap=True)


@cli.command("demo")
@click.option("--work-dir", type=click.Path(path_type=Path), help="Keep the demonstration's models here.")
def demo_command(work_dir: Path | None) -> None:
    """Train, merge and calibrate small real models, offline, and show what calibration recovers."""
    from featcal_hf.demo import demo

    demo(work_dir)


def main() -> None:
    """Run the command; errors that a user can mend are one message and an exit code."""
    _return_freed_memory()
    try:
        cli.main(standalone_mode=False)
    except RecipeError as error:
        _fail(str(error), BAD_RECIPE)
    except FeatCalError as error:
        _fail(str(error), FAILED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _fail("interrupted; the model's folder holds a whole model, or none. Run the same command again.", INTERRUPTED)


def _return_freed_memory() -> None:
    """Have glibc give tensors of a few MB back as they are freed, instead of keeping them for later.

    Its threshold rises to 32 MB by itself, and what it keeps then adds up from block to block.
    """
    if sys.platform == "linux":
        allocator = ctypes.CDLL(None)
        if hasattr(allocator, "mallopt"):
            allocator.mallopt(MALLOPT_MMAP_THRESHOLD, RETURNED_BYTES)


def _fail(message: str, code: int) -> None:
    Console(stderr=True).print(f"error: {message}", style="bold red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)


def _leave_warnings_to_the_plan(quiet: bool) -> None:
    if not quiet:
        logger = logging.getLogger("featcal_hf.data")
        click.get_current_context().call_on_close(partial(logger.setLevel, logger.level))
        logger.setLevel(logging.ERROR)


def _console(verbosity: int) -> Console:
    levels = {0: logging.WARNING, 1: logging.INFO}
    logging.basicConfig(level=levels.get(verbosity, logging.DEBUG))
    datasets.disable_progress_bars()
    return Console(markup=False, emoji=False)


def _stages(console: Console, quiet: bool) -> Callable[[str], None]:
    def show(stage: str) -> None:
        if not quiet:
            console.print(f"{stage} ...", highlight=False, soft_wrap=True)

    return show


def _device(device: str | None, cuda: bool) -> str:
    chosen = device or ("cuda" if cuda else "cpu")
    if chosen == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator.type if accelerator is not None else "cpu"
    try:
        torch.zeros(1, device=chosen).item()
    except (RuntimeError, AssertionError) as error:
        raise click.BadParameter(f"{chosen} can't be used here: {error}", param_hint="--device") from error
    return chosen
