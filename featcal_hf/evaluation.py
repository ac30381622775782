"""Did it help? Each task's metric for expert, merged and calibrated model, on rows kept from calibration."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from mergekit.common import ModelReference
from torch import Tensor

from featcal_hf import evaluate as measures
from featcal_hf.card import renew_card
from featcal_hf.data import HeldOut, OpenedTask, held_out, open_other, open_task, used_digests
from featcal_hf.errors import CardError, DataError
from featcal_hf.eval_report import EVALUATION, EvalReport, Line, harness_lines, write_report
from featcal_hf.harness import check_harness, parse_results, read_results, run_harness
from featcal_hf.mapping import check_mapping, locate_dataset, locate_model
from featcal_hf.preparation import max_positions
from featcal_hf.recipe import DatasetSpec, Recipe, Task, read_recipe
from featcal_hf.save import REPORT
from featcal_hf.scoring import Reading, Score, Scorer, ZeroShotHead, load_zero_shot_head, reading_of
from featcal_hf.streamed import StreamedModel
from featcal_hf.whole_models import WholeModel, open_calibrated, open_expert, open_merged, whole_model

ROWS = 256
KEPT_BYTES = 2**31
"""Of the experts' outputs that are kept in memory to measure drift from, all tasks together."""


@dataclass
class _Evaluated:
    """One task on its way: what is measured, on which rows, and what came out."""

    task: Task
    reading: Reading
    data: HeldOut
    head: ZeroShotHead | None
    scores: dict[str, Score] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[Line]:
        metrics = dict.fromkeys(metric for score in self.scores.values() for metric in score.values)
        ordered = sorted(metrics, key=lambda metric: metric.drift)
        return [
            Line(
                self.task.name,
                metric,
                {label: score.values[metric] for label, score in self.scores.items() if metric in score.values},
            )
            for metric in ordered
        ]

    def record(self) -> dict[str, Any]:
        notes = [*self.notes, *(note for score in self.scores.values() for note in score.notes)]
        return {
            "expert": str(self.task.model),
            **self.data.record,
            "new_tokens": self.data.new_tokens if self.task.completion else None,
            "counts": {label: score.counts for label, score in self.scores.items()},
            "notes": list(dict.fromkeys(notes)),
        }


