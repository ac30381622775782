"""The closed-form solvers: against NumPy in float64 from the method's equations, and where float32 is not enough."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from featcal_hf.errors import SolveError
from featcal_hf.features import InputFeatures
from featcal_hf.grams import InputMoments
from featcal_hf.moments import TaskInput
from featcal_hf.narrow import NarrowModule
from featcal_hf.norm_moments import NormMoments
from featcal_hf.solve import EPSILON, InputSystem, Linear, NormSystem, anchor, relative_step, task_weight

CPU = torch.device("cpu")
WIDTH, OUT, TOKENS, RHO, ALPHA = 10, 6, 50, 2.0, 0.3


def linear(generator: torch.Generator, bias: bool) -> Linear:
    weight = torch.randn(OUT, WIDTH, generator=generator)
    return Linear(weight, torch.randn(OUT, generator=generator) if bias else None)


class Problem:
    """A merged and a base module, two experts, and their features."""

    def __init__(self, bias: bool = True, tokens: tuple[int, int] = (TOKENS, TOKENS + 9)) -> None:
        generator = torch.Generator().manual_seed(0)
        self.merged, self.base = linear(generator, bias), linear(generator, bias)
        self.experts = [linear(generator, bias) for _ in range(2)]
        self.students = [torch.randn(count, WIDTH, generator=generator) + 0.2 for count in tokens]
        self.targets = [x + 0.4 * torch.randn(x.shape, generator=generator) for x in self.students]

    def moments(self, task: int, kind: str) -> TaskInput:
        expert = self.experts[task]
        narrow: dict[str, Tensor | NarrowModule] = {"module": expert.weight} if kind == "narrow" else {}
        outputs = {}
        if kind == "outputs":
            outputs = {"module": torch.nn.functional.linear(self.targets[task], expert.weight, expert.bias)}
            start = anchor(self.merged.weight, self.base.weight, RHO)
            narrow = {"module": NarrowModule(expert.weight, expert.bias, lambda: expert.weight - start, ALPHA)}
        moments = (
            InputFeatures(WIDTH, CPU)
            if kind in ("features", "few tokens")
            else InputMoments(WIDTH, TOKENS, narrow, CPU)
        )
        moments.add(self.students[task], self.targets[task], None, outputs)
        moments.average()
        return moments

    def solve(self, lambda_: float | None, scale: str, kind: str = "gram", base: bool = True) -> Linear:
        system = InputSystem(WIDTH, lambda_, RHO, ALPHA, scale, CPU, few_tokens=kind == "few tokens")
        origin = self.base if base else None
        for task, expert in enumerate(self.experts):
            system.add_task(self.moments(task, kind))
            system.add_module("module", expert, self.merged, origin)
        system.factor("block.module")
        return system.solve("module", self.merged, origin)

    def expected(self, lambda_: float | None, scale: str, base: bool = True) -> tuple[np.ndarray, np.ndarray | None]:
        """Equations 12 to 17 as they are in the paper: no step from the anchor, C instead of D."""
        grams = [array(student).T @ array(student) / len(student) for student in self.students]
        omegas = [1 / np.linalg.norm(gram) if scale == "frobenius" else WIDTH / np.trace(gram) for gram in grams]
        if lambda_ is None:
            total = sum(omega * gram for omega, gram in zip(omegas, grams, strict=True))
            tokens = np.mean([len(x) for x in self.students])
            lambda_ = max(1, np.sqrt(WIDTH / tokens)) * np.linalg.eigvalsh(total).mean()
        start = RHO * array(self.merged.weight) + (1 - RHO) * array((self.base if base else self.merged).weight)
        left = (lambda_ + EPSILON) * np.eye(WIDTH)
        right = lambda_ * start
        means, targets = [], []
        tasks = zip(self.experts, self.students, self.targets, omegas, grams, strict=True)
        for expert, student, target, omega, gram in tasks:
            x, t = array(student), (1 - ALPHA) * array(student) + ALPHA * array(target)
            left += omega * gram
            right += omega * array(expert.weight) @ (t.T @ x / len(x))
            means.append(x.mean(0))
            targets.append(t.mean(0))
        weight = np.linalg.solve(left, right.T).T
        if self.merged.bias is None or self.base.bias is None:
            return weight, None
        side = lambda_ * (RHO * array(self.merged.bias) + (1 - RHO) * array((self.base if base else self.merged).bias))
        for omega, mean, target, expert in zip(omegas, means, targets, self.experts, strict=True):
            side += omega * (array(expert.bias) + array(expert.weight) @ target - weight @ mean)
        return weight, side / (sum(omegas) + lambda_)


def array(value: Tensor | None) -> np.ndarray:
    assert value is not None
    return value.double().numpy()


def assert_close(ours: Tensor, exact: np.ndarray) -> None:
    assert ours.dtype == torch.float32
    assert np.linalg.norm(array(ours) - exact) <= 3e-6 * np.linalg.norm(exact)


@pytest.mark.parametrize("kind", ["gram", "narrow", "outputs", "features", "few tokens"])
@pytest.mark.parametrize("scale", ["frobenius", "trace"])
@pytest.mark.parametrize("lambda_", [0.05, 3.0, None], ids=["small ridge", "large ridge", "adaptive ridge"])
def test_weight_and_bias_solve_the_papers_equations(lambda_: float | None, scale: str, kind: str) -> None:
    problem = Problem(tokens=(3, 4)) if kind == "few tokens" else Problem()
    weight, bias = problem.expected(lambda_, scale)
    solved = problem.solve(lambda_, scale, kind)
    assert_close(solved.weight, weight)
    assert solved.bias is not None
    assert bias is not None
    assert_close(solved.bias, bias)


def test_a_module_without_bias_or_base_solves_the_same_equations() -> None:
    problem = Problem(bias=False)
    solved = problem.solve(0.05, "trace", base=False)
    assert solved.bias is None
    assert_close(solved.weight, problem.expected(0.05, "trace", base=False)[0])


def test_the_solution_is_the_minimum_of_the_papers_objective() -> None:
    problem = Problem(bias=False)
    weight = problem.solve(0.05, "frobenius").weight.double()
    start = anchor(problem.merged.weight, problem.base.weight, RHO).double()

    def objective(candidate: Tensor) -> float:
        total = (0.05 + EPSILON) * (candidate - start).square().sum()
        for expert, student, target in zip(problem.experts, problem.students, problem.targets, strict=True):
            x = student.double()
            blend = (1 - ALPHA) * x + ALPHA * target.double()
            omega = 1 / (x.T @ x / len(x)).norm()
            total += omega / len(x) * (candidate @ x.T - expert.weight.double() @ blend.T).square().sum()
        return float(total)

    lowest = objective(weight)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        assert objective(weight + 1e-3 * torch.randn(weight.shape, generator=generator)) > lowest


@pytest.mark.parametrize("kind", ["gram", "narrow", "outputs", "features"])
def test_experts_equal_to_merged_and_base_give_the_merged_parameters_bit_by_bit(kind: str) -> None:
    problem = Problem()
    problem.base = problem.merged
    problem.experts = [problem.merged, problem.merged]
    problem.targets = problem.students
    solved = problem.solve(None, "trace", kind)
    assert torch.equal(solved.weight, problem.merged.weight)
    assert solved.bias is not None
    assert torch.equal(solved.bias, problem.merged.bias)


def test_task_weights_give_every_gram_norm_one_or_mean_eigenvalue_one() -> None:
    moments = Problem().moments(0, "gram")
    assert isinstance(moments, InputMoments)
    assert float((task_weight(moments, WIDTH, "frobenius") * moments.gram).norm()) == pytest.approx(1)
    assert float((task_weight(moments, WIDTH, "trace") * moments.gram).trace()) == pytest.approx(WIDTH)


def test_features_that_are_all_zero_leave_the_anchor() -> None:
    problem = Problem(bias=False)
    problem.students = [torch.zeros_like(x) for x in problem.students]
    problem.targets = problem.students
    assert torch.equal(problem.solve(0.05, "frobenius").weight, anchor(problem.merged.weight, problem.base.weight, RHO))


def near_singular(width: int = 256, rank: int = 3) -> tuple[InputMoments, Tensor]:
    """Moments of rank 3: with a tiny ridge, positive definite in float64 and not in float32."""
    moments = InputMoments(width, rank, {}, CPU)
    features = torch.randn(rank, width, generator=torch.Generator().manual_seed(0))
    moments.add(features, features, None)
    moments.average()
    return moments, features


def test_a_gram_that_float32_can_not_factor_is_factored_in_float64() -> None:
    moments, _ = near_singular()
    system = InputSystem(256, 1e-9, 1.0, 0.0, "frobenius", CPU)
    generator = torch.Generator().manual_seed(1)
    merged = Linear(torch.randn(4, 256, generator=generator), None)
    expert = Linear(torch.randn(4, 256, generator=generator), None)
    system.add_task(moments)
    system.add_module("module", expert, merged, None)
    omega = task_weight(moments, 256, "frobenius")
    regularised = omega * moments.gram + (1e-9 + EPSILON) * torch.eye(256)
    assert int(torch.linalg.cholesky_ex(regularised)[1]) != 0, "float32 would have done"
    system.factor("block.module")
    solved = system.solve("module", merged, None).weight
    # Such a system's solution is mostly rounding of its right-hand side, so it is the equation that is checked.
    side = torch.zeros(4, 256)
    moments.add_answer(side, omega, "module", slice(0, 4), expert.weight - merged.weight, expert.weight, 0.0)
    left = (solved.double() - merged.weight.double()) @ regularised.double()
    assert solved.dtype == torch.float32
    assert float((left - side.double()).norm() / side.double().norm()) < 1e-6


def test_a_gram_that_is_not_positive_definite_is_an_error_that_names_the_module_and_the_numbers() -> None:
    moments, _ = near_singular(8)
    moments.gram -= 0.5 * moments.gram.diagonal().mean() * torch.eye(8)
    system = InputSystem(8, 1e-5, 1.0, 0.3, "frobenius", CPU)
    system.add_task(moments)
    with pytest.raises(SolveError) as caught:
        system.factor("layers.3.self_attn.q_proj/k_proj")
    message = str(caught.value)
    for words in ("layers.3.self_attn.q_proj/k_proj", "8 x 8", "lambda 1e-05", "3 tokens", "raise featcal.lambda"):
        assert words in message


@pytest.mark.parametrize("beta", [False, True], ids=["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("lambda_", [0.05, None])
def test_a_norms_affine_solves_its_ridge_system_channel_by_channel(lambda_: float | None, beta: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def vector() -> Tensor:
        return torch.randn(WIDTH, generator=generator)

    gamma, offset = vector(), vector() if beta else None
    experts = [(vector(), vector() if beta else None) for _ in range(3)]
    features = [torch.randn(30, WIDTH, generator=generator) + 0.3 for _ in experts]
    system = NormSystem(gamma, offset, lambda_)
    for (expert_gamma, expert_beta), z in zip(experts, features, strict=True):
        moments = NormMoments(WIDTH, CPU)
        moments.add(z, None)
        moments.average()
        system.add_task(moments, expert_gamma, expert_beta)
    new_gamma, new_beta = system.solve()
    ridge = 0.01 if lambda_ is None else lambda_
    solutions = []
    for channel in range(WIDTH):
        left, right = (
            ridge * np.eye(2),
            ridge * np.array([float(gamma[channel]), float(offset[channel]) if beta else 0]),
        )
        for (expert_gamma, expert_beta), z in zip(experts, features, strict=True):
            values = array(z[:, channel])
            gram = np.array([[np.mean(values**2), values.mean()], [values.mean(), 1.0]])
            left += gram
            right += gram @ np.array([float(expert_gamma[channel]), float(expert_beta[channel]) if beta else 0.0])
        solutions.append(np.linalg.solve(left, right) if beta else [right[0] / left[0, 0], 0.0])
    exact = np.array(solutions)
    assert_close(new_gamma, exact[:, 0])
    if beta:
        assert new_beta is not None
        assert_close(new_beta, exact[:, 1])
    else:
        assert new_beta is None


def test_a_norm_whose_experts_agree_with_its_anchor_stays_bit_by_bit() -> None:
    gamma, beta = torch.randn(WIDTH), torch.randn(WIDTH)
    moments = NormMoments(WIDTH, CPU)
    moments.add(torch.randn(20, WIDTH), None)
    moments.average()
    system = NormSystem(gamma, beta, None)
    system.add_task(moments, gamma, beta)
    new_gamma, new_beta = system.solve()
    assert torch.equal(new_gamma, gamma)
    assert new_beta is not None
    assert torch.equal(new_beta, beta)


def test_the_anchor_extrapolates_from_the_base_and_is_exact_where_nothing_moved() -> None:
    merged, base = torch.randn(3, 4).bfloat16(), torch.randn(3, 4).bfloat16()
    assert anchor(merged, base, 2.0).dtype == torch.float32
    torch.testing.assert_close(anchor(merged, base, 2.0), 2 * merged.float() - base.float())
    torch.testing.assert_close(anchor(merged, base, 0.0), base.float())
    assert torch.equal(anchor(merged, merged, 2.2), merged.float())
    assert torch.equal(anchor(merged, None, 1.0), merged.float())


def test_a_relative_step_is_the_ratio_of_norms_also_of_large_and_of_zero_matrices() -> None:
    old = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(0))
    new = old + 0.1 * torch.randn(2048, 2048, generator=torch.Generator().manual_seed(1))
    exact = float((new.double() - old.double()).norm() / old.double().norm())
    assert relative_step(new, old) == pytest.approx(exact, rel=1e-6)
    zero = torch.zeros(3)
    assert relative_step(zero, zero) == 0.0
    assert relative_step(torch.ones(3), zero) == math.inf
