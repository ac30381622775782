"""Every recipe in recipes/ runs from merge to report, on tiny stand-ins for its models and data.

The stand-ins are float32, whatever the recipe merges them to, as some experts on the Hub are.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers as hf
import yaml
from families import CHAT_TEMPLATE, FAMILIES, SPECIAL, Family, base_model, expert_model
from mergekit.common import ModelReference
from peft import LoraConfig, get_peft_model
from PIL import Image
from tiny_merge import Outcome, run_mergekit
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn

from featcal_hf.merge import merge
from featcal_hf.recipe import Recipe, Task, parse_reference, read_recipe

RECIPES = sorted((Path(__file__).parents[2] / "recipes").iterdir())
ROWS = 5
EOS = list(SPECIAL).index("eos_token")
BYTES = [*SPECIAL.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]

ARCHITECTURES = {
    "clip-vit-": "clip-vision",
    "flan-t5-": "flan-t5",
    "llama-3.1-": "llama",
    "llama-3.2-": "llama-tied",
    "mistral-": "mistral",
    "qwen2.5-": "qwen2",
    "qwen3-": "qwen3",
}
"""How a recipe's name begins -> the family of its models."""

IMAGES = """
tanganke/sun397 tanganke/stanford_cars tanganke/resisc45 tanganke/eurosat ufldl-stanford/svhn:cropped_digits
tanganke/gtsrb ylecun/mnist tanganke/dtd dpdl-benchmark/oxford_flowers102 timm/oxford-iiit-pet
tanganke/stl10 tanganke/cifar100 tanganke/cifar10 ethz/food101 zalando-datasets/fashion_mnist tanganke/emnist_letters
tanganke/kmnist nateraw/rendered-sst2
""".split()  # noqa: SIM905
PAIR = {"sentence1": str, "sentence2": str, "label": 2, "idx": int}
COLUMNS: dict[str, dict[str, Any]] = {
    **{key: {"image": Image, "label": 3} for key in IMAGES},
    "1aurent/PatchCamelyon": {"image": Image, "label": 2},
    "clip-benchmark/wds_fer2013": {"jpg": Image, "cls": int},
    "nyu-mll/glue:cola": {"sentence": str, "label": 2, "idx": int},
    "nyu-mll/glue:mnli": {"premise": str, "hypothesis": str, "label": 3, "idx": int},
    "nyu-mll/glue:mrpc": PAIR,
    "nyu-mll/glue:qnli": {"question": str, "sentence": str, "label": 2, "idx": int},
    "nyu-mll/glue:qqp": {"question1": str, "question2": str, "label": 2, "idx": int},
    "nyu-mll/glue:rte": PAIR,
    "nyu-mll/glue:sst2": {"sentence": str, "label": 2, "idx": int},
    "nyu-mll/glue:stsb": {"sentence1": str, "sentence2": str, "label": float, "idx": int},
    "MergeBench/instruction_val": {"instruction": str, "output": str},
    "MergeBench/math_val": {"query": str, "response": str},
    "MergeBench/coding_val": {"instruction": str, "response": str},
    "MergeBench/safety_val": {"prompt": str, "response": str},
    "MergeBench/multilingual_val": {"inputs": str, "targets": str},
    "openai/gsm8k:main": {"question": str, "answer": str},
    "meta-math/MetaMathQA": {"query": str, "response": str},
    "theblackcat102/evol-codealpaca-v1": {"instruction": str, "output": str},
    "HuggingFaceH4/ultrachat_200k": {"prompt": str, "messages": list},
}
"""Dataset, with its configuration -> its columns: what they hold, a number of classes for labels."""

Featcal = Callable[..., Outcome]


def dataset_key(task: Task) -> str:
    """A task's dataset as COLUMNS and `--map` name it."""
    return f"{task.dataset.path}:{task.dataset.name}" if task.dataset.name else task.dataset.path


def evaluated_splits() -> dict[str, set[str]]:
    """Dataset -> the splits that recipes evaluate on."""
    splits: dict[str, set[str]] = {}
    for task in (task for path in RECIPES for task in read_recipe(path).tasks):
        if task.evaluation is not None and task.evaluation.split is not None:
            splits.setdefault(dataset_key(task), set()).add(task.evaluation.split)
    return splits


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Stand-ins for the data sets: images and labels as saved data sets, the rest as jsonl files."""
    root = tmp_path_factory.mktemp("rows")
    datasets.disable_progress_bars()
    more = evaluated_splits()
    return {
        key: write_rows(root / re.sub(r"\W", "-", key), number, key, ["train", *sorted(more.get(key, ()))])
        for number, key in enumerate(COLUMNS)
    }


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Recipe, str], dict[str, Path]]:
    """Makes stand-ins for a recipe's models, each once."""
    root = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}
    bases: dict[str, hf.PreTrainedModel] = {}

    def build(recipe: Recipe, architecture: str) -> dict[str, Path]:
        family = with_bytes(FAMILIES[architecture])
        base = bases.setdefault(architecture, base_model(family))
        references = [reference for reference in (recipe.base, *recipe.experts) if reference is not None]
        for path in (path for reference in references for path in (reference.model, reference.lora) if path):
            if path.path not in made:
                folder = made[path.path] = root / str(len(made))
                if path in {reference.lora for reference in references}:
                    save_adapter(family, base, folder, seed=len(made))
                else:
                    is_base = recipe.base is not None and path == recipe.base.model
                    save_model(family, base if is_base else expert_model(family, base, len(made)), folder, is_base)
        return made

    return build


