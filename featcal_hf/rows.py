"""Tokens of a batch on their way into moments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

CACHED_ROWS = 64
NO_OUTPUTS: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class Rows:
    """Some tokens of a batch, as `TaskInput.add` gets them."""

    student: Tensor
    expert: Tensor
    weights: Tensor | None
    outputs: Mapping[str, Tensor]

    def __getitem__(self, rows: slice) -> Rows:
        return Rows(
            self.student[rows],
            self.expert[rows],
            None if self.weights is None else self.weights[rows],
            {name: value[rows] for name, value in self.outputs.items()},
        )

    @property
    def is_bfloat16(self) -> bool:
        """Whether both models' features are bfloat16."""
        return self.student.dtype == self.expert.dtype == torch.bfloat16

    def moved(self) -> bool:
        """Whether the expert's features differ from the student's."""
        return not torch.equal(self.student, self.expert)

    def of_weight(self, value: Tensor) -> Rows:
        """The tokens of one weight."""
        if self.weights is None:
            return self
        chosen = (self.weights == value).nonzero().squeeze(1)
        outputs = {name: outputs.index_select(0, chosen) for name, outputs in self.outputs.items()}
        return Rows(self.student.index_select(0, chosen), self.expert.index_select(0, chosen), None, outputs)

    def delta(self) -> Tensor:
        """δ in float32."""
        return self.expert.float() - self.student

    def add_drift(self, total: Tensor, weights: Tensor) -> None:
        """Add Σ w δ to `total`, some rows at a time, which the processor's cache holds."""
        for start in range(0, len(weights), CACHED_ROWS):
            rows = slice(start, start + CACHED_ROWS)
            total.addmv_(self[rows].delta().T, weights[rows])


class Gathered:
    """Room for the rows of small batches, in their own dtypes.

    Args:
        like: a batch to come.
        rows: how many there are room for.
    """

    def __init__(self, like: Rows, rows: int) -> None:
        self.count = 0
        self._student, self._expert = (value.new_empty(rows, value.shape[1]) for value in (like.student, like.expert))
        self._outputs = {name: value.new_empty(rows, value.shape[1]) for name, value in like.outputs.items()}
        self._weights = torch.ones(rows, device=like.student.device)
        self._alike = True

    def fits(self, batch: Rows) -> bool:
        """Whether a batch is of the dtypes that there is room for."""
        return batch.student.dtype == self._student.dtype and batch.expert.dtype == self._expert.dtype

    def take(self, batch: Rows) -> None:
        """Copy a batch's rows."""
        rows = slice(self.count, self.count + len(batch.student))
        self._student[rows], self._expert[rows] = batch.student, batch.expert
        for name, value in batch.outputs.items():
            self._outputs[name][rows] = value
        self._weights[rows] = 1.0 if batch.weights is None else batch.weights
        self._alike &= batch.weights is None
        self.count = rows.stop

    def give(self) -> Rows:
        """The rows gathered, which are gone when the next ones are taken."""
        whole = Rows(self._student, self._expert, None if self._alike else self._weights, self._outputs)
        given = whole[: self.count]
        self.count, self._alike = 0, True
        return given
