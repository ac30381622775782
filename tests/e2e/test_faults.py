"""What can go wrong in the middle of a run: a clear error, the merged model byte for byte as it was, no half result."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from tiny_merge import Merge, Outcome, all_but_work, contents

from featcal_hf import run, writers
from featcal_hf.calibrate import Step

Featcal = Callable[..., Outcome]


def at_step(monkeypatch: pytest.MonkeyPatch, block: int, action: Callable[[], None]) -> None:
    """Do something once, before the first step of a block."""
    calibrate_blocks, done = run.calibrate_blocks, []

    def watched(*arguments: Any, on_step: Callable[[Step], None], **options: Any) -> Any:
        def look(step: Step) -> None:
            if step.block == block and not done:
                done.append(step)
                action()
            on_step(step)

        return calibrate_blocks(*arguments, on_step=look, **options)

    monkeypatch.setattr(run, "calibrate_blocks", watched)


@pytest.mark.parametrize("to_output", [False, True], ids=["in place", "to an output"])
@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_disk_that_is_full_at_any_flush_leaves_the_merged_model_and_no_result(
    at: int, to_output: bool, merge: Merge, featcal: Featcal, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = merge.root / "output"
    options = ["--output", output] if to_output else []
    before, flushes, sync = all_but_work(merge.root), 0, writers.sync

    def full(path: Path) -> None:
        nonlocal flushes
        flushes += 1
        if flushes > at:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(path)

    with monkeypatch.context() as patch:
        for module in ("writers", "save", "journal"):
            patch.setattr(f"featcal_hf.{module}.sync", full)
        outcome = featcal(merge.recipe, merge.merged, *options)
    assert outcome.code == 1
    assert "the disk is full" in outcome.errors
    assert "run the same command again" in outcome.errors
    after = all_but_work(merge.root)
    after.pop("output", None)
    assert after == before
    assert featcal(merge.recipe, merge.merged, *options, "--quiet").code == 0


@pytest.mark.parametrize("which", ["merged", "a", "base"])
@pytest.mark.parametrize("how", ["replaced", "rewritten", "gone"])
def test_a_checkpoint_that_changes_during_the_run_is_found(
    which: str, how: str, merge: Merge, featcal: Featcal, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = merge.root / which / "model.safetensors"

    def change() -> None:
        if how == "gone":
            path.unlink()
            return
        tensors = {name: value * 1.5 for name, value in load_file(path).items()}
        twin = path.with_name("twin.safetensors") if how == "replaced" else path
        save_file(tensors, twin, {"format": "pt"})
        if how == "replaced":
            stat = path.stat()
            os.utime(twin, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            os.replace(twin, path)

    at_step(monkeypatch, 1, change)
    outcome = featcal(merge.recipe, merge.merged)
    assert outcome.code == 1
    assert f"{path} was changed or replaced while it was in use" in outcome.errors
    assert not (merge.merged / "featcal.json").exists()


def test_a_change_after_the_last_read_is_found_before_anything_is_put_in_place(
    merge: Merge, featcal: Featcal, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate_blocks = run.calibrate_blocks

    def changed(*arguments: Any, **options: Any) -> None:
        calibrate_blocks(*arguments, **options)
        os.utime(merge.expert / "model.safetensors", ns=(1, 1))

    before = contents(merge.merged)
    monkeypatch.setattr(run, "calibrate_blocks", changed)
    outcome = featcal(merge.recipe, merge.merged)
    assert outcome.code == 1
    assert "/a/model.safetensors was changed or replaced" in outcome.errors
    assert all_but_work(merge.merged) == before


def test_a_row_that_cannot_be_read_is_named_with_its_task(merge: Merge, featcal: Featcal) -> None:
    rows = [json.loads(line) for line in merge.data.read_text().splitlines()]
    merge.edit_recipe("text: text", 'prompt: "{first[word]}"')
    parts = [{"first": [{"word": row["text"]}]} for row in rows]
    merge.data.write_text("".join(json.dumps(row) + "\n" for row in parts))
    before = contents(merge.root)
    outcome = featcal(merge.recipe, merge.merged)
    assert outcome.code == 1
    assert "task 'a'" in outcome.errors
    assert " row " in outcome.errors
    assert contents(merge.root) == before


@pytest.mark.parametrize(
    "error",
    [
        LocalEntryNotFoundError("the connection broke"),
        HfHubHTTPError("503 Server Error: the connection broke", response=Mock(headers={}, request=None)),
    ],
    ids=["no connection", "a server's error"],
)
def test_a_download_that_breaks_is_an_error_that_names_the_model(
    error: Exception, merge: Merge, featcal: Featcal, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge.recipe.write_text(merge.recipe.read_text().replace(str(merge.expert) + ",", "org/expert,"))
    assert "org/expert" in merge.recipe.read_text()

    def broken(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    before = contents(merge.root)
    outcome = featcal(merge.recipe, merge.merged)
    assert outcome.code == 1
    assert "model org/expert is not a folder here and can't be had from the Hub" in outcome.errors
    assert "the connection broke" in outcome.errors
    assert contents(merge.root) == before


def test_a_gram_that_is_not_positive_definite_is_an_error_that_names_the_module(
    merge: Merge, featcal: Featcal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return matrix, torch.tensor(1)

    before = contents(merge.root)
    monkeypatch.setattr(torch.linalg, "cholesky_ex", refuse)
    outcome = featcal(merge.recipe, merge.merged)
    assert outcome.code == 1, outcome
    assert "layers.0." in outcome.errors
    assert "positive definite" in outcome.errors
    assert "raise featcal.lambda" in outcome.errors
    assert contents(merge.root) == before


HOLDER = """
import sys, time
from pathlib import Path
from unittest.mock import Mock
from featcal_hf.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("to_output", [False, True], ids=["in place", "to an output"])
def test_a_second_run_on_a_folder_is_refused_at_once_and_a_dead_one_never_blocks(
    to_output: bool, merge: Merge, featcal: Featcal
) -> None:
    output = merge.root / "output"
    target, options = (output, ["--output", output]) if to_output else (merge.merged, [])
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(target)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        before = contents(merge.root)
        outcome = featcal(merge.recipe, merge.merged, *options)
        assert outcome.code == 1
        assert f"another run is at work in {target} (process {holder.pid} on {socket.gethostname()}" in outcome.errors
        assert contents(merge.root) == before
        holder.kill()
    assert (target / ".featcal.lock").exists()
    assert featcal(merge.recipe, merge.merged, *options, "--quiet").code == 0
    assert not list(target.glob(".featcal*"))


def test_a_refused_run_leaves_no_output_folder_behind(merge: Merge, featcal: Featcal) -> None:
    shutil.rmtree(merge.expert)
    before = contents(merge.root)
    assert featcal(merge.recipe, merge.merged, "--output", merge.root / "new" / "output").code == 1
    assert contents(merge.root) == before
