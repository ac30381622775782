"""Draws the pages' figures: two diagrams, the demonstration's drift, and what each setting does to its result.

    featcal-hf demo --work-dir ./demo
    python benchmarks/settings.py ./demo --output docs/figures/settings.jsonl
    python docs/figures.py

What is measured stands beside the figures: settings.jsonl, and demo.json, the demonstration's featcal.json cut to what
is drawn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from featcal_hf.figure_style import LIGHT, WIDE, dress, panels, percents, title
from featcal_hf.figures import svg

FOLDER = Path(__file__).parent / "figures"
INK, FAINT, GRID = LIGHT.ink, LIGHT.faint, LIGHT.grid
EXPERT, MERGED, CALIBRATED = LIGHT.expert, LIGHT.merged, LIGHT.calibrated
Lines = list[dict[str, Any]]

RESULTS = {
    "SmolLM2-135M": ("smollm2-full-*.json", "mean loss"),
    "DINOv2-small, 6 blocks": ("dinov2-6-blocks-*.json", "mean accuracy"),
    "MiniLM": ("minilm.json", "mean accuracy"),
}
"""Model -> its files in results/, and what they measure."""
CELL = re.compile(
    r"(?P<seed>(full/)?seed \d+/)((?P<kind>adaptive|paper)/(?P<rows>\d+)/test|at [^/]+/(?P<count>\d+)/(?P<setting>\w+))"
)


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure to draw on, with coordinates in tenths of an inch."""
    figure = Figure(figsize=(width / 10, height / 10), facecolor=LIGHT.paper)
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, width), ylim=(0, height))
    axis.axis("off")
    return figure, axis


def box(
    axis: Axes, x: float, y: float, width: float, height: float, text: str, color: str, *, solid: bool = False
) -> None:
    """A rounded box with its text in the middle."""
    shape = FancyBboxPatch(
        (x, y),
        width,
        height,
        boxstyle="round,pad=0,rounding_size=1",
        edgecolor=color,
        linewidth=1.4,
        facecolor=color if solid else LIGHT.paper,
    )
    axis.add_patch(shape)
    axis.text(
        x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=9, color=LIGHT.paper if solid else INK
    )


def arrow(axis: Axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    """An arrow from one place to another."""
    axis.annotate(
        "", end, start, arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0}
    )


def block_diagram() -> Figure:
    """What happens to one linear module: two features in, one ridge regression, a new weight."""
    figure, axis = canvas(76, 33)
    for y, color, name, feature, weight in (
        (25, EXPERT, "expert", "its own features", "expert's\nweight"),
        (2, MERGED, "merged", "features after the\ncalibrated blocks", "merged\nweight"),
    ):
        axis.text(1, y + 3, name, va="center", fontsize=10, fontweight="bold", color=color)
        box(axis, 12, y, 17, 6, feature, color)
        arrow(axis, (29, y + 3), (41, y + 3), color)
        box(axis, 41, y, 12, 6, weight, color)
        arrow(axis, (53, y + 3), (60, y + 3), color)
        axis.text(
            61, y + 3, "its output" if name == "expert" else "its output, so far", va="center", fontsize=9, color=FAINT
        )
    box(
        axis,
        15,
        13,
        32,
        7,
        "ridge regression: one for each linear module,\nall tasks' rows at once, in closed form",
        CALIBRATED,
        solid=True,
    )
    arrow(axis, (20, 25), (20, 20), EXPERT)
    arrow(axis, (44, 25), (44, 20), EXPERT)
    arrow(axis, (20, 8), (20, 13), MERGED)
    arrow(axis, (44, 8), (44, 13), MERGED)
    axis.text(45, 10.5, "the anchor", va="center", fontsize=8.5, color=FAINT)
    arrow(axis, (47, 16.5), (56, 16.5), CALIBRATED)
    box(axis, 56, 13, 17, 7, "calibrated weight,\nthe same shape", CALIBRATED)
    return figure


