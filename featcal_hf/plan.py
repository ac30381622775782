"""What a run will do and what it will take: modules, tokens, peak memory, disk and floating-point operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from featcal_hf.memory import MemoryEstimate
from featcal_hf.modules import linear_names, linear_weight, norms_of
from featcal_hf.recipe import Settings
from featcal_hf.streamed import StreamedModel

FORWARDS = 3
"""Forwards of a calibration row through each block: the expert's, the student's before and after the solve."""
DRIFT_FORWARDS = 5
"""Forwards of a held-out row through each block: the expert's, the merged model's, the student's; and the old and the
new block on the expert's input, which split drift before and after."""


@dataclass(frozen=True)
class BlockShape:
    """What a block's size costs.

    Attributes:
        weights: its parameters.
        linears: (d_out, d_in) of each linear module.
        inputs: d_in of each input that modules of one parent share.
    """

    weights: int
    linears: tuple[tuple[int, int], ...]
    inputs: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """The plan of a run.

    Attributes:
        blocks: blocks in the model.
        linears: linear modules to calibrate.
        norms: norms to calibrate.
        kept: reason -> parameters of blocks that keep their merged values.
        tokens: task -> tokens it is calibrated on.
        drift_passes: what measuring drift adds: passes over the calibration's tokens, at every block.
        memory: estimated memory of the process.
        disk_bytes: bytes written beside the merged model.
        flops: estimated floating-point operations.
    """

    blocks: int
    linears: int
    norms: int
    kept: dict[str, list[str]]
    tokens: dict[str, int]
    drift_passes: float
    memory: MemoryEstimate
    disk_bytes: int
    flops: float


def make_plan(
    student: StreamedModel,
    settings: Settings,
    tokens: Mapping[str, int],
    held_out_tokens: int,
    memory: MemoryEstimate,
    disk_bytes: int,
) -> Plan:
    """The plan of a run over `student`.

    Args:
        student: the merged model.
        settings: which kinds of parameters are calibrated.
        tokens: task -> tokens it is calibrated on.
        held_out_tokens: tokens that drift is measured on, all tasks together.
        memory: what the run will take, see `estimate_memory`.
        disk_bytes: bytes of the shards that will be written.
    """
    kept: dict[str, list[str]] = {}
    linears = norms = 0
    shapes = []
    for path, block in student.blocks.items():
        fixed = student.fixed(path)
        names = [name for name in linear_names(block) if f"{name}.weight" not in fixed]
        block_norms = [norm.name for norm in norms_of(block)] if settings.norm else []
        reached = {f"{name}.weight" for name in [*names, *block_norms]}
        reached |= {f"{name}.bias" for name in [*(names if settings.bias else []), *block_norms]}
        for name, _ in block.named_parameters():
            if name not in reached:
                kept.setdefault(fixed.get(name, "switched off, or no closed-form update"), []).append(f"{path}.{name}")
        linears += len(names)
        norms += len(block_norms)
        shapes.append(_shape(block, names))
    total = sum(tokens.values())
    drift_tokens = DRIFT_FORWARDS * held_out_tokens
    return Plan(
        len(shapes),
        linears,
        norms,
        kept,
        dict(tokens),
        drift_tokens / max(total, 1),
        memory,
        disk_bytes,
        sum(_block_flops(shape, total, len(tokens)) + 2.0 * shape.weights * drift_tokens for shape in shapes),
    )


def _shape(block: nn.Module, names: list[str]) -> BlockShape:
    sizes = {name: (len(weight), weight.shape[1]) for name in names for weight in [_weight(block, name)]}
    shared = {(name.rpartition(".")[0], width) for name, (_, width) in sizes.items()}
    return BlockShape(
        sum(parameter.numel() for parameter in block.parameters()),
        tuple(sizes.values()),
        tuple(width for _, width in shared),
    )


def _weight(block: nn.Module, name: str) -> Tensor:
    return linear_weight(block.get_submodule(name))


def _block_flops(shape: BlockShape, tokens: int, tasks: int) -> float:
    forwards = FORWARDS * 2.0 * shape.weights * tokens
    moments = sum(3.0 * width * width for width in shape.inputs) * tokens
    sides = 2 * tasks * sum(2.0 * rows * width * width for rows, width in shape.linears)
    solves = sum(width**3 / 3 for width in shape.inputs) + sum(2.0 * rows * width**2 for rows, width in shape.linears)
    return forwards + moments + sides + solves
