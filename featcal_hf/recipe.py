"""The recipe: a mergekit YAML with one strict `featcal:` section that says how to calibrate its result."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from pydantic import BaseModel, ValidationError

from featcal_hf.errors import listed
from featcal_hf.recipe_form import form_of, key_of
from featcal_hf.recipe_merge import Merge, parse_reference, read_merge, read_reference
from featcal_hf.recipe_section import CardSpec, Harness, Section, Settings, needs_base
from featcal_hf.recipe_task import DatasetSpec, EvalSpec, Sampling, Task
from featcal_hf.recipe_yaml import Document, Location, read_document, shown

__all__ = [
    "CardSpec",
    "DatasetSpec",
    "EvalSpec",
    "Recipe",
    "Sampling",
    "Settings",
    "Task",
    "parse_reference",
    "read_recipe",
]

_Model = TypeVar("_Model", bound=BaseModel)


@dataclass(frozen=True)
class Recipe:
    """A merge and how to calibrate it.

    Attributes:
        path: the file.
        source: its text, verbatim.
        merge: mergekit's part.
        settings: as written, not resolved.
        base: the anchor's base: `featcal.base_model`, else the merge's; None where neither is given.
        experts: the models to calibrate towards, in order of appearance, each once.
        tasks: at least one for each expert, in the recipe's order.
        depth: how many blocks the recipe's slices cover; None where it takes whole models.
        harness: what `featcal-hf eval` runs of EleutherAI's harness.
        card: what the model card is to say.
        warnings: what mergekit passes over in its part, with positions.
    """

    path: Path
    source: str
    merge: MergeConfiguration
    settings: Settings
    base: ModelReference | None
    experts: tuple[ModelReference, ...]
    tasks: tuple[Task, ...]
    depth: int | None
    harness: Harness
    card: CardSpec
    warnings: tuple[str, ...]


def read_recipe(path: str | Path) -> Recipe:
    """Read and check a recipe, or the `mergekit_config.yml` that mergekit leaves in a merged folder.

    Nothing is downloaded. Relative paths in the recipe are relative to the working directory, as in mergekit.

    Raises:
        RecipeError: with file, line and column, what was found, what was expected, and what to do.
    """
    document = read_document(Path(path))
    merge = read_merge(document)
    section = _section(document, merge)
    settings = _validated(document, ("featcal",), Settings, _part(section, Settings))
    sampling = _validated(document, ("featcal",), Sampling, _part(section, Sampling))
    harness = _validated(document, ("featcal",), Harness, _part(section, Harness))
    card = _validated(document, ("featcal",), CardSpec, _part(section, CardSpec))
    base = merge.base
    if section.get("base_model") is not None:
        base = read_reference(document, ("featcal", "base_model"))
    if base is None and settings.rho not in (None, 1):
        raise document.error(("featcal", "rho"), needs_base(settings.rho))
    tasks = _tasks(document, merge, sampling)
    return Recipe(
        path=document.path,
        source=document.text,
        merge=merge.configuration,
        settings=settings,
        base=base,
        experts=merge.experts,
        tasks=tasks,
        depth=merge.depth,
        harness=harness,
        card=card,
        warnings=merge.warnings,
    )


def _section(document: Document, merge: Merge) -> dict[str, Any]:
    if "featcal" not in document.data:
        example = "".join(
            f"    - model: {expert}\n      dataset: path/or/hub-id\n      text: text\n" for expert in merge.experts
        )
        advice = f"add one like this, with each expert's own data:\nfeatcal:\n  tasks:\n{example}"
        raise document.error((), f"has no featcal section; {advice.rstrip()}")
    section = document.data["featcal"]
    if not isinstance(section, dict):
        raise document.error(("featcal",), f"is {shown(section)}, expected a mapping; give it at least `tasks:`.")
    document.check_keys(("featcal",), _keys(Section))
    return section


def _tasks(document: Document, merge: Merge, sampling: Sampling) -> tuple[Task, ...]:
    location = ("featcal", "tasks")
    entries = document.data["featcal"].get("tasks")
    if not isinstance(entries, list) or not entries:
        found = f"is {shown(entries)}" if "tasks" in document.data["featcal"] else "is missing"
        raise document.error(location, f"{found}; list a task with model and dataset for each expert.")
    values = [_task_values(document, (*location, index), merge) for index in range(len(entries))]
    _name_tasks(document, location, values)
    tasks = tuple(
        _validated(document, (*location, index), Task, {**sampling.model_dump(), **value})
        for index, value in enumerate(values)
    )
    for expert in merge.experts:
        if all(task.model != expert for task in tasks):
            raise document.error(location, f"has no task for the expert {shown(str(expert))}; add one.")
    return tasks


def _task_values(document: Document, location: Location, merge: Merge) -> dict[str, Any]:
    """The task as written, with its expert and its dataset already read."""
    entry = document.value(location)
    if not isinstance(entry, dict):
        raise document.error(location, f"is {shown(entry)}, expected a mapping; give it a model and a dataset.")
    document.check_keys(location, _keys(Task))
    values = dict(entry)
    if "model" in entry:
        values["model"] = _expert(document, (*location, "model"), merge)
    if "dataset" in entry:
        values["dataset"] = _dataset(document, (*location, "dataset"))
    if entry.get("eval") is not None:
        values["eval"] = _evaluation(document, (*location, "eval"))
    return values


def _expert(document: Document, location: Location, merge: Merge) -> ModelReference:
    reference = read_reference(document, location)
    for expert in merge.experts:
        # override_architecture says how mergekit reads the weights, not which model it is
        if (expert.model, expert.lora) == (reference.model, reference.lora):
            return expert
    experts = listed(merge.experts, str(reference))
    problem = f"is {str(reference)!r}, which is not among the merge's experts ({experts}); name one of those."
    raise document.error(location, problem)


def _dataset(document: Document, location: Location) -> DatasetSpec:
    value = document.value(location)
    if isinstance(value, dict):
        document.check_keys(location, _keys(DatasetSpec))
        return _validated(document, location, DatasetSpec, value)
    return _validated(document, location, DatasetSpec, {"path": value})


def _evaluation(document: Document, location: Location) -> EvalSpec:
    value = document.value(location)
    if not isinstance(value, dict):
        raise document.error(location, f"is {shown(value)}, expected a mapping; write it as `eval: {{split: test}}`.")
    document.check_keys(location, _keys(EvalSpec))
    return _validated(document, location, EvalSpec, value)


def _name_tasks(document: Document, location: Location, values: list[dict[str, Any]]) -> None:
    """Refuse a name that is given twice, and name the tasks that have none after their experts."""
    owners: dict[str, int] = {}
    for index, value in enumerate(values):
        given = value.get("name")
        if isinstance(given, str) and owners.setdefault(given, index) != index:
            problem = f"is {shown(given)}, as is tasks[{owners[given]}].name; give each task a name of its own."
            raise document.error((*location, index, "name"), problem)
    taken = set(owners)
    for value in values:
        if value.get("name") is None and "model" in value:
            stem = _stem(value["model"])
            names = (stem if number == 1 else f"{stem}-{number}" for number in range(1, len(values) + len(taken) + 1))
            value["name"] = next(candidate for candidate in names if candidate not in taken)
            taken.add(value["name"])


def _stem(model: ModelReference) -> str:
    path = Path((model.lora or model.model).path)
    last = path.name or path.resolve().name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip(".-") or "task"


def _keys(model: type[BaseModel]) -> list[str]:
    return [key_of(name, field) for name, field in model.model_fields.items()]


def _part(section: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    return {key: section[key] for key in _keys(model) if key in section}


def _validated(document: Document, location: Location, model: type[_Model], values: dict[str, Any]) -> _Model:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    if not first["loc"]:
        raise document.error(location, str(first["ctx"]["error"]))
    key = str(first["loc"][0])
    form = next(form_of(field) for name, field in model.model_fields.items() if key in (name, key_of(name, field)))
    advice = f"give {form.value}" + (f", or leave it out for {form.default}" if form.default is not None else "")
    if first["type"] == "missing":
        raise document.error((*location, key), f"is missing; {advice}.")
    reason = f", {first['ctx']['error']}" if first["type"] == "value_error" else ""
    raise document.error((*location, key), f"is {shown(values[key])}{reason}; {advice}.")