def evaluate(
    recipe: str | Path,
    model_dir: str | Path,
    merged: str | Path | None = None,
    *,
    experts: bool = False,
    rows: int = ROWS,
    split: str | None = None,
    batch_size: int | None = None,
    output: str | Path | None = None,
    device: str = "cpu",
    cache_dir: str | None = None,
    trust_remote_code: bool = False,
    random_seed: int | None = None,
    mapping: Mapping[str, str] | None = None,
    lm_eval: Sequence[str] | None = None,
    lm_eval_results: Sequence[str] = (),
    on_stage: Callable[[str], None] = lambda stage: None,
) -> EvalReport:
    """Measure the calibrated model in `model_dir` on held-out rows of the recipe's tasks.

    Each task has the metric that suits its data and the model: loss and perplexity of texts and conversations; loss,
    exact match and (of numbers) Spearman's ρ of completions; accuracy of classifiers, zero-shot accuracy of a CLIP's
    image tower. With experts, also how far the outputs are from theirs. Whole models are loaded, one at a time.

    Args:
        recipe: the recipe that it was calibrated with.
        model_dir: the calibrated model.
        merged: the merged model before calibration, to compare with.
        experts: measure each task's expert too, and the drift from it.
        rows: held-out rows of each task, at most.
        split: read rows from this split, whatever the recipe says.
        batch_size: rows in one forward; None: the task's own.
        output: where to write the report; None: `featcal_eval.json` in `model_dir`.
        device: where models run.
        cache_dir: storage for downloaded models.
        trust_remote_code: let models and tokenizers run code of their repository.
        random_seed: the seed that the calibration was given in place of the recipe's.
        mapping: ids in the recipe -> local paths, as in `calibrate`.
        lm_eval: tasks of EleutherAI's harness to run on the merged and the calibrated model; None: the recipe's.
        lm_eval_results: results files of the harness; `expert=`, `merged=` or `calibrated=` before a path says which
            model it is about.
        on_stage: called with the name of each stage.

    Returns:
        What was measured; also written to `output`. Without one, the folder's card has the results as well.

    Raises:
        RecipeError: the recipe can't be read.
        CheckpointError: a model is missing, incomplete, or isn't the calibrated (merged) one.
        DataError: rows can't be read, none is left that calibration didn't use, labels are missing, or the harness
            isn't installed.
    """
    started = time.perf_counter()
    read = read_recipe(recipe)
    harness_tasks = read.harness.lm_eval if lm_eval is None else lm_eval
    if harness_tasks:
        check_harness()
    known = dict(mapping or {})
    check_mapping(known, read)
    on_stage("opening checkpoints")
    calibrated, student = open_calibrated(read, Path(model_dir), trust_remote_code)
    models: dict[str, WholeModel] = {}
    if merged is not None:
        models["merged"] = open_merged(Path(merged), student, trust_remote_code)
    models["calibrated"] = calibrated
    reports = [
        read_results(argument, {label: model.folder for label, model in models.items()}) for argument in lm_eval_results
    ]
    teachers = {
        reference: open_expert(reference, student, known, cache_dir, trust_remote_code)
        for reference in (read.experts if experts else ())
    }
    record = json.loads((calibrated.folder / REPORT).read_text(encoding="utf-8"))
    on_stage("choosing rows that calibration didn't use")
    tasks = [task if random_seed is None else task.model_copy(update={"seed": random_seed}) for task in read.tasks]
    chosen = _choose(
        tasks,
        read,
        student,
        calibrated.folder,
        {reference: model.folder for reference, model in teachers.items()},
        record["tasks"],
        known,
        rows=rows,
        split=split,
        batch_size=batch_size,
        cache_dir=cache_dir,
        device=torch.device(device),
        trust_remote_code=trust_remote_code,
    )
    if not experts and not reports and not harness_tasks and all(entry.reading.metric is None for entry in chosen):
        raise DataError(
            f"{chosen[0].reading.why}: without experts nothing can be measured; give --experts for the drift"
        )
    _measure(chosen, models, teachers, student, torch.device(device), on_stage)
    for label, model in models.items() if harness_tasks else ():
        on_stage(f"lm-eval on the {label} model")
        results = run_harness(
            model.folder, harness_tasks, device=device, batch_size=batch_size, trust_remote_code=trust_remote_code
        )
        reports.append((label, parse_results(results)))
    labelled = {f"expert {reference}": model for reference, model in teachers.items()} | models
    report = EvalReport(
        read,
        [line for entry in chosen for line in entry.lines()],
        harness_lines(reports),
        {entry.task.name: entry.record() for entry in chosen},
        {label: model.record() for label, model in labelled.items()},
        hashlib.sha256((calibrated.folder / REPORT).read_bytes()).hexdigest(),
        device,
        time.perf_counter() - started,
    )
    if output is not None:
        write_report(report, Path(output))
        return report
    write_report(report, calibrated.folder / EVALUATION)
    card, notes = _renew_card(calibrated.folder)
    return replace(report, card=card, notes=notes)


def _renew_card(folder: Path) -> tuple[Path | None, list[str]]:
    """Bring the results into the folder's card: its file, and what a person should know."""
    try:
        card = renew_card(folder)
    except CardError as error:
        return None, [f"the model card is as it was: {error}"]
    if card is None:
        return None, [f"there is no model card yet for the results; `featcal-hf card {folder}` writes it"]
    return card.path, card.notes


