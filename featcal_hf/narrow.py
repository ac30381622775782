"""Answers of modules with fewer outputs than inputs, summed up over tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from featcal_hf.rows import Rows


@dataclass(frozen=True)
class NarrowModule:
    """A module with fewer outputs than inputs, whose answer is summed up over tokens instead of W_i D.

    The answer is Σ w u xᵀ with u = (W_i - A) x + α W_i δ. In float32 u = [(1-α) W_i - A] x + α W_i x^exp, of which the
    expert's forward has the second product. It is as precise, as each token's rounding is its own. On units that
    multiply bfloat16, W_i - A, δ and u are rounded to it: by less than what their own bfloat16 features and weights
    were.

    Attributes:
        weight: W_i (d_out, d_in), float32 or bfloat16.
        bias: what the expert adds to W_i x^exp, (d_out,) or None.
        gap: makes W_i - A.
        alpha: α.
    """

    weight: Tensor
    bias: Tensor | None
    gap: Callable[[], Tensor]
    alpha: float

    @property
    def needs_outputs(self) -> bool:
        """Whether the expert's outputs are used; less than float32 has rounded them."""
        return self.weight.dtype == torch.float32


class NarrowAnswer:
    """The running answer of one `NarrowModule`; `total` is (d_out, d_in)."""

    def __init__(self, name: str, module: NarrowModule, device: torch.device) -> None:
        self.total = torch.zeros(module.weight.shape, device=device)
        self._name, self._module = name, module
        gap = module.gap()
        self._rounded = gap.bfloat16() if module.weight.dtype == torch.bfloat16 else None
        self._mixed = gap.sub_(module.weight, alpha=module.alpha) if module.needs_outputs else None

    def exact(self, batch: Rows, moved: bool) -> Tensor:
        """The answers u (tokens, d_out) in float32; `moved`: the expert reads something else than the student does."""
        x, module = batch.student.float(), self._module
        if not moved:
            return x @ module.gap().T
        if self._mixed is None:
            outputs = x @ module.gap().T
            return outputs.addmm_(batch.delta(), module.weight.float().T, alpha=module.alpha)
        outputs = batch.outputs[self._name]
        if module.bias is not None:
            outputs = outputs - module.bias
        return torch.addmm(outputs, x, self._mixed.T, beta=module.alpha)

    def rounded(self, batch: Rows, moved: bool) -> Tensor:
        """The answers u (tokens, d_out) of bfloat16 features: W_i - A, δ and u each rounded to it once."""
        if self._rounded is None:
            raise TypeError("a float32 module's answers are not rounded")
        outputs = batch.student @ self._rounded.T
        if moved:
            outputs.add_((batch.expert - batch.student) @ self._module.weight.T, alpha=self._module.alpha)
        return outputs.float()
