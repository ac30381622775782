"""Local paths in place of a recipe's ids."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from featcal_hf import RecipeError
from featcal_hf.mapping import check_mapping, locate_dataset, locate_model, read_mapping
from featcal_hf.recipe import DatasetSpec, Recipe, parse_reference, read_recipe

RECIPE = """
merge_method: task_arithmetic
base_model: org/base
models:
  - {model: org/math@v2, parameters: {weight: 0.3}}
  - {model: org/base+org/lora@main, parameters: {weight: 0.3}}
featcal:
  tasks:
    - {model: org/math@v2, dataset: {path: openai/gsm8k, name: main}, text: t}
    - {model: org/base+org/lora@main, dataset: org/code, text: t}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (tmp_path / "recipe.yml").write_text(RECIPE)
    return read_recipe(tmp_path / "recipe.yml")


def test_arguments_are_pairs_or_files_of_pairs(tmp_path: Path) -> None:
    (tmp_path / "a=b.yml").write_text("org/a: ./a\norg/b: ./b@1\n")
    (tmp_path / "c.json").write_text(json.dumps({"org/c": "./c"}))
    arguments = [f"{tmp_path}/a=b.yml", f"{tmp_path}/c.json", "org/d:main=./d=e.json", "org/a=./a"]
    expected = {"org/a": "./a", "org/b": "./b@1", "org/c": "./c", "org/d:main": "./d=e.json"}
    assert read_mapping(arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["org/a"], "--map org/a: expected ID=PATH, or a file in .yml, .yaml, .json"),
        (["org/a="], "expected ID=PATH"),
        (["=./a"], "expected ID=PATH"),
        (["org/a=./a", "org/a=./b"], "--map gives 'org/a' two paths, ./a and ./b; give one."),
        (["absent.yml"], "--map absent.yml can't be read"),
        (["list.yml"], "--map list.yml doesn't map ids to paths, each as text"),
        (["number.json"], "--map number.json doesn't map ids to paths"),
        (["broken.json"], "--map broken.json can't be read"),
    ],
)
def test_other_arguments_are_refused(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("list.yml").write_text("- org/a\n")
    Path("number.json").write_text('{"org/a": 1}')
    Path("broken.json").write_text("{")
    with pytest.raises(RecipeError, match=re.escape(words)):
        read_mapping(arguments)


def test_every_id_of_the_recipe_can_be_mapped(recipe: Recipe, tmp_path: Path) -> None:
    ids = "org/base org/math org/math@v2 org/lora org/lora@main openai/gsm8k openai/gsm8k:main org/code"
    check_mapping(dict.fromkeys(ids.split(), str(tmp_path)), recipe)


def test_an_unknown_id_is_refused_with_the_closest(recipe: Recipe, tmp_path: Path) -> None:
    for key, closest in (("org/mth", "org/math"), ("openai/gsm8", "openai/gsm8k"), ("org/lora@mian", "org/lora@main")):
        with pytest.raises(RecipeError, match=f"has no model or dataset '{key}'; did you mean '{closest}'"):
            check_mapping({key: str(tmp_path)}, recipe)
    with pytest.raises(RecipeError, match="its ids are org/base, "):
        check_mapping({"x": str(tmp_path)}, recipe)


def test_a_path_where_nothing_is_or_a_file_for_a_model_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"nothing is at .*absent, given for 'org/code'"):
        check_mapping({"org/code": str(tmp_path / "absent")}, recipe)
    check_mapping({"org/code": str(recipe.path)}, recipe)
    with pytest.raises(RecipeError, match="given for the model 'org/math', is a file"):
        check_mapping({"org/math": str(recipe.path)}, recipe)


def test_a_model_and_its_adapter_are_each_located() -> None:
    mapping = {"org/base": "/base@home", "org/lora@main": "/lora"}
    located = locate_model(parse_reference("org/base@v1+org/lora@main"), mapping)
    assert (located.model.path, located.model.revision) == ("/base@home", None)
    assert located.lora is not None
    assert (located.lora.path, located.lora.revision) == ("/lora", None)
    other = parse_reference("org/other+org/lora@v2")
    assert locate_model(other, mapping) == other


def test_a_revision_of_its_own_goes_before_all_of_them() -> None:
    mapping = {"org/a": "/any", "org/a@v2": "/second"}
    paths = [locate_model(parse_reference(text), mapping).model.path for text in ("org/a", "org/a@v1", "org/a@v2")]
    assert paths == ["/any", "/any", "/second"]


def test_a_dataset_folder_keeps_what_the_recipe_chooses_in_it(tmp_path: Path) -> None:
    spec = DatasetSpec(path="org/d", name="main", split="val[:9]", data_files="a/*.json", revision="v1")
    located = locate_dataset(spec, {"org/d": str(tmp_path), "org/e": "/e"})
    assert located == spec.model_copy(update={"path": str(tmp_path), "revision": None})
    assert locate_dataset(spec, {"org/e": "/e"}) is spec


def test_a_file_stands_for_a_split_and_a_mapped_configuration_for_itself(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.touch()
    located = locate_dataset(DatasetSpec(path="org/d", name="main", split="train_sft[:9]"), {"org/d:main": str(file)})
    assert located == DatasetSpec(path=str(file), split="train[:9]")
    with pytest.raises(RecipeError, match=r"takes its configuration 'main' of 'org/d', and .* map org/d:main to it"):
        locate_dataset(DatasetSpec(path="org/d", name="main"), {"org/d": str(file)})
    (tmp_path / "dataset_dict.json").touch()
    with pytest.raises(RecipeError, match=r"takes its data files en/1.json of 'org/d'.* map the id to a folder"):
        locate_dataset(DatasetSpec(path="org/d", data_files="en/1.json"), {"org/d": str(tmp_path)})
