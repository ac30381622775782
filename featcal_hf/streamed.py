"""A model on disk whose blocks are loaded one at a time into an empty skeleton, through transformers' own loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from featcal_hf.checkpoint import Checkpoint
from featcal_hf.errors import CheckpointError
from featcal_hf.forward import find_blocks


def model_class(config: PretrainedConfig, folder: Path) -> type[PreTrainedModel]:
    """The class that wrote the checkpoint, from its config.

    Raises:
        CheckpointError: transformers has no such class, or the checkpoint is quantised.
    """
    names = config.architectures or []
    if getattr(config, "quantization_config", None) is not None:
        raise CheckpointError(
            f"{folder} is quantised (config.json has quantization_config); calibration needs the full-precision "
            "model, name that one in the merge."
        )
    found = getattr(transformers, names[0], None) if len(names) == 1 else None
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise CheckpointError(
            f"{folder}/config.json names the architectures {names}, expected one class of transformers "
            f"{transformers.__version__}; set `architectures` or install a transformers release that has it."
        )
    return found


def read_config(folder: Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """A checkpoint's config.

    Raises:
        CheckpointError: it can't be read.
    """
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # config classes run their own code on whatever the file says
        raise CheckpointError(
            f"{folder}/config.json can't be read by transformers {transformers.__version__}: {error}. Put back the "
            "model's own, or install a transformers release that knows it."
        ) from error
    return config


class StreamedModel:
    """A checkpoint behind an empty model of its own config; weights are there only while asked for.

    Block weights are views of the mapped file until they are moved to a device, so that an open block costs its own
    size and a closed one nothing.

    Args:
        checkpoint: the weights.
        cls: the class to build; the merged model's, so that all models' blocks and parameter names agree.
        config: the checkpoint's own config.
    """

    def __init__(self, checkpoint: Checkpoint, cls: type[PreTrainedModel], config: PretrainedConfig) -> None:
        self.checkpoint = checkpoint
        with init_empty_weights(include_buffers=False):
            self.module: PreTrainedModel = cls._from_config(config, dtype=_main_dtype(checkpoint)).eval()
        self.blocks = find_blocks(self.module)
        self.block_names = _real_paths(self.module, self.blocks)
        self._empty = _all_parameters(self.module)
        self._open: set[str] = set()
        self.sources, self.converted = self._match()
        self._by_block = {path: self._within(f"{real}.") for path, real in self.block_names.items()}
        in_blocks = {name for names in self._by_block.values() for name in names}
        self._outer_names = [name for name in self.sources if name not in in_blocks]

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor of the model's state, by name; tied ones appear under each of their names."""
        return {name: tuple(value.shape) for name, value in self.module.state_dict().items()}

    def missing(self) -> list[str]:
        """State tensors for which the checkpoint has no source, tied ones with a source left out."""
        have = set(self.sources.values())
        for target, source in self.module.all_tied_weights_keys.items():
            if target in have or source in have:
                have |= {target, source}
        ignored = getattr(self.module, "_keys_to_ignore_on_load_missing", None) or []
        return [
            name
            for name in self.module.state_dict()
            if name not in have and not any(pattern in name for pattern in ignored)
        ]

    def block_bytes(self, path: str) -> int:
        """Bytes of a block's tensors on disk."""
        return sum(self.checkpoint.tensors[name].bytes for name in self._by_block[path])

    def source_of(self, path: str, name: str) -> str | None:
        """The checkpoint's name of a block's parameter; None if it was made from several tensors."""
        target = f"{self.block_names[path]}.{name}"
        if target in self.converted:
            return None
        return next((source for source in self._by_block[path] if self.sources[source] == target), None)

    def fixed(self, path: str) -> dict[str, str]:
        """The block's parameters that have no tensor of their own on disk, with the reason."""
        block = self.blocks[path]
        return {
            name: "fused by the loader from several tensors of the checkpoint"
            for name, _ in block.named_parameters()
            if self.source_of(path, name) is None
        }

    @contextmanager
    def outer(self) -> Iterator[None]:
        """Everything outside the blocks, on the CPU; embeddings are read by row from the mapped file."""
        self._load(self._outer_names, torch.device("cpu"))
        missing = set(self.module.state_dict()) - set(self.sources.values())
        if missing & {*self.module.all_tied_weights_keys, *self.module.all_tied_weights_keys.values()}:
            self.module.tie_weights(missing_keys=missing, recompute_mapping=False)
        try:
            yield
        finally:
            self._unload("")

    @contextmanager
    def block(self, path: str, device: torch.device) -> Iterator[nn.Module]:
        """The block at a canonical path with its weights on `device`; inside an open one, that one again."""
        if path in self._open:
            yield self.blocks[path]
            return
        self._load(self._by_block[path], device)
        block = self.blocks[path]
        for buffer_owner, name, buffer in _all_buffers(block):
            buffer_owner._buffers[name] = buffer.to(device)
        self._open.add(path)
        try:
            yield block
        finally:
            self._open.remove(path)
            self._unload(f"{self.block_names[path]}.")

    def _match(self) -> tuple[dict[str, str], set[str]]:
        state = self.module.state_dict()
        mapping = get_model_conversion_mapping(self.module)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        prefix = self.module.base_model_prefix
        sources: dict[str, str] = {}
        converted: set[str] = set()
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        for name in self.checkpoint.tensors:
            target, pattern = rename_source_key(name, renamings, converters, prefix, state)
            if target not in state and name in state:
                target, pattern = rename_source_key(name, [], [], prefix, state)
            if target not in state:
                continue
            sources[name] = target
            if pattern is not None:
                first, *rest = by_pattern[pattern].target_patterns
                converted |= {target, *(target.replace(first, other) for other in rest)}
        return sources, converted

    def _within(self, prefix: str) -> list[str]:
        return [name for name, target in self.sources.items() if target.startswith(prefix)]

    def _load(self, names: Iterable[str], device: torch.device) -> None:
        bar = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()
        dtype = self.module.dtype
        try:
            with self.checkpoint.reading(names) as tensors:
                info, _ = convert_and_load_state_dict_in_model(
                    self.module,
                    tensors,
                    LoadStateDictConfig(
                        device_map={"": device},
                        weight_mapping=cast(Any, get_model_conversion_mapping(self.module)),
                        dtype=dtype,
                        dtype_plan=self.module._get_dtype_plan(dtype),
                    ),
                )
        finally:
            if bar:
                transformers_logging.enable_progress_bar()
        if info.conversion_errors or info.mismatched_keys:
            problem = info.conversion_errors or info.mismatched_keys
            raise CheckpointError(f"{self.checkpoint.folder}: transformers could not load {problem}")

    def _unload(self, prefix: str) -> None:
        in_blocks = tuple(f"{real}." for real in self.block_names.values())
        for full_name, owner, name, empty in self._empty:
            inside = full_name.startswith(prefix) if prefix else not full_name.startswith(in_blocks)
            if inside:
                owner._parameters[name] = empty


def _main_dtype(checkpoint: Checkpoint) -> torch.dtype:
    sizes: dict[torch.dtype, int] = {}
    for entry in checkpoint.tensors.values():
        if entry.dtype.is_floating_point:
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.bytes
    if not sizes:
        raise CheckpointError(f"{checkpoint.folder} holds no floating-point weights.")
    return max(sizes, key=lambda dtype: sizes[dtype])


def _real_paths(module: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, str]:
    names = {id(member): name for name, member in module.named_modules()}
    return {path: names[id(block)] for path, block in blocks.items()}


def _all_parameters(module: nn.Module) -> list[tuple[str, nn.Module, str, Any]]:
    return [
        (f"{path}.{name}" if path else name, owner, name, parameter)
        for path, owner in module.named_modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None
    ]


def _all_buffers(module: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    return [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
