"""The report's figures of what held-out rows show: a record in, one matplotlib figure out, None where it has no data.

Merged is always orange, calibrated blue, the expert green. Figures belong to no window and no global state.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from featcal_hf.figure_style import WIDE, Key, Look, Style, block_axis, key, name_rows, panels, percents, title
from featcal_hf.figure_words import percent, stacks
from featcal_hf.recorded import DriftChange, EvalLine, EvalRecord, OutputRecord, RunRecord

DISTANCES = ("KL from expert", "logit L2 to expert", "top-1 as expert", "cosine with expert")
"""Metrics of an evaluation that are distances from the expert: they are drawn as output drift, not as metrics."""


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
            _line(axis, places, merged, look.palette.merged)
            _line(axis, places, calibrated, look.palette.calibrated)
        percents(axis, max(highest * 1.12, 1e-6))
        block_axis(axis, look, paths)
        title(axis, look, task, f"last block: {percent(before[-1])} → {percent(after[-1])}")
    key(figure, look, _models(look))
    return figure


def split_figure(run: RunRecord, look: Look = WIDE) -> Figure | None:
    """Local mismatch and upstream propagation by block, relative to the expert's features, a panel for each task."""
    if any(_parts(change) is None for block in run.blocks for change in block.drift.values()) or not run.measured:
        return None
    figure, axes = panels(look, len(run.measured), 2.3)
    paths = [block.path for block in run.blocks]
    highest = 0.0
    for axis, task in zip(axes, run.measured, strict=True):
        series = [_parts(block.drift[task]) or (0.0,) * 4 for block in run.blocks]
        highest = max(highest, *(max(parts) for parts in series))
        for _, places in stacks(paths):
            for number, (colour, style) in enumerate(_split_styles(look)):
                _line(axis, places, [series[place][number] for place in places], colour, style)
        block_axis(axis, look, paths)
        title(axis, look, task)
    for axis in axes:
        percents(axis, max(highest * 1.12, 1e-6))
    names = ("merged: own", "merged: from earlier", "calibrated: own", "calibrated: from earlier")
    entries = [Key(name, colour, style=style) for name, (colour, style) in zip(names, _split_styles(look), strict=True)]
    key(figure, look, entries, columns=1 if look.narrow else 4)
    return figure


def cosine_figure(run: RunRecord, look: Look = WIDE) -> Figure | None:
    """Mean cosine to the expert after the last block, by task; whiskers are a standard deviation over samples."""
    if not run.measured:
        return None
    figure, (axis,) = panels(look, 1, 0.6 + 0.5 * len(run.measured))
    changes = [run.last.drift[task] for task in run.measured]
    name_rows(axis, look, run.measured)
    for row, change in enumerate(changes):
        for part, colour in ((change.before, look.palette.merged), (change.after, look.palette.calibrated)):
            spread = part.cosine_spread or 0.0
            ends = [part.cosine - spread, min(part.cosine + spread, 1.0)]
            axis.plot(ends, [row, row], color=colour, linewidth=1.6, alpha=0.55)
        _dumbbell(axis, look, row, change.before.cosine, change.after.cosine)
    axis.set_xlabel("cosine to the expert's features (1 is the same direction)", fontsize=8.5, color=look.palette.faint)
    lowest = min(min(c.before.cosine - (c.before.cosine_spread or 0), c.after.cosine) for c in changes)
    axis.set_xlim(lowest - 0.06 * (1 - lowest) - 1e-6, 1 + 0.03 * (1 - lowest) + 1e-6)
    key(figure, look, _models(look, marks=True))
    return figure


