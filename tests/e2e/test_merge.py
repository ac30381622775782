"""`featcal-hf merge`: mergekit's arithmetic to the last bit, for architectures that mergekit-yaml can't write."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
import yaml
from families import FAMILIES, TASKS, Family, base_model, expert_model, save_side_files, write_data
from mergekit.card import generate_card
from mergekit.config import MergeConfiguration
from mergekit.graph import Executor
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from mergekit.scripts.merge_raw_pytorch import RawPyTorchMergeConfig, SimpleLoaderCache, plan_flat_merge
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_merge import Outcome, contents
from torch import Tensor, nn

import featcal_hf
from featcal_hf import CheckpointError, RecipeError, calibrate, merge
from featcal_hf.shards import ShardWriter

WEIGHTS = {"left": 0.3, "right": 0.45}
NOT_MERGEKITS = [name for name, family in FAMILIES.items() if not family.mergekit]
VISION = ["clip-vision", "clip-vision-projection", "siglip"]


def save_models(name: str, root: Path) -> Family:
    family = FAMILIES[name]
    base = base_model(family)
    for label, model in {
        "base": base,
        **{task: expert_model(family, base, i) for i, task in enumerate(TASKS, 1)},
    }.items():
        model.save_pretrained(root / label)
        save_side_files(family, root / label)
    return family


def write_recipe(root: Path, **changes: Any) -> Path:
    recipe: dict[str, Any] = {
        "merge_method": "task_arithmetic",
        "base_model": str(root / "base"),
        "models": [{"model": str(root / task), "parameters": {"weight": WEIGHTS[task]}} for task in TASKS],
        "dtype": "float32",
    }
    recipe |= changes
    path = root / "recipe.yml"
    path.write_text(yaml.safe_dump({key: value for key, value in recipe.items() if value is not None}, sort_keys=False))
    return path


def tensors_of(folder: Path) -> dict[str, Tensor]:
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return tensors


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})


def use_hub_layout(folder: Path) -> None:
    """CLIPVisionModel as the Hub has it, with the buffer that older releases of transformers saved."""
    change_weights(
        folder,
        lambda tensors: {
            **{f"vision_model.{name.removeprefix('vision_model.')}": value for name, value in tensors.items()},
            "vision_model.embeddings.position_ids": torch.arange(17)[None],
        },
    )


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        assert torch.equal(value, other[name]), name


def merge_raw(recipe: Path, root: Path) -> dict[str, Tensor]:
    """What mergekit-pytorch makes of the models' single weight files."""
    content = yaml.safe_load(recipe.read_text())
    content["base_model"] += "/model.safetensors"
    for entry in content["models"]:
        entry["model"] += "/model.safetensors"
    SimpleLoaderCache._instance = None
    config = RawPyTorchMergeConfig.model_validate(content)
    tasks = plan_flat_merge(config, str(root / "raw"), False, False, MergeOptions())
    Executor(tasks, math_device="cpu", storage_device="cpu").execute()
    return tensors_of(root / "raw")


def float64_of(root: Path) -> dict[str, Tensor]:
    base, *experts = (tensors_of(root / label) for label in ("base", *TASKS))
    return {
        name: value.double()
        + sum(
            WEIGHTS[task] * (expert[name].double() - value.double())
            for task, expert in zip(TASKS, experts, strict=True)
        )
        for name, value in base.items()
        if value.is_floating_point()
    }


@pytest.mark.parametrize("name", [*NOT_MERGEKITS, *VISION, "bert"])
def test_task_arithmetic_is_mergekits_own_bit_for_bit_and_that_of_float64(name: str, tmp_path: Path) -> None:
    save_models(name, tmp_path)
    recipe = write_recipe(tmp_path)
    report = merge(recipe, tmp_path / "merged")
    merged = tensors_of(tmp_path / "merged")
    assert report.merged == len(merged)
    assert not report.copied
    assert not report.left_out
    assert_same(merged, merge_raw(recipe, tmp_path))
    for tensor, value in float64_of(tmp_path).items():
        torch.testing.assert_close(merged[tensor].double(), value, rtol=1e-6, atol=1e-6)
    _, info = type(base_model(FAMILIES[name])).from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info.values()), info


