"""Which files of a calibrated folder are shared, and their texts without local paths."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from featcal_hf.checkpoint import open_checkpoint
from featcal_hf.errors import CheckpointError
from featcal_hf.eval_report import EVALUATION
from featcal_hf.hidden_paths import hide_paths, hide_paths_in
from featcal_hf.report import REPORT_FOLDER
from featcal_hf.save import INCOMING, REPORT, WEIGHTS, is_calibrated

_BESIDE = (
    "*.json",
    "*.model",
    "*.txt",
    "*.jinja",
    "*.md",
    "*.yml",
    "*.yaml",
    "*.py",
    "*.png",
    "*.jpg",
    "*.jpeg",
    "*.svg",
)
_NAMED = ("LICENSE*", "LICENCE*", "NOTICE*", "COPYING*", "USE_POLICY*")
_FIGURES = ("*.html", "*.png", "*.svg", "*.json", "*.csv")
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "*.index.json", "added_tokens.json")
"""Tables of a model's own, in which a path is a token or none at all."""
_TEMPLATES = ("tokenizer_config.json", "processor_config.json", "chat_template.json")
"""JSON that may hold a chat template."""
_CODE = (".py", ".jinja", ".html", ".svg")
_TEXT = (".md", ".yml", ".yaml", ".txt", ".csv")


@dataclass(frozen=True)
class Shared:
    """What is shared of a folder.

    Attributes:
        files: paths below the folder, weights last.
        texts: the files whose text had a local path in it -> their text without.
        left_out: entries of the folder that stay here.
    """

    files: list[str]
    texts: dict[str, str]
    left_out: list[str]

    def stage(self, folder: Path, stage: Path) -> None:
        """Put the files below `stage`, those that stay as they are as links."""
        for name in self.files:
            target = stage / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if name in self.texts:
                target.write_text(self.texts[name], encoding="utf-8", newline="")
            else:
                _link((folder / name).resolve(), target)


def shared_files(folder: Path, names: Mapping[str, str]) -> Shared:
    """Choose the files of a calibrated folder that others need: weights, what stands beside them, the report's figures.

    Args:
        folder: a calibrated model.
        names: local path -> what others see in its place, see `local_names`.

    Raises:
        CheckpointError: the weights are incomplete, or not those that `featcal.json` speaks of.
    """
    checkpoint = open_checkpoint(folder)
    weights = [*([checkpoint.index] if checkpoint.index is not None else []), *checkpoint.shards]
    if any(shard.startswith(INCOMING) for shard in checkpoint.shards):
        raise CheckpointError(
            f"{folder} is halfway through a calibration that was interrupted; run that command again first."
        )
    if not is_calibrated(checkpoint):
        raise CheckpointError(
            f"{folder} holds other weights than those that its {REPORT} speaks of; calibrate them first, or push a "
            "model that isn't calibrated with `hf upload`."
        )
    entries = sorted(entry.name for entry in folder.iterdir())
    beside = [
        name
        for name in entries
        if (folder / name).is_file()
        and any(fnmatchcase(name, pattern) for pattern in (*_BESIDE, *_NAMED))
        and not name.startswith(".")
        and not WEIGHTS.fullmatch(name)
    ]
    figures = [
        f"{REPORT_FOLDER}/{path.name}"
        for path in sorted((folder / REPORT_FOLDER).glob("*"))
        if path.is_file() and not path.name.startswith(".") and any(fnmatchcase(path.name, kind) for kind in _FIGURES)
    ]
    chosen = [*beside, *figures, *weights]
    texts = {name: text for name in (*beside, *figures) if (text := _public(folder, name, names)) is not None}
    _mend_hash(folder, texts)
    tops = {name.split("/")[0] for name in chosen}
    return Shared(chosen, texts, [name for name in entries if name not in tops])


def _public(folder: Path, name: str, names: Mapping[str, str]) -> str | None:
    """A file's text without local paths; None where it has none, or isn't a text."""
    path = folder / name
    if any(fnmatchcase(path.name, pattern) for pattern in _VOCABULARIES):
        return None
    if path.suffix == ".json":
        return _public_json(path, names)
    if path.suffix not in (*_CODE, *_TEXT) and not any(fnmatchcase(path.name, pattern) for pattern in _NAMED):
        return None
    try:
        with path.open(encoding="utf-8", newline="") as file:
            text = file.read()
    except ValueError:
        return None  # not a text: no path to be read in it
    cleaned = hide_paths(text, names, code=path.suffix in _CODE)
    return None if cleaned == text else cleaned


def _public_json(path: Path, names: Mapping[str, str]) -> str | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}); mend it or remove it before it is shared.") from error
    cleaned = hide_paths_in(value, names, code=path.name in _TEMPLATES)
    return None if cleaned == value else json.dumps(cleaned, indent=2, ensure_ascii=False) + "\n"


def _mend_hash(folder: Path, texts: dict[str, str]) -> None:
    """Let the evaluation speak of the report as it is shared."""
    if REPORT not in texts or not (folder / EVALUATION).is_file():
        return
    before = hashlib.sha256((folder / REPORT).read_bytes()).hexdigest()
    after = hashlib.sha256(texts[REPORT].encode()).hexdigest()
    text = texts.get(EVALUATION) or (folder / EVALUATION).read_text(encoding="utf-8")
    texts[EVALUATION] = text.replace(before, after)


def _link(source: Path, target: Path) -> None:
    try:
        os.symlink(source, target)
    except OSError:  # where links need a right that few have
        shutil.copy(source, target)
