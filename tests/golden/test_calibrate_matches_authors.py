"""The product against results computed by the authors' code, and against the float64 oracle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from oracle import calibrate as oracle_calibrate
from safetensors import safe_open
from transformers import CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from featcal_hf import Settings, calibrate_model

GOLDEN = Path(__file__).parent / "featcal_clip_tiny.safetensors"


class Golden:
    def __init__(self) -> None:
        with safe_open(GOLDEN, framework="pt") as file:
            metadata = file.metadata()
            self.tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        self.config = CLIPVisionConfig(**json.loads(metadata["config"]))
        self.tasks = json.loads(metadata["tasks"])
        self.runs = json.loads(metadata["runs"])
        self.batch_size = int(metadata["batch_size"])

    def model(self, prefix: str) -> CLIPVisionModel:
        model = CLIPVisionModel(self.config).eval()
        state = {
            name.removeprefix(f"{prefix}/"): t for name, t in self.tensors.items() if name.startswith(prefix + "/")
        }
        model.load_state_dict(state, strict=True)
        return model

    def batches(self, task: str, batch_size: int | None = None) -> list[dict[str, torch.Tensor]]:
        pixels = self.tensors[f"pixels/{task}"]
        return [{"pixel_values": part} for part in pixels.split(batch_size or self.batch_size)]


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden()


def calibrated(golden: Golden, run: str, tasks: list[str], batch_size: int | None = None) -> dict[str, torch.Tensor]:
    merged = golden.model("merged")
    numbers = dict(golden.runs[run])
    calibrate_model(
        merged,
        base=golden.model("base"),
        experts={task: golden.model(f"expert/{task}") for task in tasks},
        batches={task: golden.batches(task, batch_size) for task in tasks},
        settings=Settings(lambda_=numbers.pop("lambda"), **numbers),
    )
    return merged.state_dict()


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


@pytest.mark.parametrize("run", ["paper", "weights_only", "aggressive"])
def test_every_calibrated_parameter_agrees_with_the_authors_to_1e_4(golden: Golden, run: str) -> None:
    ours = calibrated(golden, run, golden.tasks)
    prefix = f"calibrated/{run}/"
    expected = {name.removeprefix(prefix): t for name, t in golden.tensors.items() if name.startswith(prefix)}
    errors = {name: relative_error(ours[name], value) for name, value in expected.items()}
    assert max(errors.values()) < 1e-4, max(errors.items(), key=lambda item: item[1])
    for name, value in ours.items():
        if name not in expected:
            assert torch.equal(value, golden.tensors[f"merged/{name}"]), name


def test_neither_batch_split_nor_task_order_changes_the_result(golden: Golden) -> None:
    reference = calibrated(golden, "paper", golden.tasks)
    other = calibrated(golden, "paper", golden.tasks[::-1], batch_size=5)
    for name, value in reference.items():
        assert relative_error(other[name], value) < 1e-5 if value.norm() else True, name


def llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=88,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=61,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def near(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(seed)
    copy = llama(0)
    copy.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in copy.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += 0.2 * parameter.std().nan_to_num(0.1).clamp_min(0.02) * noise
    return copy


def padded_batches(seed: int, count: int, rows: int, tokens: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        ids = torch.randint(0, 61, (4, 20), generator=generator)
        mask = torch.ones_like(ids)
        for row, length in enumerate((20, 13, 7, 16)):
            mask[row, length:] = 0
        batches.append({"input_ids": ids, "attention_mask": mask})
    return [{name: value[:rows, :tokens] for name, value in batch.items()} for batch in batches]


@pytest.mark.parametrize(
    ("batch_count", "rows", "tokens"),
    [(3, 4, 20), (1, 4, 20), (1, 1, 8)],
    ids=[
        "more tokens than inputs",
        "a task has fewer than the MLP's inputs",
        "all tasks together have fewer than any module's inputs",
    ],
)
@pytest.mark.parametrize("adaptive", [False, True], ids=["lambda 0.05", "adaptive"])
def test_a_padded_llama_agrees_with_the_float64_oracle(
    adaptive: bool, batch_count: int, rows: int, tokens: int
) -> None:
    base = llama(0)
    experts = {"a": near(base, 1), "b": near(base, 2)}
    merged = near(base, 3)
    batches = {"a": padded_batches(4, batch_count, rows, tokens), "b": padded_batches(5, batch_count, rows, tokens)}
    expected = oracle_calibrate(
        merged,
        base,
        experts,
        batches,
        lambda_=0.05,
        rho=2.0,
        alpha=0.3,
        bias=True,
        norm=True,
        scale="trace" if adaptive else "frobenius",
        adaptive=adaptive,
    )
    settings = Settings(lambda_=None if adaptive else 0.05, rho=2.0, alpha=0.3)
    calibrate_model(merged, base=base, experts=experts, batches=batches, settings=settings)
    ours = merged.state_dict()
    assert len(expected) == 3 * 9
    for name, value in expected.items():
        assert relative_error(ours[name], value) < 2e-5, name
