"""FeatCal in float64, the slow and obvious way: what the product's results are checked against.

Written from the equations of *FeatCal: Feature Calibration for Post-Merging Models* (arXiv 2605.13030),
independent of the product: nothing is parked, streamed or shared. For every block the whole models run again,
and every feature is held as one matrix. The letters are the paper's.

Choices the paper leaves open (any other is off by 0.05 to 9 from the authors' results, test_oracle.py):

- n is the sum of the token weights, also in the means of the bias and of the norm affine.
- In a pooled last block the first token weighs 1 and the others 0.01 for every module, both norms included;
  only the key and value projections weigh all tokens 1.
- All modules of a block, norms too, are fitted on one snapshot of the block as it was merged.
- The bias takes the new weight W* and the weight's task weights; the norm affine has no task weights.

Choices those results (float32, λ ≥ 0.001) are too coarse to tell apart:

- The weight's ridge is λ+ε throughout, as the step form has it. (Σ ω W C + λ A) (Σ ω G + (λ+ε) I)⁻¹ differs
  from it by up to ε/λ of A, 0.1 % at λ = 1e-5. The bias and the norm have λ alone.

Not covered: encoder-decoders, repeated blocks in several lists, RMSNorms that store γ-1 (an error says so).
RMSNorm and rotary embeddings round to float32 inside transformers: a Llama's features are no better.
"""

import math
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

EPS = 1e-8
OTHER_TOKENS = 0.01  # weight, in a pooled last block, of the tokens that the model's head does not read
ADAPTIVE_NORM_RIDGE = 0.01
KEY_VALUE = {"k_proj", "v_proj", "key", "value"}

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Task:
    """What one task says about one module: the expert's module, and the tokens that the module reads."""

    expert: nn.Module
    X_cal: Tensor  # (tokens, d_in), the student's inputs
    X_tgt: Tensor  # (tokens, d_in), (1-α) X_cal + α X_exp
    w: Tensor  # (tokens,), how much each token counts

    def mean(self, X: Tensor) -> Tensor:
        return self.w @ X / self.w.sum()

    def moment(self, X: Tensor) -> Tensor:
        """Xᵀ X_cal / n (d_in, d_in): the Gram G_i of X_cal, the target cross moment C_i of X_tgt."""
        return X.T @ (self.w[:, None] * self.X_cal) / self.w.sum()


def calibrate(
    merged: nn.Module,
    base: nn.Module,
    experts: dict[str, nn.Module],
    batches: dict[str, list[Batch]],
    *,
    lambda_: float,
    rho: float,
    alpha: float,
    bias: bool,
    norm: bool,
    scale: str = "frobenius",
    pooled_last_block: bool = False,
    adaptive: bool = False,
) -> dict[str, Tensor]:
    """Calibrate every linear module, and norm if asked, of every block; no model passed in is changed.

    `experts` and `batches` have the tasks as keys. A batch is the model's keyword arguments; its
    attention_mask says which tokens count, all if it has none. `adaptive` replaces `lambda_` by
    tasks · max(1, √(d_in / n)), for scale 'trace', and, for norms, by 0.01.

    Returns:
        The new value (float64) of each calibrated parameter, by its name in `merged`.
    """
    student, merged, base = as_float64(merged), as_float64(merged), as_float64(base)
    experts = {task: as_float64(expert) for task, expert in experts.items()}
    result: dict[str, Tensor] = {}
    blocks = block_names(student)
    for block in blocks:
        pooled = pooled_last_block and block == blocks[-1]
        tasks_of: dict[str, list[Task]] = {}
        for task, expert in experts.items():
            cal = module_inputs(student, block, batches[task], pooled)
            exp = module_inputs(expert, block, batches[task], pooled)
            for name, (X_cal, w) in cal.items():
                X_tgt = (1 - alpha) * X_cal + alpha * exp[name][0]
                tasks_of.setdefault(name, []).append(Task(expert.get_submodule(name), X_cal, X_tgt, w))

        new: dict[str, Tensor] = {}
        for name, tasks in tasks_of.items():
            module = merged.get_submodule(name)
            A = anchor(module, base.get_submodule(name), rho)
            if isinstance(module, nn.Linear):
                n = sum(float(task.w.sum()) for task in tasks) / len(tasks)
                ridge = len(tasks) * max(1, math.sqrt(module.in_features / n)) if adaptive else lambda_
                omega = [task_weight(task, scale) for task in tasks]
                W = new[f"{name}.weight"] = linear_weight(tasks, omega, A["weight"], ridge)
                if bias and "bias" in A:
                    new[f"{name}.bias"] = linear_bias(tasks, omega, W, A["bias"], ridge)
            elif norm and A:
                affine = norm_affine(tasks, A, ADAPTIVE_NORM_RIDGE if adaptive else lambda_)
                new |= {f"{name}.{kind}": value for kind, value in affine.items()}

        for name, value in new.items():
            student.get_parameter(name).copy_(value)
        result |= new
    return result


def task_weight(task: Task, scale: str) -> float:
    """ω_i = 1 / max(‖G_i‖_F, ε), or with scale 'trace' d_in / max(tr G_i, ε)."""
    G = task.moment(task.X_cal)
    if scale == "trace":
        return len(G) / max(float(G.trace()), EPS)
    if scale == "frobenius":
        return 1 / max(float(torch.linalg.matrix_norm(G)), EPS)
    raise ValueError(f"scale is {scale!r}; expected 'frobenius' or 'trace'.")


