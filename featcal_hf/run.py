"""Calibrate a merged folder from its recipe: read, check, calibrate, write."""

from __future__ import annotations

import errno
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from featcal_hf.activations import activations
from featcal_hf.calibrate import BlockReport, OnStep, calibrate_blocks
from featcal_hf.card import CardReport, check_license, write_card
from featcal_hf.checkpoint import check_finite
from featcal_hf.compare import Models, open_models, streamed_of
from featcal_hf.data import TaskData, load_task
from featcal_hf.errors import CheckpointError, HubError
from featcal_hf.hub import PushReport, check_before_run, push
from featcal_hf.mapping import check_mapping, locate_dataset
from featcal_hf.modules import linear_names, norms_of
from featcal_hf.parents import Parent, describe_parents
from featcal_hf.plan import Plan, make_plan
from featcal_hf.recipe import Recipe, Settings, Task, read_recipe
from featcal_hf.save import (
    UNFINISHED,
    WORK,
    check_output,
    check_space,
    discard_unfinished,
    fingerprint,
    finish_swap,
    is_calibrated,
    open_writer,
    swap_in,
    work_folder,
    write_output,
)
from featcal_hf.streamed import StreamedModel
from featcal_hf.streams import CalibrationTask

ACTIVATIONS = "activations"
OnStage = Callable[[str], None]
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS}


@dataclass(frozen=True)
class Prepared:
    """A run that has been checked and can start."""

    recipe: Recipe
    settings: Settings
    models: Models
    data: list[TaskData]
    output: Path | None = None
    random_seed: int | None = None


@dataclass(frozen=True)
class RunReport:
    """What a run did; `as_dict` is what `featcal.json` holds.

    Attributes:
        recipe: the recipe.
        settings: the settings in force, every one filled in.
        models: label -> folder and commit.
        data: task -> rows used.
        blocks: one report for each block, in forward order.
        seconds: of the whole run.
        parents: what the merge is made of, for its card.
        random_seed: given in place of the tasks' own.
        card: what became of the model card; None without one.
        pushed: where the model was pushed to; None if it wasn't.
    """

    recipe: Recipe
    settings: Settings
    models: dict[str, dict[str, str | None]]
    data: dict[str, dict[str, Any]]
    blocks: list[BlockReport]
    seconds: float
    parents: list[Parent]
    random_seed: int | None
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
            "tasks": self.data,
            "versions": {
                name: version(name) for name in ("featcal_hf", "torch", "transformers", "mergekit", "datasets")
            }
            | {"python": platform.python_version()},
            "threads": torch.get_num_threads(),
            "seconds": round(self.seconds, 2),
            "blocks": [block.as_dict() for block in self.blocks],
        }


def prepare(
    recipe: str | Path,
    model_dir: str | Path,
    output: str | Path | None = None,
    *,
    cache_dir: str | None = None,
    trust_remote_code: bool = False,
    random_seed: int | None = None,
    mapping: Mapping[str, str] | None = None,
    on_stage: OnStage = lambda stage: None,
) -> Prepared:
    """Do everything that can fail before the first forward.

    Raises:
        RecipeError, CheckpointError, DataError: see `calibrate`.
    """
    read = read_recipe(recipe)
    settings = read.settings.resolved(read.base is not None)
    check_mapping(mapping or {}, read)
    folder = Path(model_dir)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; run `mergekit-yaml {recipe} {folder}` first.")
    if output is not None:
        check_output(Path(output), folder)
    on_stage("opening checkpoints")
    models = open_models(read, folder, cache_dir, trust_remote_code, mapping)
    if output is None:
        _refuse_an_input(models)
    if is_calibrated(models.student.checkpoint):
        raise CheckpointError(
            f"{folder} has been calibrated already (featcal.json speaks of these weights); merge again with "
            f"`mergekit-yaml {recipe} {folder}` to start from the merged weights."
        )
    check_space(Path(output) if output is not None else folder, _bytes_to_write(models.student, output is not None))
    on_stage("reading the tasks' examples")
    data = [_load(task, models, random_seed, trust_remote_code, mapping or {}) for task in read.tasks]
    on_stage("looking for NaN in the weights")
    for label, model in models.all().items():
        check_finite(model.checkpoint, label)
    for label, adapter in models.adapters().items():
        check_finite(adapter.checkpoint, label)
    return Prepared(read, settings, models, data, None if output is None else Path(output), random_seed)


def _refuse_an_input(models: Models) -> None:
    place = models.student.checkpoint.folder.resolve()
    for label, model in models.all().items():
        if model is not models.student and model.checkpoint.folder.resolve() == place:
            raise CheckpointError(
                f"{models.student.checkpoint.folder} is the recipe's {label}, which calibrating in place would "
                "overwrite; name the folder that the merge was written to, or an --output."
            )


