"""The report's figures of the solve: how far modules moved, what their Grams are like, what it all cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from rich.filesize import decimal

from featcal_hf.figure_style import WIDE, Look, panels, title
from featcal_hf.figure_words import duration, short_input, short_modules, short_names
from featcal_hf.recorded import RunRecord

STAGE_WORDS = {
    "load": "loading weights",
    "forwards": "forwards",
    "moments": "moments",
    "solve": "solving",
    "write": "writing",
    "drift": "drift (held-out rows)",
    "other": "preparing, the rest",
}
MOST_LABELLED_CELLS = 24


def step_figure(run: RunRecord, look: Look = WIDE) -> Figure:
    """How far each module moved from the merged weights: blocks by modules."""
    values = {
        (module.name, block.path): module.step
        for block in run.blocks
        for module in block.modules
        if math.isfinite(module.step)
    }
    names = list(dict.fromkeys(module.name for block in run.blocks for module in block.modules))
    figure, axes = _maps(look, 1, len(names), len(run.blocks))
    _heat(axes[0], look, run, names, values, lambda step: f"{step:.0%}".rstrip("%"))
    title(axes[0], look, "step by module", "‖new − merged‖ / ‖merged‖ in percent")
    return figure


def gram_figure(run: RunRecord, look: Look = WIDE) -> Figure | None:
    """Condition number and dominance of the Grams that modules were solved over: blocks by inputs."""
    if not any(block.inputs for block in run.blocks):
        return None
    names = list(dict.fromkeys(short_input(item.modules) for block in run.blocks for item in block.inputs))
    inputs = {(short_input(item.modules), block.path): item for block in run.blocks for item in block.inputs}
    figure, axes = _maps(look, 2, len(names), len(run.blocks))
    conditions = {place: math.log10(max(item.condition, 1.0)) for place, item in inputs.items()}
    _heat(axes[0], look, run, names, conditions, lambda power: f"{power:.1f}")
    title(axes[0], look, "condition number", "power of ten; float32 resolves 7")
    dominances = {place: item.dominance for place, item in inputs.items()}
    _heat(axes[1], look, run, names, dominances, lambda share: f"{share:.0%}".rstrip("%"), top=1.0)
    title(axes[1], look, "dominance", "largest direction's share, percent")
    return figure


def cost_figure(run: RunRecord, look: Look = WIDE) -> Figure | None:
    """Seconds by stage, and the memory that the process held in each."""
    costs = {stage: cost for stage, cost in run.costs.items() if cost.seconds > 0}
    if not costs:
        return None
    held = {stage: cost.resident_bytes for stage, cost in costs.items() if cost.resident_bytes is not None}
    figure, axes = panels(look, 2 if held else 1, 0.7 + 0.34 * len(costs), columns=2, together=False)
    total = sum(cost.seconds for cost in costs.values())
    title(axes[0], look, "time", f"{duration(run.seconds)} in all")
    _bars(
        axes[0],
        look,
        {STAGE_WORDS.get(stage, stage): cost.seconds for stage, cost in costs.items()},
        lambda seconds: f"{duration(seconds)} · {seconds / total:.0%}",
    )
    if held:
        peak = run.peak_bytes
        title(axes[1], look, "memory of the process", f"peak {decimal(peak)}" if peak is not None else "")
        _bars(
            axes[1],
            look,
            {STAGE_WORDS.get(stage, stage): float(bytes_) for stage, bytes_ in held.items()},
            lambda held: decimal(int(held)),
        )
    return figure


def _maps(look: Look, count: int, modules: int, blocks: int) -> tuple[Figure, list[Axes]]:
    """Axes for heat maps: on a page blocks go to the right, on a phone down."""
    height = 2.6 + 0.2 * blocks if look.narrow else 1.2 + 0.24 * modules
    return panels(look, count, height, columns=1, together=False)


def _heat(
    axis: Axes,
    look: Look,
    run: RunRecord,
    names: Sequence[str],
    values: dict[tuple[str, str], float],
    words: Callable[[float], str],
    top: float | None = None,
) -> None:
    """Cells of one colour, the stronger the larger the value, so that they suit light and dark paper alike."""
    paths = [block.path for block in run.blocks]
    highest = top if top is not None else max([1e-12, *values.values()])
    cells, colours = [], []
    across = len(names) if look.narrow else len(paths)
    for (name, path), value in values.items():
        module, block = names.index(name), paths.index(path)
        column, row = (module, block) if look.narrow else (block, module)
        cells.append(Rectangle((column - 0.47, row - 0.45), 0.94, 0.9))
        strength = 0.06 + 0.94 * min(max(value / highest, 0.0), 1.0)
        colours.append(to_rgba(look.palette.calibrated, strength))
        if across <= MOST_LABELLED_CELLS:
            ink = look.palette.paper if strength > 0.55 else look.palette.ink
            axis.text(column, row, words(value), ha="center", va="center", fontsize=7.5, color=ink)
    axis.add_collection(PatchCollection(cells, facecolors=colours, linewidths=0))
    axis.grid(visible=False)
    axis.spines["bottom"].set_visible(False)
    modules, blocks = short_modules(names), short_names(paths)
    columns, rows = (modules, blocks) if look.narrow else (blocks, modules)
    every = 1 if look.narrow else max(1, -(-len(columns) // 20))
    axis.set_xlim(-0.5, len(columns) - 0.5)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    several = any(" " in name for name in blocks)
    axis.set_xticks(
        range(0, len(columns), every),
        columns[::every],
        rotation=90 if look.narrow or (several and len(columns) > 8) else 0,
    )
    axis.set_yticks(range(len(rows)), rows)
    if look.narrow:
        axis.set_ylabel("block", fontsize=8.5, color=look.palette.faint)
    else:
        axis.set_xlabel("block", fontsize=8.5, color=look.palette.faint)


def _bars(axis: Axes, look: Look, values: dict[str, float], words: Callable[[float], str]) -> None:
    rows = list(range(len(values)))
    axis.barh(rows, list(values.values()), height=0.6, color=look.palette.calibrated)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_yticks(rows, list(values))
    axis.set_xlim(0, max([1e-9, *values.values()]) * 1.45)
    axis.set_xticks([])
    axis.grid(visible=False)
    axis.spines["bottom"].set_visible(False)
    for row, value in zip(rows, values.values(), strict=True):
        axis.annotate(
            words(value),
            (value, row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=look.palette.ink,
        )