def write_rows(path: Path, seed: int, key: str, splits: list[str]) -> Path:
    numbers = np.random.default_rng(seed)
    words = random.Random(seed)

    def text() -> str:
        return "".join(words.choices("abcdefghijklmnopqrstuvwxyz ", k=words.randint(8, 24)))

    def value(kind: Any, row: int) -> Any:
        if kind is Image:
            return Image.fromarray(numbers.integers(0, 256, (20, 24, 3), dtype=np.uint8))
        if kind is list:
            return [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]
        return {str: text(), float: 5 * words.random(), int: row}[kind] if isinstance(kind, type) else row % kind

    columns = COLUMNS[key]
    tables = {
        split: [{name: value(kind, row) for name, kind in columns.items()} for row in range(ROWS)] for split in splits
    }
    labels = {name: kind for name, kind in columns.items() if isinstance(kind, int)}
    if len(splits) == 1 and not labels:
        file = path.with_suffix(".jsonl")
        file.write_text("".join(json.dumps(row) + "\n" for row in tables["train"]))
        return file
    saved = {}
    for split, table in tables.items():
        dataset = datasets.Dataset.from_list(table)
        for name, classes in labels.items():
            dataset = dataset.cast_column(name, datasets.ClassLabel(num_classes=classes))
        saved[split] = dataset
    datasets.DatasetDict(saved).save_to_disk(path)
    return path


def with_bytes(family: Family) -> Family:
    """The family with a vocabulary of bytes, so that prompts, numbers and labels are all tokens."""

    def build() -> hf.PreTrainedModel:
        model = family.build()
        if model.get_input_embeddings() is not None and hasattr(model.config, "vocab_size"):
            model.resize_token_embeddings(len(BYTES))
            if model.get_output_embeddings() is not None and not model.config.tie_word_embeddings:
                weight = model.get_output_embeddings().weight
                model.get_output_embeddings().weight = nn.Parameter(weight.detach().clone())
        return model

    return dataclasses.replace(family, build=build)


def save_model(family: Family, model: hf.PreTrainedModel, folder: Path, is_base: bool) -> None:
    if isinstance(model, hf.CLIPVisionModel):
        if is_base:  # OpenAI's repositories hold both towers, with a tokenizer
            text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
            text |= {"vocab_size": len(BYTES), "max_position_embeddings": 128, "eos_token_id": EOS}
            config = hf.CLIPConfig(text_config=text, vision_config=model.config.to_dict())
            whole = hf.CLIPModel(config)
            whole.vision_model.load_state_dict(model.state_dict())
            model = whole
            save_tokenizer(folder, processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", EOS)]))
        assert family.processor is not None
        family.processor().save_pretrained(folder)
    else:
        save_tokenizer(folder)
    model.save_pretrained(folder)


def save_tokenizer(folder: Path, ending: processors.PostProcessor | None = None) -> None:
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(BYTES)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if ending is not None:
        tokenizer.post_processor = ending
    fast = hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def save_adapter(family: Family, base: hf.PreTrainedModel, folder: Path, seed: int) -> None:
    model = family.build()
    model.load_state_dict(base.state_dict())
    names = ["q", "v"] if isinstance(model, hf.T5ForConditionalGeneration) else ["q_proj", "v_proj"]
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=names, init_lora_weights=False))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(folder)


def mapping_of(recipe: Recipe, made: dict[str, Path], rows: dict[str, Path]) -> dict[str, str]:
    references = [reference for reference in (recipe.base, *recipe.experts) if reference is not None]
    paths = [path.path for reference in references for path in (reference.model, reference.lora) if path]
    keys = [dataset_key(task) for task in recipe.tasks]
    missing = sorted({key for key in keys if key not in rows})
    assert not missing, f"{recipe.path.name} needs stand-ins for {missing}: give their columns in COLUMNS"
    return {path: str(made[path]) for path in paths} | {key: str(rows[key]) for key in keys}


