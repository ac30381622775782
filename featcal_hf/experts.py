"""PEFT adapters as experts: a block of the base with the adapter's deltas merged into it, and no full model anywhere.

The block is put into empty modules so that its path is the model's, PEFT's own tuner wraps it, the adapter's tensors of
that block are loaded and merged in float32, and the result is cast once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from accelerate import init_empty_weights
from peft import PeftConfig, get_peft_model_state_dict, set_peft_model_state_dict
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from torch import Tensor, nn
from transformers import PreTrainedModel

from featcal_hf.checkpoint import Checkpoint, file_mark, read_table
from featcal_hf.errors import CheckpointError, listed
from featcal_hf.streamed import StreamedModel

PEFT_PREFIX = "base_model.model."
ADAPTER = "default"
# Tried; each of their tensors belongs to one layer. VeRA's and its like are shared by all, so no block stands alone.
METHODS = (
    *("LORA", "ADALORA", "IA3", "LOHA", "LOKR", "OFT", "BOFT", "HRA", "MISS", "FOURIERFT", "C3A", "DELORA", "GRALORA"),
    *("LN_TUNING", "TRAINABLE_TOKENS"),
)
MERGE_IT = "merge it with PEFT (merge_and_unload), save the whole model, and name that folder in the recipe"
TOKENS_SUFFIX = ".trainable_tokens_delta"


@dataclass(frozen=True)
class Adapter:
    """A saved PEFT adapter: its config and the table of its tensors, none of them loaded.

    Attributes:
        checkpoint: its folder and weight file.
        config: PEFT's config.
        names: tensor name without PEFT's prefix -> name in the file.
    """

    checkpoint: Checkpoint
    config: PeftConfig
    names: dict[str, str]

    def tensors(self, names: list[str]) -> dict[str, Tensor]:
        """Some of its tensors, in memory."""
        with self.checkpoint.reading(self.names[name] for name in names) as lazy:
            return {name: lazy[self.names[name]][...].clone() for name in names}

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one of its tensors."""
        return self.checkpoint.tensors[self.names[name]].shape


def open_adapter(folder: Path, revision: str | None = None) -> Adapter:
    """Read an adapter's config and tensor names.

    Raises:
        CheckpointError: not an adapter, one that doesn't change weights (prompt and prefix tuning), or unreadable.
    """
    if not (folder / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{folder} has no adapter_config.json; expected a PEFT adapter after the '+', as "
            "save_pretrained of a PeftModel writes it."
        )
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{folder}/adapter_config.json can't be read by PEFT {peft.__version__} ({error}); download the adapter "
            "again, or install a PEFT release that knows it."
        ) from error
    if config.is_prompt_learning:
        raise CheckpointError(
            f"{folder} is a {_method(config)} adapter, which adds inputs rather than changing weights; only adapters "
            "that merge into weights (LoRA, DoRA, IA3, ...) can be experts."
        )
    if _method(config) not in METHODS:
        raise CheckpointError(
            f"{folder} is a {_method(config)} adapter, expected one of {', '.join(METHODS)}; {MERGE_IT}."
        )
    for name in ("adapter_model.safetensors", "adapter_model.bin"):
        if (folder / name).is_file():
            marks = {name: file_mark(folder / name)}
            table = read_table(folder, name)
            if not table:
                raise CheckpointError(f"{folder / name} holds no tensors; train or download the adapter again.")
            names = {tensor.removeprefix(PEFT_PREFIX): tensor for tensor in table}
            return Adapter(Checkpoint(folder, table, None, revision, marks), config, names)
    raise CheckpointError(
        f"{folder} has no adapter_model.safetensors or adapter_model.bin; the adapter is incomplete, train or download "
        "it again."
    )


