"""Merges that the default ρ takes beyond twice what the experts changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from featcal_hf.far_anchor import far_anchor
from featcal_hf.recipe import read_recipe

RECIPE = """\
merge_method: task_arithmetic
base_model: org/base
models:
  - {model: org/a, parameters: {weight: 1.0}}
  - {model: org/b, parameters: {weight: 0.8}}
dtype: bfloat16
featcal:
  tasks:
    - {model: org/a, dataset: d, text: t}
    - {model: org/b, dataset: d, text: t}
"""


def said(text: str, folder: Path) -> list[str]:
    path = folder / "recipe.yml"
    path.write_text(text)
    return far_anchor(read_recipe(path))


def test_weights_near_one_without_rho_are_told_which_rho_suits_them(tmp_path: Path) -> None:
    (told,) = said(RECIPE, tmp_path)
    assert "merge weights of 0.8 and above" in told
    assert "Give rho: 1" in told


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("weight: 0.8", "weight: 0.5"),
        ("weight: 0.8", "weight: [0.8, 1.0]"),
        ("featcal:\n", "featcal:\n  rho: 2\n"),
        ("dtype:", "parameters: {normalize: true}\ndtype:"),
        ("merge_method: task_arithmetic", "merge_method: ties"),
    ],
    ids=["one is small", "weights by block", "rho is given", "normalised", "normalised by default"],
)
def test_other_merges_are_told_nothing(old: str, new: str, tmp_path: Path) -> None:
    assert said(RECIPE.replace(old, new), tmp_path) == []
