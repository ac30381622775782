"""What dinov2.py and minilm.py share: splits, heads, experts, merge, calibration, accuracies, tables.

For each seed: rows are split, a linear head is fitted for each task on a few of the base's features and then frozen,
one expert a task is fine-tuned towards its head, and the experts are merged with `featcal-hf merge` at the weight that
is best on validation rows. The merged body is calibrated on training rows (their labels are not read) and every task is
classified with its own head. Test rows are for the reported accuracies, validation rows for choices.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from encoder_tables import tables
from torch import Tensor, nn
from transformers import AutoModel

import featcal_hf

SETTINGS = {
    "adaptive": {},
    "paper": {"lambda": 0.05, "rho": 2.0, "alpha": 0.3},
    "alpha-0": {"alpha": 0.0},
}
"""Name -> keys of the featcal section: the defaults, the paper's for CLIP, and student features alone as the target."""

RIDGES = (0.1, 1.0, 3.0, 10.0)
ALPHAS = (0.0, 0.15, 0.5, 0.8)
BLENDS = [{"alpha": alpha, "rho": rho} for rho in (1.0, 2.0) for alpha in ALPHAS]
GRID = [{"lambda": ridge, "scale": "trace"} for ridge in RIDGES] + BLENDS + [{"rho": rho} for rho in (1.0, 1.5, 2.5)]
"""Keys of the featcal section that `--grid` tries on validation rows, beside the defaults and the paper's."""

CHUNK = 128
"""Rows that are evaluated at once."""

Inputs = Sequence[Any]
Encode = Callable[[nn.Module, Inputs], Tensor]


@dataclass(frozen=True)
class Rows:
    """Labelled rows of one task."""

    inputs: Inputs
    labels: Sequence[int]

    def take(self, indices: Sequence[int]) -> Rows:
        return Rows([self.inputs[index] for index in indices], [self.labels[index] for index in indices])


@dataclass(frozen=True)
class Benchmark:
    """One body with its tasks.

    Attributes:
        name: of the results file.
        tasks: all rows of each task, without duplicates.
        save_base: writes the base model with its processor or tokenizer.
        encode: base folder -> function from a model and inputs to features (rows, width).
        save_rows: writes inputs where a recipe can read them and returns the path.
        task_keys: how a recipe's task reads them, `image` or `text`.
        section: further keys of the featcal section.
        per_class: rows of each class that a head is fitted on.
        steps, rate, batch: of fine-tuning.
        test, validation: rows of a task, at most.
        weights: of task arithmetic, to choose from.
    """

    name: str
    tasks: dict[str, Rows]
    save_base: Callable[[Path], None]
    encode: Callable[[Path], Encode]
    save_rows: Callable[[Inputs, Path], Path]
    task_keys: dict[str, Any]
    section: dict[str, Any]
    per_class: int
    steps: int
    rate: float
    batch: int
    test: int
    validation: int
    weights: Sequence[float]


def options(description: str) -> argparse.ArgumentParser:
    """The flags that both scripts have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, required=True, help="models, rows and results; what is there is kept")
    parser.add_argument("--data", type=Path, default=Path(), help="the folder with node_modules")
    parser.add_argument("--debian", type=Path, default=Path("/"), help="where the Debian packages are unpacked")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--samples", type=int, nargs="*", default=[8, 64, 256], help="calibration rows per task")
    parser.add_argument("--settings", nargs="*", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--grid", action="store_true", help="measure other lambda, rho and alpha, on validation rows")
    return parser


def run(benchmark: Benchmark, arguments: argparse.Namespace) -> None:
    """Fill the cells that were asked for and aren't there, and print the tables of all that are there."""
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    work = arguments.work_dir.resolve()
    work.mkdir(parents=True, exist_ok=True)
    cells = Cells(work / f"{benchmark.name}.json")
    worlds = [World(benchmark, work, seed, cells) for seed in arguments.seeds]
    for world in worlds if arguments.settings and arguments.samples else ():
        world.measure_references()
    for setting, world, samples in product(arguments.settings, worlds, arguments.samples):
        world.measure(samples, setting, SETTINGS[setting], "test")
    for samples, settings, world in product(arguments.samples, [{}, SETTINGS["paper"], *GRID], worlds):
        if arguments.grid:
            world.measure(samples, f"try {json.dumps(settings)}", settings, "validation")
    print(tables(cells.values, list(benchmark.tasks)))


