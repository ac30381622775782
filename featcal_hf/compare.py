"""Open the models of a recipe and compare their tensor tables, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mergekit.common import ModelReference
from transformers import PretrainedConfig, PreTrainedModel

from featcal_hf.checkpoint import open_checkpoint, resolve
from featcal_hf.errors import CheckpointError, RecipeError, listed
from featcal_hf.experts import AdaptedModel, Adapter, open_adapter
from featcal_hf.mapping import locate_model
from featcal_hf.recipe import Recipe
from featcal_hf.streamed import StreamedModel, model_class, read_config


@dataclass(frozen=True)
class Models:
    """The checkpoints of a run, opened and compared; nothing of them is loaded.

    Attributes:
        student: the merged model.
        base: the anchor's base, None without one.
        experts: reference -> model.
    """

    student: StreamedModel
    base: StreamedModel | AdaptedModel | None
    experts: dict[ModelReference, StreamedModel | AdaptedModel]

    def all(self) -> dict[str, StreamedModel]:
        """Every checkpoint by a label for messages; an adapter's is that of its base."""
        models: dict[str, StreamedModel | AdaptedModel] = {"merged model": self.student}
        if self.base is not None:
            models["base model"] = self.base
        models |= {f"expert {reference}": model for reference, model in self.experts.items()}
        return {label: streamed_of(model) for label, model in models.items()}

    def adapters(self) -> dict[str, Adapter]:
        """The adapters by the same labels."""
        labelled = [("base model", self.base), *((f"expert {name}", model) for name, model in self.experts.items())]
        return {label: model.adapter for label, model in labelled if isinstance(model, AdaptedModel)}


def streamed_of(model: StreamedModel | AdaptedModel) -> StreamedModel:
    """The model itself, or the base that an adapter changes."""
    return model.base if isinstance(model, AdaptedModel) else model


def open_models(
    recipe: Recipe,
    folder: Path,
    cache_dir: str | None = None,
    trust_remote_code: bool = False,
    mapping: Mapping[str, str] | None = None,
) -> Models:
    """Open the merged, base and expert checkpoints of a recipe and compare their tensor tables.

    Raises:
        CheckpointError: one can't be opened, is incomplete, or doesn't fit the merged model.
    """
    checkpoint = open_checkpoint(folder)
    config = read_config(folder, trust_remote_code)
    cls = model_class(config, folder)
    student = StreamedModel(checkpoint, cls, config)
    _check_complete(
        student,
        "merged model",
        "mergekit leaves such folders, without an error, for architectures or layouts that it doesn't describe; empty "
        f"it and merge again: `featcal-hf merge {recipe.path} {folder}` merges this architecture.",
    )
    if recipe.depth is not None and len(student.blocks) != recipe.depth:
        raise RecipeError(
            f"{recipe.path}: the recipe's slices make {recipe.depth} blocks, but {folder} has {len(student.blocks)}; "
            "a partial layer_range leaves blocks without a counterpart, merge whole models to calibrate."
        )
    opened: dict[ModelReference, StreamedModel | AdaptedModel] = {}

    def open_other(reference: ModelReference, label: str) -> StreamedModel | AdaptedModel:
        if reference not in opened:
            located = locate_model(reference, mapping or {})
            model = _open_reference(located, student.module, cache_dir, trust_remote_code)
            _check_same_blocks(student, model, label)
            _check_complete(model, label, body_only=True)
            opened[reference] = model
            if located.lora is not None:
                lora = resolve(ModelReference(model=located.lora), cache_dir)
                opened[reference] = AdaptedModel(model, open_adapter(*lora))
        return opened[reference]

    base = open_other(recipe.base, f"base model {recipe.base}") if recipe.base is not None else None
    experts = {reference: open_other(reference, f"expert {reference}") for reference in recipe.experts}
    return Models(student, base, experts)


def _open_reference(
    reference: ModelReference, merged: PreTrainedModel, cache_dir: str | None, trust_remote_code: bool
) -> StreamedModel:
    checkpoint = open_checkpoint(*resolve(reference, cache_dir))
    config = read_config(checkpoint.folder, trust_remote_code)
    model_class(config, checkpoint.folder)
    return StreamedModel(checkpoint, type(merged), config_for(merged, config, checkpoint.folder))


def config_for(merged: PreTrainedModel, config: PretrainedConfig, folder: Path) -> PretrainedConfig:
    """The config as the merged model's class takes it: the whole, or that of one tower (CLIP's images)."""
    wanted = merged.config.model_type
    parts: list[PretrainedConfig | None] = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    for part in parts:
        if part is not None and part.model_type == wanted:
            return part
    raise CheckpointError(
        f"{folder} is a {config.model_type} model, the merged model is a {wanted} ({type(merged).__name__}); name "
        "a model of the same architecture."
    )


def _check_complete(
    model: StreamedModel, label: str, advice: str = "make or download it again.", body_only: bool = False
) -> None:
    missing = model.missing()
    if body_only:
        prefix = f"{model.module.base_model_prefix}."
        has_prefix = any(name.startswith(prefix) for name in model.module.state_dict())
        missing = [name for name in missing if not has_prefix or name.startswith(prefix)]
    if missing:
        raise CheckpointError(
            f"{label} {model.checkpoint.folder} lacks {len(missing)} of {len(model.parameters)} tensors that "
            f"{type(model.module).__name__} needs ({listed(missing)}); {advice}"
        )
    shapes = model.parameters
    for source, target in model.sources.items():
        entry = model.checkpoint.tensors[source]
        if target not in model.converted and entry.shape != shapes[target]:
            raise CheckpointError(
                f"{label} {model.checkpoint.folder}: tensor {source} is {entry.shape} on disk, but its config.json "
                f"makes it {shapes[target]}; config and weights don't belong together."
            )


def _check_same_blocks(student: StreamedModel, other: StreamedModel, label: str) -> None:
    if list(student.blocks) != list(other.blocks):
        raise CheckpointError(
            f"{label} {other.checkpoint.folder} has {len(other.blocks)} blocks, the merged model has "
            f"{len(student.blocks)}; every block needs one counterpart in each model."
        )
    mine, theirs = student.parameters, other.parameters
    for path, real in student.block_names.items():
        names = {name for name in {*mine, *theirs} if name.startswith(f"{real}.")}
        for name in sorted(names):
            if mine.get(name) != theirs.get(name):
                raise CheckpointError(
                    f"{label} {other.checkpoint.folder}: {name} in block {path} is {theirs.get(name, 'absent')}, in "
                    f"the merged model it is {mine.get(name, 'absent')}; the models must have the same width and parts."
                )
