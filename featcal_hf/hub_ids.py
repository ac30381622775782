"""What may be the id of a model or dataset on the Hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, but only in its __init__


def id_problem(text: str) -> str | None:
    """Why a text can't be an id, None where it can."""
    try:
        validate_repo_id(text)
    except HFValidationError as error:
        return str(error)
    return "a part of it begins with a dot" if text.startswith(".") else None


def is_on_hub(path: str) -> bool:
    """Whether a model or dataset of this name is one of the Hub: an id by its form, and nothing local."""
    return id_problem(path) is None and not Path(path).exists()
