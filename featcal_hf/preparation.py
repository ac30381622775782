"""Everything of a run that can fail before the first forward: read, open, compare, look at what an earlier run left."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from featcal_hf.checkpoint import check_finite
from featcal_hf.compare import Models, open_models, streamed_of
from featcal_hf.data import TaskData, load_task
from featcal_hf.data.batches import Batch
from featcal_hf.errors import CheckpointError, RanksError
from featcal_hf.far_anchor import far_anchor
from featcal_hf.forecast import batch_tokens, forecast_memory
from featcal_hf.mapping import check_mapping, locate_dataset
from featcal_hf.merged_recipe import other_recipe
from featcal_hf.plan import Plan, make_plan
from featcal_hf.ranks import ALONE, Ranks
from featcal_hf.recipe import Recipe, Settings, Task, read_recipe
from featcal_hf.record import binding_conditions, describe_conditions, describe_work
from featcal_hf.resume import Unfinished, bytes_to_write, differences, find_unfinished
from featcal_hf.save import UNFINISHED, WORK, check_output, check_space, is_calibrated

OnStage = Callable[[str], None]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A run that has been checked and can start.

    Attributes:
        recipe: the recipe.
        settings: the settings in force, every one filled in.
        models: the merged model, the base and the experts.
        data: each task's inputs.
        output: a folder for the result, None for in place.
        random_seed: given in place of the tasks' own.
        unfinished: what an earlier run left where this one will work.
        warnings: what in the recipe may not be meant so.
    """

    recipe: Recipe
    settings: Settings
    models: Models
    data: list[TaskData]
    output: Path | None = None
    random_seed: int | None = None
    unfinished: Unfinished | None = None
    warnings: tuple[str, ...] = ()

    @property
    def work(self) -> dict[str, Any]:
        """What the result depends on."""
        return describe_work(self.recipe, self.settings, self.models, self.data)


def prepare(
    recipe: str | Path,
    model_dir: str | Path,
    output: str | Path | None = None,
    *,
    device: str = "cpu",
    cache_dir: str | None = None,
    trust_remote_code: bool = False,
    random_seed: int | None = None,
    mapping: Mapping[str, str] | None = None,
    restart: bool = False,
    on_stage: OnStage = lambda stage: None,
    ranks: Ranks = ALONE,
) -> Prepared:
    """Do everything that can fail before the first forward; the arguments are those of `calibrate`.

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
    warnings = (*read.warnings, *far_anchor(read), *other_recipe(read, folder))
    for warning in warnings:
        _log.warning(warning)
    if output is None:
        _refuse_an_input(models)
    if is_calibrated(models.student.checkpoint):
        raise CheckpointError(
            f"{folder} has been calibrated already (featcal.json speaks of these weights); merge again with "
            f"`mergekit-yaml {recipe} {folder}` to start from the merged weights."
        )
    target, work = (folder, folder / WORK) if output is None else (Path(output), Path(output) / UNFINISHED)
    if ranks.is_first:
        check_space(target, bytes_to_write(models.student, output is not None) - _size(work))
    on_stage("reading the tasks' examples")
    data = [_load(task, models, random_seed, trust_remote_code, mapping or {}) for task in read.tasks]
    prepared = Prepared(
        read, settings, models, data, None if output is None else Path(output), random_seed, warnings=warnings
    )
    _check_same(prepared, ranks)
    if not ranks.is_first:
        return prepared
    on_stage("looking for NaN in the weights")
    for label, model in models.all().items():
        check_finite(model.checkpoint, label)
    for label, adapter in models.adapters().items():
        check_finite(adapter.checkpoint, label)
    if restart:
        return prepared
    conditions = binding_conditions(describe_conditions(torch.device(device), ranks.size))
    return replace(prepared, unfinished=find_unfinished(models.student, work, lambda: prepared.work, conditions))


def _check_same(prepared: Prepared, ranks: Ranks) -> None:
    """Refuse ranks that would each calibrate something else: other files, other rows, other versions."""
    if ranks.size == 1:
        return
    work = describe_work(prepared.recipe, prepared.settings, prepared.models, prepared.data, on_one_disk=False)
    first, *others = ranks.exchange(work | describe_conditions(torch.device("cpu"))["versions"])
    for number, other in enumerate(others, 1):
        if found := differences(first, other):
            raise RanksError(
                f"rank {number} would calibrate something else than rank 0: {'; '.join(found[:3])}. Give all ranks "
                "the same recipe, models, data and versions."
            )


def _refuse_an_input(models: Models) -> None:
    place = models.student.checkpoint.folder.resolve()
    for label, model in models.all().items():
        if model is not models.student and model.checkpoint.folder.resolve() == place:
            raise CheckpointError(
                f"{models.student.checkpoint.folder} is the recipe's {label}, which calibrating in place would "
                "overwrite; name the folder that the merge was written to, or an --output."
            )


def plan_of(prepared: Prepared, activation_memory: int | None = None) -> Plan:
    """What a prepared run will do and what it will take; see `calibrate` for `activation_memory`."""
    student = prepared.models.student

    def tokens_of(batches: list[Batch]) -> int:
        return sum(batch_tokens(student.module, batch.student, counted=True) for batch in batches)

    tokens = {
        task.name: tokens_of(data.calibration) for task, data in zip(prepared.recipe.tasks, prepared.data, strict=True)
    }
    return make_plan(
        student,
        prepared.settings,
        tokens,
        sum(tokens_of(data.holdout) for data in prepared.data),
        forecast_memory(student, prepared.data, sum(tokens.values()), activation_memory),
        bytes_to_write(student, prepared.output is not None),
    )


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


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) if folder.is_dir() else 0
