"""Write calibrated weights beside the merged ones and swap them in when they are complete.

The new shards are byte copies of the merged ones in which the calibrated tensors are overwritten as their blocks are
solved: names, dtypes, order and headers stay what they were. At any moment a reader finds either the whole merged
model or the whole calibrated one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from featcal_hf.checkpoint import Checkpoint
from featcal_hf.errors import CheckpointError

WORK = ".featcal"
REPORT = "featcal.json"
INCOMING = "featcal-"


class CheckpointWriter(Protocol):
    """Takes calibrated tensors one block at a time and makes new shards of them."""

    def write(self, tensors: dict[str, Tensor]) -> None:
        """Put tensors, by their names in the checkpoint, into the new shards."""
        ...

    def complete(self) -> dict[str, Path]:
        """Finish the new shards on disk; shard name -> new file."""
        ...


class SafetensorsWriter:
    """Overwrites tensors in copies of the merged shards.

    Raises:
        CheckpointError: a tensor's name, dtype or shape is not the checkpoint's.
    """

    def __init__(self, checkpoint: Checkpoint, shards: list[str], work: Path) -> None:
        self._checkpoint = checkpoint
        self._files: dict[str, Path] = {}
        self._offsets: dict[str, int] = {}
        for shard in shards:
            self._files[shard] = work / shard
            shutil.copy(checkpoint.folder / shard, work / shard)
            self._offsets.update(_data_offsets(work / shard))

    def write(self, tensors: dict[str, Tensor]) -> None:
        """Overwrite tensors in the new shards."""
        for name, value in tensors.items():
            _check_fits(self._checkpoint, name, value)
            with self._files[self._checkpoint.tensors[name].shard].open("r+b") as file:
                file.seek(self._offsets[name])
                file.write(_bytes(value))

    def complete(self) -> dict[str, Path]:
        """Flush the new shards to disk."""
        for path in self._files.values():
            _sync(path)
        return self._files


class PickleWriter:
    """Keeps calibrated tensors in a file per block and makes new pickled shards of them at the end."""

    def __init__(self, checkpoint: Checkpoint, shards: list[str], work: Path) -> None:
        self._checkpoint, self._shards, self._work = checkpoint, shards, work
        self._blocks: list[Path] = []

    def write(self, tensors: dict[str, Tensor]) -> None:
        """Save a block's tensors."""
        for name, value in tensors.items():
            _check_fits(self._checkpoint, name, value)
        path = self._work / f"block-{len(self._blocks)}.safetensors"
        save_file({name: value.cpu().contiguous() for name, value in tensors.items()}, path)
        self._blocks.append(path)

    def complete(self) -> dict[str, Path]:
        """Write the shards, one in memory at a time."""
        files = {}
        for shard in self._shards:
            state = dict(torch.load(self._checkpoint.folder / shard, map_location="cpu", weights_only=True, mmap=True))
            for block in self._blocks:
                state.update({name: value for name, value in load_file(block).items() if name in state})
            files[shard] = self._work / shard
            torch.save(state, files[shard])
            _sync(files[shard])
        return files


@contextmanager
def work_folder(folder: Path) -> Iterator[Path]:
    """An empty folder for unfinished files inside `folder`, gone at the end however that comes."""
    work = folder / WORK
    if work.exists():
        shutil.rmtree(work)
    created = not folder.exists()
    work.mkdir(parents=True)
    try:
        yield work
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        if created and folder.exists() and not any(folder.iterdir()):
            folder.rmdir()
        raise
    shutil.rmtree(work)


def check_output(output: Path) -> None:
    """Refuse an output folder that holds something.

    Raises:
        CheckpointError: it isn't empty, or isn't a folder.
    """
    if output.exists() and (not output.is_dir() or any(entry.name != WORK for entry in output.iterdir())):
        raise CheckpointError(
            f"--output {output} exists and isn't an empty folder; name a new one, or leave --output out to "
            "calibrate in place."
        )


def check_space(folder: Path, needed: int) -> None:
    """Refuse to start where the new shards don't fit.

    Args:
        needed: bytes that will be written.

    Raises:
        CheckpointError: names what is free and what is needed.
    """
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise CheckpointError(
            f"{existing} has {free / 1e9:.2f} GB free, but the calibrated shards take {needed / 1e9:.2f} GB beside "
            "the merged ones until they are swapped in; free some space or name another --output."
        )


