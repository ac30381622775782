from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from featcal_hf import Settings, calibrate_model
from featcal_hf.drift import DriftMeter, read_tokens
from featcal_hf.recipe_task import Sampling

EXPERT = torch.tensor([[[3.0, 4.0], [1.0, 0.0]], [[0.0, 2.0], [5.0, 5.0]]])
STUDENT = torch.tensor([[[3.0, 4.0], [0.0, 1.0]], [[0.0, 1.0], [7.0, 7.0]]])
LOCAL = torch.tensor([[[3.0, 0.0], [1.0, 1.0]], [[0.0, 1.0], [0.0, 0.0]]])
MASK = torch.tensor([[1, 1], [1, 0]])


def test_drift_is_the_mean_over_tokens_that_count() -> None:
    meter = DriftMeter()
    meter.add(STUDENT, EXPERT, LOCAL, MASK)
    drift = meter.mean()

    assert drift.drift == pytest.approx((0 + 2**0.5 + 1) / 3)
    assert drift.relative == pytest.approx((0 + 2**0.5 / 1 + 1 / 2) / 3)
    assert drift.mismatch == pytest.approx((4 + 1 + 1) / 3)
    assert drift.propagation == pytest.approx((4 + 1 + 0) / 3)
    assert drift.relative_mismatch == pytest.approx((4 / 5 + 1 + 1 / 2) / 3)
    assert drift.relative_propagation == pytest.approx((4 / 5 + 1 + 0) / 3)
    assert drift.cosine == pytest.approx((1 + 0 + 1) / 3)


def test_a_samples_cosine_is_the_mean_of_its_tokens_and_the_spread_is_over_samples() -> None:
    meter = DriftMeter()
    meter.add(STUDENT, EXPERT, LOCAL, MASK)

    assert meter.cosines == pytest.approx([0.5, 1.0])
    assert meter.mean().cosine_spread == pytest.approx(0.25)


def test_batches_add_up_as_if_they_were_one() -> None:
    one, two = DriftMeter(), DriftMeter()
    one.add(STUDENT, EXPERT, LOCAL, MASK)
    for row in range(2):
        part = slice(row, row + 1)
        two.add(STUDENT[part], EXPERT[part], LOCAL[part], MASK[part])

    assert two.mean() == one.mean()


def test_where_the_first_token_is_read_no_other_counts() -> None:
    meter = DriftMeter()
    meter.add(STUDENT, EXPERT, LOCAL, None, first_token_read=True)

    assert meter.mean().drift == pytest.approx((0 + 1) / 2)
    assert read_tokens(EXPERT, MASK, True).tolist() == [[True, False], [True, False]]
    assert read_tokens(EXPERT, None, False).all()


def test_a_held_out_row_passes_each_block_five_times_which_is_less_than_one_pass_over_the_calibration_rows() -> None:
    config = LlamaConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, vocab_size=64
    )
    torch.manual_seed(0)
    models = {name: LlamaForCausalLM(config).eval() for name in ("merged", "expert")}
    passes = {name: [0, 0, 0] for name in models}
    for name, model in models.items():
        for number, layer in enumerate(model.model.layers):

            def count(module, args, number=number, seen=passes[name]) -> None:
                seen[number] += args[0].shape[1] == 7  # held-out rows have a length of their own

            layer.self_attn.o_proj.register_forward_pre_hook(count)

    calibrate_model(
        models["merged"],
        experts={"task": models["expert"]},
        batches={"task": [{"input_ids": torch.arange(20).reshape(2, 10)}]},
        holdout={"task": [{"input_ids": torch.arange(14).reshape(2, 7)}]},
        settings=Settings(rho=1.0),
    )

    assert passes == {"merged": [4, 4, 4], "expert": [1, 1, 1]}
    default = Sampling()
    assert 5 * default.holdout / default.samples == 0.625