def plan_of(prepared: Prepared) -> Plan:
    """What a prepared run will do and what it will take."""
    student = prepared.models.student
    batches = [batch for data in prepared.data for batch in (*data.calibration, *data.holdout)]
    return make_plan(
        student,
        prepared.settings,
        {
            task.name: sum(_tokens(student.module, batch.student, counted=True) for batch in data.calibration)
            for task, data in zip(prepared.recipe.tasks, prepared.data, strict=True)
        },
        max(_tokens(student.module, batch.student, counted=False) for batch in batches),
        _bytes_to_write(student, prepared.output is not None),
    )


def calibrate(
    recipe: str | Path,
    model_dir: str | Path,
    output: str | Path | None = None,
    *,
    device: str = "cpu",
    cache_dir: str | None = None,
    trust_remote_code: bool = False,
    random_seed: int | None = None,
    mapping: Mapping[str, str] | None = None,
    write_model_card: bool = True,
    activation_memory: int | None = None,
    push_to_hub: str | None = None,
    on_stage: OnStage = lambda stage: None,
    on_prepared: Callable[[Prepared], None] = lambda prepared: None,
    on_step: OnStep = lambda step: None,
) -> RunReport:
    """Calibrate the merged model in `model_dir` towards its experts, in place or into `output`.

    Args:
        recipe: the mergekit YAML with its `featcal:` section.
        model_dir: what mergekit-yaml made of it.
        output: a new folder for the result; None replaces the weights in `model_dir` once all are complete.
        device: where blocks are computed and systems solved.
        cache_dir: storage for downloaded models, as mergekit's `--transformers-cache`.
        trust_remote_code: let models and tokenizers run code of their repository.
        random_seed: replaces every task's `seed`.
        mapping: ids of models and datasets in the recipe -> local paths to read instead; `id@revision` is one
            revision, `id:name` one configuration of a dataset. The report keeps the ids.
        write_model_card: write the model card as README.md once the weights are there; see `write_card`.
        activation_memory: bytes of the rows' features that may wait in memory between blocks; the rest waits in
            files beside the unfinished weights. None for half of the memory that is free. The result is the same.
        push_to_hub: push the result to this repository on the Hub at the end; see `push`.
        on_stage: called with the name of each stage of preparation.
        on_prepared: called once everything has been checked.
        on_step: called before each step, see `Step`.

    Returns:
        What was done; also written to `featcal.json` beside the weights.

    Raises:
        RecipeError: the recipe can't be read, or asks for what can't be done.
        CheckpointError: a model is missing, incomplete, damaged or doesn't fit; the disk is full.
        DataError: a task's examples can't be read or turned into inputs.
        SolveError: a module has no finite solution. In all these cases the merged model is as it was.
        CardError: the model is calibrated, but its card can't be written; or its licence is open, and it was to be
            pushed.
        HubError: what stops a push was found before the run; or the model is calibrated, but wasn't pushed.
    """
    started = time.perf_counter()
    if push_to_hub is not None:
        _check_push(push_to_hub, write_model_card)
    if Path(model_dir).is_dir():
        finish_swap(Path(model_dir))
    prepared = prepare(
        recipe,
        model_dir,
        output,
        cache_dir=cache_dir,
        trust_remote_code=trust_remote_code,
        random_seed=random_seed,
        mapping=mapping,
        on_stage=on_stage,
    )
    if push_to_hub is not None:
        check_license(prepared.recipe.card, describe_parents(prepared.recipe, prepared.models))
    on_prepared(prepared)
    report = calibrate_prepared(
        prepared,
        Path(output) if output is not None else None,
        torch.device(device),
        on_step,
        started,
        activation_memory,
    )
    target = output if output is not None else model_dir
    if write_model_card:
        report = replace(report, card=write_card(target, repo_id=push_to_hub))
    if push_to_hub is not None:
        report = replace(report, pushed=push(target, push_to_hub, on_stage=on_stage))
    return report


def _check_push(repo_id: str, write_model_card: bool) -> None:
    """Find what would stop a push before the run, as far as it can be known."""
    if not write_model_card:
        raise HubError("a model is pushed with its card; leave --no-write-model-card out.")
    check_before_run(repo_id)


