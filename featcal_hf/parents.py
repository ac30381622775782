"""What a merge is made of, as others can find it: ids on the Hub, commits, and what each parent's own card says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard
from mergekit.common import ModelPath

from featcal_hf.checkpoint import Checkpoint
from featcal_hf.compare import Models, streamed_of
from featcal_hf.experts import AdaptedModel
from featcal_hf.hub_ids import is_on_hub
from featcal_hf.recipe import Recipe

CARD = "README.md"


@dataclass(frozen=True)
class Parent:
    """A model or an adapter that a merge is made of.

    Attributes:
        role: base, expert or adapter.
        path: as the recipe has it.
        id: on the Hub; None for a local folder.
        folder: where it was read.
        revision: commit of a Hub snapshot.
        license: of its own card, as are the next three; None where the card says nothing of it.
        license_name: of an `other` licence.
        license_link: of an `other` licence.
        language: its languages' codes.
        card_problem: why its card couldn't be read.
    """

    role: str
    path: str
    id: str | None
    folder: str
    revision: str | None
    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    language: tuple[str, ...] = ()
    card_problem: str | None = None

    @property
    def name(self) -> str:
        """How a reader knows it: its id, or the name of the local folder."""
        return self.id or f"./{Path(self.path).name}"

    @property
    def copied(self) -> bool:
        """It is on the Hub, but was read from a local copy, of which no commit is known."""
        return self.id is not None and self.revision is None

    def as_dict(self) -> dict[str, Any]:
        """The parent as JSON-able values."""
        return asdict(self) | {"language": list(self.language)}


def describe_parents(recipe: Recipe, models: Models) -> list[Parent]:
    """Every model and adapter that the merge is made of, each once, the base first."""
    found: list[Parent] = []
    references = [(recipe.base, models.base, "base"), *((*item, "expert") for item in models.experts.items())]
    for reference, model, role in references:
        if reference is None or model is None:
            continue
        adapted = isinstance(model, AdaptedModel)
        found.append(_parent(reference.model, streamed_of(model).checkpoint, "base" if adapted else role))
        if isinstance(model, AdaptedModel) and reference.lora is not None:
            found.append(_parent(reference.lora, model.adapter.checkpoint, "adapter"))
    first: dict[tuple[str, str | None], Parent] = {}
    for parent in found:
        first.setdefault((parent.path, parent.revision), parent)
    return list(first.values())


def _parent(path: ModelPath, checkpoint: Checkpoint, role: str) -> Parent:
    return Parent(
        role,
        path.path,
        path.path if is_on_hub(path.path) else None,
        str(checkpoint.folder),
        checkpoint.revision,
        **_own_card(checkpoint.folder),
    )


def _own_card(folder: Path) -> dict[str, Any]:
    """What the card in a model's folder says of licence and language, or why it can't be read."""
    if not (folder / CARD).is_file():
        return {"card_problem": "there is no card beside its weights"}
    try:
        data = ModelCard.load(folder / CARD, ignore_metadata_errors=True).data
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        return {"card_problem": f"its card can't be read ({type(error).__name__})"}
    said = {key: _text(data.get(key)) for key in ("license", "license_name", "license_link")}
    languages = data.get("language")
    listed = languages if isinstance(languages, list) else [languages]
    return {**said, "language": tuple(code for code in listed if isinstance(code, str))}


def _text(value: object) -> str | None:
    """A licence as text; cards may list several."""
    if isinstance(value, list):
        return ", ".join(map(str, value)) or None
    return value if isinstance(value, str) else None
