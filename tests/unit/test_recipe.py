"""Recipes: what is read, and what is refused with which position."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from mergekit.common import ModelPath, ModelReference
from pydantic import ValidationError

from featcal_hf.errors import RecipeError
from featcal_hf.recipe import DatasetSpec, Recipe, Settings, Task, parse_reference, read_recipe

MERGE = """\
merge_method: task_arithmetic
base_model: org/base
models:
  - {model: org/a, parameters: {weight: 0.3}}
  - {model: org/b, parameters: {weight: 0.3}}
dtype: bfloat16
"""
TASKS = """\
  tasks:
    - model: org/a
      dataset: {path: openai/gsm8k, name: main}
      prompt: "Question: {question}"
      completion: " {answer}"
    - model: org/b
      dataset: ./code.jsonl
      messages: turns
"""
RECIPE = MERGE + "featcal:\n  alpha: 0.15\n" + TASKS

Read = Callable[[str], Recipe]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Reads a text as `recipe.yml` in an empty working directory."""
    monkeypatch.chdir(tmp_path)

    def read_text(text: str) -> Recipe:
        Path("recipe.yml").write_bytes(text.encode("utf-8", "surrogateescape"))
        return read_recipe("recipe.yml")

    return read_text


def error_of(read: Read, text: str) -> str:
    with pytest.raises(RecipeError) as caught:
        read(text)
    return str(caught.value)


def tasks_for(*experts: str) -> str:
    entries = "".join(f"    - {{model: {expert}, dataset: d, text: t}}\n" for expert in experts)
    return f"featcal:\n  tasks:\n{entries}"


def names(recipe: Recipe) -> list[str]:
    return [str(expert) for expert in recipe.experts]


def test_a_recipe_is_read_with_its_defaults(read: Read) -> None:
    recipe = read(RECIPE)
    assert recipe.path == Path("recipe.yml")
    assert recipe.source == RECIPE
    assert recipe.merge.merge_method == "task_arithmetic"
    assert recipe.settings == Settings(alpha=0.15)
    assert recipe.base == ModelReference.parse("org/base")
    assert names(recipe) == ["org/a", "org/b"]
    assert recipe.depth is None
    assert recipe.tasks == (
        Task(
            model=ModelReference.parse("org/a"),
            name="a",
            dataset=DatasetSpec(path="openai/gsm8k", name="main"),
            prompt="Question: {question}",
            completion=" {answer}",
        ),
        Task(
            model=ModelReference.parse("org/b"),
            name="b",
            dataset=DatasetSpec(path="./code.jsonl"),
            messages="turns",
        ),
    )
    first = recipe.tasks[0]
    assert (first.samples, first.holdout, first.max_length, first.seed, first.batch_size) == (
        256,
        32,
        1024,
        42,
        8,
    )


def test_what_is_sampled_is_given_for_all_tasks_or_for_one(read: Read) -> None:
    recipe = read(RECIPE.replace("alpha: 0.15", "samples: 8\n  holdout: 0") + "      samples: 16\n")
    assert [(task.samples, task.holdout) for task in recipe.tasks] == [(8, 0), (16, 0)]


def test_a_task_says_how_it_is_evaluated(read: Read) -> None:
    def evaluated(text: str) -> str:
        return RECIPE.replace("messages: turns", f"image: picture\n      label: fine\n      eval: {text}")

    task = read(evaluated('{split: test, text_model: org/clip, class_names: [cat, dog], templates: ["a {}."]}')).tasks[
        1
    ]
    assert task.label == "fine"
    assert task.evaluation is not None
    assert (task.evaluation.split, task.evaluation.text_model) == ("test", "org/clip")
    assert (task.evaluation.class_names, task.evaluation.templates) == (["cat", "dog"], ["a {}."])
    assert read(RECIPE).tasks[0].evaluation is None
    for wrong, problem in {
        "test": "eval is 'test', expected a mapping",
        "{splt: test}": "eval.splt is not a known key; did you mean 'split'?",
        "{split: 1}": "eval.split is 1; give the name of a split",
        "{text_model: org/clip}": "eval has a text_model and no templates",
        '{templates: ["a {}"]}': "eval has templates and no text_model",
        '{text_model: org/clip, templates: ["a {x}"]}': "eval.templates is ['a {x}'], where 'a {x}' should have one {}",
        '{text_model: org/clip, templates: ["a {}"], class_names: [1, 2]}': "eval.class_names is [1, 2]; give a list",
    }.items():
        assert f"featcal.tasks[1].{problem}" in error_of(read, evaluated(wrong))


