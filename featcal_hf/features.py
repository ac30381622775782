"""Moments of a module's input, kept as the features themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from featcal_hf.frobenius import frobenius
from featcal_hf.products import add_lower_triangle
from featcal_hf.ranks import Ranks
from featcal_hf.rows import NO_OUTPUTS


class InputFeatures:
    """Moments of an input kept as the features themselves: smaller and cheaper than a Gram while n < d_in.

    They stay in the dtype of the model, which is exact, and become float32 where they are used. After `average`,
    `student` are the features (tokens, d_in) and `weights` w_t / n (tokens,).
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self.tokens = 0.0
        self.mean = torch.zeros(width, device=device)
        self.shift = torch.zeros(width, device=device)
        self.student = self._expert = torch.zeros(0, width, device=device)
        self.weights = torch.zeros(0, device=device)
        self._parts: list[tuple[Tensor, ...]] = []

    def add(
        self,
        student: Tensor,
        expert: Tensor,
        weights: Tensor | None,
        outputs: Mapping[str, Tensor] = NO_OUTPUTS,
    ) -> None:
        """See `TaskInput.add`."""
        w = torch.ones(len(student), device=student.device) if weights is None else weights
        self.tokens += float(w.sum())
        self._parts.append((student.clone(), expert.clone(), w))

    def gather(self, ranks: Ranks, owner: int) -> None:
        """See `TaskInput.gather`."""
        self.tokens = sum(ranks.exchange(self.tokens))
        self._parts = ranks.collect(self._parts, owner)

    def average(self) -> None:
        """See `TaskInput.average`."""
        students, experts, weights = zip(*self._parts, strict=True)
        self._parts = []
        self.student, self._expert = torch.cat(students), torch.cat(experts)
        self.weights = torch.cat(weights) / self.tokens
        self.mean = self.weights @ self.student.float()
        self.shift = self.weights @ self._delta()

    def frobenius(self) -> float:
        """See `TaskInput.frobenius`: ‖Xᵀ X‖_F = ‖X Xᵀ‖_F, which is smaller here."""
        rows = self.student.float() * self.weights.sqrt()[:, None]
        return frobenius(rows @ rows.T)

    def trace(self) -> float:
        """See `TaskInput.trace`."""
        return float(self.weights @ self.student.float().square().sum(1))

    def add_gram(self, total: Tensor, factor: float) -> None:
        """See `TaskInput.add_gram`."""
        x = self.student.float()
        add_lower_triangle(total, x * self.weights[:, None], x, factor)

    def share_drift(self, total: Tensor | None, factor: float, alpha: float) -> Tensor | None:
        """See `TaskInput.share_drift`: nothing is shared."""
        return total

    def add_answer(
        self, total: Tensor, factor: float, name: str, rows: slice, gap: Tensor, expert: Tensor, alpha: float
    ) -> None:
        """See `TaskInput.add_answer`."""
        outputs = self.outputs(gap, expert, alpha).mul_(self.weights[:, None])
        total.addmm_(outputs.T, self.student.float(), alpha=factor)

    def outputs(self, gap: Tensor, expert: Tensor, alpha: float) -> Tensor:
        """(W_i - A) x_t + α W_i δ_t, shape (tokens, rows), for the weights' rows given."""
        return (self.student.float() @ gap.T).addmm_(self._delta(), expert.T, alpha=alpha)

    def is_finite(self) -> bool:
        """See `TaskInput.is_finite`."""
        return bool(self.mean.isfinite().all() and self.shift.isfinite().all() and math.isfinite(self.trace()))

    def _delta(self) -> Tensor:
        return self._expert.float() - self.student
