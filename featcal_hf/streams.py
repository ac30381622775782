"""The parked forwards of a task: student, expert and merged model side by side, one block at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    run_block,
    run_block_watched,
    without_loss,
)
from featcal_hf.models import BlockModel
from featcal_hf.stages import StageClock
from featcal_hf.systems import BlockPlan, TaskMoments
from featcal_hf.tokens import own_mask

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


@dataclass
class Pair:
    """One batch's forwards through the student and the expert, and for held-out rows the merged model."""

    inputs: ForwardInputs
    student: ParkedForward
    expert: ParkedForward
    merged: ParkedForward | None = None
    student_output: Any = None
    expert_output: Any = None
    merged_output: Any = None

    def forwards(self) -> list[ParkedForward]:
        """The forwards there are."""
        return [run for run in (self.student, self.expert, self.merged) if run is not None]


@dataclass
class TaskStreams:
    """The parked forwards of one task."""

    name: str
    expert: BlockModel
    calibration: list[Pair]
    holdout: list[Pair]
    before: DriftMeter = field(default_factory=DriftMeter)
    after: DriftMeter = field(default_factory=DriftMeter)

    @classmethod
    def start(cls, student: BlockModel, task: CalibrationTask) -> TaskStreams:
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

    def pairs(self) -> list[Pair]:
        """All batches, calibration first."""
        return [*self.calibration, *self.holdout]

    def forwards(self) -> list[ParkedForward]:
        """All forwards of all batches."""
        return [run for pair in self.pairs() for run in pair.forwards()]

    def first_call(self, device: torch.device) -> Call:
        """What the student's block is given for the first batch."""
        return _call(self.calibration[0].student, device)

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
        clock: StageClock,
    ) -> TaskMoments:
        """Run the task's tokens through the student's block as it stands and through the expert's block."""
        self.before, self.after = DriftMeter(), DriftMeter()
        own, encoder = self.most_tokens(stream, device)
        moments = TaskMoments(plan, expert_block, own, encoder, device)
        for pair in self.calibration:
            with clock.stage("forwards"):
                student_run = run_block_watched(block, _call(pair.student, device), plan.watched)
                expert_run = run_block_watched(expert_block, _call(pair.expert, device), plan.watched)
                pair.expert_output = _at_home(pair.expert, expert_run.output)
            with clock.stage("moments"):
                mask = own_mask(stream, pair.inputs)
                moments.add(student_run, expert_run, block, mask, pair.inputs.tokens)
        with clock.stage("drift"):
            self._measure_before(plan.first_token_read, block, expert_block, stream, device)
        return moments

    def _measure_before(
        self, first_token_read: bool, block: nn.Module, expert_block: nn.Module, stream: str, device: torch.device
    ) -> None:
        for pair in self.holdout:
            if pair.merged is None:
                continue
            expert_call = _call(pair.expert, device)
            expert_output = run_block(expert_block, expert_call)
            merged_output = run_block(block, _call(pair.merged, device))
            self.before.add(
                first_tensor(merged_output),
                first_tensor(expert_output),
                first_tensor(run_block(block, expert_call.cast(first_tensor(merged_output).dtype))),
                own_mask(stream, pair.inputs),
                first_token_read,
            )
            pair.expert_output = _at_home(pair.expert, expert_output)
            pair.merged_output = _at_home(pair.merged, merged_output)

    def most_tokens(self, stream: str, device: torch.device) -> tuple[int, int]:
        """Tokens of the task at most: the block's own, and those that its cross-attention reads."""
        own = encoder = 0
        for pair in self.calibration:
            mask, encoder_mask = own_mask(stream, pair.inputs), pair.inputs.tokens
            call = _call(pair.student, device)
            own += call.hidden_states.shape[:2].numel() if mask is None else int(mask.sum())
            others = [value.shape[:2].numel() for value in call.other_tensors if value.dim() == 3]
            encoder += max(others, default=0) if encoder_mask is None else int(encoder_mask.sum())
        return own, encoder

    def pass_through(self, block: nn.Module, device: torch.device) -> None:
        """Run the student's tokens through the new block."""
        for pair in self.pairs():
            pair.student_output = _at_home(pair.student, run_block(block, _call(pair.student, device)))

    def measure(self, block: nn.Module, stream: str, first_token_read: bool, device: torch.device) -> None:
        """Measure the drift of the new block's output on the held-out rows."""
        for pair in self.holdout:
            self.after.add(
                first_tensor(pair.student_output).to(device),
                first_tensor(pair.expert_output).to(device),
                first_tensor(
                    run_block(block, _call(pair.expert, device).cast(first_tensor(pair.student_output).dtype))
                ),
                own_mask(stream, pair.inputs),
                first_token_read,
            )

    def resume_students(self) -> None:
        """Send the student's and the merged model's forwards on to their next block."""
        for pair in self.pairs():
            pair.student.resume(pair.student_output)
            pair.student_output = None
            if pair.merged is not None:
                pair.merged.resume(pair.merged_output)
                pair.merged_output = None

    def resume_experts(self, pairs: Sequence[Pair]) -> None:
        """Send the expert's forwards of some batches on to their next block."""
        with self.expert.outer():
            for pair in pairs:
                pair.expert.resume(pair.expert_output)
                pair.expert_output = None

    def drift(self) -> tuple[Drift, Drift]:
        """Drift at the block's output before and after calibration."""
        return self.before.mean(), self.after.mean()


def _pair(
    student: BlockModel,
    expert: BlockModel,
    batch: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    held_out: bool,
) -> Pair:
    student_inputs = forward_inputs(student.module, batch[0])
    expert_inputs = forward_inputs(expert.module, batch[1])
    if held_out:
        student_inputs = without_loss(student.module, student_inputs)
        expert_inputs = without_loss(expert.module, expert_inputs)
    return Pair(
        student_inputs,
        ParkedForward(student.module, student_inputs.inputs),
        ParkedForward(expert.module, expert_inputs.inputs),
        ParkedForward(student.module, student_inputs.inputs) if held_out else None,
    )


def _call(run: ParkedForward, device: torch.device) -> Call:
    if run.call is None:
        raise DataError("a forward ended before the others; give every batch the same kinds of inputs.")
    return run.call.on(device)


def _at_home(run: ParkedForward, output: Any) -> Any:
    """A block's output where the forward wants it; it waits there while other batches are on the device."""
    if run.call is None:
        raise DataError("a forward ended before the others; give every batch the same kinds of inputs.")
    return Call("", (output,), {}).on(run.call.hidden_states.device).args[0]