class Cells:
    """Results by name, each written to a JSON file as soon as it is there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, Any] = json.loads(path.read_text())["cells"] if path.is_file() else {}

    def get(self, name: str, compute: Callable[[], Any]) -> Any:
        """The cell's value, computed if it isn't there."""
        if name not in self.values:
            self.values[name] = compute()
            packages = ("torch", "transformers", "datasets", "mergekit")
            contents = {"versions": {package: version(package) for package in packages}, "cells": self.values}
            unfinished = self.path.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(contents, indent=1))
            unfinished.replace(self.path)
            print(f"{name}: {json.dumps(self.values[name])}", flush=True)
        return self.values[name]


class World:
    """One seed: its splits, heads, experts and merged model, each made when it is needed."""

    def __init__(self, benchmark: Benchmark, work: Path, seed: int, cells: Cells) -> None:
        self.benchmark, self.seed, self.cells = benchmark, seed, cells
        self.base = work / "base"
        self.folder = work / f"seed-{seed}"
        self.folder.mkdir(exist_ok=True)
        if not (self.base / "config.json").is_file():
            benchmark.save_base(self.base)
        self.encode = benchmark.encode(self.base)

    @cached_property
    def splits(self) -> dict[str, dict[str, Rows]]:
        """Task -> train, validation and test rows; a small task tests on three tenths, and chooses on half as many."""
        splits = {}
        for name, rows in self.benchmark.tasks.items():
            order = list(range(len(rows.labels)))
            random.Random(self.seed).shuffle(order)
            test = min(self.benchmark.test, len(order) * 3 // 10)
            validation = min(self.benchmark.validation, len(order) * 3 // 20)
            splits[name] = {
                "test": rows.take(order[:test]),
                "validation": rows.take(order[test : test + validation]),
                "train": rows.take(order[test + validation :]),
            }
        return splits

    @cached_property
    def heads(self) -> dict[str, nn.Linear]:
        """Task -> its head."""
        base = AutoModel.from_pretrained(self.base).eval()
        heads = {}
        for name, split in self.splits.items():
            rows = few_of_each_class(split["train"], self.benchmark.per_class)
            with torch.no_grad():
                features = self.encode(base, rows.inputs)
            heads[name] = fit_head(features, torch.tensor(rows.labels))
        return heads

    @cached_property
    def experts(self) -> dict[str, Path]:
        """Task -> the folder of its expert, fine-tuned if it isn't there."""
        folders = {}
        for name, split in self.splits.items():
            folder = folders[name] = self.folder / f"expert-{name}"
            if not (folder / "model.safetensors").is_file():
                # Over so few tokens plain attention is the faster one, above all backward.
                model = AutoModel.from_pretrained(self.base, attn_implementation="eager")
                fine_tune(model, self.heads[name], split["train"], self.encode, self.benchmark, self.seed)
                model.save_pretrained(folder)
        return folders

    @cached_property
    def weight(self) -> float:
        """Task arithmetic's weight with the best mean accuracy on validation rows."""
        scores = {
            weight: self.cells.get(
                f"seed {self.seed}/merged at {weight}/validation",
                lambda weight=weight: self.accuracies(self.merged(weight), "validation"),
            )
            for weight in self.benchmark.weights
        }
        return max(scores, key=lambda weight: statistics.mean(scores[weight].values()))

    def merged(self, weight: float) -> Path:
        """The experts merged at a weight."""
        folder = self.folder / f"merged-{weight}"
        if not folder.is_dir():
            featcal_hf.merge(self.recipe(weight, 1, {}), folder)
        return folder

    def recipe(self, weight: float, samples: int, settings: dict[str, Any]) -> Path:
        """Write the recipe (YAML's JSON subset) and the rows that it reads."""
        tasks = []
        for name, split in self.splits.items():
            rows = self.benchmark.save_rows(split["train"].inputs, self.folder / f"rows-{name}")
            keys = {"model": str(self.experts[name]), "name": name, "dataset": str(rows), **self.benchmark.task_keys}
            tasks.append(keys)
        section = {"samples": samples, "holdout": 0, "batch_size": 32, "seed": self.seed}
        contents = {
            "merge_method": "task_arithmetic",
            "base_model": str(self.base),
            "models": [{"model": str(path), "parameters": {"weight": weight}} for path in self.experts.values()],
            "dtype": "float32",
            "featcal": {**section, **self.benchmark.section, **settings, "tasks": tasks},
        }
        path = self.folder / "recipe.yml"
        path.write_text(json.dumps(contents, indent=1))
        return path

    def measure_references(self) -> None:
        """Base, experts and merged model on test rows, and the merge weight."""
        get, seed = self.cells.get, self.seed
        get(f"seed {seed}/base/test", lambda: self.accuracies(self.base, "test"))
        get(f"seed {seed}/expert/test", self._expert_accuracies)
        get(f"seed {seed}/weight", lambda: self.weight)
        get(f"seed {seed}/merged/test", lambda: self.accuracies(self.merged(self.weight), "test"))

    def _expert_accuracies(self) -> dict[str, float]:
        return {name: self.accuracies(path, "test", [name])[name] for name, path in self.experts.items()}

    def measure(self, samples: int, setting: str, settings: dict[str, Any], split: str) -> None:
        """Calibrate with these settings and measure all tasks on a split."""

        def compute() -> dict[str, float]:
            output = self.folder / "calibrated"
            shutil.rmtree(output, ignore_errors=True)
            merged = self.merged(self.weight)
            featcal_hf.calibrate(self.recipe(self.weight, samples, settings), merged, output)
            return self.accuracies(output, split)

        self.cells.get(f"seed {self.seed}/{setting}/{samples}/{split}", compute)

    @torch.no_grad()
    def accuracies(self, folder: Path, split: str, names: Sequence[str] = ()) -> dict[str, float]:
        """Accuracy of each task (or of some) with a body and the tasks' own heads, computed in bfloat16."""
        model = AutoModel.from_pretrained(folder).eval()
        accuracies = {}
        for name in names or self.splits:
            rows = self.splits[name][split]
            right = 0
            for start in range(0, len(rows.labels), CHUNK):
                with torch.autocast("cpu", torch.bfloat16):
                    features = self.encode(model, rows.inputs[start : start + CHUNK])
                answers = self.heads[name](features.float()).argmax(1)
                right += int((answers == torch.tensor(rows.labels[start : start + CHUNK])).sum())
            accuracies[name] = round(right / len(rows.labels), 4)
        return accuracies


