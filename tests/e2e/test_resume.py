"""A run that is killed at any block goes on from there, and ends with the bytes of one that wasn't."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crashes import run_killed
from families import FAMILIES, TASKS, base_model, expert_model, save_side_files, write_data
from safetensors.torch import load_file, save_file
from tiny_merge import Merge, Outcome, all_but_work, contents, copy_merge

from featcal_hf import calibrate
from featcal_hf.calibrate import REPLAY, Step
from featcal_hf.journal import JOURNAL
from featcal_hf.save import UNFINISHED, WORK

Featcal = Callable[..., Outcome]
BLOCKS = 3


def result(folder: Path) -> dict[str, Any]:
    """Every file's digest, and the report with times and memory left out."""
    found: dict[str, Any] = contents(folder)
    found["featcal.json"] = json.loads((folder / "featcal.json").read_text(), object_hook=_without_costs)
    return found


def _without_costs(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in ("seconds", "costs", "peak_bytes")}


def kill_at(block: int, doing: str | None = None) -> Callable[[Step], None]:
    """Kill this process before a block's first step, or before another one of its steps."""

    def look(step: Step) -> None:
        if step.block == block and step.doing != REPLAY and doing in (None, step.doing):
            os.kill(os.getpid(), signal.SIGKILL)

    return look


def killed(action: Callable[[], object]) -> None:
    assert not run_killed(action, Path("/nothing below here"), 0)


def pickle_it(merge: Merge) -> None:
    for path in merge.merged.glob("*.safetensors"):
        torch.save(load_file(path), path.with_name(path.name.replace("model", "pytorch_model")).with_suffix(".bin"))
        path.unlink()
    for index in merge.merged.glob("*.safetensors.index.json"):
        text = index.read_text().replace('"model-', '"pytorch_model-').replace(".safetensors", ".bin")
        (index.parent / "pytorch_model.bin.index.json").write_text(text)
        index.unlink()


