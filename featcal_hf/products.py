"""Products of features summed in float32, and how precisely a backend multiplies float32 numbers.

A bfloat16 number times another is exact in float32, so processors that multiply bfloat16 and add in float32 (AMX)
give the same sums as float32 products, faster. PyTorch does that to float32 tensors where
it is allowed to round them first; for numbers that came from bfloat16 there is nothing to round. All other float32
numbers are multiplied in full, whatever the process has allowed: a Gram of rounded features is another Gram.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

TRIANGLE_ROWS = 256
SQUARE = 256


def add_product(total: Tensor, left: Tensor, right: Tensor, factor: float = 1.0) -> None:
    """Add factor · leftᵀ right to `total`; `left` and `right` are (tokens, rows) and (tokens, columns)."""
    total.addmm_(left.T, right, alpha=factor)


def add_lower_triangle(total: Tensor, left: Tensor, right: Tensor, factor: float = 1.0) -> None:
    """Add factor · leftᵀ right to the lower triangle of `total`, for a product that is symmetric."""
    for start in range(0, len(total), TRIANGLE_ROWS):
        end = start + TRIANGLE_ROWS
        total[start:end, :end].addmm_(left[:, start:end].T, right[:, :end], alpha=factor)


def mirror_lower_triangle(total: Tensor) -> None:
    """Copy the lower triangle to the upper one, in squares that the processor's cache holds."""
    squares = [slice(start, start + SQUARE) for start in range(0, len(total), SQUARE)]
    for number, rows in enumerate(squares):
        for columns in squares[:number]:
            total[columns, rows] = total[rows, columns].T
        corner = total[rows, rows]
        corner.copy_(torch.tril(corner) + torch.tril(corner, -1).T)


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device has units that multiply bfloat16 and add in float32, rounding each sum to the nearest.

    Tensor cores cut sums off instead, which adds up over a Gram's diagonal: GPUs multiply in full.
    """
    return device.type == "cpu" and torch.cpu._is_amx_tile_supported()


@contextmanager
def float32_products(rounded: bool) -> Iterator[None]:
    """While open, float32 matrix products are exact, or `rounded`: on the CPU, computed from bfloat16 numbers.

    The settings are PyTorch's own, of the whole process; what they were is put back.
    """
    with ExitStack() as stack:
        if hasattr(torch.backends.mkldnn, "matmul"):
            stack.enter_context(_precision(torch.backends.mkldnn.matmul, "bf16" if rounded else "ieee"))
            stack.enter_context(_precision(torch.backends.cuda.matmul, "ieee"))
        else:
            before = torch.get_float32_matmul_precision()
            stack.callback(torch.set_float32_matmul_precision, before)
            torch.set_float32_matmul_precision("medium" if rounded else "highest")
        yield


@contextmanager
def _precision(backend: Any, precision: str) -> Iterator[None]:
    before = backend.fp32_precision
    backend.fp32_precision = precision
    try:
        yield
    finally:
        backend.fp32_precision = before
