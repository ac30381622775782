"""PEFT adapters as experts: a block of the base with the adapter's deltas merged into it, and no full model anywhere.

The block is put into empty modules so that its path is the model's, PEFT's own tuner wraps it, the adapter's tensors of
that block are loaded and merged in float32, and the result is cast once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from peft import PeftConfig, get_peft_model_state_dict, set_peft_model_state_dict
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from featcal_hf.errors import CheckpointError
from featcal_hf.streamed import StreamedModel

PEFT_PREFIX = "base_model.model."
ADAPTER = "default"
TOKENS_SUFFIX = ".token_adapter.trainable_tokens_delta"


@dataclass(frozen=True)
class Adapter:
    """A saved PEFT adapter: its config and the names of its tensors, none of them loaded.

    Attributes:
        folder: the local folder.
        config: PEFT's config.
        names: tensor name without PEFT's prefix -> name in the file.
        file: the weight file.
    """

    folder: Path
    config: PeftConfig
    names: dict[str, str]
    file: Path

    def tensors(self, names: list[str]) -> dict[str, Tensor]:
        """Some of its tensors, in memory."""
        if self.file.suffix == ".bin":
            state = torch.load(self.file, map_location="cpu", weights_only=True, mmap=True)
            return {name: state[self.names[name]].clone() for name in names}
        with safe_open(self.file, framework="pt") as file:
            return {name: file.get_tensor(self.names[name]).clone() for name in names}

    def check_finite(self, label: str) -> None:
        """Refuse NaN and infinity.

        Raises:
            CheckpointError: names the tensor.
        """
        for name in self.names:
            if not bool(self.tensors([name])[name].isfinite().all()):
                raise CheckpointError(
                    f"{label} {self.file}: tensor {name} holds NaN or infinity; the adapter is broken, train or "
                    "download it again."
                )


def open_adapter(folder: Path) -> Adapter:
    """Read an adapter's config and tensor names.

    Raises:
        CheckpointError: not an adapter, one that doesn't change weights (prompt and prefix tuning), or unreadable.
    """
    if not (folder / "adapter_config.json").is_file():
        raise CheckpointError(f"{folder} has no adapter_config.json; expected a PEFT adapter after the '+'.")
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{folder}/adapter_config.json can't be read by PEFT: {error}") from error
    if config.peft_type not in PEFT_TYPE_TO_TUNER_MAPPING or config.is_prompt_learning:
        raise CheckpointError(
            f"{folder} is a {config.peft_type} adapter, which adds inputs rather than changing weights; only adapters "
            "that merge into weights (LoRA, DoRA, IA3, ...) can be experts."
        )
    for name in ("adapter_model.safetensors", "adapter_model.bin"):
        if (folder / name).is_file():
            return Adapter(folder, config, _tensor_names(folder / name), folder / name)
    raise CheckpointError(f"{folder} has no adapter_model.safetensors or adapter_model.bin.")


class AdaptedModel:
    """A streamed base model with an adapter: what `StreamedModel` is, with the deltas in every block.

    Raises:
        CheckpointError: the adapter's tensors are not the ones that its config makes on this model.
    """

    def __init__(self, base: StreamedModel, adapter: Adapter) -> None:
        self.base, self.adapter = base, adapter
        self.module: PreTrainedModel = base.module
        self._open: set[str] = set()
        self._check_names()
        in_blocks = tuple(f"{real}." for real in base.block_names.values())
        outer = [name for name in adapter.names if not name.startswith(in_blocks)]
        self._replaced = {name.replace(".base_layer.", "."): name for name in outer if self._is_parameter(name)}
        self._new_tokens = [name for name in outer if name.endswith(TOKENS_SUFFIX)]
        self._outer = [name for name in outer if name not in {*self._replaced.values(), *self._new_tokens}]

    def fixed(self, path: str) -> dict[str, str]:
        """As the base's."""
        return self.base.fixed(path)

    @contextmanager
    def outer(self) -> Iterator[None]:
        """Everything outside the blocks, with the adapter's changes to it."""
        with self.base.outer():
            for name, value in self.adapter.tensors(list(self._replaced.values())).items():
                self._set(name.replace(".base_layer.", "."), value)
            for name, rows in self.adapter.tensors(self._new_tokens).items():
                weight = f"{name.removesuffix(TOKENS_SUFFIX)}.weight"
                replaced = self.module.get_parameter(weight).detach().clone()
                replaced[_token_indices(self.adapter.config, weight)] = rows.to(replaced.dtype)
                self._set(weight, replaced)
            if self._outer:
                touched = {_module_of(name, self.module) for name in self._outer}
                with self._merged({name: self.module.get_submodule(name) for name in touched}, self._outer):
                    yield
            else:
                yield

    @contextmanager
    def block(self, path: str, device: torch.device) -> Iterator[nn.Module]:
        """The block at a canonical path with the adapter merged into it, on `device`; see `StreamedModel.block`."""
        if path in self._open:
            yield self.base.blocks[path]
            return
        real = self.base.block_names[path]
        own = [name for name in self.adapter.names if name.startswith(f"{real}.")]
        with self.base.block(path, device) as block:
            if not own:
                yield block
                return
            with self._merged({real: block}, own):
                self._open.add(path)
                try:
                    yield block
                finally:
                    self._open.remove(path)

    @contextmanager
    def _merged(self, modules: dict[str, nn.Module], names: list[str]) -> Iterator[None]:
        """Merge some of the adapter's tensors into modules at their paths; undone by unloading the weights."""
        parts = {
            f"{path}.{name}" if name else path: part
            for path, module in modules.items()
            for name, part in module.named_modules()
        }
        dtypes = {
            id(part): {k: v.dtype for k, v in part._parameters.items() if v is not None} for part in parts.values()
        }
        for part in parts.values():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    part._parameters[name] = nn.Parameter(parameter.detach().float().clone(), requires_grad=False)
        holder = _holder(modules)
        _adapt(holder, self.adapter, self.adapter.tensors(names), next(holder.parameters()).device)
        merged = {path: holder.get_submodule(path) for path in parts}
        for path, part in parts.items():
            parent, _, child = path.rpartition(".")
            holder.get_submodule(parent)._modules[child] = part
            for name, parameter in merged[path]._parameters.items():
                if parameter is not None:
                    value = parameter.detach().to(dtypes[id(part)][name])
                    part._parameters[name] = nn.Parameter(value, requires_grad=False)
        yield

    def _is_parameter(self, name: str) -> bool:
        return name.replace(".base_layer.", ".") in self.base.parameters

    def _set(self, name: str, value: Tensor) -> None:
        module, _, parameter = name.rpartition(".")
        owner = self.module.get_submodule(module)
        old = owner.get_parameter(parameter)
        owner._parameters[parameter] = nn.Parameter(value.to(old.dtype), requires_grad=False)

    def _check_names(self) -> None:
        with init_empty_weights(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = type(self.module)._from_config(self.module.config, dtype=torch.float32)
            expected = _wrapped(model, self.adapter)
        absent = sorted(set(expected) - set(self.adapter.names))
        foreign = sorted(name for name in set(self.adapter.names) - set(expected) if not self._is_parameter(name))
        if absent or foreign:
            raise CheckpointError(
                f"adapter {self.adapter.folder} doesn't fit {self.base.checkpoint.folder}: "
                f"{len(foreign)} of its tensors have no place there ({', '.join(foreign) or 'none'}), and "
                f"{len(absent)} that its config asks for are missing ({', '.join(absent) or 'none'}); name the base "
                f"that it was trained on ({self.adapter.config.base_model_name_or_path})."
            )


def _module_of(name: str, model: nn.Module) -> str:
    """The longest beginning of an adapter tensor's name that is a module of the model."""
    modules = dict(model.named_modules())
    parts = name.split(".")
    return next(path for end in range(len(parts), 0, -1) if (path := ".".join(parts[:end])) in modules)


def _token_indices(config: PeftConfig, weight: str) -> list[int]:
    indices: Any = getattr(config, "trainable_token_indices", None) or getattr(config, "token_indices", None)
    if isinstance(indices, dict):
        return list(next(rows for name, rows in indices.items() if f".{weight}".endswith(f".{name}.weight")))
    return list(indices)


def _tuner(model: nn.Module, config: Any) -> Any:
    return PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type](model, config, ADAPTER)


