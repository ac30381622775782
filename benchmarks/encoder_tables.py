"""The tables of dinov2.py and minilm.py, in Markdown, from their cells: mean and standard deviation over seeds."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import Any

Accuracies = dict[str, float]

CELL = re.compile(r"seed (\d+)/(?P<setting>[^/]+)/(?P<samples>\d+)/test")
GRID = re.compile(r"seed (\d+)/try (?P<settings>.+)/(?P<samples>\d+)/validation")


def tables(cells: dict[str, Any], tasks: Sequence[str]) -> str:
    """Accuracies of all models on test rows; then the grid of settings on validation rows, if there is one."""
    seeds = [seed for seed in sorted({name.split("/")[0] for name in cells}) if f"{seed}/merged/test" in cells]
    weights = [f"{cells[f'{seed}/weight']} ({seed})" for seed in seeds]
    lines = [
        f"Merge weights: {', '.join(weights)}",
        "",
        f"| model | examples per task | seeds | mean accuracy | gap recovered | {' | '.join(tasks)} |",
        "|---" * (5 + len(tasks)) + "|",
        *(row(cells, seeds, model, None, tasks) for model in ("base", "expert", "merged")),
    ]
    found = {(int(match["samples"]), match["setting"]) for name in cells if (match := CELL.fullmatch(name))}
    lines += [row(cells, seeds, setting, samples, tasks) for samples, setting in sorted(found)]
    return "\n".join([*lines, *grid(cells)])


def row(cells: dict[str, Any], seeds: Sequence[str], model: str, samples: int | None, tasks: Sequence[str]) -> str:
    """One model's accuracies, over the seeds that have the cell."""
    middle = f"/{model}/test" if samples is None else f"/{model}/{samples}/test"
    present = [seed for seed in seeds if seed + middle in cells]
    values: list[Accuracies] = [cells[seed + middle] for seed in present]
    means = [statistics.mean(value.values()) for value in values]
    share = ""
    if samples is not None:
        gaps = [
            [statistics.mean(cells[f"{seed}/{name}/test"].values()) for name in ("merged", "expert")]
            for seed in present
        ]
        shares = [100 * (mean - merged) / (expert - merged) for mean, (merged, expert) in zip(means, gaps, strict=True)]
        share = f"{spread(shares, 0)} %"
    each = [f"{statistics.mean(value[task] for value in values):.3f}" for task in tasks]
    shown = ["" if samples is None else str(samples), str(len(present)), spread(means, 4), share, *each]
    return f"| {model} | {' | '.join(shown)} |"


def grid(cells: dict[str, Any]) -> list[str]:
    """Mean validation accuracy for each setting (down) and number of examples (across)."""
    found: dict[tuple[str, int], list[float]] = {}
    for name, value in cells.items():
        if match := GRID.fullmatch(name):
            found.setdefault((match["settings"], int(match["samples"])), []).append(statistics.mean(value.values()))
    if not found:
        return []
    settings = list(dict.fromkeys(place[0] for place in found))
    samples = sorted({place[1] for place in found})
    lines = ["", "Mean validation accuracy, examples per task:", ""]
    lines += [f"| setting | {' | '.join(map(str, samples))} |", "|---" * (1 + len(samples)) + "|"]
    return lines + [
        f"| {setting} | {' | '.join(spread(found.get((setting, count), []), 4) for count in samples)} |"
        for setting in settings
    ]


def spread(values: Sequence[float], digits: int) -> str:
    """Mean ± standard deviation."""
    if not values:
        return ""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"
