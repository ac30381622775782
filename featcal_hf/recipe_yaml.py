"""One YAML document whose every value knows its line and column, so that errors can point at it."""

from __future__ import annotations

import difflib
import os
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from featcal_hf.errors import RecipeError, listed

Location = tuple[Any, ...]
"""The keys and list indices that lead from the top of the document to a value."""

_MAX_VALUES = 100_000  # aliases multiply: nine short lines can stand for a billion values
# What PyYAML lets out of int, float, chr, its booleans and its dates, instead of an error with a position.
_ESCAPING = (ValueError, OverflowError, KeyError, AttributeError, TypeError)
_MERGE_TAG = "tag:yaml.org,2002:merge"
_VALUE_TAG = "tag:yaml.org,2002:value"


@dataclass(frozen=True)
class Document:
    """A mapping read from YAML, with positions.

    Attributes:
        path: the file, as the user named it.
        text: the file's content, verbatim.
        root: the composed node of the top-level mapping.
        data: the same mapping as plain Python values.
    """

    path: Path
    text: str
    root: Any
    data: dict[Any, Any]

    def error(self, location: Location, problem: str, *, at_key: bool = False) -> RecipeError:
        """The error to raise about the value at `location` (or its key), as `file:line:column: name problem`.

        Where `location` isn't written in the document, the position is that of the closest value around it.
        """
        key, value, _ = self._find(location)
        mark = (key if at_key and key is not None else value).start_mark
        return _error(self.path, mark.line, mark.column, f"{name(location)} {problem}")

    def written(self, location: Location) -> Location:
        """The longest beginning of `location` that is written in the document."""
        return location[: self._find(location)[2]]

    def check_keys(self, location: Location, known: Iterable[str]) -> None:
        """Refuse keys of the mapping at `location` that are not among `known`.

        Raises:
            RecipeError: names the closest known key.
        """
        names = list(known)
        for key in self.value(location):
            if key not in names:
                close = difflib.get_close_matches(str(key), names, n=1)
                advice = f"did you mean {close[0]!r}?" if close else "remove it or use one of these keys."
                problem = f"is not a known key; {advice} The known keys are {listed(names, str(key))}."
                raise self.error((*location, key), problem, at_key=True)

    def value(self, location: Location) -> Any:
        """The value at `location`, all of which is written in the document."""
        value: Any = self.data
        for part in location:
            value = value[part]
        return value

    def _find(self, location: Location) -> tuple[Any, Any, int]:
        """The key node (None for list items and the top), the value node, and how many parts led there."""
        key, value = None, self.root
        for depth, part in enumerate(location):
            step = _step(value, part)
            if step is None:
                return key, value, depth
            key, value = step
        return key, value, len(location)


def name(location: Location) -> str:
    """A location as the user would write it: `featcal.tasks[1].model`."""
    text = ""
    for part in location:
        if isinstance(part, str) and part and all(char.isalnum() or char in "_-" for char in part):
            text += f".{part}" if text else part
        else:
            text += f"[{shown(part)}]"
    return text or "the recipe"


