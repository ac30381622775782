"""Rows that calibration never saw, as inputs for measuring models on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from featcal_hf.data.batches import Example, Padding, to_batches
from featcal_hf.data.choose import choose
from featcal_hf.data.content import read_content, used_columns
from featcal_hf.data.source import Row, open_source
from featcal_hf.data.task import OpenedTask, hash_rows
from featcal_hf.data.tokenizing import TextEncoder
from featcal_hf.errors import DataError, listed

if TYPE_CHECKING:
    from featcal_hf.recipe import DatasetSpec, Task

MORE_TOKENS = 4
"""Tokens that a generated answer may have beyond the longest reference: room to run on, or to end."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class HeldOutBatch:
    """One batch of held-out rows.

    Attributes:
        student: inputs of the merged model's forward, as in `Batch`.
        expert: inputs of the expert's, the same object where the tokenizers agree.
        scored: (batch, tokens) bool, the tokens of a decoder whose predictions count; None for other models.
        prompts: `input_ids` and `attention_mask` to generate from, by the merged model and by the expert, padded
            on the left for a decoder; None where nothing is to be generated.
        references: what should be generated; empty where nothing is.
        labels: each row's class as the dataset has it; empty where no label is read.
    """

    student: Tensors
    expert: Tensors
    scored: torch.Tensor | None
    prompts: tuple[Tensors, Tensors] | None
    references: list[str]
    labels: list[int | str]


@dataclass(frozen=True)
class HeldOut:
    """The held-out rows of one task.

    Attributes:
        batches: the rows.
        shared: both models have the same token ids.
        new_tokens: how long a generated answer may get.
        encoders: tokenizers of the merged model and of the expert; None for images alone.
        class_names: names of the label column's classes, where the dataset has them.
        record: which rows these are, JSON-able.
    """

    batches: list[HeldOutBatch]
    shared: bool
    new_tokens: int
    encoders: tuple[TextEncoder, TextEncoder] | None
    class_names: list[str] | None
    record: dict[str, Any]


@dataclass(frozen=True)
class _Row:
    """One row: its inputs and what they are compared with."""

    index: int
    example: Example
    scored: list[int]
    prompt: tuple[list[int], list[int]]
    reference: str
    label: int | str


def used_digests(opened: OpenedTask, task: Task, record: Mapping[str, Any] | None) -> set[str]:
    """Digests of the rows that calibration used, those to measure drift on included.

    The rows are chosen again as calibration chose them. Where its record has other ones (other settings or seed), those
    are read by their indices.

    Args:
        opened: the task's dataset, as calibrated on.
        task: the task, with the seed that calibration had.
        record: what `featcal.json` says of the task; None without one.

    Raises:
        DataError: the data or the task's texts are no longer those that the record speaks of.
    """
    rows = opened.source.shuffled(task.seed, opened.columns)
    choice = choose(rows, opened.encode, samples=task.samples, holdout=task.holdout)
    chosen = [example for _, example in (*choice.calibration, *choice.holdout)]
    digests = {example.digest for example in chosen}
    if record is None or hash_rows(chosen) == record["sha256"]:
        return digests
    indices = [*(record["calibration_indices"] or ()), *(record["holdout_indices"] or ())]
    if indices and not opened.source.streaming:
        encoded = [opened.encode(row) for _, row in opened.source.at(indices, opened.columns)]
        recorded = [example for example in encoded if example is not None]
        if hash_rows(recorded) == record["sha256"]:
            return digests | {example.digest for example in recorded}
    raise DataError(
        "the rows that featcal.json says were calibrated on are no longer there: data or texts have changed since, and "
        "held-out rows can't be told from used ones; evaluate with the recipe and the data that it was calibrated with"
        + (", and its `--random-seed` if it had one" if opened.source.streaming else "")
    )


def open_other(opened: OpenedTask, task: Task, dataset: DatasetSpec) -> OpenedTask:
    """The same task on another split.

    Raises:
        DataError: there is no such split, or it lacks a column.
    """
    source = open_source(dataset)
    columns = used_columns(task, source.columns, encoder_decoder=opened.encode.encoder_decoder)
    return replace(opened, source=source, columns=columns, encode=replace(opened.encode, source=source))


