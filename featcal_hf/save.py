"""Write calibrated weights beside the merged ones and swap them in when they are complete.

The new shards are byte copies of the merged ones in which the calibrated tensors are overwritten as their blocks are
solved: names, dtypes, order and headers stay what they were. At any moment a reader finds either the whole merged
model or the whole calibrated one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from featcal_hf.checkpoint import PICKLED, SAFETENSORS, Checkpoint, read_index
from featcal_hf.errors import CheckpointError

WORK = ".featcal"
UNFINISHED = ".featcal-output"
REPORT = "featcal.json"
INCOMING = "featcal-"
WEIGHTS = re.compile(r"(featcal-)?(pytorch_)?model([-.].*)?\.(safetensors|bin)(\.index\.json|\.twin)?(\.new)?")


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
            shutil.copyfile(checkpoint.folder / shard, work / shard)
            self._offsets.update(_data_offsets(work / shard))

    def write(self, tensors: dict[str, Tensor]) -> None:
        """Overwrite tensors in the new shards."""
        for name, value in tensors.items():
            _check_fits(self._checkpoint, name, value)
            with self._files[self._checkpoint.tensors[name].shard].open("r+b") as file:
                file.seek(self._offsets[name])
                file.write(raw_bytes(value))

    def complete(self) -> dict[str, Path]:
        """Flush the new shards to disk, with the merged ones' permissions."""
        for shard, path in self._files.items():
            shutil.copymode(self._checkpoint.folder / shard, path)
            sync(path)
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
        path.write_bytes(save({name: value.cpu().contiguous() for name, value in tensors.items()}))
        self._blocks.append(path)

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
            try:
                torch.save(state, files[shard])
            except RuntimeError as error:  # its writer reports a full disk as an internal error
                raise CheckpointError(
                    f"{files[shard]} can't be written ({error}); the disk may be full. "
                    f"{self._checkpoint.folder} is as it was; free some space and run the same command again."
                ) from error
            shutil.copymode(self._checkpoint.folder / shard, files[shard])
            sync(files[shard])
        for block in self._blocks:
            block.unlink()
        return files


@contextmanager
def work_folder(work: Path) -> Iterator[Path]:
    """An empty folder for unfinished files, gone at the end however that comes."""
    folder = work.parent
    created = not folder.exists()
    work.mkdir(parents=True, exist_ok=True)
    for leftover in work.iterdir():
        _discard(leftover)
    try:
        yield work
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        if created and folder.exists() and not any(folder.iterdir()):
            folder.rmdir()
        raise
    shutil.rmtree(work)


def check_output(output: Path, folder: Path) -> None:
    """Refuse an output folder that holds something, other than what an interrupted run left there.

    Raises:
        CheckpointError: it isn't empty, isn't a folder, or lies inside the merged model's `folder`.
    """
    if folder.resolve() in output.resolve().parents:
        raise CheckpointError(
            f"--output {output} lies inside the merged model's folder {folder}, of which it is to be a copy; name one "
            "outside."
        )
    if (output / UNFINISHED).is_dir():
        return
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(
            f"--output {output} exists and isn't an empty folder; name a new one, or leave --output out to "
            "calibrate in place."
        )


def check_space(
    folder: Path,
    needed: int,
    takes: str = "the calibrated shards take {} beside the merged ones; free some space or name another --output.",
) -> None:
    """Refuse to start where the new shards don't fit.

    Args:
        folder: where they will be written; it may have to be made first.
        needed: bytes that will be written.
        takes: the message's second half, with a place for the bytes.

    Raises:
        CheckpointError: names what is free and what is needed.
    """
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise CheckpointError(f"{existing} has {free / 1e9:.2f} GB free, but " + takes.format(f"{needed / 1e9:.2f} GB"))


def open_writer(checkpoint: Checkpoint, names: list[str], work: Path) -> CheckpointWriter:
    """A writer for the shards that hold the named tensors.

    Raises:
        CheckpointError: the disk is full.
    """
    shards = list(dict.fromkeys(checkpoint.tensors[name].shard for name in names))
    kind = PickleWriter if checkpoint.pickled else SafetensorsWriter
    return kind(checkpoint, shards, work)


def swap_in(checkpoint: Checkpoint, new: dict[str, Path], work: Path, report: dict[str, Any]) -> None:
    """Replace the merged shards in their own folder; every step leaves one whole model to read.

    Everything is written in `work` first. The report comes before the weights it speaks of: without them it is
    ignored, and weights without it would be calibrated twice.
    """
    folder = checkpoint.folder
    write_text(work / REPORT, _report_text(report))
    if checkpoint.index is not None:
        text = (folder / checkpoint.index).read_text(encoding="utf-8")
        for shard in new:
            text = text.replace(f'"{shard}"', f'"{INCOMING}{shard}"')
        write_text(work / checkpoint.index, text)
    try:
        os.replace(work / REPORT, folder / REPORT)
        for shard, path in new.items():
            os.replace(path, folder / (shard if checkpoint.index is None else f"{INCOMING}{shard}"))
        if checkpoint.index is not None:
            os.replace(work / checkpoint.index, folder / checkpoint.index)
    except BaseException:
        last = list(new.values())[-1] if checkpoint.index is None else work / checkpoint.index
        if last.exists():
            for name in (REPORT, *(f"{INCOMING}{shard}" for shard in new)):
                (folder / name).unlink(missing_ok=True)
        raise
    _give_old_names(folder)


