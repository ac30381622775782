"""What one batch's forward takes at each block: found by walking it through them without their weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from featcal_hf.forward import BlockRun, ParkedForward, forward_inputs, parking, run_block_watched
from featcal_hf.models import BlockModel
from featcal_hf.modules import linear_names, linear_weight, norms_of

META = torch.device("meta")


@dataclass(frozen=True)
class ModuleInput:
    """A tensor that modules of a block read.

    Attributes:
        linears: the linear modules that read it, as (d_out, d_in).
        width: d_in.
        bytes: its size.
    """

    linears: tuple[tuple[int, int], ...]
    width: int
    bytes: int


@dataclass(frozen=True)
class BlockFootprint:
    """What one batch takes at one block.

    Attributes:
        waiting: bytes that its forward holds while it waits there, the batch's own left out.
        inputs: what the block's modules read.
    """

    waiting: int
    inputs: tuple[ModuleInput, ...]


@torch.no_grad()
def walk(model: BlockModel, batch: Mapping[str, Tensor]) -> dict[str, BlockFootprint]:
    """What a batch takes at each block, by path.

    The model's own code between the blocks runs on what its embeddings give; blocks run on shapes alone. From the
    first that can't (its way depends on values, as in a mixture of experts), every linear module is taken to read all
    tokens, and what waits not to grow.
    """
    footprints: dict[str, BlockFootprint] = {}
    with parking(model.module) as blocks, model.outer():
        run = ParkedForward(model.module, forward_inputs(model.module, batch).inputs)
        run.start()
        hidden = run.waiting().hidden_states
        waiting = 0
        try:
            while run.call is not None:
                call, block = run.call, blocks[run.call.path]
                held = {id(value): value for value in (*run.held(), call.hidden_states, *call.other_tensors)}
                waiting = sum(value.untyped_storage().nbytes() for value in held.values())
                names = [*linear_names(block), *(norm.name for norm in norms_of(block))]
                watched = run_block_watched(block, call.on(META), names)
                footprints[call.path] = BlockFootprint(waiting, _inputs(block, watched))
                run.resume(tree_map(_somewhere, watched.output))
        except (NotImplementedError, RuntimeError):
            footprints |= {
                path: BlockFootprint(waiting, _all_tokens(block, hidden))
                for path, block in blocks.items()
                if path not in footprints
            }
        finally:
            run.stop()
    return footprints


def _inputs(block: nn.Module, run: BlockRun) -> tuple[ModuleInput, ...]:
    readers: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, calls in run.module_inputs.items():
        for value in calls:
            readers.setdefault(id(value), []).append(name)
            tensors[id(value)] = value
    linears = set(linear_names(block))
    return tuple(
        ModuleInput(
            tuple(
                (len(weight), weight.shape[1])
                for name in names
                if name in linears
                for weight in [linear_weight(block.get_submodule(name))]
            ),
            tensors[key].shape[-1],
            tensors[key].numel() * tensors[key].element_size(),
        )
        for key, names in readers.items()
    )


def _all_tokens(block: nn.Module, hidden: Tensor) -> tuple[ModuleInput, ...]:
    token_bytes = hidden.element_size() * hidden.shape[:-1].numel()
    shapes = [linear_weight(block.get_submodule(name)).shape for name in linear_names(block)]
    return tuple(ModuleInput(((rows, width),), width, token_bytes * width) for rows, width in shapes)


def _somewhere(value: Any) -> Any:
    return torch.empty_like(value, device="cpu") if isinstance(value, Tensor) else value
