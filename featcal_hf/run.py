"""Calibrate a merged folder from its recipe: read, check, calibrate, write."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from featcal_hf.activations import activations
from featcal_hf.calibrate import BlockReport, OnStep, calibrate_blocks
from featcal_hf.card import check_license, write_card
from featcal_hf.checkpoint import Checkpoint
from featcal_hf.errors import CheckpointError, HubError
from featcal_hf.hub import check_before_run, push
from featcal_hf.lock import locked
from featcal_hf.parents import describe_parents
from featcal_hf.preparation import OnStage, Prepared, prepare
from featcal_hf.ranks import ALONE, FIRST, Ranks
from featcal_hf.record import RunReport, binding_conditions, describe_conditions, describe_data, describe_models
from featcal_hf.resume import FinishedBlocks, forget_unfinished, holds_finished_blocks
from featcal_hf.save import (
    UNFINISHED,
    WORK,
    check_output,
    discard,
    discard_unfinished,
    finish_swap,
    swap_in,
    work_folder,
    write_output,
)
from featcal_hf.streams import CalibrationTask

ACTIVATIONS = "activations"
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS}


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
    restart: bool = False,
    on_stage: OnStage = lambda stage: None,
    on_prepared: Callable[[Prepared], None] = lambda prepared: None,
    on_step: OnStep = lambda step: None,
    ranks: Ranks = ALONE,
) -> RunReport:
    """Calibrate the merged model in `model_dir` towards its experts, in place or into `output`.

    A run that was stopped, however that came, goes on from its last finished block when it is called again, and ends
    with the same bytes as one that was not stopped.

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
        restart: drop what a stopped run has finished, and begin anew.
        on_stage: called with the name of each stage of preparation.
        on_prepared: called once everything has been checked.
        on_step: called before each step, see `Step`.
        ranks: who shares the work, see `joined_ranks`: all call this, the first one writes.

    Returns:
        What was done; also written to `featcal.json` beside the weights.

    Raises:
        RecipeError: the recipe can't be read, or asks for what can't be done.
        CheckpointError: a model is missing, incomplete, damaged or doesn't fit; the disk is full.
        DataError: a task's examples can't be read or turned into inputs.
        SolveError: a module has no finite solution. In all these cases the merged model is as it was.
        CardError: the model is calibrated, but its card can't be written; or its licence is open, and it was to be
            pushed.
        RanksError: the ranks don't do the same, or one of them is gone.
        HubError: what stops a push was found before the run; or the model is calibrated, but wasn't pushed.
    """
    started = time.perf_counter()
    folder = Path(model_dir)
    target = folder if output is None else Path(output)
    with ranks.together(), ExitStack() as stack:
        if push_to_hub is not None and ranks.is_first:
            _check_push(push_to_hub, write_model_card)
        if output is not None:
            check_output(Path(output), folder)
        stack.enter_context(_mended(target, folder))
        if folder.is_dir() and ranks.is_first:
            stack.enter_context(locked(target))
            if output is None:
                finish_swap(folder)
        ranks.exchange(None)  # nobody opens what is still being put in place
        prepared = prepare(
            recipe,
            model_dir,
            output,
            device=device,
            cache_dir=cache_dir,
            trust_remote_code=trust_remote_code,
            random_seed=random_seed,
            mapping=mapping,
            restart=restart,
            on_stage=on_stage,
            ranks=ranks,
        )
        if push_to_hub is not None and ranks.is_first:
            check_license(prepared.recipe.card, describe_parents(prepared.recipe, prepared.models))
        on_prepared(prepared)
        report = calibrate_prepared(
            prepared, prepared.output, torch.device(device), on_step, started, activation_memory, ranks
        )
        if write_model_card and ranks.is_first:
            report = replace(report, card=write_card(target, repo_id=push_to_hub))
    if push_to_hub is not None and ranks.is_first:
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
    ranks: Ranks = ALONE,
) -> RunReport:
    """Run the calibration of a prepared run, or the rest of it, and write its result; `ranks` share the work."""
    checkpoint = prepared.models.student.checkpoint
    target = output if output is not None else checkpoint.folder
    work = target / (WORK if output is None else UNFINISHED)
    with ExitStack() as stack:
        stack.enter_context(_mended(target, checkpoint.folder))
        if ranks.is_first:
            if output is not None:
                discard_unfinished(checkpoint, output)
            if prepared.unfinished is None or not prepared.unfinished.usable:
                forget_unfinished(work)
            stack.enter_context(work_folder(work, keep=lambda: holds_finished_blocks(work)))
        stack.enter_context(ranks.together())
        stack.enter_context(_mended(target, checkpoint.folder))
        conditions = describe_conditions(device, ranks.size)
        finished = _finished_blocks(prepared, work, conditions) if ranks.is_first else None
        try:
            state = (finished.reports, finished.complete) if finished is not None else ([], False)
            earlier, complete = ranks.exchange(state)[FIRST]
            if not complete:
                _calibrate_rest(prepared, finished, earlier, work, device, activation_memory, on_step, ranks)
            _check_unchanged(prepared)
            reports = ranks.exchange(finished.reports if finished is not None else [])[FIRST]
            report = RunReport(
                prepared.recipe,
                prepared.settings,
                describe_models(prepared.models),
                describe_data(prepared.recipe, prepared.data),
                conditions,
                reports,
                sum(block.seconds for block in earlier) + time.perf_counter() - started,
                describe_parents(prepared.recipe, prepared.models),
                prepared.random_seed,
                prepared.warnings,
            )
            if finished is not None:
                _put_in_place(checkpoint, finished, work, output, report)
        except KeyboardInterrupt as error:
            done = f"; {finished.state()}" if finished is not None else ""
            raise KeyboardInterrupt(f"{checkpoint.folder} holds one whole model{done}") from error
    return report


def _put_in_place(
    checkpoint: Checkpoint, finished: FinishedBlocks, work: Path, output: Path | None, report: RunReport
) -> None:
    new = finished.close()
    contents = report.as_dict() | {"fingerprint": finished.marks}
    if output is None:
        swap_in(checkpoint, new, work, contents)
    else:
        write_output(checkpoint, new, work, output, contents)


def _finished_blocks(prepared: Prepared, work: Path, conditions: dict[str, Any]) -> FinishedBlocks:
    student, unfinished = prepared.models.student, prepared.unfinished
    if unfinished is not None and unfinished.usable:
        return FinishedBlocks.go_on(student, work, unfinished)
    return FinishedBlocks.begin(student, work, prepared.work, binding_conditions(conditions))


def _calibrate_rest(
    prepared: Prepared,
    finished: FinishedBlocks | None,
    earlier: list[BlockReport],
    work: Path,
    device: torch.device,
    activation_memory: int | None,
    on_step: OnStep,
    ranks: Ranks,
) -> None:
    tasks = [
        CalibrationTask(
            task.name,
            prepared.models.experts[task.model],
            [(batch.student, batch.expert) for batch in data.calibration],
            [(batch.student, batch.expert) for batch in data.holdout],
        )
        for task, data in zip(prepared.recipe.tasks, prepared.data, strict=True)
    ]
    if ranks.is_first:
        discard(work / ACTIVATIONS)
    ranks.exchange(None)
    with activations(activation_memory, work / ACTIVATIONS / str(ranks.number), ranks.neighbours) as held:
        calibrate = partial(
            calibrate_blocks,
            prepared.models.student,
            prepared.models.base,
            tasks,
            prepared.settings,
            device=device,
            activations=held,
            on_step=on_step,
            finished=earlier,
            ranks=ranks,
        )
        if finished is None:
            calibrate(write=lambda path, parameters: None)
        else:
            calibrate(write=finished.write, on_block=finished.note, read=finished.read)


def _check_unchanged(prepared: Prepared) -> None:
    for model in prepared.models.all().values():
        model.checkpoint.check_unchanged()
    for adapter in prepared.models.adapters().values():
        adapter.checkpoint.check_unchanged()


@contextmanager
def _mended(target: Path, merged: Path) -> Iterator[None]:
    """Errors of the disk that a user can mend, as such."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL | NOT_ALLOWED:
            raise
        problem = "the disk is full" if error.errno in DISK_FULL else "writing is not allowed"
        raise CheckpointError(
            f"{target} can't be written ({error}): {problem}; {merged} holds one whole model. Mend that and run the "
            "same command again: it goes on from the last finished block."
        ) from error