def open_writer(checkpoint: Checkpoint, names: list[str], work: Path) -> CheckpointWriter:
    """A writer for the shards that hold the named tensors.

    Raises:
        CheckpointError: the disk is full.
    """
    shards = list(dict.fromkeys(checkpoint.tensors[name].shard for name in names))
    kind = PickleWriter if checkpoint.pickled else SafetensorsWriter
    return kind(checkpoint, shards, work)


def swap_in(checkpoint: Checkpoint, new: dict[str, Path], report: dict[str, Any]) -> None:
    """Replace the merged shards in their own folder; every step leaves one whole model to read."""
    folder = checkpoint.folder
    _write_report(folder, report)
    if checkpoint.index is None:
        for shard, path in new.items():
            os.replace(path, folder / shard)
        return
    index = folder / checkpoint.index
    text = index.read_text(encoding="utf-8")
    for shard, path in new.items():
        os.replace(path, folder / f"{INCOMING}{shard}")
        text = text.replace(f'"{shard}"', f'"{INCOMING}{shard}"')
    _replace_text(index, text)
    finish_swap(folder)


def finish_swap(folder: Path) -> None:
    """Give new shards their old names, if an index names new ones: the end of `swap_in`, also after a crash."""
    for index in folder.glob("*.index.json"):
        text = index.read_text(encoding="utf-8")
        if f'"{INCOMING}' in text:
            for incoming in _incoming(folder):
                named = folder / incoming.name.removeprefix(INCOMING)
                twin = folder / f"{incoming.name}.twin"
                twin.unlink(missing_ok=True)
                _duplicate(incoming, twin)
                os.replace(twin, named)
            _replace_text(index, text.replace(f'"{INCOMING}', '"'))
    for leftover in _incoming(folder):
        leftover.unlink()


def write_output(checkpoint: Checkpoint, new: dict[str, Path], output: Path, report: dict[str, Any]) -> None:
    """Make `output` a copy of the merged folder with the new shards; the file that readers look for comes last."""
    weights = {*checkpoint.shards, checkpoint.index, REPORT, WORK}
    for source in checkpoint.folder.iterdir():
        if source.name in weights:
            continue
        if source.is_dir():
            shutil.copytree(source, output / source.name)
        else:
            shutil.copy(source, output / source.name)
    _write_report(output, report)
    for shard in checkpoint.shards:
        if shard in new:
            os.replace(new[shard], output / shard)
        else:
            shutil.copy(checkpoint.folder / shard, output / shard)
    if checkpoint.index is not None:
        shutil.copy(checkpoint.folder / checkpoint.index, output / checkpoint.index)


def fingerprint(tensors: dict[str, Tensor]) -> dict[str, str]:
    """SHA-256 of each tensor's bytes: how a checkpoint is known to be the one a report speaks of."""
    return {name: hashlib.sha256(_bytes(value)).hexdigest() for name, value in tensors.items()}


def is_calibrated(checkpoint: Checkpoint) -> bool:
    """Whether the folder's weights are the result of an earlier calibration, by its report's fingerprint."""
    path = checkpoint.folder / REPORT
    if not path.is_file():
        return False
    try:
        marks = json.loads(path.read_text(encoding="utf-8"))["fingerprint"]
        return all(fingerprint({name: checkpoint.read(name)})[name] == mark for name, mark in marks.items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not a report of ours ({error!r}); delete it if the folder holds a fresh merge."
        ) from error


def _write_report(folder: Path, report: dict[str, Any]) -> None:
    _replace_text(folder / REPORT, json.dumps(report, indent=2, ensure_ascii=False) + "\n")


def _replace_text(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    _sync(new)
    os.replace(new, path)


def _incoming(folder: Path) -> list[Path]:
    return [path for path in folder.glob(f"{INCOMING}*") if path.suffix in {".safetensors", ".bin", ".twin"}]


def _duplicate(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _data_offsets(path: Path) -> dict[str, int]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}


def _bytes(value: Tensor) -> memoryview:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _check_fits(checkpoint: Checkpoint, name: str, value: Tensor) -> None:
    entry = checkpoint.tensors[name]
    if value.dtype != entry.dtype or tuple(value.shape) != entry.shape:
        raise CheckpointError(
            f"{name}: the calibrated tensor is {value.dtype} {tuple(value.shape)}, the checkpoint's is {entry.dtype} "
            f"{entry.shape}; nothing was replaced."
        )
