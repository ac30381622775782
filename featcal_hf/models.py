"""A model whose blocks come one at a time, whether it is streamed from disk or already in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from typing import Any, Protocol, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from featcal_hf.forward import find_blocks


class BlockModel(Protocol):
    """What calibration needs of a model.

    Attributes:
        module: the model; its blocks may be empty (on the meta device) outside `block`.
    """

    @property
    def module(self) -> PreTrainedModel:
        """The model whose forward is run."""
        ...

    def outer(self) -> AbstractContextManager[None]:
        """While open, everything outside the blocks has its weights: embeddings, final norms, heads."""
        ...

    def block(self, path: str, device: torch.device) -> AbstractContextManager[nn.Module]:
        """While open, the block at a canonical path has its weights on `device`."""
        ...

    def fixed(self, path: str) -> dict[str, str]:
        """The block's parameters that can't be replaced, with the reason."""
        ...


class ResidentModel:
    """A model that is in memory as a whole."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.module = module
        self._blocks = find_blocks(module)
        self._open: set[str] = set()

    def block_shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Shape of each parameter of each block."""
        return {
            path: {name: tuple(parameter.shape) for name, parameter in block.named_parameters()}
            for path, block in self._blocks.items()
        }

    def fixed(self, path: str) -> dict[str, str]:
        """Every parameter of a model in memory can be replaced."""
        return {}

    @contextmanager
    def outer(self) -> Iterator[None]:
        """Nothing to load."""
        yield

    @contextmanager
    def block(self, path: str, device: torch.device) -> Iterator[nn.Module]:
        """The block, moved to `device` and back to where it was; inside an open one, that one again."""
        block = self._blocks[path]
        if path in self._open:
            yield block
            return
        home = next(block.parameters()).device
        block.to(device)
        self._open.add(path)
        try:
            yield block
        finally:
            self._open.remove(path)
            block.to(home)


class ResidentAdapter:
    """A model in memory with PEFT's layers in it: each block is a copy without them, the model stays as it is.

    Args:
        module: the model inside the `PeftModel`.
        merge: merge the active adapters into the copies, in float32 and cast once; otherwise leave them out.
    """

    def __init__(self, module: PreTrainedModel, merge: bool) -> None:
        self.module, self.merge = module, merge
        self._blocks = find_blocks(module)

    def block_shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Shape of each parameter of each block, PEFT's own left out."""
        return {
            path: {name: tuple(parameter.shape) for name, parameter in _own_parameters(block).items()}
            for path, block in self._blocks.items()
        }

    def fixed(self, path: str) -> dict[str, str]:
        """As in any model in memory."""
        return {}

    @contextmanager
    def outer(self) -> Iterator[None]:
        """Nothing to load: outside the blocks PEFT's layers do their own work."""
        yield

    @contextmanager
    def block(self, path: str, device: torch.device) -> Iterator[nn.Module]:
        """A plain copy of the block on `device`."""
        dtypes = {name: parameter.dtype for name, parameter in _own_parameters(self._blocks[path]).items()}
        block = deepcopy(self._blocks[path]).to(device)
        block.__dict__.pop("forward", None)  # the parking place
        for parameter in block.parameters():
            parameter.data = parameter.data.float()
        _unwrap(block, self.merge)
        for name, parameter in block.named_parameters():
            parameter.data = parameter.data.to(dtypes[name])
        yield block


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT has put layers of its own into the model."""
    return any(isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)) for module in model.modules())


def has_merged_adapters(model: nn.Module) -> bool:
    """Whether an adapter is merged into the weights under PEFT's layers."""
    return any(isinstance(module, BaseTunerLayer) and module.merged for module in model.modules())


def _own_parameters(block: nn.Module) -> dict[str, Tensor]:
    """A block's parameters by the names that they have without PEFT."""
    found: dict[str, Tensor] = dict(block.named_parameters(recurse=False))
    for name, child in block.named_children():
        while isinstance(child, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            child = _wrapped(child)
        found |= {f"{name}.{inner}": parameter for inner, parameter in _own_parameters(child).items()}
    return found


def _unwrap(module: nn.Module, merge: bool) -> None:
    for name, child in module.named_children():
        inner: nn.Module = child
        while isinstance(inner, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            active = merge and not inner.disable_adapters
            if active and isinstance(inner, AuxiliaryTrainingWrapper):
                inner = inner.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
                continue
            if active:
                inner.merge()
            inner = _wrapped(inner)
        module._modules[name] = inner
        _unwrap(inner, merge)


def _wrapped(layer: Any) -> nn.Module:
    return cast(nn.Module, layer.original_module if isinstance(layer, AuxiliaryTrainingWrapper) else layer.base_layer)
