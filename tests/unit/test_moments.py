"""Moments of a module's input: against sums written out in float64, whichever way they are kept."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from featcal_hf.features import InputFeatures
from featcal_hf.frobenius import frobenius
from featcal_hf.grams import InputMoments
from featcal_hf.moments import FEW_TOKENS, TaskInput, task_input
from featcal_hf.norm_moments import NormMoments
from featcal_hf.products import TRIANGLE_ROWS

CPU = torch.device("cpu")
TOKENS, WIDTH, OUT = 40, 12, 5
KINDS = ["gram", "narrow", "features"]


class Sample:
    """Features of one task with token weights, and its moments in float64."""

    def __init__(self, weighted: bool, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(width)
        self.student = torch.randn(TOKENS, width, generator=generator).to(dtype)
        self.expert = (self.student + 0.3 * torch.randn(TOKENS, width, generator=generator) + 0.1).to(dtype)
        self.weights = torch.rand(TOKENS, generator=generator) + 0.01 if weighted else None
        self.module = torch.randn(OUT, width, generator=generator)
        w = (torch.ones(TOKENS) if self.weights is None else self.weights).double()
        x = self.student.double()
        delta = self.expert.double() - x
        self.tokens = float(w.sum())
        self.gram = sum(w[t] * torch.outer(x[t], x[t]) for t in range(TOKENS)) / self.tokens
        self.cross = sum(w[t] * torch.outer(delta[t], x[t]) for t in range(TOKENS)) / self.tokens
        self.mean = sum(w[t] * x[t] for t in range(TOKENS)) / self.tokens
        self.shift = sum(w[t] * delta[t] for t in range(TOKENS)) / self.tokens

    def moments(self, kind: str, splits: Iterable[int] = (TOKENS,)) -> TaskInput:
        width = self.student.shape[1]
        narrow = {"module": self.module} if kind == "narrow" else {}
        moments = InputFeatures(width, CPU) if kind == "features" else InputMoments(width, TOKENS, narrow, CPU)
        start = 0
        for size in splits:
            rows = slice(start, start + size)
            weights = None if self.weights is None else self.weights[rows]
            moments.add(self.student[rows], self.expert[rows], weights)
            start += size
        assert start == TOKENS
        moments.average()
        return moments

    def gap(self) -> Tensor:
        return self.module - 0.5


def gram_of(moments: TaskInput, width: int) -> Tensor:
    lower = torch.zeros(width, width)
    moments.add_gram(lower, 1.0)
    return torch.tril(lower) + torch.tril(lower, -1).T


def answer_of(moments: TaskInput, rows: slice, gap: Tensor, expert: Tensor, alpha: float) -> Tensor:
    total = torch.zeros_like(gap)
    moments.add_answer(total, 1.0, "module", rows, gap, expert, alpha)
    return total


def close(ours: Tensor | float, exact: Tensor | float, tolerance: float = 2e-6) -> None:
    a, b = torch.as_tensor(ours).double(), torch.as_tensor(exact).double()
    assert float((a - b).norm()) <= tolerance * float(b.norm())


@pytest.mark.parametrize("weighted", [False, True], ids=["all tokens alike", "token weights"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_moment_is_the_weighted_average_over_tokens(kind: str, weighted: bool) -> None:
    sample = Sample(weighted)
    moments = sample.moments(kind)
    close(moments.tokens, sample.tokens)
    close(moments.mean, sample.mean)
    close(moments.shift, sample.shift)
    close(gram_of(moments, WIDTH), sample.gram)
    close(moments.trace(), sample.gram.trace())
    close(moments.frobenius(), sample.gram.norm())


@pytest.mark.parametrize("weighted", [False, True], ids=["all tokens alike", "token weights"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [slice(0, OUT), slice(1, 3)])
def test_the_answer_is_the_gap_times_the_gram_and_alpha_times_the_cross_moment(
    rows: slice, kind: str, weighted: bool
) -> None:
    sample = Sample(weighted)
    gap, expert = sample.gap()[rows], sample.module[rows]
    answer = answer_of(sample.moments(kind), rows, gap, expert, 0.3)
    close(answer, gap.double() @ sample.gram + 0.3 * expert.double() @ sample.cross)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_that_leave_the_drift_of_all_tasks_out_are_whole_with_it(kind: str) -> None:
    sample, rows = Sample(True), slice(1, 3)
    moments = sample.moments(kind)
    gap, expert = sample.gap()[rows], sample.module[rows]
    before = torch.ones(WIDTH, WIDTH)
    drift = moments.share_drift(before.clone(), 2.0, 0.3)
    assert drift is not None
    close(drift, before + 0.6 * sample.cross if kind == "gram" else before)
    answer = 2 * answer_of(moments, rows, gap, expert, 0.3) + (expert - gap) @ (drift - before)
    close(answer, 2 * (gap.double() @ sample.gram + 0.3 * expert.double() @ sample.cross))


@pytest.mark.parametrize("sizes", [(40,), (3, 4, 33), (17, 23)])
@pytest.mark.parametrize("weighted", [False, True], ids=["all tokens alike", "token weights"])
def test_small_batches_are_gathered_and_large_ones_used_as_they_are(
    weighted: bool, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("featcal_hf.grams.GATHERED_ROWS", 5)
    monkeypatch.setattr("featcal_hf.rows.CACHED_ROWS", 3)
    sample = Sample(weighted)
    moments = sample.moments("gram", sizes)
    close(gram_of(moments, WIDTH), sample.gram)
    close(moments.shift, sample.shift)
    gap = sample.gap()
    close(
        answer_of(moments, slice(0, OUT), gap, sample.module, 0.3),
        gap.double() @ sample.gram + 0.3 * sample.module.double() @ sample.cross,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_does_not_change_the_moments(kind: str) -> None:
    sample = Sample(True)
    moments = sample.moments(kind)
    first, second = (answer_of(moments, slice(0, OUT), sample.gap(), sample.module, 0.3) for _ in range(2))
    assert torch.equal(first, second)
    close(gram_of(moments, WIDTH), sample.gram)


@pytest.mark.parametrize("kind", KINDS)
def test_how_tokens_are_split_into_batches_does_not_matter(kind: str) -> None:
    sample = Sample(True)
    whole, parts = sample.moments(kind), sample.moments(kind, (1, 17, 0, 22))
    close(parts.tokens, whole.tokens)
    close(parts.shift, whole.shift)
    close(gram_of(parts, WIDTH), gram_of(whole, WIDTH))
    answers = [answer_of(moments, slice(0, OUT), sample.gap(), sample.module, 1.0) for moments in (whole, parts)]
    close(answers[1], answers[0])


@pytest.mark.parametrize("size", [1, 5, WIDTH - 1, WIDTH])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gram_wider_than_one_triangle_block_is_whole(kind: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featcal_hf.products.TRIANGLE_ROWS", size)
    monkeypatch.setattr("featcal_hf.products.SQUARE", size)
    sample = Sample(True)
    moments = sample.moments(kind)
    close(gram_of(moments, WIDTH), sample.gram)
    gap = sample.gap()
    close(answer_of(moments, slice(0, OUT), gap, sample.module, 0.0), gap.double() @ sample.gram)


def test_a_gram_wider_than_the_real_triangle_block_is_symmetric_to_the_last_bit() -> None:
    width = TRIANGLE_ROWS + 5
    moments = InputMoments(width, 30, {}, CPU)
    x = torch.randn(30, width, generator=torch.Generator().manual_seed(0))
    moments.add(x, x, None)
    moments.average()
    assert torch.equal(moments.gram, moments.gram.T)
    close(moments.gram, x.double().T @ x.double() / 30)


def test_the_norm_of_a_large_gram_is_exact_to_float32() -> None:
    gram = torch.randn(3000, 3000, generator=torch.Generator().manual_seed(0))
    close(frobenius(gram), gram.double().norm(), 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_features_give_a_cross_moment_and_a_shift_of_exactly_zero(kind: str) -> None:
    sample = Sample(True)
    sample.expert = sample.student.clone()
    moments = sample.moments(kind)
    assert not moments.shift.any()
    assert not answer_of(moments, slice(0, OUT), torch.zeros(OUT, WIDTH), sample.module, 1.0).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_features_are_summed_in_float32(dtype: torch.dtype, kind: str) -> None:
    sample = Sample(False, dtype=dtype)
    moments = sample.moments(kind)
    close(gram_of(moments, WIDTH), sample.gram)
    close(moments.shift, sample.shift)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["student", "expert"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_feature_that_is_not_finite_shows(value: float, where: str, kind: str) -> None:
    sample = Sample(False)
    assert sample.moments(kind).is_finite()
    getattr(sample, where)[7, 3] = value
    assert not sample.moments(kind).is_finite()


def test_features_are_kept_while_they_are_fewer_than_a_gram() -> None:
    few = int(FEW_TOKENS * WIDTH)
    assert isinstance(task_input(WIDTH, few, {}, CPU), InputFeatures)
    assert isinstance(task_input(WIDTH, few + 1, {}, CPU), InputMoments)


@pytest.mark.parametrize("weighted", [False, True])
def test_norm_moments_are_per_channel_means_of_the_input_and_its_square(weighted: bool) -> None:
    sample = Sample(weighted)
    moments = NormMoments(WIDTH, CPU)
    for rows in (slice(0, 11), slice(11, TOKENS)):
        moments.add(sample.student[rows], None if sample.weights is None else sample.weights[rows])
    moments.average()
    close(moments.tokens, sample.tokens)
    close(moments.mean, sample.mean)
    close(moments.square, sample.gram.diagonal())
    assert moments.is_finite()
    moments.add(torch.full((1, WIDTH), float("nan")), None if sample.weights is None else torch.ones(1))
    assert not moments.is_finite()