def finish_swap(folder: Path) -> None:
    """After a run that was killed: bring its swap to an end, if it had begun, and remove its unfinished files.

    Raises:
        CheckpointError: an index can't be read.
    """
    _give_old_names(folder)
    _discard(folder / WORK)


def _give_old_names(folder: Path) -> None:
    """Give new shards the names of the merged ones, where an index names new ones."""
    for index in (f"{SAFETENSORS}.index.json", f"{PICKLED}.index.json"):
        if (folder / index).is_file():
            _finish_index(folder, index)


def _finish_index(folder: Path, index: str) -> None:
    shards = set(read_index(folder, index).values())
    incoming = [shard for shard in shards if shard.startswith(INCOMING)]
    if not all((folder / shard).is_file() for shard in incoming):
        return  # not ours to mend: opening the checkpoint says what is missing
    for shard in incoming:
        twin = folder / f"{shard}.twin"
        twin.unlink(missing_ok=True)
        _duplicate(folder / shard, twin)
        os.replace(twin, folder / shard.removeprefix(INCOMING))
    if incoming:
        text = (folder / index).read_text(encoding="utf-8")
        write_text(folder / f"{index}.new", text.replace(f'"{INCOMING}', '"'))
        os.replace(folder / f"{index}.new", folder / index)
    for shard in shards:
        leftover = f"{INCOMING}{shard.removeprefix(INCOMING)}"
        for name in (leftover, f"{leftover}.twin"):
            (folder / name).unlink(missing_ok=True)


def write_output(
    checkpoint: Checkpoint, new: dict[str, Path], work: Path, output: Path, report: dict[str, Any]
) -> None:
    """Make `output` a copy of the merged folder with the new shards; the file that readers look for comes last.

    Everything is written in `work` first, and then moved.
    """
    write_text(work / REPORT, _report_text(report))
    names = _output_names(checkpoint)
    for name in names:
        source = checkpoint.folder / name
        if name == REPORT or name in new:
            continue
        if source.is_dir():
            shutil.copytree(source, work / name)
        else:
            shutil.copy(source, work / name)
    moved: list[Path] = []
    try:
        for name in names:
            moved.append(output / name)
            os.replace(work / name, output / name)
    except BaseException:
        for path in reversed(moved):
            _discard(path)
        raise


def discard_unfinished(checkpoint: Checkpoint, output: Path) -> None:
    """Remove from `output` what an interrupted `write_output` moved there, the file that readers look for first."""
    if (output / UNFINISHED).is_dir():
        for name in reversed(_output_names(checkpoint)):
            _discard(output / name)


def _output_names(checkpoint: Checkpoint) -> list[str]:
    weights = [*checkpoint.shards, *([checkpoint.index] if checkpoint.index is not None else [])]
    others = sorted(entry.name for entry in checkpoint.folder.iterdir())
    skipped = {*weights, REPORT, WORK, UNFINISHED}
    return [*(name for name in others if name not in skipped and not WEIGHTS.fullmatch(name)), REPORT, *weights]


def fingerprint(tensors: dict[str, Tensor]) -> dict[str, str]:
    """SHA-256 of each tensor's bytes: how a checkpoint is known to be the one a report speaks of."""
    return {name: hashlib.sha256(raw_bytes(value)).hexdigest() for name, value in tensors.items()}


def is_calibrated(checkpoint: Checkpoint) -> bool:
    """Whether the folder's weights are the result of an earlier calibration, by its report's fingerprint."""
    path = checkpoint.folder / REPORT
    if not path.is_file():
        return False
    try:
        marks = json.loads(path.read_text(encoding="utf-8"))["fingerprint"]
        return bool(marks) and all(
            name in checkpoint.tensors and fingerprint({name: checkpoint.read(name)})[name] == mark
            for name, mark in marks.items()
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not a report of ours ({error!r}); delete it if the folder holds a fresh merge."
        ) from error


def _report_text(report: dict[str, Any]) -> str:
    return json.dumps(report, indent=2, ensure_ascii=False) + "\n"


def write_text(path: Path, text: str) -> None:
    """Write a file and flush it to disk."""
    path.write_text(text, encoding="utf-8")
    sync(path)


def _discard(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _duplicate(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)


def sync(path: Path) -> None:
    """Flush a file to disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _data_offsets(path: Path) -> dict[str, int]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}


def raw_bytes(value: Tensor) -> memoryview:
    """A tensor's bytes as they stand in a weight file."""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _check_fits(checkpoint: Checkpoint, name: str, value: Tensor) -> None:
    entry = checkpoint.tensors[name]
    if value.dtype != entry.dtype or tuple(value.shape) != entry.shape:
        raise CheckpointError(
            f"{name}: the calibrated tensor is {value.dtype} {tuple(value.shape)}, the checkpoint's is {entry.dtype} "
            f"{entry.shape}; nothing was replaced."
        )
