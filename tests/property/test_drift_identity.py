"""Drift splits exactly into what a block adds and what earlier blocks pass on (paper, Proposition 1)."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from featcal_hf.drift import DriftMeter, split_drift


@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 5),
    width=st.integers(1, 33),
    scale=st.floats(1e-3, 1e3),
    moved=st.floats(0, 1),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_e_is_m_plus_p_for_any_two_blocks_and_inputs(
    seed: int, tokens: int, width: int, scale: float, moved: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def block() -> nn.Module:
        linear = nn.Linear(width, width).requires_grad_(False)
        linear.weight.copy_(torch.randn(width, width, generator=generator) / width**0.5)
        linear.bias.copy_(torch.randn(width, generator=generator))
        return nn.Sequential(linear, nn.Tanh()).to(dtype)

    expert_block, student_block = block(), block()
    expert_input = (torch.randn(1, tokens, width, generator=generator) * scale).to(dtype)
    student_input = expert_input + (moved * torch.randn(1, tokens, width, generator=generator)).to(dtype)
    student, expert, local = student_block(student_input), expert_block(expert_input), student_block(expert_input)

    e, m, p = split_drift(student, expert, local)

    size = torch.cat([part.abs().flatten() for part in (e, m, p)]).max().clamp_min(1e-6)
    assert float((e - (m + p)).abs().max()) <= 1e-5 * float(size)


@given(seed=st.integers(0, 2**31), tokens=st.integers(1, 6))
def test_the_first_block_passes_nothing_on_and_means_obey_the_triangle(seed: int, tokens: int) -> None:
    student, expert, local = torch.randn(3, 2, tokens, 8, generator=torch.Generator().manual_seed(seed))
    first, later = DriftMeter(), DriftMeter()

    first.add(student, expert, student, None)  # one input for both models: f(h^exp) is h
    later.add(student, expert, local, None)

    assert first.mean().propagation == 0
    assert first.mean().mismatch == first.mean().drift
    drift = later.mean()
    assert abs(drift.mismatch - drift.propagation) <= drift.drift + 1e-5 <= drift.mismatch + drift.propagation + 2e-5
