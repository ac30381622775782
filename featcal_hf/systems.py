"""One block's running systems: from what its modules were seen to read to their calibrated parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from featcal_hf.errors import CheckpointError, DataError, SolveError
from featcal_hf.forward import BlockRun, Call
from featcal_hf.modules import (
    Norm,
    bias_of,
    linear_names,
    linear_weight,
    norms_of,
    reads_keys_or_values,
    stored_weight,
)
from featcal_hf.moments import TaskInput, few_in_all, task_input
from featcal_hf.narrow import NarrowModule
from featcal_hf.norm_moments import NormMoments
from featcal_hf.products import multiplies_bfloat16
from featcal_hf.ranks import ALONE, FIRST, Ranks, divide
from featcal_hf.recipe import Settings
from featcal_hf.solve import InputSystem, Linear, NormSystem, anchor, gap_rows, relative_step
from featcal_hf.tokens import counted, token_weights


@dataclass(frozen=True)
class InputGroup:
    """Linear modules that read the same tensor with the same token weights: they share a Gram.

    Attributes:
        names: paths of the modules in the block.
        width: d_in.
        reads_encoder: the tensor was passed to the block beside its hidden states (cross-attention).
        first_token_read: all tokens but the first hardly count.
    """

    names: tuple[str, ...]
    width: int
    reads_encoder: bool
    first_token_read: bool


@dataclass(frozen=True)
class BlockPlan:
    """What is calibrated in a block, found by running it once.

    Attributes:
        groups: the linear modules by what they read.
        norms: the norms.
        kept: parameters that keep their merged values, with the reason.
        first_token_read: the model reads the first of the block's tokens only.
    """

    groups: tuple[InputGroup, ...]
    norms: tuple[Norm, ...]
    kept: dict[str, str]
    first_token_read: bool

    @property
    def watched(self) -> list[str]:
        """Paths of all modules whose inputs are needed."""
        return [name for group in self.groups for name in group.names] + [norm.name for norm in self.norms]


def plan_block(
    block: nn.Module, run: BlockRun, call: Call, settings: Settings, pooled: bool, fixed: dict[str, str]
) -> BlockPlan:
    """Group a block's modules by the tensors that they were seen to read in `run`.

    Modules given the same tensor object share a Gram; one whose input is a tensor that was passed to the block beside
    its hidden states reads the encoder.

    Args:
        pooled: the model reads the first of the block's tokens only.
        fixed: parameters that can't be replaced, with the reason.
    """
    kept = dict(fixed)
    others = call.other_tensors
    members: dict[tuple[int, bool], list[str]] = {}
    inputs: dict[tuple[int, bool], Tensor] = {}
    for name in linear_names(block):
        calls = run.module_inputs[name]
        if f"{name}.weight" in fixed:
            continue
        if len(calls) != 1:
            kept[f"{name}.weight"] = _calls_reason(len(calls))
            continue
        key = (id(calls[0]), pooled and not reads_keys_or_values(name))
        members.setdefault(key, []).append(name)
        inputs[key] = calls[0]
    groups = tuple(
        InputGroup(
            tuple(names),
            inputs[key].shape[-1],
            any(inputs[key] is other for other in others),
            key[1],
        )
        for key, names in members.items()
    )
    norms = []
    for norm in norms_of(block):
        calls = run.module_inputs[norm.name]
        if f"{norm.name}.weight" in fixed:
            continue
        if not settings.norm:
            kept[f"{norm.name}.weight"] = "norm: false"
        elif len(calls) != 1:
            kept[f"{norm.name}.weight"] = _calls_reason(len(calls))
        else:
            norms.append(norm)
    calibrated = {f"{name}.weight" for names in members.values() for name in names}
    calibrated |= {f"{norm.name}.{part}" for norm in norms for part in ("weight", "bias")}
    if settings.bias:
        calibrated |= {f"{name}.bias" for names in members.values() for name in names}
    linear_biases = {f"{name}.bias" for name in linear_names(block)}
    for name, _ in block.named_parameters():
        if name not in calibrated and name not in kept:
            kept[name] = "bias: false" if name in linear_biases else "no closed-form update"
    return BlockPlan(groups, tuple(norms), kept, pooled)


def watched_names(block: nn.Module) -> list[str]:
    """Every module of a block that may have an update."""
    return linear_names(block) + [norm.name for norm in norms_of(block)]


class TaskMoments:
    """One task's moments of all inputs of a block.

    Args:
        plan: what the block's modules read.
        narrow: for each input whose modules together have fewer outputs than inputs, those; see `InputMoments`.
        tokens: the block's own tokens in the task, at most.
        encoder_tokens: the same for what its cross-attention reads.
        device: where the moments live.
    """

    def __init__(
        self,
        plan: BlockPlan,
        narrow: Mapping[InputGroup, Mapping[str, Tensor | NarrowModule]],
        tokens: int,
        encoder_tokens: int,
        device: torch.device,
    ) -> None:
        self.plan = plan
        self.groups = {
            group: task_input(
                group.width,
                encoder_tokens if group.reads_encoder else tokens,
                narrow.get(group, {}),
                device,
            )
            for group in plan.groups
        }
        self.norms = {norm: NormMoments(norm.width, device) for norm in plan.norms}
        self._written = {
            group: [name for name, module in modules.items() if _needs_outputs(module)]
            for group, modules in narrow.items()
        }

    @property
    def written(self) -> list[str]:
        """Paths of the modules whose outputs are needed of the expert."""
        return [name for names in self._written.values() for name in names]

    def add(
        self,
        student: BlockRun,
        expert: BlockRun,
        merged: nn.Module,
        tokens: Tensor | None,
        encoder_tokens: Tensor | None,
    ) -> None:
        """Add one batch: the same batch run through the student's and the expert's block.

        Args:
            merged: the student's block, for its norms.
            tokens: mask (batch, tokens) of the block's own tokens, None where all count.
            encoder_tokens: the same for the encoder tokens that cross-attention reads.
        """
        for group, moments in self.groups.items():
            features = _single(student, group.names)
            target = _single(expert, group.names)
            if features.shape != target.shape:
                raise DataError(
                    f"module {group.names[0]} reads {tuple(features.shape)} in the merged model but "
                    f"{tuple(target.shape)} in the expert; give both the same tokens and width."
                )
            weights = self._weights(features, group.reads_encoder, group.first_token_read, tokens, encoder_tokens)
            rows, row_weights = counted(features, weights)
            outputs = {
                name: counted(expert.module_outputs[name][0], weights)[0] for name in self._written.get(group, ())
            }
            moments.add(rows, counted(target, weights)[0], row_weights, outputs)
        for norm in self.plan.norms:
            features = _single(student, (norm.name,))
            weights = self._weights(features, False, self.plan.first_token_read, tokens, encoder_tokens)
            rows, row_weights = counted(norm.normalise(merged, features), weights)
            self.norms[norm].add(rows, row_weights)

    def gather(self, ranks: Ranks, owners: Mapping[InputGroup, int]) -> None:
        """Bring the moments of all ranks' batches together, each input's on the rank that solves over it."""
        for group, owner in owners.items():
            self.groups[group].gather(ranks, owner)
            if owner != ranks.number:
                del self.groups[group]
        for norm_moments in self.norms.values():
            norm_moments.gather(ranks, FIRST)
        if not ranks.is_first:
            self.norms.clear()

    def average(self, where: str) -> None:
        """Divide by the tokens seen.

        Raises:
            DataError: nothing was seen, or what was seen isn't finite.
        """
        for names, moments in self._named():
            if moments.tokens == 0:
                raise DataError(f"{where}.{names}: no token reaches this module; give the task longer samples.")
            moments.average()
            if not moments.is_finite():
                raise SolveError(
                    f"{where}.{names}: its input features are not finite (NaN or overflow in a forward); check "
                    "the expert and the merged model with a plain forward in float32."
                )

    def _named(self) -> Iterator[tuple[str, TaskInput | NormMoments]]:
        for group, moments in self.groups.items():
            yield "/".join(group.names), moments
        for norm, norm_moments in self.norms.items():
            yield norm.name, norm_moments

    @staticmethod
    def _weights(
        features: Tensor,
        reads_encoder: bool,
        first_token_read: bool,
        tokens: Tensor | None,
        encoder_tokens: Tensor | None,
    ) -> Tensor | None:
        mask = encoder_tokens if reads_encoder else tokens
        if mask is None and not first_token_read:
            return None
        reference = features if mask is None else features.new_empty((*mask.shape, 1))
        return token_weights(reference, mask, first_token_read)


@dataclass
class ModuleUpdate:
    """What happened to one module.

    Attributes:
        name: path in the block.
        step: ‖new - merged‖ / ‖merged‖ of its weight.
        lambda_: the ridge used.
        tokens: weighted tokens seen, all tasks together.
    """

    name: str
    step: float
    lambda_: float
    tokens: float


@dataclass
class InputUpdate:
    """What was solved over: one input of the block.

    Attributes:
        modules: paths of the linear modules that read it.
        width: d_in.
        tokens: weighted tokens seen, all tasks together.
        condition: condition number of the regularised Gram, estimated from below; see `Spectrum`.
        dominance: share of the Gram's norm in its largest direction.
    """

    modules: list[str]
    width: int
    tokens: float
    condition: float
    dominance: float


@dataclass
class BlockUpdate:
    """New parameters of a block, by their name in it, and what happened to each module and input."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    modules: list[ModuleUpdate] = field(default_factory=list)
    inputs: list[InputUpdate] = field(default_factory=list)


