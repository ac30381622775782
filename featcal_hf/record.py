"""What a run was made of and what it did: the contents of `featcal.json`, and what makes a run the same again."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from featcal_hf.calibrate import BlockReport
from featcal_hf.card import CardReport
from featcal_hf.checkpoint import Checkpoint
from featcal_hf.compare import Models
from featcal_hf.data import Batch, TaskData
from featcal_hf.hub import PushReport
from featcal_hf.origin import requirement
from featcal_hf.parents import Parent
from featcal_hf.products import multiplies_bfloat16
from featcal_hf.recipe import Recipe, Settings
from featcal_hf.writers import raw_bytes

PACKAGES = ("featcal_hf", "torch", "transformers", "peft", "mergekit", "datasets")
COMPUTING = PACKAGES[:4]
"""The packages whose versions the new weights depend on, once the inputs are given."""


@dataclass(frozen=True)
class RunReport:
    """What a run did; `as_dict` is what `featcal.json` holds.

    Attributes:
        recipe: the recipe.
        settings: the settings in force, every one filled in.
        models: label -> folder and commit.
        data: task -> rows used.
        conditions: what it was computed with: versions, device, threads, kind of CPU.
        blocks: one report for each block, in forward order.
        seconds: of the whole run.
        parents: what the merge is made of, for its card.
        random_seed: given in place of the tasks' own.
        warnings: what in the recipe may not be meant so.
        card: what became of the model card; None without one.
        pushed: where the model was pushed to; None if it wasn't.
    """

    recipe: Recipe
    settings: Settings
    models: dict[str, dict[str, str | None]]
    data: dict[str, dict[str, Any]]
    conditions: dict[str, Any]
    blocks: list[BlockReport]
    seconds: float
    parents: list[Parent]
    random_seed: int | None
    warnings: tuple[str, ...] = ()
    card: CardReport | None = None
    pushed: PushReport | None = None

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-able values."""
        return {
            "settings": self.settings.model_dump(by_alias=True),
            "merge_method": self.recipe.merge.merge_method,
            "recipe": self.recipe.source,
            "models": self.models,
            "parents": [parent.as_dict() for parent in self.parents],
            "card": self.recipe.card.model_dump(),
            "random_seed": self.random_seed,
            "warnings": list(self.warnings),
            "tasks": self.data,
            **self.conditions,
            "seconds": round(self.seconds, 2),
            "blocks": [block.as_dict() for block in self.blocks],
        }


def describe_conditions(device: torch.device, processes: int = 1) -> dict[str, Any]:
    """What the bytes of a result depend on beside the recipe, the data and the models.

    Args:
        device: where it is computed.
        processes: how many share the batches.
    """
    on_gpu = device.type == "cuda"
    return {
        "versions": {name: version(name) for name in PACKAGES} | {"python": platform.python_version()},
        "installed_from": requirement(),
        "device": f"{device} ({torch.cuda.get_device_name(device)})" if on_gpu else str(device),
        "processes": processes,
        "threads": torch.get_num_threads(),
        "cpu": f"{platform.machine()} {_cpu_model()}".rstrip(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "bfloat16_units": multiplies_bfloat16(device),
    }


def binding_conditions(conditions: dict[str, Any]) -> dict[str, Any]:
    """The conditions that have to be the same for two runs to give the same bytes, by words for a message."""
    versions = {f"{name}'s version": conditions["versions"][name] for name in COMPUTING}
    names = {
        "device": "the device",
        "processes": "the number of processes",
        "threads": "the number of threads",
        "cpu_capability": "the CPU's capability",
        "bfloat16_units": "that bfloat16 is multiplied in hardware",
    }
    return versions | {words: conditions[name] for name, words in names.items()}


def describe_models(models: Models) -> dict[str, dict[str, str | None]]:
    """Folder and commit of each model, and of its adapter."""
    adapters = models.adapters()
    described: dict[str, dict[str, str | None]] = {}
    for label, model in models.all().items():
        checkpoint = model.checkpoint
        described[label] = {"folder": str(checkpoint.folder), "revision": checkpoint.revision}
        if label in adapters:
            adapter = adapters[label].checkpoint
            described[label] |= {"adapter": str(adapter.folder), "adapter_revision": adapter.revision}
    return described


def describe_data(recipe: Recipe, data: list[TaskData]) -> dict[str, dict[str, Any]]:
    """The rows used by each task, and how they were put together."""
    return {
        task.name: {
            "expert": str(task.model),
            **task_data.record,
            "batch_size": task.batch_size,
            "inputs_sha256": _digest_of([*task_data.calibration, *task_data.holdout]),
        }
        for task, task_data in zip(recipe.tasks, data, strict=True)
    }


def describe_work(
    recipe: Recipe, settings: Settings, models: Models, data: list[TaskData], on_one_disk: bool = True
) -> dict[str, Any]:
    """What makes a run the same again, by words for a message: settings, inputs, models.

    A weight file is known by its size, its time of change and, for safetensors, its table of tensors: all its bytes are
    read once by a run, and not once more to tell whether they are the same. The time counts `on_one_disk`: copies on
    others have one each.
    """
    work: dict[str, Any] = {
        f"featcal.{key}": value for key, value in settings.model_dump(mode="json", by_alias=True).items()
    }
    work["the tasks"] = [[task.name, str(task.model)] for task in recipe.tasks]
    for task, task_data in zip(recipe.tasks, data, strict=True):
        work[f"the inputs of task {task.name} (rows, tokens or batches)"] = [
            _digest_of(task_data.calibration),
            _digest_of(task_data.holdout),
        ]
    for label, model in models.all().items():
        work |= _files_of(label, model.checkpoint, "config.json", on_one_disk)
    for label, adapter in models.adapters().items():
        work |= _files_of(f"adapter of {label}", adapter.checkpoint, "adapter_config.json", on_one_disk)
    return work


def _files_of(label: str, checkpoint: Checkpoint, config: str, on_one_disk: bool) -> dict[str, Any]:
    files: dict[str, Any] = {f"{label}'s {config}": _digest(checkpoint.folder / config)}
    for shard in checkpoint.shards:
        stat = (checkpoint.folder / shard).stat()
        table = [[name, str(one.dtype), one.shape] for name, one in checkpoint.tensors.items() if one.shard == shard]
        mark = hashlib.sha256(repr(table).encode()).hexdigest()
        files[f"{label}'s {shard}"] = [stat.st_size, stat.st_mtime_ns if on_one_disk else None, mark]
    return files


def _digest_of(batches: Iterable[Batch]) -> str:
    """SHA-256 over all that the models are given, padding and batches included."""
    digest = hashlib.sha256()
    for batch in batches:
        sides = [batch.student] if batch.expert is batch.student else [batch.student, batch.expert]
        for inputs in sides:
            for name, value in sorted(inputs.items()):
                digest.update(repr((name, str(value.dtype), tuple(value.shape))).encode())
                digest.update(raw_bytes(value))
    return digest.hexdigest()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _cpu_model() -> str:
    """The CPU's name where the system tells it: matrix products may differ from one model to the next."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