def few_of_each_class(rows: Rows, count: int) -> Rows:
    """The first rows of each class."""
    indices = [
        index
        for label in sorted(set(rows.labels))
        for index in [position for position, other in enumerate(rows.labels) if other == label][:count]
    ]
    return rows.take(indices)


def fit_head(features: Tensor, labels: Tensor) -> nn.Linear:
    """Logistic regression on standardised features, folded into one frozen linear layer."""
    mean, deviation = features.mean(0), features.std(0) + 1e-6
    head = nn.Linear(features.shape[1], int(labels.max()) + 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=200)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(head((features - mean) / deviation), labels)
        loss = loss + 0.1 * head.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        head.weight /= deviation
        head.bias -= head.weight @ mean
    return head.requires_grad_(False)


def fine_tune(model: nn.Module, head: nn.Linear, rows: Rows, encode: Encode, benchmark: Benchmark, seed: int) -> None:
    """A few AdamW steps of the blocks towards the frozen head, forward and backward in bfloat16."""
    torch.manual_seed(seed)
    order = random.Random(seed)
    model.train().requires_grad_(False)
    model.encoder.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.encoder.parameters(), lr=benchmark.rate, fused=True)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    for _ in range(benchmark.steps):
        batch = rows.take(order.sample(range(len(rows.labels)), benchmark.batch))
        with torch.autocast("cpu", torch.bfloat16):
            features = encode(model, batch.inputs)
        loss = nn.functional.cross_entropy(head(features.float()), torch.tensor(batch.labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warmup.step()
