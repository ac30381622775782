"""FeatCal, block by block: the paper's algorithm from top to bottom.

For each block in forward order: run every task's tokens through the student's block as it stands and through the
expert's block; accumulate the moments of every module from that one snapshot; solve; load the new weights; run the
student's tokens through the new block, which gives the next block's student features (paper §4.1, Appendix H).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from featcal_hf.drift import Drift, DriftMeter
from featcal_hf.errors import DataError
from featcal_hf.forward import (
    Call,
    ForwardInputs,
    ParkedForward,
    first_tensor,
    forward_inputs,
    next_block,
    parking,
    refuse_second_visit,
    run_block,
    run_block_watched,
)
from featcal_hf.models import BlockModel
from featcal_hf.recipe import Settings
from featcal_hf.systems import (
    BlockPlan,
    BlockSystems,
    BlockUpdate,
    ModuleUpdate,
    TaskMoments,
    plan_block,
    watched_names,
)
from featcal_hf.tokens import own_mask, pooled_blocks, token_stream

Batches = Sequence[tuple[Mapping[str, Tensor], Mapping[str, Tensor]]]


@dataclass(frozen=True)
class CalibrationTask:
    """One expert and the examples it is calibrated on.

    Attributes:
        name: the task's name.
        expert: the expert model.
        calibration: batches as (student inputs, expert inputs); the same tokens for both.
        holdout: batches on which drift is measured, not used in the solve; may be empty.
    """

    name: str
    expert: BlockModel
    calibration: Batches
    holdout: Batches


@dataclass(frozen=True)
class BlockReport:
    """What happened at one block.

    Attributes:
        path: the block's canonical path.
        modules: the modules calibrated, with the size of their steps.
        kept: parameters left at their merged values, with the reason.
        drift: task -> (before, after); empty without held-out rows. 'before' is the uncalibrated merged model.
        seconds: time spent on the block.
    """

    path: str
    modules: list[ModuleUpdate]
    kept: dict[str, str]
    drift: dict[str, tuple[Drift, Drift]]
    seconds: float

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
        }


@dataclass(frozen=True)
class Step:
    """One step of a run: a task's pass through a block, or the solve after all tasks.

    Attributes:
        path: the block.
        block: how many blocks are done.
        blocks: of how many.
        doing: the task's name, or 'solve'.
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
WriteBlock = Callable[[str, dict[str, Tensor]], None]


@torch.no_grad()
def calibrate_blocks(
    student: BlockModel,
    base: BlockModel | None,
    tasks: Sequence[CalibrationTask],
    settings: Settings,
    *,
    device: torch.device,
    write: WriteBlock,
    on_step: OnStep,
) -> list[BlockReport]:
    """Calibrate the merged model `student` towards its experts, block by block in forward order.

    Args:
        student: the merged model; its blocks get the new weights as the forwards pass through them.
        base: the model that the anchor A = ρ W^merge + (1-ρ) W^base extrapolates from; None allows ρ = 1 only.
        tasks: experts with their examples.
        settings: λ, ρ, α and switches, resolved.
        device: where blocks are run and systems solved; everything else stays where it is.
        write: called with each block's path and new parameters.
        on_step: called before each step.

    Raises:
        DataError: batches that don't fit the model or each other.
        CheckpointError: an architecture whose blocks can't be calibrated.
        SolveError: a module without a finite solution.
    """
    reports: list[BlockReport] = []
    visited: set[str] = set()
    with ExitStack() as stack:
        paths = list(stack.enter_context(parking(student.module)))
        experts = {id(task.expert.module): task.expert.module for task in tasks}
        for module in experts.values():
            stack.enter_context(parking(module))
        pooled = pooled_blocks(student.module, paths, settings.pooled_token)
        streams = [_TaskStreams.start(student, task) for task in tasks]
        for task_streams in streams:
            stack.callback(task_streams.stop)

        while (path := next_block({task.name: task.forwards() for task in streams})) is not None:
            refuse_second_visit(path, visited)
            started = time.perf_counter()
            place = (path, len(visited), len(paths))
            with student.block(path, device) as block, ExitStack() as base_open:
                base_block = base_open.enter_context(base.block(path, device)) if base else None
                stream = token_stream(student.module, block)
                plan: BlockPlan | None = None
                systems: BlockSystems | None = None
                for part, task in enumerate(streams):
                    on_step(Step(*place, task.name, part, len(streams) + 1))
                    with task.expert.block(path, device) as expert_block:
                        if plan is None or systems is None:
                            plan = _first_look(block, task, settings, path in pooled, student.fixed(path), device)
                            systems = BlockSystems(path, plan, block, base_block, settings)
                        moments = task.collect(plan, block, expert_block, stream, device)
                        moments.average(f"task {task.name}, {path}")
                        systems.add_task(moments, expert_block)
                if plan is None or systems is None:
                    raise DataError("there is no task to calibrate on; give at least one.")
                on_step(Step(*place, "solve", len(streams), len(streams) + 1))
                update = systems.solve()
                write(path, update.parameters)
                _load(block, update)
                for task in streams:
                    task.pass_through(block, stream, device)
            visited.add(path)
            drift = {task.name: task.drift() for task in streams if task.holdout}
            reports.append(BlockReport(path, update.modules, plan.kept, drift, time.perf_counter() - started))
            if len(visited) == len(paths):
                break
            with student.outer():
                for task in streams:
                    task.resume_students()
            for task in streams:
                with task.expert.outer():
                    task.resume_experts()
    return reports


