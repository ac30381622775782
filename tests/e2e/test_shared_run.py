"""A run that several processes share: the same result as in one, whatever becomes of one of them."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_ranks
from tiny_merge import Merge, all_but_work, contents, loaded_state
from torch import Tensor
from transformers import CLIPConfig, CLIPModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from featcal_hf import CheckpointError, DataError, RanksError, Settings, calibrate, calibrate_model, cli
from featcal_hf.calibrate import Step
from featcal_hf.lock import locked
from featcal_hf.ranks import Ranks

Inputs = dict[str, Tensor]


def llama() -> PreTrainedModel:
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 40}
    return LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2)).eval()


def clip() -> PreTrainedModel:
    tower: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2}
    text = {**tower, "num_attention_heads": 2, "vocab_size": 40, "max_position_embeddings": 16, "eos_token_id": 39}
    vision = {**tower, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision)).eval()


def inputs(model: PreTrainedModel, rows: int, tokens: int) -> Inputs:
    mask = torch.ones(rows, tokens, dtype=torch.long)
    for row in range(rows):
        mask[row, tokens - row % 4 :] = 0
    batch = {"input_ids": torch.randint(2, 39, (rows, tokens)), "attention_mask": mask}
    return batch if isinstance(model, LlamaForCausalLM) else {**batch, "pixel_values": torch.randn(rows, 3, 16, 16)}


def moved(model: PreTrainedModel) -> PreTrainedModel:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.3 * torch.randn_like(parameter) * parameter.std(correction=0).clamp_min(0.02)
    return other


@pytest.mark.parametrize("build", [llama, clip])
@pytest.mark.parametrize(("size", "tasks", "batches", "rows"), [(2, "abc", 5, 6), (3, "abc", 4, 6), (3, "a", 1, 2)])
def test_ranks_give_the_result_of_one_process(
    build: Any, size: int, tasks: str, batches: int, rows: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    base = build()
    merged, experts = moved(base), {task: moved(base) for task in tasks}
    calibration = {task: [inputs(base, rows, 7 + number) for number in range(batches)] for task in tasks}
    holdout = {task: [inputs(base, 3, 8)] for task in tasks}

    def run(ranks: Ranks | None = None) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        model = copy.deepcopy(merged)
        report = calibrate_model(
            model,
            base=base,
            experts=experts,
            batches=calibration,
            holdout=holdout,
            settings=Settings(lambda_=0.05),
            **({} if ranks is None else {"ranks": ranks}),
        )
        return dict(model.state_dict()), report.as_dict()["blocks"]

    alone, blocks = run()
    assert any(not torch.equal(value, alone[name]) for name, value in merged.state_dict().items())
    results = run_ranks(size, run, tmp_path)
    for state, reported in results:
        for name, value in alone.items():
            assert torch.equal(state[name], results[0][0][name]), name
            if value.is_floating_point() and not name.endswith("k_proj.bias"):  # rounding: nothing reads that
                size = float(value.norm()) if value.dim() > 1 else max(float(value.norm()), 1.0)
                assert float((state[name] - value).norm()) < 1e-5 * size, name
        for one, other in zip(reported, blocks, strict=True):
            assert [module["name"] for module in one["modules"]] == [module["name"] for module in other["modules"]]
            assert [each["modules"] for each in one["inputs"]] == [each["modules"] for each in other["inputs"]]
            assert [each["tokens"] for each in one["inputs"]] == [each["tokens"] for each in other["inputs"]]
            for task in tasks:
                drift = [side["after"]["drift"] for side in (one["drift"][task], other["drift"][task])]
                assert drift[0] == pytest.approx(drift[1], rel=1e-4)


def test_a_folder_that_ranks_calibrate_is_as_one_process_leaves_it(merge: Merge, tmp_path: Path) -> None:
    calibrate(merge.recipe, merge.merged, tmp_path / "alone")
    run_ranks(2, lambda ranks: calibrate(merge.recipe, merge.merged, ranks=ranks).seconds, tmp_path / "ranks")
    expected, state = loaded_state(tmp_path / "alone"), loaded_state(merge.merged)
    for name, value in expected.items():
        assert float((state[name] - value).norm() / value.norm()) < 1e-4, name
    assert sorted(contents(merge.merged)) == sorted(contents(tmp_path / "alone"))
    report = json.loads((merge.merged / "featcal.json").read_text())
    assert report["processes"] == 2
    assert all(block["drift"].keys() == {"a", "b"} for block in report["blocks"])


@pytest.mark.slow
def test_features_that_wait_in_files_change_nothing_and_leave_nothing(merge: Merge, tmp_path: Path) -> None:
    for memory in (None, 0):
        output = tmp_path / f"with {memory}"
        run_ranks(
            2,
            lambda ranks, memory=memory, output=output: (
                calibrate(merge.recipe, merge.merged, output, ranks=ranks, activation_memory=memory).seconds
            ),
            tmp_path / "ranks",
        )
        assert not [path for path in output.iterdir() if path.name.startswith(".")]
    one, other = (contents(tmp_path / f"with {memory}")["model.safetensors"] for memory in (None, 0))
    assert one == other


@pytest.mark.parametrize("victim", [0, 1])
def test_after_the_death_of_a_rank_the_same_command_goes_on_to_the_same_bytes(
    victim: int, merge: Merge, tmp_path: Path
) -> None:
    before = contents(merge.merged)

    def run(ranks: Ranks, output: Path, dies: bool = False) -> list[str]:
        doing: list[str] = []

        def step(step: Step) -> None:
            doing.append(f"{step.block} {step.doing}")
            if dies and ranks.number == victim and step.block == 1 and step.doing == "b":
                os.kill(os.getpid(), signal.SIGKILL)

        calibrate(merge.recipe, merge.merged, output, ranks=ranks, on_step=step)
        return doing

    run_ranks(2, lambda ranks: run(ranks, tmp_path / "whole"), tmp_path / "ranks")
    results = run_ranks(2, lambda ranks: run(ranks, tmp_path / "killed", dies=True), tmp_path / "ranks")
    assert results[victim] == -signal.SIGKILL
    assert isinstance(results[1 - victim], RanksError)
    assert "goes on from the last finished block" in str(results[1 - victim])
    assert contents(merge.merged) == before
    results = run_ranks(2, lambda ranks: run(ranks, tmp_path / "killed"), tmp_path / "ranks")
    assert results == [["0 replay", "1 a", "1 b", "1 solve", "2 a", "2 b", "2 solve"]] * 2
    files = [contents(tmp_path / name)["model.safetensors"] for name in ("whole", "killed")]
    assert files[0] == files[1]
    assert not list((tmp_path / "killed").glob(".featcal*"))


def test_an_error_of_one_rank_ends_all_and_the_finished_blocks_are_kept(merge: Merge, tmp_path: Path) -> None:
    before = contents(merge.merged)

    def run(ranks: Ranks) -> None:
        def step(step: Step) -> None:
            if ranks.number == 1 and step.block == 2:
                raise DataError("row 7 of b is broken")

        calibrate(merge.recipe, merge.merged, ranks=ranks, on_step=step)

    results = run_ranks(3, run, tmp_path / "ranks")
    assert [(type(result), str(result)) for result in results] == [(DataError, "row 7 of b is broken")] * 3
    assert all_but_work(merge.merged) == before
    with pytest.raises(CheckpointError, match="the number of processes was 3 and is 1"):
        calibrate(merge.recipe, merge.merged)
    results = run_ranks(3, lambda ranks: calibrate(merge.recipe, merge.merged, ranks=ranks).seconds, tmp_path / "ranks")
    assert all(isinstance(result, float) for result in results)
    assert not (merge.merged / ".featcal").exists()


def test_ranks_that_would_do_different_things_are_refused(merge: Merge, tmp_path: Path) -> None:
    before = contents(merge.merged)

    def run(ranks: Ranks) -> None:
        calibrate(merge.recipe, merge.merged, ranks=ranks, random_seed=ranks.number)

    for result in run_ranks(2, run, tmp_path / "ranks"):
        assert isinstance(result, RanksError)
        assert "rank 1 would calibrate something else than rank 0: the inputs of task a" in str(result)
    assert contents(merge.merged) == before


def test_a_second_run_in_the_folder_is_refused_on_all_ranks(merge: Merge, tmp_path: Path) -> None:
    with locked(merge.merged):
        results = run_ranks(2, lambda ranks: calibrate(merge.recipe, merge.merged, ranks=ranks), tmp_path / "ranks")
    assert {(type(result), str(result)) for result in results} == {(CheckpointError, str(results[0]))}
    assert "another run is at work in" in str(results[0])


def test_the_first_rank_alone_speaks(
    merge: Merge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def command(ranks: Ranks) -> int:
        try:
            cli._run(ranks)
        except SystemExit as stop:
            return int(stop.code or 0)
        return 0

    monkeypatch.setattr("sys.argv", ["featcal-hf", str(merge.recipe), str(merge.merged)])
    capfd.readouterr()
    assert run_ranks(2, command, tmp_path) == [0, 0]
    printed = capfd.readouterr()
    assert printed.out.count("Calibration plan") == printed.out.count("Wrote ") == 1
    assert run_ranks(2, command, tmp_path) == [1, 1]
    printed = capfd.readouterr()
    assert " ".join(printed.err.split()).count("has been calibrated already") == 1
    for arguments, code, words in (
        (["check", str(merge.recipe), str(merge.merged)], 1, "error: check runs in one process, and 2 were started"),
        ([str(merge.recipe), str(merge.merged), "--device", "sofa"], 2, "sofa can't be used here"),
    ):
        monkeypatch.setattr("sys.argv", ["featcal-hf", *arguments])
        assert run_ranks(2, command, tmp_path) == [code, code]
        assert " ".join(capfd.readouterr().err.split()).count(words) == 1


DYING = """
import os
from featcal_hf import cli, run

calibrate_blocks = run.calibrate_blocks

def deadly(*arguments, on_step, ranks, **options):
    def die(step):
        on_step(step)
        if ranks.number == 1 and step.block == 1 and os.environ.get("DIES"):
            os._exit(9)
    return calibrate_blocks(*arguments, on_step=die, ranks=ranks, **options)

run.calibrate_blocks = deadly
cli.main()
"""


@pytest.mark.slow
def test_torchrun_starts_the_ranks_and_ends_them_when_one_dies(merge: Merge) -> None:
    script = merge.root / "dying.py"
    script.write_text(DYING)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*start, str(script), "calibrate", str(merge.recipe), str(merge.merged)]
    died = subprocess.run(command, env=os.environ | {"DIES": "1"}, capture_output=True, text=True, timeout=300)
    assert died.returncode != 0
    words = " ".join(died.stderr.split())
    assert "error: rank 0 " in words
    assert "the same command goes on from the last finished block" in words
    again = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert "going on from block 2 of 3" in " ".join(again.stdout.split())
    assert again.stdout.count("Wrote") == 1