@pytest.mark.parametrize("layouts", [("base", "left", "right"), ("base",), ("left",)])
def test_clip_vision_is_merged_in_either_layout_and_across_them(layouts: tuple[str, ...], tmp_path: Path) -> None:
    save_models("clip-vision", tmp_path)
    expected = float64_of(tmp_path)
    for label in layouts:
        use_hub_layout(tmp_path / label)
    merge(write_recipe(tmp_path), tmp_path / "merged")
    merged, base = tensors_of(tmp_path / "merged"), tensors_of(tmp_path / "base")
    assert merged.keys() == base.keys()
    for name, value in merged.items():
        if name.endswith("position_ids"):
            assert torch.equal(value, base[name])
            continue
        torch.testing.assert_close(value.double(), expected[name.removeprefix("vision_model.")], rtol=1e-6, atol=1e-6)
    _, info = hf.CLIPVisionModel.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"]


def parameters(**given: Any) -> list[dict[str, Any]]:
    return [{"weight": WEIGHTS[task], **given} for task in TASKS]


GRADIENT = {"filter": "self_attn", "value": [0.1, 0.9]}
METHODS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], bool]] = {
    "task_arithmetic": (parameters(), {"normalize": True, "lambda": 0.7}, True),
    "linear": (parameters(), {}, False),
    "ties": (parameters(density=0.5), {"int8_mask": True}, True),
    "breadcrumbs": (parameters(density=0.6, gamma=0.1), {}, True),
    "karcher": ([{}, {}], {}, False),
    "model_stock": ([{}, {}], {}, True),
    "sce": ([{}, {}], {"select_topk": 0.5}, True),
    "nuslerp": (parameters(), {}, False),
    "multislerp": (parameters(), {}, False),
    "weights by filter and layer": ([{"weight": [GRADIENT, {"value": 0.4}]}, {"weight": [0.2, 0.3]}], {}, True),
}


@pytest.mark.parametrize("case", METHODS)
def test_a_llama_comes_out_as_from_mergekit_yaml_bit_for_bit(case: str, tmp_path: Path) -> None:
    save_models("llama", tmp_path)
    given, shared, has_base = METHODS[case]
    recipe = write_recipe(
        tmp_path,
        merge_method=case if " " not in case else "task_arithmetic",
        base_model=str(tmp_path / "base") if has_base else None,
        models=[
            {"model": str(tmp_path / task), "parameters": values} for task, values in zip(TASKS, given, strict=True)
        ],
        parameters=shared,
        dtype="bfloat16",
        out_dtype="float32" if case == "ties" else None,
    )
    merge(recipe, tmp_path / "merged")
    assert_same(tensors_of(tmp_path / "merged"), by_mergekit_yaml(recipe, tmp_path / "theirs"))


def by_mergekit_yaml(recipe: Path, out: Path) -> dict[str, Tensor]:
    text = recipe.read_text()
    configuration = MergeConfiguration.model_validate(yaml.safe_load(text))
    run_merge(configuration, str(out), MergeOptions(quiet=True), config_source=text)
    return tensors_of(out)


def test_slerp_and_slices_with_layers_own_values_are_mergekits_too(tmp_path: Path) -> None:
    save_models("llama", tmp_path)

    def sources(start: int) -> dict[str, Any]:
        models = [tmp_path / "base", tmp_path / "left"]
        return {"sources": [{"model": str(model), "layer_range": [start, start + 1]} for model in models]}

    recipe = write_recipe(
        tmp_path,
        merge_method="slerp",
        models=None,
        slices=[sources(0), sources(1) | {"parameters": {"t": 0.9}}],
        parameters={"t": [{"filter": "mlp", "value": [0.1, 0.6]}, {"value": 0.5}]},
    )
    merge(recipe, tmp_path / "merged")
    assert_same(tensors_of(tmp_path / "merged"), by_mergekit_yaml(recipe, tmp_path / "theirs"))


@pytest.mark.parametrize("method", ["dare_ties", "dare_linear"])
def test_methods_that_draw_numbers_repeat_with_a_seed(method: str, tmp_path: Path) -> None:
    save_models("vit", tmp_path)
    models = [{"model": str(tmp_path / task), "parameters": {"weight": 0.5, "density": 0.5}} for task in TASKS]
    recipe = write_recipe(tmp_path, merge_method=method, models=models)
    for out, seed in {"one": 1, "again": 1, "other": 2}.items():
        merge(recipe, tmp_path / out, random_seed=seed)
    one, again, other = (tensors_of(tmp_path / out) for out in ("one", "again", "other"))
    assert_same(one, again)
    assert any(not torch.equal(value, other[name]) for name, value in one.items())


