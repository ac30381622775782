"""Two forms of one ridge regression: over the inputs' width, or over the tokens while they are fewer.

With z_t = √(ω_i w_t / n_i) x_t as the rows of Z over all tasks' tokens, and the modules' answers
u_t = √(ω_i w_t / n_i) [(W_i - A) x_t + α W_i δ_t] as the rows of U, the step is the same either way:

    Uᵀ Z (Zᵀ Z + λI)⁻¹  =  Uᵀ (Z Zᵀ + λI)⁻¹ Z,      Zᵀ Z = Σ ω_i G_i
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from featcal_hf.cholesky import cholesky
from featcal_hf.features import InputFeatures
from featcal_hf.frobenius import frobenius, lower_frobenius
from featcal_hf.moments import TaskInput
from featcal_hf.spectrum import Spectrum, spectrum


class Ridge(Protocol):
    """A ridge regression of all modules that read one input; tasks are added one at a time."""

    def add_task(self, moments: TaskInput, omega: float, alpha: float) -> None:
        """Add a task with its weight ω_i; the answers that follow are its, all with this α."""
        ...

    def add_answer(self, name: str, height: int, rows: slice, gap: Tensor, target: Tensor, alpha: float) -> None:
        """Add the task's answer for some rows of a module of `height` outputs: gap = W_i - A, target = W_i."""
        ...

    def add_anchor(self, name: str, rows: slice, start: Tensor) -> None:
        """Complete the answers of some rows, after all tasks: start = A."""
        ...

    def end_task(self) -> None:
        """Let the task's moments go."""
        ...

    def factor(self, lambda_: float) -> Spectrum | None:
        """Cholesky factor with the ridge λ; float64 where float32 is not enough; None where neither is."""
        ...

    def step(self, name: str) -> Tensor:
        """The step (d_out, d_in) of one module, float32. Frees its answers."""
        ...


class WidthRidge:
    """The form over the width: a (d_in, d_in) matrix and a right-hand side (d_out, d_in) for each module."""

    def __init__(self, width: int, device: torch.device) -> None:
        self._matrix = torch.zeros(width, width, device=device)
        self._sides: dict[str, Tensor] = {}
        self._drift: Tensor | None = None
        self._task: tuple[TaskInput, float] | None = None

    def add_task(self, moments: TaskInput, omega: float, alpha: float) -> None:
        """See `Ridge.add_task`."""
        moments.add_gram(self._matrix, omega)
        self._drift = moments.share_drift(self._drift, omega, alpha)
        self._task = moments, omega

    def add_answer(self, name: str, height: int, rows: slice, gap: Tensor, target: Tensor, alpha: float) -> None:
        """See `Ridge.add_answer`."""
        if self._task is None:
            raise RuntimeError("add a task before its answers")
        moments, omega = self._task
        if name not in self._sides:
            self._sides[name] = self._matrix.new_zeros(height, len(self._matrix))
        moments.add_answer(self._sides[name][rows], omega, name, rows, gap, target, alpha)

    def add_anchor(self, name: str, rows: slice, start: Tensor) -> None:
        """See `Ridge.add_anchor`: α A Σ ω_i D_i, see `TaskInput.share_drift`."""
        if self._drift is not None:
            self._sides[name][rows].addmm_(start, self._drift)

    def end_task(self) -> None:
        """See `Ridge.end_task`."""
        self._task = None

    def factor(self, lambda_: float) -> Spectrum | None:
        """See `Ridge.factor`."""
        size = lower_frobenius(self._matrix)
        self._matrix, positive = _cholesky(self._matrix, lambda_)
        return spectrum(self._matrix, lambda_, size) if positive else None

    def step(self, name: str) -> Tensor:
        """See `Ridge.step`."""
        side = self._sides.pop(name)
        factor = self._matrix
        return torch.cholesky_solve(side.T.to(factor.device, factor.dtype), factor).T.to(side.device, torch.float32)


class TokenRidge:
    """The form over the tokens: Z (tokens, d_in), a (tokens, tokens) matrix, U (tokens, d_out) for each module."""

    def __init__(self) -> None:
        self._features: list[tuple[Tensor, Tensor]] = []
        self._rows = torch.zeros(0, 0)
        self._answers: dict[str, list[Tensor]] = {}
        self._matrix = torch.zeros(0, 0)
        self._task: tuple[InputFeatures, Tensor] | None = None

    def add_task(self, moments: TaskInput, omega: float, alpha: float) -> None:
        """See `Ridge.add_task`; needs moments that keep their features."""
        if not isinstance(moments, InputFeatures):
            raise TypeError("the form over tokens needs the tokens' features, not their Gram")
        roots = (omega * moments.weights).sqrt()[:, None]
        self._features.append((moments.student, roots))
        self._task = moments, roots

    def add_answer(self, name: str, height: int, rows: slice, gap: Tensor, target: Tensor, alpha: float) -> None:
        """See `Ridge.add_answer`."""
        if self._task is None:
            raise RuntimeError("add a task before its answers")
        moments, roots = self._task
        parts = self._answers.setdefault(name, [])
        if len(parts) < len(self._features):
            parts.append(roots.new_empty(len(roots), height))
        parts[-1][:, rows] = moments.outputs(gap, target, alpha) * roots

    def add_anchor(self, name: str, rows: slice, start: Tensor) -> None:
        """See `Ridge.add_anchor`: the answers are complete."""

    def end_task(self) -> None:
        """See `Ridge.end_task`."""
        self._task = None

    def factor(self, lambda_: float) -> Spectrum | None:
        """See `Ridge.factor`."""
        self._rows = torch.cat([student.float() * roots for student, roots in self._features])
        self._features = []
        matrix = self._rows @ self._rows.T
        size = frobenius(matrix)
        self._matrix, positive = _cholesky(matrix, lambda_)
        # Fewer tokens than inputs: directions that no token has are left, in which only the ridge is.
        return spectrum(self._matrix, lambda_, size, smallest=lambda_) if positive else None

    def step(self, name: str) -> Tensor:
        """See `Ridge.step`."""
        answers = torch.cat(self._answers.pop(name))
        factor = self._matrix
        solved = torch.cholesky_solve(answers.to(factor.device, factor.dtype), factor)
        return solved.to(answers.device, torch.float32).T @ self._rows


def _cholesky(matrix: Tensor, lambda_: float) -> tuple[Tensor, bool]:
    matrix.diagonal().add_(lambda_)
    factor, positive = cholesky(matrix)
    return (factor, positive) if positive else cholesky(matrix.cpu().double())
