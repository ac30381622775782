"""What held-out rows show once every block is calibrated: final features, and outputs where the model has a head.

Their forwards are parked at the last block anyway; from there they run to the end.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from featcal_hf.drift import read_tokens
from featcal_hf.evaluate import AGREEMENT, KL, LOGIT_L2, OutputDrift
from featcal_hf.forward import ParkedForward, find_blocks, first_tensor
from featcal_hf.models import BlockModel
from featcal_hf.streams import Pair, TaskStreams
from featcal_hf.tokens import own_mask

PREDICTIONS = 512
"""Tokens of a task, all its held-out batches together, whose logits are compared: a head over a vocabulary is the
dearest module of a small model, and means over a few hundred tokens say enough."""
LOGIT_BYTES = 2**26
"""What these tokens' logits may take in one model; with a large vocabulary they are fewer."""
LEAST_ROWS = 3
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FeatureView:
    """Final features in two dimensions, one point for each held-out row: its mean token, or the token that is read.

    The axes are the first two principal components of the expert's features, whose mean is the origin.

    Attributes:
        explained: share of the variance of the expert's features along each axis.
        expert: points (x, y) of the expert.
        merged: of the merged model before calibration.
        calibrated: of the calibrated model.
    """

    explained: list[float]
    expert: list[list[float]]
    merged: list[list[float]]
    calibrated: list[list[float]]


@dataclass(frozen=True)
class OutputDistance:
    """How far outputs are from the expert's (paper, Definition 2): means over tokens, or over rows of a classifier.

    Attributes:
        logit_l2: ‖z - z^exp‖.
        kl: KL(softmax z^exp ‖ softmax z) in nats.
        agreement: share whose largest logit is the expert's.
    """

    logit_l2: float | None
    kl: float | None
    agreement: float | None


@dataclass(frozen=True)
class OutputChange:
    """Output drift of a task.

    Attributes:
        before: of the merged model.
        after: of the calibrated model.
        predictions: tokens, or rows of a classifier, that the means are over: all of a task with no more than
            `PREDICTIONS` tokens, otherwise that many or somewhat fewer, spread evenly over each batch.
    """

    before: OutputDistance
    after: OutputDistance
    predictions: int


@dataclass(frozen=True)
class TaskOutcome:
    """What the held-out rows of one task show.

    Attributes:
        cosines_before: mean cosine to the expert after the last block, of each row, for the merged model.
        cosines_after: the same for the calibrated model.
        features: final features in two dimensions; None where there are too few rows.
        output: output drift; None where it can't be measured.
        no_output: why there is none.
    """

    cosines_before: list[float]
    cosines_after: list[float]
    features: FeatureView | None
    output: OutputChange | None
    no_output: str | None


def finish(task: TaskStreams, student: BlockModel, stream: str, first_token_read: bool) -> TaskOutcome:
    """Let the held-out rows of a task run to their end, batch by batch, from the last block's outputs."""
    features = _features(task.holdout, stream, first_token_read)
    output, reason = None, None
    try:
        output = _output_change(task, student, stream)
        if output is None:
            reason = f"{type(student.module).__name__} has no logits"
    except Exception as error:  # a model's own code after its blocks, which calibration itself never runs
        reason = f"{type(error).__name__}: {error}"
        _log.warning("task %s: output drift can't be measured: %s", task.name, reason)
    return TaskOutcome(
        [round(value, 5) for value in task.before.cosines],
        [round(value, 5) for value in task.after.cosines],
        features,
        output,
        reason,
    )


def project(expert: Tensor, others: Sequence[Tensor]) -> tuple[list[float], list[Tensor]] | None:
    """Principal components of the expert's features (rows, width), and all features along the first two.

    Returns:
        The share of variance along each axis, and the coordinates (rows, 2) of expert and others; None for fewer than
        three rows, or rows that are all the same.
    """
    if len(expert) < LEAST_ROWS:
        return None
    center = expert.double().mean(dim=0)
    _, sizes, directions = torch.linalg.svd(expert.double() - center, full_matrices=False)
    if not float(sizes[0]) > 0:
        return None
    axes = directions[:2]
    largest = axes.gather(1, axes.abs().argmax(dim=1, keepdim=True))
    axes = axes * largest.sign()  # which way an axis points is up to the SVD
    shares = (sizes[:2].square() / sizes.square().sum()).tolist()
    return shares, [(features.double() - center) @ axes.T for features in (expert, *others)]