def test_a_tensor_on_which_mergekits_method_fails_is_named(tmp_path: Path) -> None:
    save_models("vit", tmp_path)
    models = [{"model": str(tmp_path / task), "parameters": {"weight": 0.5, "density": 0.5}} for task in TASKS]
    recipe = write_recipe(tmp_path, merge_method="della", models=models)
    with pytest.raises(
        RecipeError, match=r"mergekit's della can't merge vit.embeddings.cls_token of shape \(1, 1, 32\)"
    ):
        merge(recipe, tmp_path / "merged")  # it ranks along dimension 1, which is 1 here
    assert not (tmp_path / "merged").exists()


def test_a_weights_gradient_runs_over_the_blocks_of_each_stack(tmp_path: Path) -> None:
    save_models("t5", tmp_path)
    weights = {"left": [1.0, 0.0], "right": 0.0}
    models = [{"model": str(tmp_path / task), "parameters": {"weight": weights[task]}} for task in TASKS]
    merge(write_recipe(tmp_path, models=models), tmp_path / "merged")
    base, left, merged = (tensors_of(tmp_path / label) for label in ("base", "left", "merged"))
    for name, value in merged.items():
        expected = base if ".block.1." in name else left  # the first block and what is outside have the first value
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["clip-vision", "vit", "dinov2", "bert"])
def test_merge_calibrate_and_load_again(name: str, tmp_path: Path, featcal: Callable[..., Outcome]) -> None:
    family = save_models(name, tmp_path)
    rows = write_data(tmp_path / "rows")
    if name == "clip-vision":
        for label in ("base", *TASKS):
            use_hub_layout(tmp_path / label)
    tasks = [{"model": str(tmp_path / task), "dataset": str(rows[task]), **family.reads} for task in TASKS]
    recipe = write_recipe(
        tmp_path,
        featcal={
            "lambda": 0.05,
            "scale": "trace",
            "rho": 1.0,
            "alpha": 0.25,
            "samples": 48,
            "holdout": 16,
            "batch_size": 16,
            "tasks": tasks,
        },
    )
    outcome = featcal("merge", recipe, tmp_path / "merged", "--out-shard-size", "60k")
    assert outcome.code == 0, outcome.errors
    assert "block 3/3" in outcome.output
    assert "Wrote" in outcome.output
    assert len(list((tmp_path / "merged").glob("model-*.safetensors"))) > 1
    before = tensors_of(tmp_path / "merged")
    report = calibrate(recipe, tmp_path / "merged")
    assert all(after.drift < before.drift for block in report.blocks for before, after in block.drift.values())
    after = tensors_of(tmp_path / "merged")
    assert before.keys() == after.keys()
    assert any(not torch.equal(value, after[tensor]) for tensor, value in before.items())
    _, info = type(base_model(family)).from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"]


def test_a_folder_that_mergekit_left_incomplete_is_refused_with_the_command_that_merges(
    tmp_path: Path, featcal: Callable[..., Outcome]
) -> None:
    family = save_models("vit", tmp_path)
    rows = write_data(tmp_path / "rows")
    tasks = [{"model": str(tmp_path / task), "dataset": str(rows[task]), **family.reads} for task in TASKS]
    recipe = write_recipe(tmp_path, featcal={"tasks": tasks})
    by_mergekit_yaml(recipe, tmp_path / "merged")
    for command in ("check", "calibrate"):
        outcome = featcal(command, recipe, tmp_path / "merged")
        assert outcome.code == 1
        assert f"`featcal-hf merge {recipe} {tmp_path / 'merged'}` merges this architecture" in outcome.errors


def test_files_are_the_bases_and_the_recipe_and_card_are_mergekits(tmp_path: Path) -> None:
    save_models("vit", tmp_path)
    (tmp_path / "base" / "optimizer.bin").write_bytes(b"not of the model")
    recipe = write_recipe(tmp_path)
    merge(recipe, tmp_path / "merged")
    merged, base = contents(tmp_path / "merged"), contents(tmp_path / "base")
    own = {"model.safetensors", "mergekit_config.yml", "README.md"}
    assert own <= merged.keys()
    assert {name: mark for name, mark in merged.items() if name not in own} == {
        name: mark for name, mark in base.items() if name not in {"model.safetensors", "optimizer.bin"}
    }
    assert (tmp_path / "merged" / "mergekit_config.yml").read_bytes() == recipe.read_bytes()
    assert recipe.read_text() in (tmp_path / "merged" / "README.md").read_text()
    merge(recipe, tmp_path / "bare", copy_tokenizer=False, write_model_card=False)
    assert {path.name for path in (tmp_path / "bare").iterdir()} == {"config.json", "model.safetensors"}