def test_words_stand_for_values_of_columns_that_the_templates_read(read: Read) -> None:
    def words(text: str) -> str:
        return RECIPE.replace('completion: " {answer}"', f'completion: " {{answer}}"\n      words: {text}')

    assert words("x") != RECIPE
    written = '{answer: {0: "no", 1: "yes", other: maybe}, question: {a: b}}'
    assert read(words(written)).tasks[0].words == {
        "answer": {0: "no", 1: "yes", "other": "maybe"},
        "question": {"a": "b"},
    }
    for wrong in (
        "{answer: {0: no}}",
        "{answer: [no]}",
        "{answer: {}}",
        "{}",
        '{answer: "no"}',
        "{answer: {0.5: half}}",
    ):
        found = error_of(read, words(wrong))
        assert "featcal.tasks[0].words is " in found
        assert 'give a mapping like {label: {0: "no", 1: "yes"}}' in found
    assert "has words for 'label', which its templates don't read (they read question, answer)" in error_of(
        read, words('{label: {0: "no"}}')
    )


def test_a_recipe_is_frozen(read: Read) -> None:
    recipe = read(RECIPE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.depth = 3  # type: ignore[misc]
    with pytest.raises(ValidationError):
        recipe.settings.alpha = 1.0


def test_windows_line_ends_stay_as_they_are(read: Read) -> None:
    assert read(RECIPE.replace("\n", "\r\n")).source == RECIPE.replace("\n", "\r\n")


def test_anchors_and_merge_keys_are_read_as_yaml_means_them(read: Read) -> None:
    shared = "    - &first {model: org/a, dataset: d, text: t}\n    - {<<: *first, model: org/b, text: u}\n"
    recipe = read(MERGE + "featcal:\n  tasks:\n" + shared)
    assert [(str(task.model), task.text) for task in recipe.tasks] == [("org/a", "t"), ("org/b", "u")]


@pytest.mark.parametrize("written", ["5e-2", "5E-2", "0.05", "5.e-2", "+5.0e-02", "'5e-2'"])
def test_a_number_with_an_exponent_is_a_number_though_yaml_reads_text(read: Read, written: str) -> None:
    assert read(RECIPE.replace("alpha: 0.15", f"lambda: {written}")).settings.lambda_ == 0.05


@pytest.mark.parametrize(
    ("settings", "has_base", "rho", "scale"),
    [
        (Settings(), True, 2.0, "trace"),
        (Settings(), False, 1.0, "trace"),
        (Settings(lambda_=0.05), True, 2.0, "frobenius"),
        (Settings(lambda_=0.05, scale="trace"), True, 2.0, "trace"),
        (Settings(rho=0), True, 0.0, "trace"),
        (Settings(rho=1.0), False, 1.0, "trace"),
    ],
)
def test_rho_and_scale_are_resolved(settings: Settings, has_base: bool, rho: float, scale: str) -> None:
    resolved = settings.resolved(has_base)
    assert (resolved.rho, resolved.scale) == (rho, scale)
    assert resolved.resolved(has_base) == resolved


def test_an_anchor_blend_needs_a_base() -> None:
    with pytest.raises(RecipeError, match=r"rho is 2\.0, but there is no base"):
        Settings(rho=2.0).resolved(has_base=False)


LINEAR = "merge_method: linear\nmodels: [{model: org/a}, {model: org/b}]\n"


def test_a_method_without_a_base_has_none_and_refuses_an_anchor_blend(read: Read) -> None:
    assert read(LINEAR + tasks_for("org/a", "org/b")).base is None
    section = tasks_for("org/a", "org/b")
    problem = "featcal.rho is 2.0, but there is no base to blend with; add featcal.base_model, or set rho to 1."
    assert error_of(read, f"{LINEAR}{section}  rho: 2\n") == f"recipe.yml:7:8: {problem}"


def test_the_anchors_base_may_be_another_than_the_merges(read: Read) -> None:
    assert str(read(f"{LINEAR}{tasks_for('org/a', 'org/b')}  base_model: org/c\n  rho: 2\n").base) == "org/c"
    assert str(read(f"{RECIPE}  base_model: org/c@main\n").base) == "org/c@main"


@pytest.mark.parametrize(
    ("method", "base", "models", "experts"),
    [
        ("ties", "org/base", ["org/base", "org/a", "org/b"], ["org/a", "org/b"]),
        ("slerp", "org/a", ["org/a", "org/b"], ["org/a", "org/b"]),
        ("slerp", "org/a", ["org/b", "org/a"], ["org/b", "org/a"]),
        ("nearswap", "org/a", ["org/b"], ["org/b", "org/a"]),
        ("arcee_fusion", "org/a", ["org/b"], ["org/b", "org/a"]),
        ("linear", "org/a", ["org/a", "org/b"], ["org/a", "org/b"]),
        ("karcher", "org/base", ["org/a", "org/b"], ["org/a", "org/b"]),
        ("nuslerp", "org/base", ["org/a", "org/b"], ["org/a", "org/b"]),
        ("ties", "org/x", ["org/x@v2", "org/x+org/lora"], ["org/x@v2", "org/x+org/lora"]),
    ],
)
def test_experts_are_the_inputs_other_than_a_base_they_started_from(
    read: Read, method: str, base: str, models: list[str], experts: list[str]
) -> None:
    listed = "".join(f"  - model: {model}\n" for model in models)
    text = f"merge_method: {method}\nbase_model: {base}\nmodels:\n{listed}"
    recipe = read(text + tasks_for(*reversed(experts)))
    assert names(recipe) == experts
    assert str(recipe.base) == base
    assert [str(task.model) for task in recipe.tasks] == experts[::-1]


def test_two_tasks_may_name_one_expert_and_default_names_are_numbered(read: Read) -> None:
    recipe = read(MERGE + tasks_for("org/a", "org/b", "org/a", "org/a").replace("org/b,", "org/b, name: a-2,"))
    assert [task.name for task in recipe.tasks] == ["a", "a-2", "a-3", "a-4"]


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("org/m@rev", "m"),
        ("org/m+org/lora@rev", "lora"),
        ("./folder/my model/", "my-model"),
        ("/models/.hidden", "hidden"),
        ("./模型", "task"),
    ],
)
def test_a_default_name_is_the_references_last_component(read: Read, reference: str, name: str) -> None:
    text = f"merge_method: linear\nmodels: [{{model: '{reference}'}}]\n"
    assert read(text + tasks_for(f"'{reference}'")).tasks[0].name == name


