"""Model shapes whose calibration is measured: small enough for a test, large enough to be told from noise."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers as hf
import yaml
from PIL import Image
from tiny_merge import word_tokenizer
from transformers import PreTrainedModel

WORDS = [f"w{number}" for number in range(1000)]
TOKENS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 0}


@dataclass(frozen=True)
class Shape:
    """A model to build, and what its rows are: short and long ones, in tokens, or in pixels a side for images."""

    build: Callable[[], PreTrainedModel]
    reads: dict[str, str]
    lengths: tuple[int, int]
    dtype: torch.dtype = torch.float32


def _llama(**changes: int) -> Callable[[], PreTrainedModel]:
    config = {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "vocab_size": 1002,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }
    return lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**{**config, **TOKENS, **changes}))


SHAPES = {
    "llama": Shape(_llama(), {"text": "text"}, (64, 256)),
    "llama-large-vocabulary": Shape(_llama(vocab_size=128_256), {"text": "text"}, (64, 256), torch.bfloat16),
    "llama-gqa": Shape(
        _llama(hidden_size=1536, intermediate_size=4096, num_key_value_heads=2),
        {"text": "text"},
        (64, 256),
        torch.bfloat16,
    ),
    "t5": Shape(
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=1002,
                d_model=768,
                d_kv=64,
                d_ff=2048,
                num_layers=2,
                num_heads=12,
                feed_forward_proj="gated-gelu",
                pad_token_id=1,
                eos_token_id=0,
                decoder_start_token_id=1,
            )
        ),
        {"prompt": "{text}", "completion": "{answer}"},
        (64, 192),
    ),
    "clip-vision": Shape(
        lambda: hf.CLIPVisionModel(
            hf.CLIPVisionConfig(
                hidden_size=768,
                intermediate_size=3072,
                num_hidden_layers=2,
                num_attention_heads=12,
                image_size=224,
                patch_size=32,
            )
        ),
        {"image": "image"},
        (224, 224),
    ),
    "bert": Shape(
        lambda: hf.BertForSequenceClassification(
            hf.BertConfig(
                hidden_size=768,
                intermediate_size=3072,
                num_hidden_layers=2,
                num_attention_heads=12,
                vocab_size=30522,
                max_position_embeddings=512,
            )
        ),
        {"text": "text"},
        (64, 256),
    ),
}


def build(folder: Path, name: str, experts: int, length: int, rows: int) -> tuple[Path, Path]:
    """Write base, experts, merged model, rows and recipe; returns the recipe and the merged folder."""
    shape = SHAPES[name]
    torch.manual_seed(0)
    base = shape.build().to(shape.dtype).eval()
    labels = [f"e{number}" for number in range(experts)]
    for label in ("base", "merged", *labels):
        model = base
        if label != "base":
            model = copy.deepcopy(base)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + 0.02 * torch.randn(parameter.shape[-1:]).to(parameter))
        model.save_pretrained(folder / label)
        word_tokenizer(["<unk>", "<pad>", *WORDS]).save_pretrained(folder / label)
        if "image" in shape.reads:
            hf.CLIPImageProcessor().save_pretrained(folder / label)
    for seed, label in enumerate(labels):
        _write_rows(folder, label, seed, length, rows, "image" in shape.reads)
    recipe = {
        "merge_method": "task_arithmetic",
        "base_model": str(folder / "base"),
        "models": [{"model": str(folder / label), "parameters": {"weight": 0.3}} for label in labels],
        "featcal": {
            "samples": rows - rows // 5,
            "holdout": rows // 5,
            "max_length": max(shape.lengths),
            "tasks": [
                {"model": str(folder / label), "dataset": str(folder / f"{label}.jsonl"), **shape.reads}
                for label in labels
            ],
        },
    }
    (folder / "recipe.yml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    return folder / "recipe.yml", folder / "merged"


def _write_rows(folder: Path, label: str, seed: int, length: int, rows: int, images: bool) -> None:
    words, pixels = random.Random(seed), np.random.default_rng(seed)
    lines = []
    for number in range(rows):
        line = {
            "text": " ".join(words.choices(WORDS, k=length - words.randrange(length // 4))),
            "answer": " ".join(words.choices(WORDS, k=length // 4)),
            "image": f"{label}-{number}.png",
        }
        if images:
            values = pixels.integers(0, 255, (length, length, 3), dtype=np.uint8)
            Image.fromarray(values).save(folder / line["image"])
        lines.append(json.dumps(line) + "\n")
    (folder / f"{label}.jsonl").write_text("".join(lines))
