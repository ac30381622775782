"""Closed-form updates: moments in, calibrated parameters out (method of arXiv 2605.13030).

Everything is a sum over tasks, so each solver is a running system: add one task's moments at a time, then
solve once. Each solves for the step from the anchor, which is exactly zero when nothing needs to move.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from featcal_hf.errors import SolveError
from featcal_hf.frobenius import frobenius
from featcal_hf.moments import TaskInput
from featcal_hf.norm_moments import NormMoments
from featcal_hf.ridge import Ridge, TokenRidge, WidthRidge
from featcal_hf.spectrum import Spectrum

EPSILON = 1e-8
ADAPTIVE_NORM_RIDGE = 0.01
WORK_ROWS = 1024
CACHED_ROWS = 64


def anchor(merged: Tensor, base: Tensor | None, rho: float) -> Tensor:
    """A = ρ W^merge + (1-ρ) W^base in float32 (eq. 16), written so that W^merge = W^base gives exactly itself."""
    start = merged.float()
    if base is None:
        return start
    return start + (rho - 1.0) * (start - base.to(start.device).float())


@dataclass(frozen=True)
class Linear:
    """A linear module's parameters in one model: weight (d_out, d_in) and bias (d_out,) or None."""

    weight: Tensor
    bias: Tensor | None


def task_weight(moments: TaskInput, width: int, scale: str) -> float:
    """ω_i: 1 / ‖G_i‖_F for scale 'frobenius' (the paper's), d_in / tr G_i for 'trace' (mean eigenvalue 1)."""
    if scale == "frobenius":
        return 1.0 / max(moments.frobenius(), EPSILON)
    return width / max(moments.trace(), EPSILON)


class InputSystem:
    """The ridge regressions of all linear modules that read one input.

    They share Σ ω_i G_i; each module has its own right-hand side. With anchor A and expert weight W_i

        W* = A + (Σ ω_i [(W_i - A) G_i + α W_i D_i]) (Σ ω_i G_i + (λ+ε) I)⁻¹                       (eq. 17)
        b* = b_A + (Σ ω_i [(W_i - A) μ_i + α W_i δ̄_i + b_i - b_A] - (W* - A) Σ ω_i μ_i) / (Σ ω_i + λ)

    Weights are worked on some rows at a time, so that their float32 copies stay small.

    Args:
        width: d_in.
        lambda_: λ; None for the adaptive ridge max(1, √(d_in / n)) · tr(Σ ω_i G_i) / d_in, n = weighted tokens per
            task: the mean eigenvalue, times the relative spread that n tokens leave in an estimate of equal ones
            (Marchenko-Pastur) where there are fewer tokens than inputs.
        rho: ρ, the anchor blend.
        alpha: α, the target blend.
        scale: 'frobenius' or 'trace', see `task_weight`.
        device: where the system lives.
        few_tokens: all tasks together have fewer tokens than d_in; their moments must keep the features.
    """

    def __init__(
        self,
        width: int,
        lambda_: float | None,
        rho: float,
        alpha: float,
        scale: str,
        device: torch.device,
        few_tokens: bool = False,
    ) -> None:
        self.width, self.rho, self.alpha, self.scale, self.device = width, rho, alpha, scale, device
        self._lambda = lambda_
        self._tokens: list[float] = []
        self._mean_eigenvalue = 0.0
        self._ridge: Ridge = TokenRidge() if few_tokens else WidthRidge(width, device)
        self._mean = torch.zeros(width, device=device)
        self._task_weights = 0.0
        self._bias_residuals: dict[str, Tensor] = {}
        self._task: tuple[TaskInput, float] | None = None

    @property
    def lambda_(self) -> float:
        """The ridge λ in force."""
        if self._lambda is not None:
            return self._lambda
        spread = math.sqrt(self.width * len(self._tokens) / self.tokens)
        return max(1.0, spread) * self._mean_eigenvalue

    @property
    def tokens(self) -> float:
        """Weighted tokens of all tasks."""
        return sum(self._tokens)

    def add_task(self, moments: TaskInput) -> None:
        """Add a task's averaged moments; the modules that follow are its, until `end_task`."""
        omega = task_weight(moments, self.width, self.scale)
        self._tokens.append(moments.tokens)
        if self._lambda is None:
            self._mean_eigenvalue += omega * moments.trace() / self.width
        self._ridge.add_task(moments, omega, self.alpha)
        self._mean.add_(moments.mean, alpha=omega)
        self._task_weights += omega
        self._task = moments, omega

    def add_module(self, name: str, expert: Linear, merged: Linear, base: Linear | None) -> None:
        """Add one module's right-hand side for the task added last."""
        if self._task is None:
            raise RuntimeError("add a task before its modules")
        moments, omega = self._task
        height = len(merged.weight)
        if name not in self._bias_residuals:
            self._bias_residuals[name] = torch.zeros(height, device=self.device)
        for rows in _row_chunks(merged.weight):
            target = expert.weight[rows].to(self.device)
            gap = gap_rows(target, merged, base, rows, self.rho)
            target = target.float()
            self._ridge.add_answer(name, height, rows, gap, target, self.alpha)
            bias_answer = gap @ moments.mean + self.alpha * (target @ moments.shift)
            self._bias_residuals[name][rows].add_(bias_answer, alpha=omega)
        bias_anchor = anchor_bias(merged, base, self.rho)
        if bias_anchor is not None and expert.bias is not None:
            gap = expert.bias.to(self.device).float() - bias_anchor.to(self.device)
            self._bias_residuals[name].add_(gap, alpha=omega)

    def end_task(self) -> None:
        """Let the task's moments go."""
        self._task = None
        self._ridge.end_task()

    def factor(self, where: str) -> Spectrum:
        """Cholesky factor of Σ ω_i G_i + (λ+ε) I; float64 where float32 is not enough. What its spectrum is like.

        Raises:
            SolveError: not positive definite in float64 either; `where` names the modules.
        """
        shape = self._ridge.factor(self.lambda_ + EPSILON)
        if shape is None:
            raise SolveError(
                f"{where}: the regularised Gram ({self.width} x {self.width}, lambda {self.lambda_:.3g}, "
                f"{self.tokens:.0f} tokens) is not positive definite, even in float64; raise featcal.lambda or "
                "give the tasks more samples."
            )
        return shape

    def solve(self, name: str, merged: Linear, base: Linear | None) -> Linear:
        """W* and b* of one module in float32, after `factor`. Frees its right-hand side."""
        for rows in _row_chunks(merged.weight):
            self._ridge.add_anchor(name, rows, _anchor_rows(merged, base, rows, self.rho).to(self.device))
        step = self._ridge.step(name)
        bias_anchor = anchor_bias(merged, base, self.rho)
        bias = None
        if bias_anchor is not None:
            bias_step = (self._bias_residuals[name] - step @ self._mean) / (self._task_weights + self.lambda_)
            bias = bias_anchor.to(bias_step.device) + bias_step
        for rows in _row_chunks(merged.weight):
            step[rows] += _anchor_rows(merged, base, rows, self.rho).to(step.device)
        return Linear(step, bias)