def test_references_may_be_written_as_mappings(read: Read) -> None:
    written = "{model: {path: org/a, revision: v1}, lora: org/l@v2, override_architecture: LlamaForCausalLM}"
    recipe = read(f"merge_method: linear\nmodels:\n  - model: {written}\n" + tasks_for("org/a@v1+org/l@v2"))
    expert = ModelReference(
        model=ModelPath(path="org/a", revision="v1"),
        lora=ModelPath(path="org/l", revision="v2"),
        override_architecture="LlamaForCausalLM",
    )
    assert recipe.experts == (expert,)
    assert recipe.tasks[0].model == expert


def test_an_existing_path_is_not_split(tmp_path: Path, read: Read) -> None:
    for folder in ("a@b+c", "x@y", "p+q"):
        (tmp_path / folder).mkdir()
    assert parse_reference("./a@b+c") == ModelReference(model=ModelPath(path="./a@b+c"))
    assert parse_reference("x@y+lora@v1") == ModelReference(
        model=ModelPath(path="x@y"), lora=ModelPath(path="lora", revision="v1")
    )
    assert parse_reference("p+q+lora") == ModelReference(model=ModelPath(path="p+q"), lora=ModelPath(path="lora"))
    assert parse_reference("org/m@v1+p+q").lora == ModelPath(path="p+q")
    text = "merge_method: ties\nbase_model: x@y\nmodels: [{model: p+q}, {model: {model: a@b+c}}]\n"
    recipe = read(text + tasks_for("p+q", "a@b+c"))
    assert [expert.model.path for expert in recipe.experts] == ["p+q", "a@b+c"]
    assert recipe.merge.base_model == ModelReference(model=ModelPath(path="x@y"))
    assert [entry.model for entry in recipe.merge.models or ()] == list(recipe.experts)


