"""Shards written tensor by tensor are files like any other, divided as mergekit divides them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from mergekit.io.tensor_writer import TensorWriter
from safetensors.torch import load_file
from torch import Tensor

from featcal_hf.shards import ShardWriter, plan_shards

TENSORS = {
    "first": torch.arange(12.0).reshape(3, 4),
    "odd": torch.tensor([True, False, True]),
    "ids": torch.arange(5),
    "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
    "large": torch.arange(40.0).reshape(4, 10).t(),
    "émpty": torch.zeros(0, 3),
    "last": torch.arange(6.0).half(),
}


def write(folder: Path, max_bytes: int, order: list[str]) -> dict[str, dict[str, Tensor]]:
    folder.mkdir()
    table = plan_shards({name: (value.dtype, tuple(value.shape)) for name, value in TENSORS.items()}, max_bytes)
    writer = ShardWriter(folder, table)
    for name in order:
        writer.write(name, TENSORS[name])
    writer.complete()
    return {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}


@pytest.mark.parametrize("max_bytes", [0, 1, 60, 100, 10_000])
def test_names_and_division_are_mergekits_whatever_the_order_of_writing(max_bytes: int, tmp_path: Path) -> None:
    files = write(tmp_path / "ours", max_bytes, [*reversed(TENSORS)])
    (tmp_path / "theirs").mkdir()
    with TensorWriter(str(tmp_path / "theirs"), max_bytes) as theirs:
        for name, value in TENSORS.items():
            theirs.save_tensor(name, value)
    expected = {path.name: load_file(path) for path in sorted((tmp_path / "theirs").glob("*.safetensors"))}
    assert {file: set(tensors) for file, tensors in files.items()} == {file: set(of) for file, of in expected.items()}
    for tensors in files.values():
        for name, value in tensors.items():
            assert value.dtype == TENSORS[name].dtype
            assert torch.equal(value, TENSORS[name])
    indices = [tmp_path / label / "model.safetensors.index.json" for label in ("ours", "theirs")]
    assert indices[0].exists() == indices[1].exists() == (len(files) > 1)
    if len(files) > 1:
        ours, kits = (json.loads(path.read_text()) for path in indices)
        assert ours["weight_map"] == kits["weight_map"]
        assert ours["metadata"]["total_size"] == kits["metadata"]["total_size"]


def test_a_tensor_that_is_missing_or_not_as_planned_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not written: last"):
        write(tmp_path / "missing", 0, [name for name in TENSORS if name != "last"])
    writer = ShardWriter(tmp_path, plan_shards({"one": (torch.float32, (2, 2))}, 0))
    for value in (torch.zeros(4), torch.zeros(2, 2, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"planned was torch\.float32"):
            writer.write("one", value)
