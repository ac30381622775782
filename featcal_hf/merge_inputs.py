"""The models of a merge, opened: every tensor under the name that the class of the result has for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from mergekit.common import ModelReference
from torch import Tensor
from transformers import PretrainedConfig

from featcal_hf.checkpoint import Checkpoint, open_checkpoint, resolve
from featcal_hf.compare import config_for, streamed_of
from featcal_hf.errors import CheckpointError, listed
from featcal_hf.experts import AdaptedModel, open_adapter
from featcal_hf.mapping import locate_model
from featcal_hf.streamed import StreamedModel, model_class, read_config

CPU = torch.device("cpu")


class MergeInput:
    """One model of the merge, read through the class of the result.

    Attributes:
        label: what messages call it.
        model: its checkpoint, or the checkpoint that an adapter changes.
        streamed: the checkpoint.
    """

    def __init__(self, label: str, model: StreamedModel | AdaptedModel) -> None:
        self.label, self.model, self.streamed = label, model, streamed_of(model)
        self._names = {self.key_of(name): name for name in self.checkpoint.tensors}

    @property
    def checkpoint(self) -> Checkpoint:
        """Its checkpoint, without an adapter."""
        return self.streamed.checkpoint

    def key_of(self, name: str) -> str:
        """What the class calls a tensor of the checkpoint; its own name where the class has no single place for it."""
        target = self.streamed.sources.get(name)
        return name if target is None or target in self.streamed.converted else target

    def find(self, key: str) -> str | None:
        """The tensor of the checkpoint that the class calls `key`, or one that is tied to it."""
        return next((self._names[alias] for alias in self._aliases(key) if alias in self._names), None)

    def foreign(self, keys: set[str]) -> list[str]:
        """Weights for which the result has no place, another head for instance."""
        return [
            name
            for key, name in self._names.items()
            if keys.isdisjoint(self._aliases(key)) and self.checkpoint.tensors[name].dtype.is_floating_point
        ]

    def changed(self, name: str) -> bool:
        """Whether the adapter, if there is one, changes this tensor of the checkpoint."""
        target = self.streamed.sources.get(name)
        if target is None or not isinstance(self.model, AdaptedModel):
            return False
        module = target.rpartition(".")[0]
        return any(own.startswith(f"{module}.") for own in self.model.adapter.names)

    @contextmanager
    def reading(self, path: str, names: list[str]) -> Iterator[Callable[[str], Tensor]]:
        """Tensors of the block at `path`, or of what is outside the blocks where that is empty, one by one."""
        changed = {name for name in names if self.changed(name)}
        with ExitStack() as open_:
            lazy = open_.enter_context(self.checkpoint.reading([name for name in names if name not in changed]))
            parameters: dict[str, Any] = {}
            if changed:
                open_.enter_context(self.model.block(path, CPU) if path else self.model.outer())
                parameters = dict(self.streamed.module.named_parameters(remove_duplicate=False))

            def read(name: str) -> Tensor:
                value: Tensor = parameters[self.streamed.sources[name]].detach() if name in changed else lazy[name][...]
                return value

            yield read

    def _aliases(self, key: str) -> list[str]:
        """The tensor, and those that the model ties to it."""
        ties = self.streamed.module.all_tied_weights_keys.items()
        return [key, *(one for pair in ties if key in pair for one in pair if one != key)]


def open_inputs(
    references: list[ModelReference],
    base: ModelReference | None,
    cache_dir: str | None,
    trust_remote_code: bool,
    mapping: Mapping[str, str],
) -> tuple[dict[ModelReference, MergeInput], ModelReference]:
    """Open the models of a merge behind the class of its result.

    Returns:
        The models, and the one whose names, order and config the result has.

    Raises:
        CheckpointError: one can't be opened, is incomplete, or of another architecture or depth.
    """
    located = {reference: locate_model(reference, mapping) for reference in references}
    checkpoints = {reference: open_checkpoint(*resolve(located[reference], cache_dir)) for reference in references}
    configs = {name: read_config(item.folder, trust_remote_code) for name, item in checkpoints.items()}
    donor = _donor(references, base, configs)
    cls = model_class(configs[donor], checkpoints[donor].folder)
    result = StreamedModel(checkpoints[donor], cls, configs[donor])
    inputs = {}
    for reference in references:
        label = f"base model {reference}" if reference == base else f"model {reference}"
        checkpoint, own = checkpoints[reference], model_class(configs[reference], checkpoints[reference].folder)
        config = config_for(result.module, configs[reference], checkpoint.folder)
        streamed = result if reference == donor else StreamedModel(checkpoint, cls, config)
        _check_complete(streamed if own is cls else StreamedModel(checkpoint, own, configs[reference]), label)
        if list(streamed.blocks) != list(result.blocks):
            raise CheckpointError(
                f"{label} {checkpoint.folder} has {len(streamed.blocks)} blocks, {checkpoints[donor].folder} has "
                f"{len(result.blocks)}; every block needs one counterpart in each model."
            )
        lora = located[reference].lora
        adapter = None if lora is None else open_adapter(*resolve(ModelReference(model=lora), cache_dir))
        inputs[reference] = MergeInput(label, streamed if adapter is None else AdaptedModel(streamed, adapter))
    return inputs, donor


def _donor(
    references: list[ModelReference], base: ModelReference | None, configs: Mapping[ModelReference, PretrainedConfig]
) -> ModelReference:
    """The base, or the first model; where all others are one tower of the base (CLIP's), the first of those."""
    others = [reference for reference in references if reference != base]
    if base is None or not others:
        return references[0]
    kinds = {configs[reference].model_type for reference in others}
    parts = [getattr(configs[base], name, None) for name in configs[base].sub_configs]
    is_tower = len(kinds) == 1 and kinds <= {part.model_type for part in parts if part is not None}
    return others[0] if is_tower and configs[base].model_type not in kinds else base


def _check_complete(model: StreamedModel, label: str) -> None:
    # Models are often saved without a pooler that nobody uses; the library starts a new one then.
    missing = [name for name in model.missing() if "pooler" not in name.split(".")]
    if missing:
        raise CheckpointError(
            f"{label} {model.checkpoint.folder} lacks {len(missing)} of {len(model.parameters)} tensors that "
            f"{type(model.module).__name__} needs ({listed(missing)}); make or download it again."
        )
