from __future__ import annotations

import copy

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from featcal_hf import Settings, calibrate_model, outcome
from featcal_hf.outcome import project

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def models(cls, config):
    """A merged model and an expert that differ everywhere."""
    torch.manual_seed(0)
    merged, expert = cls(config).eval(), cls(config).eval()
    return merged, expert


def batches(rows: int, vocabulary: int, tokens: int = 6) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(3, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in ids.split(4)]


def run(merged, expert, rows: int = 8, tokens: int = 6):
    data = batches(rows, merged.config.vocab_size, tokens)
    report = calibrate_model(
        merged, experts={"task": expert}, batches={"task": data}, holdout={"task": data}, settings=Settings(rho=1.0)
    )
    return report.blocks[-1].outcome["task"], report


def test_coordinates_are_those_of_the_experts_principal_axes() -> None:
    expert = torch.tensor([[3.0, 1.0, 5.0], [-3.0, 1.0, 5.0], [0.0, 2.0, 5.0], [0.0, 0.0, 5.0]])
    moved = expert + torch.tensor([1.0, 0.0, 7.0])

    found = project(expert, [moved])

    assert found is not None
    shares, (first, second) = found
    assert shares == pytest.approx([18 / 20, 2 / 20])
    assert torch.allclose(first, torch.tensor([[3.0, 0], [-3, 0], [0, 1], [0, -1]]).double(), atol=1e-9)
    assert torch.allclose(second - first, torch.tensor([[1.0, 0.0]] * 4).double(), atol=1e-9)


@pytest.mark.parametrize("rows", [torch.ones(2, 4), torch.ones(8, 4)])
def test_too_few_rows_or_rows_that_are_all_the_same_have_no_axes(rows: torch.Tensor) -> None:
    assert project(rows, []) is None


def test_a_large_vocabulary_is_measured_on_as_many_tokens_as_its_logits_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = LlamaConfig(**SIZES, vocab_size=500)
    monkeypatch.setattr(outcome, "LOGIT_BYTES", 2 * 5 * 500 * 4)
    largest = []
    forward = torch.nn.Linear.forward

    def watched(self, x):
        y = forward(self, x)
        if y.shape[-1] == 500:
            largest.append(y.numel())
        return y

    monkeypatch.setattr(torch.nn.Linear, "forward", watched)
    found, _ = run(*models(LlamaForCausalLM, config))

    assert found.output is not None
    assert found.output.predictions == 2 * 5
    assert max(largest) == 5 * 500


@pytest.mark.parametrize(("rows", "tokens", "predictions"), [(8, 40, 8 * 40), (8, 100, 512), (24, 40, 510)])
def test_at_most_512_tokens_of_a_task_go_through_the_head_a_share_for_each_batch(
    rows: int, tokens: int, predictions: int
) -> None:
    config = LlamaConfig(**SIZES, vocab_size=64)
    found, _ = run(*models(LlamaForCausalLM, config), rows, tokens)

    assert found.output is not None
    assert found.output.predictions == predictions


def test_a_model_without_a_head_says_so_and_keeps_its_features() -> None:
    config = BertConfig(**SIZES, vocab_size=64)
    found, _ = run(*models(BertModel, config))

    assert found.output is None
    assert found.no_output == "BertModel has no logits"
    assert found.features is not None
    assert len(found.features.expert) == len(found.features.merged) == len(found.cosines_after) == 8


def test_heads_that_differ_in_their_classes_are_not_compared_and_calibration_goes_on() -> None:
    config = LlamaConfig(**SIZES, vocab_size=64, num_labels=3, pad_token_id=0)
    merged = models(LlamaForSequenceClassification, config)[0]
    other = copy.deepcopy(config)
    other.num_labels = 5
    expert = models(LlamaForSequenceClassification, other)[1]

    found, report = run(merged, expert)

    assert found.no_output == "ValueError: the expert has 5 logits, the merged model 3"
    assert len(report.blocks) == 2


def test_a_forward_that_fails_after_its_blocks_does_not_stop_the_calibration(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = LlamaConfig(**SIZES, vocab_size=64, num_labels=2, pad_token_id=None)
    found, report = run(*models(LlamaForSequenceClassification, config))

    assert found.output is None
    assert "Cannot handle batch sizes > 1 if no padding token is defined" in str(found.no_output)
    assert "task task: output drift can't be measured" in caplog.text
    assert report.blocks[-1].drift["task"][1].drift > 0


def test_features_of_an_expert_and_a_model_that_agree_are_the_same_points() -> None:
    config = LlamaConfig(**SIZES, vocab_size=64)
    merged, _ = models(LlamaForCausalLM, config)
    found, report = run(merged, copy.deepcopy(merged))

    assert found.features is not None
    assert found.features.merged == found.features.expert
    assert found.cosines_before == [1.0] * 8
    assert found.output is not None
    assert (found.output.before.kl, found.output.before.agreement) == (0, 1)
    assert report.as_dict()["blocks"][-1]["outcome"]["task"]["output"]["predictions"] == 48