def _wrapped(model: nn.Module, adapter: Adapter) -> dict[str, Tensor]:
    tuner = _tuner(model, adapter.config)
    state: dict[str, Tensor] = get_peft_model_state_dict(tuner.model, adapter_name=ADAPTER, save_embedding_layers=False)
    return {name.removeprefix(PEFT_PREFIX): value for name, value in state.items()}


def _adapt(holder: nn.Module, adapter: Adapter, tensors: Mapping[str, Tensor], device: torch.device) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config: Any = copy(adapter.config)
        if getattr(config, "trainable_token_indices", None) is not None:
            config.trainable_token_indices = None
        tuner = _tuner(holder, config)
        loaded: Any = set_peft_model_state_dict(
            tuner.model, {name: value.float().to(device) for name, value in tensors.items()}
        )
    if loaded.unexpected_keys:
        raise CheckpointError(f"adapter {adapter.folder}: PEFT found no place for {', '.join(loaded.unexpected_keys)}.")
    tuner.to(device)
    tuner.merge_and_unload(progressbar=False)


def _holder(modules: Mapping[str, nn.Module]) -> nn.Module:
    """Empty modules that hold the given ones at their paths."""
    holder = nn.Module()
    for path, module in modules.items():
        parent = holder
        *parents, name = path.split(".")
        for part in parents:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(name, module)
    return holder


def _tensor_names(file: Path) -> dict[str, str]:
    try:
        if file.suffix == ".bin":
            names = list(torch.load(file, map_location="meta", weights_only=True))
        else:
            with safe_open(file, framework="pt") as opened:
                names = list(opened.keys())
    except (SafetensorError, OSError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{file} can't be read ({error}); download the adapter again.") from error
    return {name.removeprefix(PEFT_PREFIX): name for name in names}
