"""What a Gram's spectrum says about its ridge regression, at the price of a few products with a vector."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

KRYLOV_STEPS = 5


@dataclass(frozen=True)
class Spectrum:
    """Estimates for G = Σ ω_i G_i and A = G + (λ+ε) I.

    Attributes:
        condition: largest by smallest eigenvalue of A. A lower bound: the largest is estimated by `KRYLOV_STEPS` of
            the Lanczos method, the smallest by the Cholesky factor's smallest squared diagonal, which is never below.
        dominance: largest eigenvalue of G by ‖G‖_F: 1 where a single direction is all there is, as massive
            activations make it, 1/√d where none stands out; there the estimate is up to a seventh too low.
    """

    condition: float
    dominance: float


def spectrum(factor: Tensor, ridge: float, size: float, smallest: float | None = None) -> Spectrum:
    """Estimate a spectrum from its Cholesky factor.

    Args:
        factor: lower triangular L (d, d) with L Lᵀ = A.
        ridge: λ+ε, which A has on its diagonal beside G.
        size: ‖G‖_F.
        smallest: A's smallest eigenvalue, where it is known.
    """
    generator = torch.Generator().manual_seed(0)
    direction = torch.rand(len(factor), generator=generator, dtype=torch.float64).to(factor) + 1
    basis, halves = factor.new_empty(0, len(factor)), []
    for _ in range(min(KRYLOV_STEPS, len(factor))):
        for _ in range(2):  # a second time for what rounding leaves of the first
            direction = direction - basis.T @ (basis @ direction)
        length = torch.linalg.vector_norm(direction)
        if not float(length) > 0:
            break
        basis = torch.cat([basis, (direction / length)[None]])
        halves.append(factor.T @ basis[-1])
        direction = factor @ halves[-1]
    half = torch.stack(halves).double()
    largest = float(torch.linalg.eigvalsh(half @ half.T)[-1])
    if smallest is None:
        smallest = float(factor.diagonal().min()) ** 2
    return Spectrum(largest / smallest, min((largest - ridge) / size, 1.0) if size else 0.0)
