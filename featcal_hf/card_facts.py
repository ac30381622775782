"""What a calibrated folder says of itself, read for its card: reports, config, parents; local paths are left out."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featcal_hf import evaluate as measures
from featcal_hf.errors import CardError
from featcal_hf.eval_report import EVALUATION
from featcal_hf.evaluate import Metric
from featcal_hf.hidden_paths import hide_paths_in, local_names
from featcal_hf.parents import Parent
from featcal_hf.save import REPORT

_METRICS = {metric.name: metric for metric in vars(measures).values() if isinstance(metric, Metric)}


@dataclass(frozen=True)
class Data:
    """The examples of one task.

    Attributes:
        task: the task's name.
        expert: its expert, as readers know it.
        path: the dataset's id, or `./` and the name of a local one.
        on_hub: whether it is to be found on the Hub.
        copied: it is, but was read from a local copy.
        config: name of its configuration.
        split: the rows' split.
        revision: its commit, if known.
        rows: calibrated on.
        holdout: rows on which drift was measured.
        sha256: of the rows used.
    """

    task: str
    expert: str
    path: str
    on_hub: bool
    copied: bool
    config: str | None
    split: str
    revision: str | None
    rows: int
    holdout: int
    sha256: str


@dataclass(frozen=True)
class Folder:
    """A calibrated folder's own word, without local paths.

    Attributes:
        path: the folder.
        report: what `featcal.json` holds.
        evaluation: what `featcal_eval.json` holds; None without one, or where it speaks of other weights.
        config: `config.json`.
        parents: base, experts and adapters.
        data: one for each task.
        names: local path -> what others see in its place.
        chat: the tokenizer has a chat template.
        notes: what was passed over, and why.
    """

    path: Path
    report: dict[str, Any]
    evaluation: dict[str, Any] | None
    config: dict[str, Any]
    parents: list[Parent]
    data: list[Data]
    names: dict[str, str]
    chat: bool
    notes: list[str]

    @property
    def base(self) -> Parent | None:
        """What the experts started from."""
        return next((parent for parent in self.parents if parent.role == "base"), None)

    def results(self) -> list[dict[str, str]]:
        """One row for each metric of a task: expert, merged and calibrated model, the gap recovered.

        What compares with the expert is left to `featcal_eval.json`, and a loss that stands there as perplexity too.
        """
        if self.evaluation is None:
            return []
        lines = [*self.evaluation["results"], *self.evaluation["lm_eval"]]
        told = {(line["task"], line["metric"]) for line in lines}
        return [
            _row(line)
            for line in lines
            if not (line["metric"] in _METRICS and _METRICS[line["metric"]].drift)
            and not (line["metric"] == measures.LOSS.name and (line["task"], measures.PERPLEXITY.name) in told)
        ]

    def drift(self) -> list[dict[str, str]]:
        """One row for each task: the drift of the last block's output, before and after."""
        last = self.report["blocks"][-1]["drift"]
        return [
            {
                "task": task,
                "before": f"{pair['before']['relative']:.1%}",
                "after": f"{pair['after']['relative']:.1%}",
                "cosine_before": f"{pair['before']['cosine']:.4f}",
                "cosine_after": f"{pair['after']['cosine']:.4f}",
            }
            for task, pair in last.items()
        ]

    def kept(self) -> dict[str, int]:
        """Reason -> tensors of the blocks that kept their merged values."""
        return Counter(reason for block in self.report["blocks"] for reason in block["kept"].values())

    def modules(self) -> int:
        """How many modules were calibrated."""
        return sum(len(block["modules"]) for block in self.report["blocks"])


def read_folder(path: Path) -> Folder:
    """Read what a calibrated folder says of itself.

    Raises:
        CardError: it was not calibrated, or by a version that didn't record what a card needs.
    """
    missing = not (path / REPORT).exists()
    first = "calibrate the model first" if missing else "the record is damaged: merge again, then calibrate"
    written = _read_json(path / REPORT, f"{first}: `featcal-hf calibrate RECIPE {path}`")
    if "parents" not in written:
        raise CardError(
            f"{path / REPORT} doesn't say what the model is made of: an older version wrote it; calibrate the merged "
            "model again."
        )
    names = local_names(written)
    report = hide_paths_in(written, names)
    notes: list[str] = []
    evaluation = _evaluation(path, names, notes)
    return Folder(
        path,
        report,
        evaluation,
        _read_json(path / "config.json", "a model's folder has one"),
        [_parent(parent) for parent in written["parents"]],
        [_data(task, entry, names) for task, entry in written["tasks"].items()],
        names,
        _has_chat_template(path),
        notes,
    )


def _parent(entry: Mapping[str, Any]) -> Parent:
    return Parent(**{**entry, "language": tuple(entry["language"])})


def _data(task: str, entry: Mapping[str, Any], names: Mapping[str, str]) -> Data:
    dataset = entry["dataset"]
    on_hub = entry["kind"] == "hub" or entry["read_from"] != dataset["path"]
    return Data(
        task,
        hide_paths_in(entry["expert"], names),
        dataset["path"] if on_hub else f"./{Path(dataset['path']).name}",
        on_hub,
        on_hub and entry["kind"] != "hub",
        dataset["name"],
        dataset["split"],
        dataset["revision"] or entry["commit"],
        entry["calibration_rows"],
        entry["holdout_rows"],
        entry["sha256"],
    )


def _evaluation(path: Path, names: Mapping[str, str], notes: list[str]) -> dict[str, Any] | None:
    if not (path / EVALUATION).is_file():
        return None
    found = _read_json(path / EVALUATION, "run `featcal-hf eval` again")
    if found["featcal_json_sha256"] != hashlib.sha256((path / REPORT).read_bytes()).hexdigest():
        notes.append(f"{EVALUATION} speaks of an earlier calibration and was left out; run `featcal-hf eval` again")
        return None
    cleaned: dict[str, Any] = hide_paths_in(found, names)
    return cleaned


def _row(line: Mapping[str, Any]) -> dict[str, str]:
    metric = _METRICS.get(line["metric"])

    def shown(label: str) -> str:
        if label not in line:
            return ""
        value = line[label]
        if metric is not None:
            return metric.shown(value)
        return "undefined" if value is None else f"{value:.4g}"

    recovered = line["recovered"]
    return {
        "task": line["task"],
        "metric": line["metric"],
        **{label: shown(label) for label in ("expert", "merged", "calibrated")},
        "recovered": "" if recovered is None else f"{recovered:.0%}",
    }


def _has_chat_template(path: Path) -> bool:
    if (path / "chat_template.jinja").is_file():
        return True
    config = path / "tokenizer_config.json"
    return config.is_file() and bool(_read_json(config, "mend the tokenizer").get("chat_template"))


def _read_json(path: Path, advice: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CardError(f"{path} can't be read ({error}); {advice}.") from error
    if not isinstance(value, dict):
        raise CardError(f"{path} is not a mapping; {advice}.")
    return value
