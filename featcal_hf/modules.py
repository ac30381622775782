"""The modules of a block that have a closed-form update: linear layers and norms."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.pytorch_utils import Conv1D

KEY_VALUE_NAMES = frozenset({"k_proj", "v_proj", "key", "value", "k", "v"})


def linear_names(block: nn.Module) -> list[str]:
    """Paths of the linear modules in a block, in the order of their definition."""
    return [name for name, module in block.named_modules() if isinstance(module, (nn.Linear, Conv1D))]


def linear_weight(module: nn.Module) -> Tensor:
    """A linear module's weight as (d_out, d_in); GPT-2's Conv1D stores its transpose."""
    weight = module.get_parameter("weight").detach()
    return weight.T if isinstance(module, Conv1D) else weight


def stored_weight(module: nn.Module, weight: Tensor) -> Tensor:
    """A (d_out, d_in) weight in the orientation and dtype in which the module stores it."""
    stored = weight.T if isinstance(module, Conv1D) else weight
    return stored.to(module.get_parameter("weight").dtype).contiguous()


def bias_of(module: nn.Module) -> Tensor | None:
    """A module's bias (d_out,), None where it has none."""
    bias = getattr(module, "bias", None)
    return None if bias is None else bias.detach()


def reads_keys_or_values(name: str) -> bool:
    """Whether a linear module makes attention keys or values, which read every token."""
    return name.rpartition(".")[2] in KEY_VALUE_NAMES


@dataclass(frozen=True)
class Norm:
    """A norm with a per-channel affine γ (and β).

    Attributes:
        name: path in the block.
        offset: what is added to the stored weight to give γ: 1 in Gemma's norms, 0 elsewhere.
        width: its channels.
    """

    name: str
    offset: float
    width: int

    def gamma(self, block: nn.Module) -> Tensor:
        """γ in float32."""
        return block.get_submodule(self.name).get_parameter("weight").detach().float() + self.offset

    def normalise(self, block: nn.Module, features: Tensor) -> Tensor:
        """z: the module's float32 output for γ = 1, β = 0."""
        module = block.get_submodule(self.name)
        return _with_affine(module, 1.0 - self.offset, features.float())


def norms_of(block: nn.Module) -> list[Norm]:
    """The norms of a block, found by what they do rather than by their class names.

    A module without children, whose parameters are a vector ``weight`` (and a ``bias``), is a norm with γ = weight
    if its output vanishes for weight 0, and one with γ = 1 + weight if its output doubles from weight 0 to 1.
    """
    found = []
    for name, module in block.named_modules():
        parameters = dict(module.named_parameters())
        weight = parameters.get("weight")
        if weight is None or weight.dim() != 1 or set(parameters) - {"weight", "bias"}:
            continue
        if isinstance(module, (nn.GroupNorm, nn.modules.batchnorm._NormBase)) or not _takes_one_tensor(module):
            continue
        offset = _affine_offset(module, weight)
        if offset is not None:
            found.append(Norm(name, offset, weight.numel()))
    return found


def _affine_offset(module: nn.Module, weight: Tensor) -> float | None:
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(1, 2, weight.numel(), generator=generator)
    if weight.device.type != "meta":
        probe = probe.to(weight.device)
    at_zero = _with_affine(module, 0.0, probe)
    at_one = _with_affine(module, 1.0, probe)
    if not at_zero.any() and at_one.any():
        return 0.0
    if at_zero.any() and torch.allclose(at_one, 2 * at_zero, rtol=1e-5, atol=1e-6):
        return 1.0
    return None


def _takes_one_tensor(module: nn.Module) -> bool:
    arguments = inspect.signature(module.forward).parameters.values()
    return sum(argument.default is argument.empty for argument in arguments) == 1


def _with_affine(module: nn.Module, weight: float, features: Tensor) -> Tensor:
    parameters = {
        name: torch.full(parameter.shape, weight if name == "weight" else 0.0, device=features.device)
        for name, parameter in module.named_parameters()
    }
    output: Tensor = functional_call(module, parameters, (features,))
    return output.float()
