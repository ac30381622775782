"""A model whose blocks come one at a time, whether it is streamed from disk or already in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import nn
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
