"""What a block's linear modules and norms need to know of one task: moments of what they read.

All sums are float32 whatever the features' dtype: a bfloat16 accumulator gives indefinite Grams.

With weights w_t over tokens t, n = Σ w_t, student features x_t and the drift of the input δ_t = x^exp_t - x^cal_t:

    gram  G = Σ w x xᵀ / n      (d_in, d_in)        mean  μ = Σ w x / n   (d_in,)
    cross D = Σ w δ xᵀ / n      (d_in, d_in)        shift δ̄ = Σ w δ / n   (d_in,)

The paper's cross moment is C = (1-α) G + α Xexpᵀ Xcal / n = G + α D (eq. 14). D is kept instead of C: it is exactly
zero where the student computes what the expert does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from featcal_hf.features import InputFeatures
from featcal_hf.grams import InputMoments
from featcal_hf.narrow import NarrowModule
from featcal_hf.ranks import Ranks
from featcal_hf.rows import NO_OUTPUTS

FEW_TOKENS = 0.75
FEW_TOKENS_OF_ALL = 0.75


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
            outputs: what the expert's module wrote (tokens, d_out), for each `NarrowModule` that needs it.
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

    def share_drift(self, total: Tensor | None, factor: float, alpha: float) -> Tensor | None:
        """Add factor · α D to `total` (d_in, d_in), made if there is none, so that answers leave α A D out.

        As (W_i - A) G + α W_i D = (W_i - A) (G + α D) + α A D, that is half of the work for each task. Moments that
        don't keep D give `total` back, and their answers are whole.
        """
        ...

    def add_answer(
        self, total: Tensor, factor: float, name: str, rows: slice, gap: Tensor, expert: Tensor, alpha: float
    ) -> None:
        """Add factor · [(W_i - A) G + α W_i D] to `total` (rows, d_in), for some rows of a module.

        `gap` is W_i - A, `expert` W_i. After `share_drift` it is factor · (W_i - A) (G + α D).
        """
        ...

    def is_finite(self) -> bool:
        """Whether every moment is finite: NaN or overflow in a forward shows up here."""
        ...


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
