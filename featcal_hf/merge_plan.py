"""Which tensors of which models make each tensor of a merge, and with which of the recipe's parameters.

mergekit finds tensors through its descriptions of architectures. Here a model's own class in transformers says what
each tensor of a checkpoint is, whatever layout it was saved in; what is merged with what follows from that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from mergekit import merge_methods
from mergekit.architecture import WeightInfo
from mergekit.common import ImmutableMap, ModelReference, dtype_from_name
from mergekit.config import ConfigReader, InputSliceDefinition, MergeConfiguration, OutputSliceDefinition
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask, TensorDictWrapper
from mergekit.parameter_resolver import resolve_parameters
from pydantic import ValidationError

from featcal_hf.errors import CheckpointError
from featcal_hf.merge_inputs import MergeInput, open_inputs
from featcal_hf.recipe_merge import Merge
from featcal_hf.recipe_yaml import Document, shown
from featcal_hf.streamed import StreamedModel

FLOATS = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the result.

    Attributes:
        name: its name in the result.
        block: the block that it is part of, empty outside the blocks.
        shape: of the result.
        dtype: of the result.
        sources: model -> the tensor's name in that model's checkpoint, for the models that it is made from.
        task: mergekit's own merge of it; None where it is copied.
    """

    name: str
    block: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: dict[ModelReference, str]
    task: ExecuteMergeMethodTask | None


@dataclass(frozen=True)
class MergePlan:
    """Everything that a merge will do.

    Attributes:
        inputs: the models by reference.
        donor: the model whose names, order and config the result has: the base, or the first model.
        base: the merge's base, which gives the tokenizer and processor; None without one.
        tensors: in the order of the donor's checkpoint.
        copied: tensors taken from one model -> why.
        left_out: model's label -> its weights for which the result has no place; "result" -> what it lacks.
    """

    inputs: dict[ModelReference, MergeInput]
    donor: MergeInput
    base: MergeInput | None
    tensors: list[PlannedTensor]
    copied: dict[str, str]
    left_out: dict[str, list[str]]

    @property
    def blocks(self) -> list[str]:
        """The blocks in the model's order, and what is outside them first."""
        present = {tensor.block for tensor in self.tensors}
        return [path for path in ("", *self.donor.streamed.blocks) if path in present]


def plan_merge(
    document: Document,
    merge: Merge,
    *,
    cache_dir: str | None = None,
    trust_remote_code: bool = False,
    mapping: Mapping[str, str] | None = None,
) -> MergePlan:
    """Open the models of a recipe and find what each tensor of the result is made from; nothing is loaded.

    Raises:
        RecipeError: the recipe asks for what can't be done tensor by tensor, or lacks a parameter.
        CheckpointError: a model is missing, incomplete, or of another architecture.
    """
    configuration = merge.configuration
    _check_keys(document, configuration)
    slices = _slices(configuration)
    order = [source.model for source in slices[0].sources]
    references = list(dict.fromkeys([*([merge.base] if merge.base is not None else []), *order]))
    inputs, donor = open_inputs(references, merge.base, cache_dir, trust_remote_code, mapping or {})
    base = inputs[merge.base] if merge.base is not None else None
    places = _Places(document, configuration, slices, inputs[donor].streamed)
    return _Planner(document, configuration, inputs, order, inputs[donor], base, places).plan()


def _check_keys(document: Document, configuration: MergeConfiguration) -> None:
    if configuration.modules:
        reason = "names parts of mergekit's descriptions of architectures, which are not used here"
        raise document.error(("modules",), f"{reason}; list `models` (or `slices`) instead, or use mergekit-yaml.")
    for key in ("tokenizer", "tokenizer_source", "chat_template"):
        if getattr(configuration, key) is not None:
            reason = "changes the tokenizer, and here the result has the base's files as they are"
            raise document.error((key,), f"{reason}; remove the key, or use mergekit-yaml.")
    for key in ("dtype", "out_dtype"):
        value = getattr(configuration, key)
        if value is not None and value.removeprefix("torch.") not in FLOATS:
            raise document.error((key,), f"is {shown(value)}, expected one of {', '.join(FLOATS)}; mend it.")