@pytest.mark.parametrize("text", ["", "a+b+c", "a@b@c", "a+", "+a", "a@", "@a", "a@b+c@d@e"])
def test_a_malformed_reference_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=rf"^{re.escape(repr(text))} is not a model reference: .*; write model"):
        parse_reference(text)


SLICES = """\
merge_method: slerp
base_model: org/a
slices:
  - sources: [{model: org/a, layer_range: [0, 8]}, {model: org/b, layer_range: [0, 8]}]
  - sources:
      - {model: org/b, layer_range: [8, 12]}
      - {model: org/a, layer_range: [8, 12]}
"""


def test_slices_in_which_blocks_correspond_are_read(read: Read) -> None:
    recipe = read(SLICES + tasks_for("org/a", "org/b"))
    assert recipe.depth == 12
    assert names(recipe) == ["org/a", "org/b"]


def test_a_base_given_for_the_slices_is_the_base(read: Read) -> None:
    text = (
        "merge_method: ties\nslices:\n  - base_model: org/x\n    sources:\n"
        "      - {model: org/x, layer_range: [0, 4]}\n      - {model: org/a, layer_range: [0, 4]}\n"
    )
    recipe = read(text + tasks_for("org/a"))
    assert (str(recipe.base), names(recipe), recipe.depth) == ("org/x", ["org/a"], 4)


def test_all_modules_models_are_inputs(read: Read) -> None:
    text = (
        "merge_method: task_arithmetic\nbase_model: org/base\nmodules:\n"
        "  vision:\n    models: [{model: org/a}]\n"
        "  text:\n    slices:\n      - sources:\n"
        "          - {model: org/b, layer_range: [0, 6]}\n          - {model: org/base, layer_range: [0, "
        "6]}\n"
    )
    recipe = read(text + tasks_for("org/a", "org/b"))
    assert (names(recipe), recipe.depth) == (["org/a", "org/b"], 6)


