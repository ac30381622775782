"""The demonstration's models: a small Llama and its experts, trained on a CPU in a minute."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

OnTrainingStep = Callable[[int, float], None]


@dataclass(frozen=True)
class DemoSettings:
    """Sizes of the demonstration; the defaults were chosen on validation rows (see the module's docstring).

    Attributes:
        vocabulary: entries of the byte-level BPE tokenizer.
        width: hidden size of the Llama.
        blocks: number of its blocks.
        length: tokens of a row, in training, calibration and evaluation.
        batch_rows: rows of a training step.
        base_steps: training steps of the base, on all domains.
        expert_steps: training steps of each expert, on its domain.
        base_rate: peak learning rate of the base.
        expert_rate: peak learning rate of an expert.
        merge_weight: task arithmetic's weight of every expert.
        calibration_rows: rows per task that calibration reads.
        seed: of the splits, the initial weights and the order of the training rows.
    """

    vocabulary: int = 1024
    width: int = 128
    blocks: int = 4
    length: int = 128
    batch_rows: int = 8
    base_steps: int = 1000
    expert_steps: int = 200
    base_rate: float = 6e-3
    expert_rate: float = 3e-3
    merge_weight: float = 1.0
    calibration_rows: int = 64
    seed: int = 0


def new_model(settings: DemoSettings, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a Llama with random weights; the caller's random state stays as it is."""
    config = LlamaConfig(
        vocab_size=settings.vocabulary,
        hidden_size=settings.width,
        intermediate_size=3 * settings.width,
        num_hidden_layers=settings.blocks,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2 * settings.length,
        tie_word_embeddings=True,
        initializer_range=settings.width**-0.5,  # Llama's 0.02 is meant for widths of thousands: too slow a start here
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return LlamaForCausalLM(config)


def train(
    model: LlamaForCausalLM,
    rows: Tensor,
    steps: int,
    rate: float,
    settings: DemoSettings,
    on_step: OnTrainingStep,
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
def evaluate(model: LlamaForCausalLM, rows: Tensor) -> float:
    """Return the mean loss per token, in nats, over rows of equal length."""
    model.eval()
    losses = (float(model(input_ids=batch, labels=batch).loss) * len(batch) for batch in rows.split(32))
    return sum(losses) / len(rows)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a model and the tokenizer as a checkpoint folder that mergekit and transformers read."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
