"""Every text gives a recipe or a RecipeError, whatever is in it."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from featcal_hf.errors import RecipeError
from featcal_hf.recipe import read_recipe

RECIPE = """\
merge_method: slerp
base_model: org/a
slices:
  - sources:
      - {model: org/a, layer_range: [0, 8]}
      - {model: {model: org/b, lora: org/l@v1}, layer_range: [0, 8]}
parameters: {t: [0, 5e-1, 1]}
tokenizer: {source: union, tokens: {x: {source: org/a}}}
featcal:
  lambda: 1e-5
  samples: &samples 8
  tasks:
    - &first {model: org/a, dataset: {path: d, data_files: {train: [x, y]}}, prompt: "{a[0]:.1f}", name: a}
    - {<<: *first, model: org/b+org/l@v1, prompt: "{b}", completion: " {c}", holdout: *samples, name: b}
"""
FRAGMENTS = [
    *re.findall(r"\w+:?|[^\w\s]|\s+", RECIPE),
    *(
        "!!int",
        "!!float",
        "!!bool",
        "!!timestamp",
        "!!set",
        "!!omap",
        "!!binary",
        "!!str",
        "!!null",
        "!x",
        "<<",
        "=",
    ),
    *(
        "0x_",
        "1e999",
        ".nan",
        "1:99",
        "2024-13-45",
        "~",
        "yes",
        "*a",
        "&a",
        "|",
        ">",
        "?",
        "---",
        "...",
        "%YAML 9.9",
    ),
    *(
        "\\ud800",
        "\t",
        "\ufeff",
        "\x85",
        "models:",
        "modules:",
        "text:",
        "image:",
        "messages:",
        "passthrough",
    ),
]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.dates()
    | st.binary()
    | st.sampled_from(FRAGMENTS),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(FRAGMENTS).map(lambda key: key.rstrip(":")) | st.integers(), inner, max_size=4
        )
    ),
    max_leaves=8,
)
QUICK = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def recipe_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "recipe.yml"


def read(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with contextlib.suppress(RecipeError):
        recipe = read_recipe(path)
        assert {task.model for task in recipe.tasks} == set(recipe.experts)
        assert len({task.name for task in recipe.tasks}) == len(recipe.tasks)


def test_the_recipe_to_vary_is_a_good_one(recipe_file: Path) -> None:
    recipe_file.write_text(RECIPE)
    assert [task.name for task in read_recipe(recipe_file).tasks] == ["a", "b"]


@QUICK
@given(content=st.binary())
def test_any_bytes(recipe_file: Path, content: bytes) -> None:
    read(recipe_file, content)


@QUICK
@given(parts=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3)))
@example(parts=["!!bool {=: x}"])
@example(parts=["a: !!bool {=: x}"])
@example(parts=["%YAML 1." + "9" * 5000 + "\n---\na: b"])
@example(parts=["a: !!timestamp x"])
@example(parts=["a: " + "9" * 5000])
@example(parts=["{" * 3000])
def test_any_sequence_of_a_recipes_words(recipe_file: Path, parts: list[str]) -> None:
    read(recipe_file, "".join(parts).encode("utf-8", "surrogatepass"))


@settings(QUICK, max_examples=300)
@given(data=st.data())
def test_a_recipe_with_a_stretch_replaced(recipe_file: Path, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(RECIPE)))
    end = data.draw(st.integers(start, min(len(RECIPE), start + 30)))
    parts = data.draw(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=4))
    read(recipe_file, (RECIPE[:start] + "".join(parts) + RECIPE[end:]).encode("utf-8", "surrogatepass"))


@settings(QUICK, max_examples=300)
@given(data=st.data(), value=VALUES)
def test_a_recipe_with_a_value_replaced(recipe_file: Path, data: st.DataObject, value: object) -> None:
    recipe = yaml.safe_load(RECIPE)
    place = recipe
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = value
    read(recipe_file, yaml.safe_dump(recipe, allow_unicode=True).encode("utf-8", "surrogatepass"))