class AdaptedModel:
    """A streamed base model with an adapter: what `StreamedModel` is, with the deltas in every block.

    Raises:
        CheckpointError: the adapter's tensors are not the ones that its config makes on this model.
    """

    def __init__(self, base: StreamedModel, adapter: Adapter) -> None:
        self.base, self.adapter = base, adapter
        self.module: PreTrainedModel = base.module
        self._open: set[str] = set()
        shapes = base.parameters
        self._weights = {name: own for name in adapter.names if (own := name.replace(".base_layer.", ".")) in shapes}
        self._names = self._placed(shapes)
        in_blocks = tuple(f"{real}." for real in base.block_names.values())
        self._outer_names = [name for name in self._names if not name.startswith(in_blocks)]

    def fixed(self, path: str) -> dict[str, str]:
        """As the base's."""
        return self.base.fixed(path)

    @contextmanager
    def outer(self) -> Iterator[None]:
        """Everything outside the blocks, with the adapter's changes to it."""
        with self.base.outer():
            rows = [name for name in self._outer_names if name.endswith(TOKENS_SUFFIX)]
            names = [name for name in self._outer_names if name not in rows]
            tuned = self._replace(names)
            for name, value in self.adapter.tensors(rows).items():
                weight = f"{name.removesuffix(TOKENS_SUFFIX).removesuffix('.token_adapter')}.weight"
                replaced = self.module.get_parameter(weight).detach().clone()
                replaced[_token_indices(self.adapter.config, weight)] = value.to(replaced.dtype)
                self._set(weight, replaced, with_tied=True)
            if tuned:
                touched = {_module_of(name, self.module) for name in tuned}
                inside = tuple(f"{path}." for path in touched)
                self._merge(
                    {path: self.module.get_submodule(path) for path in touched},
                    [name for name in names if name.startswith(inside)],
                )
            yield

    @contextmanager
    def block(self, path: str, device: torch.device) -> Iterator[nn.Module]:
        """The block at a canonical path with the adapter merged into it, on `device`; see `StreamedModel.block`."""
        if path in self._open:
            yield self.base.blocks[path]
            return
        real = self.base.block_names[path]
        with self.base.block(path, device) as block:
            names = [name for name in self._names if name.startswith(f"{real}.")]
            if self._replace(names):
                self._merge({real: block}, names)
            self._open.add(path)
            try:
                yield block
            finally:
                self._open.remove(path)

    def _replace(self, names: list[str]) -> list[str]:
        """Put in what the adapter holds as whole weights (modules_to_save, biases); gives the other names."""
        for name, value in self.adapter.tensors([name for name in names if name in self._weights]).items():
            self._set(self._weights[name], value, with_tied=not self._is_saved_copy(name))
        return [name for name in names if name not in self._weights]

    def _merge(self, modules: dict[str, nn.Module], names: list[str]) -> None:
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
        try:
            _adapt(holder, self.adapter, self.adapter.tensors(names), next(holder.parameters()).device)
            merged = {path: holder.get_submodule(path)._parameters for path in parts}
        finally:
            for path, part in parts.items():
                parent, _, child = path.rpartition(".")
                holder.get_submodule(parent)._modules[child] = part
        for path, part in parts.items():
            for name, parameter in merged[path].items():
                if parameter is not None:
                    value = parameter.detach().to(dtypes[id(part)][name])
                    part._parameters[name] = nn.Parameter(value, requires_grad=False)

    def _set(self, name: str, value: Tensor, with_tied: bool) -> None:
        old = self.module.get_parameter(name)
        new = nn.Parameter(value.to(old), requires_grad=False)
        for full_name, owner, parameter in _places(self.module, old):
            if with_tied or full_name == name:
                owner._parameters[parameter] = new

    def _is_saved_copy(self, name: str) -> bool:
        """Whether PEFT trained a copy of the tensor's module, so that what it is tied to keeps its value."""
        config = self.adapter.config
        saved = getattr(config, "modules_to_save", None) or []
        parents = f".{name.rpartition('.')[0]}."
        return not getattr(config, "ensure_weight_tying", False) and any(f".{module}." in parents for module in saved)

    def _placed(self, shapes: dict[str, tuple[int, ...]]) -> list[str]:
        """The adapter's tensors, once their names and shapes are those that PEFT makes on an empty model.

        Those of another head than the model's are left out: calibration reads the blocks.
        """
        adapter, folder = self.adapter, self.base.checkpoint.folder
        trained_on = adapter.config.base_model_name_or_path
        advice = f"name the base that it was trained on{f' ({trained_on})' if trained_on else ''}"
        try:
            with init_empty_weights(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = type(self.module)._from_config(self.module.config, dtype=torch.float32)
                expected = _expected(model, adapter)
        except Exception as error:  # every tuner has its own ways to say that a config doesn't fit
            raise CheckpointError(
                f"adapter {adapter.checkpoint.folder} can't be put on {folder}: PEFT says {error!r}; {advice}, "
                f"or {MERGE_IT}."
            ) from error
        prefix = f"{self.module.base_model_prefix}."
        has_prefix = any(name.startswith(prefix) for name in shapes)
        absent = sorted(set(expected) - set(adapter.names))
        foreign = sorted(set(adapter.names) - set(expected) - set(self._weights))
        if absent or any(name.startswith(prefix) or not has_prefix for name in foreign):
            raise CheckpointError(
                f"adapter {adapter.checkpoint.folder} doesn't fit {folder}: {len(foreign)} of its tensors have no "
                f"place there ({listed(foreign) or 'none'}), and {len(absent)} that its config asks for are missing "
                f"({listed(absent) or 'none'}); {advice}, download the adapter again, or "
                f"if PEFT itself takes it (it converts what older transformers wrote) {MERGE_IT}."
            )
        wanted = {**expected, **{name: shapes[own] for name, own in self._weights.items()}}
        placed = [name for name in adapter.names if name in wanted]
        for name in placed:
            if adapter.shape(name) != wanted[name]:
                raise CheckpointError(
                    f"adapter {adapter.checkpoint.folder} doesn't fit {folder}: its tensor {name} is "
                    f"{adapter.shape(name)}, expected {wanted[name]}; {advice}."
                )
        return placed


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


def _method(config: PeftConfig) -> str:
    return str(getattr(config.peft_type, "value", config.peft_type))


def _tuner(model: nn.Module, config: Any) -> Any:
    return PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type](model, config, ADAPTER)