def linear_weight(tasks: list[Task], omega: list[float], A: Tensor, ridge: float) -> Tensor:
    """W* = A + (Σ ω_i (W_i C_i - A G_i)) (Σ ω_i G_i + (λ+ε) I)⁻¹ (eq. 12-17)."""
    left = torch.zeros_like(A)
    right = (ridge + EPS) * torch.eye(A.shape[1], dtype=A.dtype)
    for task, omega_i in zip(tasks, omega, strict=True):
        G, C = task.moment(task.X_cal), task.moment(task.X_tgt)
        left += omega_i * (task.expert.weight @ C - A @ G)
        right += omega_i * G
    return A + torch.linalg.solve(right, left, left=False)


def linear_bias(tasks: list[Task], omega: list[float], W: Tensor, b_A: Tensor, ridge: float) -> Tensor:
    """b* = (Σ ω_i (b_i + W_i τ_i - W* μ_i) + λ b_A) / (Σ ω_i + λ) (Appendix G)."""
    total = ridge * b_A
    for task, omega_i in zip(tasks, omega, strict=True):
        mu, tau = task.mean(task.X_cal), task.mean(task.X_tgt)
        total = total + omega_i * (task.expert.bias + task.expert.weight @ tau - W @ mu)
    return total / (sum(omega) + ridge)


def norm_affine(tasks: list[Task], A: dict[str, Tensor], ridge: float) -> dict[str, Tensor]:
    """Per channel [[Σq+λ, Σm], [Σm, N+λ]] [γ β]ᵀ = [Σ(qγ_i+mβ_i)+λγ_A, Σ(mγ_i+β_i)+λβ_A]; no β: γ alone."""
    has_beta = "bias" in A
    zero = torch.zeros_like(A["weight"])
    qq, mm, count = zero + ridge, zero, zero + ridge
    gamma_side, beta_side = ridge * A["weight"], ridge * A.get("bias", zero)
    for task in tasks:
        z = normalised(task.expert, task.X_cal)
        q, m = task.mean(z**2), task.mean(z)
        gamma_i, beta_i = task.expert.weight, task.expert.bias if has_beta else zero
        qq, mm, count = qq + q, mm + m, count + 1
        gamma_side, beta_side = gamma_side + q * gamma_i + m * beta_i, beta_side + m * gamma_i + beta_i
    if not has_beta:
        return {"weight": gamma_side / qq}
    system = torch.stack([qq, mm, mm, count], -1).reshape(-1, 2, 2)
    solution = torch.linalg.solve(system, torch.stack([gamma_side, beta_side], -1))
    return {"weight": solution[:, 0], "bias": solution[:, 1]}


def normalised(norm: nn.Module, x: Tensor) -> Tensor:
    """The norm's z, before its affine."""
    if isinstance(norm, nn.LayerNorm):
        return nn.functional.layer_norm(x, norm.normalized_shape, eps=norm.eps)
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    z = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    if not torch.allclose(norm.weight * z, norm(x), rtol=1e-4, atol=1e-5):
        raise ValueError(f"{type(norm).__name__} is not weight * z, the only RMSNorm that the oracle knows.")
    return z


def anchor(merged: nn.Module, base: nn.Module, rho: float) -> dict[str, Tensor]:
    """A = ρ W^merge + (1-ρ) W^base, for each parameter of a module."""
    return {k: rho * W + (1 - rho) * base.get_parameter(k) for k, W in merged.named_parameters()}


def module_inputs(model: nn.Module, block: str, batches: list[Batch], pooled: bool) -> dict[str, tuple[Tensor, Tensor]]:
    """Run the whole model; return the inputs (tokens, d_in) of each module of the block and their weights."""
    rows: dict[str, list[Tensor]] = {}
    weights: dict[str, list[Tensor]] = {}

    def collect(name: str, batch: Batch, x: Tensor) -> None:
        w = batch.get("attention_mask", torch.ones(x.shape[:2])).double()
        if pooled and name.split(".")[-1] not in KEY_VALUE:
            w = torch.cat([w[:, :1], OTHER_TOKENS * w[:, 1:]], 1)
        while w.ndim < x.ndim - 1:  # a norm over heads: each head is a row, which weighs what its token does
            w = w[..., None].expand(x.shape[: w.ndim + 1])
        rows.setdefault(name, []).append(x[w > 0])
        weights.setdefault(name, []).append(w[w > 0])

    for batch in batches:
        hooks = [
            module.register_forward_pre_hook(lambda _, args, n=f"{block}.{k}", b=batch: collect(n, b, args[0]))
            for k, module in model.get_submodule(block).named_modules()
            if isinstance(module, nn.Linear | nn.LayerNorm) or type(module).__name__.endswith("RMSNorm")
        ]
        model(**{k: v.double() if v.is_floating_point() else v for k, v in batch.items()})
        for hook in hooks:
            hook.remove()
    return {name: (torch.cat(rows[name]), torch.cat(weights[name])) for name in rows}


def block_names(model: nn.Module) -> list[str]:
    """Names of the members of the model's outermost ModuleList, in order."""
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    if len(outermost) != 1:
        raise ValueError(f"The outermost ModuleLists are {outermost}; the oracle expects exactly one.")
    return [f"{outermost[0]}.{i}" for i in range(len(lists[outermost[0]]))]


def as_float64(model: nn.Module) -> nn.Module:
    """A float64 copy that computes no gradients and drops nothing out."""
    return deepcopy(model).double().eval().requires_grad_(False)
