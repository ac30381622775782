"""EleutherAI's lm-evaluation-harness: run it if it is installed, and read the results that it writes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from featcal_hf.errors import DataError
from featcal_hf.evaluate import Metric

EXTRA = 'pip install "featcal_hf[lm-eval]"'
LABELS = ("expert", "merged", "calibrated")
LOWER_IS_BETTER = re.compile(r"perplexity|bits_per_byte|brier|loss|^(wer|cer|ter)$")
"""Metrics that fall, where a results file doesn't say so itself."""


@dataclass(frozen=True)
class HarnessScore:
    """One number of the harness: its task, and its metric with the filter that was put on the answers."""

    task: str
    metric: Metric
    value: float | None


def check_harness() -> None:
    """Refuse to start where the harness isn't installed.

    Raises:
        DataError: says what to install.
    """
    if find_spec("lm_eval") is None:
        raise DataError(
            f"--lm-eval needs EleutherAI's harness, which isn't installed; run `{EXTRA}`, or run it elsewhere and give "
            "the files that it writes as --lm-eval-results"
        )


def run_harness(
    folder: Path, tasks: Sequence[str], *, device: str, batch_size: int | None, trust_remote_code: bool
) -> dict[str, Any]:
    """Run harness tasks on the model in a folder, through the harness's own Python interface.

    Raises:
        DataError: it doesn't know a task, or fails.
    """
    harness: Any = import_module("lm_eval")
    try:
        results: dict[str, Any] = harness.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(folder), "dtype": "auto", "trust_remote_code": trust_remote_code},
            tasks=list(tasks),
            batch_size=batch_size or "auto",
            device=device,
            log_samples=False,
        )
    except (KeyError, ValueError, OSError) as error:
        raise DataError(f"--lm-eval {','.join(tasks)}: the harness says {error!r} on {folder}") from error
    return results


def read_results(argument: str, folders: Mapping[str, Path]) -> tuple[str, list[HarnessScore]]:
    """Read a results file of the harness and tell which model it is about.

    Args:
        argument: the file's path, or `expert=`, `merged=` or `calibrated=` and the path.
        folders: where the models are, by the same labels, for files that name their model's folder.

    Raises:
        DataError: it can't be read, isn't a results file, or isn't about one of the models.
    """
    label, sign, path = argument.partition("=")
    if not sign or label not in LABELS:
        label, path = "", argument
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"--lm-eval-results {path} can't be read ({error}); give a results_*.json of lm-eval"
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get("results"), dict):
        raise DataError(f"--lm-eval-results {path} has no `results`; give a results_*.json as lm-eval writes it")
    if not label:
        model = _model_of(content)
        found = [name for name, folder in folders.items() if model and Path(model).resolve() == folder.resolve()]
        if not found:
            raise DataError(
                f"--lm-eval-results {path} is about {model or 'a model that it does not name'}, which is none of "
                f"{', '.join(str(folder) for folder in folders.values())}; say which it is, as in "
                f"`--lm-eval-results merged={path}` ({', '.join(LABELS)})"
            )
        label = found[0]
    return label, parse_results(content)


def parse_results(content: Mapping[str, Any]) -> list[HarnessScore]:
    """The numbers of a results file; subtasks of a group are left out, the group's own mean stands for them.

    Keys are `metric,filter`; those of standard errors, names and lengths are passed over.
    """
    results: Mapping[str, Mapping[str, Any]] = content["results"]
    groups = {group: parts for group, parts in (content.get("group_subtasks") or {}).items() if parts}
    inside = {part for group, parts in groups.items() if _numbers(results.get(group, {})) for part in parts}
    scores = []
    for task, values in results.items():
        if task in inside:
            continue
        directions = (content.get("higher_is_better") or {}).get(task) or {}
        for (name, chosen), value in _numbers(values).items():
            direction = directions.get(name)
            higher = direction if isinstance(direction, bool) else not LOWER_IS_BETTER.search(name)
            shown = name if chosen in ("", "none") else f"{name} ({chosen})"
            scores.append(HarnessScore(task, Metric(shown, higher, 4), value if math.isfinite(value) else None))
    return scores


def _numbers(values: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    found = {}
    for key, value in values.items():
        name, comma, chosen = key.partition(",")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if comma and is_number and not name.endswith("_stderr"):
            found[name, chosen] = float(value)
    return found


def _model_of(content: Mapping[str, Any]) -> str | None:
    """The folder or id of the model that a results file is about."""
    config = content.get("config")
    arguments = config.get("model_args") if isinstance(config, dict) else None
    if isinstance(arguments, dict) and isinstance(arguments.get("pretrained"), str):
        return str(arguments["pretrained"])
    if isinstance(arguments, str) and (match := re.search(r"(?:^|,)pretrained=([^,]+)", arguments)):
        return match[1]
    name = content.get("model_name")
    return name if isinstance(name, str) else None
