"""Figures of several runs beside each other: a colour for each run, the merged model in grey."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from featcal_hf.figure_style import WIDE, Key, Look, block_axis, key, name_rows, panels, percents, title
from featcal_hf.figure_words import stacks
from featcal_hf.recorded import RunRecord

RUN_MARKS = ("o", "s", "D", "^", "v", "P", "X", "*")


def drift_by_run(runs: Mapping[str, RunRecord], look: Look = WIDE) -> Figure | None:
    """Relative drift by block, a panel for each task that several runs measured, a line for each run."""
    tasks = shared_tasks(runs)
    if not tasks:
        return None
    figure, axes = panels(look, len(tasks), 2.3)
    highest = 0.0
    for axis, task in zip(axes, tasks, strict=True):
        measured = {name: run for name, run in runs.items() if task in run.measured}
        first = next(iter(measured.values()))
        _by_block(axis, first, [block.drift[task].before.relative for block in first.blocks], look.palette.faint, "")
        for number, (name, run) in enumerate(runs.items()):
            if name in measured:
                after = [block.drift[task].after.relative for block in run.blocks]
                _by_block(axis, run, after, _colour(look, number), _mark(number))
                highest = max(highest, *after, *(block.drift[task].before.relative for block in run.blocks))
        block_axis(axis, look, [block.path for block in first.blocks])
        title(axis, look, task)
    for axis in axes:
        percents(axis, max(highest * 1.12, 1e-6))
    _run_key(figure, look, runs)
    return figure


def last_by_run(runs: Mapping[str, RunRecord], look: Look = WIDE) -> Figure | None:
    """Relative drift after the last block: a row for each task, a mark for each run."""
    tasks = shared_tasks(runs)
    if not tasks:
        return None
    figure, (axis,) = panels(look, 1, 0.6 + 0.5 * len(tasks))
    name_rows(axis, look, tasks)
    highest = 0.0
    for row, task in enumerate(tasks):
        for number, run in enumerate(runs.values()):
            change = run.last.drift.get(task)
            if change is not None:
                axis.plot([change.before.relative], [row], "|", color=look.palette.faint, markersize=14)
                axis.plot([change.after.relative], [row], _mark(number), color=_colour(look, number), markersize=8)
                highest = max(highest, change.before.relative, change.after.relative)
    axis.set_xlim(0, max(highest * 1.08, 1e-6))
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    axis.set_xlabel("relative drift after the last block (0 is the expert)", fontsize=8.5, color=look.palette.faint)
    _run_key(figure, look, runs)
    return figure


def shared_tasks(runs: Mapping[str, RunRecord]) -> list[str]:
    """Tasks whose drift at least two of the runs measured."""
    names = [task for run in runs.values() for task in run.measured]
    return [task for task in dict.fromkeys(names) if names.count(task) > 1]


def _by_block(axis: Axes, run: RunRecord, values: list[float], colour: str, marker: str) -> None:
    for _, places in stacks([block.path for block in run.blocks]):
        line = [values[place] for place in places]
        axis.plot(places, line, color=colour, linewidth=1.8, marker=marker, markersize=4 if len(places) <= 16 else 0)


def _run_key(figure: Figure, look: Look, runs: Mapping[str, RunRecord]) -> None:
    entries = [Key(name, _colour(look, number), _mark(number)) for number, name in enumerate(runs)]
    key(figure, look, [Key("merged", look.palette.faint), *entries], columns=1 if look.narrow else 3)


def _colour(look: Look, number: int) -> str:
    palette = look.palette
    return (palette.calibrated, palette.merged, palette.expert, palette.ink)[number % 4]


def _mark(number: int) -> str:
    return RUN_MARKS[number % len(RUN_MARKS)]
