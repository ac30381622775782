"""Read from a row what the recipe names: a text, a prompt and its completion, a conversation, an image."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any

import PIL.Image

from featcal_hf.data.images import read_image
from featcal_hf.data.source import Row
from featcal_hf.errors import DataError, listed

if TYPE_CHECKING:
    from featcal_hf.recipe import Task

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
}
"""Speakers of `{from, value}` conversations -> roles of chat templates."""

Render = Callable[[list[dict[str, Any]]], str]
"""Turns of a conversation -> text, through a chat template."""


@dataclass(frozen=True)
class Content:
    """What a row holds, before any model's tokenizer or processor."""

    text: str | None = None
    target: str | None = None
    """What the decoder of an encoder-decoder is to say."""
    image: PIL.Image.Image | None = None

    def digest(self) -> str:
        """SHA-256 (hex) of the texts and pixels."""
        digest = hashlib.sha256(repr((self.text, self.target)).encode())
        if self.image is not None:
            digest.update(repr(self.image.size).encode() + self.image.tobytes())
        return digest.hexdigest()


def used_columns(task: Task, columns: list[str], *, encoder_decoder: bool) -> list[str]:
    """Name the columns that a task reads, after checking that they are there.

    Raises:
        DataError: a column is missing, a template is malformed, or the settings don't fit the kind of model.
    """
    if encoder_decoder and (task.prompt is None or task.completion is None):
        raise DataError(
            "the model is an encoder-decoder, which reads a prompt and writes a completion; "
            'give both `prompt` and `completion` (templates such as "{question}")'
        )
    wanted = {setting: [name] for setting in ("text", "messages", "image") if (name := getattr(task, setting))}
    for setting in ("prompt", "completion"):
        if (template := getattr(task, setting)) is not None:
            wanted[setting] = _template_columns(setting, template)
    if not wanted:
        raise DataError("no column is named; give one of `text`, `prompt`, `messages` or `image`")
    for setting, names in wanted.items():
        for name in names:
            if name not in columns:
                close = difflib.get_close_matches(name, columns, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; give one of these as `{setting}`"
                raise DataError(
                    f"`{setting}` names column {name!r}, which the dataset doesn't have "
                    f"(it has {listed(columns, name) or 'none'}){hint}"
                )
    return list(dict.fromkeys(name for names in wanted.values() for name in names))


def read_content(task: Task, row: Row, *, folder: Path, encoder_decoder: bool, render: Render | None) -> Content | None:
    """Read one row, or None if what it should hold is empty.

    Args:
        task: Names the columns and templates.
        row: The row, with its images still encoded.
        folder: What relative image paths start from.
        encoder_decoder: Keep the completion apart, as the decoder's text.
        render: The chat template; needed where the task names `messages`.

    Raises:
        DataError: a column holds something else than the task says, or an image can't be read.
    """
    text = target = image = None
    if task.text is not None:
        text = _string(task.text, row[task.text])
    elif task.prompt is not None:
        row = _with_words(row, task.words or {})
        text = _fill(task.prompt, row)
        target = None if task.completion is None else _fill(task.completion, row)
        if text is None or (task.completion is not None and target is None):
            return None
        if not encoder_decoder:
            text, target = text + (target or ""), None
        elif not (target or "").strip():
            return None
    elif task.messages is not None and render is not None:
        turns = _turns(task.messages, row[task.messages])
        text = render(turns) if any(str(turn.get("content") or "").strip() for turn in turns) else None
    if (task.text or task.prompt or task.messages) and not (text or "").strip():
        return None
    if task.image is not None:
        if row[task.image] is None:
            return None
        image = read_image(task.image, row[task.image], folder)
    return Content(text, target, image)


def _template_columns(setting: str, template: str) -> list[str]:
    """Columns named in a `str.format` template, those inside format specs too."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise DataError(
            f"`{setting}` {template!r} is not a template: {error}; write a brace that isn't a column's as {{{{ or }}}}"
        ) from error
    names = []
    for _, field, spec, _ in parts:
        if field is None:
            continue
        name = re.split(r"[.\[]", field, maxsplit=1)[0]
        if not name or name.isdigit():
            raise DataError(
                f"`{setting}` {template!r} has a field without a column's name; "
                "write {column}, and {{ or }} for a brace"
            )
        if "." in re.sub(r"\[[^]]*\]", "", field):
            raise DataError(
                f"`{setting}` {template!r} has the field {{{field}}}, which reaches into a value with a dot; "
                "write {column}, or {column[key]} for a part of it"
            )
        names += [name, *_template_columns(setting, spec or "")]
    return names


def _with_words(row: Row, words: Mapping[str, Mapping[int | str, str]]) -> Row:
    """The row with the words that stand for its values, class labels for instance."""
    replaced = {}
    for column, known in words.items():
        value = row[column]
        if value is not None and (not isinstance(value, int | str) or value not in known):
            raise DataError(
                f"column {column!r} holds {value!r}, and `words` has only {listed(map(repr, known))}; add it there"
            )
        replaced[column] = value if value is None else known[value]
    return {**row, **replaced}


def _fill(template: str, row: Row) -> str | None:
    """Fill a template; None where a column in it is null (the word "None" is no calibration text)."""
    if any(row[name] is None for name in _template_columns("template", template)):
        return None
    try:
        return template.format_map(row)
    except (KeyError, IndexError, AttributeError, ValueError, TypeError) as error:
        raise DataError(
            f"template {template!r} can't be filled: {error} ({type(error).__name__}); change the template or the row"
        ) from error


def _string(column: str, value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise DataError(f"column {column!r} holds {type(value).__name__}; expected text")


def _turns(column: str, value: Any) -> list[dict[str, Any]]:
    """Conversation in either convention -> turns with `role` and `content`."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise DataError(
            f"column {column!r} holds {type(value).__name__}; expected a list of turns, "
            "each with role and content (or from and value)"
        )
    turns = []
    for turn in value:
        # Arrow fills a key that only some turns have with None, and templates ask whether a key is there.
        present = {key: item for key, item in turn.items() if item is not None}
        if "role" in present:
            turns.append(present)
        elif "from" in present:
            speaker = present["from"]
            if speaker not in ROLES:
                raise DataError(f"column {column!r} has a turn from {speaker!r}; expected one of {', '.join(ROLES)}")
            turns.append({"role": ROLES[speaker], "content": present.get("value", "")})
        else:
            raise DataError(
                f"column {column!r} has a turn with {', '.join(turn) or 'nothing'}; "
                "expected role and content (or from and value)"
            )
    return turns
