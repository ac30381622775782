"""What a prepared run will take of memory, from its rows and one batch's walk through the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor
from transformers import PreTrainedModel

from featcal_hf.activations import default_limit
from featcal_hf.data import TaskData
from featcal_hf.data.batches import Batch
from featcal_hf.evaluate import NUMBERS_AT_ONCE
from featcal_hf.footprint import walk
from featcal_hf.memory import Load, MemoryEstimate, estimate_memory
from featcal_hf.outcome import LOGIT_BYTES
from featcal_hf.stages import peak_bytes, resident_bytes
from featcal_hf.streamed import StreamedModel

WAITING = {"calibration": 2, "holdout": 5}
"""Of a calibration batch the student's and the expert's forwards wait; of a held-out one the merged model's too, and
all three with the block's output as well."""
COPIES = 8
"""Float32 copies of logits that are worked on, see `OutputDrift`."""
UNKNOWN_RESIDENT = 600_000_000


def forecast_memory(
    student: StreamedModel, data: Sequence[TaskData], tokens: int, activation_memory: int | None
) -> MemoryEstimate:
    """What a run will take, at least what the process has taken so far.

    Args:
        student: the merged model.
        data: the tasks' rows.
        tokens: of all tasks, that count.
        activation_memory: bytes of waiting features that may stay in memory; None for the default.
    """
    held_out = [batch for task in data for batch in task.holdout]
    batches = [batch for task in data for batch in task.calibration]
    largest = max([*batches, *held_out], key=lambda batch: _padded(student, [batch]))
    footprints = walk(student, largest.student)
    waiting = WAITING["calibration"] * _padded(student, batches) + WAITING["holdout"] * _padded(student, held_out)
    load = Load(
        tokens,
        len(data),
        waiting / _padded(student, [largest]),
        default_limit() if activation_memory is None else activation_memory,
        resident_bytes() or UNKNOWN_RESIDENT,
        _output_bytes(student, max((_padded(student, task.holdout) for task in data), default=0)),
    )
    blocks = ((student.block_bytes(path), footprint) for path, footprint in footprints.items())
    estimate = estimate_memory(blocks, load)
    return replace(estimate, peak=max(estimate.peak, peak_bytes() or 0))


def batch_tokens(model: PreTrainedModel, inputs: Mapping[str, Tensor], counted: bool) -> int:
    """Tokens of a batch: those that count, or with the padding that is run through the model as well."""
    if counted:
        text = int(inputs["attention_mask"].sum()) if "attention_mask" in inputs else 0
        text += int(inputs["labels"].ne(-100).sum()) if "labels" in inputs else 0
    else:
        text = sum(inputs[name].numel() for name in ("input_ids", "labels") if name in inputs)
    if "pixel_values" not in inputs:
        return text
    patch = getattr(getattr(model.config, "vision_config", model.config), "patch_size", 16)
    rows, columns = (patch, patch) if isinstance(patch, int) else patch
    images, _, height, width = inputs["pixel_values"].shape
    return text + images * (height // rows) * (width // columns)


def _padded(student: StreamedModel, batches: Sequence[Batch]) -> int:
    return sum(batch_tokens(student.module, batch.student, counted=False) for batch in batches)


def _output_bytes(student: StreamedModel, tokens: int) -> int:
    """What the heads over a vocabulary of two models take, and the logits of a task's held-out tokens.

    A third head is the copy that a product in half precision makes of its weight.
    """
    head = student.module.get_output_embeddings()
    if head is None or not tokens:
        return 0
    weight: Tensor = head.weight
    numbers = tokens * len(weight)
    logits = min(LOGIT_BYTES, numbers * weight.element_size())
    return 3 * weight.numel() * weight.element_size() + 3 * logits + COPIES * 4 * min(NUMBERS_AT_ONCE, numbers)