def _slices(configuration: MergeConfiguration) -> list[OutputSliceDefinition]:
    """The recipe as slices, as mergekit makes them: the base is one more source, the last, if it isn't listed."""
    if configuration.slices:
        return list(configuration.slices)
    entries = [(entry.model, entry.parameters) for entry in configuration.models or []]
    base = configuration.base_model
    if base is not None and base not in [model for model, _ in entries]:
        entries.append((base, None))
    sources = [InputSliceDefinition(model=model, layer_range=(0, 0), parameters=given) for model, given in entries]
    return [OutputSliceDefinition(sources=sources)]


class _Places:
    """Where a block lies in its stack, for the recipe's slices and for parameters that vary over layers."""

    def __init__(
        self,
        document: Document,
        configuration: MergeConfiguration,
        slices: list[OutputSliceDefinition],
        model: StreamedModel,
    ) -> None:
        self._configuration, self._slices, self._model = configuration, slices, model
        stacks: dict[str, list[str]] = {}
        for path in model.blocks:
            stacks.setdefault(path.rpartition(".")[0], []).append(path)
        self._positions = {path: (i, len(stack)) for stack in stacks.values() for i, path in enumerate(stack)}
        self._sliced = bool(configuration.slices)
        depth = slices[-1].sources[0].layer_range[1]
        if self._sliced and len(stacks) != 1:
            found = f"number one stack of blocks, but {type(model.module).__name__} has {', '.join(stacks)}"
            raise document.error(("slices",), f"{found}; list `models` instead.")
        if self._sliced and len(model.blocks) != depth:
            found = f"make {depth} blocks, but {model.checkpoint.folder} has {len(model.blocks)}"
            raise document.error(("slices",), f"{found}; cover every block.")
        inside = tuple(f"{real}." for real in model.block_names.values())
        names = list(model.parameters)
        first = next((i for i, name in enumerate(names) if name.startswith(inside)), len(names))
        self._after = {name for name in names[first:] if not name.startswith(inside)}

    def block_of(self, key: str) -> str:
        """The block that holds a tensor, empty where none does."""
        return next((path for path, real in self._model.block_names.items() if key.startswith(f"{real}.")), "")

    def reader(self, key: str, path: str) -> ConfigReader:
        """Mergekit's reader of the parameters that hold for a tensor."""
        if not path:
            part = self._slices[-1 if key in self._after else 0]
            return ConfigReader(config=self._configuration, t=0, slice_out=part)
        index, depth = self._positions[path]
        part = self._slices[0]
        if self._sliced:
            part = next(part for part in self._slices if index < part.sources[0].layer_range[1])
            start, end = part.sources[0].layer_range
            index, depth = index - start, end - start
        t = index / (depth - 1) if depth > 1 else 1
        return ConfigReader(config=self._configuration, t=t, slice_out=part)