def held_out(
    opened: OpenedTask,
    task: Task,
    excluded: set[str],
    *,
    rows: int,
    batch_size: int,
    decoder: bool,
    label: str | None,
) -> HeldOut:
    """Take the first `rows` usable rows, in shuffled order, whose content isn't among the `excluded` digests.

    Args:
        opened: the dataset and split to read.
        task: what to read of it.
        excluded: digests of the rows that may not be used.
        rows: rows wanted; fewer are taken where there are no more.
        batch_size: rows in one forward.
        decoder: the models predict each token from those before it, so a completion's tokens are told apart.
        label: column of the rows' classes, where they are compared with a classifier's answers.

    Raises:
        DataError: no row is left, the label column isn't there, or a row can't be read.
    """
    source, columns = opened.source, opened.columns
    if label is not None:
        if label not in source.columns:
            raise DataError(
                f"accuracy needs each row's class, and there is no column {label!r} (the dataset has "
                f"{listed(source.columns, label)}); name it in the task, as in `label: {source.columns[-1]}`"
            )
        columns = list(dict.fromkeys([*columns, label]))
    chosen: list[_Row] = []
    used = empty = 0
    for index, row in source.shuffled(task.seed, columns):
        try:
            example = opened.encode(row)
            if example is not None and example.digest in excluded:
                used += 1
                continue
            made = None if example is None else _row(opened, task, index, row, example, decoder=decoder, label=label)
        except DataError as error:
            raise DataError(f"row {index}: {error}") from error
        if made is None:
            empty += 1
            continue
        chosen.append(made)
        if len(chosen) == rows:
            break
    if not chosen:
        raise DataError(
            f"no row is left to evaluate on: of the split's rows {used} were calibrated on or held out for drift, and "
            f"{empty} give nothing to measure; name another split (`eval: {{split: test}}` in the task, or --split), "
            "or calibrate with fewer `samples`"
        )
    shared = all(row.example.student == row.example.expert for row in chosen)
    record = {
        **source.provenance(),
        "rows": len(chosen),
        "indices": None if source.streaming else [row.index for row in chosen],
        "sha256": hash_rows([row.example for row in chosen]),
        "left_out_rows": used,
        "empty_rows": empty,
        "truncated_rows": sum(row.example.truncated for row in chosen),
    }
    generates = task.completion is not None and (decoder or opened.encode.encoder_decoder)
    answers = [sum(row.scored) if decoder else len(row.example.student.get("labels", ())) for row in chosen]
    return HeldOut(
        _batches(chosen, batch_size, opened.encode.text, decoder=decoder, generates=generates, label=label),
        shared,
        max(answers) + MORE_TOKENS,
        opened.encode.text,
        None if label is None else source.class_names(label),
        record,
    )


def _row(
    opened: OpenedTask, task: Task, index: int, row: Row, example: Example, *, decoder: bool, label: str | None
) -> _Row | None:
    """The row with what it is compared with; None if nothing of it counts."""
    scored = [1] * len(example.student.get("input_ids", ()))
    prompt: tuple[list[int], list[int]] = ([], [])
    reference, value = "", -1 if label is None else row[label]
    if task.completion is not None:
        content = read_content(task, row, folder=opened.source.folder, encoder_decoder=True, render=None)
        if content is None or content.text is None or content.target is None or opened.encode.text is None:
            return None
        reference = content.target
        if opened.encode.encoder_decoder:
            prompt = (example.student["input_ids"], example.expert["input_ids"])
        else:
            ours, theirs = (_prompt_ids(encoder, content.text) for encoder in opened.encode.text)
            start = _common_start(ours, example.student["input_ids"])
            scored = [0] * start + [1] * (len(scored) - start)
            if not ours or not theirs:
                return None
            prompt = (ours, theirs)
    if decoder and not any(scored[1:]):
        return None
    if value is None:
        return None
    if label is not None and not isinstance(value, int | str):
        raise DataError(f"column {label!r} holds {type(value).__name__}, expected a class's number or name")
    return _Row(index, example, scored, prompt, reference, value)


def _prompt_ids(encoder: TextEncoder, text: str) -> list[int]:
    """A prompt's tokens without the end-of-text token that some tokenizers add: the answer comes there."""
    encoding = encoder(text)
    added = encoding.added
    kept = next((k + 1 for k in reversed(range(len(added))) if not added[k]), 0)
    return encoding.ids[:kept]


def _common_start(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens two lists share; a token across the border of prompt and completion is the latter's."""
    pairs = zip(one, other, strict=False)
    return next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _batches(
    rows: list[_Row],
    batch_size: int,
    text: tuple[TextEncoder, TextEncoder] | None,
    *,
    decoder: bool,
    generates: bool,
    label: str | None,
) -> list[HeldOutBatch]:
    ours, theirs = (encoder.padding for encoder in text) if text else (Padding(), Padding())
    shared = all(row.example.student == row.example.expert for row in rows)
    inputs = to_batches([row.example for row in rows], batch_size, student=ours, expert=theirs, shared=shared)
    batches = []
    for number, batch in enumerate(inputs):
        members = rows[number * batch_size : (number + 1) * batch_size]
        width = max(len(row.scored) for row in members)
        scored = torch.tensor([row.scored + [0] * (width - len(row.scored)) for row in members], dtype=torch.bool)
        prompts = None
        if generates:
            prompts = (
                _pad_prompts([row.prompt[0] for row in members], ours.token, left=decoder),
                _pad_prompts([row.prompt[1] for row in members], theirs.token, left=decoder),
            )
        batches.append(
            HeldOutBatch(
                student=batch.student,
                expert=batch.expert,
                scored=scored if decoder else None,
                prompts=prompts,
                references=[row.reference for row in members] if generates else [],
                labels=[] if label is None else [row.label for row in members],
            )
        )
    return batches


def _pad_prompts(prompts: list[list[int]], token: int, *, left: bool) -> Tensors:
    longest = max(len(prompt) for prompt in prompts)
    ids, mask = [], []
    for prompt in prompts:
        fill = longest - len(prompt)
        ids.append([token] * fill + prompt if left else prompt + [token] * fill)
        mask.append([0] * fill + [1] * len(prompt) if left else [1] * len(prompt) + [0] * fill)
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
