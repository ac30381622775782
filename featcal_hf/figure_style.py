"""How figures look: one meaning for each colour, quiet axes, sizes for a page and for a phone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter


@dataclass(frozen=True)
class Palette:
    """Colours by meaning; the models' are Okabe and Ito's, told apart with any colour vision."""

    paper: str
    ink: str
    faint: str
    grid: str
    expert: str
    merged: str
    calibrated: str


LIGHT = Palette("#ffffff", "#1c2430", "#5c6675", "#e3e7ec", "#007a5a", "#d55e00", "#0072b2")
DARK = Palette("#12171e", "#e7ebf0", "#9aa5b3", "#2a323d", "#2fbf93", "#f2913d", "#58b4e8")


@dataclass(frozen=True)
class Look:
    """How a figure is drawn.

    Attributes:
        palette: its colours.
        width: inches; a page has room for 7.6, a phone for 3.6.
    """

    palette: Palette = LIGHT
    width: float = 7.6

    @property
    def narrow(self) -> bool:
        """Whether the figure is for a phone."""
        return self.width < 5


WIDE = Look()
NARROW = Look(width=3.6)


def panels(
    look: Look, count: int, height: float, *, columns: int = 3, together: bool = True
) -> tuple[Figure, list[Axes]]:
    """A figure of `count` axes in rows, each `height` inches; `together` gives them the same y axis."""
    columns = min(count, 2 if look.narrow and count > 6 else 1 if look.narrow else columns)
    rows = -(-count // columns)
    figure = Figure(figsize=(look.width, rows * height + 0.1), layout="constrained", facecolor=look.palette.paper)
    grid = figure.subplots(rows, columns, sharey=together, squeeze=False)
    axes: list[Axes] = list(grid.flat)
    for spare in axes[count:]:
        spare.remove()
    for axis in axes[:count]:
        dress(axis, look)
    return figure, axes[:count]


def dress(axis: Axes, look: Look) -> None:
    """Quiet spines and grid, text in the palette's ink."""
    palette = look.palette
    axis.set_facecolor(palette.paper)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(palette.faint)
    axis.grid(axis="y", color=palette.grid, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors=palette.faint, labelsize=8.5, length=0, pad=4)


def title(axis: Axes, look: Look, text: str, remark: str = "") -> None:
    """A panel's title, left; a remark follows in fainter ink."""
    axis.set_title(text, loc="left", fontsize=10, fontweight="bold", color=look.palette.ink, pad=18 if remark else 8)
    if remark:
        axis.text(0, 1.02, remark, transform=axis.transAxes, fontsize=8.5, color=look.palette.faint, va="bottom")


def percents(axis: Axes, top: float) -> None:
    """A y axis from 0 that is read in percent."""
    axis.set_ylim(0, top)
    axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0 if top > 0.04 else 1))


def stacks(paths: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Blocks that follow each other in one part of the model: its name (empty where there is one) and their places."""
    found: list[tuple[str, list[int]]] = []
    for place, path in enumerate(paths):
        prefix = path.rpartition(".")[0]
        if not found or found[-1][0] != prefix:
            found.append((prefix, []))
        found[-1][1].append(place)
    if len(found) == 1:
        return [("", found[0][1])]
    return [(prefix.split(".")[0].removesuffix("_model"), places) for prefix, places in found]


def short_names(paths: Sequence[str]) -> list[str]:
    """A short name for each block: its number, after its part's name where the model has several."""
    names = [""] * len(paths)
    for part, places in stacks(paths):
        for place in places:
            number = paths[place].rpartition(".")[2]
            names[place] = f"{part} {number}" if part else number
    return names
