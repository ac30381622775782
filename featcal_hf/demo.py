"""The embedded end-to-end runs behind `featcal-hf demo`: experts, merge with mergekit, calibrate, compare.

Chosen on validation rows, never on the held-out rows they report. The small model: sizes, steps and rates from three
full trainings and eight of the base alone; the weight from 0.3 to 1. Weight 1 was taken because its gap is the
clearest, not because it merges best: of the narrower ones at 0.3 and 0.5 calibration recovers 24 and 35 % on the
held-out rows, of this one 77 %.
SmolLM2: see `demo_smollm2.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import torch
import transformers
import yaml
from rich.console import Console
from rich.progress import Progress
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from featcal_hf import demo_smollm2
from featcal_hf.demo_result import Continuations, DemoResult, DomainLosses, show_result
from featcal_hf.demo_texts import Rows, load_domains, tokenize, train_tokenizer, write_rows
from featcal_hf.demo_training import (
    BaseSettings,
    DemoSettings,
    OnTrainingStep,
    evaluate,
    new_model,
    save,
    train,
    train_expert,
)
from featcal_hf.errors import CheckpointError


@dataclass(frozen=True)
class _Start:
    """What experts are made of: a base, its tokenizer, texts by domain, and prompts for some domains."""

    base: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerBase
    domains: dict[str, Rows]
    prompts: Mapping[str, str]


_Seconds = dict[str, float]


def demo(
    work_dir: Path | None = None,
    *,
    settings: DemoSettings | None = None,
    base: BaseSettings | None = None,
    console: Console | None = None,
) -> DemoResult:
    """Train a small base and three experts on Python's own texts, merge, calibrate, and print what it recovers.

    Args:
        work_dir: an empty or new folder that keeps models, data and recipe; None uses a temporary one.
        settings: of experts, merge and calibration; None for the defaults.
        base: sizes of the base; None for the defaults.
        console: where to print; None for standard output.

    Returns:
        Held-out losses and the time of every step.

    Raises:
        CheckpointError: `work_dir` isn't empty or mergekit can't read its path, or mergekit-yaml failed.
        DataError: this Python comes without the sources of its standard library.
    """
    sizes, chosen, console = base or BaseSettings(), settings or DemoSettings(), console or Console()

    def start(seconds: _Seconds) -> _Start:
        with _timed(seconds, "read texts"):
            domains = load_domains(chosen.seed)
            tokenizer = train_tokenizer([row for rows in domains.values() for row in rows.train], sizes.vocabulary)
            rows = torch.cat([tokenize(tokenizer, rows.train, chosen.length) for rows in domains.values()])
        with _timed(seconds, "train base"), _training_progress(console, "base", sizes.steps) as on_step:
            model = new_model(sizes, chosen, tokenizer)
            train(model, rows, sizes.steps, sizes.rate, chosen, on_step)
        return _Start(model, tokenizer, domains, {})

    return _demo(work_dir, start, chosen, console)


def demo_llm(
    work_dir: Path | None = None, *, settings: DemoSettings | None = None, console: Console | None = None
) -> DemoResult:
    """Fine-tune three experts of SmolLM2-135M, merge, calibrate, and print what it recovers and what they write.

    Args:
        work_dir: an empty or new folder that keeps models, data and recipe; None uses a temporary one.
        settings: of experts, merge and calibration; None for the defaults.
        console: where to print; None for standard output.

    Returns:
        Held-out losses, continuations and the time of every step.

    Raises:
        CheckpointError: as for `demo`; or the packages that carry the model and the reviews aren't installed.
        DataError: this Python comes without the sources of its standard library.
    """
    chosen = settings or demo_smollm2.SETTINGS

    def start(seconds: _Seconds) -> _Start:
        with _timed(seconds, "read model and texts"):
            base, tokenizer = demo_smollm2.load_smollm2()
            domains = demo_smollm2.load_texts(chosen.seed)
        return _Start(base, tokenizer, domains, demo_smollm2.PROMPTS)

    return _demo(work_dir, start, chosen, console or Console())


def _demo(
    work_dir: Path | None, start: Callable[[_Seconds], _Start], settings: DemoSettings, console: Console
) -> DemoResult:
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    seconds: _Seconds = {}
    with _work_folder(work_dir) as folder:
        result = _run(folder, start(seconds), settings, console, seconds)
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


def _run(folder: Path, start: _Start, settings: DemoSettings, console: Console, seconds: _Seconds) -> DemoResult:
    from featcal_hf import calibrate

    tokenizer, domains = start.tokenizer, start.domains
    training = {name: tokenize(tokenizer, rows.train, settings.length) for name, rows in domains.items()}
    heldout = {name: tokenize(tokenizer, rows.heldout, settings.length) for name, rows in domains.items()}
    console.print(
        f"Rows of {settings.length} tokens: "
        + ", ".join(f"{len(rows)} of {name}" for name, rows in training.items())
        + f"; {sum(map(len, heldout.values()))} more held out",
        highlight=False,
        soft_wrap=True,
    )
    write_rows(folder, domains)
    save(start.base, tokenizer, folder / "base", settings.dtype)
    for name, rows in training.items():
        with (
            _timed(seconds, f"train {name} expert"),
            _training_progress(console, f"{name} expert", settings.expert_steps) as on_step,
        ):
            expert = train_expert(start.base, rows, settings, on_step)
            save(expert, tokenizer, folder / name, settings.dtype)

    def measure(model: Path, names: Iterable[str]) -> tuple[dict[str, float], dict[str, str]]:
        with _timed(seconds, "evaluate"):
            loaded = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
            losses = {name: evaluate(loaded, heldout[name], settings.dtype) for name in names}
            prompts = {name: start.prompts[name] for name in names if name in start.prompts}
            return losses, demo_smollm2.continuations(loaded, tokenizer, prompts)

    recipe, merged = folder / "recipe.yml", folder / "merged"
    recipe.write_text(recipe_text(folder, {name: str(folder / name) for name in domains}, settings), encoding="utf-8")
    console.print("Merging with mergekit-yaml", highlight=False, soft_wrap=True)
    with _timed(seconds, "merge"):
        merge(recipe, merged)
    merged_losses, merged_texts = measure(merged, domains)
    console.print("Calibrating the merged model in place", highlight=False, soft_wrap=True)
    with _timed(seconds, "calibrate"):
        report = calibrate(recipe, merged)
    calibrated_losses, calibrated_texts = measure(merged, domains)
    base_losses, _ = measure(folder / "base", domains)
    experts = {name: measure(folder / name, [name]) for name in domains}

    return DemoResult(
        domains=tuple(
            DomainLosses(name, base_losses[name], experts[name][0][name], merged_losses[name], calibrated_losses[name])
            for name in domains
        ),
        continuations=tuple(
            Continuations(prompt, experts[name][1][name], merged_texts[name], calibrated_texts[name])
            for name, prompt in start.prompts.items()
        ),
        merge_weight=settings.merge_weight,
        modules=sum(len(block.modules) for block in report.blocks),
        blocks=len(report.blocks),
        seconds=seconds,
        folder=folder,
    )


def recipe_text(
    folder: Path, experts: Mapping[str, str], settings: DemoSettings, section: Mapping[str, object] | None = None
) -> str:
    """Return the YAML that mergekit merges and FeatCal calibrates by: the ridge is left to adapt itself.

    Args:
        folder: holds `base` and every domain's rows.
        experts: domain -> its model, as mergekit writes it.
        settings: the weight, the dtype and the sizes.
        section: more keys of the `featcal:` section.
    """
    recipe = {
        "merge_method": "task_arithmetic",
        "base_model": str(folder / "base"),
        "models": [{"model": model, "parameters": {"weight": settings.merge_weight}} for model in experts.values()],
        "dtype": settings.dtype,
        "featcal": {
            "samples": settings.calibration_rows,
            "max_length": settings.length,
            **({} if settings.rho is None else {"rho": settings.rho}),
            **(section or {}),
            "tasks": [
                {
                    "model": model,
                    "name": name,
                    "dataset": {"path": str(folder / f"{name}-calibration.jsonl")},
                    "text": "text",
                }
                for name, model in experts.items()
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


@contextmanager
def _timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[step] = seconds.get(step, 0.0) + time.perf_counter() - started


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
