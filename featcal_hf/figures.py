"""The report's figures: what a calibration recorded in, one matplotlib figure out.

Merged is always orange, calibrated blue, the expert green. Figures belong to no window and no global state.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from featcal_hf.figure_style import WIDE, Look, panels, percents, short_names, stacks, title
from featcal_hf.recorded import RunRecord


def drift_figure(run: RunRecord, look: Look = WIDE) -> Figure | None:
    """Relative drift by block, merged against calibrated, a panel for each task; None where none was measured."""
    if not run.measured:
        return None
    figure, axes = panels(look, len(run.measured), 2.3)
    paths = [block.path for block in run.blocks]
    highest = max(
        max(change.before.relative, change.after.relative) for block in run.blocks for change in block.drift.values()
    )
    for axis, task in zip(axes, run.measured, strict=True):
        changes = [block.drift[task] for block in run.blocks]
        before = [change.before.relative for change in changes]
        after = [change.after.relative for change in changes]
        for _, places in stacks(paths):
            merged, calibrated = [before[place] for place in places], [after[place] for place in places]
            axis.fill_between(places, merged, calibrated, color=look.palette.calibrated, alpha=0.1, linewidth=0)
            axis.plot(places, merged, color=look.palette.merged, linewidth=1.8, marker="o", markersize=_mark(places))
            axis.plot(
                places, calibrated, color=look.palette.calibrated, linewidth=1.8, marker="o", markersize=_mark(places)
            )
        percents(axis, max(highest * 1.12, 1e-6))
        _block_axis(axis, look, paths)
        title(axis, look, task, f"last block: {before[-1]:.1%} → {after[-1]:.1%}")
    _name_the_models(figure, look)
    return figure


def svg(figure: Figure) -> str:
    """A figure as SVG text, the same for the same figure; its letters stay letters."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "featcal_hf"}):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def png(figure: Figure) -> bytes:
    """A figure as PNG, 200 dots an inch."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=200, metadata={"Software": None})
    return buffer.getvalue()


def _mark(places: Sequence[int]) -> float:
    return 3.5 if len(places) <= 16 else 0


def _name_the_models(figure: Figure, look: Look) -> None:
    """The colours' meaning in one line under the figure, in the colours themselves."""
    handles = [
        Line2D([], [], color=colour, linewidth=2.4, label=label)
        for colour, label in ((look.palette.merged, "merged"), (look.palette.calibrated, "calibrated"))
    ]
    figure.legend(
        handles=handles, loc="outside lower left", ncols=2, frameon=False, fontsize=9, labelcolor=look.palette.ink
    )


def _block_axis(axis: Axes, look: Look, paths: Sequence[str]) -> None:
    """Blocks in forward order; where the model has several parts, each is named under its first block."""
    parts = stacks(paths)
    axis.set_xlim(-0.5, len(paths) - 0.5)
    axis.set_xlabel("block", fontsize=8.5, color=look.palette.faint)
    if len(parts) == 1:
        names = short_names(paths)
        axis.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        axis.xaxis.set_major_formatter(lambda x, _: names[int(x)] if 0 <= x < len(names) and x == int(x) else "")
        return
    axis.set_xticks([places[0] for _, places in parts], [name for name, _ in parts], ha="left")
    for _, places in parts[1:]:
        axis.axvline(places[0] - 0.5, color=look.palette.faint, linewidth=0.8, linestyle=(0, (2, 3)))