NO_COUNTERPART = (
    "a block that is stacked, shifted or left out has no single counterpart in each expert; write the same "
    "ranges for every source, without gaps, from 0."
)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "{model: org/a, layer_range: [8, 12]}",
            "{model: org/a, layer_range: [7, 11]}",
            "7:37: slices[1].sources[1].layer_range is [7, 11], but the output's blocks here are [8, 12]; "
            + NO_COUNTERPART,
        ),
        (
            "[{model: org/a, layer_range: [0, 8]}, {model: org/b, layer_range: [0, 8]}]",
            "[{model: org/a, layer_range: [2, 8]}, {model: org/b, layer_range: [2, 8]}]",
            "4:43: slices[0].sources[0].layer_range is [2, 8], but the output's blocks here are [0, 6]; "
            + NO_COUNTERPART,
        ),
        (
            "{model: org/b, layer_range: [8, 12]}",
            "{model: org/c, layer_range: [8, 12]}",
            "5:5: slices[1] merges org/a, org/c, but the first slice merges org/a, org/b; calibration needs "
            "the same models in every slice.",
        ),
        (
            "[{model: org/a, layer_range: [0, 8]}, {model: org/b, layer_range: [0, 8]}]",
            "[]",
            "4:5: slices[0] has no sources; list the models that it is merged from.",
        ),
        (
            "  - sources:\n",
            "  - base_model: org/b\n    sources:\n",
            "5:5: slices[1] has the base org/b, but slices[0] has org/a; calibration needs one base for the "
            "whole merge.",
        ),
    ],
)
def test_slices_without_one_counterpart_are_refused(read: Read, old: str, new: str, message: str) -> None:
    assert old in SLICES
    assert error_of(read, SLICES.replace(old, new)) == f"recipe.yml:{message}"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "model: org/b\n",
            "model: org/x\n",
            "14:14: featcal.tasks[1].model is 'org/x', which is not among the merge's experts (org/a, "
            "org/b); name one of those.",
        ),
        (
            "model: org/b\n",
            "model: org/base\n",
            "14:14: featcal.tasks[1].model is 'org/base', which is not among the merge's experts (org/a, "
            "org/b); name one of those.",
        ),
        (
            "model: org/b\n",
            "model: org/a\n",
            "10:5: featcal.tasks has no task for the expert 'org/b'; add one.",
        ),
        (
            "model: org/b\n",
            "model: 3\n",
            "14:14: featcal.tasks[1].model is 3; give a model as text: a path or a Hub id.",
        ),
        (
            "- model: org/b\n      dataset",
            "- dataset",
            "14:7: featcal.tasks[1].model is missing; give one of the merge's experts.",
        ),
        (
            "dataset: ./code.jsonl\n      ",
            "",
            "14:7: featcal.tasks[1].dataset is missing; give a Hub id or a local path, or a mapping with a path.",
        ),
        (
            "dataset: ./code.jsonl",
            "dataset: {split: test}",
            "15:16: featcal.tasks[1].dataset.path is missing; give a Hub id or a local path, as text.",
        ),
        (
            "dataset: ./code.jsonl",
            "dataset: 5",
            "15:16: featcal.tasks[1].dataset.path is 5; give a Hub id or a local path, as text.",
        ),
        (
            "name: main",
            "name: 2024",
            "11:43: featcal.tasks[0].dataset.name is 2024; give the name of the dataset's configuration, as text.",
        ),
        (
            "messages: turns",
            "messages: turns\n      name: a b",
            "17:13: featcal.tasks[1].name is 'a b'; give letters, digits and ._- that begin with a letter, a "
            "digit or _, or leave it out for the expert's name.",
        ),
        (
            "messages: turns",
            "messages: turns\n      text: body",
            "14:7: featcal.tasks[1] has text and messages, which don't go together; give one of text, prompt "
            "(with or without completion), messages, image, or text and image together.",
        ),
        (
            "      messages: turns\n",
            "",
            "14:7: featcal.tasks[1] names nothing to read; give one of text, prompt (with or without "
            "completion), messages, image, or text and image together.",
        ),
        (
            'prompt: "Question: {question}"',
            'prompt: "Question: {question"',
            "12:15: featcal.tasks[0].prompt is 'Question: {question', which is not a template (expected '}' "
            "before end of string); give text with {column} in it ({{ and }} are plain braces).",
        ),
        (
            'prompt: "Question: {question}"',
            'prompt: "Question: {}"',
            "12:15: featcal.tasks[0].prompt is 'Question: {}', where {} names no column; give text with "
            "{column} in it ({{ and }} are plain braces).",
        ),
        (
            "alpha: 0.15",
            "alhpa: 0.15",
            "8:3: featcal.alhpa is not a known key; did you mean 'alpha'? The known keys are alpha, "
            "scale, max_length, lambda, samples, lm_eval, ... 14 more.",
        ),
        (
            "dtype: bfloat16",
            "dytpe: bfloat16",
            "6:1: dytpe is not a known key; did you mean 'dtype'? The known keys are dtype, "
            "out_dtype, models, modules, chat_template, tokenizer, ... 6 more.",
        ),
        (
            "org/b, parameters",
            "org/b, paramters",
            "5:20: models[1].paramters is not a known key; did you mean 'parameters'? The known keys are "
            "model, parameters.",
        ),
        (
            "name: main",
            "subset: main",
            "11:37: featcal.tasks[0].dataset.subset is not a known key; remove it or use one of these keys. "
            "The known keys are path, name, split, data_files, revision, streaming.",
        ),
        (
            "alpha: 0.15",
            "alpha: 0.15\n  alpha: 0.2",
            "9:3: the key 'alpha' is already given in line 8; remove one of the two.",
        ),
        (
            "org/b, parameters: {weight: 0.3}",
            "org/b, parameters: {weight: 0.3, weight: 0.4}",
            "5:46: the key 'weight' is already given in line 5; remove one of the two.",
        ),
        (
            "dtype: bfloat16",
            "dtype: 16",
            "6:8: dtype is 16, which mergekit refuses (Input should be a valid string); mend it.",
        ),
        (
            "{model: org/b, parameters: {weight: 0.3}}",
            "{parameters: {weight: 0.3}}",
            "5:5: models[1] lacks the key 'model', which mergekit needs; add it.",
        ),
        (
            "{model: org/b, parameters",
            "{model: org/b+x+y, parameters",
            "5:13: models[1].model 'org/b+x+y' is not a model reference: it has several '+'; write model, "
            "model@revision, model+lora or model@revision+lora@revision.",
        ),
        (
            "{model: org/b, parameters",
            "{model: org/a, parameters",
            "4:3: models doesn't suit the method 'task_arithmetic' (Duplicate merge inputs); it merges "
            "org/a, org/a, org/base: mend that list.",
        ),
        (
            "base_model: org/base",
            "out_dtype: float32",
            "1:1: the recipe has no base_model, which the method 'task_arithmetic' needs; add it.",
        ),
        (
            "models:",
            "slices: [{sources: []}]\nmodels:",
            "1:1: the recipe is refused by mergekit (Exactly one of 'models', 'slices', or 'modules' must be "
            "present); mend it until mergekit-yaml takes it.",
        ),
        (
            "merge_method: task_arithmetic",
            "merge_method: passthrough",
            "1:15: merge_method is 'passthrough', which stacks blocks instead of merging them, so that no "
            "block has a counterpart in each expert; use a method that merges.",
        ),
        (
            "alpha: 0.15",
            "alpha: 2024-13-45",
            "8:10: '2024-13-45' looks like a YAML timestamp but isn't one; put it in quotes if it is text.",
        ),
        ("alpha: 0.15", 'alpha: "\\UFFFFFFFF"', None),
        (
            "alpha: 0.15",
            "alpha: \x07",
            "8:10: the character '\\x07' isn't allowed in YAML; remove it.",
        ),
        (
            "alpha: 0.15",
            "alpha: \udcff",
            "8:10: the byte 0xff isn't UTF-8; save the recipe as UTF-8 text.",
        ),
        (
            "dtype: bfloat16\n",
            "dtype: bfloat16\n---\n",
            "7:1: a second document starts here, and mergekit-yaml reads only one; move it to a file of its own.",
        ),
        (
            "alpha: 0.15",
            "alpha: &loop [*loop]",
            "8:10: this value contains itself through an alias; write it out.",
        ),
        (
            "alpha: 0.15",
            "alpha: 0.15\n  tasks: []",
            "10:3: the key 'tasks' is already given in line 9; remove one of the two.",
        ),
    ],
)
def test_an_error_says_where_and_what_to_do(read: Read, old: str, new: str, message: str | None) -> None:
    assert RECIPE.count(old) == 1
    found = error_of(read, RECIPE.replace(old, new))
    if message is None:  # PyYAML's own words differ between versions
        assert re.match(r"recipe\.yml:8:\d+: this isn't YAML that mergekit reads", found)
    else:
        assert found == f"recipe.yml:{message}"