def parked_diagram() -> Figure:
    """Forwards parked at a block: what is done, what is in memory, what waits."""
    figure, axis = canvas(76, 31)
    blocks, current, rows = 8, 3, 4
    for number in range(blocks):
        x = 17 + 7 * number
        color = CALIBRATED if number < current else MERGED if number == current else GRID
        box(axis, x, 20, 5, 6, str(number + 1), color, solid=number <= current)
        axis.text(
            x + 2.5,
            28,
            "calibrated" if number == 1 else "in work" if number == current else "on disk" if number == 6 else "",
            ha="center",
            va="center",
            fontsize=8.5,
            color=FAINT,
        )
    axis.text(1, 23, "blocks", va="center", fontsize=10, fontweight="bold", color=INK)
    axis.text(1, 13, "forwards, one\na batch of rows", va="center", fontsize=10, fontweight="bold", color=INK)
    for row in range(rows):
        y = 17 - 2.6 * row
        axis.plot([17, 17 + 7 * current - 1], [y, y], color=CALIBRATED, linewidth=1.6)
        axis.plot([17 + 7 * current - 1], [y], marker="o", markersize=6, color=MERGED)
        axis.plot([17 + 7 * current, 17 + 7 * blocks - 2], [y, y], color=GRID, linewidth=1.6, linestyle=(0, (2, 2)))
    box(
        axis,
        17,
        0.5,
        54,
        5.5,
        "in memory: block 4 of the merged model, the base and one expert,\nand the parked features of all rows",
        FAINT,
    )
    arrow(axis, (17 + 7 * current + 2.5, 6), (17 + 7 * current + 2.5, 20), FAINT)
    return figure


def drift_figure(blocks: Lines) -> Figure:
    """The demonstration's drift by block, split into what a block adds and what earlier ones pass on."""
    figure, axes = panels(WIDE, 3, 2.5)
    for axis, task in zip(axes, blocks[0]["drift"], strict=True):
        for when, color, shift in (("before", MERGED, -0.2), ("after", CALIBRATED, 0.2)):
            changes = [block["drift"][task][when] for block in blocks]
            places = [number + 1 + shift for number in range(len(blocks))]
            scale = [change["relative"] / (change["mismatch"] + change["propagation"]) for change in changes]
            own = [change["mismatch"] * part for change, part in zip(changes, scale, strict=True)]
            passed = [change["propagation"] * part for change, part in zip(changes, scale, strict=True)]
            axis.bar(places, passed, 0.36, color=color, alpha=0.45)
            axis.bar(places, own, 0.36, bottom=passed, color=color)
        percents(axis, 0.6)
        axis.set_xticks(range(1, len(blocks) + 1))
        axis.set_xlabel("block", fontsize=8.5, color=FAINT)
        first, last = (blocks[-1]["drift"][task][when]["relative"] for when in ("before", "after"))
        title(axis, WIDE, task, f"last block: {first:.0%} → {last:.0%}")
    return figure


def mean(line: dict[str, Any]) -> float:
    """The share of the gap recovered, mean over the seeds."""
    return sum(line["recovered"]) / len(line["recovered"])


def curve(axis: Axes, lines: Lines, place: Callable[[dict[str, Any]], float], color: str, label: str) -> None:
    """Recovered gap against a setting: the mean over seeds, and their range."""
    lines = sorted(lines, key=place)
    places = [place(line) for line in lines]
    low, high = ([choose(line["recovered"]) for line in lines] for choose in (min, max))
    axis.fill_between(places, low, high, color=color, alpha=0.15, linewidth=0)
    axis.plot(
        places, [mean(line) for line in lines], color=color, linewidth=1.8, marker="o", markersize=3.5, label=label
    )


def finish(axis: Axes, name: str, bottom: float = 0.0, top: float = 1.0) -> None:
    """Axis, label, legend."""
    axis.set_xlabel(name, fontsize=9, color=INK)
    percents(axis, top)
    axis.set_ylim(bottom, top)
    axis.legend(frameon=False, fontsize=8, labelcolor=INK)


def lambda_figure(lines: Lines) -> Figure:
    """Recovered gap against λ, for few and for many rows."""
    figure, axes = panels(WIDE, 2, 2.9, columns=2)
    for axis, samples in zip(axes, (4, 64), strict=True):
        chosen = [line for line in lines if line["axis"] == "lambda" and line["samples"] == samples]
        for scale, rho, color in (("frobenius", 1, MERGED), ("trace", 1, EXPERT), ("trace", 2, FAINT)):
            wanted = {"scale": scale, "rho": rho}
            fixed = [line for line in chosen if wanted.items() <= line["settings"].items()]
            curve(axis, fixed, lambda line: float(line["settings"]["lambda"]), color, f"scale {scale}, rho {rho}")
        (adaptive,) = (line for line in chosen if "lambda" not in line["settings"])
        axis.axhline(
            mean(adaptive), color=CALIBRATED, linewidth=1.8, linestyle=(0, (4, 2)), label="adaptive (no lambda)"
        )
        axis.set_xscale("log")
        title(axis, WIDE, f"{samples} rows per task", f"{samples * 128:,} tokens")
        finish(axis, "lambda")
    axes[0].set_ylabel("gap recovered", fontsize=9, color=INK)
    return figure


