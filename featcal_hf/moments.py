"""What a block's linear modules and norms need to know of one task: moments of what they read.

All sums are float32 whatever the features' dtype: a bfloat16 accumulator gives indefinite Grams.

With weights w_t over tokens t, n = Σ w_t, student features x_t and the drift of the input δ_t = x^exp_t - x^cal_t:

    gram  G = Σ w x xᵀ / n      (d_in, d_in)        mean  μ = Σ w x / n   (d_in,)
    cross D = Σ w δ xᵀ / n      (d_in, d_in)        shift δ̄ = Σ w δ / n   (d_in,)

The paper's cross moment is C = (1-α) G + α Xexpᵀ Xcal / n = G + α D (eq. 14). D is kept instead of C: it is exactly
zero where the student computes what the expert does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from featcal_hf.products import (
    add_lower_triangle,
    add_product,
    float32_products,
    halves,
    mirror_lower_triangle,
    multiplies_bfloat16,
)
from featcal_hf.ranks import Ranks

GATHERED_ROWS = 1024
FEW_TOKENS = 0.75
FEW_TOKENS_OF_ALL = 0.75


NO_OUTPUTS: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class NarrowModule:
    """A module with fewer outputs than inputs, in float32, whose answer is summed up over tokens instead of W_i D.

    The answer is Σ w u xᵀ with u = (W_i - A) x + α W_i δ = [(1-α) W_i - A] x + α W_i x^exp. The expert's forward has
    W_i x^exp, so this takes half of the work; it is as precise, as each token's rounding is its own.

    Attributes:
        weight: W_i (d_out, d_in).
        bias: what the expert adds to W_i x^exp, (d_out,) or None.
        gap: makes W_i - A.
        alpha: α.
    """

    weight: Tensor
    bias: Tensor | None
    gap: Callable[[], Tensor]
    alpha: float


class TaskInput(Protocol):
    """One task's moments of one input, whichever way they are kept."""

    tokens: float
    mean: Tensor
    shift: Tensor

    def add(
        self,
        student: Tensor,
        expert: Tensor,
        weights: Tensor | None,
        outputs: Mapping[str, Tensor] = NO_OUTPUTS,
    ) -> None:
        """Add a batch: features (tokens, d_in) of the tokens that count, and their weights (tokens,).

        Args:
            outputs: what the expert's module wrote (tokens, d_out), for each `NarrowModule`.
        """
        ...

    def gather(self, ranks: Ranks, owner: int) -> None:
        """Bring the moments of all ranks' batches together on one of them; on the others they are of no use then."""
        ...

    def average(self) -> None:
        """Divide the sums by the weighted tokens; call once, after the last batch."""
        ...

    def frobenius(self) -> float:
        """‖G‖_F."""
        ...

    def trace(self) -> float:
        """The trace of G."""
        ...

    def add_gram(self, total: Tensor, factor: float) -> None:
        """Add factor · G to the lower triangle of `total` (d_in, d_in)."""
        ...

    def add_answer(
        self, total: Tensor, factor: float, name: str, rows: slice, gap: Tensor, expert: Tensor, alpha: float
    ) -> None:
        """Add factor · [(W_i - A) G + α W_i D] to `total` (rows, d_in), for some rows of a module.

        `gap` is W_i - A, `expert` W_i.
        """
        ...

    def is_finite(self) -> bool:
        """Whether every moment is finite: NaN or overflow in a forward shows up here."""
        ...


def frobenius(matrix: Tensor) -> float:
    """‖M‖_F, row by row: PyTorch's float32 sum over 8192 x 8192 numbers at once is off by 0.5 %."""
    return float(torch.linalg.vector_norm(torch.linalg.vector_norm(matrix, dim=-1)))


def task_input(width: int, tokens: int, narrow: Mapping[str, Tensor | NarrowModule], device: torch.device) -> TaskInput:
    """The cheaper way to keep a task's moments: its features while they are fewer than a Gram, else the Gram.

    Args:
        width: d_in.
        tokens: the task's tokens at most.
        narrow: see `InputMoments`.
        device: where the moments live.
    """
    if few_in_task(tokens, width):
        return InputFeatures(width, device)
    return InputMoments(width, tokens, narrow, device)


def few_in_task(tokens: int, width: int) -> bool:
    """Whether a task's tokens are so few beside d_in that its features are smaller and cheaper than a Gram."""
    return tokens <= FEW_TOKENS * width