@pytest.mark.parametrize(
    ("key", "value", "advice"),
    [
        ("lambda", "0", "a number above 0, or leave it out for the adaptive ridge"),
        ("lambda", ".nan", "a number above 0, or leave it out for the adaptive ridge"),
        ("lambda", ".inf", "a number above 0, or leave it out for the adaptive ridge"),
        ("lambda", "1e999", "a number above 0, or leave it out for the adaptive ridge"),
        ("lambda", "'0.05'", "a number above 0, or leave it out for the adaptive ridge"),
        ("lambda", "yes", "a number above 0, or leave it out for the adaptive ridge"),
        ("rho", "-1", "a number of at least 0, or leave it out for 2 with a base and 1 without"),
        ("alpha", "1.5", "a number from 0 to 1, or leave it out for 0.3"),
        ("alpha", "9" * 400, "a number from 0 to 1, or leave it out for 0.3"),
        (
            "scale",
            "Trace",
            "frobenius or trace, or leave it out for frobenius with a lambda and trace without",
        ),
        ("bias", "1", "true or false, or leave it out for true"),
        ("norm", "'yes'", "true or false, or leave it out for true"),
        ("pooled_token", "last", "auto, first or none, or leave it out for auto"),
        ("samples", "0", "a whole number of at least 1, or leave it out for 256"),
        ("samples", "true", "a whole number of at least 1, or leave it out for 256"),
        ("samples", "8.0", "a whole number of at least 1, or leave it out for 256"),
        ("holdout", "-1", "a whole number of at least 0, or leave it out for 32"),
        ("max_length", "1e3", "a whole number of at least 1, or leave it out for 1024"),
        (
            "seed",
            "4294967296",
            "a whole number from 0 to 2^32 - 1, which is what NumPy takes, or leave it out for 42",
        ),
        ("batch_size", "null", "a whole number of at least 1, or leave it out for 8"),
    ],
)
def test_a_value_out_of_range_or_of_another_type_is_refused(read: Read, key: str, value: str, advice: str) -> None:
    found = error_of(read, RECIPE.replace("alpha: 0.15", f"{key}: {value}"))
    assert found.startswith(f"recipe.yml:8:{len(key) + 5}: featcal.{key} is ")
    assert found.endswith(f"; give {advice}.")


