"""Calibration of models that are already in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from featcal_hf.activations import activations
from featcal_hf.calibrate import BlockReport, OnStep, calibrate_blocks
from featcal_hf.errors import CheckpointError, DataError, listed
from featcal_hf.models import ResidentAdapter, ResidentModel, has_adapters, has_merged_adapters
from featcal_hf.ranks import ALONE, Ranks
from featcal_hf.recipe import Settings
from featcal_hf.streams import Batches, CalibrationTask

# Initialisations of LoRA that leave the base as it was; PiSSA, OLoRA, CorDA and LoftQ take a part out of it.
KEEP_THE_BASE = ("gaussian", "eva", "orthogonal", "mica")
TaskBatches = Mapping[str, Sequence[Mapping[str, Tensor]]]


@dataclass(frozen=True)
class CalibrationReport:
    """What a calibration did.

    Attributes:
        settings: the settings in force, every one filled in.
        blocks: one report for each block, in forward order.
    """

    settings: Settings
    blocks: list[BlockReport]

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-able values."""
        return {
            "settings": self.settings.model_dump(by_alias=True),
            "blocks": [block.as_dict() for block in self.blocks],
        }


def calibrate_model(
    merged: PreTrainedModel,
    *,
    experts: Mapping[str, PreTrainedModel | PeftModel],
    batches: TaskBatches,
    base: PreTrainedModel | None = None,
    holdout: TaskBatches | None = None,
    settings: Settings | None = None,
    device: torch.device | str | None = None,
    activation_memory: int | None = None,
    on_step: OnStep | None = None,
    ranks: Ranks = ALONE,
) -> CalibrationReport:
    """Calibrate a merged model in memory, in place, towards its experts (paper eq. 12-17).

    Args:
        merged: the merged model; its weights are replaced block by block.
        experts: task name -> expert, of the same class or the same body under another head; or a `PeftModel`, whose
            active adapters are merged into a copy of one block at a time.
        batches: task name -> batches of whatever the model's forward takes: input_ids, attention_mask, pixel_values,
            labels, ...
        base: the model that the experts were tuned from; None allows rho = 1 only. `peft_model.get_base_model()` is
            taken without its adapters.
        holdout: task name -> batches on which drift is measured; not used in the solve.
        settings: λ, ρ, α and switches; None for the adaptive ridge.
        device: where blocks are computed; None for where the merged model is.
        activation_memory: bytes of the batches' features that may wait in memory between blocks; the rest waits in
            files in a temporary folder. None for half of the memory that is free. The result is the same.
        on_step: called before each step, see `Step`.
        ranks: who shares the work, see `joined_ranks`; all are given the same models and batches, all models change.

    Returns:
        What was calibrated, and the drift before and after where `holdout` is given.

    Raises:
        DataError: tasks without batches or experts, or batches that don't fit.
        CheckpointError: models whose blocks differ, are quantised, or hold adapters that can't be merged or left out.
        SolveError: a module without a finite solution; earlier blocks are calibrated by then.
    """
    resolved = (settings or Settings()).resolved(base is not None)
    held_out = holdout or {}
    unpaired = sorted(set(experts) ^ set(batches)) + sorted(set(held_out) - set(experts))
    if unpaired:
        raise DataError(
            f"tasks {', '.join(unpaired)} are not in both `experts` ({listed(experts)}) and `batches` "
            f"({listed(batches)}); give each task one expert and its batches."
        )
    student = ResidentModel(merged)
    others = {f"expert {name}": _resident_expert(expert, f"expert {name}") for name, expert in experts.items()}
    anchor = None
    if base is not None:
        _check_untouched(base)
        anchor = others["base"] = _resident(base, "base", merge=False)
    if has_adapters(merged):
        raise CheckpointError("the merged model has PEFT's layers in it; give what its merge_and_unload() returns.")
    for name, model in others.items():
        _check_same_blocks(student, model, name)
        if model.module is merged:
            raise CheckpointError(f"{name} is the merged model itself; calibration would change both, give a copy.")
    modules = [merged, *(model.module for model in others.values())]
    training = {part: part.training for module in modules for part in module.modules()}
    for module in modules:
        module.eval()
    tasks = [
        CalibrationTask(
            name,
            others[f"expert {name}"],
            _same_for_both(name, batches[name]),
            _same_for_both(name, held_out.get(name, [])),
        )
        for name in experts
    ]
    try:
        with (
            ranks.together(),
            TemporaryDirectory(prefix="featcal-") as folder,
            activations(activation_memory, Path(folder), ranks.neighbours) as held,
        ):
            blocks = calibrate_blocks(
                student,
                anchor,
                tasks,
                resolved,
                device=torch.device(device) if device is not None else merged.device,
                activations=held,
                write=lambda path, parameters: None,
                on_step=on_step or (lambda step: None),
                ranks=ranks,
            )
    finally:
        for part, was_training in training.items():
            part.training = was_training
    return CalibrationReport(resolved, blocks)


def _resident_expert(model: PreTrainedModel | PeftModel, name: str) -> ResidentModel | ResidentAdapter:
    if not isinstance(model, PeftModel):
        return _resident(model, name, merge=True)
    if model.active_peft_config.is_prompt_learning:
        raise CheckpointError(
            f"{name} has a {model.active_peft_config.peft_type.value} adapter, which adds inputs rather than changing "
            "weights; only adapters that merge into weights (LoRA, DoRA, IA3, ...) can be experts."
        )
    return _resident(cast(PreTrainedModel, model.get_base_model()), name, merge=True)


def _resident(model: PreTrainedModel, name: str, merge: bool) -> ResidentModel | ResidentAdapter:
    if getattr(model.config, "quantization_config", None) is not None:
        raise CheckpointError(f"{name} is quantised; load it in full precision, without a quantization_config.")
    return ResidentAdapter(model, merge) if has_adapters(model) else ResidentModel(model)


def _check_untouched(base: PreTrainedModel) -> None:
    """Refuse a base under adapters whose own weights are no longer what the experts started from."""
    reason = "an adapter is merged into it" if has_merged_adapters(base) else None
    for config in getattr(base, "peft_config", {}).values():
        if getattr(config, "bias", "none") != "none":
            reason = "its biases were trained"
        initial = getattr(config, "init_lora_weights", True)
        if isinstance(initial, str) and initial not in KEEP_THE_BASE:
            reason = f"init_lora_weights={initial!r} moved a part of its weights into the adapter"
    if reason is not None:
        raise CheckpointError(f"base holds adapters and is not the original base: {reason}; load the base separately.")


def _same_for_both(task: str, batches: Iterable[Mapping[str, Tensor]]) -> Batches:
    pairs = []
    for number, batch in enumerate(batches):
        if not isinstance(batch, Mapping):
            raise DataError(
                f"task {task}, batch {number} is a {type(batch).__name__}; expected a mapping of the forward's "
                'inputs, such as {"input_ids": ..., "attention_mask": ...}.'
            )
        pairs.append((batch, batch))
    return pairs


def _check_same_blocks(student: ResidentModel, other: ResidentModel | ResidentAdapter, name: str) -> None:
    mine, theirs = student.block_shapes(), other.block_shapes()
    for path in [*mine, *theirs]:
        if mine.get(path) != theirs.get(path):
            raise CheckpointError(
                f"block {path} is {_shapes(theirs.get(path))} in {name} but {_shapes(mine.get(path))} in the merged "
                "model; depth and width must agree."
            )


def _shapes(shapes: dict[str, tuple[int, ...]] | None) -> str:
    if shapes is None:
        return "absent"
    return ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in list(shapes.items())[:3]) + ", ..."
