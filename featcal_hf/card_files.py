"""Cards on disk: read to the letter, written in one step, kept under another name."""

from __future__ import annotations

import os
from pathlib import Path

from featcal_hf.errors import CardError
from featcal_hf.writers import sync


def read_card(path: Path) -> str | None:
    """A card to the letter, or None where there is none.

    Raises:
        CardError: it isn't a text.
    """
    if not path.is_file():
        return None
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return file.read()
    except (OSError, ValueError) as error:
        raise CardError(
            f"{path} can't be read ({error}); mend it or move it away, then `featcal-hf card` again."
        ) from error


def keep(path: Path) -> Path:
    """Keep a card as it is, under a name that nothing has yet."""
    number = 1
    while (kept := path.with_name(f"{path.name}.bak{number if number > 1 else ''}")).exists():
        number += 1
    write_bytes_as(kept, path.read_bytes())
    return kept


def write_text_as(path: Path, text: str) -> None:
    """Write a card in one step: a reader finds the old one or the new one.

    Raises:
        CardError: it can't be written.
    """
    write_bytes_as(path, text.encode())


def write_bytes_as(path: Path, content: bytes) -> None:
    """Write a file beside a card in one step.

    Raises:
        CardError: it can't be written.
    """
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_bytes(content)
        sync(new)
        os.replace(new, path)
    except OSError as error:
        raise CardError(
            f"{path} can't be written ({error}); the model is whole. Mend that and run `featcal-hf card {path.parent}`."
        ) from error
