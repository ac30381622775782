"""Parked forwards: a model's forward that stops at every block and waits for the block's output.

Each block's ``forward`` is replaced by one that hands its arguments to the scheduler and waits; the model's own
forward runs in a greenlet. So the scheduler sees exactly what the model passes to the block (masks, rotary
embeddings, position bias, encoder states), may run the block as often as it likes with any weights, and the
true execution order is found rather than configured.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map
from transformers import PreTrainedModel

from featcal_hf.errors import CheckpointError, DataError, listed


@dataclass(frozen=True)
class Call:
    """What a model passes to one of its blocks: the block's path and arguments."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def on(self, device: torch.device) -> Call:
        """The same call with its tensors on `device`."""
        return self.map(lambda value: value.to(device))

    def map(self, change: Callable[[Tensor], Tensor]) -> Call:
        """The same call with every tensor changed; one passed twice is changed once and stays one tensor."""
        changed: dict[int, Tensor] = {}

        def once(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in changed:
                changed[id(value)] = change(value)
            return changed[id(value)]

        return Call(self.path, tree_map(once, self.args), tree_map(once, self.kwargs))

    def cast(self, dtype: torch.dtype) -> Call:
        """The same call for a block of another dtype. Masks hold the least number there is; it stays in range."""
        limits = torch.finfo(dtype)

        def convert(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype == dtype:
                return value
            return value.clamp(limits.min, limits.max).to(dtype)

        return Call(self.path, tree_map(convert, self.args), tree_map(convert, self.kwargs))

    @property
    def hidden_states(self) -> Tensor:
        """The block's own tokens, (batch, tokens, width): its first tensor."""
        return next(value for value in self._leaves() if isinstance(value, Tensor))

    @property
    def other_tensors(self) -> list[Tensor]:
        """The tensors passed beside the hidden states, for instance an encoder's output."""
        hidden = self.hidden_states
        return [value for value in self._leaves() if isinstance(value, Tensor) and value is not hidden]

    def _leaves(self) -> list[Any]:
        return tree_flatten((self.args, self.kwargs))[0]


def first_tensor(output: Any) -> Tensor:
    """A block's hidden states: its output, or the first member of it."""
    return next(value for value in tree_flatten(output)[0] if isinstance(value, Tensor))


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated members of the outermost ``ModuleList``s, by canonical path.

    Canonical paths leave out the model's base prefix, so that a base model and the same model under a head agree.
    """
    prefix = getattr(model, "base_model_prefix", "")
    blocks: dict[str, nn.Module] = {}

    def walk(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            child_path = f"{path}.{name}" if path else name
            if isinstance(child, nn.ModuleList):
                blocks.update((f"{child_path}.{i}", member) for i, member in child.named_children())
            else:
                walk(child, child_path)

    walk(model, "")
    if prefix and hasattr(model, prefix):
        return {path.removeprefix(f"{prefix}."): block for path, block in blocks.items()}
    return blocks


@contextmanager
def parking(model: nn.Module) -> Iterator[dict[str, nn.Module]]:
    """Make every block of `model` a parking place; yields the blocks, restores their forwards at the end."""
    blocks = find_blocks(model)
    own = {path: block.__dict__.get("forward") for path, block in blocks.items()}
    for path, block in blocks.items():
        block.__dict__["forward"] = _parking_place(path, block.forward)
    try:
        yield blocks
    finally:
        for path, block in blocks.items():
            del block.__dict__["forward"]
            if own[path] is not None:
                block.__dict__["forward"] = own[path]


def _parking_place(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    def park(*args: Any, **kwargs: Any) -> Any:
        current = getcurrent()
        if isinstance(current, _ModelRun) and current.parent is not None:
            return current.parent.switch(Call(path, args, kwargs))
        return forward(*args, **kwargs)

    return park


class _ModelRun(greenlet):
    """The greenlet of a parked forward; a block called outside one runs as usual."""


class ParkedForward:
    """One forward of a model with parking places over one batch.

    Attributes:
        call: the block call it waits at, None once it has run to its end.
        result: the model's output once it has run to its end.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        self.call: Call | None = None
        self.result: Any = None
        self._inputs = {id(value) for value in inputs.values()}
        self._run = _ModelRun(lambda: model(**inputs))

    def waiting(self) -> Call:
        """The block call it waits at.

        Raises:
            DataError: it has run to its end.
        """
        if self.call is None:
            raise DataError("a forward ended before the others; give every batch the same kinds of inputs.")
        return self.call

    def held(self) -> list[Tensor]:
        """The tensors in the waiting model's local variables, those of the batch left out."""
        found: dict[int, Tensor] = {}
        frame = self._run.gr_frame
        while frame is not None:
            for value in tree_flatten(dict(frame.f_locals))[0]:
                if isinstance(value, Tensor) and id(value) not in self._inputs:
                    found[id(value)] = value
            frame = frame.f_back
        return list(found.values())

    def start(self) -> None:
        """Run up to the first block."""
        self._settle(self._run.switch())

    def resume(self, output: Any) -> None:
        """Go on with the output of the block it is parked at, up to the next block or the end."""
        self.call = None
        self._settle(self._run.switch(output))

    def stop(self) -> None:
        """Give the forward up, wherever it is."""
        self.call = None
        if not self._run.dead:
            self._run.throw(GreenletExit)

    def _settle(self, handed: Any) -> None:
        if self._run.dead:
            self.result = handed
        else:
            self.call = handed


@dataclass(frozen=True)
class ForwardInputs:
    """A batch as the model's forward takes it, and which of its tokens count.

    Attributes:
        inputs: keyword arguments of the forward.
        tokens: mask (batch, tokens) of the input tokens, None where all count.
        decoder_tokens: the same for the decoder's tokens.
    """

    inputs: dict[str, Any]
    tokens: Tensor | None
    decoder_tokens: Tensor | None


def forward_inputs(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> ForwardInputs:
    """Turn a batch (input_ids, attention_mask, pixel_values, labels, ...) into a forward's arguments.

    An encoder-decoder makes its decoder inputs from the labels (teacher forcing); other models get none, as no loss
    is wanted. Padding is what `attention_mask`, `decoder_attention_mask` and labels of -100 say.

    Raises:
        DataError: the batch holds something the model's forward doesn't take.
    """
    inputs: dict[str, Any] = dict(batch)
    accepted = inspect.signature(model.forward).parameters
    decoder_tokens = inputs.get("decoder_attention_mask")
    if not model.config.is_encoder_decoder:
        inputs.pop("labels", None)
    elif decoder_tokens is None and "labels" in inputs:
        decoder_tokens = inputs["labels"].ne(-100)
    if "token_type_ids" not in accepted:
        inputs.pop("token_type_ids", None)
    foreign = sorted(set(inputs) - set(accepted))
    if foreign:
        raise DataError(
            f"{type(model).__name__}.forward doesn't take {', '.join(foreign)}; it takes "
            f"{listed(accepted, foreign[0])}. Give batches with the model's own inputs."
        )
    if "use_cache" in accepted:
        inputs["use_cache"] = False
    return ForwardInputs(inputs, inputs.get("attention_mask"), decoder_tokens)


def without_loss(model: PreTrainedModel, inputs: ForwardInputs) -> ForwardInputs:
    """The same inputs with the decoder's tokens in place of labels, so that a forward that runs to its end computes no
    loss; as they were where the model can't say what its decoder reads.
    """
    decoder_inputs = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if decoder_inputs is None or "labels" not in inputs.inputs:
        return inputs
    kept = {name: value for name, value in inputs.inputs.items() if name != "labels"}
    kept.setdefault("decoder_input_ids", decoder_inputs(labels=inputs.inputs["labels"]))
    return replace(inputs, inputs=kept)


@dataclass(frozen=True)
class BlockRun:
    """One run of a block, and what its modules were seen to read and write, in the order of their calls.

    Attributes:
        output: the block's output; None if the run was ended early.
        module_inputs: path of a module -> its inputs.
        module_outputs: the same for outputs, of the modules that were asked for.
    """

    output: Any
    module_inputs: dict[str, list[Tensor]]
    module_outputs: dict[str, list[Tensor]] = field(default_factory=dict)


def run_block(block: nn.Module, call: Call) -> Any:
    """The block's output for a call."""
    return block(*call.args, **call.kwargs)


def run_block_watched(
    block: nn.Module, call: Call, names: list[str], written: Collection[str] = (), whole: bool = True
) -> BlockRun:
    """The block's output for a call, the input of each of the named modules, and the output of those in `written`.

    Without `whole` the run ends where everything has been seen, and has no output.
    """
    inputs: dict[str, list[Tensor]] = {name: [] for name in names}
    outputs: dict[str, list[Tensor]] = {name: [] for name in written}

    def see(seen: list[Tensor], value: Tensor) -> None:
        seen.append(value)
        if not whole and all((*inputs.values(), *outputs.values())):
            raise _EverythingSeen

    def watch_input(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            see(inputs[name], args[0] if args else next(iter(kwargs.values())))

        return hook

    def watch_output(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            see(outputs[name], output)

        return hook

    handles = [
        block.get_submodule(name).register_forward_pre_hook(watch_input(name), with_kwargs=True) for name in names
    ]
    handles += [block.get_submodule(name).register_forward_hook(watch_output(name)) for name in written]
    try:
        return BlockRun(run_block(block, call), inputs, outputs)
    except _EverythingSeen:
        return BlockRun(None, inputs, outputs)
    finally:
        for handle in handles:
            handle.remove()


class _EverythingSeen(Exception):
    """Ends a block's run early."""


def places(forwards: Iterable[ParkedForward]) -> set[str | None]:
    """The blocks at which forwards are parked; None for one that has ended."""
    return {run.call.path if run.call else None for run in forwards}


def next_block(places: Mapping[str, set[str | None]]) -> str | None:
    """The block at which all forwards of all tasks are parked; None once all have ended.

    Args:
        places: task -> where its forwards are.

    Raises:
        DataError: tasks go different ways through the model, so that a block has no complete set of inputs.
    """
    if len(set().union(*places.values())) > 1:
        ways = "; ".join(f"{task}: {sorted(map(str, paths))}" for task, paths in places.items())
        raise DataError(
            f"the tasks' batches reach different blocks of the model at the same time ({ways}); give every "
            "task and batch the same kinds of inputs."
        )
    return next(iter(next(iter(places.values()))))


def refuse_second_visit(path: str, visited: set[str]) -> None:
    """Blocks that a forward enters twice share their weights between depths: there is no one update for them.

    Raises:
        CheckpointError: the block has been visited.
    """
    if path in visited:
        raise CheckpointError(
            f"block {path} runs more than once in a forward (weights shared between layers, as in ALBERT); "
            "such models can't be calibrated block by block."
        )
