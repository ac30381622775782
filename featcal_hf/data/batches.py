"""Pad examples to batches, as the models' forwards take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from featcal_hf.errors import DataError

IGNORED_LABEL = -100
"""The label that transformers' losses leave out, and so the mark of decoder padding."""


@dataclass(frozen=True)
class Example:
    """One row as inputs of the merged model and of the expert, not padded yet."""

    digest: str
    """SHA-256 (hex) of the texts and pixels the models are given."""
    student: dict[str, list[int]]
    """Token lists by input name (`input_ids`, `token_type_ids`, `labels`); empty for an image alone."""
    expert: dict[str, list[int]]
    """The same for the expert: equal lists where the tokenizers agree."""
    pixel_values: torch.Tensor | None
    """(channels, height, width), float32."""
    truncated: bool


@dataclass(frozen=True)
class Batch:
    """One batch of one task, as inputs of each model's forward.

    `input_ids`, `attention_mask`, `token_type_ids`: (batch, tokens), int64, padded on the right;
    `labels`: (batch, target tokens), int64, padded with -100; `pixel_values`: (batch, channels, height,
    width), float32.
    """

    student: dict[str, torch.Tensor]
    expert: dict[str, torch.Tensor]
    """The same object as `student` where the tokenizers agree; else the token inputs are the expert's own."""


@dataclass(frozen=True)
class Padding:
    """What fills the rest of a row. It is masked, so it only has to be a valid index."""

    token: int = 0
    token_type: int = 0


def to_batches(
    examples: Sequence[Example], batch_size: int, *, student: Padding, expert: Padding, shared: bool
) -> list[Batch]:
    """Batch examples in their order, each batch padded to its own longest row.

    Args:
        examples: The rows.
        batch_size: Rows in a batch; the last one may be smaller.
        student: Padding of the merged model's tokenizer.
        expert: Padding of the expert's tokenizer.
        shared: The token lists of both models are equal, so one set of tensors serves both.

    Raises:
        DataError: the images of a batch differ in size.
    """
    batches = []
    for start in range(0, len(examples), batch_size):
        rows = examples[start : start + batch_size]
        images = _stack_images(rows)
        inputs = {**_pad([row.student for row in rows], student), **images}
        own = inputs if shared else {**_pad([row.expert for row in rows], expert), **images}
        batches.append(Batch(student=inputs, expert=own))
    return batches


def _pad(rows: list[dict[str, list[int]]], padding: Padding) -> dict[str, torch.Tensor]:
    fill = {"input_ids": padding.token, "token_type_ids": padding.token_type, "labels": IGNORED_LABEL}
    inputs = {name: _fill_up([row[name] for row in rows], fill[name]) for name in rows[0]}
    if "input_ids" in inputs:
        inputs["attention_mask"] = _fill_up([[1] * len(row["input_ids"]) for row in rows], 0)
    return inputs


def _fill_up(rows: list[list[int]], value: int) -> torch.Tensor:
    longest = max(len(row) for row in rows)
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows], dtype=torch.long)


def _stack_images(rows: Sequence[Example]) -> dict[str, torch.Tensor]:
    images = [row.pixel_values for row in rows if row.pixel_values is not None]
    shapes = sorted({tuple(image.shape) for image in images})
    if len(shapes) > 1:
        raise DataError(
            f"the image processor gives images of different sizes ({', '.join(map(str, shapes))}); "
            "expected one size: set `do_resize` or `do_center_crop` in its configuration, or `batch_size: 1`"
        )
    return {"pixel_values": torch.stack(images)} if images else {}
