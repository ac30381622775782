"""What λ, ρ, α and the number of rows do: the demonstration's models, calibrated with one setting changed at a time.

    featcal-hf demo --work-dir ./demo
    python benchmarks/settings.py ./demo --output docs/figures/settings.json

Each line of the result is one configuration, calibrated in memory on rows chosen with each of `--seeds`: the share of
the gap between merged model and experts that it closes on held-out rows (of the loss, mean over the three tasks), the
loss itself, and the largest step of a module.
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
    """What is tried: settings, merge weight and rows per task. Without a rho, weight 1 takes the 1 that suits it."""
    for samples in (4, 64):
        for scale, rho in (("frobenius", 1.0), ("trace", 1.0), ("trace", 2.0)):
            for power in range(-4, 2):
                settings = {"lambda": 10.0**power, "scale": scale, "rho": rho}
                yield {"axis": "lambda", "samples": samples, "settings": settings}
        yield {"axis": "lambda", "samples": samples, "settings": {"rho": 1.0}}
    for samples, weight in ((4, 1.0), (64, 1.0), (64, 0.5)):
        for rho in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0):
            yield {"axis": "rho", "samples": samples, "weight": weight, "settings": {"rho": rho}}
    for samples, weight in ((4, 1.0), (64, 1.0), (64, 0.5)):
        for alpha in (0.0, 0.15, 0.3, 0.5, 0.7, 1.0):
            settings = {"alpha": alpha, **({"rho": 1.0} if weight == 1.0 else {})}
            yield {"axis": "alpha", "samples": samples, "weight": weight, "settings": settings}
    for samples in (1, 4, 16, 64):
        yield {"axis": "samples", "samples": samples, "settings": {"rho": 1.0}}


def main() -> None:
    """Measure every configuration and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path, help="the folder of `featcal-hf demo --work-dir`")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
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
        samples = configuration["samples"]
        merged = task_arithmetic(base, list(experts.values()), weight)
        before = {task: evaluate(merged, heldout[task]) for task in TASKS}
        measured: dict[str, list[float]] = {"recovered": [], "loss": [], "largest_step": []}
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
            gaps = [(before[task] - after[task]) / (before[task] - best[task]) for task in TASKS]
            steps = [module.step for block in report.blocks for module in block.modules]
            measured["recovered"].append(round(sum(gaps) / len(TASKS), 4))
            measured["loss"].append(round(sum(after.values()) / len(TASKS), 4))
            measured["largest_step"].append(round(max(steps), 4))
        lines.append(configuration | {"merged_loss": round(sum(before.values()) / len(TASKS), 4)} | measured)
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