def calibrate_prepared(
    prepared: Prepared,
    output: Path | None,
    device: torch.device,
    on_step: OnStep,
    started: float,
    activation_memory: int | None = None,
) -> RunReport:
    """Run the calibration of a prepared run and write its result."""
    student = prepared.models.student
    target = output if output is not None else student.checkpoint.folder
    marks: dict[str, str] = {}
    try:
        if output is not None:
            discard_unfinished(student.checkpoint, output)
        with (
            work_folder(target / (WORK if output is None else UNFINISHED)) as work,
            activations(activation_memory, work / ACTIVATIONS) as held,
        ):
            writer = open_writer(student.checkpoint, _names_to_write(student), work)

            def write(path: str, parameters: dict[str, Tensor]) -> None:
                named = {_source(student, path, name): value for name, value in parameters.items()}
                writer.write(named)
                marks.update(fingerprint(named))

            blocks = calibrate_blocks(
                student,
                prepared.models.base,
                [
                    CalibrationTask(
                        task.name,
                        prepared.models.experts[task.model],
                        [(batch.student, batch.expert) for batch in data.calibration],
                        [(batch.student, batch.expert) for batch in data.holdout],
                    )
                    for task, data in zip(prepared.recipe.tasks, prepared.data, strict=True)
                ],
                prepared.settings,
                device=device,
                activations=held,
                write=write,
                on_step=on_step,
            )
            report = _report(prepared, blocks, time.perf_counter() - started)
            new = writer.complete()
            contents = report.as_dict() | {"fingerprint": marks}
            if output is None:
                swap_in(student.checkpoint, new, work, contents)
            else:
                write_output(student.checkpoint, new, work, output, contents)
    except OSError as error:
        if error.errno not in DISK_FULL | NOT_ALLOWED:
            raise
        problem = "the disk is full" if error.errno in DISK_FULL else "writing is not allowed"
        raise CheckpointError(
            f"{target} can't be written ({error}): {problem}; {student.checkpoint.folder} holds one whole model. Mend "
            "that and run the same command again."
        ) from error
    return report


def _load(
    task: Task, models: Models, random_seed: int | None, trust_remote_code: bool, mapping: Mapping[str, str]
) -> TaskData:
    chosen = task if random_seed is None else task.model_copy(update={"seed": random_seed})
    others = [streamed_of(models.base).checkpoint.folder] if models.base is not None else []
    return load_task(
        chosen,
        dataset=locate_dataset(task.dataset, mapping),
        student_path=str(models.student.checkpoint.folder),
        expert_path=str(streamed_of(models.experts[task.model]).checkpoint.folder),
        processor_paths=[str(folder) for folder in others],
        encoder_decoder=bool(models.student.module.config.is_encoder_decoder),
        max_positions=max_positions(models.student.module),
        trust_remote_code=trust_remote_code,
    )


def max_positions(model: PreTrainedModel) -> int | None:
    """Tokens that a model has positions for; None where it says nothing of them."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is None:
        return None
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.endswith("position_embeddings"):
            return int(positions) - (module.padding_idx + 1 if module.padding_idx is not None else 0)
    return int(positions)


def _tokens(model: PreTrainedModel, inputs: Mapping[str, Tensor], counted: bool) -> int:
    """Tokens of a batch: those that count, or with the padding that is run through the model as well."""
    if counted:
        text = int(inputs["attention_mask"].sum()) if "attention_mask" in inputs else 0
        text += int(inputs["labels"].ne(-100).sum()) if "labels" in inputs else 0
    else:
        text = sum(inputs[name].numel() for name in ("input_ids", "labels") if name in inputs)
    if "pixel_values" not in inputs:
        return text
    patch = getattr(getattr(model.config, "vision_config", model.config), "patch_size", 16)
    rows, columns = (patch, patch) if isinstance(patch, int) else patch
    images, _, height, width = inputs["pixel_values"].shape
    return text + images * (height // rows) * (width // columns)


def _names_to_write(student: StreamedModel) -> list[str]:
    names = []
    for path, block in student.blocks.items():
        for module in [*linear_names(block), *(norm.name for norm in norms_of(block))]:
            for part in ("weight", "bias"):
                if getattr(block.get_submodule(module), part, None) is not None:
                    source = student.source_of(path, f"{module}.{part}")
                    names += [source] if source is not None else []
    return names


def _bytes_to_write(student: StreamedModel, whole: bool) -> int:
    """Bytes of the new shards, or of the whole checkpoint; pickles are put together from a file for each block."""
    checkpoint, names = student.checkpoint, _names_to_write(student)
    shards = checkpoint.shards if whole else {checkpoint.tensors[name].shard for name in names}
    parts = sum(checkpoint.tensors[name].bytes for name in names) if checkpoint.pickled else 0
    return sum((checkpoint.folder / shard).stat().st_size for shard in shards) + parts


def _source(student: StreamedModel, path: str, name: str) -> str:
    source = student.source_of(path, name)
    if source is None:
        raise CheckpointError(f"{path}.{name} has no tensor of its own in {student.checkpoint.folder}.")
    return source


def _report(prepared: Prepared, blocks: list[BlockReport], seconds: float) -> RunReport:
    adapters = prepared.models.adapters()
    return RunReport(
        prepared.recipe,
        prepared.settings,
        {
            label: {"folder": str(model.checkpoint.folder), "revision": model.checkpoint.revision}
            | (
                {
                    "adapter": str(adapters[label].checkpoint.folder),
                    "adapter_revision": adapters[label].checkpoint.revision,
                }
                if label in adapters
                else {}
            )
            for label, model in prepared.models.all().items()
        },
        {
            task.name: {"expert": str(task.model), **data.record}
            for task, data in zip(prepared.recipe.tasks, prepared.data, strict=True)
        },
        blocks,
        seconds,
        describe_parents(prepared.recipe, prepared.models),
        prepared.random_seed,
    )
