"""However a run ends, the folder holds one whole model, and the same command finishes the work."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crashes import crashes, run_killed
from tiny_merge import Merge, Outcome, all_but_work, contents, copy_merge, equal_states, loaded_state
from torch import Tensor
from transformers import LlamaForCausalLM

from featcal_hf import CheckpointError, calibrate, run
from featcal_hf.calibrate import BlockReport, Step
from featcal_hf.preparation import Prepared, prepare
from featcal_hf.run import calibrate_prepared

Featcal = Callable[..., Outcome]
CPU = torch.device("cpu")


@pytest.fixture(params=["one file", "shards"])
def layout(request: pytest.FixtureRequest) -> Merge:
    merge: Merge = request.getfixturevalue("pristine" if request.param == "one file" else "sharded")
    return merge


class Replay:
    """A merge and its calibration, recorded once so that it can be repeated without a forward."""

    def __init__(self, merge: Merge, monkeypatch: pytest.MonkeyPatch) -> None:
        self.merge = merge
        self.original = merge.root / "original"
        shutil.copytree(merge.merged, self.original)
        self.merged_state = loaded_state(merge.merged)
        written: list[tuple[str, dict[str, Tensor]]] = []
        reports: list[BlockReport] = []
        calibrate_blocks = run.calibrate_blocks

        def record(*arguments: Any, write: Callable[..., None], **options: Any) -> None:
            def keep(path: str, parameters: dict[str, Tensor]) -> None:
                written.append((path, {name: value.clone() for name, value in parameters.items()}))
                write(path, parameters)

            reports.extend(calibrate_blocks(*arguments, write=keep, **options))

        def replay(
            *arguments: Any,
            write: Callable[..., None],
            on_block: Callable[..., None],
            finished: list[BlockReport],
            **options: Any,
        ) -> None:
            for block, report in zip(written[len(finished) :], reports[len(finished) :], strict=True):
                write(*block)
                on_block(report)

        with monkeypatch.context() as patch:
            patch.setattr(run, "calibrate_blocks", record)
            calibrate(merge.recipe, merge.merged)
        monkeypatch.setattr(run, "calibrate_blocks", replay)
        # The folder is put back under files of other numbers, and the merge is prepared only once.
        monkeypatch.setattr(run, "_check_unchanged", lambda prepared: None)
        self.calibrated_state = loaded_state(merge.merged)
        assert not equal_states(self.merged_state, self.calibrated_state)
        self.calibrated_files = weight_files(merge.merged)
        self.restore()
        self.prepared: Prepared = prepare(merge.recipe, merge.merged)

    def restore(self) -> None:
        shutil.rmtree(self.merge.merged)
        shutil.copytree(self.original, self.merge.merged)


def weight_files(folder: Path) -> dict[str, str]:
    others = ("featcal.json", "README.md", "featcal_drift.png")
    return {name: digest for name, digest in contents(folder).items() if name not in others}


def test_a_kill_at_any_change_to_the_folder_leaves_a_whole_model_that_the_same_command_calibrates(
    layout: Merge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = Replay(copy_merge(layout, tmp_path), monkeypatch)
    merge = replay.merge

    def once() -> None:
        run.finish_swap(merge.merged)
        calibrate_prepared(replay.prepared, None, CPU, lambda step: None, time.perf_counter())

    tried: set[frozenset[tuple[str, str]]] = set()
    whole = {"merged": 0, "calibrated": 0}
    for changes in crashes(once, merge.merged, replay.restore):
        left = contents(merge.merged)
        state = loaded_state(merge.merged)
        calibrated = equal_states(state, replay.calibrated_state)
        assert calibrated or equal_states(state, replay.merged_state), changes
        whole["calibrated" if calibrated else "merged"] += 1
        # What lies in the work folder doesn't matter, it is emptied: one try for all of those.
        seen = frozenset((name, digest) for name, digest in left.items() if not name.startswith(".featcal/"))
        if seen in tried:
            continue
        tried.add(seen)
        if calibrated:
            with pytest.raises(CheckpointError, match="has been calibrated already"):
                calibrate(merge.recipe, merge.merged)
        else:
            calibrate(merge.recipe, merge.merged)
        assert weight_files(merge.merged) == replay.calibrated_files, changes
    assert whole["merged"] >= 4
    assert whole["calibrated"] >= 1
    assert weight_files(merge.merged) == replay.calibrated_files


def test_a_second_kill_while_an_interrupted_swap_is_finished_loses_nothing(
    sharded: Merge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = Replay(copy_merge(sharded, tmp_path), monkeypatch)
    folder = replay.merge.merged

    def once() -> None:
        calibrate_prepared(replay.prepared, None, CPU, lambda step: None, time.perf_counter())

    swapped = next(
        tmp_path / "swapped"
        for _ in crashes(once, folder, replay.restore)
        if equal_states(loaded_state(folder), replay.calibrated_state)
    )
    shutil.copytree(folder, swapped)

    def restore() -> None:
        shutil.rmtree(folder)
        shutil.copytree(swapped, folder)

    points = 0
    for changes in crashes(lambda: run.finish_swap(folder), folder, restore):
        points = changes
        assert equal_states(loaded_state(folder), replay.calibrated_state)
        with pytest.raises(CheckpointError, match="has been calibrated already"):
            calibrate(replay.merge.recipe, folder)
        assert weight_files(folder) == replay.calibrated_files
    assert points > 8


def test_a_kill_at_any_change_to_an_output_folder_leaves_nothing_that_loads_until_all_is_there(
    layout: Merge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = Replay(copy_merge(layout, tmp_path), monkeypatch)
    merge, output = replay.merge, tmp_path / "output"
    (merge.merged / "extra").mkdir()
    (merge.merged / "extra" / "note.txt").write_text("a side file in a folder")
    before = contents(merge.merged)
    expected = {**replay.calibrated_files, "extra": "folder", "extra/note.txt": before["extra/note.txt"]}

    def once() -> None:
        calibrate_prepared(replay.prepared, output, CPU, lambda step: None, time.perf_counter())

    tried: set[frozenset[tuple[str, str]]] = set()
    for changes in crashes(once, output, lambda: shutil.rmtree(output, ignore_errors=True)):
        complete = False
        if output.is_dir():
            try:
                complete = equal_states(loaded_state(output), replay.calibrated_state)
                assert complete, changes
            except OSError:
                pass
        seen = frozenset(name for name in contents(output) if not name.startswith(".featcal-output/"))
        if (seen, complete) in tried:
            continue
        tried.add((seen, complete))
        calibrate(merge.recipe, merge.merged, output)
        assert weight_files(output) == expected, changes
        assert (output / "featcal.json").is_file()
    assert len(tried) > len(expected)
    assert contents(merge.merged) == before


@pytest.mark.parametrize("at", [0, 4, 8], ids=["before the first block", "in the middle", "in the last solve"])
def test_a_kill_during_the_forwards_leaves_the_merged_model(at: int, merge: Merge, featcal: Featcal) -> None:
    before = contents(merge.merged)
    steps = 0

    def kill(step: Step) -> None:
        nonlocal steps
        if steps == at:
            os.kill(os.getpid(), signal.SIGKILL)
        steps += 1

    arrived = run_killed(
        lambda: calibrate(merge.recipe, merge.merged, on_step=kill), merge.root / "nothing below here", 0
    )
    assert not arrived
    assert all_but_work(merge.merged) == before
    assert featcal(merge.recipe, merge.merged, "--quiet").code == 0
    assert not (merge.merged / ".featcal").exists()


INTERRUPTIBLE = """
import signal, sys, time
from featcal_hf import cli, run

signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell started in the background ignores
calibrate_blocks = run.calibrate_blocks

def slowly(*arguments, on_step, **options):
    def wait(step):
        on_step(step)
        if step.block == 1 and step.doing == "b":
            print("now", flush=True)
            time.sleep(60)
    return calibrate_blocks(*arguments, on_step=wait, **options)

run.calibrate_blocks = slowly
cli.main()
"""


def test_ctrl_c_ends_a_real_process_with_130_and_the_merged_model_as_it_was(merge: Merge, featcal: Featcal) -> None:
    before = contents(merge.root)
    command = [sys.executable, "-c", INTERRUPTIBLE, str(merge.recipe), str(merge.merged), "--num-threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(line == "now\n" for line in process.stdout), process.communicate()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert f"error: interrupted: {merge.merged} holds one whole model" in " ".join(errors.split())
    assert "1 of 3 blocks are finished; the same command goes on from there" in " ".join(errors.split())
    assert "Traceback" not in errors
    assert all_but_work(merge.root) == before
    outcome = featcal(merge.recipe, merge.merged)
    assert outcome.code == 0
    assert f"going on from block 2 of 3: 1 are finished in {merge.merged}/.featcal" in outcome.output
    assert not (merge.merged / ".featcal").exists()


@pytest.mark.parametrize("name", ["featcal.json", "model.safetensors.index.json", "featcal-model-00002"])
def test_ctrl_c_during_the_swap_leaves_the_merged_folder_as_it_was(
    name: str, sharded: Merge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, featcal: Featcal
) -> None:
    merge = copy_merge(sharded, tmp_path)

    def interrupted(place: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
        def wrapped(source: Path, target: Path) -> None:
            if target.parent == merge.merged and target.name.startswith(name):
                raise KeyboardInterrupt
            place(source, target)

        return wrapped

    before = contents(merge.root)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted(os.replace))
        patch.setattr(os, "link", interrupted(os.link))
        outcome = featcal(merge.recipe, merge.merged)
    assert outcome.code == 130
    assert "3 of 3 blocks are finished" in outcome.errors
    assert all_but_work(merge.root) == before
    outcome = featcal(merge.recipe, merge.merged)
    assert outcome.code == 0
    assert "all blocks are finished" in outcome.output


def test_ctrl_c_while_an_output_is_put_in_place_leaves_no_output(
    merge: Merge, monkeypatch: pytest.MonkeyPatch, featcal: Featcal
) -> None:
    output, link = merge.root / "output", os.link

    def interrupted(source: Path, target: Path) -> None:
        link(source, target)
        if target == output / "featcal.json":
            raise KeyboardInterrupt

    before = contents(merge.root)
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", interrupted)
        assert featcal(merge.recipe, merge.merged, "--output", output).code == 130
    assert os.listdir(output) == [".featcal-output"]
    assert all_but_work(merge.root) == before | {"output": "folder"}
    assert featcal(merge.recipe, merge.merged, "--output", output).code == 0
    LlamaForCausalLM.from_pretrained(output)
    assert json.loads((output / "featcal.json").read_text())["fingerprint"]
