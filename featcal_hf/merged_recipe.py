"""Whether a merged folder was made by the recipe that it is calibrated with: mergekit leaves its own copy there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mergekit.config import MergeConfiguration

from featcal_hf.errors import RecipeError
from featcal_hf.recipe import Recipe
from featcal_hf.recipe_merge import read_merge
from featcal_hf.recipe_yaml import read_document, shown

MERGED_BY = "mergekit_config.yml"
MOST_DIFFERENCES = 3


def other_recipe(recipe: Recipe, folder: Path) -> list[str]:
    """What differs between the recipe and the one that a folder was merged by, in one sentence; empty if nothing does.

    Mergekit's part is compared, as mergekit reads it. A folder without a copy of its recipe says nothing.
    """
    path = folder / MERGED_BY
    if not path.is_file():
        return []
    try:
        merged_by = read_merge(read_document(path)).configuration
    except RecipeError as error:
        return [f"{folder} can't be compared with the recipe, because its own copy of it can't be read: {error}"]
    mine, theirs = _values(recipe.merge), _values(merged_by)
    changed = [place for place in {**mine, **theirs} if mine.get(place) != theirs.get(place)]
    if not changed:
        return []
    told = [f"{place} is {_word(mine, place)}, there {_word(theirs, place)}" for place in changed[:MOST_DIFFERENCES]]
    more = f", and {len(changed) - len(told)} more" if len(changed) > len(told) else ""
    return [
        f"{folder} was merged by another recipe than {recipe.path} (its {MERGED_BY}): {'; '.join(told)}{more}. Merge "
        "again, or calibrate with the recipe that it was merged by"
    ]


def _values(configuration: MergeConfiguration) -> dict[str, Any]:
    """Every value of a recipe by its place; models are known by their names, whatever their order."""
    values: dict[str, Any] = {}

    def walk(value: Any, place: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{place}.{key}" if place else key)
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            for index, item in enumerate(value):
                model = item.get("model") if isinstance(item, dict) else None
                walk(item, f"{place}[{index if model is None else _known_as(model)}]")
        else:
            is_model = place.endswith((".model", "base_model"))
            values[place] = _known_as(value) if is_model else value

    walk(configuration.model_dump(mode="json", exclude_none=True), "")
    return values


def _known_as(reference: str) -> str:
    """A model without the folders that lead to a local one: they change when it is moved."""
    parts = reference.split("+")
    is_local = [os.path.isabs(part) or part.startswith((".", "~")) or os.path.exists(part) for part in parts]
    return "+".join(Path(part).name if local else part for part, local in zip(parts, is_local, strict=True))


def _word(values: dict[str, Any], place: str) -> str:
    return shown(values[place]) if place in values else "absent"