def _expected(model: nn.Module, adapter: Adapter) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that PEFT makes on an empty `model`."""
    tuner = _tuner(model, deepcopy(adapter.config))
    state: dict[str, Tensor] = get_peft_model_state_dict(tuner.model, adapter_name=ADAPTER, save_embedding_layers=False)
    shapes = {name.removeprefix(PEFT_PREFIX): tuple(value.shape) for name, value in state.items()}
    tuner.merge_and_unload(progressbar=False)  # variants that can't merge say so here, before any forward
    return shapes


def _adapt(holder: nn.Module, adapter: Adapter, tensors: Mapping[str, Tensor], device: torch.device) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config: Any = deepcopy(adapter.config)
        if getattr(config, "trainable_token_indices", None) is not None:
            config.trainable_token_indices = None
        tuner = _tuner(holder, config)
        loaded: Any = set_peft_model_state_dict(
            tuner.model, {name: value.float().to(device) for name, value in tensors.items()}
        )
    if loaded.unexpected_keys:
        raise CheckpointError(
            f"adapter {adapter.checkpoint.folder}: PEFT found no place for {listed(loaded.unexpected_keys)}."
        )
    tuner.to(device)
    tuner.merge_and_unload(progressbar=False)


def _places(model: nn.Module, wanted: Tensor) -> list[tuple[str, nn.Module, str]]:
    """Every place of one parameter: its full name, the module and the name in it."""
    return [
        (f"{path}.{name}", module, name)
        for path, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is wanted
    ]


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
