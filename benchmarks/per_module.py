"""FeatCal as its equations stand, one linear module at a time: what benchmarks/speed.py measures against.

Every module keeps its own Gram and target cross moment, both as full (d_in, d_in) products; token weights and target
blends are elementwise; every pass runs whole blocks; W_i C_i is formed for each module and task, and each module has
its own LU solve. For CLIP's image encoder, in memory, all models loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import CLIPVisionModel

EPSILON = 1e-8
UNREAD_TOKEN_WEIGHT = 0.01
KEYS_AND_VALUES = ("self_attn.k_proj", "self_attn.v_proj")

Hidden = dict[str, list[Tensor]]


@dataclass
class LinearSums:
    """Sums over one task's tokens for one linear module."""

    gram: Tensor
    cross: Tensor
    student: Tensor
    target: Tensor
    tokens: float = 0.0


@dataclass
class NormSums:
    """Sums over one task's tokens for one norm."""

    mean: Tensor
    square: Tensor
    tokens: float = 0.0


@torch.no_grad()
def calibrate(
    merged: CLIPVisionModel,
    base: CLIPVisionModel,
    experts: Mapping[str, CLIPVisionModel],
    pixels: Mapping[str, Sequence[Tensor]],
    lambda_: float,
    rho: float,
    alpha: float,
) -> None:
    """Calibrate `merged` in place; `pixels` are each task's batches of images."""
    student: Hidden = {task: [_embed(merged, batch) for batch in batches] for task, batches in pixels.items()}
    expert: Hidden = {task: [_embed(experts[task], batch) for batch in batches] for task, batches in pixels.items()}
    blocks = merged.encoder.layers
    for number, block in enumerate(blocks):
        last = number + 1 == len(blocks)
        linear_sides: dict[str, list[Tensor]] = {}
        norm_sides: dict[str, list[Tensor]] = {}
        for task in pixels:
            expert_block = experts[task].encoder.layers[number]
            linears, norms, expert[task] = _collect(block, expert_block, student[task], expert[task], alpha, last)
            for name, sums in linears.items():
                _add_linear(linear_sides, name, sums, expert_block.get_submodule(name))
            for name, norm_sums in norms.items():
                _add_norm(norm_sides, name, norm_sums, expert_block.get_submodule(name))
        base_block = base.encoder.layers[number]
        for name, sides in linear_sides.items():
            _solve_linear(block.get_submodule(name), base_block.get_submodule(name), sides, lambda_, rho)
        for name, sides in norm_sides.items():
            _solve_norm(block.get_submodule(name), base_block.get_submodule(name), sides, len(pixels), lambda_, rho)
        student = {task: [block(hidden, None) for hidden in batches] for task, batches in student.items()}


def _embed(model: CLIPVisionModel, pixels: Tensor) -> Tensor:
    hidden: Tensor = model.pre_layrnorm(model.embeddings(pixels))
    return hidden


def _collect(
    block: nn.Module, expert_block: nn.Module, student: list[Tensor], expert: list[Tensor], alpha: float, last: bool
) -> tuple[dict[str, LinearSums], dict[str, NormSums], list[Tensor]]:
    linears: dict[str, LinearSums] = {}
    norms: dict[str, NormSums] = {}
    outputs = []
    for x, y in zip(student, expert, strict=True):
        _, inputs = _watched(block, x)
        output, targets = _watched(expert_block, y)
        outputs.append(output)
        for name, features in inputs.items():
            weights = torch.ones(features.shape[:2])
            if last and name not in KEYS_AND_VALUES:
                weights[:, 1:] = UNREAD_TOKEN_WEIGHT
            flat = features.flatten(0, 1).float()
            module = block.get_submodule(name)
            if isinstance(module, nn.Linear):
                _add_features(linears, name, flat, targets[name].flatten(0, 1).float(), weights.flatten(), alpha)
            else:
                _add_normalised(norms, name, nn.functional.layer_norm(flat, flat.shape[1:], eps=module.eps), weights)
    return linears, norms, outputs


def _watched(block: nn.Module, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    seen: dict[str, Tensor] = {}
    handles = [
        module.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0]}))
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear | nn.LayerNorm)
    ]
    output: Tensor = block(hidden, None)
    for handle in handles:
        handle.remove()
    return output, seen


