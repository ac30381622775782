"""FeatCal, block by block: the paper's algorithm from top to bottom.

For each block in forward order: run every task's tokens through the student's block as it stands and through the
expert's block; accumulate the moments of every module from that one snapshot; solve; load the new weights; run the
student's tokens through the new block, which gives the next block's student features (paper §4.1, Appendix H).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from featcal_hf.activations import Activations
from featcal_hf.allocator import keeping_freed_memory
from featcal_hf.drift import Drift
from featcal_hf.errors import DataError
from featcal_hf.forward import next_block, parking, refuse_second_visit, run_block_watched
from featcal_hf.models import BlockModel
from featcal_hf.outcome import TaskOutcome, finish
from featcal_hf.products import float32_products
from featcal_hf.ranks import ALONE, FIRST, Ranks
from featcal_hf.recipe import Settings
from featcal_hf.stages import StageClock, StageCost, peak_bytes
from featcal_hf.streams import CalibrationTask, TaskStreams, share_of
from featcal_hf.systems import (
    BlockPlan,
    BlockSystems,
    InputUpdate,
    ModuleUpdate,
    plan_block,
    watched_names,
)
from featcal_hf.tokens import pooled_blocks, token_stream


@dataclass(frozen=True)
class BlockReport:
    """What happened at one block.

    Attributes:
        path: the block's canonical path.
        modules: the modules calibrated, with the size of their steps.
        kept: parameters left at their merged values, with the reason.
        drift: task -> (before, after); empty without held-out rows. 'before' is the uncalibrated merged model.
        seconds: time spent on the block.
        inputs: what was solved over: one entry for each tensor that linear modules read.
        costs: seconds and memory of each stage.
        peak_bytes: the most memory that the process had held when the block was done; None where nobody knows.
        outcome: task -> final features and output drift of its held-out rows; of the last block alone.
    """

    path: str
    modules: list[ModuleUpdate]
    kept: dict[str, str]
    drift: dict[str, tuple[Drift, Drift]]
    seconds: float
    inputs: list[InputUpdate] = field(default_factory=list)
    costs: dict[str, StageCost] = field(default_factory=dict)
    peak_bytes: int | None = None
    outcome: dict[str, TaskOutcome] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-able values."""
        return {
            "path": self.path,
            "seconds": round(self.seconds, 3),
            "modules": [asdict(module) for module in self.modules],
            "kept": self.kept,
            "drift": {
                task: {"before": asdict(before), "after": asdict(after)} for task, (before, after) in self.drift.items()
            },
            "inputs": [asdict(update) for update in self.inputs],
            "costs": {stage: asdict(cost) for stage, cost in self.costs.items()},
            "peak_bytes": self.peak_bytes,
            "outcome": {task: asdict(outcome) for task, outcome in self.outcome.items()},
        }


@dataclass(frozen=True)
class Step:
    """One step of a run: a task's pass through a block, the solve after all tasks, or a finished block's replay.

    Attributes:
        path: the block.
        block: how many blocks are done.
        blocks: of how many.
        doing: the task's name, 'solve', or 'replay'.
        part: how many of the block's steps are done.
        parts: of how many: one for each task, and the solve.
    """

    path: str
    block: int
    blocks: int
    doing: str
    part: int
    parts: int


OnStep = Callable[[Step], None]
OnBlock = Callable[[BlockReport], None]
WriteBlock = Callable[[str, dict[str, Tensor]], None]
ReadBlock = Callable[[str], dict[str, Tensor]]
REPLAY = "replay"


def _read_nothing(path: str) -> dict[str, Tensor]:
    raise ValueError(f"block {path} is finished, and nothing reads its parameters")


