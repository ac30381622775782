"""Feature drift of a block's output, the quantity that calibration lowers (paper §3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from featcal_hf.tokens import token_weights


@dataclass(frozen=True)
class Drift:
    """Means over tokens at one block's output for one task.

    With student feature h, expert feature h^exp and the local output f(h^exp) of the student's block on the expert's
    input, the drift e = h - h^exp splits exactly into m = f(h^exp) - h^exp and p = h - f(h^exp) (Proposition 1).

    Attributes:
        drift: mean ‖e‖.
        relative: mean ‖e‖ / ‖h^exp‖.
        mismatch: mean ‖m‖, what this block itself adds.
        propagation: mean ‖p‖, what earlier blocks pass on.
        relative_mismatch: mean ‖m‖ / ‖h^exp‖.
        relative_propagation: mean ‖p‖ / ‖h^exp‖.
        cosine: mean cosine(h, h^exp).
        cosine_spread: standard deviation over samples of a sample's mean cosine.
    """

    drift: float
    relative: float
    mismatch: float
    propagation: float
    relative_mismatch: float
    relative_propagation: float
    cosine: float
    cosine_spread: float


def split_drift(student: Tensor, expert: Tensor, local: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(e, m, p) of features of one shape, in float32: e = m + p, see `Drift`."""
    h, target, between = student.float(), expert.float(), local.float()
    return h - target, between - target, h - between


class DriftMeter:
    """Sums the drift of batch after batch.

    Attributes:
        cosines: of each sample, the mean over its tokens of cosine(h, h^exp).
    """

    def __init__(self) -> None:
        self._sums = torch.zeros(7, dtype=torch.float64)
        self._tokens = 0
        self.cosines: list[float] = []

    def add(
        self, student: Tensor, expert: Tensor, local: Tensor, mask: Tensor | None, first_token_read: bool = False
    ) -> None:
        """Add a batch of outputs (batch, tokens, width).

        Args:
            student: h.
            expert: h^exp.
            local: f(h^exp), the student's block on the expert's input.
            mask: (batch, tokens), which tokens count; None where all do.
            first_token_read: the model reads the first token only, so that the others don't count.
        """
        counts = read_tokens(student, mask, first_token_read)
        target = expert.float()
        size = target.norm(dim=-1)
        norms = [part.norm(dim=-1) for part in split_drift(student, expert, local)]
        shares = [norm / size.clamp_min(1e-12) for norm in norms]
        cosine = torch.cosine_similarity(student.float(), target, dim=-1)
        tokens = counts.sum(dim=1)
        values = torch.stack([*norms, *shares, cosine]).masked_fill(~counts, 0).double()
        self._sums += values.sum(dim=(1, 2)).cpu()
        self._tokens += int(tokens.sum())
        self.cosines += (values[-1].sum(dim=1) / tokens)[tokens > 0].tolist()

    def mean(self) -> Drift:
        """The means over all tokens added."""
        error, mismatch, propagation, relative, local_share, upstream_share, cosine = (
            float(value) for value in self._sums / self._tokens
        )
        spread = float(torch.tensor(self.cosines, dtype=torch.float64).std(correction=0))
        return Drift(error, relative, mismatch, propagation, local_share, upstream_share, cosine, spread)


def read_tokens(features: Tensor, mask: Tensor | None, first_token_read: bool) -> Tensor:
    """Which tokens of `features` (batch, tokens, width) are read further on, (batch, tokens) of booleans."""
    weights = token_weights(features, mask, False)
    counts = torch.ones(features.shape[:2], dtype=torch.bool) if weights is None else weights.bool()
    if first_token_read:
        counts = counts & (torch.arange(counts.shape[1], device=counts.device) == 0)
    return counts.to(features.device)