@pytest.mark.parametrize("holdout", [True, False], ids=["held out rows", "none held out"])
@pytest.mark.parametrize(
    ("layout", "pickled", "in_place"),
    [("pristine", False, True), ("sharded", False, True), ("sharded", False, False), ("sharded", True, True)],
    ids=["one file in place", "shards in place", "shards to an output", "pickles in place"],
)
def test_a_run_killed_at_any_block_ends_with_the_bytes_of_one_that_was_not(
    layout: str, pickled: bool, in_place: bool, holdout: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    merge = copy_merge(request.getfixturevalue(layout), tmp_path)
    if pickled:
        pickle_it(merge)
    if not holdout:
        merge.edit_recipe("holdout: 4", "holdout: 0")
    original, output = tmp_path / "original", None if in_place else tmp_path / "output"
    shutil.copytree(merge.merged, original)

    def restore() -> None:
        shutil.rmtree(merge.merged)
        shutil.copytree(original, merge.merged)
        shutil.rmtree(tmp_path / "output", ignore_errors=True)

    target = merge.merged if output is None else output
    calibrate(merge.recipe, merge.merged, output)
    expected = result(target)
    assert bool(expected["featcal.json"]["blocks"][0]["drift"]) == holdout
    for block in range(BLOCKS):
        restore()
        killed(lambda block=block: calibrate(merge.recipe, merge.merged, output, on_step=kill_at(block)))
        assert contents(original) == all_but_work(merge.merged)
        steps: list[Step] = []
        calibrate(merge.recipe, merge.merged, output, on_step=steps.append)
        assert [step.block for step in steps if step.doing == REPLAY] == list(range(block))
        assert [step.block for step in steps if step.doing == "solve"] == list(range(block, BLOCKS))
        assert result(target) == expected, block


def test_a_run_killed_again_and_again_in_the_middle_of_blocks_still_arrives(sharded: Merge, tmp_path: Path) -> None:
    merge = copy_merge(sharded, tmp_path)
    whole = copy_merge(sharded, tmp_path / "whole")
    calibrate(whole.recipe, whole.merged)
    for block, doing in ((0, "solve"), (0, "b"), (1, "b"), (2, "solve"), (2, "a")):
        killed(lambda block=block, doing=doing: calibrate(merge.recipe, merge.merged, on_step=kill_at(block, doing)))
    calibrate(merge.recipe, merge.merged)
    for path in whole.merged.glob("*.safetensors"):
        assert (merge.merged / path.name).read_bytes() == path.read_bytes()
    assert not (merge.merged / WORK).exists()


@pytest.mark.parametrize("name", ["t5", "gpt2", "mistral"])
def test_encoder_decoders_transposed_weights_and_bfloat16_are_replayed_exactly(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    rows = write_data(tmp_path)
    base = base_model(family)
    models = {"base": base, **{task: expert_model(family, base, number) for number, task in enumerate(TASKS)}}
    for label, model in models.items():
        model.save_pretrained(tmp_path / label)
        save_side_files(family, tmp_path / label)
    shutil.copytree(tmp_path / "base", tmp_path / "merged")
    states = [load_file(tmp_path / label / "model.safetensors") for label in models]
    mean = {name: torch.stack([state[name].float() for state in states]).mean(0) for name in states[0]}
    save_file(
        {name: value.to(states[0][name].dtype) for name, value in mean.items()},
        tmp_path / "merged" / "model.safetensors",
        {"format": "pt"},
    )
    recipe = tmp_path / "recipe.yml"
    listed = [{"model": str(tmp_path / task), "parameters": {"weight": 0.5}} for task in TASKS]
    tasks = [{"model": str(tmp_path / task), "dataset": str(rows[task]), **family.reads} for task in TASKS]
    recipe.write_text(
        json.dumps(
            {
                "merge_method": "task_arithmetic",
                "base_model": str(tmp_path / "base"),
                "models": listed,
                "featcal": {"samples": 24, "holdout": 8, "tasks": tasks},
            }
        )
    )
    calibrate(recipe, tmp_path / "merged", tmp_path / "whole", write_model_card=False)
    blocks = len(json.loads((tmp_path / "whole" / "featcal.json").read_text())["blocks"])
    for block in range(1, blocks):
        output = tmp_path / f"killed-{block}"
        killed(
            lambda output=output, block=block: calibrate(recipe, tmp_path / "merged", output, on_step=kill_at(block))
        )
        calibrate(recipe, tmp_path / "merged", output, write_model_card=False)
        assert result(output) == result(tmp_path / "whole"), block


def stopped(merge: Merge, blocks: int, output: Path | None = None) -> None:
    """Leave a run behind that was killed after so many blocks."""
    killed(lambda: calibrate(merge.recipe, merge.merged, output, on_step=kill_at(blocks)))


def test_check_and_calibrate_say_where_the_run_goes_on(merge: Merge, featcal: Featcal) -> None:
    stopped(merge, 2)
    before = contents(merge.root)
    says = f"going on from block 3 of 3: 2 are finished in {merge.merged}/{WORK}"
    assert says in featcal("check", merge.recipe, merge.merged).output
    assert contents(merge.root) == before
    outcome = featcal(merge.recipe, merge.merged)
    assert outcome.code == 0
    assert says in outcome.output
    assert "block 2/3 layers.1, finished before" in outcome.output


def _alpha(merge: Merge) -> None:
    merge.edit_recipe("holdout: 4", "holdout: 4\n  alpha: 0.5")


def _rows(merge: Merge) -> None:
    merge.data.write_text("".join(reversed(merge.data.read_text().splitlines(keepends=True))))


def _batches(merge: Merge) -> None:
    merge.edit_recipe("holdout: 4", "holdout: 4\n  batch_size: 5")


def _expert(merge: Merge) -> None:
    path = merge.expert / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1.25
    save_file(tensors, path, {"format": "pt"})


def _merged(merge: Merge) -> None:
    path = merge.merged / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1.25
    save_file(tensors, path, {"format": "pt"})


def _config(merge: Merge) -> None:
    path = merge.base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 1e-5}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_alpha, "featcal.alpha was 0.3 and is 0.5"),
        (_rows, "the inputs of task a (rows, tokens or batches) changed"),
        (_batches, "the inputs of task a (rows, tokens or batches) changed"),
        (_expert, "/a's model.safetensors changed"),
        (_merged, "merged model's model.safetensors changed"),
        (_config, "base model's config.json changed"),
    ],
    ids=["a setting", "the rows", "the batches", "an expert", "the merged model", "a config"],
)
def test_a_change_makes_the_journal_invalid_and_the_reason_is_said(
    change: Callable[[Merge], None], reason: str, merge: Merge, featcal: Featcal
) -> None:
    stopped(merge, 2)
    change(merge)
    before = contents(merge.root)
    outcome = featcal("check", merge.recipe, merge.merged)
    assert "starting anew" in outcome.output
    assert reason in outcome.output
    assert f"Dropped: 2 of 3 blocks that were finished in {merge.merged}/{WORK}" in outcome.output
    assert contents(merge.root) == before
    fresh = copy_merge(merge, merge.root / "fresh")
    shutil.rmtree(fresh.merged / WORK)
    assert reason in featcal(merge.recipe, merge.merged).output
    calibrate(fresh.recipe, fresh.merged)
    assert (merge.merged / "model.safetensors").read_bytes() == (fresh.merged / "model.safetensors").read_bytes()