def few_in_all(tokens: int, width: int) -> bool:
    """Whether the tokens of all tasks are so few that a system over them is smaller and cheaper than one over d_in.

    Such a system grows with the number of tasks, up to the size of the other, whose tasks' Grams it does without.
    """
    return tokens <= FEW_TOKENS_OF_ALL * width


class InputMoments:
    """Moments of an input as Gram and cross moment: the size does not depend on the number of tokens.

    Features are gathered in float32, `GATHERED_ROWS` at a time, whatever the size of a batch: products of few rows are
    slow, and copies of many take memory.

    Args:
        width: d_in.
        tokens: the tokens that will be added, at most.
        narrow: the modules that read this input, when together they have fewer outputs than inputs: expert weights
            (d_out, d_in), for which W_i D is kept as it is smaller and cheaper than D; or with more known of them,
            their answers. Empty to keep D itself.
        device: where the moments live.
    """

    def __init__(
        self, width: int, tokens: int, narrow: Mapping[str, Tensor | NarrowModule], device: torch.device
    ) -> None:
        self.tokens = 0.0
        self.gram = torch.zeros(width, width, device=device)
        self.mean = torch.zeros(width, device=device)
        self.shift = torch.zeros(width, device=device)
        self.cross = None if narrow else torch.zeros(width, width, device=device)
        self._narrow = {
            name: module.to(device, torch.float32) for name, module in narrow.items() if isinstance(module, Tensor)
        }
        self.narrow_cross = {name: torch.zeros_like(weight) for name, weight in self._narrow.items()}
        rows = max(1, min(tokens, GATHERED_ROWS))
        self._answers = {
            name: _NarrowAnswer(module, rows, device)
            for name, module in narrow.items()
            if isinstance(module, NarrowModule)
        }
        self._student, self._delta = (torch.empty(rows, width, device=device) for _ in range(2))
        self._weights = torch.ones(rows, device=device)
        self._rows = 0
        self._alike = self._exact = True
        self._can_be_exact = (
            multiplies_bfloat16(device)
            and not self._answers
            and _all_bfloat16(module for module in narrow.values() if isinstance(module, Tensor))
        )

    def add(
        self,
        student: Tensor,
        expert: Tensor,
        weights: Tensor | None,
        outputs: Mapping[str, Tensor] = NO_OUTPUTS,
    ) -> None:
        """See `TaskInput.add`."""
        self.tokens += float(len(student) if weights is None else weights.sum())
        start = 0
        while start < len(student):
            end = start + min(len(student) - start, len(self._student) - self._rows)
            for name, answer in self._answers.items():
                answer.gather(self._rows, outputs[name][start:end])
            self._gather(student[start:end], expert[start:end], None if weights is None else weights[start:end])
            if self._rows == len(self._student):
                self._sum_up()
            start = end

    def gather(self, ranks: Ranks, owner: int) -> None:
        """See `TaskInput.gather`."""
        if self._rows:
            self._sum_up()
        self.tokens = sum(ranks.exchange(self.tokens))
        ranks.add_up(self._totals(), owner)

    def average(self) -> None:
        """See `TaskInput.average`."""
        if self._rows:
            self._sum_up()
        self._student = self._delta = self._weights = self.mean.new_empty(0)
        for total in self._totals():
            total /= self.tokens
        mirror_lower_triangle(self.gram)

    def frobenius(self) -> float:
        """See `TaskInput.frobenius`."""
        return frobenius(self.gram)

    def trace(self) -> float:
        """See `TaskInput.trace`."""
        return float(self.gram.trace())

    def add_gram(self, total: Tensor, factor: float) -> None:
        """See `TaskInput.add_gram`."""
        total.add_(self.gram, alpha=factor)

    def add_answer(
        self, total: Tensor, factor: float, name: str, rows: slice, gap: Tensor, expert: Tensor, alpha: float
    ) -> None:
        """See `TaskInput.add_answer`."""
        if name in self._answers:
            total.add_(self._answers[name].total[rows], alpha=factor)
            return
        total.addmm_(gap, self.gram, alpha=factor)
        if self.cross is None:
            total.add_(self.narrow_cross[name][rows], alpha=factor * alpha)
        else:
            total.addmm_(expert, self.cross, alpha=factor * alpha)

    def is_finite(self) -> bool:
        """See `TaskInput.is_finite`: every feature is in the Gram's diagonal, every drift in the shift."""
        return bool(self.gram.diagonal().isfinite().all() and self.shift.isfinite().all())

    def _gather(self, student: Tensor, expert: Tensor, weights: Tensor | None) -> None:
        rows = slice(self._rows, self._rows + len(student))
        x, delta = self._student[rows], self._delta[rows]
        x.copy_(student)
        delta.copy_(expert).sub_(x)
        self._weights[rows] = 1.0 if weights is None else weights
        self._alike &= weights is None
        self._exact &= _all_bfloat16((student, expert))
        self._rows = rows.stop

    def _sum_up(self) -> None:
        x, delta, weights = self._student[: self._rows], self._delta[: self._rows], self._weights[: self._rows]
        weighted = x if self._alike else x * weights[:, None]
        self.mean.addmv_(x.T, weights)
        self.shift.addmv_(delta.T, weights)
        if self._can_be_exact and self._exact and self._alike:
            with float32_products(rounded=True):
                self._add_products(x, weighted, halves(delta), halves)
        else:
            self._add_products(x, weighted, (delta,), lambda outputs: (outputs,))
        self._rows = 0
        self._alike = self._exact = True

    def _add_products(
        self,
        student: Tensor,
        weighted: Tensor,
        delta: tuple[Tensor, ...],
        parts: Callable[[Tensor], tuple[Tensor, ...]],
    ) -> None:
        """Add to the Gram and to the cross moments; δ comes in parts, as its outputs have to."""
        add_lower_triangle(self.gram, weighted, student)
        for answer in self._answers.values():
            answer.sum_up(student, weighted, moved=bool(self._delta[: self._rows].any()))
        for part in delta:
            if self.cross is not None:
                add_product(self.cross, part, weighted)
        for name, weight in self._narrow.items():
            outputs = delta[0] @ weight.T
            for part in delta[1:]:
                outputs.addmm_(part, weight.T)
            for part in parts(outputs):
                add_product(self.narrow_cross[name], part, weighted)

    def _totals(self) -> list[Tensor]:
        crosses = [*self.narrow_cross.values()] if self.cross is None else [self.cross]
        return [self.gram, self.mean, self.shift, *crosses, *(answer.total for answer in self._answers.values())]


