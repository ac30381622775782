"""How figures look: one meaning for each colour, quiet axes, sizes for a page and for a phone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from featcal_hf.figure_words import short_names, stacks


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


Style = Literal["-", ":"]


@dataclass(frozen=True)
class Key:
    """What a colour means: a line, or a mark where one is given."""

    label: str
    colour: str
    marker: str = ""
    style: Style = "-"


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


def literal(text: str) -> str:
    """A name as it is: matplotlib would read what stands between two dollars as a formula."""
    return text.replace("$", r"\$")


def title(axis: Axes, look: Look, text: str, remark: str = "") -> None:
    """A panel's title, left; a remark follows in fainter ink."""
    axis.set_title(
        literal(text), loc="left", fontsize=10, fontweight="bold", color=look.palette.ink, pad=18 if remark else 8
    )
    if remark:
        axis.text(0, 1.02, remark, transform=axis.transAxes, fontsize=8.5, color=look.palette.faint, va="bottom")


def percents(axis: Axes, top: float) -> None:
    """A y axis from 0 that is read in percent."""
    axis.set_ylim(0, top)
    axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0 if top > 0.04 else 1))


def name_rows(axis: Axes, look: Look, names: Sequence[str], remarks: Sequence[str] | None = None) -> None:
    """A row for each task, its name above the row, so that long names take no width from the numbers."""
    axis.set_ylim(len(names) - 0.6, -0.75)
    axis.set_yticks([])
    axis.grid(axis="x", color=look.palette.grid, linewidth=0.8)
    for row, name in enumerate(names):
        remark = remarks[row] if remarks else ""
        axis.annotate(
            literal(name + remark),
            (0, row),
            xycoords=("axes fraction", "data"),
            xytext=(0, 8),
            textcoords="offset points",
            fontsize=8.5,
            color=look.palette.ink,
        )


def key(figure: Figure, look: Look, entries: Sequence[Key], columns: int | None = None) -> None:
    """The colours' meaning in a line under the figure."""
    handles = [
        Line2D(
            [],
            [],
            color=entry.colour,
            linewidth=0 if entry.marker else 2.2,
            linestyle=entry.style,
            marker=entry.marker,
            markersize=7,
            label=literal(entry.label if entry.label[:1] != "_" else f" {entry.label}"),  # else it is left out
        )
        for entry in entries
    ]
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=columns or len(entries),
        frameon=False,
        fontsize=9,
        labelcolor=look.palette.ink,
        handlelength=1.6,
        columnspacing=1.4,
    )


def block_axis(axis: Axes, look: Look, paths: Sequence[str]) -> None:
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
