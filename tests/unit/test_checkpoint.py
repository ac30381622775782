"""Checkpoints on disk: their tensor tables, lazy reading, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from mergekit.common import ModelPath, ModelReference
from safetensors.torch import save_file
from torch import Tensor

from featcal_hf.checkpoint import Checkpoint, check_finite, open_checkpoint, read_index, resolve
from featcal_hf.errors import CheckpointError

STATE = {
    "model.embed.weight": torch.arange(12.0).reshape(4, 3),
    "model.layers.0.weight": torch.full((2, 3), 2.0, dtype=torch.bfloat16),
    "model.layers.1.weight": torch.full((2, 3), 3.0, dtype=torch.float16),
    "logit_scale": torch.tensor(2.5),
    "position_ids": torch.arange(4),
}
FIRST = {"model.embed.weight", "logit_scale"}


def write(folder: Path, state: dict[str, Tensor], pickled: bool, sharded: bool) -> Path:
    """A folder with a config and the state in one file, or in two with an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    stem, ending = ("pytorch_model", "bin") if pickled else ("model", "safetensors")
    parts = {f"{stem}.{ending}": state}
    if sharded:
        names = [f"{stem}-0000{number}-of-00002.{ending}" for number in (1, 2)]
        parts = {
            names[0]: {name: value for name, value in state.items() if name in FIRST},
            names[1]: {name: value for name, value in state.items() if name not in FIRST},
        }
        weight_map = {name: shard for shard, part in parts.items() for name in part}
        (folder / f"{stem}.{ending}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for shard, part in parts.items():
        if pickled:
            torch.save(part, folder / shard)
        else:
            save_file(part, folder / shard, metadata={"format": "pt"})
    return folder


@pytest.fixture(params=[False, True], ids=["safetensors", "bin"])
def pickled(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=[False, True], ids=["one file", "shards"])
def sharded(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def checkpoint(pickled: bool, sharded: bool, tmp_path: Path) -> Checkpoint:
    return open_checkpoint(write(tmp_path / "model", STATE, pickled, sharded), "abc123")


def test_the_table_has_every_tensor_with_its_file_dtype_shape_and_bytes(
    checkpoint: Checkpoint, pickled: bool, sharded: bool
) -> None:
    assert {name: (entry.dtype, entry.shape) for name, entry in checkpoint.tensors.items()} == {
        name: (value.dtype, tuple(value.shape)) for name, value in STATE.items()
    }
    assert {name: entry.bytes for name, entry in checkpoint.tensors.items()} == {
        name: value.nbytes for name, value in STATE.items()
    }
    assert len(checkpoint.shards) == (2 if sharded else 1)
    assert all((checkpoint.folder / entry.shard).is_file() for entry in checkpoint.tensors.values())
    assert checkpoint.pickled is pickled
    assert (checkpoint.index is not None) is sharded
    assert checkpoint.revision == "abc123"


def test_reading_gives_every_tensor_lazily_by_name(checkpoint: Checkpoint) -> None:
    with checkpoint.reading(reversed(STATE)) as lazy:
        assert set(lazy) == set(STATE)
        for name, value in STATE.items():
            assert torch.equal(lazy[name][...], value), name
        assert torch.equal(lazy["model.embed.weight"][1:3], STATE["model.embed.weight"][1:3])


def test_a_tensor_read_is_a_copy_that_outlives_its_file(checkpoint: Checkpoint) -> None:
    values = {name: checkpoint.read(name) for name in STATE}
    shutil.rmtree(checkpoint.folder)
    assert all(torch.equal(values[name], value) and values[name].dtype == value.dtype for name, value in STATE.items())


def test_a_finite_checkpoint_passes_and_nan_or_infinity_is_named(
    checkpoint: Checkpoint, pickled: bool, sharded: bool
) -> None:
    check_finite(checkpoint, "expert a")
    for value in (float("nan"), float("inf"), float("-inf")):
        spoilt = {name: tensor.clone() for name, tensor in STATE.items()}
        spoilt["model.layers.1.weight"][1, 2] = value
        folder = write(checkpoint.folder, spoilt, pickled, sharded)
        with pytest.raises(CheckpointError, match=r"expert a .*tensor model\.layers\.1\.weight holds NaN or infinity"):
            check_finite(open_checkpoint(folder), "expert a")


def test_large_but_finite_weights_pass(pickled: bool, tmp_path: Path) -> None:
    large = {"weight": torch.full((64, 64), 3e38)}
    check_finite(open_checkpoint(write(tmp_path / "model", large, pickled, False)), "expert a")


def test_a_pickle_of_the_format_before_pytorch_1_6_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", STATE, True, False)
    torch.save(STATE, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    checkpoint = open_checkpoint(folder)
    assert all(torch.equal(checkpoint.read(name), value) for name, value in STATE.items())


def test_safetensors_win_over_a_pickle_in_the_same_folder(tmp_path: Path) -> None:
    write(tmp_path / "model", {"weight": torch.zeros(1)}, True, False)
    folder = write(tmp_path / "model", {"weight": torch.ones(1)}, False, False)
    assert torch.equal(open_checkpoint(folder).read("weight"), torch.ones(1))


def test_a_tensor_in_another_shard_than_the_index_says_is_missing(tmp_path: Path, pickled: bool) -> None:
    folder = write(tmp_path / "model", STATE, pickled, True)
    (index,) = folder.glob("*.index.json")
    names = read_index(folder, index.name)
    names["logit_scale"] = names["position_ids"]
    index.write_text(json.dumps({"weight_map": names}))
    with pytest.raises(CheckpointError, match=r"lists 1 tensors that its shards don't hold \(logit_scale\)"):
        open_checkpoint(folder)


def test_a_tensor_that_the_index_leaves_out_is_left_out(tmp_path: Path, pickled: bool) -> None:
    folder = write(tmp_path / "model", STATE, pickled, True)
    (index,) = folder.glob("*.index.json")
    names = read_index(folder, index.name)
    del names["logit_scale"]
    index.write_text(json.dumps({"weight_map": names}))
    assert set(open_checkpoint(folder).tensors) == set(STATE) - {"logit_scale"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not json", "is not a shard index"),
        ("[]", "is not a shard index"),
        ("{}", "is not a shard index"),
        ('{"weight_map": []}', "lists no tensors"),
        ('{"weight_map": {}}', "lists no tensors"),
        ('{"weight_map": {"a": 3}}', "names the file 3"),
        ('{"weight_map": {"a": "../x.safetensors"}}', r"names the file '\.\./x\.safetensors'.*own folder"),
        ('{"weight_map": {"a": "/etc/x.safetensors"}}', "own folder"),
        ('{"weight_map": {"a": ".."}}', "own folder"),
        ('{"weight_map": {"a": ""}}', "own folder"),
    ],
)
def test_an_index_that_is_none_or_leads_out_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_index(tmp_path, "model.safetensors.index.json")
    assert str(tmp_path / "model.safetensors.index.json") in str(caught.value)


def test_a_dtype_that_is_no_full_precision_is_refused_by_name(tmp_path: Path) -> None:
    state = {"weight": torch.zeros(2, 2).to(torch.float8_e4m3fn)}
    folder = write(tmp_path / "model", state, False, False)
    with pytest.raises(CheckpointError, match=r"tensor weight is F8_E4M3.*full-precision"):
        open_checkpoint(folder)


def test_an_empty_weight_file_is_refused(tmp_path: Path, pickled: bool) -> None:
    folder = write(tmp_path / "model", STATE, pickled, False)
    (weights,) = (path for path in folder.iterdir() if path.name != "config.json")
    weights.write_bytes(b"")
    with pytest.raises(CheckpointError, match="can't be read as"):
        open_checkpoint(folder)


def reference(path: str) -> ModelReference:
    return ModelReference(model=ModelPath(path=path))


def test_a_folder_is_resolved_to_itself_without_a_revision(tmp_path: Path) -> None:
    assert resolve(reference(str(tmp_path))) == (tmp_path, None)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("org/absent", "is not a folder here and can't be had from the Hub"),
        ("not a name", "is not a folder here and can't be had from the Hub"),
        ("/no/such/folder", "is not a folder here; check the name"),
        ("./here/neither", "is not a folder here; check the name"),
    ],
)
def test_a_model_that_is_neither_here_nor_to_be_had_is_an_error_that_names_it(
    name: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=problem) as caught:
        resolve(reference(name), str(tmp_path))
    assert name in str(caught.value)


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_a_model_in_the_hubs_cache_is_found_offline_with_its_commit(ending: str, tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--org--cached"
    snapshot = repository / "snapshots" / commit
    snapshot.parent.mkdir(parents=True)
    write(snapshot, STATE, ending == "bin", False)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    folder, revision = resolve(reference("org/cached"), str(tmp_path))
    assert revision == commit
    assert set(open_checkpoint(folder, revision).tensors) == set(STATE)
