"""Calibration of models that are already in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from featcal_hf.calibrate import BlockReport, OnStep, calibrate_blocks
from featcal_hf.errors import CheckpointError, DataError
from featcal_hf.models import ResidentModel
from featcal_hf.recipe import Settings
from featcal_hf.streams import CalibrationTask

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
    experts: Mapping[str, PreTrainedModel],
    batches: TaskBatches,
    base: PreTrainedModel | None = None,
    holdout: TaskBatches | None = None,
    settings: Settings | None = None,
    device: torch.device | str | None = None,
    on_step: OnStep | None = None,
) -> CalibrationReport:
    """Calibrate a merged model in memory, in place, towards its experts (paper eq. 12-17).

    Args:
        merged: the merged model; its weights are replaced block by block.
        experts: task name -> expert, of the same class or the same body under another head.
        batches: task name -> batches of whatever the model's forward takes: input_ids, attention_mask, pixel_values,
            labels, ...
        base: the model that the experts were tuned from; None allows rho = 1 only.
        holdout: task name -> batches on which drift is measured; not used in the solve.
        settings: λ, ρ, α and switches; None for the adaptive ridge.
        device: where blocks are computed; None for where the merged model is.
        on_step: called before each step, see `Step`.

    Returns:
        What was calibrated, and the drift before and after where `holdout` is given.

    Raises:
        DataError: tasks without batches or experts, or batches that don't fit.
        CheckpointError: models whose blocks differ.
        SolveError: a module without a finite solution; earlier blocks are calibrated by then.
    """
    resolved = (settings or Settings()).resolved(base is not None)
    held_out = holdout or {}
    unpaired = sorted(set(experts) ^ set(batches)) + sorted(set(held_out) - set(experts))
    if unpaired:
        raise DataError(
            f"tasks {', '.join(unpaired)} are not in both `experts` ({', '.join(experts)}) and `batches` "
            f"({', '.join(batches)}); give each task one expert and its batches."
        )
    student = ResidentModel(merged)
    others = {f"expert {name}": expert for name, expert in experts.items()}
    if base is not None:
        others["base"] = base
    resident = {id(model): ResidentModel(model) for model in others.values()}
    for name, model in others.items():
        _check_same_blocks(student, resident[id(model)], name)
        if model is merged:
            raise CheckpointError(f"{name} is the merged model itself; calibration would change both, give a copy.")
    models = [merged, *others.values()]
    training = [model.training for model in models]
    for model in models:
        model.eval()
    try:
        blocks = calibrate_blocks(
            student,
            resident[id(base)] if base is not None else None,
            [
                CalibrationTask(
                    name,
                    resident[id(expert)],
                    [(batch, batch) for batch in batches[name]],
                    [(batch, batch) for batch in held_out.get(name, [])],
                )
                for name, expert in experts.items()
            ],
            resolved,
            device=torch.device(device) if device is not None else merged.device,
            write=lambda path, parameters: None,
            on_step=on_step or (lambda step: None),
        )
    finally:
        for model, was_training in zip(models, training, strict=True):
            model.train(was_training)
    return CalibrationReport(resolved, blocks)


def _check_same_blocks(student: ResidentModel, other: ResidentModel, name: str) -> None:
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
