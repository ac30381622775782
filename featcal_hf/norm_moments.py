"""What a block's norms need to know of one task."""

from __future__ import annotations

import torch
from torch import Tensor

from featcal_hf.ranks import Ranks


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
