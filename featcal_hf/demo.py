"""The embedded end-to-end run behind `featcal-hf demo`: train, merge with mergekit, calibrate, compare.

Chosen on validation rows, never on the held-out rows it reports: sizes, steps and rates from three full trainings and
eight of the base alone; the weight from 0.3 to 1. Weight 1 was taken because its gap is the clearest, not because it
merges best (mean validation loss of base 3.436, experts 3.271; merged and calibrated: weight 0.3 3.389 and 3.365, 19 %
of the gap; 0.5 3.402 and 3.368, 27 %; 0.7 3.475 and 3.374, 50 %; 1 3.730 and 3.392, 74 %).
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import torch
import transformers
import yaml
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from transformers import LlamaForCausalLM

from featcal_hf.demo_texts import load_domains, tokenize, train_tokenizer, write_rows
from featcal_hf.demo_training import DemoSettings, OnTrainingStep, evaluate, new_model, save, train, train_expert
from featcal_hf.errors import CheckpointError


@dataclass(frozen=True)
class DomainLosses:
    """Mean loss per token (nats) on one domain's held-out rows, of four models.

    Attributes:
        domain: its name.
        base: of the base.
        expert: of the domain's own expert.
        merged: of the merged model as mergekit wrote it.
        calibrated: of the same folder after calibration.
    """

    domain: str
    base: float
    expert: float
    merged: float
    calibrated: float

    @property
    def recovered(self) -> float:
        """Share of the gap between merged model and expert that calibration closed; nan where there is no gap."""
        gap = self.merged - self.expert
        return (self.merged - self.calibrated) / gap if gap > 0 else math.nan


@dataclass(frozen=True)
class DemoResult:
    """What the demonstration found.

    Attributes:
        domains: held-out losses, domain by domain.
        merge_weight: task arithmetic's weight of every expert.
        modules: linear modules and norms that calibration changed.
        blocks: blocks they are in.
        seconds: wall time of each step, in order.
        folder: where everything was written; None if it was temporary.
    """

    domains: tuple[DomainLosses, ...]
    merge_weight: float
    modules: int
    blocks: int
    seconds: Mapping[str, float]
    folder: Path | None

    @property
    def recovered(self) -> float:
        """Share of the gap recovered, mean over domains; nan where one has no gap."""
        return sum(losses.recovered for losses in self.domains) / len(self.domains)


def demo(
    work_dir: Path | None = None, *, settings: DemoSettings | None = None, console: Console | None = None
) -> DemoResult:
    """Train a small base and three experts on Python's own texts, merge, calibrate, and print what it recovers.

    Args:
        work_dir: an empty or new folder that keeps models, data and recipe; None uses a temporary one.
        settings: sizes; None for the defaults.
        console: where to print; None for standard output.

    Returns:
        Held-out losses and the time of every step.

    Raises:
        CheckpointError: `work_dir` isn't empty or mergekit can't read its path, or mergekit-yaml failed.
        DataError: this Python comes without the sources of its standard library.
    """
    console = console or Console()
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    with _work_folder(work_dir) as folder:
        result = _run(folder, settings or DemoSettings(), console)
    show_result(console, result)
    if work_dir is None:
        return replace(result, folder=None)
    console.print(f"Models, rows and recipe.yml are in {result.folder}", highlight=False, soft_wrap=True)
    return result


@contextmanager
def _work_folder(work_dir: Path | None) -> Iterator[Path]:
    if work_dir is None:
        with tempfile.TemporaryDirectory(prefix="featcal-demo-") as folder:
            yield Path(folder).resolve()
        return
    if set("@+") & set(str(work_dir.resolve())):
        raise CheckpointError(
            f"{work_dir.resolve()}: the path holds @ or +, which mergekit reads as a revision or an adapter; "
            "name a folder without them for the demo."
        )
    work_dir.mkdir(parents=True, exist_ok=True)
    if any(work_dir.iterdir()):
        raise CheckpointError(f"{work_dir}: the folder isn't empty; name a new or an empty one for the demo.")
    yield work_dir.resolve()


def _run(folder: Path, settings: DemoSettings, console: Console) -> DemoResult:
    from featcal_hf import calibrate

    seconds: dict[str, float] = {}

    with _timed(seconds, "read texts"):
        domains = load_domains(settings.seed)
        tokenizer = train_tokenizer([row for rows in domains.values() for row in rows.train], settings.vocabulary)
        training = {name: tokenize(tokenizer, rows.train, settings.length) for name, rows in domains.items()}
        heldout = {name: tokenize(tokenizer, rows.heldout, settings.length) for name, rows in domains.items()}
        write_rows(folder, domains)
    console.print(
        "Texts from Python's standard library: "
        + ", ".join(f"{len(rows)} rows of {name}" for name, rows in training.items())
        + f"; {sum(map(len, heldout.values()))} more held out",
        highlight=False,
        soft_wrap=True,
    )

    with _timed(seconds, "train base"), _training_progress(console, "base", settings.base_steps) as on_step:
        base = new_model(settings, tokenizer)
        train(base, torch.cat(list(training.values())), settings.base_steps, settings.base_rate, settings, on_step)
        save(base, tokenizer, folder / "base")
    experts: dict[str, LlamaForCausalLM] = {}
    for name, rows in training.items():
        with (
            _timed(seconds, f"train {name} expert"),
            _training_progress(console, f"{name} expert", settings.expert_steps) as on_step,
        ):
            experts[name] = train_expert(base, rows, settings, on_step)
            save(experts[name], tokenizer, folder / name)

    recipe, merged = folder / "recipe.yml", folder / "merged"
    recipe.write_text(recipe_text(folder, list(domains), settings), encoding="utf-8")
    console.print("Merging with mergekit-yaml", highlight=False, soft_wrap=True)
    with _timed(seconds, "merge"):
        merge(recipe, merged)
    merged_losses = _losses_of_folder(merged, heldout)
    console.print("Calibrating the merged model in place", highlight=False, soft_wrap=True)
    with _timed(seconds, "calibrate"):
        report = calibrate(recipe, merged)
    calibrated_losses = _losses_of_folder(merged, heldout)

    losses = tuple(
        DomainLosses(
            domain=name,
            base=evaluate(base, heldout[name]),
            expert=evaluate(experts[name], heldout[name]),
            merged=merged_losses[name],
            calibrated=calibrated_losses[name],
        )
        for name in domains
    )
    modules = sum(len(block.modules) for block in report.blocks)
    return DemoResult(losses, settings.merge_weight, modules, len(report.blocks), seconds, folder)


def _losses_of_folder(folder: Path, rows: Mapping[str, Tensor]) -> dict[str, float]:
    model = LlamaForCausalLM.from_pretrained(folder)
    return {name: evaluate(model, rows[name]) for name in rows}


def recipe_text(folder: Path, domains: Sequence[str], settings: DemoSettings) -> str:
    """Return the YAML that mergekit merges and FeatCal calibrates by: the ridge is left to adapt itself."""
    weight = {"weight": settings.merge_weight}
    recipe = {
        "merge_method": "task_arithmetic",
        "base_model": str(folder / "base"),
        "models": [{"model": str(folder / name), "parameters": weight.copy()} for name in domains],
        "dtype": "float32",
        "featcal": {
            "samples": settings.calibration_rows,
            "max_length": settings.length,
            "tasks": [
                {
                    "model": str(folder / name),
                    "dataset": {"path": str(folder / f"{name}-calibration.jsonl")},
                    "text": "text",
                }
                for name in domains
            ],
        },
    }
    return yaml.safe_dump(recipe, sort_keys=False)


def merge(recipe: Path, merged: Path) -> None:
    """Run the real `mergekit-yaml`, without the network.

    Raises:
        CheckpointError: it failed; the message ends with what it wrote.
    """
    command = [sys.executable, "-m", "mergekit.scripts.run_yaml", str(recipe), str(merged), "--quiet"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise CheckpointError(
            f"{recipe}: mergekit-yaml ended with exit code {done.returncode}, expected 0; it wrote:\n{done.stderr}"
        )


def show_result(console: Console, result: DemoResult) -> None:
    """Print the held-out losses, what calibration recovered of the gap, and the time of every step."""
    table = Table(
        "domain",
        title=f"Held-out loss (perplexity); task arithmetic, weight {result.merge_weight:g} for each expert",
        title_justify="left",
    )
    for column in ("base", "expert", "merged", "calibrated", "gap recovered"):
        table.add_column(column, justify="right")
    for losses in result.domains:
        models_losses = (losses.base, losses.expert, losses.merged, losses.calibrated)
        cells = [f"{loss:.3f} ({math.exp(loss):.1f})" for loss in models_losses]
        table.add_row(losses.domain, *cells, _share(losses.recovered))
    table.add_section()
    table.add_row("mean", *[""] * 4, _share(result.recovered))
    console.print(table)
    if sum(losses.merged - losses.base for losses in result.domains) > 0:
        console.print(
            "At this weight the merge is worse than its base: a lower one merges better, and leaves less to recover.",
            highlight=False,
            soft_wrap=True,
        )
    console.print(
        f"Calibrated {result.modules} modules in {result.blocks} blocks; embeddings, last norm and head are as merged.",
        highlight=False,
        soft_wrap=True,
    )
    steps = ", ".join(f"{step} {seconds:.0f} s" for step, seconds in result.seconds.items())
    console.print(f"{steps}; {sum(result.seconds.values()):.0f} s in all", highlight=False, soft_wrap=True)


def _share(recovered: float) -> str:
    return "no gap" if math.isnan(recovered) else f"{recovered:.0%}"


@contextmanager
def _timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[step] = time.perf_counter() - started


@contextmanager
def _training_progress(console: Console, what: str, steps: int) -> Iterator[OnTrainingStep]:
    """Yield a callback that shows a bar on a terminal, and a line for each tenth of the steps elsewhere."""
    with Progress(console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(f"Training the {what}", total=steps)

        def show(step: int, loss: float) -> None:
            progress.update(bar, completed=step, description=f"Training the {what}, loss {loss:.2f}")
            if not console.is_terminal and step % max(1, steps // 10) == 0:
                console.print(
                    f"Training the {what}: step {step} of {steps}, loss {loss:.2f}", highlight=False, soft_wrap=True
                )

        yield show