def mapped_for_mergekit(recipe: Recipe, mapping: dict[str, str], path: Path) -> Path:
    """The recipe's own part with local paths, since mergekit maps nothing."""

    def replace(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: replace(item) for key, item in value.items() if key != "featcal"}
        if isinstance(value, list):
            return [replace(item) for item in value]
        if not isinstance(value, str) or "/" not in value:
            return value
        reference: ModelReference = parse_reference(value)
        return "+".join(mapping[part.path] for part in (reference.model, reference.lora) if part)

    path.write_text(yaml.safe_dump(replace(yaml.safe_load(recipe.source)), sort_keys=False))
    return path


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_runs_on_stand_ins(
    path: Path,
    rows: dict[str, Path],
    stand_ins: Callable[[Recipe, str], dict[str, Path]],
    tmp_path: Path,
    featcal: Featcal,
) -> None:
    recipe = read_recipe(path)
    architectures = [family for start, family in ARCHITECTURES.items() if path.name.startswith(start)]
    assert architectures, f"{path.name} needs a family of models: name it in ARCHITECTURES"
    mapping = mapping_of(recipe, stand_ins(recipe, architectures[0]), rows)
    (tmp_path / "map.yml").write_text(yaml.safe_dump(mapping))
    if "featcal-hf merge" in recipe.source.partition("featcal-hf check")[0]:
        merge(path, tmp_path / "merged", mapping=mapping)
    else:
        mapped = mapped_for_mergekit(recipe, mapping, tmp_path / "mapped.yml")
        run_mergekit(mapped, tmp_path / "merged", "--lora-merge-cache", str(tmp_path / "loras"))

    checked = featcal("check", path, tmp_path / "merged", "--map", tmp_path / "map.yml")
    assert checked.code == 0, checked
    calibrated = tmp_path / "calibrated"
    options = ("--map", tmp_path / "map.yml", "--quiet")
    outcome = featcal("calibrate", path, tmp_path / "merged", "--output", calibrated, *options)
    assert outcome.code == 0, outcome

    report = json.loads((calibrated / "featcal.json").read_text())
    assert report["recipe"] == path.read_text()
    assert list(report["tasks"]) == [task.name for task in recipe.tasks]
    for task in recipe.tasks:
        record = report["tasks"][task.name]
        assert record["calibration_rows"] + record["holdout_rows"] == ROWS
        assert record["empty_rows"] == 0
        assert record["dataset"]["path"] == task.dataset.path
        assert record["read_from"] in mapping.values()
    assert {f"expert {reference}" for reference in recipe.experts} < set(report["models"])
    blocks = 4 if "t5" in architectures[0] else 2
    assert len(report["blocks"]) == blocks
    for block in report["blocks"]:
        assert block["modules"]
        steps = [module["step"] for module in block["modules"]]
        # What adapters leave alone can be where it should be already, to the last bit.
        assert any(steps) if any(reference.lora for reference in recipe.experts) else all(steps), block

    if any(task.evaluation for task in recipe.tasks):
        options = ("--merged", tmp_path / "merged", "--experts", "--rows", ROWS, *options)
        outcome = featcal("eval", path, calibrated, *options)
        assert outcome.code == 0, outcome
        check_evaluation(recipe, json.loads((calibrated / "featcal_eval.json").read_text()))


def check_evaluation(recipe: Recipe, report: dict[str, Any]) -> None:
    """Every task was measured on the split that it names, by accuracy if it is one of a CLIP's."""
    for task in recipe.tasks:
        assert task.evaluation is not None
        assert report["tasks"][task.name]["dataset"]["split"] == task.evaluation.split
        assert report["tasks"][task.name]["rows"] == ROWS
        metrics = {line["metric"]: line for line in report["results"] if line["task"] == task.name}
        metric = "zero-shot accuracy" if task.image else "exact match" if task.words else "Spearman's ρ"
        assert {"expert", "merged", "calibrated"} < set(metrics[metric])


def test_every_recipe_names_its_commands() -> None:
    for path in RECIPES:
        text = path.read_text()
        for command in ("check    ", "calibrate"):
            assert f"#   featcal-hf {command} recipes/{path.name} ./merged" in text
        assert re.search(rf"#   (mergekit-yaml       |featcal-hf merge    ) recipes/{path.name} \./merged\n", text)
        if "eval:" in text:
            assert f"#   featcal-hf eval      recipes/{path.name} ./calibrated --merged ./merged --experts\n" in text


def test_a_mapped_id_that_the_recipe_lacks_ends_the_command_with_the_closest_one(
    tmp_path: Path, featcal: Featcal
) -> None:
    recipe = next(path for path in RECIPES if path.name == "qwen3-4b-task-arithmetic.yml")
    for command in ("check", "calibrate"):
        outcome = featcal(command, recipe, tmp_path, "--map", f"Qwen/Qwen3-8B={tmp_path}")
        assert outcome.code == 2
        assert "has no model or dataset 'Qwen/Qwen3-8B'; did you mean 'Qwen/Qwen3-4B'?" in outcome.errors
        assert featcal(command, recipe, tmp_path, "--map", f"Qwen/Qwen3-4B={tmp_path}/absent").code == 2