@torch.no_grad()
def calibrate_blocks(
    student: BlockModel,
    base: BlockModel | None,
    tasks: Sequence[CalibrationTask],
    settings: Settings,
    *,
    device: torch.device,
    activations: Activations,
    write: WriteBlock,
    on_step: OnStep,
    on_block: OnBlock = lambda report: None,
    finished: Sequence[BlockReport] = (),
    read: ReadBlock = _read_nothing,
    ranks: Ranks = ALONE,
) -> list[BlockReport]:
    """Calibrate the merged model `student` towards its experts, block by block in forward order.

    Args:
        student: the merged model; its blocks get the new weights as the forwards pass through them.
        base: the model that the anchor A = ρ W^merge + (1-ρ) W^base extrapolates from; None allows ρ = 1 only.
        tasks: experts with their examples.
        settings: λ, ρ, α and switches, resolved.
        device: where blocks are run and systems solved; everything else stays where it is.
        activations: where the forwards' tensors wait between blocks.
        write: called with each block's path and new parameters, on the first rank.
        on_block: called with the report of each block that has been calibrated, on the first rank.
        on_step: called before each step.
        finished: reports of the first blocks, done by an earlier run: the forwards go through them as they did then.
        read: a finished block's new parameters, by its path; called on the first rank.
        ranks: who shares the work; all are given the same batches.

    Raises:
        DataError: batches that don't fit the model or each other.
        CheckpointError: an architecture whose blocks can't be calibrated.
        SolveError: a module without a finite solution.
    """
    if not tasks:
        raise DataError("there is no task to calibrate on; give at least one.")
    reports: list[BlockReport] = []
    visited: set[str] = set()
    with ExitStack() as stack:
        stack.enter_context(float32_products(rounded=False))
        stack.enter_context(keeping_freed_memory())
        paths = list(stack.enter_context(parking(student.module)))
        experts = {id(task.expert.module): task.expert.module for task in tasks}
        for module in experts.values():
            stack.enter_context(parking(module))
        pooled = pooled_blocks(student.module, paths, settings.pooled_token)
        streams = [TaskStreams.start(student, task, activations) for task in share_of(tasks, ranks)]
        for task in streams:
            stack.callback(task.stop)
        while (path := next_block(_places(streams, ranks))) is not None:
            refuse_second_visit(path, visited)
            place = BlockPlace(path, len(visited), len(paths), path in pooled)
            if place.number < len(finished):
                on_step(Step(path, place.number, place.blocks, REPLAY, 0, len(streams) + 1))
                parameters = ranks.pool(read(path) if ranks.is_first else {})
                _replay_block(place, student, streams, parameters, device)
                reports.append(finished[place.number])
            else:
                report = _calibrate_block(
                    place, student, base, streams, settings, device=device, write=write, on_step=on_step, ranks=ranks
                )
                reports.append(ranks.exchange(report)[FIRST])
                if ranks.is_first:
                    on_block(report)
            visited.add(path)
            if place.is_last:
                break
            with student.outer():
                for task in streams:
                    task.resume_students()
            for task in streams:
                task.resume_experts()
    return reports


@dataclass(frozen=True)
class BlockPlace:
    """Where a run is: the block's path, its number of how many, and whether only its first token is read."""

    path: str
    number: int
    blocks: int
    first_token_read: bool

    @property
    def is_last(self) -> bool:
        """Whether no block comes after it: the forwards then end where they are, and no head is run."""
        return self.number + 1 == self.blocks