@dataclass(frozen=True)
class _Planner:
    document: Document
    configuration: MergeConfiguration
    inputs: dict[ModelReference, MergeInput]
    order: list[ModelReference]
    donor: MergeInput
    base: MergeInput | None
    places: _Places

    def plan(self) -> MergePlan:
        tensors: list[PlannedTensor] = []
        copied: dict[str, str] = {}
        left_out: dict[str, list[str]] = {}
        keys = {self.donor.key_of(name) for name in self.donor.checkpoint.tensors}
        for name in self.donor.checkpoint.tensors:
            key = self.donor.key_of(name)
            sources, reason = self._sources(name, key)
            if reason is None:
                tensors.append(self._merged(name, key, sources))
            elif sources:
                copied[name] = reason
                tensors.append(self._copied(name, key, sources))
            else:
                left_out.setdefault("result", []).append(name)
        for model in self.inputs.values():
            if model is not self.base and (foreign := model.foreign(keys)):
                left_out[model.label] = foreign
        return MergePlan(self.inputs, self.donor, self.base, tensors, copied, left_out)

    def _sources(self, name: str, key: str) -> tuple[dict[ModelReference, str], str | None]:
        """What a tensor is made from, and why if it isn't merged; nothing where it has to be left out."""
        entry = self.donor.checkpoint.tensors[name]
        if not entry.dtype.is_floating_point:
            return self._one(self.donor, name), f"{entry.dtype} is not merged"
        found = {reference: self.inputs[reference].find(key) for reference in self.order}
        sources = {reference: other for reference, other in found.items() if other is not None}
        absent = [self.inputs[reference] for reference in self.order if reference not in sources]
        shapes = {self.inputs[reference]: self._shape(reference, other) for reference, other in sources.items()}
        unlike = [model for model, shape in shapes.items() if shape != entry.shape]
        if not absent and not unlike:
            self._check_adapters(sources)
            return sources, None
        if name not in self.donor.streamed.sources:
            return self._one(self.donor, name), f"{type(self.donor.streamed.module).__name__} doesn't read it"
        if self.places.block_of(key) or (unlike and not self._is_head(key)):
            model = (absent or unlike)[0]
            raise CheckpointError(
                f"{model.label} {model.checkpoint.folder}: {key} is {shapes.get(model, 'absent')}, in "
                f"{self.donor.checkpoint.folder} it is {entry.shape}; merged models must have the same blocks and "
                "embeddings, only their heads may differ."
            )
        reason = f"not the same in {', '.join(model.label for model in absent + unlike)}"
        kept = None if self.base is None else self.base.find(key)
        if self.base is None or kept is None or self.base.checkpoint.tensors[kept].shape != entry.shape:
            return {}, reason
        return self._one(self.base, kept), reason

    def _one(self, model: MergeInput, name: str) -> dict[ModelReference, str]:
        return {reference: name for reference, known in self.inputs.items() if known is model}

    def _shape(self, reference: ModelReference, name: str) -> tuple[int, ...]:
        return self.inputs[reference].checkpoint.tensors[name].shape

    def _is_head(self, key: str) -> bool:
        module = self.donor.streamed.module
        prefix = f"{module.base_model_prefix}."
        return any(name.startswith(prefix) for name in self.donor.streamed.parameters) and not key.startswith(prefix)

    def _check_adapters(self, sources: Mapping[ModelReference, str]) -> None:
        for reference, name in sources.items():
            model = self.inputs[reference]
            if model.changed(name) and model.streamed.sources[name] in model.streamed.converted:
                raise CheckpointError(
                    f"{model.label}: its adapter changes {model.streamed.sources[name]}, which the loader fuses from "
                    "several tensors of the checkpoint; merge the adapter into a full model with PEFT and name that."
                )

    def _merged(self, name: str, key: str, sources: dict[ModelReference, str]) -> PlannedTensor:
        path = self.places.block_of(key)
        reader = self.places.reader(key, path)
        method = merge_methods.get(self.configuration.merge_method)
        try:
            shared, single = resolve_parameters(
                method.spec,
                tensor_name=name,
                inputs=dict.fromkeys(self.order, name),
                sources=reader.parameter_sources,
                base_model=reader.base_model,
                t=reader.t,
            )
            task = ExecuteMergeMethodTask(
                method_name=method.spec.name,
                gather_tensors=TensorDictWrapper(tensors=ImmutableMap({})),
                model_order=tuple(self.order),
                parameters=shared,
                input_parameters=single,
                base_model=reader.base_model,
                output_weight=WeightInfo(name=name),
            )
        except (RuntimeError, ValueError) as error:  # pydantic's errors are ValueErrors
            problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            where = ("parameters",) if self.configuration.parameters else ()
            raise self.document.error(where, f"doesn't suit {method.spec.name!r}: {problem}; mend it.") from error
        dtypes = (self.inputs[reference].checkpoint.tensors[other].dtype for reference, other in sources.items())
        dtype = self._dtype(reduce(torch.promote_types, dtypes))
        return PlannedTensor(name, path, self.donor.checkpoint.tensors[name].shape, dtype, sources, task)

    def _copied(self, name: str, key: str, sources: dict[ModelReference, str]) -> PlannedTensor:
        (reference, other), *_ = sources.items()
        entry = self.inputs[reference].checkpoint.tensors[other]
        dtype = self._dtype(entry.dtype) if entry.dtype.is_floating_point else entry.dtype
        return PlannedTensor(name, self.places.block_of(key), entry.shape, dtype, {reference: other}, None)

    def _dtype(self, found: torch.dtype) -> torch.dtype:
        chosen = self.configuration.out_dtype or self.configuration.dtype
        dtype: torch.dtype = dtype_from_name(chosen) or found
        return dtype
