"""A task's dataset to batches: the data stage, readable top to bottom."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from featcal_hf.data.batches import Batch, Example, Padding, to_batches
from featcal_hf.data.choose import Choice, choose
from featcal_hf.data.content import Render, read_content, used_columns
from featcal_hf.data.images import ImageProcessor, load_image_processor
from featcal_hf.data.source import Row, Source, open_source
from featcal_hf.data.tokenizing import Encoding, TextEncoder, chat_renderer, check_boundaries, load_encoders
from featcal_hf.errors import DataError

if TYPE_CHECKING:
    from featcal_hf.recipe import DatasetSpec, Task

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskData:
    """What one task is calibrated on and measured on."""

    calibration: list[Batch]
    holdout: list[Batch]
    """Rows held out from the solve, for measuring drift; may be empty."""
    record: dict[str, Any]
    """Which rows were used and how, JSON-able, for the report."""


@dataclass(frozen=True)
class RowEncoder:
    """Rows of one task -> examples."""

    task: Task
    source: Source
    encoder_decoder: bool
    text: tuple[TextEncoder, TextEncoder] | None
    """Of the merged model and of the expert; None for a task of images alone."""
    render: Render | None
    processor: ImageProcessor | None

    def __call__(self, row: Row) -> Example | None:
        """Encode a row for both models; None if it gives no token."""
        content = read_content(
            self.task,
            row,
            folder=self.source.folder,
            encoder_decoder=self.encoder_decoder,
            render=self.render,
        )
        if content is None:
            return None
        student: dict[str, list[int]] = {}
        expert: dict[str, list[int]] = {}
        truncated = False
        for text, is_target in ((content.text, False), (content.target, True)):
            if text is None or self.text is None:
                continue
            ours, theirs = self._encode(self.text, text, is_target)
            if ours.empty:
                return None
            student |= {"labels": ours.ids} if is_target else ours.inputs
            expert |= {"labels": theirs.ids} if is_target else theirs.inputs
            truncated |= ours.truncated
        pixels = self.processor(content.image) if self.processor and content.image else None
        return Example(content.digest(), student, expert, pixels, truncated)

    def _encode(
        self, encoders: tuple[TextEncoder, TextEncoder], text: str, is_target: bool
    ) -> tuple[Encoding, Encoding]:
        """Tokens in the merged model and in the expert, the same object where the ids are equal."""
        # A chat template writes the special tokens itself.
        special = self.render is None
        ours = encoders[0](text, special_tokens=special, target=is_target)
        if encoders[1] is encoders[0]:
            return ours, ours
        theirs = encoders[1](text, special_tokens=special, target=is_target)
        if theirs.ids == ours.ids:
            return ours, ours
        check_boundaries(text, ours, theirs, [encoder.path for encoder in encoders])
        return ours, theirs


@dataclass(frozen=True)
class OpenedTask:
    """A task's dataset with what makes model inputs of its rows."""

    source: Source
    columns: list[str]
    encode: RowEncoder
    warnings: list[str]


def open_task(
    task: Task,
    dataset: DatasetSpec,
    *,
    student_path: str,
    expert_path: str,
    processor_paths: Sequence[str],
    encoder_decoder: bool,
    max_positions: int | None,
    trust_remote_code: bool,
) -> OpenedTask:
    """Open a task's dataset and load its tokenizers or processor; the arguments are those of `load_task`.

    Raises:
        DataError: see `load_task`.
    """
    source = open_source(dataset)
    columns = used_columns(task, source.columns, encoder_decoder=encoder_decoder)
    text, render, processor = None, None, None
    warnings: list[str] = []
    if task.text or task.prompt or task.messages:
        text = load_encoders(
            student_path,
            expert_path,
            max_length=task.max_length,
            max_positions=max_positions,
            trust_remote_code=trust_remote_code,
        )
        if task.messages:
            render, warnings = chat_renderer(text[0])
    if task.image:
        paths = [student_path, expert_path, *processor_paths]
        processor = load_image_processor(paths, trust_remote_code=trust_remote_code)
    return OpenedTask(source, columns, RowEncoder(task, source, encoder_decoder, text, render, processor), warnings)


