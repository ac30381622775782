"""A tiny merge on disk: its models, data and recipe, and what tests want to know of a folder."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from click.testing import CliRunner
from mergekit.scripts.run_yaml import main as mergekit_yaml
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = "the cat sat on a mat and dog ran to see sun moon star sky blue red green".split()  # noqa: SIM905
VOCABULARY = ["<unk>", "<pad>", *WORDS]
ROWS, SAMPLES, HOLDOUT = 20, 12, 4


@dataclass(frozen=True)
class Merge:
    """A folder with a base, the experts a and b, their data, a recipe, and what mergekit-yaml made of it."""

    root: Path

    @property
    def base(self) -> Path:
        return self.root / "base"

    @property
    def expert(self) -> Path:
        return self.root / "a"

    @property
    def data(self) -> Path:
        return self.root / "a.jsonl"

    @property
    def merged(self) -> Path:
        return self.root / "merged"

    @property
    def recipe(self) -> Path:
        return self.root / "recipe.yml"

    def edit_recipe(self, old: str, new: str) -> None:
        text = self.recipe.read_text()
        assert old in text
        self.recipe.write_text(text.replace(old, new, 1))


@dataclass(frozen=True)
class Outcome:
    """How a command ended: its exit code and everything it printed, on one line."""

    code: int
    output: str
    errors: str


def run_mergekit(recipe: Path, output: Path, *options: str) -> None:
    result = CliRunner().invoke(mergekit_yaml, [str(recipe), str(output), "--quiet", *options])
    assert result.exit_code == 0, (result.output, result.exception)


def write_recipe(root: Path, dtype: str, experts: tuple[str, ...] = ("a", "b")) -> None:
    listed = "".join(f"  - {{model: {root / name}, parameters: {{weight: 0.5}}}}\n" for name in experts)
    tasks = "".join(f"    - {{model: {root / name}, dataset: {root / name}.jsonl, text: text}}\n" for name in experts)
    (root / "recipe.yml").write_text(
        f"merge_method: task_arithmetic\nbase_model: {root / 'base'}\nmodels:\n{listed}dtype: {dtype}\n"
        f"featcal:\n  samples: {SAMPLES}\n  holdout: {HOLDOUT}\n  tasks:\n{tasks}"
    )


def word_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>")


def build_llama(**changes: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 24,
    }
    return LlamaForCausalLM(LlamaConfig(**{**shape, **changes}))


def build_models(root: Path, dtype: torch.dtype, spread: float) -> None:
    """Save a base and two experts whose blocks lie around it, `spread` of its weights' deviation away."""
    base = build_llama().to(dtype)
    for name in ("base", "a", "b"):
        model = copy.deepcopy(base)
        if name != "base":
            with torch.no_grad():
                for parameter_name, parameter in model.named_parameters():
                    if "layers" in parameter_name and spread:
                        parameter += spread * parameter.std().clamp_min(0.02) * torch.randn_like(parameter)
        model.save_pretrained(root / name)
        word_tokenizer(VOCABULARY).save_pretrained(root / name)
    for name in ("a", "b"):
        rows = random.Random(name)
        texts = [" ".join(rows.choices(WORDS, k=rows.randint(4, 16))) for _ in range(ROWS)]
        (root / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def copy_merge(source: Merge, root: Path) -> Merge:
    shutil.copytree(source.root, root, dirs_exist_ok=True)
    copied = Merge(root)
    copied.recipe.write_text(source.recipe.read_text().replace(str(source.root), str(root)))
    return copied


def contents(folder: Path) -> dict[str, str]:
    """Digest of every file below a folder, by its path; folders are there under their own names."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


def all_but_work(folder: Path) -> dict[str, str]:
    """`contents` without what a stopped run keeps to go on from."""
    return {
        name: digest
        for name, digest in contents(folder).items()
        if not any(part.startswith(".featcal") for part in Path(name).parts)
    }


def change_tensors(path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Rewrite a safetensors file with its tensors changed."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def loaded_state(folder: Path) -> dict[str, Tensor]:
    """The model's state as `from_pretrained` loads it; fails if anything is missing."""
    model, info = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"], info
    return dict(model.state_dict())


def equal_states(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        value.dtype == other[name].dtype and torch.equal(value, other[name]) for name, value in one.items()
    )
