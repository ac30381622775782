from __future__ import annotations

from typing import Any

import pytest
from records import contents

from featcal_hf.advice import Advice, advice, missing, verdict
from featcal_hf.recorded import EvalRecord, RunRecord, run_record


def record(change: Any = lambda made: None, **settings: Any) -> RunRecord:
    made = contents(**settings)
    change(made)
    return run_record(made, "x")


def found(run: RunRecord, evaluation: EvalRecord | None = None) -> list[Advice]:
    return advice(run, evaluation)


def test_the_verdict_says_how_much_less_drift_and_what_became_of_outputs() -> None:
    assert verdict(record()) == (
        "Every task's features are closer to its expert's: 75% less drift on average, the outputs' KL from the "
        "experts' 0.400 → 0.100, in 12 s."
    )


def test_the_verdict_of_a_run_without_held_out_rows_claims_nothing() -> None:
    assert verdict(record(held_out=False)) == "Calibrated 4 blocks in 12 s; no rows were held out to measure drift on."


def test_a_run_that_did_as_asked_has_no_advice() -> None:
    assert found(record()) == []


def test_a_task_that_drifts_more_than_before_is_a_warning_and_in_the_verdict() -> None:
    run = record(before=0.1, after=0.4)

    assert verdict(run).startswith("Features moved away from the expert's for math, code (0 of 2 tasks improved, 12 s)")
    assert verdict(run).endswith("give more samples, or lower rho towards 1.")
    first = found(run)[0]
    assert first.warning
    assert first.found == "Task math drifts more than before: 10% → 40% at the last block."


def test_a_large_step_names_block_and_module_and_what_to_change() -> None:
    def move(made: dict[str, Any]) -> None:
        made["blocks"][3]["modules"][1]["step"] = 0.41
        made["blocks"][1]["modules"][0]["step"] = 0.55

    (adaptive,) = found(record(move))
    assert adaptive.found == (
        "Block 1 moved 55% from the merged weights (self_attn.q_proj), and 1 more modules moved over 40%."
    )
    assert "give more samples, or lower rho towards 1 (now 2)" in adaptive.action
    assert not adaptive.warning

    def fixed(made: dict[str, Any]) -> None:
        move(made)
        made["settings"] |= {"lambda": 0.05, "rho": 1.0}

    assert found(record(fixed))[0].action == "If a task got worse, raise lambda (now 0.05)."


def test_a_lambda_below_the_rounding_of_float32_is_a_warning() -> None:
    run = record(lambda made: made["settings"].update({"lambda": 1e-8}))

    assert [item.found[:12] for item in found(run)] == ["lambda 1e-08"]
    assert found(record(lambda made: made["settings"].update({"lambda": 1e-5}))) == []


def test_a_system_that_float32_cannot_resolve_is_named() -> None:
    (item,) = found(record(lambda made: made["blocks"][2]["inputs"][0].update(condition=3e9)))

    assert item.warning
    assert item.found == (
        "1 systems are worse conditioned than float32 resolves, the worst 3e+09 (block 2, self_attn.q_proj)."
    )


def test_massive_activations_matter_where_the_scale_is_frobenius() -> None:
    def massive(made: dict[str, Any]) -> None:
        made["blocks"][0]["inputs"][1]["dominance"] = 0.97

    assert found(record(massive)) == []

    def frobenius(made: dict[str, Any]) -> None:
        massive(made)
        made["settings"] |= {"scale": "frobenius", "lambda": 0.05}

    assert "most in block 0, mlp.down_proj: 97%" in found(record(frobenius))[0].found


def test_warnings_of_the_recipe_are_passed_on() -> None:
    said = ["recipe.yml:4:9: x is not a parameter; did you mean 'y'?", "it was merged by another recipe"]
    assert [item.found for item in found(record(lambda made: made.update(warnings=said)))] == [said[0], f"{said[1]}."]


def test_few_tokens_beside_the_widest_module_and_warnings_of_the_data_are_passed_on() -> None:
    def few(made: dict[str, Any]) -> None:
        made["tasks"]["code"] |= {"tokens": 100, "warnings": ["12 of 64 rows were truncated"]}

    data, tokens = found(record(few))

    assert (data.warning, data.found) == (True, "Task code: 12 of 64 rows were truncated.")
    assert tokens.found.startswith("code gave fewer tokens than the widest modules have inputs (256)")


@pytest.mark.parametrize(
    ("higher", "merged", "calibrated", "warns"),
    [(True, 0.5, 0.4, True), (True, 0.5, 0.6, False), (False, 20.0, 25.0, True), (False, 20.0, 20.001, False)],
)
def test_a_metric_that_got_worse_is_a_warning(higher: bool, merged: float, calibrated: float, warns: bool) -> None:
    line = {"task": "math", "metric": "m", "higher_is_better": higher, "merged": merged, "calibrated": calibrated}
    evaluation = EvalRecord.model_validate({"results": [line]})

    assert [item.warning for item in found(record(), evaluation)] == [True] * warns


def test_what_is_missing_says_how_to_get_it() -> None:
    without = missing(record(held_out=False), None)
    assert "featcal.holdout" in without[0].action
    assert "featcal-hf eval" in without[1].action

    def old(made: dict[str, Any]) -> None:
        made["blocks"][-1]["outcome"] = {}

    assert "before features, outputs and costs were recorded" in missing(record(old), None)[0].found

    def headless(made: dict[str, Any]) -> None:
        made["blocks"][-1]["outcome"]["math"] |= {"output": None, "no_output": "BertModel has no logits"}

    assert missing(record(headless), EvalRecord(results=[]))[0].found == (
        "Task math has no output drift: BertModel has no logits."
    )
