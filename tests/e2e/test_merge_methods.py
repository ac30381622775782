"""Recipes of other kinds: which models are experts, which is the base, and which recipes have no counterpart blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_merge import Merge, loaded_state, run_mergekit
from transformers import LlamaForCausalLM

from featcal_hf import RecipeError, Settings, calibrate, calibrate_model
from featcal_hf.preparation import prepare


def tasks(root: Path, *experts: str) -> str:
    return "featcal:\n  samples: 12\n  holdout: 4\n  tasks:\n" + "".join(
        f"    - {{model: {root / expert}, dataset: {root / data}.jsonl, text: text}}\n"
        for expert, data in zip(experts, "ab", strict=True)
    )


def slerp(root: Path) -> str:
    return (
        f"merge_method: slerp\nbase_model: {root / 'base'}\nmodels:\n"
        f"  - model: {root / 'base'}\n  - model: {root / 'a'}\nparameters: {{t: 0.5}}\ndtype: float32\n"
        + tasks(root, "base", "a")
    )


def linear(root: Path) -> str:
    return (
        f"merge_method: linear\nmodels:\n  - {{model: {root / 'a'}, parameters: {{weight: 0.5}}}}\n"
        f"  - {{model: {root / 'b'}, parameters: {{weight: 0.5}}}}\ndtype: float32\n" + tasks(root, "a", "b")
    )


def ties(root: Path) -> str:
    return (
        f"merge_method: ties\nbase_model: {root / 'base'}\nmodels:\n"
        f"  - {{model: {root / 'a'}, parameters: {{weight: 0.5, density: 0.6}}}}\n"
        f"  - {{model: {root / 'b'}, parameters: {{weight: 0.5, density: 0.6}}}}\ndtype: float32\n"
        + tasks(root, "a", "b")
    )


def slices(root: Path) -> str:
    def sources(start: int, end: int) -> str:
        return "".join(
            f"      - {{model: {root / name}, layer_range: [{start}, {end}], parameters: {{weight: 0.5}}}}\n"
            for name in ("base", "a", "b")
        )

    return (
        f"merge_method: task_arithmetic\nbase_model: {root / 'base'}\nslices:\n  - sources:\n{sources(0, 1)}"
        f"  - sources:\n{sources(1, 3)}dtype: float32\n" + tasks(root, "a", "b")
    )


RECIPES = {
    "slerp, whose base is an expert too": (slerp, "base", ("base", "a")),
    "linear, without a base": (linear, None, ("a", "b")),
    "ties": (ties, "base", ("a", "b")),
    "slices that cover every block": (slices, "base", ("a", "b")),
}


@pytest.mark.parametrize("kind", RECIPES)
def test_the_run_uses_the_recipes_base_and_experts(merge: Merge, kind: str) -> None:
    write, base, experts = RECIPES[kind]
    recipe, merged = merge.root / "other.yml", merge.root / "other"
    recipe.write_text(write(merge.root))
    run_mergekit(recipe, merged)
    in_memory = LlamaForCausalLM.from_pretrained(merged)
    data = prepare(recipe, merged).data
    calibrate_model(
        in_memory,
        base=None if base is None else LlamaForCausalLM.from_pretrained(merge.root / base),
        experts={name: LlamaForCausalLM.from_pretrained(merge.root / name) for name in experts},
        batches={name: [batch.student for batch in task.calibration] for name, task in zip(experts, data, strict=True)},
        settings=Settings(),
    )
    before = loaded_state(merged)
    calibrate(recipe, merged)
    after = loaded_state(merged)
    assert any(not torch.equal(after[name], value) for name, value in before.items())
    for name, value in in_memory.state_dict().items():
        torch.testing.assert_close(after[name], value, rtol=1e-5, atol=1e-7)


def test_stacked_layers_are_refused_before_any_model_is_opened(merge: Merge) -> None:
    recipe = merge.root / "stack.yml"
    recipe.write_text(
        f"merge_method: passthrough\nslices:\n  - sources: [{{model: {merge.root / 'a'}, layer_range: [0, 2]}}]\n"
        f"  - sources: [{{model: {merge.root / 'b'}, layer_range: [1, 3]}}]\ndtype: float32\n"
        + tasks(merge.root, "a", "b")
    )
    with pytest.raises(RecipeError, match="passthrough"):
        prepare(recipe, merge.root / "absent")


def test_slices_that_leave_out_the_models_last_block_are_refused(merge: Merge) -> None:
    recipe = merge.root / "short.yml"
    recipe.write_text(slices(merge.root).replace("[1, 3]", "[1, 2]"))
    with pytest.raises(RecipeError, match=r"slices make 2 blocks, but .* has 3"):
        prepare(recipe, merge.merged)