def _calibrate_block(
    place: BlockPlace,
    student: BlockModel,
    base: BlockModel | None,
    streams: Sequence[TaskStreams],
    settings: Settings,
    *,
    device: torch.device,
    write: WriteBlock,
    on_step: OnStep,
    ranks: Ranks,
) -> BlockReport:
    started, clock = time.perf_counter(), StageClock()
    path, steps = place.path, len(streams) + 1
    outcome: dict[str, TaskOutcome] = {}
    with clock.loading(student.block(path, device)) as block:
        stream = token_stream(student.module, block)
        plan = _first_look(place, student, block, streams[0], settings, device, ranks)
        tokens = _most_tokens(streams, stream, ranks)
        most_tokens = sum(own for own, _ in tokens), sum(encoder for _, encoder in tokens)
        with clock.loading(base.block(path, device) if base else nullcontext()) as base_block:
            systems = BlockSystems(path, plan, block, base_block, settings, most_tokens, ranks)
            for part, task in enumerate(streams):
                on_step(Step(path, place.number, place.blocks, task.name, part, steps))
                with clock.loading(task.expert.block(path, device)) as expert_block:
                    moments = systems.start_task(expert_block, *tokens[part])
                    task.collect(moments, block, expert_block, stream, device, clock, place.is_last)
                    with clock.stage("moments"):
                        moments.gather(ranks, systems.owners)
                        moments.average(f"task {task.name}, {path}")
                    with clock.stage("solve"):
                        systems.add_task(moments, expert_block)
            on_step(Step(path, place.number, place.blocks, "solve", len(streams), steps))
            with clock.stage("solve"):
                update = systems.solve()
        with clock.stage("write"):
            if ranks.is_first:
                write(path, update.parameters)
        _load(block, update.parameters)
        with nullcontext() if place.is_last else clock.loading(student.outer()):
            for task in streams:
                with clock.stage("forwards"):
                    task.pass_through(block, device, place.is_last)
                with clock.stage("drift"):
                    task.measure(block, stream, place.first_token_read, device)
    drift = {task.name: task.drift() for task in streams if task.holdout}
    if place.is_last:
        with clock.stage("drift"):
            outcome = {
                task.name: finish(task, student, stream, place.first_token_read) for task in streams if task.holdout
            }
    return BlockReport(
        path,
        update.modules,
        plan.kept,
        drift,
        time.perf_counter() - started,
        update.inputs,
        clock.costs(),
        peak_bytes(),
        outcome,
    )


def _replay_block(
    place: BlockPlace,
    student: BlockModel,
    streams: Sequence[TaskStreams],
    parameters: dict[str, Tensor],
    device: torch.device,
) -> None:
    """Send all forwards through a finished block, as they went when its new parameters were found."""
    with student.block(place.path, device) as block:
        for task in streams:
            with task.expert.block(place.path, device) as expert_block:
                task.replay(block, expert_block, device)
        _load(block, {name: value.to(device) for name, value in parameters.items()})
        with student.outer():
            for task in streams:
                task.pass_through(block, device, place.is_last)


def _first_look(
    place: BlockPlace,
    student: BlockModel,
    block: nn.Module,
    task: TaskStreams,
    settings: Settings,
    device: torch.device,
    ranks: Ranks,
) -> BlockPlan:
    """The plan, from the very first batch, which the first rank has."""

    def look() -> BlockPlan:
        call = task.first_call(device)
        run = run_block_watched(block, call, watched_names(block))
        return plan_block(block, run, call, settings, place.first_token_read, student.fixed(place.path))

    return ranks.of_first(look)


def _places(streams: Sequence[TaskStreams], ranks: Ranks) -> dict[str, set[str | None]]:
    """Where each task's forwards are parked, on whatever rank."""
    everyone = ranks.exchange([task.places() for task in streams])
    return {task.name: set().union(*(places[number] for places in everyone)) for number, task in enumerate(streams)}


def _most_tokens(streams: Sequence[TaskStreams], stream: str, ranks: Ranks) -> list[tuple[int, int]]:
    """Tokens of each task at most, on all ranks: the block's own, and those that its cross-attention reads."""
    everyone = ranks.exchange([task.most_tokens(stream) for task in streams])
    return [
        (sum(own for own, _ in parts), sum(encoder for _, encoder in parts)) for parts in zip(*everyone, strict=True)
    ]


def _load(block: nn.Module, parameters: dict[str, Tensor]) -> None:
    for name, value in parameters.items():
        module_path, _, parameter = name.rpartition(".")
        # As it is read back from a file: a matrix product may depend on how its operands lie in memory.
        block.get_submodule(module_path).get_parameter(parameter).data = value.contiguous()
