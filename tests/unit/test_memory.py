"""How much memory a run will take: what a batch is found to take at each block, and what the estimate makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from featcal_hf.checkpoint import open_checkpoint
from featcal_hf.footprint import BlockFootprint, ModuleInput, walk
from featcal_hf.memory import Load, MemoryEstimate, estimate_memory
from featcal_hf.streamed import StreamedModel, read_config

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}
ROWS, TOKENS = 3, 40
HIDDEN = 4 * ROWS * TOKENS * 64
LOAD = Load(tokens=10_000, tasks=2, batches=10, limit=10**12, resident=500, outputs=0)


def streamed(model: PreTrainedModel, folder: Path) -> StreamedModel:
    model.save_pretrained(folder)
    return StreamedModel(open_checkpoint(folder), type(model), read_config(folder))


def llama(folder: Path, blocks: int = 2) -> StreamedModel:
    return streamed(LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=blocks)), folder)


def batch() -> dict[str, Tensor]:
    mask = torch.ones(ROWS, TOKENS, dtype=torch.long)
    mask[0, 30:] = 0
    return {"input_ids": torch.ones(ROWS, TOKENS, dtype=torch.long), "attention_mask": mask}


def estimate(model: StreamedModel, load: Load = LOAD) -> MemoryEstimate:
    found = walk(model, batch())
    return estimate_memory(((model.block_bytes(path), footprint) for path, footprint in found.items()), load)


def test_a_walk_finds_what_waits_and_what_modules_read_without_loading_a_block(tmp_path: Path) -> None:
    model = llama(tmp_path)
    found = walk(model, batch())
    assert list(found) == ["layers.0", "layers.1"]
    mask, rotary = ROWS * TOKENS * TOKENS, 2 * 4 * TOKENS * 16
    positions = 8 * TOKENS
    assert found["layers.0"].waiting == pytest.approx(HIDDEN + mask + rotary + positions, rel=0.02)
    assert found["layers.1"].waiting == pytest.approx(2 * HIDDEN + mask + rotary + positions, rel=0.02)
    readers = {each.linears for each in found["layers.1"].inputs}
    assert readers == {(), ((64, 64), (32, 64), (32, 64)), ((64, 64),), ((192, 64), (192, 64)), ((64, 192),)}
    assert {each.bytes for each in found["layers.1"].inputs} == {HIDDEN, 3 * HIDDEN}
    assert all(parameter.is_meta for parameter in model.module.parameters())


def test_where_a_block_cannot_be_walked_every_module_is_taken_to_read_all_tokens(tmp_path: Path) -> None:
    config = MixtralConfig(**SHAPE, num_hidden_layers=2, num_local_experts=2, num_experts_per_tok=1)
    model = streamed(MixtralForCausalLM(config), tmp_path)
    for block in model.blocks.values():
        block.self_attn.register_forward_pre_hook(lambda *_: torch.empty(1, device="meta").item())
    found = walk(model, batch())
    assert list(found) == ["layers.0", "layers.1"]
    assert [each.linears for each in found["layers.1"].inputs].count(((64, 64),)) == 2
    assert {each.bytes for each in found["layers.1"].inputs} == {HIDDEN}


def test_memory_does_not_depend_on_depth_and_hardly_on_the_number_of_experts(tmp_path: Path) -> None:
    shallow, deep = llama(tmp_path / "2", 2), llama(tmp_path / "4", 4)
    assert estimate(deep) == estimate(shallow)
    two, four = (estimate(shallow, replace(LOAD, tokens=100 * tasks, tasks=tasks)).peak for tasks in (2, 4))
    assert two <= four < 1.1 * two


def test_what_waits_grows_with_the_batches_and_past_the_limit_it_is_in_files(tmp_path: Path) -> None:
    model = llama(tmp_path)
    few, many = estimate(model), estimate(model, replace(LOAD, batches=30))
    assert many.waiting == 3 * few.waiting
    assert (few.in_files, many.in_files) == (0, 0)
    assert many.peak - few.peak == many.waiting - few.waiting
    limited = estimate(model, replace(LOAD, batches=30, limit=few.waiting))
    assert limited == MemoryEstimate(few.peak, many.waiting, many.waiting - few.waiting)


def test_a_block_takes_three_models_weights_and_a_system_for_each_input() -> None:
    group = ModuleInput(((4000, 3000), (1000, 3000)), 3000, 0)
    small, large = (
        estimate_memory([(stored, BlockFootprint(0, (group,)))], LOAD).peak for stored in (10**9, 2 * 10**9)
    )
    assert large - small == pytest.approx(4 * 10**9, rel=0.01)  # merged, base, expert, and the new weights
    weights = estimate_memory([(0, BlockFootprint(0, (group,)))], LOAD).peak
    gram_and_sides = 4 * 3000 * (3000 + 5000)
    gram_and_cross = 4 * 3000 * 2 * 3000
    assert weights - LOAD.resident > gram_and_sides + gram_and_cross


def test_heads_and_logits_of_held_out_rows_count_where_they_take_more_than_a_block(tmp_path: Path) -> None:
    model = llama(tmp_path)
    small, large = (estimate(model, replace(LOAD, outputs=outputs)).peak for outputs in (1, 10**12))
    assert small == estimate(model).peak
    assert large > 10**12