class BlockSystems:
    """The running systems of all modules of one block; tasks are added one at a time.

    Args:
        path: the block.
        plan: what its modules read.
        merged: the student's block as it stands.
        base: the base's block, None without one.
        settings: λ, ρ, α and switches, resolved.
        most_tokens: tokens of all tasks at most: the block's own, and those its cross-attention reads.
        ranks: who shares the work: each solves over some of the inputs, the first one for all norms.
    """

    def __init__(
        self,
        path: str,
        plan: BlockPlan,
        merged: nn.Module,
        base: nn.Module | None,
        settings: Settings,
        most_tokens: tuple[int, int],
        ranks: Ranks = ALONE,
    ) -> None:
        self.path, self.plan, self.merged, self.base, self.settings = path, plan, merged, base, settings
        self._device = next(merged.parameters()).device
        self._most_tokens = most_tokens
        self._rho = 1.0 if settings.rho is None else settings.rho
        self._inputs: dict[InputGroup, InputSystem] = {}
        self._ranks = ranks
        costs = {group: group.width**2 * (group.width + self._outputs(group)) for group in plan.groups}
        dearest = sorted(plan.groups, key=lambda group: -costs[group])
        owners = dict(zip(dearest, divide([costs[group] for group in dearest], [0.0] * ranks.size), strict=True))
        self.owners = {group: owners[group] for group in plan.groups}
        norms = plan.norms if ranks.is_first else ()
        self._norms = {norm: NormSystem(*self._norm_anchor(norm), settings.lambda_) for norm in norms}

    def start_task(self, expert: nn.Module, tokens: int, encoder_tokens: int) -> TaskMoments:
        """Empty moments for a task's batches.

        Args:
            expert: the expert's block.
            tokens: the block's own tokens in the task, at most.
            encoder_tokens: the same for what its cross-attention reads.
        """
        narrow = {group: self._narrow_modules(group, expert) for group in self.plan.groups}
        return TaskMoments(self.plan, narrow, tokens, encoder_tokens, self._device)

    def add_task(self, moments: TaskMoments, expert: nn.Module) -> None:
        """Add a task's averaged moments, freeing each as it is used."""
        for group in sorted(moments.groups, key=lambda group: -group.width):
            group_moments = moments.groups.pop(group)
            if group not in self._inputs:
                self._inputs[group] = InputSystem(
                    group.width,
                    self.settings.lambda_,
                    self._rho,
                    self.settings.alpha,
                    str(self.settings.scale),
                    self._device,
                    few_in_all(self._most_tokens[group.reads_encoder], group.width),
                )
            self._inputs[group].add_task(group_moments)
            for name in group.names:
                merged, base = self._linears(name)
                self._inputs[group].add_module(name, self._linear(expert, name), merged, base)
            self._inputs[group].end_task()
        for norm, norm_moments in moments.norms.items():
            self._norms[norm].add_task(norm_moments, norm.gamma(expert), bias_of(expert.get_submodule(norm.name)))

    def solve(self) -> BlockUpdate:
        """Solve every module, each on the rank that has its system; they are freed one after another.

        Raises:
            SolveError: a system has no finite solution; names the module.
        """
        update = BlockUpdate()
        for group in [group for group in self.plan.groups if group in self._inputs]:
            system = self._inputs.pop(group)
            where = f"{self.path}.{'/'.join(group.names)}"
            lambda_ = system.lambda_
            shape = system.factor(where)
            update.inputs.append(
                InputUpdate(list(group.names), group.width, system.tokens, shape.condition, shape.dominance)
            )
            for name in group.names:
                module = self.merged.get_submodule(name)
                merged, base = self._linears(name)
                new = system.solve(name, merged, base)
                step = relative_step(new.weight, merged.weight)
                update.modules.append(ModuleUpdate(name, step, lambda_, system.tokens))
                self._put(update, f"{name}.weight", stored_weight(module, new.weight))
                if new.bias is not None:
                    self._put(update, f"{name}.bias", new.bias.to(_dtype(module, "bias")))
        for norm, norm_system in self._norms.items():
            module = self.merged.get_submodule(norm.name)
            gamma, beta = norm_system.solve()
            old = norm.gamma(self.merged)
            update.modules.append(ModuleUpdate(norm.name, relative_step(gamma, old), norm_system.lambda_, 0.0))
            self._put(update, f"{norm.name}.weight", (gamma - norm.offset).to(_dtype(module, "weight")))
            if beta is not None:
                self._put(update, f"{norm.name}.bias", beta.to(_dtype(module, "bias")))
        return self._whole(update)

    def _whole(self, part: BlockUpdate) -> BlockUpdate:
        """What all ranks have solved, in the plan's order."""
        parts = self._ranks.exchange((part.modules, part.inputs))
        order = {name: number for number, name in enumerate(self.plan.watched)}
        return BlockUpdate(
            self._ranks.pool(part.parameters),
            sorted((module for modules, _ in parts for module in modules), key=lambda module: order[module.name]),
            sorted((one for _, inputs in parts for one in inputs), key=lambda one: order[one.modules[0]]),
        )

    def _narrow_modules(self, group: InputGroup, expert: nn.Module) -> dict[str, Tensor | NarrowModule]:
        linears = {name: self._linear(expert, name) for name in group.names}
        if sum(len(linear.weight) for linear in linears.values()) >= group.width:
            return {}
        return {name: self._narrow_module(name, linear.weight, expert) for name, linear in linears.items()}

    def _narrow_module(self, name: str, weight: Tensor, expert: nn.Module) -> Tensor | NarrowModule:
        if weight.dtype != torch.float32 and not (weight.dtype == torch.bfloat16 and multiplies_bfloat16(self._device)):
            return weight
        merged, base = self._linears(name)
        everything = slice(None)
        return NarrowModule(
            weight,
            bias_of(expert.get_submodule(name)),
            lambda: gap_rows(weight, merged, base, everything, self._rho),
            self.settings.alpha,
        )

    def _outputs(self, group: InputGroup) -> int:
        return sum(len(linear_weight(self.merged.get_submodule(name))) for name in group.names)

    def _linears(self, name: str) -> tuple[Linear, Linear | None]:
        return self._linear(self.merged, name), None if self.base is None else self._linear(self.base, name)

    def _linear(self, block: nn.Module, name: str) -> Linear:
        module = block.get_submodule(name)
        return Linear(linear_weight(module), bias_of(module) if self.settings.bias else None)

    def _norm_anchor(self, norm: Norm) -> tuple[Tensor, Tensor | None]:
        beta = bias_of(self.merged.get_submodule(norm.name))
        base_gamma = None if self.base is None else norm.gamma(self.base)
        base_beta = None if self.base is None else bias_of(self.base.get_submodule(norm.name))
        gamma = anchor(norm.gamma(self.merged), base_gamma, self._rho)
        return gamma, None if beta is None else anchor(beta, base_beta, self._rho)

    def _put(self, update: BlockUpdate, name: str, value: Tensor) -> None:
        if not bool(value.float().sum().isfinite()):
            raise SolveError(
                f"{self.path}.{name}: the solution is not finite in {value.dtype}; nothing was written. Raise "
                "featcal.lambda, or lower featcal.rho towards 1."
            )
        update.parameters[name] = value


def _single(run: BlockRun, names: tuple[str, ...]) -> Tensor:
    calls = run.module_inputs[names[0]]
    if len(calls) != 1 or any(run.module_inputs[name][0] is not calls[0] for name in names[1:]):
        raise CheckpointError(
            f"modules {'/'.join(names)} don't read the same single tensor in every batch and model; this block "
            "changes its way with its input and can't be calibrated."
        )
    return calls[0]


def _calls_reason(calls: int) -> str:
    return "not reached by the forward" if calls == 0 else f"runs {calls} times in the block"


def _needs_outputs(module: Tensor | NarrowModule) -> bool:
    return isinstance(module, NarrowModule) and module.needs_outputs


def _dtype(module: nn.Module, name: str) -> torch.dtype:
    return module.get_parameter(name).dtype
