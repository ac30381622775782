"""The parked forwards of a task: student, expert and merged model side by side, one block at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from featcal_hf.activations import Activations
from featcal_hf.drift import Drift, DriftMeter
from featcal_hf.errors import DataError
from featcal_hf.forward import (
    Call,
    ForwardInputs,
    ParkedForward,
    first_tensor,
    forward_inputs,
    places,
    run_block,
    run_block_watched,
    without_loss,
)
from featcal_hf.models import BlockModel
from featcal_hf.ranks import FIRST, Ranks, divide
from featcal_hf.stages import StageClock
from featcal_hf.systems import TaskMoments
from featcal_hf.tokens import own_mask

CALIBRATION_RUNS, HOLDOUT_RUNS = 3, 5
"""How often a batch is run through a block: a held-out one by the merged model and for its drift's parts as well."""
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


def share_of(tasks: Sequence[CalibrationTask], ranks: Ranks) -> list[CalibrationTask]:
    """The batches of each task that this rank runs; the first one has all held-out ones, and so fewer others.

    Raises:
        DataError: a task has no batches.
    """
    loads, shares = [0.0] * ranks.size, []
    for task in tasks:
        if not task.calibration:
            raise DataError(f"task {task.name} has no batches; give it at least one.")
        first, *others = (CALIBRATION_RUNS * _size(batch) for batch in task.calibration)
        owners = divide([first], loads)
        loads[FIRST] += HOLDOUT_RUNS * sum(map(_size, task.holdout))
        owners += divide(others, loads)
        own = [batch for batch, owner in zip(task.calibration, owners, strict=True) if owner == ranks.number]
        shares.append(replace(task, calibration=own, holdout=task.holdout if ranks.is_first else []))
    return shares


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
    activations: Activations
    calibration: list[Pair]
    holdout: list[Pair]
    before: DriftMeter = field(default_factory=DriftMeter)
    after: DriftMeter = field(default_factory=DriftMeter)

    @classmethod
    def start(cls, student: BlockModel, task: CalibrationTask, activations: Activations) -> TaskStreams:
        """Start every batch's forwards and park them at the first block."""
        streams = cls(
            task.name,
            task.expert,
            activations,
            [_pair(student, task.expert, batch, False) for batch in task.calibration],
            [_pair(student, task.expert, batch, True) for batch in task.holdout],
        )
        with student.outer():
            for pair in streams.pairs():
                for run in (pair.student, pair.merged):
                    if run is not None:
                        run.start()
                        activations.keep(run)
        with task.expert.outer():
            for pair in streams.pairs():
                pair.expert.start()
                activations.keep(pair.expert)
        return streams

    def pairs(self) -> list[Pair]:
        """All batches, calibration first."""
        return [*self.calibration, *self.holdout]

    def forwards(self) -> list[ParkedForward]:
        """All forwards of all batches."""
        return [run for pair in self.pairs() for run in pair.forwards()]

    def places(self) -> set[str | None]:
        """The blocks at which its forwards are parked."""
        return places(self.forwards())

    def first_call(self, device: torch.device) -> Call:
        """What the student's block is given for the first batch."""
        return self.activations.call(self.calibration[0].student, device)

    def stop(self) -> None:
        """Give up all forwards."""
        for run in self.forwards():
            run.stop()

    def collect(
        self,
        moments: TaskMoments,
        block: nn.Module,
        expert_block: nn.Module,
        stream: str,
        device: torch.device,
        clock: StageClock,
        last: bool,
    ) -> None:
        """Add up the task's moments: its tokens through the student's block as it stands and through the expert's.

        The student's run ends where every input has been seen. The expert's calibration forwards go on to their next
        block one after the other; in the `last` block they end like the student's.
        """
        self.before, self.after = DriftMeter(), DriftMeter()
        watched, written = moments.plan.watched, moments.written
        with nullcontext() if last else self.expert.outer():
            for pair in self.calibration:
                with clock.stage("forwards"):
                    student_call = self.activations.call(pair.student, device)
                    student_run = run_block_watched(block, student_call, watched, whole=False)
                    expert_call = self.activations.call(pair.expert, device)
                    expert_run = run_block_watched(expert_block, expert_call, watched, written, whole=not last)
                with clock.stage("moments"):
                    moments.add(student_run, expert_run, block, own_mask(stream, pair.inputs), pair.inputs.tokens)
                if not last:
                    with clock.stage("forwards"):
                        self._go_on(pair.expert, expert_run.output)
        with clock.stage("drift"):
            self._measure_before(moments.plan.first_token_read, block, expert_block, stream, device)

    def _measure_before(
        self, first_token_read: bool, block: nn.Module, expert_block: nn.Module, stream: str, device: torch.device
    ) -> None:
        for pair in self.holdout:
            if pair.merged is None:
                continue
            expert_call = self.activations.call(pair.expert, device)
            expert_output = run_block(expert_block, expert_call)
            merged_output = run_block(block, self.activations.call(pair.merged, device))
            self.before.add(
                first_tensor(merged_output),
                first_tensor(expert_output),
                first_tensor(run_block(block, expert_call.cast(first_tensor(merged_output).dtype))),
                own_mask(stream, pair.inputs),
                first_token_read,
            )
            pair.expert_output = _at_home(pair.expert, expert_output)
            pair.merged_output = _at_home(pair.merged, merged_output)

    def most_tokens(self, stream: str) -> tuple[int, int]:
        """Tokens of the task at most: the block's own, and those that its cross-attention reads."""
        own = encoder = 0
        for pair in self.calibration:
            mask, encoder_mask = own_mask(stream, pair.inputs), pair.inputs.tokens
            call = pair.student.waiting()
            own += call.hidden_states.shape[:2].numel() if mask is None else int(mask.sum())
            others = [value.shape[:2].numel() for value in call.other_tensors if value.dim() == 3]
            encoder += max(others, default=0) if encoder_mask is None else int(encoder_mask.sum())
        return own, encoder

    def replay(self, block: nn.Module, expert_block: nn.Module, device: torch.device) -> None:
        """Run the expert's and the merged model's tokens through a block again, with nothing measured."""
        with self.expert.outer():
            for pair in self.calibration:
                self._go_on(pair.expert, run_block(expert_block, self.activations.call(pair.expert, device)))
        for pair in self.holdout:
            expert_output = run_block(expert_block, self.activations.call(pair.expert, device))
            pair.expert_output = _at_home(pair.expert, expert_output)
            if pair.merged is not None:
                merged_output = run_block(block, self.activations.call(pair.merged, device))
                pair.merged_output = _at_home(pair.merged, merged_output)

    def pass_through(self, block: nn.Module, device: torch.device, last: bool) -> None:
        """Run the student's tokens through the new block.

        Its calibration forwards go on to their next block one after the other, unless this is the last; `outer` has
        to be open for that.
        """
        for pair in [] if last else self.calibration:
            self._go_on(pair.student, run_block(block, self.activations.call(pair.student, device)))
        for pair in self.holdout:
            pair.student_output = _at_home(pair.student, run_block(block, self.activations.call(pair.student, device)))

    def measure(self, block: nn.Module, stream: str, first_token_read: bool, device: torch.device) -> None:
        """Measure the drift of the new block's output on the held-out rows."""
        for pair in self.holdout:
            self.after.add(
                first_tensor(pair.student_output).to(device),
                first_tensor(pair.expert_output).to(device),
                first_tensor(
                    run_block(
                        block, self.activations.call(pair.expert, device).cast(first_tensor(pair.student_output).dtype)
                    )
                ),
                own_mask(stream, pair.inputs),
                first_token_read,
            )

    def resume_students(self) -> None:
        """Send the student's and the merged model's forwards of held-out rows on to their next block."""
        for pair in self.holdout:
            self._go_on(pair.student, pair.student_output)
            pair.student_output = None
            if pair.merged is not None:
                self._go_on(pair.merged, pair.merged_output)
                pair.merged_output = None

    def resume_experts(self) -> None:
        """Send the expert's forwards of held-out rows on to their next block."""
        with self.expert.outer():
            for pair in self.holdout:
                self._go_on(pair.expert, pair.expert_output)
                pair.expert_output = None

    def _go_on(self, run: ParkedForward, output: Any) -> None:
        run.resume(_at_home(run, output))
        self.activations.keep(run)

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


def _size(batch: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]) -> int:
    return sum(value.numel() for value in batch[0].values())


def _at_home(run: ParkedForward, output: Any) -> Any:
    """A block's output where the forward wants it; it waits there while other batches are on the device."""
    return Call("", (output,), {}).on(run.waiting().hidden_states.device).args[0]