class NormSystem:
    """The per-channel ridge regression of one norm's affine γ, β (β is None for RMSNorm).

    With m_i = mean(z), q_i = mean(z²) per channel, N tasks and anchors γ_A, β_A, the step from the anchor solves

        [[Σ q_i + λ, Σ m_i], [Σ m_i, N + λ]] [Δγ Δβ]ᵀ = [Σ (q_i dγ_i + m_i dβ_i), Σ (m_i dγ_i + dβ_i)],

    dγ_i = γ_i - γ_A, dβ_i = β_i - β_A; without β it is Δγ = Σ q_i dγ_i / (Σ q_i + λ).
    """

    def __init__(self, gamma: Tensor, beta: Tensor | None, lambda_: float | None) -> None:
        self.lambda_ = ADAPTIVE_NORM_RIDGE if lambda_ is None else lambda_
        self._gamma, self._beta = gamma, beta
        self._tasks = 0
        self._square, self._mean = torch.zeros_like(gamma), torch.zeros_like(gamma)
        self._gamma_side, self._beta_side = torch.zeros_like(gamma), torch.zeros_like(gamma)

    def add_task(self, moments: NormMoments, gamma: Tensor, beta: Tensor | None) -> None:
        """Add a task's moments with its expert's γ_i, β_i."""
        gamma_gap = gamma.to(self._gamma.device).float() - self._gamma
        self._tasks += 1
        self._square += moments.square
        self._gamma_side += moments.square * gamma_gap
        if beta is not None and self._beta is not None:
            beta_gap = beta.to(self._beta.device).float() - self._beta
            self._mean += moments.mean
            self._gamma_side += moments.mean * beta_gap
            self._beta_side += moments.mean * gamma_gap + beta_gap

    def solve(self) -> tuple[Tensor, Tensor | None]:
        """(γ*, β*) in float32."""
        a = self._square + self.lambda_
        if self._beta is None:
            return self._gamma + self._gamma_side / a, None
        c = self._tasks + self.lambda_
        determinant = a * c - self._mean**2
        gamma_step = (c * self._gamma_side - self._mean * self._beta_side) / determinant
        beta_step = (a * self._beta_side - self._mean * self._gamma_side) / determinant
        return self._gamma + gamma_step, self._beta + beta_step


def relative_step(new: Tensor, old: Tensor) -> float:
    """‖new - old‖ / ‖old‖, the size of an update; 0 where both are zero."""
    moved = frobenius(new.float() - old.float())
    size = frobenius(old.float())
    return moved / size if size else (math.inf if moved else 0.0)


def anchor_bias(merged: Linear, base: Linear | None, rho: float) -> Tensor | None:
    """b_A in float32; None where the module has no bias to calibrate."""
    if merged.bias is None:
        return None
    return anchor(merged.bias, None if base is None else base.bias, rho)


def _anchor_rows(merged: Linear, base: Linear | None, rows: slice, rho: float) -> Tensor:
    return anchor(merged.weight[rows], None if base is None else base.weight[rows], rho)


def gap_rows(target: Tensor, merged: Linear, base: Linear | None, rows: slice, rho: float) -> Tensor:
    """W_i - A = (W_i - W^merge) - (ρ-1) (W^merge - W^base) for some rows, in float32; exactly 0 where all agree.

    A few rows at a time, which the processor's cache holds with what is in between.
    """
    gap = torch.empty(target.shape, dtype=torch.float32, device=target.device)
    starts = merged.weight[rows].to(target.device)
    bases = None if base is None or rho == 1.0 else base.weight[rows].to(target.device)
    for first in range(0, len(gap), CACHED_ROWS):
        some = slice(first, first + CACHED_ROWS)
        start = starts[some].float()
        torch.sub(target[some].float(), start, out=gap[some])
        if bases is not None:
            gap[some].sub_(start.sub(bases[some]), alpha=rho - 1.0)
    return gap


def _row_chunks(weight: Tensor) -> list[slice]:
    return [slice(start, start + WORK_ROWS) for start in range(0, len(weight), WORK_ROWS)]