def load_task(
    task: Task,
    *,
    dataset: DatasetSpec | None = None,
    student_path: str,
    expert_path: str,
    processor_paths: Sequence[str] = (),
    encoder_decoder: bool,
    max_positions: int | None = None,
    trust_remote_code: bool = False,
) -> TaskData:
    """Choose a task's rows and make them inputs of the merged model and of the task's expert.

    Rows are shuffled with the task's seed; the first `samples` usable ones calibrate, the next `holdout` ones
    of other content are held out. Both models are given the same texts and pixels. Texts are cut on the right
    to the least of the task's `max_length`, `max_positions` and what the tokenizers say, and padded there.

    The record holds: `dataset` (fields as given), `read_from` (its path), `kind`, `fingerprint`, `commit`;
    `calibration_rows`, `holdout_rows`, `calibration_indices`, `holdout_indices` (None for a stream), `sha256`
    over the texts and pixels of the rows used, calibration first; `tokens` and `holdout_tokens` (of the attention
    masks), `target_tokens` (labels of the calibration rows), `longest` (tokens), `truncated_rows`, `empty_rows`
    (passed over), `duplicate_rows` (not held out), `tokenizers`, `processor`, `warnings`.

    Args:
        task: What to read, and how much of it.
        dataset: Where its rows are read, if not where the task says.
        student_path: Folder or Hub id of the merged model.
        expert_path: Folder or Hub id of the expert.
        processor_paths: Where else to look for an image processor, after those two.
        encoder_decoder: The models read a prompt and write a completion.
        max_positions: Tokens that the models have positions for.
        trust_remote_code: Run code that comes with a tokenizer or processor (never a dataset's).

    Raises:
        DataError: the data can't be found, read or encoded, or the tokenizers cut it differently.
    """
    try:
        return _load_task(
            task,
            task.dataset if dataset is None else dataset,
            student_path=student_path,
            expert_path=expert_path,
            processor_paths=processor_paths,
            encoder_decoder=encoder_decoder,
            max_positions=max_positions,
            trust_remote_code=trust_remote_code,
        )
    except DataError as error:
        raise DataError(f"task {task.name!r}: {error}") from error


def _load_task(
    task: Task,
    dataset: DatasetSpec,
    *,
    student_path: str,
    expert_path: str,
    processor_paths: Sequence[str],
    encoder_decoder: bool,
    max_positions: int | None,
    trust_remote_code: bool,
) -> TaskData:
    opened = open_task(
        task,
        dataset,
        student_path=student_path,
        expert_path=expert_path,
        processor_paths=processor_paths,
        encoder_decoder=encoder_decoder,
        max_positions=max_positions,
        trust_remote_code=trust_remote_code,
    )
    source, encode = opened.source, opened.encode
    text, processor, warnings = encode.text, encode.processor, [*opened.warnings]
    rows = source.shuffled(task.seed, opened.columns)
    choice = choose(rows, encode, samples=task.samples, holdout=task.holdout)
    warnings += _warnings(task, choice)
    for warning in warnings:
        logger.warning("task %r: %s", task.name, warning)

    calibration = [example for _, example in choice.calibration]
    holdout = [example for _, example in choice.holdout]
    # Equal ids of every row: one set of tensors serves both models.
    shared = all(example.student == example.expert for example in calibration + holdout)
    student, expert = (encoder.padding for encoder in text) if text else (Padding(), Padding())

    def batches(examples: list[Example]) -> list[Batch]:
        return to_batches(examples, task.batch_size, student=student, expert=expert, shared=shared)

    record = {
        **_record_rows(source, choice),
        "dataset": {
            field: getattr(task.dataset, field)
            for field in ("path", "name", "split", "data_files", "revision", "streaming")
        },
        "read_from": dataset.path,
        "tokenizers": text and {"student": text[0].path, "expert": text[1].path, "same_ids": shared},
        "processor": processor and {"path": processor.path, "class": type(processor.process).__name__},
        "warnings": warnings,
    }
    return TaskData(batches(calibration), batches(holdout), record)


def hash_rows(examples: Sequence[Example]) -> str:
    """SHA-256 (hex) over the texts and pixels of rows, in their order."""
    return hashlib.sha256("".join(example.digest for example in examples).encode()).hexdigest()


def _warnings(task: Task, choice: Choice) -> list[str]:
    warnings = []
    if choice.empty:
        rows = ", ".join(map(str, choice.empty[:5])) + (", ..." if len(choice.empty) > 5 else "")
        warnings.append(f"passed over {len(choice.empty)} rows that give no token (rows {rows})")
    calibration, holdout = len(choice.calibration), len(choice.holdout)
    if calibration < task.samples or holdout < task.holdout:
        warnings.append(
            f"wanted {task.samples} rows to calibrate on and {task.holdout} to hold out, and found "
            f"{choice.usable} usable ones, {len(choice.duplicates)} of them copies that can't be held out; "
            f"calibrating on {calibration}, holding out {holdout}"
        )
    return warnings


def _record_rows(source: Source, choice: Choice) -> dict[str, Any]:
    calibration = [example for _, example in choice.calibration]
    holdout = [example for _, example in choice.holdout]
    used = calibration + holdout

    def tokens(examples: list[Example], name: str = "input_ids") -> int:
        return sum(len(example.student.get(name, ())) for example in examples)

    def indices(chosen: list[tuple[int, Example]]) -> list[int] | None:
        return None if source.streaming else [index for index, _ in chosen]

    return {
        **source.provenance(),
        "calibration_rows": len(calibration),
        "holdout_rows": len(holdout),
        "calibration_indices": indices(choice.calibration),
        "holdout_indices": indices(choice.holdout),
        "sha256": hash_rows(used),
        "tokens": tokens(calibration),
        "holdout_tokens": tokens(holdout),
        "target_tokens": tokens(calibration, "labels"),
        "longest": max(tokens([example]) for example in used),
        "truncated_rows": sum(example.truncated for example in used),
        "empty_rows": len(choice.empty),
        "duplicate_rows": len(choice.duplicates),
    }