def _features(pairs: Sequence[Pair], stream: str, first_token_read: bool) -> FeatureView | None:
    rows: list[list[Tensor]] = [[], [], []]
    for pair in pairs:
        for kept, output in zip(rows, (pair.expert_output, pair.merged_output, pair.student_output), strict=True):
            tokens = first_tensor(output).float()
            counts = read_tokens(tokens, own_mask(stream, pair.inputs), first_token_read).float()
            kept.append(((tokens * counts[..., None]).sum(dim=1) / counts.sum(dim=1).clamp_min(1)[:, None]).cpu())
    expert, merged, calibrated = (torch.cat(kept) for kept in rows)
    found = project(expert, [merged, calibrated])
    if found is None:
        return None
    shares, points = found
    digits = [[[float(f"{value:.4g}") for value in point] for point in each.tolist()] for each in points]
    return FeatureView([round(share, 4) for share in shares], *digits)


def _output_change(task: TaskStreams, student: BlockModel, stream: str) -> OutputChange | None:
    before, after = OutputDrift(True), OutputDrift(True)
    with student.outer(), task.expert.outer():
        for model, name in ((student.module, "the merged model"), (task.expert.module, "the expert")):
            _check_whole(model, name)
        for pair in task.holdout:
            mask = own_mask(stream, pair.inputs)
            runs = (
                (pair.expert, pair.expert_output, task.expert.module),
                (pair.merged, pair.merged_output, student.module),
                (pair.student, pair.student_output, student.module),
            )
            share = None if "labels" in pair.inputs.inputs else 1 / len(task.holdout)
            logits = [_logits(run, output, model, mask, share) for run, output, model in runs if run]
            pair.expert_output = pair.merged_output = pair.student_output = None
            if any(value is None for value in logits):
                return None
            expert, *ours = (value for value in logits if value is not None)
            if len({value.shape for value in (expert, *ours)}) > 1:
                raise ValueError(f"the expert has {expert.shape[-1]} logits, the merged model {ours[0].shape[-1]}")
            for meter, value in zip((before, after), ours, strict=True):
                meter.add(value, expert)
    return OutputChange(_distance(before), _distance(after), after.rows)


def _distance(meter: OutputDrift) -> OutputDistance:
    means = meter.means()
    return OutputDistance(means[LOGIT_L2], means[KL], means[AGREEMENT])


def _logits(
    run: ParkedForward, output: Any, model: nn.Module, mask: Tensor | None, share: float | None
) -> Tensor | None:
    """Logits (n, vocabulary) of the tokens or rows that count; None if the model has none."""
    with _chosen_tokens(model, mask, share) as chosen:
        if run.call is not None:
            run.resume(output)
    result, run.result = run.result, None
    logits: Tensor | None = getattr(result, "logits", None)
    if logits is None or logits.dim() == 2 or chosen:
        return None if logits is None else logits.flatten(0, -2)
    return logits[read_tokens(logits, mask, False)]


@contextmanager
def _chosen_tokens(model: Any, mask: Tensor | None, share: float | None) -> Iterator[list[int]]:
    """While open, a head over the vocabulary gets a batch's `share` of `PREDICTIONS` or `LOGIT_BYTES`, what is less.

    They are spread evenly over the tokens that count. Yields a list that is empty where there is no such head, or no
    share: a model that computes a loss needs the logits of all tokens.
    """
    chosen: list[int] = []
    head = model.get_output_embeddings()

    def choose(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        tokens = args[0]
        rows = read_tokens(tokens, mask, False).flatten().nonzero().squeeze(1)
        fitting = LOGIT_BYTES / (tokens.element_size() * len(module.weight))
        room = max(1, int((share or 0) * min(PREDICTIONS, fitting)))
        if len(rows) > room:
            rows = rows[torch.linspace(0, len(rows) - 1, room).long()]
        chosen.append(len(rows))
        return (tokens.flatten(0, 1)[rows][None], *args[1:])

    handle = None if head is None or share is None else head.register_forward_pre_hook(choose)
    try:
        yield chosen
    finally:
        if handle is not None:
            handle.remove()


def _check_whole(model: nn.Module, name: str) -> None:
    inside = {id(parameter) for block in find_blocks(model).values() for parameter in block.parameters()}
    for path, parameter in model.named_parameters():
        if parameter.is_meta and id(parameter) not in inside:
            raise ValueError(f"{name} has no {path}")