def blend_figure(lines: Lines) -> Figure:
    """Recovered gap against ρ and α, for few and many rows and at two merge weights."""
    figure, axes = panels(WIDE, 2, 2.9, columns=2)
    looks = {(64, 1.0): CALIBRATED, (4, 1.0): MERGED, (64, 0.5): EXPERT}
    for axis, key in zip(axes, ("rho", "alpha"), strict=True):
        for (samples, weight), color in looks.items():
            chosen = [
                line for line in lines if line["axis"] == key and (line["samples"], line["weight"]) == (samples, weight)
            ]
            name = f"{samples} rows, merge weight {weight:g}"
            curve(axis, chosen, lambda line, key=key: float(line["settings"][key]), color, name)
        title(axis, WIDE, key)
        finish(axis, key)
    axes[0].set_ylabel("gap recovered", fontsize=9, color=INK)
    return figure


def samples_figure(lines: Lines) -> Figure:
    """Recovered gap against the rows per task."""
    figure = Figure(figsize=(4.4, 2.9), layout="constrained", facecolor=LIGHT.paper)
    axis = figure.subplots()
    dress(axis, WIDE)
    chosen = [line for line in lines if line["axis"] == "samples"]
    curve(axis, chosen, lambda line: float(line["samples"]), CALIBRATED, "adaptive")
    axis.set_xscale("log", base=2)
    axis.set_xticks([1, 4, 16, 64], labels=["1", "4", "16", "64"])
    finish(axis, "rows of 128 tokens, per task")
    axis.set_ylabel("gap recovered", fontsize=9, color=INK)
    return figure


def results_figure() -> Figure:
    """Recovered gap against the rows per task: real models, by the adaptive ridge and by the paper's settings."""
    figure, axes = panels(WIDE, len(RESULTS), 2.9, columns=len(RESULTS))
    for axis, (model, (pattern, unit)) in zip(axes, RESULTS.items(), strict=True):
        cells: dict[str, dict[str, float]] = {}
        for path in sorted(FOLDER.parent.glob(f"results/{pattern}")):
            cells |= json.loads(path.read_text(encoding="utf-8"))["cells"]
        for setting, color, label in (("paper", MERGED, "the paper's settings"), ("adaptive", CALIBRATED, "defaults")):
            points = shares(cells, setting)
            seeds = list(points.values())
            lowest, highest = [min(found) for found in seeds], [max(found) for found in seeds]
            axis.fill_between(list(points), lowest, highest, color=color, alpha=0.15, linewidth=0)
            middle = [fmean(found) for found in seeds]
            axis.plot(list(points), middle, color=color, linewidth=1.8, marker="o", markersize=3.5, label=label)
        axis.set_xscale("log", base=2)
        axis.set_xticks([8, 64, 256], labels=["8", "64", "256"])
        title(axis, WIDE, model, f"three seeds, {unit}")
        finish(axis, "rows per task")
    axes[0].set_ylabel("gap recovered", fontsize=9, color=INK)
    return figure


def shares(cells: dict[str, dict[str, float]], setting: str) -> dict[int, list[float]]:
    """Rows per task -> each seed's share of the gap that a setting recovers."""
    found: dict[int, list[float]] = {}
    for name in cells:
        match = CELL.fullmatch(name)
        if match is None or setting not in (match["setting"], match["kind"]):
            continue
        references = [other for other in cells if other.startswith(match["seed"])]
        (merged,) = (other for other in references if other.endswith(("merged", "merged/test")))
        (expert,) = (other for other in references if other.endswith(("expert", "expert/test")))
        worst, value, best = (fmean(task_values(cells[place])) for place in (merged, name, expert))
        found.setdefault(int(match["rows"] or match["count"]), []).append((value - worst) / (best - worst))
    return dict(sorted(found.items()))


def task_values(cell: dict[str, float]) -> list[float]:
    """Losses or accuracies of a cell of results/*.json, which may hold seconds too."""
    return [value for name, value in cell.items() if name != "seconds"]


def drawn() -> dict[str, Figure]:
    """Every figure by its name."""
    lines = [json.loads(line) for line in (FOLDER / "settings.jsonl").read_text(encoding="utf-8").splitlines()]
    blocks = json.loads((FOLDER / "demo.json").read_text(encoding="utf-8"))["blocks"]
    return {
        "block": block_diagram(),
        "parked": parked_diagram(),
        "drift": drift_figure(blocks),
        "lambda": lambda_figure(lines),
        "blends": blend_figure(lines),
        "samples": samples_figure(lines),
        "results": results_figure(),
    }


if __name__ == "__main__":
    for name, figure in drawn().items():
        (FOLDER / f"{name}.svg").write_text(svg(figure), encoding="utf-8")
