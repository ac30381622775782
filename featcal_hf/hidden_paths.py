"""Local paths out of texts that others will read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_PART = r"[^\s\"'`<>|:*?,;(){}\[\]\\/]+"
_FOLDERS = "home|Users|root|tmp|mnt|var|opt|srv|data|media|private|workspace|content|kaggle|scratch|work"
_WINDOWS = r"(?<!\w)[A-Za-z]:[\\/](?!/)[^\s\"'<>|]+"
_URL = r"file://[^\s\"'<>]+"
_IN_TEXT = re.compile(rf"{_URL}|(?<![\w:/.~&-])(?:(?:/{_PART}){{2,}}/?|~[\w.-]*(?:/{_PART})+/?)|{_WINDOWS}")
_IN_CODE = re.compile(rf"{_URL}|(?<![\w:/.~&+=-])/(?:{_FOLDERS})(?:/{_PART})+/?|{_WINDOWS}")
_SEPARATOR = re.compile(r"[/\\]")


def local_names(report: Mapping[str, Any]) -> dict[str, str]:
    """The local paths that a run's report speaks of -> what a reader is to see in their place.

    A model or dataset of the Hub that was read from a folder is its id, anything else `./` and its last part.
    """
    names: dict[str, str] = {}
    for parent in report.get("parents", []):
        public = parent["id"] or _last(parent["path"])
        names |= {parent["folder"]: public, parent["path"]: public}
    for entry in report.get("models", {}).values():
        for key in ("folder", "adapter"):
            if entry.get(key):
                names.setdefault(entry[key], _last(entry[key]))
    for task in report.get("tasks", {}).values():
        path, read_from = task["dataset"]["path"], task["read_from"]
        on_hub = task["kind"] == "hub" or read_from != path
        names[read_from] = path if on_hub else _last(path)
        if not on_hub:
            names[path] = _last(path)
            names |= {file: _last(file) for file in _files(task["dataset"]["data_files"])}
    return {path: name for path, name in names.items() if path != name and _SEPARATOR.search(path)}


def hide_paths(text: str, names: Mapping[str, str] | None = None, *, code: bool = False) -> str:
    """A text with its local paths replaced: those in `names` by their names, other absolute ones by their last part.

    Args:
        text: what others will read.
        names: see `local_names`.
        code: it is a program, a page or a template, in which a slash may be anything: the absolute paths looked for are
            those below the folders where people keep their own.
    """
    if names:
        pattern = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        bounded = re.compile(rf"(?<![\w/.~-])(?:{pattern})(?![\w-]|\.\w)")
        text = bounded.sub(lambda match: names[match[0]], text)
    return (_IN_CODE if code else _IN_TEXT).sub(lambda match: _last(match[0]), text)


def hide_paths_in(value: Any, names: Mapping[str, str], *, code: bool = False) -> Any:
    """A JSON value with the local paths in its texts, keys included, replaced as `hide_paths` does."""
    if isinstance(value, str):
        return hide_paths(value, names, code=code)
    if isinstance(value, list):
        return [hide_paths_in(item, names, code=code) for item in value]
    if isinstance(value, dict):
        return {hide_paths(key, names, code=code): hide_paths_in(item, names, code=code) for key, item in value.items()}
    return value


def first_path(text: str) -> str | None:
    """The first absolute local path in a text; None if it has none."""
    match = _IN_TEXT.search(text)
    return match[0] if match else None


def _last(path: str) -> str:
    """`./` and a path's last part, which tells what it is and not where."""
    return "./" + _SEPARATOR.split(path.rstrip("/\\"))[-1]


def _files(given: Any) -> list[str]:
    if isinstance(given, str):
        return [given]
    parts = given.values() if isinstance(given, dict) else given or []
    return [file for part in parts for file in _files(part)]
