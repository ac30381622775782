"""What a calibrated folder says of itself: `featcal.json` and `featcal_eval.json`, read and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AllowInfNan, BaseModel, ConfigDict, Field, ValidationError

from featcal_hf.errors import CheckpointError
from featcal_hf.save import REPORT


class _Record(BaseModel):
    """Ignores what it doesn't know, so that newer files can be read."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class DriftRecord(_Record):
    """Drift of one task at one block; see `drift.Drift`. Files of version 0.1.0 lack what may be None."""

    drift: float
    relative: float
    mismatch: float
    propagation: float
    relative_mismatch: float | None = None
    relative_propagation: float | None = None
    cosine: float
    cosine_spread: float | None = None


class DriftChange(_Record):
    """Drift of the merged model and of the calibrated one."""

    before: DriftRecord
    after: DriftRecord


class ModuleRecord(_Record):
    """One calibrated module: its path in the block, ‖new - merged‖ / ‖merged‖, its ridge, its weighted tokens."""

    name: str
    step: Annotated[float, AllowInfNan(True)]  # infinite where a merged weight was zero
    lambda_: float
    tokens: float


class InputRecord(_Record):
    """What modules were solved over; see `systems.InputUpdate`."""

    modules: list[str]
    width: int
    tokens: float
    condition: float
    dominance: float


class CostRecord(_Record):
    """What a stage took; see `stages.StageCost`."""

    seconds: float
    resident_bytes: int | None


class FeatureRecord(_Record):
    """Final features along two axes; see `outcome.FeatureView`."""

    explained: list[float]
    expert: list[tuple[float, float]]
    merged: list[tuple[float, float]]
    calibrated: list[tuple[float, float]]


class OutputRecord(_Record):
    """Distance of outputs from the expert's; see `outcome.OutputDistance`."""

    logit_l2: float | None
    kl: float | None
    agreement: float | None


class OutputChangeRecord(_Record):
    """Output drift of the merged and of the calibrated model."""

    before: OutputRecord
    after: OutputRecord
    predictions: int


class OutcomeRecord(_Record):
    """What one task's held-out rows show at the end; see `outcome.TaskOutcome`."""

    cosines_before: list[float]
    cosines_after: list[float]
    features: FeatureRecord | None
    output: OutputChangeRecord | None
    no_output: str | None


class BlockRecord(_Record):
    """One block; `drift` is empty where no rows were held out."""

    path: str
    seconds: float
    modules: list[ModuleRecord]
    kept: dict[str, str]
    drift: dict[str, DriftChange]
    inputs: list[InputRecord] = []
    costs: dict[str, CostRecord] = {}
    peak_bytes: int | None = None
    outcome: dict[str, OutcomeRecord] = {}


class TaskRecord(_Record):
    """The rows of one task."""

    expert: str
    calibration_rows: int
    holdout_rows: int
    tokens: int
    warnings: list[str] = []


class SettingsRecord(_Record):
    """The settings in force."""

    lambda_: float | None = Field(alias="lambda")
    rho: float
    alpha: float
    scale: str


class RunRecord(_Record):
    """What `featcal.json` says of a calibration."""

    settings: SettingsRecord
    merge_method: str
    recipe: str
    tasks: dict[str, TaskRecord] = Field(min_length=1)
    versions: dict[str, str]
    seconds: float
    blocks: list[BlockRecord] = Field(min_length=1)
    warnings: list[str] = []

    @property
    def measured(self) -> list[str]:
        """The tasks whose drift was measured."""
        return list(self.blocks[-1].drift)

    @property
    def last(self) -> BlockRecord:
        """The last block that forwards pass."""
        return self.blocks[-1]

    @property
    def costs(self) -> dict[str, CostRecord]:
        """What each stage took in all blocks together, what is left of the run's seconds last, as 'other'."""
        totals: dict[str, CostRecord] = {}
        for block in self.blocks:
            for stage, cost in block.costs.items():
                before = totals.get(stage, CostRecord(seconds=0, resident_bytes=None))
                held = [size for size in (before.resident_bytes, cost.resident_bytes) if size is not None]
                totals[stage] = CostRecord(
                    seconds=before.seconds + cost.seconds, resident_bytes=max(held) if held else None
                )
        if totals:
            rest = self.seconds - sum(cost.seconds for cost in totals.values())
            totals["other"] = CostRecord(seconds=max(rest, 0.0), resident_bytes=None)
        return totals

    @property
    def peak_bytes(self) -> int | None:
        """The most memory that the process held; None where nobody knows."""
        return max((block.peak_bytes for block in self.blocks if block.peak_bytes is not None), default=None)


class EvalLine(_Record):
    """One metric of one task; a model that wasn't measured has no value."""

    task: str
    metric: str
    higher_is_better: bool
    expert: float | None = None
    merged: float | None = None
    calibrated: float | None = None
    recovered: float | None = None


class EvalRecord(_Record):
    """What `featcal_eval.json` says of an evaluation."""

    results: list[EvalLine]
    lm_eval: list[EvalLine] = []


_Kind = TypeVar("_Kind", bound=_Record)


def run_record(contents: Mapping[str, Any], where: str) -> RunRecord:
    """The contents of a `featcal.json`; `where` names them in an error.

    Raises:
        CheckpointError: they are something else.
    """
    return _checked(RunRecord, contents, where)


def read_run(model_dir: Path) -> RunRecord:
    """Read the `featcal.json` of a calibrated folder.

    Raises:
        CheckpointError: it isn't there, or is something else.
    """
    if not model_dir.is_dir():
        raise CheckpointError(f"{model_dir} is not a folder; name one that `featcal-hf calibrate` has written.")
    path = model_dir / REPORT
    if not path.is_file():
        raise CheckpointError(
            f"{model_dir} has no {REPORT}; name a folder that `featcal-hf calibrate RECIPE MODEL_DIR` has calibrated."
        )
    return _checked(RunRecord, _json(path), str(path))


def read_evaluation(path: Path) -> EvalRecord | None:
    """Read a `featcal_eval.json`; None if there is none.

    Raises:
        CheckpointError: it is something else.
    """
    return _checked(EvalRecord, _json(path), str(path)) if path.is_file() else None


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} can't be read: {error}. Run the command that writes it again.") from error


def _checked(kind: type[_Kind], contents: Any, where: str) -> _Kind:
    try:
        return kind.model_validate(contents)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise CheckpointError(
            f"{where} is not what featcal-hf writes, or damaged: {place}: {first['msg']}. Run the command that writes "
            "it again."
        ) from error