def histogram_figure(run: RunRecord, look: Look = WIDE) -> Figure | None:
    """How many held-out rows have which mean cosine to the expert after the last block, a panel for each task."""
    outcomes = {task: outcome for task, outcome in run.last.outcome.items() if outcome.cosines_before}
    if not outcomes:
        return None
    figure, axes = panels(look, len(outcomes), 1.9)
    for axis, (task, outcome) in zip(axes, outcomes.items(), strict=True):
        values = [*outcome.cosines_before, *outcome.cosines_after]
        edges = np.linspace(min(values), max(1.0, max(values)), 17)
        for found, colour in (
            (outcome.cosines_before, look.palette.merged),
            (outcome.cosines_after, look.palette.calibrated),
        ):
            axis.hist(found, bins=list(edges), color=colour, alpha=0.35, linewidth=0)
            axis.hist(found, bins=list(edges), color=colour, histtype="step", linewidth=1.6)
        axis.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
        axis.xaxis.set_major_locator(MaxNLocator(nbins=4))
        title(axis, look, task, f"{len(outcome.cosines_after)} held-out rows")
        axis.set_xlabel("cosine of a row", fontsize=8.5, color=look.palette.faint)
    axes[0].set_ylabel("rows", fontsize=8.5, color=look.palette.faint)
    key(figure, look, _models(look))
    return figure


def feature_figure(run: RunRecord, look: Look = WIDE) -> Figure | None:
    """Final features of held-out rows along the expert's first two principal components, a panel for each task."""
    views = {task: outcome.features for task, outcome in run.last.outcome.items() if outcome.features}
    if not views:
        return None
    figure, axes = panels(look, len(views), 2.6, together=False)
    for axis, (task, view) in zip(axes, views.items(), strict=True):
        for points, colour, marker in (
            (view.merged, look.palette.merged, "o"),
            (view.expert, look.palette.expert, "D"),
            (view.calibrated, look.palette.calibrated, "o"),
        ):
            x, y = zip(*points, strict=True)
            axis.scatter(x, y, s=17, color=colour, marker=marker, alpha=0.7, linewidth=0)
        axis.set_xticks([])
        axis.set_yticks([])
        axis.margins(0.08)
        axis.spines["left"].set_visible(True)
        axis.spines["left"].set_color(look.palette.faint)
        title(axis, look, task)
        axis.set_xlabel(f"first axis ({view.explained[0]:.0%} of variance)", fontsize=8.5, color=look.palette.faint)
        second = view.explained[1] if len(view.explained) > 1 else 0.0
        axis.set_ylabel(f"second ({second:.0%})", fontsize=8.5, color=look.palette.faint)
    key(figure, look, [Key("expert", look.palette.expert, "D"), *_models(look, marks=True)])
    return figure


def output_figure(run: RunRecord, look: Look = WIDE) -> Figure | None:
    """Output drift on held-out rows, by task: KL from the expert, distance of logits, same first choice."""
    outputs = {task: outcome.output for task, outcome in run.last.outcome.items() if outcome.output}
    if not outputs:
        return None
    figure, axes = panels(look, 3, 0.9 + 0.45 * len(outputs), together=False)
    readings: tuple[tuple[str, str, Callable[[OutputRecord], float | None], bool], ...] = (
        ("KL from the expert", "nats, 0 is best", lambda found: found.kl, False),
        ("distance of logits", "L2, 0 is best", lambda found: found.logit_l2, False),
        ("same first choice", "100% is best", lambda found: found.agreement, True),
    )
    for axis, (name, remark, value, share) in zip(axes, readings, strict=True):
        name_rows(axis, look, list(outputs))
        title(axis, look, name, remark)
        pairs = [(_number(value(change.before)), _number(value(change.after))) for change in outputs.values()]
        for row, (before, after) in enumerate(pairs):
            _dumbbell(axis, look, row, before, after)
        values = [one for pair in pairs for one in pair if np.isfinite(one)]
        if share:
            axis.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
            axis.set_xlim(min([0.9, *values]) - 0.04, 1.01)
        else:
            axis.set_xlim(0, max([1e-9, *values]) * 1.12)
        axis.xaxis.set_major_locator(MaxNLocator(nbins=4))
    key(figure, look, _models(look, marks=True))
    return figure


