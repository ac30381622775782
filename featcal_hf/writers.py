"""New shards beside the merged ones: byte copies in which the calibrated tensors are overwritten, block by block.

What a writer has been given is on the disk when `write` returns, so that a run that is killed can go on from there.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from featcal_hf.checkpoint import Checkpoint
from featcal_hf.errors import CheckpointError


class CheckpointWriter(Protocol):
    """Takes calibrated tensors one block at a time and makes new shards of them."""

    def write(self, tensors: dict[str, Tensor]) -> None:
        """Put a block's tensors, by their names in the checkpoint, into the new shards and flush them to disk."""
        ...

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Tensors that were written, as they are on the disk; those that can't be read are left out."""
        ...

    def complete(self) -> dict[str, Path]:
        """Finish the new shards on disk; shard name -> new file."""
        ...


class SafetensorsWriter:
    """Overwrites tensors in copies of the merged shards.

    Args:
        checkpoint: the merged model.
        shards: its shards to copy.
        work: where the copies are.
        blocks: how many blocks an earlier run has written there; None to begin with new copies.

    Raises:
        CheckpointError: a tensor's name, dtype or shape is not the checkpoint's.
    """

    def __init__(self, checkpoint: Checkpoint, shards: list[str], work: Path, blocks: int | None = None) -> None:
        self._checkpoint = checkpoint
        self._files = {shard: work / shard for shard in shards}
        self._offsets: dict[str, int] = {}
        for shard, path in self._files.items():
            if blocks is None:
                shutil.copyfile(checkpoint.folder / shard, path)
                sync(path)
            self._offsets.update(_data_offsets(checkpoint.folder / shard))

    def write(self, tensors: dict[str, Tensor]) -> None:
        """Overwrite tensors in the new shards."""
        touched = set()
        for name, value in tensors.items():
            _check_fits(self._checkpoint, name, value)
            path = self._files[self._checkpoint.tensors[name].shard]
            with path.open("r+b") as file:
                file.seek(self._offsets[name])
                file.write(raw_bytes(value))
            touched.add(path)
        for path in touched:
            sync(path)

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Tensors of the new shards."""
        found = {}
        for name in names:
            try:
                with safe_open(self._files[self._checkpoint.tensors[name].shard], framework="pt") as file:
                    found[name] = file.get_tensor(name).clone()
            except (SafetensorError, OSError):
                continue
        return found

    def complete(self) -> dict[str, Path]:
        """Flush the new shards to disk, with the merged ones' permissions."""
        for shard, path in self._files.items():
            shutil.copymode(self._checkpoint.folder / shard, path)
            sync(path)
        return self._files


class PickleWriter:
    """Keeps calibrated tensors in a file per block and makes new pickled shards of them at the end.

    Args:
        checkpoint: the merged model.
        shards: its shards to make anew.
        work: where the blocks' files and the new shards are.
        blocks: how many blocks an earlier run has written there, None for none.
    """

    def __init__(self, checkpoint: Checkpoint, shards: list[str], work: Path, blocks: int | None = None) -> None:
        self._checkpoint, self._shards, self._work = checkpoint, shards, work
        self._blocks = [self._block_file(number) for number in range(blocks or 0)]

    def write(self, tensors: dict[str, Tensor]) -> None:
        """Save a block's tensors."""
        for name, value in tensors.items():
            _check_fits(self._checkpoint, name, value)
        path = self._block_file(len(self._blocks))
        path.write_bytes(save({name: value.cpu().contiguous() for name, value in tensors.items()}))
        sync(path)
        sync(self._work)
        self._blocks.append(path)

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Tensors of the blocks' files."""
        found = {}
        for path in self._blocks:
            try:
                found.update({name: value for name, value in load_file(path).items() if name in names})
            except (SafetensorError, OSError):
                continue
        return found

    def complete(self) -> dict[str, Path]:
        """Write the shards, one in memory at a time.

        Raises:
            CheckpointError: PyTorch can't write one.
        """
        files = {}
        for shard in self._shards:
            state = dict(torch.load(self._checkpoint.folder / shard, map_location="cpu", weights_only=True, mmap=True))
            for block in self._blocks:
                state.update({name: value for name, value in load_file(block).items() if name in state})
            files[shard] = self._work / shard
            files[shard].unlink(missing_ok=True)
            try:
                torch.save(state, files[shard])
            except RuntimeError as error:  # its writer reports a full disk as an internal error
                raise CheckpointError(
                    f"{files[shard]} can't be written ({error}); the disk may be full. "
                    f"{self._checkpoint.folder} is as it was; free some space and run the same command again."
                ) from error
            shutil.copymode(self._checkpoint.folder / shard, files[shard])
            sync(files[shard])
        return files

    def _block_file(self, number: int) -> Path:
        return self._work / f"block-{number}.safetensors"


def open_writer(checkpoint: Checkpoint, names: list[str], work: Path, blocks: int | None = None) -> CheckpointWriter:
    """A writer for the shards that hold the named tensors.

    Args:
        checkpoint: the merged model.
        names: tensors that will be written.
        work: the folder for the new shards.
        blocks: how many blocks an earlier run has written there; None to begin anew.
    """
    shards = list(dict.fromkeys(checkpoint.tensors[name].shard for name in names))
    kind = PickleWriter if checkpoint.pickled else SafetensorsWriter
    return kind(checkpoint, shards, work, blocks)


def raw_bytes(value: Tensor) -> memoryview:
    """A tensor's bytes as they stand in a weight file."""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_text(path: Path, text: str) -> None:
    """Write a file and flush it to disk."""
    path.write_text(text, encoding="utf-8")
    sync(path)


def sync(path: Path) -> None:
    """Flush a file to disk, or a folder's names."""
    if path.is_dir() and os.name == "nt":
        return  # no folder can be opened there
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _data_offsets(path: Path) -> dict[str, int]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}


def _check_fits(checkpoint: Checkpoint, name: str, value: Tensor) -> None:
    entry = checkpoint.tensors[name]
    if value.dtype != entry.dtype or tuple(value.shape) != entry.shape:
        raise CheckpointError(
            f"{name}: the calibrated tensor is {value.dtype} {tuple(value.shape)}, the checkpoint's is {entry.dtype} "
            f"{entry.shape}; nothing was replaced."
        )
