"""The demonstrations' models: a small Llama, experts of a base, and what they are worth, on a CPU in minutes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

OnTrainingStep = Callable[[int, float], None]


@dataclass(frozen=True)
class DemoSettings:
    """Sizes of a demonstration; chosen on validation rows (see `demo.py` and `demo_smollm2.py`).

    Attributes:
        length: tokens of a row, in training, calibration and evaluation.
        batch_rows: rows of a training step.
        expert_steps: training steps of each expert, on its domain.
        expert_rate: peak learning rate of an expert.
        merge_weight: task arithmetic's weight of every expert.
        rho: the anchor; 1 where the merge holds the experts' whole changes already, None for the default.
        calibration_rows: rows per task that calibration reads.
        dtype: of the checkpoints and the merge: `float32` or `bfloat16`.
        seed: of the splits, the initial weights and the order of the training rows.
    """

    length: int = 128
    batch_rows: int = 8
    expert_steps: int = 200
    expert_rate: float = 3e-3
    merge_weight: float = 1.0
    rho: float | None = 1.0
    calibration_rows: int = 64
    dtype: str = "float32"
    seed: int = 0


@dataclass(frozen=True)
class BaseSettings:
    """Sizes of the small Llama that `featcal-hf demo` trains as its base.

    Attributes:
        vocabulary: entries of the byte-level BPE tokenizer.
        width: hidden size.
        blocks: number of blocks.
        steps: training steps, on all domains.
        rate: peak learning rate.
    """

    vocabulary: int = 1024
    width: int = 128
    blocks: int = 4
    steps: int = 1000
    rate: float = 6e-3


def new_model(base: BaseSettings, settings: DemoSettings, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """Return a Llama with random weights; the caller's random state stays as it is."""
    config = LlamaConfig(
        vocab_size=base.vocabulary,
        hidden_size=base.width,
        intermediate_size=3 * base.width,
        num_hidden_layers=base.blocks,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2 * settings.length,
        tie_word_embeddings=True,
        initializer_range=base.width**-0.5,  # Llama's 0.02 is meant for widths of thousands: too slow a start here
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return LlamaForCausalLM(config)


def train(
    model: nn.Module, rows: Tensor, steps: int, rate: float, settings: DemoSettings, on_step: OnTrainingStep
) -> None:
    """Train the parameters that require a gradient with AdamW: a tenth of the steps up, then down to zero."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, 10 * (step + 1) / steps) * (1 - step / steps)
    )
    batches = _batches(len(rows), settings.batch_rows, settings.seed)
    model.train()
    for step in range(steps):
        batch = rows[next(batches)]
        with _matmuls(settings.dtype):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        on_step(step + 1, loss.item())


def _batches(rows: int, size: int, seed: int) -> Iterator[list[int]]:
    """Yield `size` row numbers at a time, every row once before any comes again, for ever."""
    chance, waiting = random.Random(seed), list[int]()
    while True:
        while len(waiting) < size:
            waiting += chance.sample(range(rows), rows)
        yield waiting[:size]
        waiting = waiting[size:]


def _matmuls(dtype: str) -> AbstractContextManager[object]:
    """Multiply in bfloat16 if that is the checkpoints' dtype and the CPU has units for it (AMX: 7 times as fast)."""
    # Older versions of torch can not be asked. Without the units bfloat16 is the slower one, and no better.
    has_units = hasattr(torch.cpu, "get_capabilities") and torch.cpu.get_capabilities().get("amx_bf16", False)
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16" and has_units)


def train_expert(
    base: LlamaForCausalLM, rows: Tensor, settings: DemoSettings, on_step: OnTrainingStep
) -> LlamaForCausalLM:
    """Fine-tune a copy of the base on one domain: its blocks alone, as LoRA does; calibration moves no others."""
    expert = deepcopy(base)
    expert.requires_grad_(False)
    expert.model.layers.requires_grad_(True)
    train(expert, rows, settings.expert_steps, settings.expert_rate, settings, on_step)
    return expert


@torch.no_grad()
def evaluate(model: nn.Module, rows: Tensor, dtype: str = "float32") -> float:
    """Return the mean loss per token, in nats, over rows of equal length; `dtype` is that of the checkpoints."""
    model.eval()
    losses = []
    for batch in rows.split(32):
        with _matmuls(dtype):
            losses.append(float(model(input_ids=batch, labels=batch).loss) * len(batch))
    return sum(losses) / len(rows)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: str) -> None:
    """Write a model and the tokenizer as a checkpoint folder that mergekit and transformers read."""
    copied = deepcopy(model)
    nn.Module.to(copied, getattr(torch, dtype))
    copied.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
