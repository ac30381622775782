"""The recipe that a merged folder was made by, compared with the one that it is calibrated with."""

from __future__ import annotations

from pathlib import Path

import pytest

from featcal_hf.merged_recipe import other_recipe
from featcal_hf.recipe import read_recipe

MERGE = """\
merge_method: task_arithmetic
base_model: org/base
models:
  - {model: org/a, parameters: {weight: 0.3}}
  - model: org/b@main
    parameters: {weight: [{filter: mlp, value: 0.3}, {value: 0.2}]}
dtype: bfloat16
"""
SECTION = """\
featcal:
  tasks:
    - {model: org/a, dataset: d, text: t}
    - {model: org/b@main, dataset: d, text: t}
"""


def said(folder: Path, merged_by: str) -> list[str]:
    (folder / "mergekit_config.yml").write_text(merged_by)
    recipe = folder / "recipe.yml"
    recipe.write_text(MERGE + SECTION)
    return other_recipe(read_recipe(recipe), folder)


@pytest.mark.parametrize(
    "merged_by",
    [
        MERGE,
        MERGE + SECTION.replace("dataset: d", "dataset: other"),
        MERGE.replace("0.3}}", "3.0e-1}}").replace(
            "model: org/b@main", "model: {model: {path: org/b, revision: main}}"
        ),
        "dtype: bfloat16\nbase_model: org/base\nmerge_method: task_arithmetic\nmodels:\n  - model: org/b@main\n"
        "    parameters: {weight: [{filter: mlp, value: 0.3}, {value: 0.2}]}\n"
        "  - {model: org/a, parameters: {weight: 0.3}}\n",
    ],
    ids=["same", "another section", "written otherwise", "in another order"],
)
def test_the_same_merge_is_the_same_however_it_is_written(merged_by: str, tmp_path: Path) -> None:
    assert said(tmp_path, merged_by) == []


def test_models_that_were_moved_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "mergekit_config.yml").write_text(MERGE.replace("org/base", "/there/base").replace("org/a", "./old/a"))
    recipe = tmp_path / "recipe.yml"
    moved = (MERGE + SECTION).replace("org/base", f"{tmp_path}/base").replace("org/a", f"{tmp_path}/a")
    recipe.write_text(moved)
    assert other_recipe(read_recipe(recipe), tmp_path) == []
    recipe.write_text(moved.replace("/base", "/base2"))
    assert "base_model is 'base2', there 'base'" in other_recipe(read_recipe(recipe), tmp_path)[0]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("weight: 0.3}}", "weight: 0.5}}", "models[org/a].parameters.weight is 0.3, there 0.5. Merge again"),
        ("value: 0.2", "value: 0.4", "models[org/b@main].parameters.weight[1].value is 0.2, there 0.4. Merge again"),
        ("task_arithmetic", "ties", "merge_method is 'task_arithmetic', there 'ties'. Merge again"),
        ("org/base", "org/other", "base_model is 'org/base', there 'org/other'. Merge again"),
        ("dtype: bfloat16\n", "", "dtype is 'bfloat16', there absent. Merge again"),
        (
            "{model: org/a,",
            "{model: org/c,",
            "models[org/a].model is 'org/a', there absent; models[org/a].parameters.weight is 0.3, there absent; "
            "models[org/c].model is absent, there 'org/c', and 1 more. Merge again",
        ),
    ],
)
def test_what_differs_is_named_with_both_values(old: str, new: str, told: str, tmp_path: Path) -> None:
    (warning,) = said(tmp_path, MERGE.replace(old, new))
    assert warning.startswith(f"{tmp_path} was merged by another recipe than {tmp_path / 'recipe.yml'} (its ")
    assert told in warning


def test_a_copy_that_can_t_be_read_is_said_to_be_so_and_none_is_nothing_to_say(tmp_path: Path) -> None:
    (warning,) = said(tmp_path, "merge_method: [")
    assert "can't be compared with the recipe, because its own copy of it can't be read" in warning
    (tmp_path / "mergekit_config.yml").unlink()
    assert other_recipe(read_recipe(tmp_path / "recipe.yml"), tmp_path) == []