def _add_features(
    sums: dict[str, LinearSums], name: str, student: Tensor, expert: Tensor, weights: Tensor, alpha: float
) -> None:
    width = student.shape[1]
    if name not in sums:
        sums[name] = LinearSums(
            torch.zeros(width, width), torch.zeros(width, width), torch.zeros(width), torch.zeros(width)
        )
    target = (1 - alpha) * student + alpha * expert
    weighted = student * weights[:, None]
    sums[name].gram += weighted.T @ student
    sums[name].cross += target.T @ weighted
    sums[name].student += weighted.sum(0)
    sums[name].target += (target * weights[:, None]).sum(0)
    sums[name].tokens += float(weights.sum())


def _add_normalised(sums: dict[str, NormSums], name: str, normalised: Tensor, weights: Tensor) -> None:
    if name not in sums:
        sums[name] = NormSums(torch.zeros(normalised.shape[1]), torch.zeros(normalised.shape[1]))
    weighted = normalised * weights.flatten()[:, None]
    sums[name].mean += weighted.sum(0)
    sums[name].square += (weighted * normalised).sum(0)
    sums[name].tokens += float(weights.sum())


def _add_linear(sides: dict[str, list[Tensor]], name: str, sums: LinearSums, expert: nn.Module) -> None:
    """Add a task to Σ ω G, Σ ω W C, Σ ω, Σ ω μ and Σ ω (b + W τ)."""
    gram, cross = sums.gram / sums.tokens, sums.cross / sums.tokens
    weight, bias = expert.get_parameter("weight").float(), expert.get_parameter("bias").float()
    omega = 1 / torch.linalg.matrix_norm(gram).clamp_min(EPSILON)
    new = [
        omega * gram,
        omega * (weight @ cross),
        omega,
        omega * sums.student / sums.tokens,
        omega * (bias + weight @ (sums.target / sums.tokens)),
    ]
    _accumulate(sides, name, new)


def _add_norm(sides: dict[str, list[Tensor]], name: str, sums: NormSums, expert: nn.Module) -> None:
    """Add a task to Σ q, Σ m, Σ (q γ + m β) and Σ (m γ + β)."""
    mean, square = sums.mean / sums.tokens, sums.square / sums.tokens
    gamma, beta = expert.get_parameter("weight").float(), expert.get_parameter("bias").float()
    _accumulate(sides, name, [square, mean, square * gamma + mean * beta, mean * gamma + beta])


def _accumulate(sides: dict[str, list[Tensor]], name: str, new: list[Tensor]) -> None:
    sides[name] = [a + b for a, b in zip(sides[name], new, strict=True)] if name in sides else new


def _solve_linear(merged: nn.Module, base: nn.Module, sides: list[Tensor], lambda_: float, rho: float) -> None:
    gram, answer, omega, mean, bias_answer = sides
    anchor = _anchor(merged, base, "weight", rho)
    left = gram + (lambda_ + EPSILON) * torch.eye(len(gram))
    weight = torch.linalg.solve(left, answer + (lambda_ + EPSILON) * anchor, left=False)
    bias = (bias_answer - weight @ mean + lambda_ * _anchor(merged, base, "bias", rho)) / (omega + lambda_)
    merged.get_parameter("weight").copy_(weight)
    merged.get_parameter("bias").copy_(bias)


def _solve_norm(
    merged: nn.Module, base: nn.Module, sides: list[Tensor], tasks: int, lambda_: float, rho: float
) -> None:
    square, mean, gamma_side, beta_side = sides
    left = torch.stack(
        [torch.stack([square + lambda_, mean], -1), torch.stack([mean, torch.full_like(mean, tasks + lambda_)], -1)],
        -2,
    )
    right = torch.stack(
        [
            gamma_side + lambda_ * _anchor(merged, base, "weight", rho),
            beta_side + lambda_ * _anchor(merged, base, "bias", rho),
        ],
        -1,
    )
    gamma, beta = torch.linalg.solve(left, right).unbind(-1)
    merged.get_parameter("weight").copy_(gamma)
    merged.get_parameter("bias").copy_(beta)


def _anchor(merged: nn.Module, base: nn.Module, name: str, rho: float) -> Tensor:
    return rho * merged.get_parameter(name).float() + (1 - rho) * base.get_parameter(name).float()