def test_other_conditions_stop_the_run_rather_than_drop_what_is_finished(
    merge: Merge, featcal: Featcal, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(merge, 2)
    kept = contents(merge.merged / WORK)
    for command in ("check", "calibrate"):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "get_num_threads", lambda: 2)
            outcome = featcal(command, merge.recipe, merge.merged)
        assert outcome.code == 1
        assert "the number of threads was 1 and is 2" in outcome.errors
        assert "--restart" in outcome.errors
        assert contents(merge.merged / WORK) == kept
    assert "going on from block 3 of 3" in featcal("check", merge.recipe, merge.merged).output
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "Z80")
    assert "the CPU's capability was" in featcal(merge.recipe, merge.merged).errors
    assert featcal(merge.recipe, merge.merged, "--restart").code == 0
    assert json.loads((merge.merged / "featcal.json").read_text())["cpu_capability"] == "Z80"


def test_restart_does_all_blocks_again(merge: Merge) -> None:
    stopped(merge, 2)
    steps: list[Step] = []
    calibrate(merge.recipe, merge.merged, restart=True, on_step=steps.append)
    assert [step.block for step in steps if step.doing == "solve"] == list(range(BLOCKS))
    assert all(step.doing != REPLAY for step in steps)


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_torn_line_of_the_journal_is_no_line(cut: int, merge: Merge, featcal: Featcal) -> None:
    whole = copy_merge(merge, merge.root / "whole")
    calibrate(whole.recipe, whole.merged)
    stopped(merge, 2)
    path = merge.merged / WORK / JOURNAL
    path.write_bytes(path.read_bytes()[:-cut])
    outcome = featcal(merge.recipe, merge.merged)
    assert "going on from block 2 of 3: 1 are finished" in outcome.output
    assert (merge.merged / "model.safetensors").read_bytes() == (whole.merged / "model.safetensors").read_bytes()


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "pickle"])
def test_a_half_written_block_is_found_and_done_again(pickled: bool, merge: Merge, featcal: Featcal) -> None:
    if pickled:
        pickle_it(merge)
    whole = copy_merge(merge, merge.root / "whole")
    calibrate(whole.recipe, whole.merged)
    stopped(merge, 2)
    path = merge.merged / WORK / ("block-1.safetensors" if pickled else "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(path)
    half = tensors[name].flatten()
    half[len(half) // 2 :] = 0
    save_file(tensors, path, {"format": "pt"})
    outcome = featcal(merge.recipe, merge.merged)
    assert "going on from block 2 of 3: 1 are finished" in outcome.output
    assert "block 2 there is not as it was written" in outcome.output
    written = "pytorch_model.bin" if pickled else "model.safetensors"
    assert (merge.merged / written).read_bytes() == (whole.merged / written).read_bytes()


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: os.truncate(path, 1000)], ids=["gone", "cut"])
def test_a_work_folder_whose_shards_are_not_whole_is_begun_anew(
    spoil: Callable[[Path], None], merge: Merge, featcal: Featcal
) -> None:
    stopped(merge, 2)
    spoil(merge.merged / WORK / "model.safetensors")
    outcome = featcal(merge.recipe, merge.merged)
    assert outcome.code == 0
    assert "starting anew: no block" in outcome.output


def test_a_journal_of_another_version_is_not_dropped_unasked(merge: Merge, featcal: Featcal) -> None:
    stopped(merge, 2)
    path = merge.merged / WORK / JOURNAL
    from featcal_hf.journal import _line

    path.write_text(path.read_text().splitlines(keepends=True)[0] + _line({"report": {"path": "layers.0"}}))
    outcome = featcal(merge.recipe, merge.merged)
    assert outcome.code == 1
    assert "was written by another version" in outcome.errors
    assert "--restart" in outcome.errors
    assert featcal(merge.recipe, merge.merged, "--restart").code == 0


def test_runs_in_place_and_to_an_output_keep_to_their_own_work(merge: Merge, featcal: Featcal) -> None:
    output = merge.root / "output"
    stopped(merge, 2)
    stopped(merge, 1, output)
    assert "going on from block 3 of 3" in featcal("check", merge.recipe, merge.merged).output
    outcome = featcal(merge.recipe, merge.merged, "--output", output)
    assert "going on from block 2 of 3" in outcome.output
    assert not list(output.glob(".*"))
    assert not (output / UNFINISHED).exists()
    assert "going on from block 3 of 3" in featcal(merge.recipe, merge.merged).output
    assert (merge.merged / "model.safetensors").read_bytes() == (output / "model.safetensors").read_bytes()
