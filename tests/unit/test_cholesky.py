"""Cholesky factors: against float64, whatever the size is beside a panel's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from featcal_hf.cholesky import PANEL, cholesky


def positive(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    rows = torch.randn(2 * size + 1, size, generator=torch.Generator().manual_seed(size))
    return (rows.T @ rows / len(rows) + 0.05 * torch.eye(size)).to(dtype)


@pytest.mark.parametrize("size", [1, 5, PANEL - 1, PANEL, PANEL + 1, 2 * PANEL, 2 * PANEL + 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_factor_times_its_transpose_is_the_matrix_of_which_the_lower_triangle_is_read(
    size: int, dtype: torch.dtype
) -> None:
    matrix = positive(size, dtype)
    given = torch.tril(matrix) + torch.triu(torch.full_like(matrix, float("nan")), 1)
    factor, is_positive = cholesky(given)
    exact = torch.linalg.cholesky(matrix.double())
    assert is_positive
    assert factor.dtype == dtype
    assert torch.equal(factor, torch.tril(factor))
    assert float((factor.double() - exact).norm() / exact.norm()) < (1e-6 if dtype == torch.float32 else 1e-13)
    assert torch.equal(torch.tril(given), torch.tril(matrix)), "the matrix was changed"


@pytest.mark.parametrize("where", [0, PANEL - 1, PANEL, PANEL + 30])
def test_a_matrix_that_is_not_positive_definite_is_found_in_any_panel(where: int) -> None:
    matrix = positive(PANEL + 31)
    matrix[where, where] = -1.0
    assert not cholesky(matrix)[1]


def test_a_matrix_with_numbers_that_are_not_finite_is_not_positive_definite() -> None:
    matrix = positive(PANEL + 9)
    matrix[PANEL + 3, PANEL + 3] = float("nan")
    assert not cholesky(matrix)[1]