def shown(value: object) -> str:
    """A value as error messages show it, shortened where it is long."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 120
    return short.repr(value)


def read_document(path: Path) -> Document:
    """Read the one YAML mapping in `path`.

    Raises:
        RecipeError: the file is missing or isn't UTF-8, isn't YAML, holds no or several documents, something
            other than a mapping, a key twice, an alias that contains itself, or more than 100,000 values.
    """
    text = _read_text(path)
    loader = _loader(path, text)
    try:
        root = loader.get_single_node()
        if root is None:
            raise RecipeError(f"{path}: the recipe is empty; write a mergekit recipe with a featcal section.")
        start = root.start_mark
        if not isinstance(root, yaml.MappingNode):
            problem = f"the recipe is a {root.id}, expected a mapping; write `key: value` lines, as mergekit does."
            raise _error(path, start.line, start.column, problem)
        _check_nodes(path, loader, root, {})
        data = loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        mark: Any = error.problem_mark or error.context_mark
        raise _error(path, mark.line, mark.column, _yaml_problem(error)) from error
    except RecursionError as error:
        raise RecipeError(f"{path}: the YAML is nested too deeply to be a recipe; flatten it.") from error
    except _ESCAPING as error:
        mark = loader.get_mark()
        problem = f"this isn't YAML that mergekit reads ({error}); mend the line."
        raise _error(path, mark.line, mark.column, problem) from error
    if not isinstance(data, dict):
        problem = f"the recipe is a {type(data).__name__}, expected a mapping; remove its tag."
        raise _error(path, start.line, start.column, problem)
    return Document(path, text, root, data)


def _loader(path: Path, text: str) -> Any:
    try:
        return yaml.SafeLoader(text)
    except yaml.reader.ReaderError as error:
        line, column = _line_and_column(text[: error.position])
        problem = f"the character {text[error.position]!r} isn't allowed in YAML; remove it."
        raise _error(path, line, column, problem) from error


def _read_text(path: Path) -> str:
    if path.is_dir():
        raise RecipeError(
            f"{path} is a folder, expected a recipe: the mergekit YAML comes first and the model's folder second; swap "
            "them if that is what happened."
        )
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise RecipeError(f"{path}: the recipe can't be read ({reason}); give the path of a mergekit YAML.") from error
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line, column = _line_and_column(content[: error.start].decode("utf-8"))
        problem = f"the byte 0x{content[error.start]:02x} isn't UTF-8; save the recipe as UTF-8 text."
        raise _error(path, line, column, problem) from error


def _check_nodes(path: Path, loader: Any, node: Any, sizes: dict[int, int | None]) -> int:
    """Find what PyYAML passes over or fails on without a position; count the values `node` stands for."""
    size = sizes.get(id(node), 1)
    mark = node.start_mark
    if size is None:
        raise _error(path, mark.line, mark.column, "this value contains itself through an alias; write it out.")
    if id(node) in sizes:
        return size
    sizes[id(node)] = None
    if isinstance(node, yaml.ScalarNode):
        _check_scalar(path, loader, node)
    elif isinstance(node, yaml.SequenceNode):
        size += sum(_check_nodes(path, loader, item, sizes) for item in node.value)
    else:
        _check_duplicates(path, node)
        size += sum(_check_nodes(path, loader, part, sizes) for pair in node.value for part in pair)
    if size > _MAX_VALUES:
        problem = f"this stands for more than {_MAX_VALUES} values, aliases written out; use fewer aliases."
        raise _error(path, mark.line, mark.column, problem)
    sizes[id(node)] = size
    return size


def _check_scalar(path: Path, loader: Any, node: Any) -> None:
    if node.tag in (_MERGE_TAG, _VALUE_TAG):  # these have a meaning only as a key, and no value of their own
        return
    try:
        loader.construct_object(node)
    except _ESCAPING as error:
        kind = node.tag.rpartition(":")[2]
        problem = f"{shown(node.value)} looks like a YAML {kind} but isn't one; put it in quotes if it is text."
        raise _error(path, node.start_mark.line, node.start_mark.column, problem) from error


def _check_duplicates(path: Path, mapping: Any) -> None:
    lines: dict[tuple[str, str], int] = {}
    for key, _ in mapping.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        if (key.tag, key.value) in lines:
            line = lines[key.tag, key.value] + 1
            problem = f"the key {shown(key.value)} is already given in line {line}; remove one of the two."
            raise _error(path, key.start_mark.line, key.start_mark.column, problem)
        lines[key.tag, key.value] = key.start_mark.line


def _step(node: Any, part: Any) -> tuple[Any, Any] | None:
    if isinstance(node, yaml.SequenceNode) and type(part) is int and part < len(node.value):
        return None, node.value[part]
    if isinstance(node, yaml.MappingNode):
        constructor = yaml.SafeLoader("")
        for key, value in reversed(node.value):  # keys merged in by `<<` stand before the mapping's own, which win
            if isinstance(key, yaml.ScalarNode) and constructor.construct_object(key) == part:
                return key, value
    return None


def _yaml_problem(error: yaml.MarkedYAMLError) -> str:
    if error.context == "expected a single document in the stream":
        return "a second document starts here, and mergekit-yaml reads only one; move it to a file of its own."
    reason = " ".join(part for part in (error.context, error.problem) if part)
    return f"this isn't YAML that mergekit reads ({reason}); mend the line."


def _line_and_column(before: str) -> tuple[int, int]:
    return before.count("\n"), len(before) - (before.rfind("\n") + 1)


def _error(path: Path, line: int, column: int, problem: str) -> RecipeError:
    return RecipeError(f"{path}:{line + 1}:{column + 1}: {problem}")