def test_the_card_is_mergekits_and_asks_the_hub_nothing_about_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_models("vit", tmp_path)
    monkeypatch.chdir(tmp_path)
    models = [{"model": task, "parameters": {"weight": 0.3}} for task in TASKS]
    recipe = write_recipe(tmp_path, base_model="base", models=models)
    merge(recipe, "merged")
    monkeypatch.setattr("mergekit.card.is_hf", lambda path: False)
    configuration = MergeConfiguration.model_validate(yaml.safe_load(recipe.read_text()))
    expected = generate_card(configuration, recipe.read_text(), "merged")
    assert sorted((tmp_path / "merged" / "README.md").read_text().splitlines()) == sorted(expected.splitlines())


def test_the_config_says_the_dtype_of_the_result(tmp_path: Path) -> None:
    save_models("dinov2", tmp_path)
    merge(write_recipe(tmp_path, dtype="float32", out_dtype="bfloat16"), tmp_path / "merged")
    before, after = (json.loads((tmp_path / label / "config.json").read_text()) for label in ("base", "merged"))
    assert after == before | {"dtype": "bfloat16"}
    assert {value.dtype for value in tensors_of(tmp_path / "merged").values()} == {torch.bfloat16}


def classifier_of(folder: Path, classes: int) -> None:
    """Give a saved ViT a head of its own."""
    generator = torch.Generator().manual_seed(classes)
    model = hf.ViTForImageClassification.from_pretrained(folder)
    model.classifier = nn.Linear(32, classes)
    model.classifier.weight.data = torch.randn(classes, 32, generator=generator)
    model.config.num_labels = classes
    model.save_pretrained(folder)


