"""The merge that a recipe describes: its models, which of them are experts, and whether blocks correspond.

mergekit's own classes read mergekit's own keys; what mergekit passes over silently is reported here.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mergekit import merge_methods
from mergekit.common import ModelPath, ModelReference
from mergekit.config import (
    InputModelDefinition,
    InputSliceDefinition,
    MergeConfiguration,
    OutputModuleDefinition,
    OutputSliceDefinition,
)
from pydantic import ValidationError

from featcal_hf.errors import RecipeError, listed
from featcal_hf.recipe_yaml import Document, Location, name, shown

# The base of these methods is one of the two models that they mix, not what the experts started from.
_BASE_IS_MIXED_IN = frozenset({"slerp", "nearswap", "arcee_fusion"})

_ENTRIES = {
    MergeConfiguration: {
        "models": InputModelDefinition,
        "slices": OutputSliceDefinition,
        "modules": OutputModuleDefinition,
    },
    OutputModuleDefinition: {"models": InputModelDefinition, "slices": OutputSliceDefinition},
    OutputSliceDefinition: {"sources": InputSliceDefinition},
}


@dataclass(frozen=True)
class Merge:
    """A merge whose every output block has one counterpart, with the same index, in each input model.

    Attributes:
        configuration: mergekit's reading of the recipe.
        base: the merge's base, None where the method has none.
        experts: the models to calibrate towards, in order of appearance, each once.
        depth: how many blocks the slices cover, None where the recipe takes whole models.
        warnings: parameters that mergekit passes over, with their positions.
    """

    configuration: MergeConfiguration
    base: ModelReference | None
    experts: tuple[ModelReference, ...]
    depth: int | None
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _Group:
    """Models that are merged with each other, and where the recipe says so."""

    location: Location
    models: tuple[ModelReference, ...]
    base: ModelReference | None
    base_is_added: bool


def parse_reference(text: str) -> ModelReference:
    """Read `model`, `model@revision`, `model+lora` or `model@revision+lora@revision`.

    The rules are mergekit's, except that an existing local path is never split at its own `@` or `+`.

    Raises:
        RecipeError: the text is none of these forms.
    """
    if os.path.exists(text):
        return ModelReference(model=ModelPath(path=text))
    splits = [(text[:index], text[index + 1 :]) for index, char in enumerate(text) if char == "+"]
    if len(splits) > 1:
        splits = [split for split in splits if any(map(os.path.exists, split))]
        if not splits:
            raise _unreadable(text, "it has several '+'")
    model, lora = splits[0] if splits else (text, None)
    return ModelReference(model=_parse_path(text, model), lora=None if lora is None else _parse_path(text, lora))


def read_reference(document: Document, location: Location) -> ModelReference:
    """Read the reference at `location`: text, or a mapping in mergekit's form.

    Raises:
        RecipeError: it is neither, with its position.
    """
    value = document.value(location)
    try:
        if isinstance(value, str):
            return parse_reference(value)
        if isinstance(value, dict):
            document.check_keys(location, ModelReference.model_fields)
            paths = {part: _path_in(document, (*location, part)) for part in ("model", "lora") if part in value}
            return ModelReference.model_validate({**value, **paths})
    except RecipeError as error:
        if str(error).startswith(f"{document.path}:"):
            raise
        raise document.error(location, str(error)) from error
    except ValidationError as error:
        raise _refused(document, location, error) from error
    raise document.error(location, f"is {shown(value)}; give a model as text: a path or a Hub id.")


def read_merge(document: Document) -> Merge:
    """Read mergekit's part of the recipe.

    Raises:
        RecipeError: mergekit would refuse it, it has an unknown key, or an output block has no single
            counterpart.
    """
    prepared = _with_references(document, (), MergeConfiguration)
    try:
        configuration = MergeConfiguration.model_validate(prepared)
    except ValidationError as error:
        raise _refused(document, (), error) from error
    except RuntimeError as error:
        raise document.error((), f"is refused by mergekit ({error}); mend it until mergekit-yaml takes it.") from error
    method = _method(document, configuration.merge_method)
    contract = method.spec.contract
    groups, depths = [], []
    for location, output in _outputs(configuration):
        groups += _groups(location, output, configuration.base_model)
        if output.slices:
            depths.append(_depth(document, (*location, "slices"), output.slices))
    base = _base(document, groups)
    for group in groups:
        _check_inputs(document, configuration.merge_method, group)
    inputs = [model for group in groups for model in group.models]
    if configuration.merge_method in _BASE_IS_MIXED_IN:
        inputs.append(base)
    elif contract.base is not merge_methods.BasePolicy.IGNORED:
        inputs = [model for model in inputs if model != base]
    if not inputs:
        raise document.error((), "has no expert, only a base; list the models that the merge brings together.")
    return Merge(
        configuration,
        base,
        tuple(dict.fromkeys(inputs)),
        depths[0] if depths else None,
        tuple(_unread_parameters(document, method)),
    )


def _parse_path(reference: str, text: str) -> ModelPath:
    if os.path.exists(text):
        return ModelPath(path=text)
    try:
        path = ModelPath.model_validate(text)
    except RuntimeError as error:
        raise _unreadable(reference, "a model in it has several '@'") from error
    except ValidationError as error:
        raise _unreadable(reference, error.errors()[0]["msg"]) from error
    if not path.path or path.revision == "":
        raise _unreadable(reference, "a part of it is empty")
    return path


def _unreadable(reference: str, reason: str) -> RecipeError:
    forms = "model, model@revision, model+lora or model@revision+lora@revision"
    return RecipeError(f"{shown(reference)} is not a model reference: {reason}; write {forms}.")


def _path_in(document: Document, location: Location) -> Any:
    value = document.value(location)
    if isinstance(value, str):
        return _parse_path(value, value)
    if isinstance(value, dict):
        document.check_keys(location, ModelPath.model_fields)
    return value


def _with_references(document: Document, location: Location, kind: Any) -> Any:
    """The mapping at `location` with its references read; other types are left for mergekit to refuse."""
    value = document.value(location)
    if not isinstance(value, dict):
        return value
    document.check_keys(location, [*kind.model_fields, *(["featcal"] if kind is MergeConfiguration else [])])
    result = {}
    for key, item in value.items():
        here = (*location, key)
        entry = _ENTRIES.get(kind, {}).get(key)
        if key in ("model", "base_model") and item is not None:
            item = read_reference(document, here)
        elif entry is OutputModuleDefinition and isinstance(item, dict):
            item = {part: _with_references(document, (*here, part), entry) for part in item}
        elif entry is not None and isinstance(item, list):
            item = [_with_references(document, (*here, index), entry) for index in range(len(item))]
        if key != "featcal":
            result[key] = item
    return result


def _refused(document: Document, location: Location, error: ValidationError) -> RecipeError:
    first = error.errors(include_url=False)[0]
    full = (*location, *first["loc"])
    written = document.written(full)
    if first["type"] == "missing":
        return document.error(written, f"lacks the key {shown(full[-1])}, which mergekit needs; add it.")
    found = shown(document.value(written))
    return document.error(written, f"is {found}, which mergekit refuses ({first['msg']}); mend it.")


def _method(document: Document, method: str) -> Any:
    location = ("merge_method",)
    if method == "passthrough":
        reason = "which stacks blocks instead of merging them, so that no block has a counterpart in each expert"
        raise document.error(location, f"is 'passthrough', {reason}; use a method that merges.")
    known = [known.spec.name for known in merge_methods.registered_methods() if known.spec.name != "passthrough"]
    if method not in known:
        close = difflib.get_close_matches(method, known, n=1)
        advice = f"did you mean {close[0]!r}?" if close else "use one of these."
        problem = f"is {shown(method)}, which mergekit doesn't know; {advice} It knows {listed(known, method)}."
        raise document.error(location, problem)
    return merge_methods.get(method)


def _unread_parameters(document: Document, method: Any) -> Iterator[str]:
    """A warning for each parameter that the method doesn't declare, or not for a single model."""
    every = [parameter.name for parameter in method.spec.parameters]
    of_a_model = [parameter.name for parameter in method.spec.input_parameters]
    for location in _parameters(document.data, ()):
        is_of_a_model = len(location) > 2 and location[-3] in ("models", "sources")
        read = of_a_model if is_of_a_model else every
        for parameter in document.value(location):
            if parameter in read:
                continue
            where = "a parameter of a single model" if parameter in every else "a parameter"
            close = difflib.get_close_matches(str(parameter), read, n=1)
            advice = f"did you mean {close[0]!r}?" if close else f"it reads {listed(read) or 'none'} there"
            problem = f"is not {where} in {method.spec.name!r}, and mergekit passes over it; {advice}"
            yield str(document.error((*location, parameter), problem, at_key=True))


