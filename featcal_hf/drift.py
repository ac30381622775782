"""Feature drift of a block's output, the quantity that calibration lowers (paper §3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from featcal_hf.tokens import counted, token_weights


@dataclass(frozen=True)
class Drift:
    """Means over tokens at one block's output for one task.

    With student feature h, expert feature h^exp and the local output f(h^exp) of the student's block on the expert's
    input, the drift e = h - h^exp splits exactly into m = f(h^exp) - h^exp and p = h - f(h^exp).

    Attributes:
        drift: mean ‖e‖.
        relative: mean ‖e‖ / ‖h^exp‖.
        mismatch: mean ‖m‖, what this block itself adds.
        propagation: mean ‖p‖, what earlier blocks pass on.
        cosine: mean cosine(h, h^exp).
    """

    drift: float
    relative: float
    mismatch: float
    propagation: float
    cosine: float


class DriftMeter:
    """Sums the drift of batch after batch."""

    def __init__(self) -> None:
        self._sums = torch.zeros(5, dtype=torch.float64)
        self._tokens = 0

    def add(self, student: Tensor, expert: Tensor, local: Tensor, mask: Tensor | None) -> None:
        """Add a batch of outputs (batch, tokens, width); `mask` (batch, tokens) says which tokens count."""
        weights = None if mask is None else token_weights(student, mask, False)
        h, target, between = (counted(value, weights)[0].float() for value in (student, expert, local))
        error = (h - target).norm(dim=1)
        self._sums += (
            torch.stack(
                [
                    error.sum(),
                    (error / target.norm(dim=1).clamp_min(1e-12)).sum(),
                    (between - target).norm(dim=1).sum(),
                    (h - between).norm(dim=1).sum(),
                    torch.cosine_similarity(h, target, dim=1).sum(),
                ]
            )
            .double()
            .cpu()
        )
        self._tokens += len(h)

    def mean(self) -> Drift:
        """The means over all tokens added."""
        return Drift(*(float(value) for value in self._sums / self._tokens))
