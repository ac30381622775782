"""Moments of a module's input, kept as Gram and cross moment: float32 sums, whatever the features' dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from featcal_hf.frobenius import lower_frobenius
from featcal_hf.narrow import NarrowAnswer, NarrowModule
from featcal_hf.products import (
    add_lower_triangle,
    add_product,
    float32_products,
    mirror_lower_triangle,
    multiplies_bfloat16,
)
from featcal_hf.ranks import Ranks
from featcal_hf.rows import NO_OUTPUTS, Gathered, Rows

GATHERED_ROWS = 1024
FEW_WEIGHTS = 2


class InputMoments:
    """Moments of an input as Gram and cross moment: the size does not depend on the number of tokens.

    Products of few rows are slow: small batches are gathered, `GATHERED_ROWS` at a time. Large ones are used as they
    are, at most twice as many rows at a time.

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
        self._answers = {
            name: NarrowAnswer(name, module, device)
            for name, module in narrow.items()
            if isinstance(module, NarrowModule)
        }
        self._can_round = multiplies_bfloat16(device) and all(
            isinstance(module, NarrowModule) and not module.needs_outputs for module in narrow.values()
        )
        self._rows = max(1, min(tokens, GATHERED_ROWS))
        self._gathered: Gathered | None = None
        self._is_blended = False

    def add(
        self,
        student: Tensor,
        expert: Tensor,
        weights: Tensor | None,
        outputs: Mapping[str, Tensor] = NO_OUTPUTS,
    ) -> None:
        """See `TaskInput.add`."""
        self.tokens += float(len(student) if weights is None else weights.sum())
        batch = Rows(student, expert, weights, outputs)
        start = 0
        while start < len(student):
            waiting = self._gathered.count if self._gathered else 0
            if not waiting and len(student) - start >= self._rows:
                end = min(len(student), start + 2 * self._rows)
                self._sum_up(batch[start:end])
            else:
                end = min(len(student), start + self._rows - waiting)
                self._gather(batch[start:end])
            start = end

    def gather(self, ranks: Ranks, owner: int) -> None:
        """See `TaskInput.gather`."""
        self._sum_up_gathered()
        self.tokens = sum(ranks.exchange(self.tokens))
        ranks.add_up(self._totals(), owner)

    def average(self) -> None:
        """See `TaskInput.average`."""
        self._sum_up_gathered()
        self._gathered = None
        for total in self._totals():
            total /= self.tokens
        if self.cross is not None or self._narrow:  # else nothing is multiplied by the Gram
            mirror_lower_triangle(self.gram)

    def frobenius(self) -> float:
        """See `TaskInput.frobenius`."""
        return lower_frobenius(self.gram)

    def trace(self) -> float:
        """See `TaskInput.trace`."""
        return float(self.gram.trace())

    def add_gram(self, total: Tensor, factor: float) -> None:
        """See `TaskInput.add_gram`."""
        total.add_(self.gram, alpha=factor)

    def share_drift(self, total: Tensor | None, factor: float, alpha: float) -> Tensor | None:
        """See `TaskInput.share_drift`."""
        if self.cross is None:
            return total
        if total is None:
            total = torch.zeros_like(self.cross)
        total.add_(self.cross, alpha=factor * alpha)
        self.cross.mul_(alpha).add_(self.gram)
        self._is_blended = True
        return total

    def add_answer(
        self, total: Tensor, factor: float, name: str, rows: slice, gap: Tensor, expert: Tensor, alpha: float
    ) -> None:
        """See `TaskInput.add_answer`."""
        if name in self._answers:
            total.add_(self._answers[name].total[rows], alpha=factor)
        elif self.cross is None:
            total.addmm_(gap, self.gram, alpha=factor)
            total.add_(self.narrow_cross[name][rows], alpha=factor * alpha)
        elif self._is_blended:
            total.addmm_(gap, self.cross, alpha=factor)
        else:
            total.addmm_(gap, self.gram, alpha=factor)
            total.addmm_(expert, self.cross, alpha=factor * alpha)

    def is_finite(self) -> bool:
        """See `TaskInput.is_finite`: every feature is in the Gram's diagonal, every drift in the shift."""
        return bool(self.gram.diagonal().isfinite().all() and self.shift.isfinite().all())

    def _gather(self, batch: Rows) -> None:
        if self._gathered is not None and not self._gathered.fits(batch):
            self._sum_up_gathered()
            self._gathered = None
        if self._gathered is None:
            self._gathered = Gathered(batch, self._rows)
        self._gathered.take(batch)
        if self._gathered.count == self._rows:
            self._sum_up_gathered()

    def _sum_up_gathered(self) -> None:
        if self._gathered is not None and self._gathered.count:
            self._sum_up(self._gathered.give())

    def _sum_up(self, batch: Rows) -> None:
        if not (self._can_round and batch.is_bfloat16):
            self._sum_up_exactly(batch)
        elif batch.weights is None:
            self._sum_up_rounded(batch, 1.0)
        elif len(values := batch.weights.unique()) <= FEW_WEIGHTS:  # so that no bfloat16 number is multiplied by one
            for value in values:
                self._sum_up_rounded(batch.of_weight(value), float(value))
        else:
            self._sum_up_exactly(batch)

    def _sum_up_exactly(self, batch: Rows) -> None:
        x, moved = batch.student.float(), batch.moved()
        weights = x.new_ones(len(x)) if batch.weights is None else batch.weights
        weighted = x if batch.weights is None else x * weights[:, None]
        self.mean.addmv_(x.T, weights)
        add_lower_triangle(self.gram, weighted, x)
        for answer in self._answers.values():
            add_product(answer.total, answer.exact(batch, moved), weighted)
        if not moved:
            return
        batch.add_drift(self.shift, weights)
        if self.cross is not None:
            add_product(self.cross, batch.delta(), weighted)
        for name, weight in self._narrow.items():
            add_product(self.narrow_cross[name], batch.delta() @ weight.T, weighted)

    def _sum_up_rounded(self, batch: Rows, weight: float) -> None:
        """The Gram of bfloat16 features is exact; drift and answers are rounded, see `NarrowModule`."""
        x, moved = batch.student.float(), batch.moved()
        weights = x.new_full((len(x),), weight)
        self.mean.addmv_(x.T, weights)
        answers = {answer: answer.rounded(batch, moved) for answer in self._answers.values()}
        with float32_products(rounded=True):
            add_lower_triangle(self.gram, x, x, weight)
            for answer, outputs in answers.items():
                add_product(answer.total, outputs, x, weight)
            if moved and self.cross is not None:
                add_product(self.cross, (batch.expert - batch.student).float(), x, weight)
        if moved:
            batch.add_drift(self.shift, weights)

    def _totals(self) -> list[Tensor]:
        crosses = [*self.narrow_cross.values()] if self.cross is None else [self.cross]
        return [self.gram, self.mean, self.shift, *crosses, *(answer.total for answer in self._answers.values())]