def _parameters(value: Any, location: Location) -> Iterator[Location]:
    """Where mergekit's part has `parameters`."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _parameters(item, (*location, index))
    elif isinstance(value, dict):
        for key, item in value.items():
            if key == "parameters" and isinstance(item, dict):
                yield (*location, key)
            elif key in ("models", "slices", "sources", "modules") or location[-1:] == ("modules",):
                yield from _parameters(item, (*location, key))


def _outputs(configuration: MergeConfiguration) -> Iterator[tuple[Location, Any]]:
    if configuration.modules:
        for module, output in configuration.modules.items():
            yield ("modules", module), output
    else:
        yield (), configuration


def _groups(location: Location, output: Any, base: ModelReference | None) -> list[_Group]:
    if output.models:
        models = tuple(entry.model for entry in output.models)
        return [_Group((*location, "models"), models, base, base_is_added=True)]
    return [
        _Group(
            (*location, "slices", index),
            tuple(source.model for source in part.sources),
            part.base_model or base,
            base_is_added=False,
        )
        for index, part in enumerate(output.slices)
    ]


def _depth(document: Document, location: Location, slices: list[Any]) -> int:
    """How many blocks the slices cover, if block k of the output is block k of every source."""
    end = 0
    expected = _slice_models(slices[0])
    for index, part in enumerate(slices):
        here = (*location, index)
        if not part.sources:
            raise document.error(here, "has no sources; list the models that it is merged from.")
        if _slice_models(part) != expected:
            found = f"merges {_list(_slice_models(part))}, but the first slice merges {_list(expected)}"
            raise document.error(here, f"{found}; calibration needs the same models in every slice.")
        start, end = end, end + part.sources[0].layer_range[1] - part.sources[0].layer_range[0]
        for number, source in enumerate(part.sources):
            if tuple(source.layer_range) != (start, end) or end <= start:
                written = f"is {list(source.layer_range)}, but the output's blocks here are [{start}, {end}]"
                reason = "a block that is stacked, shifted or left out has no single counterpart in each expert"
                advice = "write the same ranges for every source, without gaps, from 0"
                where = (*here, "sources", number, "layer_range")
                raise document.error(where, f"{written}; {reason}; {advice}.")
    return end


def _slice_models(part: Any) -> set[ModelReference]:
    return {source.model for source in part.sources} | ({part.base_model} if part.base_model else set())


def _base(document: Document, groups: list[_Group]) -> ModelReference | None:
    for group in groups:
        if group.base != groups[0].base:
            found = f"has the base {group.base}, but {name(groups[0].location)} has {groups[0].base}"
            raise document.error(group.location, f"{found}; calibration needs one base for the whole merge.")
    return groups[0].base


def _check_inputs(document: Document, method: str, group: _Group) -> None:
    contract = merge_methods.get(method).spec.contract
    if contract.base is merge_methods.BasePolicy.REQUIRED and group.base is None:
        raise document.error((), f"has no base_model, which the method {method!r} needs; add it.")
    models = list(group.models)
    if group.base_is_added and group.base is not None and group.base not in models:
        models.append(group.base)
    try:
        merge_methods.get(method).validate_inputs(models, group.base)
    except ValueError as error:
        problem = f"doesn't suit the method {method!r} ({error}); it merges {_list(models)}: mend that list."
        raise document.error(group.location, problem) from error


def _list(models: Any) -> str:
    return listed(sorted(map(str, models)))
