"""Writing calibrated weights: only the named tensors change, and a kill at any point leaves a whole model."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from crashes import crashes
from safetensors.torch import save_file
from torch import Tensor

from featcal_hf.checkpoint import Checkpoint, open_checkpoint
from featcal_hf.errors import CheckpointError
from featcal_hf.save import (
    REPORT,
    UNFINISHED,
    WORK,
    check_output,
    check_space,
    discard_unfinished,
    fingerprint,
    finish_swap,
    is_calibrated,
    swap_in,
    work_folder,
    write_output,
)
from featcal_hf.writers import open_writer

STATE = {
    "embed.weight": torch.arange(12.0).reshape(4, 3),
    "layers.0.weight": torch.full((2, 3), 2.0, dtype=torch.bfloat16),
    "layers.0.bias": torch.full((2,), 7.0),
    "layers.1.weight": torch.full((2, 3), 3.0, dtype=torch.float16),
    "scale": torch.tensor(2.5),
}
SHARDS = [["embed.weight", "scale"], ["layers.0.weight", "layers.0.bias"], ["layers.1.weight"]]
NEW = {
    "layers.0.weight": torch.tensor([[1.5, -2.0, 0.25], [4.0, 5.0, 6.0]], dtype=torch.bfloat16),
    "layers.0.bias": torch.tensor([-1.0, 9.0]),
    "layers.1.weight": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 0.5]], dtype=torch.float16),
}
CALIBRATED = {**STATE, **NEW}


def write_merged(folder: Path, pickled: bool, sharded: bool) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "notes").mkdir()
    (folder / "notes" / "a.txt").write_text("a")
    stem, ending = ("pytorch_model", "bin") if pickled else ("model", "safetensors")
    parts = {f"{stem}.{ending}": list(STATE)}
    if sharded:
        parts = {f"{stem}-0000{number}-of-00003.{ending}": names for number, names in enumerate(SHARDS, 1)}
        weight_map = {name: shard for shard, names in parts.items() for name in names}
        text = json.dumps({"metadata": {"total_size": 100}, "weight_map": weight_map}, indent=4)
        (folder / f"{stem}.{ending}.index.json").write_text(text)
    for shard, names in parts.items():
        part = {name: STATE[name] for name in names}
        torch.save(part, folder / shard) if pickled else save_file(part, folder / shard, metadata={"format": "pt"})
    return folder


@pytest.fixture(params=[False, True], ids=["safetensors", "bin"])
def pickled(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=[False, True], ids=["one file", "shards"])
def sharded(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def merged(pickled: bool, sharded: bool, tmp_path: Path) -> Checkpoint:
    return open_checkpoint(write_merged(tmp_path / "merged", pickled, sharded))


def write_blocks(checkpoint: Checkpoint, work: Path) -> dict[str, Path]:
    writer = open_writer(checkpoint, list(NEW), work)
    writer.write({name: NEW[name] for name in ("layers.0.weight", "layers.0.bias")})
    writer.write({"layers.1.weight": NEW["layers.1.weight"]})
    return writer.complete()


def report() -> dict[str, object]:
    return {"fingerprint": fingerprint(NEW)}


def run_in_place(checkpoint: Checkpoint) -> None:
    finish_swap(checkpoint.folder)
    with work_folder(checkpoint.folder / WORK) as work:
        swap_in(checkpoint, write_blocks(checkpoint, work), work, report())


def run_output(checkpoint: Checkpoint, output: Path) -> None:
    check_output(output, checkpoint.folder)
    discard_unfinished(checkpoint, output)
    with work_folder(output / UNFINISHED) as work:
        write_output(checkpoint, write_blocks(checkpoint, work), work, output, report())


def state_of(folder: Path) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(folder)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        value.dtype == other[name].dtype and torch.equal(value, other[name]) for name, value in one.items()
    )


def tree(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"folder" for path in files}


def test_only_the_named_tensors_change_in_the_same_files(merged: Checkpoint) -> None:
    before = tree(merged.folder)
    run_in_place(merged)
    after = tree(merged.folder)
    assert same(state_of(merged.folder), CALIBRATED)
    assert set(after) == {*before, REPORT}
    unwritten = {name for name in before if "00001" in name} | {"config.json", "notes", "notes/a.txt"}
    assert all(after[name] == before[name] for name in unwritten | {str(merged.index)} if name in before)
    assert [entry.shard for entry in open_checkpoint(merged.folder).tensors.values()] == [
        entry.shard for entry in merged.tensors.values()
    ]


def test_a_run_that_writes_nothing_new_gives_every_byte_back(tmp_path: Path, sharded: bool) -> None:
    checkpoint = open_checkpoint(write_merged(tmp_path / "merged", False, sharded))
    before = tree(checkpoint.folder)
    with work_folder(checkpoint.folder / WORK) as work:
        writer = open_writer(checkpoint, list(NEW), work)
        writer.write({name: STATE[name] for name in NEW})
        swap_in(checkpoint, writer.complete(), work, report())
    after = tree(checkpoint.folder)
    del after[REPORT]
    assert after == before


def test_permissions_of_the_weight_files_stay_also_where_they_are_read_only(merged: Checkpoint) -> None:
    for shard in merged.shards:
        (merged.folder / shard).chmod(0o440)
    run_in_place(merged)
    assert {stat.S_IMODE((merged.folder / shard).stat().st_mode) for shard in merged.shards} == {0o440}


def test_an_output_is_a_copy_with_the_new_tensors(merged: Checkpoint, tmp_path: Path) -> None:
    before = tree(merged.folder)
    run_output(merged, tmp_path / "new" / "output")
    assert same(state_of(tmp_path / "new" / "output"), CALIBRATED)
    assert set(tree(tmp_path / "new" / "output")) == {*before, REPORT}
    assert tree(merged.folder) == before


@pytest.mark.parametrize(
    ("value", "words"),
    [(torch.zeros(2, 3), "float32"), (torch.zeros(3, 2, dtype=torch.bfloat16), r"\(3, 2\)")],
    ids=["dtype", "shape"],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(value: Tensor, words: str, merged: Checkpoint) -> None:
    before = tree(merged.folder)
    with (
        pytest.raises(CheckpointError, match=rf"layers\.0\.weight.*{words}"),
        work_folder(merged.folder / WORK) as work,
    ):
        open_writer(merged, ["layers.0.weight"], work).write({"layers.0.weight": value})
    assert tree(merged.folder) == before


def test_a_kill_at_any_change_leaves_one_whole_model_that_a_second_run_completes(
    pickled: bool, sharded: bool, tmp_path: Path
) -> None:
    original, folder = write_merged(tmp_path / "original", pickled, sharded), tmp_path / "merged"

    def restore() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(original, folder)

    restore()
    checkpoint = open_checkpoint(folder)
    run_in_place(checkpoint)
    finished = set(tree(folder))
    ends = []
    for changes in crashes(lambda: run_in_place(checkpoint), folder, restore):
        state = state_of(folder)
        calibrated = same(state, CALIBRATED)
        assert calibrated or same(state, STATE), changes
        assert is_calibrated(open_checkpoint(folder)) == calibrated, changes
        ends.append(calibrated)
        finish_swap(folder)
        assert same(state_of(folder), state), changes
        if not calibrated:
            run_in_place(open_checkpoint(folder))
        assert same(state_of(folder), CALIBRATED), changes
        assert set(tree(folder)) == finished, changes
    assert ends == sorted(ends)
    assert {True, False} == set(ends)


def test_a_kill_at_any_change_leaves_an_output_that_is_complete_or_does_not_open(
    merged: Checkpoint, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    run_output(merged, output)
    finished = set(tree(output))
    opened = 0
    for changes in crashes(lambda: run_output(merged, output), output, lambda: shutil.rmtree(output)):
        try:
            assert same(state_of(output), CALIBRATED), changes
            opened += 1
        except CheckpointError:
            pass
        run_output(merged, output)
        assert same(state_of(output), CALIBRATED), changes
        assert set(tree(output)) == finished, changes
    assert opened > 0


def test_shards_that_are_missing_from_an_unfinished_swap_are_not_papered_over(pickled: bool, tmp_path: Path) -> None:
    folder = write_merged(tmp_path / "merged", pickled, True)
    (index,) = folder.glob("*.index.json")
    shard = next(name for name in os.listdir(folder) if "00002-of" in name)
    index.write_text(index.read_text().replace(f'"{shard}"', f'"featcal-{shard}"'))
    before = tree(folder)
    finish_swap(folder)
    assert tree(folder) == before
    with pytest.raises(CheckpointError, match=f"names featcal-{shard}, which is not there"):
        open_checkpoint(folder)


def test_files_of_the_users_that_begin_like_ours_are_left_alone(merged: Checkpoint) -> None:
    (merged.folder / "featcal-notes.bin").write_bytes(b"mine")
    finish_swap(merged.folder)
    run_in_place(merged)
    assert (merged.folder / "featcal-notes.bin").read_bytes() == b"mine"


@pytest.mark.parametrize("make", [lambda work: None, lambda work: (work / "old").mkdir(parents=True)])
def test_a_work_folder_starts_empty_and_goes_away_also_after_an_error(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    work = tmp_path / "output" / WORK
    make(work)
    existed = work.parent.exists()

    def fail() -> None:
        with work_folder(work) as given:
            assert given == work
            assert list(work.iterdir()) == []
            (work / "half").write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not work.exists()
    assert work.parent.exists() is existed


def test_space_is_asked_of_the_nearest_folder_that_exists(tmp_path: Path) -> None:
    check_space(tmp_path / "not" / "yet", 1)
    with pytest.raises(CheckpointError, match=r"GB free, but the calibrated shards take 1000000000\.00 GB") as caught:
        check_space(tmp_path / "not" / "yet", 10**18)
    assert str(caught.value).startswith(f"{tmp_path} has ")


def test_an_output_must_be_new_or_empty_and_outside(tmp_path: Path) -> None:
    merged = tmp_path / "merged"
    merged.mkdir()
    check_output(tmp_path / "new", merged)
    (tmp_path / "empty").mkdir()
    check_output(tmp_path / "empty", merged)
    with pytest.raises(CheckpointError, match="inside"):
        check_output(merged / "deep" / "inside", merged)
    (merged / "config.json").write_text("{}")
    for output in (merged, tmp_path, merged / "config.json"):
        with pytest.raises(CheckpointError, match=r"isn't an empty folder|inside"):
            check_output(output, merged)


def test_a_fresh_merge_with_an_old_report_is_not_calibrated(merged: Checkpoint) -> None:
    assert not is_calibrated(merged)
    (merged.folder / REPORT).write_text(json.dumps(report()))
    assert not is_calibrated(merged)
    other = {"fingerprint": fingerprint({"another.model's.weight": torch.zeros(1)})}
    for contents in (other, {"fingerprint": {}}):
        (merged.folder / REPORT).write_text(json.dumps(contents))
        assert not is_calibrated(merged)


@pytest.mark.parametrize("text", ["not json", "[]", "{}", '{"fingerprint": 3}'])
def test_a_report_that_is_none_of_ours_is_an_error_that_says_what_to_do(text: str, merged: Checkpoint) -> None:
    (merged.folder / REPORT).write_text(text)
    with pytest.raises(CheckpointError, match=r"featcal\.json is not a report of ours.*delete it"):
        is_calibrated(merged)


def test_a_fingerprint_tells_tensors_apart_by_every_byte() -> None:
    value = torch.tensor([0.0, 1.0])
    assert fingerprint({"a": value}) == fingerprint({"a": value.clone()})
    assert fingerprint({"a": value}) != fingerprint({"a": torch.tensor([-0.0, 1.0])})
    assert fingerprint({"a": torch.zeros(2, 2).T}) == fingerprint({"a": torch.zeros(2, 2)})
