from __future__ import annotations

import pytest
import torch

from featcal_hf.features import InputFeatures
from featcal_hf.frobenius import lower_frobenius
from featcal_hf.grams import InputMoments
from featcal_hf.ridge import TokenRidge, WidthRidge
from featcal_hf.spectrum import spectrum

GENERATOR = torch.Generator().manual_seed(0)


def gram(width: int, massive: float) -> torch.Tensor:
    x = torch.randn(4 * width, width, generator=GENERATOR)
    x[:, 0] *= massive
    return x.T @ x / len(x)


@pytest.mark.parametrize("massive", [1.0, 30.0])
@pytest.mark.parametrize("ridge", [1e-3, 0.5])
def test_estimates_are_near_the_eigenvalues_and_below_the_condition_number(massive: float, ridge: float) -> None:
    g = gram(64, massive)
    values = torch.linalg.eigvalsh(g.double())
    regularised = g + ridge * torch.eye(64)

    found = spectrum(torch.linalg.cholesky(regularised), ridge, lower_frobenius(g))

    exact = float((values[-1] + ridge) / (values[0] + ridge))
    assert exact / 5 < found.condition <= exact * 1.001
    assert found.dominance == pytest.approx(float(values[-1] / values.norm()), rel=0.1)


def test_a_massive_direction_is_nearly_all_of_the_norm_and_none_is_one_by_the_root_of_the_width() -> None:
    massive, even = torch.diag(torch.tensor([1e4] + [1.0] * 63)), torch.eye(64)
    found = [spectrum(torch.linalg.cholesky(g + 0.1 * torch.eye(64)), 0.1, lower_frobenius(g)) for g in (massive, even)]

    assert found[0].dominance == pytest.approx(1, abs=1e-3)
    assert found[1].dominance == pytest.approx(1 / 8, abs=1e-3)
    assert found[1].condition == pytest.approx(1, rel=1e-3)


def test_the_norm_of_a_lower_triangle_is_that_of_the_whole() -> None:
    g = gram(70, 3.0)

    assert lower_frobenius(torch.tril(g)) == pytest.approx(float(g.double().norm()), rel=1e-6)


def test_a_system_over_tokens_and_one_over_the_width_agree() -> None:
    moments = [InputFeatures(48, torch.device("cpu")), InputMoments(48, 9, {}, torch.device("cpu"))]
    x = torch.randn(9, 48, generator=GENERATOR)
    x[:, 0] += 3  # a direction that stands out, as in real features
    found = []
    for kept, ridge in zip(moments, (TokenRidge(), WidthRidge(48, torch.device("cpu"))), strict=True):
        kept.add(x, x, None)
        kept.average()
        ridge.add_task(kept, 2.0, 0.3)
        found.append(ridge.factor(0.05))

    assert None not in found
    assert found[0].dominance == pytest.approx(found[1].dominance, rel=0.02)
    assert found[0].condition == pytest.approx(found[1].condition, rel=0.3)
