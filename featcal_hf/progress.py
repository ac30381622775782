"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from featcal_hf.calibrate import REPLAY, OnStep, Step


@contextmanager
def step_progress(console: Console, quiet: bool) -> Iterator[OnStep]:
    """Progress over blocks x tasks, with the time left; yields the callback of `calibrate_blocks`.

    Args:
        console: where to show it.
        quiet: show nothing.
    """
    if quiet:
        yield lambda step: None
    elif not console.is_terminal:
        yield _Lines(console)
    else:
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        try:
            yield _Bar(bar)
        finally:
            bar.stop()


class _Bar:
    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=None)

    def __call__(self, step: Step) -> None:
        self._bar.start()
        self._bar.update(
            self._task,
            description=f"{step.path} {step.doing}",
            total=step.blocks * step.parts,
            completed=step.block * step.parts + step.part,
        )


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.perf_counter()
        self._first: int | None = None

    def __call__(self, step: Step) -> None:
        if step.part > 0:
            return
        where = f"block {step.block + 1}/{step.blocks} {step.path}"
        if step.doing == REPLAY:
            self._console.print(f"{where}, finished before", highlight=False)
            return
        if self._first is None or step.block <= self._first:
            self._first, self._started = step.block, time.perf_counter()
        elapsed, done = time.perf_counter() - self._started, step.block - self._first
        left = f", about {elapsed / done * (step.blocks - step.block):.0f} s left" if done else ""
        tasks = f", {step.parts - 1} tasks" if step.parts > 1 else ""
        self._console.print(f"{where}{tasks}, {elapsed:.0f} s{left}", highlight=False)