def test_heads_that_differ_are_the_bases(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_models("vit", tmp_path)
    expected = float64_of(tmp_path)
    for task, classes in zip(TASKS, (5, 7), strict=True):
        classifier_of(tmp_path / task, classes)
    report = merge(write_recipe(tmp_path), tmp_path / "merged")
    merged, base = tensors_of(tmp_path / "merged"), tensors_of(tmp_path / "base")
    assert set(report.copied) == {"classifier.weight", "classifier.bias"}
    assert "classifier.weight" in caplog.text
    assert "taken from base model" in caplog.text
    for name, value in merged.items():
        if name in report.copied:
            assert torch.equal(value, base[name])
        else:
            torch.testing.assert_close(value.double(), expected[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pooler", [True, False])
def test_heads_without_a_counterpart_in_the_base_are_left_out(
    pooler: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_models("vit", tmp_path)
    expected = float64_of(tmp_path)
    hf.ViTModel.from_pretrained(tmp_path / "base", add_pooling_layer=pooler).save_pretrained(tmp_path / "base")
    report = merge(write_recipe(tmp_path), tmp_path / "merged")
    merged, base = tensors_of(tmp_path / "merged"), tensors_of(tmp_path / "base")
    assert merged.keys() == base.keys()
    assert [sorted(names) for names in report.left_out.values()] == [["classifier.bias", "classifier.weight"]] * 2
    assert "has no place for it" in caplog.text
    assert set(report.copied) == ({"pooler.dense.weight", "pooler.dense.bias"} if pooler else set())
    for name, value in merged.items():
        if name in report.copied:
            assert torch.equal(value, base[name])
        else:
            torch.testing.assert_close(value.double(), expected[f"vit.{name}"], rtol=1e-6, atol=1e-6)


def test_heads_that_differ_without_any_base_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_models("vit", tmp_path)
    classifier_of(tmp_path / "right", 7)
    report = merge(write_recipe(tmp_path, merge_method="linear", base_model=None), tmp_path / "merged")
    assert report.left_out == {"result": ["classifier.bias", "classifier.weight"]}
    assert "no base_model has it" in caplog.text
    assert tensors_of(tmp_path / "merged").keys() == tensors_of(tmp_path / "left").keys() - {
        "classifier.bias",
        "classifier.weight",
    }


def test_vision_experts_of_a_whole_clip_make_a_vision_model(tmp_path: Path) -> None:
    save_models("clip", tmp_path)
    expected = float64_of(tmp_path)
    for task in TASKS:
        hf.CLIPVisionModel.from_pretrained(tmp_path / task).save_pretrained(tmp_path / "tower" / task)
    models = [{"model": str(tmp_path / "tower" / task), "parameters": {"weight": WEIGHTS[task]}} for task in TASKS]
    rows = write_data(tmp_path / "rows")
    tasks = [
        {"model": model["model"], "dataset": str(rows[task]), "image": "image"}
        for model, task in zip(models, TASKS, strict=True)
    ]
    recipe = write_recipe(tmp_path, models=models, featcal={"samples": 8, "holdout": 4, "tasks": tasks})
    merge(recipe, tmp_path / "merged")
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["architectures"] == ["CLIPVisionModel"]
    assert (tmp_path / "merged" / "preprocessor_config.json").is_file()
    merged = tensors_of(tmp_path / "merged")
    assert merged.keys() == tensors_of(tmp_path / "tower" / "left").keys()
    for name, value in merged.items():
        key = f"vision_model.{name.removeprefix('vision_model.')}"
        torch.testing.assert_close(value.double(), expected[key], rtol=1e-6, atol=1e-6)
    assert len(calibrate(recipe, tmp_path / "merged").blocks) == 2


def test_an_expert_may_be_the_base_with_an_adapter(tmp_path: Path) -> None:
    save_models("vit", tmp_path)
    torch.manual_seed(0)
    model = hf.ViTForImageClassification.from_pretrained(tmp_path / "base")
    adapted = get_peft_model(
        model, LoraConfig(r=2, target_modules=["q_proj", "v_proj", "query", "value", "fc1"], init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "left")
    right = {"model": str(tmp_path / "right"), "parameters": {"weight": 0.45}}
    for out, left in {"whole": tmp_path / "left", "merged": f"{tmp_path / 'base'}+{tmp_path / 'adapter'}"}.items():
        merge(
            write_recipe(tmp_path, models=[{"model": str(left), "parameters": {"weight": 0.3}}, right]), tmp_path / out
        )
    whole, merged, base = (tensors_of(tmp_path / label) for label in ("whole", "merged", "base"))
    assert whole.keys() == merged.keys()
    assert any(not torch.equal(value, base[name]) for name, value in tensors_of(tmp_path / "left").items())
    for name, value in whole.items():
        torch.testing.assert_close(merged[name], value, rtol=1e-6, atol=1e-6)


def other_width(root: Path) -> dict[str, Any]:
    hf.ViTForImageClassification(hf.ViTConfig(**_SMALL | {"hidden_size": 16})).save_pretrained(root / "left")
    return {}


def other_depth(root: Path) -> dict[str, Any]:
    hf.ViTForImageClassification(hf.ViTConfig(**_SMALL | {"num_hidden_layers": 3})).save_pretrained(root / "left")
    return {}


def other_family(root: Path) -> dict[str, Any]:
    shutil.rmtree(root / "left")
    FAMILIES["dinov2"].build().save_pretrained(root / "left")
    return {}


def lost_tensor(root: Path) -> dict[str, Any]:
    change_weights(root / "left", lambda tensors: dict(list(tensors.items())[:-1]))
    return {}


def no_weight(root: Path) -> dict[str, Any]:
    return {"models": [{"model": str(root / task)} for task in TASKS]}


_SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
REFUSED: dict[str, tuple[Callable[[Path], dict[str, Any]], type[Exception], str]] = {
    "another width": (other_width, CheckpointError, "must have the same blocks and embeddings"),
    "another depth": (other_depth, CheckpointError, "has 3 blocks, .*base has 2"),
    "another architecture": (other_family, CheckpointError, "is a dinov2 model, the merged model is a vit"),
    "a tensor is missing": (lost_tensor, CheckpointError, "lacks 1 of 40 tensors"),
    "a parameter is missing": (no_weight, RecipeError, "Missing required parameter weight"),
    "parts of an architecture": (
        lambda root: {
            "models": None,
            "modules": {
                "default": {"models": [{"model": str(root / task), "parameters": {"weight": 1}} for task in TASKS]}
            },
        },
        RecipeError,
        "mergekit's descriptions of architectures",
    ),
    "slices of half the blocks": (
        lambda root: {
            "models": None,
            "parameters": {"weight": 0.5},
            "slices": [
                {"sources": [{"model": str(root / label), "layer_range": [0, 1]} for label in ("base", *TASKS)]}
            ],
        },
        RecipeError,
        "slices make 1 blocks, but .*base has 2",
    ),
    "another tokenizer": (lambda root: {"tokenizer_source": "union"}, RecipeError, "changes the tokenizer"),
    "an integer dtype": (lambda root: {"dtype": "int64"}, RecipeError, "dtype is 'int64', expected one of float32"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cant_be_merged_is_refused_before_anything_is_written(case: str, tmp_path: Path) -> None:
    save_models("vit", tmp_path)
    change, error, message = REFUSED[case]
    recipe = write_recipe(tmp_path, **change(tmp_path))
    with pytest.raises(error, match=message):
        merge(recipe, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path, featcal: Callable[..., Outcome]) -> None:
    save_models("vit", tmp_path)
    recipe = write_recipe(tmp_path)
    (tmp_path / "empty").mkdir()
    assert featcal("merge", recipe, tmp_path / "empty", "--quiet") == Outcome(0, "", "")
    before = contents(tmp_path)
    outcome = featcal("merge", recipe, tmp_path / "empty")
    assert outcome.code == 1
    assert "isn't an empty folder" in outcome.errors
    assert contents(tmp_path) == before


def test_a_merge_that_ends_early_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_models("vit", tmp_path)
    recipe = write_recipe(tmp_path)
    before = contents(tmp_path)
    write = ShardWriter.write

    def failing(self: ShardWriter, name: str, value: Tensor) -> None:
        if "classifier" in name:
            raise OSError(28, os.strerror(28))
        write(self, name, value)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "write", failing)
        with pytest.raises(CheckpointError, match="No space left on device"):
            merge(recipe, tmp_path / "merged")
    assert contents(tmp_path) == before
    (tmp_path / ".merged.merging").mkdir()  # as after a kill
    (tmp_path / ".merged.merging" / "half").write_bytes(b"a model")
    merge(recipe, tmp_path / "merged")
    assert set(contents(tmp_path)) - set(before) == {
        "merged",
        *(f"merged/{name}" for name in contents(tmp_path / "merged")),
    }


def test_pickled_weights_under_berts_old_names_are_merged_under_those_names(tmp_path: Path) -> None:
    save_models("bert", tmp_path)
    expected = float64_of(tmp_path)

    def old(name: str) -> str:
        return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")

    for label in ("base", "left"):
        tensors = load_file(tmp_path / label / "model.safetensors")
        torch.save({old(name): value for name, value in tensors.items()}, tmp_path / label / "pytorch_model.bin")
        (tmp_path / label / "model.safetensors").unlink()
    merge(write_recipe(tmp_path), tmp_path / "merged")
    merged = tensors_of(tmp_path / "merged")
    assert "bert.encoder.layer.0.output.LayerNorm.gamma" in merged
    for name, value in expected.items():
        torch.testing.assert_close(merged[old(name)].double(), value, rtol=1e-6, atol=1e-6)
    _, info = hf.BertForSequenceClassification.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info.values()), info


def test_a_tied_head_stands_in_for_one_that_an_expert_doesnt_save(tmp_path: Path) -> None:
    save_models("llama", tmp_path)
    right = hf.LlamaForCausalLM.from_pretrained(tmp_path / "right")
    config = hf.LlamaConfig(**right.config.to_dict() | {"tie_word_embeddings": True})
    tied = hf.LlamaForCausalLM(config)
    tied.load_state_dict(right.state_dict() | {"lm_head.weight": right.model.embed_tokens.weight})
    tied.save_pretrained(tmp_path / "right")
    assert "lm_head.weight" not in tensors_of(tmp_path / "right")
    recipe = write_recipe(tmp_path)
    merge(recipe, tmp_path / "merged")
    assert_same(tensors_of(tmp_path / "merged"), by_mergekit_yaml(recipe, tmp_path / "theirs"))


def test_models_can_be_read_from_elsewhere(tmp_path: Path, featcal: Callable[..., Outcome]) -> None:
    save_models("vit", tmp_path)
    recipe = write_recipe(tmp_path)
    merge(recipe, tmp_path / "merged")
    write_recipe(tmp_path, base_model="org/base")
    outcome = featcal("merge", recipe, tmp_path / "mapped", "--map", f"org/base={tmp_path / 'base'}", "--quiet")
    assert outcome == Outcome(0, "", "")
    assert_same(tensors_of(tmp_path / "mapped"), tensors_of(tmp_path / "merged"))


def test_the_function_is_the_packages(tmp_path: Path) -> None:
    assert featcal_hf.merge is merge
