"""The plan of a run: what it counts, and what its estimates depend on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from featcal_hf.checkpoint import open_checkpoint
from featcal_hf.memory import MemoryEstimate
from featcal_hf.plan import Plan, make_plan
from featcal_hf.recipe import Settings
from featcal_hf.streamed import StreamedModel, read_config

MEMORY = MemoryEstimate(1000, 100, 10)


def student(folder: Path, blocks: int) -> StreamedModel:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        attention_bias=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return StreamedModel(open_checkpoint(folder), LlamaForCausalLM, read_config(folder))


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> StreamedModel:
    return student(tmp_path_factory.mktemp("shallow"), 2)


def plan(
    model: StreamedModel, tokens: int = 10_000, tasks: int = 2, settings: Settings | None = None, held_out: int = 0
) -> Plan:
    return make_plan(model, settings or Settings(), {f"t{i}": tokens for i in range(tasks)}, held_out, MEMORY, 7)


def test_it_counts_what_is_calibrated_and_names_what_is_kept(shallow: StreamedModel) -> None:
    everything = plan(shallow)
    assert (everything.blocks, everything.linears, everything.norms, everything.kept) == (2, 14, 4, {})
    weights_only = plan(shallow, settings=Settings(bias=False, norm=False))
    assert (weights_only.linears, weights_only.norms) == (14, 0)
    kept = [name for names in weights_only.kept.values() for name in names]
    assert len(kept) == 2 * (4 + 2)
    assert "layers.0.self_attn.q_proj.bias" in kept
    assert "layers.1.input_layernorm.weight" in kept


def test_work_grows_with_blocks_and_tokens_and_disk_is_what_was_given(shallow: StreamedModel, tmp_path: Path) -> None:
    deep = plan(student(tmp_path, 4))
    assert deep.flops == pytest.approx(2 * plan(shallow).flops)
    base, once, twice = (plan(shallow, tokens=tokens).flops for tokens in (0, 10_000, 20_000))
    assert twice - once == pytest.approx(once - base)
    assert replace(deep).disk_bytes == 7
    assert deep.memory == MEMORY


def test_drift_is_five_forwards_of_the_held_out_tokens_beside_three_of_the_others(shallow: StreamedModel) -> None:
    without, measured = plan(shallow), plan(shallow, held_out=2500)
    weights = sum(parameter.numel() for block in shallow.blocks.values() for parameter in block.parameters())

    assert (without.drift_passes, measured.drift_passes) == (0, 5 * 2500 / 20_000)
    assert measured.flops - without.flops == pytest.approx(2 * weights * 5 * 2500)