def test_a_task_refuses_its_own_values_at_their_own_place(read: Read) -> None:
    problem = "featcal.tasks[1].samples is 0; give a whole number of at least 1, or leave it out for 256."
    assert error_of(read, f"{RECIPE}      samples: 0\n") == f"recipe.yml:17:16: {problem}"


def test_a_name_given_twice_is_refused(read: Read) -> None:
    text = MERGE + tasks_for("org/a, name: x", "org/b, name: x")
    problem = "featcal.tasks[1].name is 'x', as is tasks[0].name; give each task a name of its own."
    assert error_of(read, text) == f"recipe.yml:10:28: {problem}"


def test_a_recipe_without_the_section_is_shown_one_that_works(read: Read) -> None:
    found = error_of(read, MERGE)
    assert found.startswith("recipe.yml:1:1: the recipe has no featcal section; add one like this")
    assert names(read(MERGE + found[found.index("\nfeatcal:") :])) == ["org/a", "org/b"]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("featcal:\n", "7:9: featcal is None, expected a mapping; give it at least `tasks:`."),
        (
            "featcal: {}\n",
            "7:10: featcal.tasks is missing; list a task with model and dataset for each expert.",
        ),
        (
            "featcal:\n  tasks: []\n",
            "8:10: featcal.tasks is []; list a task with model and dataset for each expert.",
        ),
        (
            "featcal:\n  tasks: [org/a]\n",
            "8:11: featcal.tasks[0] is 'org/a', expected a mapping; give it a model and a dataset.",
        ),
    ],
)
def test_a_section_without_tasks_is_refused(read: Read, section: str, message: str) -> None:
    assert error_of(read, MERGE + section) == f"recipe.yml:{message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "recipe.yml: the recipe is empty; write a mergekit recipe with a featcal section."),
        ("# nothing\n", "recipe.yml: the recipe is empty; write a mergekit recipe with a featcal section."),
        (
            "\n- a\n",
            "recipe.yml:2:1: the recipe is a sequence, expected a mapping; write `key: value` lines, as mergekit does.",
        ),
        ("!!set {a, b}", "recipe.yml:1:1: the recipe is a set, expected a mapping; remove its tag."),
        ("[" * 5000, "recipe.yml: the YAML is nested too deeply to be a recipe; flatten it."),
    ],
)
def test_a_text_that_is_no_mapping_is_refused(read: Read, text: str, message: str) -> None:
    assert error_of(read, text) == message