class _NarrowAnswer:
    """The running answer of one `NarrowModule`; `total` is (d_out, d_in)."""

    def __init__(self, module: NarrowModule, rows: int, device: torch.device) -> None:
        self.total = torch.zeros(module.weight.shape, device=device)
        self._module = module
        self._mixed = module.gap().sub_(module.weight, alpha=module.alpha)
        self._outputs = torch.empty(rows, len(module.weight), device=device)

    def gather(self, start: int, outputs: Tensor) -> None:
        """Take the expert's outputs of some tokens, to be summed up from row `start` on."""
        self._outputs[start : start + len(outputs)] = outputs

    def sum_up(self, student: Tensor, weighted: Tensor, moved: bool) -> None:
        """Add the tokens gathered; where the expert reads what the student does, W_i - A is all that moves them."""
        if not moved:
            add_product(self.total, student @ self._module.gap().T, weighted)
            return
        outputs = self._outputs[: len(student)]
        if self._module.bias is not None:
            outputs -= self._module.bias
        outputs.mul_(self._module.alpha).addmm_(student, self._mixed.T)
        add_product(self.total, outputs, weighted)


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


class NormMoments:
    """Per-channel moments of a norm's normalised student input z: m = mean(z), q = mean(z²), both (width,)."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.tokens = 0.0
        self.mean = torch.zeros(width, device=device)
        self.square = torch.zeros(width, device=device)

    def add(self, normalised: Tensor, weights: Tensor | None) -> None:
        """Add a batch of z (tokens, width) with weights (tokens,)."""
        z = normalised.float()
        weighted = z if weights is None else z * weights[:, None]
        self.tokens += float(len(z) if weights is None else weights.sum())
        self.mean += weighted.sum(0)
        self.square += (weighted * z).sum(0)

    def gather(self, ranks: Ranks, owner: int) -> None:
        """Add the moments of all ranks' batches up on one of them."""
        self.tokens = sum(ranks.exchange(self.tokens))
        ranks.add_up([self.mean, self.square], owner)

    def average(self) -> None:
        """Divide the sums by the weighted tokens."""
        self.mean /= self.tokens
        self.square /= self.tokens

    def is_finite(self) -> bool:
        """Whether both moments are finite."""
        return bool(self.mean.isfinite().all() and self.square.isfinite().all())


def _all_bfloat16(tensors: Iterable[Tensor]) -> bool:
    return all(tensor.dtype == torch.bfloat16 for tensor in tensors)