def metric_figure(evaluation: EvalRecord, look: Look = WIDE) -> Figure | None:
    """Each metric by task: expert, merged and calibrated, and what share of the gap calibration closed."""
    lines = [line for line in [*evaluation.results, *evaluation.lm_eval] if line.metric not in DISTANCES]
    metrics = list(dict.fromkeys(line.metric for line in lines if line.calibrated is not None))
    if "perplexity" in metrics and "loss per token" in metrics:
        metrics.remove("loss per token")
    if not metrics:
        return None
    groups = [[line for line in lines if line.metric == metric and line.calibrated is not None] for metric in metrics]
    figure, axes = panels(look, len(groups), 0.9 + 0.5 * max(map(len, groups)), columns=2, together=False)
    for axis, metric, group in zip(axes, metrics, groups, strict=True):
        _metric_panel(axis, look, metric, group)
    key(figure, look, [Key("expert", look.palette.expert, "D"), *_models(look, marks=True)])
    return figure


def svg(figure: Figure) -> str:
    """A figure as SVG text, the same for the same figure; its letters stay letters."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "featcal_hf"}):
        _settle(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def png(figure: Figure) -> bytes:
    """A figure as PNG, 200 dots an inch."""
    _settle(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=200, metadata={"Software": None})
    return buffer.getvalue()


def _settle(figure: Figure) -> None:
    """Lay a figure out once; each further file would do it again, twice."""
    if figure.get_layout_engine() is not None:
        figure.draw_without_rendering()
        figure.set_layout_engine("none")


def _metric_panel(axis: Axes, look: Look, metric: str, lines: Sequence[EvalLine]) -> None:
    remarks = [f" · {line.recovered:.0%} of the gap closed" if line.recovered is not None else "" for line in lines]
    name_rows(axis, look, [line.task for line in lines], remarks)
    values = [value for line in lines for value in (line.expert, line.merged, line.calibrated) if value is not None]
    for row, line in enumerate(lines):
        _dumbbell(axis, look, row, _number(line.merged), _number(line.calibrated))
        if line.expert is not None:
            axis.plot([line.expert], [row], "D", color=look.palette.expert, markersize=6)
    margin = 0.08 * (max(values) - min(values)) or 0.05 * abs(values[0]) or 1.0
    axis.set_xlim(min(values) - margin, max(values) + margin)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=5))
    title(axis, look, metric, "higher is better" if lines[0].higher_is_better else "lower is better")


def _dumbbell(axis: Axes, look: Look, row: int, before: float, after: float) -> None:
    axis.plot([before, after], [row, row], color=look.palette.faint, linewidth=1.2)
    axis.plot([before], [row], "o", color=look.palette.merged, markersize=7)
    axis.plot([after], [row], "o", color=look.palette.calibrated, markersize=7)


def _line(axis: Axes, places: Sequence[int], values: Sequence[float], colour: str, style: Style = "-") -> None:
    size = 3.5 if len(places) <= 16 else 0
    axis.plot(places, values, color=colour, linewidth=1.8, linestyle=style, marker="o", markersize=size)


def _models(look: Look, marks: bool = False) -> list[Key]:
    marker = "o" if marks else ""
    return [Key("merged", look.palette.merged, marker), Key("calibrated", look.palette.calibrated, marker)]


def _split_styles(look: Look) -> list[tuple[str, Style]]:
    merged, calibrated = look.palette.merged, look.palette.calibrated
    return [(merged, ":"), (merged, "-"), (calibrated, ":"), (calibrated, "-")]


def _parts(change: DriftChange) -> tuple[float, ...] | None:
    values = [
        value for part in (change.before, change.after) for value in (part.relative_mismatch, part.relative_propagation)
    ]
    return None if None in values else tuple(value for value in values if value is not None)


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