def test_aliases_that_multiply_are_refused(read: Read) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30)]
    problem = "this stands for more than 100000 values, aliases written out; use fewer aliases."
    assert error_of(read, "\n".join(lines)) == f"recipe.yml:5:5: {problem}"


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"nope\.yml: the recipe can't be read \(No such file"):
        read_recipe(tmp_path / "nope.yml")
    with pytest.raises(RecipeError, match="is a folder, expected a recipe: the mergekit YAML comes first"):
        read_recipe(tmp_path)
    with pytest.raises(RecipeError, match="the recipe can't be read"):
        read_recipe("nul\0.yml")


@pytest.mark.parametrize(
    ("old", "new", "warnings"),
    [
        ("parameters: {weight: 0.3}", "parameters: {weight: 0.3, density: 0.5}", []),
        ("dtype:", "parameters: {density: 0.5, normalize: true}\ndtype:", []),
        (
            "{weight: 0.3}",
            "{wieght: 0.3}",
            [
                "recipe.yml:4:33: models[0].parameters.wieght is not a parameter in 'task_arithmetic', and mergekit "
                "passes over it; did you mean 'weight'?"
            ],
        ),
        (
            "{weight: 0.3}",
            "{weight: 0.3, normalize: true}",
            [
                "recipe.yml:4:46: models[0].parameters.normalize is not a parameter of a single model in "
                "'task_arithmetic', and mergekit passes over it; it reads weight, density there"
            ],
        ),
        (
            "dtype:",
            "parameters: {gamma: 0.1}\ndtype:",
            [
                "recipe.yml:6:14: parameters.gamma is not a parameter in 'task_arithmetic', and mergekit passes over "
                "it; it reads int8_mask, normalize, rescale, lambda, weight, density there"
            ],
        ),
    ],
)
def test_a_parameter_that_the_method_doesn_t_declare_is_a_warning(
    read: Read, old: str, new: str, warnings: list[str]
) -> None:
    assert list(read(RECIPE.replace(old, new, 1)).warnings) == warnings


def test_parameters_of_slices_sources_and_modules_are_looked_at(read: Read) -> None:
    source = "{model: org/%s, layer_range: [0, 4], parameters: {weigth: 1}}"
    slices = f"slices: [{{sources: [{source % 'a'}, {source % 'b'}], parameters: {{normalise: true}}}}]\n"
    text = f"merge_method: linear\nmodules: {{first: {{{slices.strip()}}}}}\ndtype: bfloat16\n"
    warnings = read(text + tasks_for("org/a", "org/b")).warnings
    assert [re.findall(r"modules\S+|'\w+'", warning) for warning in warnings] == [
        ["modules.first.slices[0].sources[0].parameters.weigth", "'linear'", "'weight'"],
        ["modules.first.slices[0].sources[1].parameters.weigth", "'linear'", "'weight'"],
        ["modules.first.slices[0].parameters.normalise", "'linear'", "'normalize'"],
    ]


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "recipes").iterdir()), ids=lambda path: path.stem)
def test_the_recipes_that_come_along_have_no_parameter_that_is_passed_over(path: Path) -> None:
    assert read_recipe(path).warnings == ()
