"""What λ, ρ, α and the number of rows do: the demonstration's models, calibrated with one setting changed at a time.

    featcal-hf demo --work-dir ./demo
    python benchmarks/settings.py ./demo --output docs/figures/settings.json

Each line of the result is one calibration in memory: the share of the gap between merged model and experts that it
closes on held-out rows (mean over the three tasks of the loss), and how far the merged weights moved. Rows are chosen
with each of `--seeds`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from featcal_hf import Settings, calibrate_model
from featcal_hf.demo_texts import tokenize
from featcal_hf.demo_training import evaluate

TASKS = ("python", "english", "unicode")
LENGTH, BATCH = 128, 8


def configurations() -> Iterator[dict[str, Any]]:
    """What is tried: settings, merge weight and rows per task; the default is 64 rows and no settings."""
    for samples in (4, 64):
        for scale in ("frobenius", "trace"):
            for power in range(-5, 3):
                yield {"axis": "lambda", "samples": samples, "settings": {"lambda": 10.0**power, "scale": scale}}
        yield {"axis": "lambda", "samples": samples, "settings": {}}
    for weight in (0.3, 1.0):
        for rho in (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0):
            yield {"axis": "rho", "weight": weight, "settings": {"rho": rho}}
    for weight in (0.3, 1.0):
        for alpha in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
            yield {"axis": "alpha", "weight": weight, "settings": {"alpha": alpha}}
    for samples in (1, 2, 4, 8, 16, 32, 64, 128):
        yield {"axis": "samples", "samples": samples, "settings": {}}


def main() -> None:
    """Measure every configuration and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path, help="the folder of `featcal-hf demo --work-dir`")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    base = LlamaForCausalLM.from_pretrained(arguments.demo / "base")
    experts = {task: LlamaForCausalLM.from_pretrained(arguments.demo / task) for task in TASKS}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments.demo / "base")
    rows = {task: read(arguments.demo / f"{task}-calibration.jsonl", tokenizer) for task in TASKS}
    heldout = {task: read(arguments.demo / f"{task}-heldout.jsonl", tokenizer) for task in TASKS}
    best = {task: evaluate(experts[task], heldout[task]) for task in TASKS}
    lines = []
    for configuration in configurations():
        weight = configuration.setdefault("weight", 1.0)
        samples = configuration.setdefault("samples", 64)
        merged = task_arithmetic(base, list(experts.values()), weight)
        before = {task: evaluate(merged, heldout[task]) for task in TASKS}
        for seed in arguments.seeds:
            chosen = {task: random.Random(seed).sample(range(len(rows[task])), samples) for task in TASKS}
            model = deepcopy(merged)
            report = calibrate_model(
                model,
                base=base,
                experts=experts,
                batches={task: batches(rows[task][chosen[task]]) for task in TASKS},
                settings=Settings.model_validate(configuration["settings"]),
            )
            after = {task: evaluate(model, heldout[task]) for task in TASKS}
            lines.append(
                configuration
                | {
                    "seed": seed,
                    "recovered": sum((before[task] - after[task]) / (before[task] - best[task]) for task in TASKS) / 3,
                    "loss": sum(after.values()) / 3,
                    "merged_loss": sum(before.values()) / 3,
                    "expert_loss": sum(best.values()) / 3,
                    "largest_step": max(module.step for block in report.blocks for module in block.modules),
                }
            )
            print(json.dumps(lines[-1]), flush=True)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def read(path: Path, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """The rows of a file that fill the length, as the demonstration takes them."""
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    return tokenize(tokenizer, texts, LENGTH)


def batches(rows: Tensor) -> list[dict[str, Tensor]]:
    """Rows as batches of the model's inputs."""
    return [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in rows.split(BATCH)]


def task_arithmetic(base: LlamaForCausalLM, experts: list[LlamaForCausalLM], weight: float) -> LlamaForCausalLM:
    """The base and `weight` times each expert's difference from it."""
    merged, start = deepcopy(base), base.state_dict()
    states = [expert.state_dict() for expert in experts]
    change = {name: weight * sum(state[name] - value for state in states) for name, value in start.items()}
    merged.load_state_dict({name: value + change[name] for name, value in start.items()})
    return merged


if __name__ == "__main__":
    main()
