"""Measures against values computed by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from featcal_hf.errors import DataError
from featcal_hf.eval_report import Line, harness_lines
from featcal_hf.eval_table import cells, remarks
from featcal_hf.evaluate import (
    ACCURACY,
    AGREEMENT,
    COSINE,
    EXACT_MATCH,
    KL,
    LOGIT_L2,
    LOSS,
    PERPLEXITY,
    SPEARMAN,
    Metric,
    OutputDrift,
    class_embeddings,
    hits,
    is_exact,
    mean,
    next_tokens,
    parse_number,
    perplexity,
    ranks,
    recovered,
    spearman,
    total_loss,
    zero_shot_logits,
)
from featcal_hf.harness import parse_results, read_results

LOG = math.log


def test_the_loss_of_a_token_is_minus_the_log_of_its_probability() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]).log()
    assert total_loss(logits, torch.tensor([1, 1])) == pytest.approx(-LOG(0.25) - LOG(0.8))
    assert total_loss(logits.repeat(1500, 1), torch.tensor([1, 1] * 1500)) == pytest.approx(
        1500 * (-LOG(0.25) - LOG(0.8)), rel=1e-5
    )


def test_padding_and_prompts_are_not_scored_and_tokens_are_predicted_from_those_before() -> None:
    ids = torch.tensor([[5, 1, 2, 0], [6, 3, 4, 7]])
    scored = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1]], dtype=torch.bool)
    logits = torch.arange(2 * 4 * 8, dtype=torch.float32).reshape(2, 4, 8)
    picked, targets = next_tokens(logits, ids, scored)
    assert targets.tolist() == [1, 2, 4, 7]
    assert torch.equal(picked, torch.stack([logits[0, 0], logits[0, 1], logits[1, 1], logits[1, 2]]))
    garbage = logits.clone()
    garbage[0, 2:], garbage[1, 0], garbage[1, 3] = 1e4, -1e4, 1e4
    assert torch.equal(next_tokens(garbage, ids, scored)[0], picked)


def test_perplexity_is_exp_of_the_mean_loss_and_no_value_is_none() -> None:
    assert perplexity(LOG(12)) == pytest.approx(12)
    assert perplexity(1e4) is None
    assert perplexity(None) is None
    assert mean(3.0, 4) == 0.75
    assert mean(0.0, 0) is None
    assert mean(float("nan"), 3) is None


def test_accuracy_counts_the_rows_whose_largest_logit_is_the_label() -> None:
    logits = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0]])
    assert hits(logits, torch.tensor([1, 0, 0])) == 2


def test_answers_are_compared_without_whitespace_around_them() -> None:
    assert is_exact(" 42\n", "42")
    assert not is_exact("4 2", "42")
    assert not is_exact("42.", "42")


@pytest.mark.parametrize(
    ("text", "number"),
    [(" 3.5\n", 3.5), ("-2", -2.0), (".5", 0.5), ("1e2", 100.0), ("3 stars", None), ("", None), ("nan", None)],
)
def test_a_number_is_a_number_alone(text: str, number: float | None) -> None:
    assert parse_number(text) == number


def test_a_number_too_large_for_a_float_is_none() -> None:
    assert parse_number("1e999") is None


def test_equal_values_share_the_mean_of_their_ranks() -> None:
    assert ranks([10, 30, 20, 20]).tolist() == [1.0, 4.0, 2.5, 2.5]


def test_spearman_is_the_correlation_of_ranks() -> None:
    # no ties: 1 - 6 Σd² / n(n²-1) with d = (0, 1, -1, 0)
    assert spearman([1, 2, 3, 4], [1, 30, 20, 400]) == pytest.approx(1 - 6 * 2 / (4 * 15))
    # ranks (1, 2.5, 2.5, 4) and (1, 2, 3, 4): Σ(x-2.5)(y-2.5) = 4.5 over √(4.5 · 5)
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert spearman([2, 2, 2], [1, 2, 3]) is None
    assert spearman([2], [1]) is None


def test_drift_of_logits_is_their_distance_their_divergence_and_their_agreement() -> None:
    expert = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    model = torch.tensor([[0.25, 0.75], [0.8, 0.2]]).log()
    drift = OutputDrift(logits=True)
    drift.add(model[:1], expert[:1])
    drift.add(model[1:], expert[1:])
    first = math.hypot(LOG(0.5 / 0.25), LOG(0.5 / 0.75))
    second = math.hypot(LOG(0.9 / 0.8), LOG(0.1 / 0.2))
    divergence = 0.5 * LOG(2) + 0.5 * LOG(2 / 3) + 0.9 * LOG(9 / 8) + 0.1 * LOG(1 / 2)
    assert drift.rows == 2
    assert drift.means() == {
        LOGIT_L2: pytest.approx((first + second) / 2),
        KL: pytest.approx(divergence / 2, rel=1e-5),
        AGREEMENT: pytest.approx(0.5),  # the first row's two largest are equal, and the first of them is taken
    }


def test_masked_logits_do_not_make_the_divergence_undefined_and_nan_does() -> None:
    drift = OutputDrift(logits=True)
    drift.add(torch.tensor([[0.0, -torch.inf]]), torch.tensor([[0.0, -torch.inf]]))
    assert drift.means()[KL] == 0.0
    drift.add(torch.tensor([[torch.nan, 0.0]]), torch.tensor([[0.0, 0.0]]))
    assert drift.means()[KL] is None


def test_drift_of_pooled_outputs_is_their_cosine() -> None:
    drift = OutputDrift(logits=False)
    drift.add(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[2.0, 0.0], [1.0, 0.0]]))
    assert drift.means() == {COSINE: pytest.approx((1 + math.sqrt(0.5)) / 2)}
    assert OutputDrift(logits=False).means() == {}


def test_a_class_is_the_mean_of_its_unit_sentences_and_images_are_compared_by_cosine() -> None:
    classes = class_embeddings([torch.tensor([[2.0, 0.0], [0.0, 5.0]]), torch.tensor([[0.0, 1.0], [0.0, 3.0]])])
    half = math.sqrt(0.5)
    assert torch.allclose(classes, torch.tensor([[half, half], [0.0, 1.0]]))
    assert torch.allclose(
        zero_shot_logits(torch.tensor([[0.0, 7.0]]), classes, 10.0), torch.tensor([[10 * half, 10.0]])
    )


@pytest.mark.parametrize(
    ("metric", "expert", "merged", "calibrated", "share"),
    [
        (LOSS, 2.0, 3.0, 2.25, 0.75),
        (ACCURACY, 0.9, 0.7, 0.85, 0.75),
        (ACCURACY, 0.9, 0.7, 0.65, -0.25),
        (LOSS, 2.00001, 2.00002, 2.0, None),
        (LOSS, 3.0, 2.0, 1.0, None),
        (EXACT_MATCH, 0.5, 0.5, 0.6, None),
        (LOSS, None, 3.0, 2.0, None),
        (LOSS, 2.0, 3.0, None, None),
    ],
)
def test_the_recovered_share_of_a_gap(
    metric: Metric, expert: float | None, merged: float | None, calibrated: float | None, share: float | None
) -> None:
    assert recovered(metric, expert, merged, calibrated) == (None if share is None else pytest.approx(share))


def test_a_line_shows_its_numbers_and_never_nan() -> None:
    assert cells(Line("a", LOSS, {"expert": 2.0, "merged": 3.0, "calibrated": 2.25})) == [
        "2.0000",
        "3.0000",
        "2.2500",
        "75%",
    ]
    assert cells(Line("a", EXACT_MATCH, {"expert": 0.5, "merged": 0.5, "calibrated": 0.25}))[3] == "no gap"
    assert cells(Line("a", SPEARMAN, {"merged": None, "calibrated": 0.5})) == ["–", "undefined", "0.500", "–"]
    assert cells(Line("a", LOGIT_L2, {"merged": 2.0, "calibrated": 0.5})) == ["–", "2.000", "0.500", "75%"]
    assert cells(Line("a", AGREEMENT, {"merged": 0.6, "calibrated": 0.8})) == ["–", "60.0%", "80.0%", "50%"]
    assert cells(Line("a", PERPLEXITY, {"calibrated": 11.5})) == ["–", "–", "11.50", "–"]
    counts = {"merged": {"unparsable_answers": 3}, "calibrated": {"unparsable_answers": 0}}
    assert remarks({"counts": counts, "notes": ["why"]}) == [
        "answers that are no number, left out of Spearman's ρ: merged 3, calibrated 0",
        "why",
    ]


RESULTS = {
    "results": {
        "gsm8k": {
            "alias": "gsm8k",
            "exact_match,strict-match": 0.5,
            "exact_match_stderr,strict-match": 0.01,
            "exact_match,flexible-extract": 0.6,
            "exact_match_stderr,flexible-extract": "N/A",
            "sample_len": 100,
        },
        "wikitext": {"word_perplexity,none": 12.5, "word_perplexity_stderr,none": "N/A"},
        "mmlu": {"acc,none": 0.4, "alias": "mmlu"},
        "mmlu_law": {"acc,none": 0.3, "alias": " - law"},
    },
    "group_subtasks": {"mmlu": ["mmlu_law"], "gsm8k": []},
    "higher_is_better": {"gsm8k": {"exact_match": True}, "mmlu": {"acc": True}},
    "config": {"model": "hf", "model_args": "pretrained=here/merged,dtype=auto"},
}


def test_results_of_the_harness_are_read_with_their_filters_and_directions() -> None:
    found = {(score.task, score.metric.name): score for score in parse_results(RESULTS)}
    assert {key: score.value for key, score in found.items()} == {
        ("gsm8k", "exact_match (strict-match)"): 0.5,
        ("gsm8k", "exact_match (flexible-extract)"): 0.6,
        ("wikitext", "word_perplexity"): 12.5,
        ("mmlu", "acc"): 0.4,
    }
    assert [score.metric.higher_is_better for score in found.values()] == [True, True, False, True]


def test_a_results_file_tells_which_model_it_is_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "results_1.json"
    file.write_text(json.dumps(RESULTS))
    folders = {"merged": tmp_path / "here" / "merged", "calibrated": tmp_path / "out"}
    assert read_results(str(file), folders)[0] == "merged"
    assert read_results(f"calibrated={file}", folders)[0] == "calibrated"
    assert read_results(f"expert={file}", folders)[0] == "expert"
    with pytest.raises(DataError, match=r"is about here/merged, which is none of .*merged=.*results_1.json"):
        read_results(str(file), {"calibrated": tmp_path / "out"})
    lines = harness_lines([read_results(f"{label}={file}", folders) for label in ("merged", "calibrated")])
    assert lines[0].values == {"merged": 0.5, "calibrated": 0.5}
    with pytest.raises(DataError, match="two files have exact_match"):
        harness_lines([read_results(str(file), folders)] * 2)
    for content, problem in {
        "[": "can't be read",
        "{}": "has no `results`",
        '{"results": 1}': "has no `results`",
    }.items():
        file.write_text(content)
        with pytest.raises(DataError, match=problem):
            read_results(str(file), folders)
    with pytest.raises(DataError, match="can't be read"):
        read_results("nowhere.json", folders)
