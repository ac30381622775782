"""Local paths in place of a recipe's ids: the recipe stays as it is, models and datasets come from elsewhere."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml
from mergekit.common import ModelPath, ModelReference

from featcal_hf.errors import RecipeError, listed
from featcal_hf.recipe import DatasetSpec, Recipe

ENDINGS = (".yml", ".yaml", ".json")


def read_mapping(arguments: Iterable[str]) -> dict[str, str]:
    """Read the arguments of `--map`: `ID=PATH`, or a YAML or JSON file that maps ids to paths.

    Raises:
        RecipeError: an argument is neither, a file holds something else, or an id is given two paths.
    """
    mapping: dict[str, str] = {}
    for argument in arguments:
        for key, path in _entries(argument):
            if mapping.setdefault(key, path) != path:
                raise RecipeError(f"--map gives {key!r} two paths, {mapping[key]} and {path}; give one.")
    return mapping


def check_mapping(mapping: Mapping[str, str], recipe: Recipe) -> None:
    """Check that every id is one of the recipe's and that something is at its path.

    Raises:
        RecipeError: names the closest id of the recipe, or the path where nothing is.
    """
    models, datasets = _model_ids(recipe), _dataset_ids(recipe)
    known = [*models, *datasets]
    for key, path in mapping.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            advice = f"did you mean {close[0]!r}?" if close else f"its ids are {listed(dict.fromkeys(known), key)}."
            raise RecipeError(f"--map: {recipe.path} has no model or dataset {key!r}; {advice}")
        if not Path(path).expanduser().exists():
            raise RecipeError(f"--map: nothing is at {path}, given for {key!r}; give an existing folder or file.")
        if key in models and not Path(path).expanduser().is_dir():
            raise RecipeError(f"--map: {path}, given for the model {key!r}, is a file; give the model's folder.")


def locate_model(reference: ModelReference, mapping: Mapping[str, str]) -> ModelReference:
    """The reference with its model and its adapter, each where mapped, at their local paths.

    A mapped `id@revision` goes before a mapped `id`, which stands for every revision.
    """
    lora = None if reference.lora is None else _locate(reference.lora, mapping)
    return reference.model_copy(update={"model": _locate(reference.model, mapping), "lora": lora})


def locate_dataset(spec: DatasetSpec, mapping: Mapping[str, str]) -> DatasetSpec:
    """The dataset at its local path, if mapped.

    A mapped `id` stands for the whole repository: a folder whose configurations, splits and data files are chosen as
    the recipe says. A mapped `id:name` is that configuration alone. A file is the split that the recipe asks for.

    Raises:
        RecipeError: the recipe chooses a configuration or data files, and the path is a file or a saved dataset.
    """
    whole, part = mapping.get(spec.path), mapping.get(f"{spec.path}:{spec.name}")
    path = part or whole
    if path is None:
        return spec
    local = Path(path).expanduser()
    changes: dict[str, object] = {"path": str(local), "revision": None}
    if part is not None:
        changes |= {"name": None, "data_files": None}
    elif _holds_one(local) and (spec.name or spec.data_files):
        part_of = f"its configuration {spec.name!r}" if spec.name else f"its data files {spec.data_files}"
        advice = f"map {spec.path}:{spec.name} to it" if spec.name else "map the id to a folder that holds them"
        raise RecipeError(f"--map: the recipe takes {part_of} of {spec.path!r}, and {path} has only one; {advice}.")
    if local.is_file():
        changes["split"] = re.sub(r"\A[\w.]+", "train", spec.split)
    return spec.model_copy(update=changes)


def _entries(argument: str) -> list[tuple[str, str]]:
    file = Path(argument).expanduser()
    if file.suffix in ENDINGS and (file.is_file() or "=" not in argument):
        return list(_read_file(file).items())
    key, sign, path = argument.partition("=")
    if not (key and sign and path):
        raise RecipeError(f"--map {argument}: expected ID=PATH, or a file in {', '.join(ENDINGS)} with ids and paths.")
    return [(key, path)]


def _read_file(file: Path) -> dict[str, str]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RecipeError(f"--map {file} can't be read ({error}); write one `id: path` a line.") from error
    if not isinstance(content, dict) or not all(isinstance(part, str) for item in content.items() for part in item):
        raise RecipeError(f"--map {file} doesn't map ids to paths, each as text; write one `id: path` a line.")
    return content


def _model_ids(recipe: Recipe) -> list[str]:
    references = [recipe.base, recipe.merge.base_model, *recipe.experts, *recipe.merge.referenced_models()]
    paths = [path for reference in references if reference for path in (reference.model, reference.lora) if path]
    towers = {task.evaluation.text_model for task in recipe.tasks if task.evaluation and task.evaluation.text_model}
    return sorted({name for path in paths for name in (path.path, str(path))} | towers)


def _dataset_ids(recipe: Recipe) -> list[str]:
    specs = [task.dataset for task in recipe.tasks]
    return sorted({spec.path for spec in specs} | {f"{spec.path}:{spec.name}" for spec in specs if spec.name})


def _locate(path: ModelPath, mapping: Mapping[str, str]) -> ModelPath:
    local = mapping.get(str(path), mapping.get(path.path))
    return path if local is None else ModelPath(path=str(Path(local).expanduser()))


def _holds_one(path: Path) -> bool:
    """Whether a path is a dataset without configurations: a file, or a folder written by `save_to_disk`."""
    return path.is_file() or any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
