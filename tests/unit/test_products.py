"""Products of features: summed in float32, exactly, and rounded where nothing is lost by it and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from featcal_hf import Settings, calibrate_model
from featcal_hf.grams import GATHERED_ROWS, InputMoments
from featcal_hf.narrow import NarrowModule
from featcal_hf.products import (
    TRIANGLE_ROWS,
    add_lower_triangle,
    add_product,
    float32_products,
    mirror_lower_triangle,
    multiplies_bfloat16,
)

CPU = torch.device("cpu")
SIZE = TRIANGLE_ROWS + 5
needs_bfloat16_units = pytest.mark.skipif(
    not multiplies_bfloat16(CPU), reason="this processor has no units that multiply bfloat16 and add in float32"
)


def features(rows: int, width: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator).to(dtype)


def relative_error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


@pytest.fixture
def rounding_allowed() -> Iterator[None]:
    """A process that lets PyTorch round float32 products."""
    with float32_products(rounded=True):
        yield


def test_a_triangle_holds_the_lower_part_of_the_whole_product_and_its_mirror_the_rest() -> None:
    x = features(40, SIZE, 0)
    total = torch.zeros(SIZE, SIZE)
    add_lower_triangle(total, x, x, 0.5)
    exact = 0.5 * x.double().T @ x.double()
    assert relative_error(total.tril(), exact.tril()) < 1e-6
    mirror_lower_triangle(total)
    assert torch.equal(total, total.T)
    assert relative_error(total, exact) < 1e-6


def test_a_product_is_added_to_what_is_there() -> None:
    left, right = features(40, 3, 0), features(40, 5, 1)
    total = torch.ones(3, 5)
    add_product(total, left, right)
    assert relative_error(total, 1 + left.double().T @ right.double()) < 1e-6


@needs_bfloat16_units
def test_rounded_products_of_bfloat16_numbers_are_as_exact_as_float32() -> None:
    x = features(2000, 64, 0, torch.bfloat16).float()
    exact = x.double().T @ x.double()
    with float32_products(rounded=True):
        assert relative_error(x.T @ x, exact) < 1e-6
        y = features(2000, 64, 0)
        assert relative_error(y.T @ y, y.double().T @ y.double()) > 1e-5, "nothing was rounded, so nothing was tested"


@pytest.mark.usefixtures("rounding_allowed")
def test_float32_products_are_exact_though_the_process_lets_them_be_rounded() -> None:
    x = features(500, 64, 0)
    with float32_products(rounded=False):
        assert relative_error(x.T @ x, x.double().T @ x.double()) < 1e-6


@pytest.mark.parametrize("rounded", [False, True])
def test_what_the_process_allowed_is_put_back_even_after_an_error(rounded: bool) -> None:
    def allowed() -> tuple[str, str]:
        return torch.backends.mkldnn.matmul.fp32_precision, torch.backends.cuda.matmul.fp32_precision

    before = allowed()
    expected = [("ieee", "ieee"), ("bf16", "ieee")]

    def fail() -> None:
        with float32_products(rounded):
            assert allowed() == expected[rounded]
            with float32_products(not rounded):
                assert allowed() == expected[not rounded]
            assert allowed() == expected[rounded]
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        fail()
    assert allowed() == before


@pytest.mark.parametrize("narrow", [False, True], ids=["all outputs", "few outputs"])
@pytest.mark.parametrize(("dtype", "cross_error"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-9)])
def test_moments_of_many_tokens_are_exact_in_either_precision(
    dtype: torch.dtype, cross_error: float, narrow: bool
) -> None:
    tokens = 3 * GATHERED_ROWS + 7
    student, noise = features(tokens, 48, 0, dtype), 0.1 * features(tokens, 48, 1)
    expert = (student.float() + noise).to(dtype)
    weight = features(8, 48, 2, dtype)
    moments = InputMoments(48, tokens, {"module": weight} if narrow else {}, CPU)
    for rows in range(0, tokens, 500):
        moments.add(student[rows : rows + 500], expert[rows : rows + 500], None)
    moments.average()
    x, delta = student.double(), expert.double() - student.double()
    cross = delta.T @ x / tokens
    assert relative_error(moments.gram, x.T @ x / tokens) < 1e-6
    ours = moments.narrow_cross["module"] if moments.cross is None else moments.cross
    # Where bfloat16 units take part, the drift is rounded to what they multiply, each token's once.
    assert relative_error(ours, weight.double() @ cross if narrow else cross) < cross_error


@pytest.mark.parametrize("moved", [True, False], ids=["the expert reads something else", "both read the same"])
@pytest.mark.parametrize("weighted", ["all alike", "first tokens", "any"])
def test_the_answers_of_a_narrow_bfloat16_module_are_rounded_once_and_only_on_units_for_it(
    weighted: str, moved: bool
) -> None:
    tokens = GATHERED_ROWS + 300
    student, weight = features(tokens, 48, 0, torch.bfloat16), features(8, 48, 2, torch.bfloat16)
    expert = student + 0.1 * features(tokens, 48, 1, torch.bfloat16) if moved else student.clone()
    gap = 0.1 * features(8, 48, 3)
    counts = {
        "all alike": None,
        "first tokens": torch.where(torch.arange(tokens) % 5 == 0, 1.0, 0.01),
        "any": torch.rand(tokens, generator=torch.Generator().manual_seed(4)),
    }[weighted]
    module = NarrowModule(weight, None, gap.clone, 0.3)
    assert not module.needs_outputs
    moments = InputMoments(48, tokens, {"module": module}, CPU)
    moments.add(student, expert, counts)
    moments.average()
    answer = torch.zeros(8, 48)
    moments.add_answer(answer, 1.0, "module", slice(0, 8), gap, weight.float(), 0.3)
    x, w = student.double(), (torch.ones(tokens) if counts is None else counts).double()
    outputs = x @ gap.double().T + 0.3 * (expert.double() - x) @ weight.double().T
    exact = (w[:, None] * outputs).T @ x / w.sum()
    gram = torch.zeros(48, 48)
    moments.add_gram(gram, 1.0)
    assert relative_error(gram.tril(), ((w[:, None] * x).T @ x / w.sum()).tril()) < 1e-6
    # Gap, drift, their products and the sum are rounded, each by 2^-9 of its numbers at most and independently.
    assert relative_error(answer, exact) < (1e-6 if weighted == "any" or not multiplies_bfloat16(CPU) else 2**-8)


def test_float32_moments_are_never_rounded_whatever_the_expert_is() -> None:
    student, expert = features(300, 48, 0), features(300, 48, 1, torch.bfloat16)
    moments = InputMoments(48, 300, {}, CPU)
    moments.add(student, expert, None)
    moments.average()
    assert relative_error(moments.gram, student.double().T @ student.double() / 300) < 1e-6


def llama(dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=61,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_do_not_differ_stay_as_they_are_to_the_last_bit(dtype: torch.dtype) -> None:
    ids = torch.randint(0, 61, (8, 30), generator=torch.Generator().manual_seed(1))
    merged, expert = llama(dtype), llama(dtype)
    calibrate_model(merged, base=llama(dtype), experts={"a": expert}, batches={"a": [{"input_ids": ids}]})
    for name, value in expert.state_dict().items():
        assert torch.equal(merged.state_dict()[name], value), name


def calibrated(allowed: bool) -> dict[str, Tensor]:
    ids = torch.randint(0, 61, (8, 30), generator=torch.Generator().manual_seed(1))
    merged, expert = llama(torch.float32), llama(torch.float32)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in expert.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    with float32_products(rounded=allowed):
        calibrate_model(
            merged, experts={"a": expert}, batches={"a": [{"input_ids": ids}]}, settings=Settings(lambda_=0.01)
        )
    return merged.state_dict()


def test_a_float32_model_is_calibrated_without_rounding_whatever_the_process_allows() -> None:
    exact, allowed = calibrated(allowed=False), calibrated(allowed=True)
    for name, value in exact.items():
        assert torch.equal(allowed[name], value), name
