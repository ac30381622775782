"""How much memory a run will take at most: an estimate from shapes, before any block is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from featcal_hf.allocator import KEPT_BYTES
from featcal_hf.footprint import BlockFootprint, ModuleInput
from featcal_hf.grams import GATHERED_ROWS
from featcal_hf.moments import few_in_all, few_in_task
from featcal_hf.solve import WORK_ROWS

FLOAT32_BYTES = 4
RUNTIME_BYTES = 20_000_000
"""What libraries take once they compute: threads, kernels, and what the allocator keeps for itself."""


@dataclass(frozen=True)
class Load:
    """What a run's rows ask for.

    Attributes:
        tokens: of all tasks, that count.
        tasks: how many.
        batches: the rows' size in batches like the one that was walked, once for each forward that waits with them.
        limit: bytes of waiting features that may stay in memory.
        resident: bytes that the process holds before it starts.
        outputs: bytes that the held-out rows' way from the last block to the end takes, when no block is there.
    """

    tokens: int
    tasks: int
    batches: float
    limit: int
    resident: int
    outputs: int


@dataclass(frozen=True)
class MemoryEstimate:
    """An estimate of what a run takes.

    Attributes:
        peak: most resident memory of the process, in bytes.
        waiting: bytes of the rows' features that wait between blocks, at most.
        in_files: how many of those go to files.
    """

    peak: int
    waiting: int
    in_files: int


def estimate_memory(blocks: Iterable[tuple[int, BlockFootprint]], load: Load) -> MemoryEstimate:
    """The most that a run takes.

    Args:
        blocks: of each block, the bytes of its tensors on disk and what one batch takes there.
        load: what the rows ask for.
    """
    found = list(blocks)
    waiting = int(load.batches * max((footprint.waiting for _, footprint in found), default=0))
    kept = min(waiting, load.limit)
    block = max((_block(stored, footprint.inputs, load) for stored, footprint in found), default=0)
    return MemoryEstimate(load.resident + RUNTIME_BYTES + kept + max(block, load.outputs), waiting, waiting - kept)


def _block(stored: int, inputs: tuple[ModuleInput, ...], load: Load) -> int:
    """One block of merged model, base and expert, its running systems, and what comes on top at each step."""
    groups = [each for each in inputs if each.linears]
    systems = sum(_system(group, load) for group in groups)
    moments = sum(_moments(group, load) for group in groups)
    outputs = max((each.bytes // each.width * rows for each in groups for rows, _ in each.linears), default=0)
    features = 2 * sum(each.bytes for each in inputs) + 2 * outputs
    collect = moments + features
    work = (
        FLOAT32_BYTES
        * 4
        * max((min(WORK_ROWS, rows) * width for each in groups for rows, width in each.linears), default=0)
    )
    add = moments + work
    solve = stored + max((_solve(group, load) for group in groups), default=0) - moments
    # Products in half precision make copies of their weights.
    is_half = stored < 3 * sum(rows * width for group in groups for rows, width in group.linears)
    kept = min(features, KEPT_BYTES)  # what a batch frees stays with the process, see `keeping_freed_memory`
    return (4 if is_half else 3) * stored + systems + max(collect, add, solve) + kept


def _system(group: ModuleInput, load: Load) -> int:
    outputs = sum(rows for rows, _ in group.linears)
    if few_in_all(load.tokens, group.width):
        return FLOAT32_BYTES * load.tokens * (group.width + outputs)
    drift = group.width if outputs >= group.width else 0
    return FLOAT32_BYTES * group.width * (group.width + drift + outputs)


def _moments(group: ModuleInput, load: Load) -> int:
    tokens, width = load.tokens // load.tasks, group.width
    if few_in_task(tokens, width):
        return 2 * FLOAT32_BYTES * width * tokens
    outputs = sum(rows for rows, _ in group.linears)
    cross = 2 * outputs if outputs < width else width
    return FLOAT32_BYTES * width * (width + cross + 2 * min(tokens, GATHERED_ROWS))


def _solve(group: ModuleInput, load: Load) -> int:
    size = load.tokens if few_in_all(load.tokens, group.width) else group.width
    return FLOAT32_BYTES * (size * size + 2 * max(rows * width for rows, width in group.linears))