@dataclass
class _Pair:
    """One batch's forwards through the student and the expert, and for held-out rows the merged model."""

    inputs: ForwardInputs
    student: ParkedForward
    expert: ParkedForward
    merged: ParkedForward | None = None
    student_output: Any = None
    expert_output: Any = None
    merged_output: Any = None

    def forwards(self) -> list[ParkedForward]:
        return [run for run in (self.student, self.expert, self.merged) if run is not None]


@dataclass
class _TaskStreams:
    """The parked forwards of one task."""

    name: str
    expert: BlockModel
    calibration: list[_Pair]
    holdout: list[_Pair]
    before: DriftMeter = field(default_factory=DriftMeter)
    after: DriftMeter = field(default_factory=DriftMeter)

    @classmethod
    def start(cls, student: BlockModel, task: CalibrationTask) -> _TaskStreams:
        """Start every batch's forwards and park them at the first block."""
        if not task.calibration:
            raise DataError(f"task {task.name} has no batches; give it at least one.")
        streams = cls(
            task.name,
            task.expert,
            [_pair(student, task.expert, batch, False) for batch in task.calibration],
            [_pair(student, task.expert, batch, True) for batch in task.holdout],
        )
        with student.outer():
            for pair in streams.pairs():
                pair.student.start()
                if pair.merged:
                    pair.merged.start()
        with task.expert.outer():
            for pair in streams.pairs():
                pair.expert.start()
        return streams

    def pairs(self) -> list[_Pair]:
        return [*self.calibration, *self.holdout]

    def forwards(self) -> list[ParkedForward]:
        return [run for pair in self.pairs() for run in pair.forwards()]

    def stop(self) -> None:
        """Give up all forwards."""
        for run in self.forwards():
            run.stop()

    def collect(
        self,
        plan: BlockPlan,
        block: nn.Module,
        expert_block: nn.Module,
        stream: str,
        device: torch.device,
    ) -> TaskMoments:
        """Run the task's tokens through the student's block as it stands and through the expert's block."""
        self.before, self.after = DriftMeter(), DriftMeter()
        moments = TaskMoments(plan, expert_block, device)
        for pair in self.calibration:
            student_run = run_block_watched(block, _call(pair.student, device), plan.watched)
            expert_run = run_block_watched(expert_block, _call(pair.expert, device), plan.watched)
            pair.expert_output = expert_run.output
            mask = own_mask(stream, pair.inputs)
            moments.add(student_run, expert_run, block, mask, pair.inputs.tokens)
        for pair in self.holdout:
            if pair.merged is None:
                continue
            expert_call = _call(pair.expert, device)
            pair.expert_output = run_block(expert_block, expert_call)
            pair.merged_output = run_block(block, _call(pair.merged, device))
            self.before.add(
                first_tensor(pair.merged_output),
                first_tensor(pair.expert_output),
                first_tensor(run_block(block, expert_call)),
                own_mask(stream, pair.inputs),
            )
        return moments

    def pass_through(self, block: nn.Module, stream: str, device: torch.device) -> None:
        """Run the student's tokens through the new block."""
        for pair in self.pairs():
            pair.student_output = run_block(block, _call(pair.student, device))
        for pair in self.holdout:
            self.after.add(
                first_tensor(pair.student_output),
                first_tensor(pair.expert_output),
                first_tensor(run_block(block, _call(pair.expert, device))),
                own_mask(stream, pair.inputs),
            )

    def resume_students(self) -> None:
        """Send the student's and the merged model's forwards on to their next block."""
        for pair in self.pairs():
            _resume(pair.student, pair.student_output)
            pair.student_output = None
            if pair.merged is not None:
                _resume(pair.merged, pair.merged_output)
                pair.merged_output = None

    def resume_experts(self) -> None:
        """Send the expert's forwards on to their next block."""
        for pair in self.pairs():
            _resume(pair.expert, pair.expert_output)
            pair.expert_output = None

    def drift(self) -> tuple[Drift, Drift]:
        """Drift at the block's output before and after calibration."""
        return self.before.mean(), self.after.mean()


def _pair(
    student: BlockModel,
    expert: BlockModel,
    batch: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    held_out: bool,
) -> _Pair:
    student_inputs = forward_inputs(student.module, batch[0])
    expert_inputs = forward_inputs(expert.module, batch[1])
    return _Pair(
        student_inputs,
        ParkedForward(student.module, student_inputs.inputs),
        ParkedForward(expert.module, expert_inputs.inputs),
        ParkedForward(student.module, student_inputs.inputs) if held_out else None,
    )


def _call(run: ParkedForward, device: torch.device) -> Call:
    if run.call is None:
        raise DataError("a forward ended before the others; give every batch the same kinds of inputs.")
    return run.call.on(device)


def _resume(run: ParkedForward, output: Any) -> None:
    if run.call is None:
        raise DataError("a forward ended before the others; give every batch the same kinds of inputs.")
    home = run.call.hidden_states.device
    run.resume(Call("", (output,), {}).on(home).args[0])


def _first_look(
    block: nn.Module,
    task: _TaskStreams,
    settings: Settings,
    pooled: bool,
    fixed: dict[str, str],
    device: torch.device,
) -> BlockPlan:
    call = _call(task.calibration[0].student, device)
    run = run_block_watched(block, call, watched_names(block))
    return plan_block(block, run, call, settings, pooled, fixed)


def _load(block: nn.Module, update: BlockUpdate) -> None:
    for name, value in update.parameters.items():
        module_path, _, parameter = name.rpartition(".")
        block.get_submodule(module_path).get_parameter(parameter).data = value
