"""What a demonstration found, and the tables that show it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class DomainLosses:
    """Mean loss per token (nats) on one domain's held-out rows, of four models.

    Attributes:
        domain: its name.
        base: of the base.
        expert: of the domain's own expert.
        merged: of the merged model as mergekit wrote it.
        calibrated: of the same folder after calibration.
    """

    domain: str
    base: float
    expert: float
    merged: float
    calibrated: float

    @property
    def recovered(self) -> float:
        """Share of the gap between merged model and expert that calibration closed; nan where there is no gap."""
        gap = self.merged - self.expert
        return (self.merged - self.calibrated) / gap if gap > 0 else math.nan


@dataclass(frozen=True)
class Continuations:
    """How three models go on from the start of one domain's text, greedily."""

    prompt: str
    expert: str
    merged: str
    calibrated: str


@dataclass(frozen=True)
class DemoResult:
    """What the demonstration found.

    Attributes:
        domains: held-out losses, domain by domain.
        continuations: texts to compare, domain by domain; empty if there are none.
        merge_weight: task arithmetic's weight of every expert.
        modules: linear modules and norms that calibration changed.
        blocks: blocks they are in.
        seconds: wall time of each step, in order.
        folder: where everything was written; None if it was temporary.
    """

    domains: tuple[DomainLosses, ...]
    continuations: tuple[Continuations, ...]
    merge_weight: float
    modules: int
    blocks: int
    seconds: Mapping[str, float]
    folder: Path | None

    @property
    def recovered(self) -> float:
        """Share of the gap recovered, mean over domains; nan where one has no gap."""
        return sum(losses.recovered for losses in self.domains) / len(self.domains)


def show_result(console: Console, result: DemoResult) -> None:
    """Print the held-out losses, what calibration recovered of the gap, the texts, and the time of every step."""
    table = Table(
        "domain",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),  # fits into 80 columns
        title=f"Held-out loss (perplexity); task arithmetic, weight {result.merge_weight:g} for each expert",
        title_justify="left",
    )
    for column in ("base", "expert", "merged", "calibrated", "recovered"):
        table.add_column(column, justify="right")
    for losses in result.domains:
        models_losses = (losses.base, losses.expert, losses.merged, losses.calibrated)
        cells = [f"{loss:.3f} ({math.exp(loss):.1f})" for loss in models_losses]
        table.add_row(losses.domain, *cells, _share(losses.recovered))
    table.add_section()
    table.add_row("mean", *[""] * 4, _share(result.recovered))
    console.print(table)
    if sum(losses.merged - losses.base for losses in result.domains) > 0:
        console.print(
            "At this weight the merge is worse than its base: a lower one merges better, and leaves less to recover.",
            highlight=False,
            soft_wrap=True,
        )
    if result.continuations:
        console.print(_texts(result.continuations))
    console.print(
        f"Calibrated {result.modules} modules in {result.blocks} blocks; embeddings, last norm and head are as merged.",
        highlight=False,
        soft_wrap=True,
    )
    steps = ", ".join(f"{step} {seconds:.0f} s" for step, seconds in result.seconds.items())
    console.print(f"{steps}; {sum(result.seconds.values()):.0f} s in all", highlight=False, soft_wrap=True)


def _texts(continuations: tuple[Continuations, ...]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title="How they go on, greedily",
        title_justify="left",
        show_lines=True,
    )
    for column in ("prompt", "expert", "merged", "calibrated"):
        table.add_column(column, overflow="fold")
    for texts in continuations:
        cells = (texts.prompt, texts.expert, texts.merged, texts.calibrated)
        table.add_row(*[Text(cell.strip("\n")) for cell in cells])
    return table


def _share(recovered: float) -> str:
    return "no gap" if math.isnan(recovered) else f"{recovered:.0%}"
