"""Random small models, settings and data: what holds for every calibration."""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from featcal_hf import Settings, calibrate_model
from featcal_hf.activations import activations
from featcal_hf.calibrate import BlockReport, calibrate_blocks
from featcal_hf.models import ResidentModel
from featcal_hf.streams import CalibrationTask

CPU = torch.device("cpu")
FEW = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Merge:
    """Models in memory, a batch or two for each task, settings."""

    merged: PreTrainedModel
    base: PreTrainedModel
    experts: list[PreTrainedModel]
    batches: list[list[dict[str, Tensor]]]
    holdout: list[list[dict[str, Tensor]]]
    settings: Settings


def moved(model: PreTrainedModel, size: float) -> PreTrainedModel:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += size * torch.randn_like(parameter) * parameter.std(correction=0).clamp_min(0.02)
    return other


@st.composite
def merges(draw: st.DrawFn, spread: float = 0.3) -> Merge:
    torch.manual_seed(draw(st.integers(0, 2**20)))
    heads, layers = draw(st.sampled_from([1, 2, 4])), draw(st.integers(2, 4))
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "intermediate_size": draw(st.sampled_from([8, 24, 40])),
        "vocab_size": 20,
    }
    if draw(st.booleans()):
        base: PreTrainedModel = LlamaForCausalLM(
            LlamaConfig(**shape, num_key_value_heads=draw(st.sampled_from([1, heads])))
        )
    else:
        base = BertModel(BertConfig(**shape, max_position_embeddings=32))
    base = base.eval()
    tasks = draw(st.integers(1, 3))

    def batch() -> dict[str, Tensor]:
        rows, tokens = draw(st.integers(1, 4)), draw(st.integers(2, 9))
        mask = torch.ones(rows, tokens, dtype=torch.long)
        mask[:, tokens - draw(st.integers(0, 1)) :] = 0
        return {"input_ids": torch.randint(0, 20, (rows, tokens)), "attention_mask": mask}

    return Merge(
        moved(base, spread),
        base,
        [moved(base, spread) for _ in range(tasks)],
        [[batch() for _ in range(draw(st.integers(1, 2)))] for _ in range(tasks)],
        [[batch()] for _ in range(tasks)] if draw(st.booleans()) else [[] for _ in range(tasks)],
        Settings(
            lambda_=draw(st.sampled_from([None, 0.05, 3.0])),
            rho=draw(st.sampled_from([0.5, 1.0, 2.0])),
            alpha=draw(st.sampled_from([0.0, 0.3, 1.0])),
            bias=draw(st.booleans()),
            norm=draw(st.booleans()),
        ),
    )


def run(
    merge: Merge, finished: list[BlockReport], written: dict[str, dict[str, Tensor]]
) -> tuple[list[BlockReport], dict[str, dict[str, Tensor]]]:
    """Reports of all blocks, and the new parameters of those that weren't finished."""
    new: dict[str, dict[str, Tensor]] = {}

    def write(path: str, parameters: dict[str, Tensor]) -> None:
        new[path] = {name: value.clone() for name, value in parameters.items()}

    def read(path: str) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in written[path].items()}

    experts = [ResidentModel(copy.deepcopy(expert)) for expert in merge.experts]
    with tempfile.TemporaryDirectory() as folder, activations(None, Path(folder) / "spilled") as held:
        reports = calibrate_blocks(
            ResidentModel(copy.deepcopy(merge.merged)),
            ResidentModel(copy.deepcopy(merge.base)),
            [
                CalibrationTask(str(k), expert, [(b, b) for b in merge.batches[k]], [(b, b) for b in merge.holdout[k]])
                for k, expert in enumerate(experts)
            ],
            merge.settings.resolved(True),
            device=CPU,
            activations=held,
            write=write,
            on_step=lambda step: None,
            finished=finished,
            read=read,
        )
    return reports, new


def without_costs(report: BlockReport) -> BlockReport:
    return dataclasses.replace(report, seconds=0.0, costs={}, peak_bytes=None)


@FEW
@given(merge=merges(), data=st.data())
def test_going_on_from_any_block_gives_the_bits_of_an_uninterrupted_run(merge: Merge, data: st.DataObject) -> None:
    reports, written = run(merge, [], {})
    done = data.draw(st.integers(1, len(reports) - 1))
    again, rest = run(merge, reports[:done], written)
    assert list(rest) == list(written)[done:]
    for path, parameters in rest.items():
        for name, value in parameters.items():
            assert torch.equal(value, written[path][name]), (path, name)
    assert list(map(without_costs, again)) == list(map(without_costs, reports))


@FEW
@given(merge=merges())
def test_experts_that_are_the_merged_model_leave_it_as_it_is(merge: Merge) -> None:
    merged = copy.deepcopy(merge.merged)
    names = [str(number) for number in range(len(merge.experts))]
    calibrate_model(
        merged,
        base=copy.deepcopy(merge.merged),
        experts={name: copy.deepcopy(merge.merged) for name in names},
        batches=dict(zip(names, merge.batches, strict=True)),
        settings=merge.settings,
    )
    for name, value in merged.state_dict().items():
        before = merge.merged.state_dict()[name]
        assert torch.allclose(value, before, rtol=2e-6, atol=2e-7), name


@FEW
@given(merge=merges())
def test_a_large_lambda_gives_the_anchor(merge: Merge) -> None:
    merged = copy.deepcopy(merge.merged)
    names = [str(number) for number in range(len(merge.experts))]
    rho = merge.settings.rho or 2.0
    calibrate_model(
        merged,
        base=copy.deepcopy(merge.base),
        experts=dict(zip(names, map(copy.deepcopy, merge.experts), strict=True)),
        batches=dict(zip(names, merge.batches, strict=True)),
        settings=merge.settings.model_copy(update={"lambda_": 1e12, "rho": rho}),
    )
    base, before = merge.base.state_dict(), merge.merged.state_dict()
    for name, value in merged.state_dict().items():
        if not name.endswith(("proj.weight", "dense.weight", "query.weight", "key.weight", "value.weight")):
            continue
        if "pooler" in name:
            continue
        anchor = rho * before[name] + (1 - rho) * base[name]
        assert torch.allclose(value, anchor, rtol=1e-4, atol=1e-5), name