def _choose(
    tasks: list[Task],
    recipe: Recipe,
    student: StreamedModel,
    folder: Path,
    experts: Mapping[ModelReference, Path],
    records: Mapping[str, Any],
    mapping: Mapping[str, str],
    *,
    rows: int,
    split: str | None,
    batch_size: int | None,
    cache_dir: str | None,
    device: torch.device,
    trust_remote_code: bool,
) -> list[_Evaluated]:
    """Choose each task's rows; what any task was calibrated on is left out of all of them."""
    base = [] if recipe.base is None else [locate_model(recipe.base, mapping).model.path]
    opened: dict[str, OpenedTask] = {}
    used: set[str] = set()
    for task in tasks:
        with _naming(task):
            opened[task.name] = open_task(
                task,
                locate_dataset(task.dataset, mapping),
                student_path=str(folder),
                expert_path=str(experts.get(task.model, folder)),
                processor_paths=[*base, locate_model(task.model, mapping).model.path],
                encoder_decoder=bool(student.module.config.is_encoder_decoder),
                max_positions=max_positions(student.module),
                trust_remote_code=trust_remote_code,
            )
            used |= used_digests(opened[task.name], task, records.get(task.name))
    chosen = []
    for task in tasks:
        with _naming(task):
            reading = reading_of(type(student.module), student.module.config, task)
            spec = _other_split(task, split)
            source = opened[task.name]
            if spec != task.dataset:
                source = open_other(source, task, locate_dataset(spec, mapping))
            is_labelled = reading.metric in (measures.ACCURACY, measures.ZERO_SHOT)
            data = held_out(
                source,
                task,
                used,
                rows=rows,
                batch_size=batch_size or task.batch_size,
                decoder=reading.decoder,
                label=(task.label or "label") if is_labelled else None,
            )
            data.record["dataset"] = spec.model_dump()
            head = None
            if reading.metric is measures.ZERO_SHOT:
                head = _head(task, data, mapping, device, cache_dir)
            chosen.append(_Evaluated(task, reading, data, head, notes=[reading.why] if reading.why else []))
    return chosen


def _other_split(task: Task, split: str | None) -> DatasetSpec:
    wanted = split or (task.evaluation and task.evaluation.split)
    return task.dataset if wanted is None else task.dataset.model_copy(update={"split": wanted})


def _head(
    task: Task, data: HeldOut, mapping: Mapping[str, str], device: torch.device, cache_dir: str | None
) -> ZeroShotHead:
    spec = task.evaluation
    assert spec is not None
    assert spec.text_model is not None
    names = spec.class_names or data.class_names
    if names is None:
        raise DataError(
            f"zero-shot accuracy needs the classes' names, and the dataset's column {task.label or 'label'!r} has "
            "none; give `class_names` in the task's `eval`, in the order of the labels"
        )
    path = mapping.get(spec.text_model, spec.text_model)
    return load_zero_shot_head(path, names, spec.templates or [], device, cache_dir)


def _measure(
    chosen: list[_Evaluated],
    models: Mapping[str, WholeModel],
    experts: Mapping[ModelReference, WholeModel],
    student: StreamedModel,
    device: torch.device,
    on_stage: Callable[[str], None],
) -> None:
    """Run every model over its tasks: each expert over its own, then the merged and the calibrated over all."""
    cls, positions = type(student.module), max_positions(student.module)
    outputs: dict[str, list[Tensor]] = {}

    def run(label: str, whole: WholeModel, entries: list[_Evaluated]) -> None:
        with whole_model(whole, cls, device) as model:
            for entry in entries:
                scorer = Scorer(
                    model,
                    entry.data,
                    entry.reading,
                    entry.head,
                    device,
                    is_expert=label == "expert",
                    positions=positions,
                )
                with _naming(entry.task):
                    if label == "expert":
                        score = scorer.score(keep_bytes=KEPT_BYTES // len(chosen))
                        outputs[entry.task.name] = score.outputs
                        score.outputs = []
                    else:
                        score = scorer.score(expert=outputs.get(entry.task.name))
                entry.scores[label] = score

    for reference, whole in experts.items():
        entries = [entry for entry in chosen if entry.task.model == reference]
        on_stage(f"evaluating the expert {reference}")
        run("expert", whole, entries)
    for entry in chosen:
        if entry.reading.metric is measures.LOSS and not entry.data.shared:
            entry.notes.append("no drift: the expert's tokenizer has other ids, so its outputs are of other tokens")
            outputs.pop(entry.task.name, None)
    for label, whole in models.items():
        on_stage(f"evaluating the {label} model")
        entries = [entry for entry in chosen if entry.reading.metric is not None or experts]
        if entries:
            run(label, whole, entries)


class _naming:
    """Puts the task's name before what went wrong with its data."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DataError):
            raise DataError(f"task {self._task.name!r}: {error}") from error
