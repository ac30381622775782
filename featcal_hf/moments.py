"""Grams and cross moments of one input: what a block's linear modules and norms need to know of a task.

All sums are float32 whatever the features' dtype: a bfloat16 accumulator gives indefinite Grams.
"""

from __future__ import annotations

import torch
from torch import Tensor

TRIANGLE_ROWS = 1024


class InputMoments:
    """Moments of one task's student and expert features at one input of a block.

    With weights w_t over tokens t, n = Σ w_t, student features x_t and the drift of the input
    δ_t = x^exp_t - x^cal_t, the averages are

        gram  G = Σ w x xᵀ / n          (d_in, d_in)
        cross D = Σ w δ xᵀ / n          (d_in, d_in), or W_i D (d_out, d_in) for each narrow module
        mean  μ = Σ w x / n             (d_in,)
        shift δ̄ = Σ w δ / n             (d_in,)

    The paper's cross moment is C = (1-α) G + α Xexpᵀ Xcal / n = G + α D (eq. 14). D is kept instead of C:
    it is exactly zero where the student computes what the expert does.

    Args:
        width: d_in.
        narrow: expert weights (d_out, d_in) of the modules that read this input, when together they have
            fewer outputs than inputs: W_i D is then smaller and cheaper than D. Empty to keep D itself.
        device: where the moments live.
    """

    def __init__(self, width: int, narrow: dict[str, Tensor], device: torch.device) -> None:
        self.narrow = {name: weight.to(device, torch.float32) for name, weight in narrow.items()}
        self.tokens = 0.0
        self.gram = torch.zeros(width, width, device=device)
        self.mean = torch.zeros(width, device=device)
        self.shift = torch.zeros(width, device=device)
        self.cross = None if narrow else torch.zeros(width, width, device=device)
        self.narrow_cross = {name: torch.zeros(weight.shape, device=device) for name, weight in self.narrow.items()}

    def add(self, student: Tensor, expert: Tensor, weights: Tensor | None) -> None:
        """Add a batch: features (tokens, d_in) of the tokens that count, and their weights (tokens,)."""
        x = student.float()
        delta = expert.float().sub(x)
        weighted = x if weights is None else x * weights[:, None]
        self.tokens += float(len(x) if weights is None else weights.sum())
        _add_lower_triangle(self.gram, weighted, x)
        self.mean += weighted.sum(0)
        self.shift += (delta if weights is None else delta * weights[:, None]).sum(0)
        if self.cross is not None:
            self.cross.addmm_(delta.T, weighted)
        for name, weight in self.narrow.items():
            self.narrow_cross[name].addmm_((delta @ weight.T).T, weighted)

    def average(self) -> None:
        """Divide the sums by the weighted tokens and mirror the Gram's triangle."""
        for total in (self.gram, self.mean, self.shift, self.cross, *self.narrow_cross.values()):
            if total is not None:
                total /= self.tokens
        _mirror_lower_triangle(self.gram)

    def moved(self, name: str, expert_weight: Tensor) -> Tensor:
        """W_i D (d_out, d_in): the expert's answer to the drift of its input."""
        if self.cross is None:
            return self.narrow_cross[name]
        return expert_weight @ self.cross

    def is_finite(self) -> bool:
        """Whether every moment is finite: NaN or overflow in a forward shows up here."""
        sums = (self.gram, self.mean, self.shift, self.cross, *self.narrow_cross.values())
        return all(bool(total.sum().isfinite()) for total in sums if total is not None)


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

    def average(self) -> None:
        """Divide the sums by the weighted tokens."""
        self.mean /= self.tokens
        self.square /= self.tokens

    def is_finite(self) -> bool:
        """Whether both moments are finite."""
        return bool(self.mean.isfinite().all() and self.square.isfinite().all())


def _add_lower_triangle(gram: Tensor, left: Tensor, right: Tensor) -> None:
    for start in range(0, len(gram), TRIANGLE_ROWS):
        end = min(start + TRIANGLE_ROWS, len(gram))
        gram[start:end, :end].addmm_(left[:, start:end].T, right[:, :end])


def _mirror_lower_triangle(gram: Tensor) -> None:
    for start in range(0, len(gram), TRIANGLE_ROWS):
        end = min(start + TRIANGLE_ROWS, len(gram))
        gram[start:end, end:] = gram[end:, start:end].T
        corner = gram[start:end, start:end]
        corner.copy_(torch.tril(corner) + torch.tril(corner, -1).T)
