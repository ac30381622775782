"""What an evaluation found: one line for each metric of a task, and the file that keeps them."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from featcal_hf import evaluate as measures
from featcal_hf.errors import CheckpointError, DataError
from featcal_hf.evaluate import Metric
from featcal_hf.harness import HarnessScore
from featcal_hf.recipe import Recipe
from featcal_hf.writers import write_text

EVALUATION = "featcal_eval.json"


@dataclass(frozen=True)
class Line:
    """One line of the table: a metric of a task for each model that was measured.

    Attributes:
        task: the recipe's task, or the harness's.
        metric: what the numbers are.
        values: `expert`, `merged`, `calibrated` -> value; None where the metric has no value.
    """

    task: str
    metric: Metric
    values: dict[str, float | None]

    @property
    def expert(self) -> float | None:
        """What to compare with: the expert's value; of drift, that of an expert compared with itself."""
        return self.metric.ideal if self.metric.drift else self.values.get("expert")

    @property
    def recovered(self) -> float | None:
        """Share of the gap between merged model and expert that calibration closed; None without a gap or a value."""
        return measures.recovered(self.metric, self.expert, self.values.get("merged"), self.values.get("calibrated"))

    @property
    def has_gap(self) -> bool | None:
        """Whether the expert is better than the merged model; None where one has no value."""
        merged = self.values.get("merged")
        if self.expert is None or merged is None:
            return None
        return measures.has_gap(self.metric, self.expert, merged)

    def as_dict(self) -> dict[str, Any]:
        """The line as JSON-able values."""
        return {
            "task": self.task,
            "metric": self.metric.name,
            "higher_is_better": self.metric.higher_is_better,
            **self.values,
            "has_gap": self.has_gap,
            "recovered": self.recovered,
        }


@dataclass(frozen=True)
class EvalReport:
    """What an evaluation found; `as_dict` is what `featcal_eval.json` holds.

    Attributes:
        recipe: the recipe.
        lines: the metrics of the recipe's tasks, in its order.
        harness: the same of lm-evaluation-harness tasks.
        tasks: task -> expert, rows used and their hash, counts behind the metrics, what couldn't be measured and why.
        models: label -> folder and commit.
        calibration: SHA-256 of the `featcal.json` beside the calibrated weights.
        device: where models ran.
        seconds: of the whole evaluation.
        card: the model card that has the results; None where none was written.
        notes: what a person should know of it.
    """

    recipe: Recipe
    lines: list[Line]
    harness: list[Line]
    tasks: dict[str, dict[str, Any]]
    models: dict[str, dict[str, str | None]]
    calibration: str
    device: str
    seconds: float
    card: Path | None = None
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-able values."""
        packages = ("featcal_hf", "torch", "transformers", "peft", "datasets")
        return {
            "recipe": self.recipe.source,
            "merge_method": self.recipe.merge.merge_method,
            "featcal_json_sha256": self.calibration,
            "models": self.models,
            "tasks": self.tasks,
            "results": [line.as_dict() for line in self.lines],
            "lm_eval": [line.as_dict() for line in self.harness],
            "versions": {name: version(name) for name in packages} | {"python": platform.python_version()},
            "device": self.device,
            "seconds": round(self.seconds, 2),
        }


def harness_lines(reports: list[tuple[str, list[HarnessScore]]]) -> list[Line]:
    """One line for each number of the harness, from (label, scores) of each model.

    Raises:
        DataError: two are of the same model.
    """
    lines: dict[tuple[str, str], Line] = {}
    for label, scores in reports:
        for score in scores:
            line = lines.setdefault((score.task, score.metric.name), Line(score.task, score.metric, {}))
            if label in line.values:
                raise DataError(
                    f"--lm-eval-results: two files have {score.metric.name} of {score.task} for the {label} model; "
                    "give one file for each model"
                )
            line.values[label] = score.value
    return list(lines.values())


def write_report(report: EvalReport, path: Path) -> None:
    """Write a report as JSON.

    Raises:
        CheckpointError: it can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(report.as_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    except OSError as error:
        raise CheckpointError(f"{path} can't be written ({error}); name another file with --output.") from error
