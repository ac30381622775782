from __future__ import annotations

import json
from pathlib import Path

import pytest
from records import contents

from featcal_hf.card_facts import read_folder
from featcal_hf.errors import CardError, CheckpointError
from featcal_hf.recorded import read_evaluation, read_run, run_record


def test_a_record_is_read_with_what_a_newer_version_adds(tmp_path: Path) -> None:
    (tmp_path / "featcal.json").write_text(json.dumps(contents() | {"a key of the future": [1]}))

    run = read_run(tmp_path)

    assert run.settings.lambda_ is None
    assert run.blocks[3].drift["code"].after.relative == 0.1
    assert run.measured == ["math", "code"]


def test_a_folder_that_was_never_calibrated_is_told_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no featcal.json; name a folder that `featcal-hf calibrate"):
        read_run(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "\x00\x01"])
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "featcal.json").write_text(text)

    with pytest.raises(CheckpointError, match=r"featcal.json can't be read: .* Run the command that writes it again"):
        read_run(tmp_path)


def test_a_record_of_something_else_names_the_first_thing_that_is_wrong() -> None:
    broken = contents()
    del broken["blocks"][2]["modules"][0]["step"]

    with pytest.raises(CheckpointError, match=r"x is not what featcal-hf writes.*blocks.2.modules.0.step: Field requ"):
        run_record(broken, "x")
    with pytest.raises(CheckpointError, match="the file: Input should be"):
        run_record([], "x")  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="blocks: List should have at least 1 item"):
        run_record(contents(paths=[]), "x")


def test_a_weight_that_was_zero_may_have_moved_infinitely_but_drift_is_a_number() -> None:
    made = contents()
    made["blocks"][0]["modules"][0]["step"] = float("inf")
    assert run_record(made, "x").blocks[0].modules[0].step == float("inf")

    made["blocks"][0]["drift"]["math"]["after"]["relative"] = float("nan")
    with pytest.raises(
        CheckpointError, match=r"blocks\.0\.drift\.math\.after\.relative: Input should be a finite number"
    ):
        run_record(made, "x")


def test_an_evaluation_is_read_with_the_models_that_were_measured(tmp_path: Path) -> None:
    path = tmp_path / "featcal_eval.json"
    assert read_evaluation(path) is None
    line = {"task": "math", "metric": "accuracy", "higher_is_better": True, "merged": 0.5, "calibrated": 0.75}
    path.write_text(json.dumps({"results": [line], "lm_eval": []}))

    found = read_evaluation(path)

    assert found is not None
    assert (found.results[0].merged, found.results[0].calibrated, found.results[0].expert) == (0.5, 0.75, None)


def test_a_folder_that_is_not_there_is_told_from_one_that_was_not_calibrated(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere is not a folder"):
        read_run(tmp_path / "nowhere")


def test_a_card_of_a_damaged_record_advises_a_new_merge_not_a_second_calibration(tmp_path: Path) -> None:
    with pytest.raises(CardError, match="calibrate the model first"):
        read_folder(tmp_path)
    (tmp_path / "featcal.json").write_text('{"blocks": [')
    with pytest.raises(CardError, match="the record is damaged: merge again, then calibrate"):
        read_folder(tmp_path)
