"""What commands have in common: their flags, their console, the device that they compute on."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import click
import datasets
import torch
from rich.console import Console

from featcal_hf.hub import PushReport

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Size(click.ParamType[int]):
    """A number of bytes as people write it: 4GB, 512 MiB, 1000000."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The bytes; units of 1000 with B, of 1024 with iB."""
        if isinstance(value, int):
            return value
        parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i)?)?b?\s*", value, re.IGNORECASE)
        if parts is None:
            self.fail(f"{value!r} is no size; write bytes with a unit, such as 4GB, 512MiB or 0.", param, ctx)
        number, prefix, binary = parts.groups()
        power = " kmgt".index(prefix.lower()) if prefix else 0
        return int(float(number) * (1024 if binary else 1000) ** power)


def _use_threads(ctx: click.Context, param: click.Parameter, threads: int | None) -> None:
    if threads is not None and not ctx.resilient_parsing:
        torch.set_num_threads(threads)


RECIPE = click.argument("recipe", type=click.Path(path_type=Path))
READING: list[Decorator] = [
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
TALKING: list[Decorator] = [
    click.option("-v", "verbosity", count=True, help="Verbose logging (repeat for more verbosity)."),
    click.option("--quiet", is_flag=True, help="Suppress progress and other non-essential output."),
]
COMPUTING: list[Decorator] = [
    click.option("--device", default=None, help="Compute on this device: cpu, cuda, cuda:1, mps, xpu, auto."),
    click.option("--cuda/--no-cuda", default=False, help="Compute on the GPU; same as --device cuda."),
    click.option(
        "--num-threads",
        "-j",
        type=click.IntRange(min=1),
        expose_value=False,
        callback=_use_threads,
        help="Number of threads to use for parallel CPU operations.",
    ),
]
PARKING: list[Decorator] = [
    click.option(
        "--activation-memory",
        type=Size(),
        metavar="SIZE",
        help="Memory for the features of the rows between blocks, such as 4GB; the rest waits in files.  "
        "[default: half of what is free]",
    ),
]
MODEL: list[Decorator] = [
    RECIPE,
    click.argument("model_dir", type=click.Path(path_type=Path)),
    click.option("--output", type=click.Path(path_type=Path), help="Write the result to a new folder."),
    *READING,
    click.option("--random-seed", type=int, help="Seed for choosing rows; replaces the recipe's."),
    *TALKING,
]


def options(chosen: list[Decorator]) -> Decorator:
    """Give a command these arguments and flags, in this order in its help."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(chosen):
            command = option(command)
        return command

    return add


def leave_warnings_to_the_plan(quiet: bool) -> None:
    """Keep the warnings of recipe and data out of the log while the command runs, because the plan shows them."""
    for name in () if quiet else ("featcal_hf.preparation", "featcal_hf.data"):
        logger = logging.getLogger(name)
        click.get_current_context().call_on_close(partial(logger.setLevel, logger.level))
        logger.setLevel(logging.ERROR)


def open_console(verbosity: int) -> Console:
    """Set up the log as `-v` asks, and give what the command prints on."""
    levels = {0: logging.WARNING, 1: logging.INFO}
    logging.basicConfig(level=levels.get(verbosity, logging.DEBUG))
    datasets.disable_progress_bars()
    return Console(markup=False, emoji=False)


def stages(console: Console, quiet: bool) -> Callable[[str], None]:
    """What prints a line for each stage, or nothing."""

    def show(stage: str) -> None:
        if not quiet:
            console.print(f"{stage} ...", highlight=False, soft_wrap=True)

    return show


def show_notes(console: Console, notes: Iterable[str]) -> None:
    """Print what a person should know or decide, a line each."""
    for note in notes:
        console.print(f"note: {note}", highlight=False, soft_wrap=True)


def show_push(console: Console, report: PushReport, quiet: bool) -> None:
    """Print where a model is now, and what of it stayed here."""
    if quiet:
        return
    if report.cleaned:
        show_notes(console, [f"local paths were replaced in {', '.join(report.cleaned)}"])
    if report.left_out:
        show_notes(console, [f"stayed here: {', '.join(report.left_out)}"])
    console.print(f"Pushed {report.url}", highlight=False, soft_wrap=True)


def usable_device(device: str | None, cuda: bool) -> str:
    """The device that `--device` and `--cuda` name.

    Raises:
        BadParameter: there is no such device here.
    """
    chosen = device or ("cuda" if cuda else "cpu")
    if chosen == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator.type if accelerator is not None else "cpu"
    try:
        torch.zeros(1, device=chosen).item()
    except (RuntimeError, AssertionError) as error:
        raise click.BadParameter(f"{chosen} can't be used here: {error}", param_hint="--device") from error
    return chosen
