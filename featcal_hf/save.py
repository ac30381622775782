"""Swap calibrated weights in when they are complete, or put them into a new folder.

At any moment a reader finds either the whole merged model or the whole calibrated one. Until the end the new files
keep a name in the work folder too, so that a run that is killed while it puts them in place can do it again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from featcal_hf.checkpoint import PICKLED, SAFETENSORS, Checkpoint, open_checkpoint, read_index
from featcal_hf.errors import CheckpointError
from featcal_hf.writers import raw_bytes, sync, write_text

WORK = ".featcal"
UNFINISHED = ".featcal-output"
LOCKS = (".featcal.lock", ".featcal.run")
REPORT = "featcal.json"
INCOMING = "featcal-"
WEIGHTS = re.compile(r"(featcal-)?(pytorch_)?model([-.].*)?\.(safetensors|bin)(\.index\.json|\.twin)?(\.new)?")


@contextmanager
def work_folder(work: Path, keep: Callable[[], bool] = lambda: False) -> Iterator[Path]:
    """A folder for unfinished files, empty at the start and gone at the end, however that comes.

    Args:
        work: the folder.
        keep: whether what is in it is worth keeping, asked at the start and after an error.
    """
    folder = work.parent
    created = not folder.exists()
    work.mkdir(parents=True, exist_ok=True)
    if not keep():
        for leftover in work.iterdir():
            discard(leftover)
    try:
        yield work
    except BaseException:
        if not keep():
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
    if output.exists() and (not output.is_dir() or any(entry.name not in LOCKS for entry in output.iterdir())):
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
    last = work / checkpoint.index if checkpoint.index is not None else next(iter(new.values()))
    try:
        os.replace(work / REPORT, folder / REPORT)
        if checkpoint.index is not None:
            for shard, path in new.items():
                _place(path, folder / f"{INCOMING}{shard}")
        sync(folder)
        os.replace(last, folder / last.name)
        sync(folder)
    except BaseException:
        if last.exists():
            for name in (REPORT, *(f"{INCOMING}{shard}" for shard in new)):
                (folder / name).unlink(missing_ok=True)
        raise
    _give_old_names(folder)


def finish_swap(folder: Path) -> None:
    """After a run that was killed: bring its swap to an end, if it had begun, and remove what is left of it.

    Raises:
        CheckpointError: an index can't be read.
    """
    _give_old_names(folder)
    if (folder / WORK).is_dir() and (folder / REPORT).is_file() and is_calibrated(open_checkpoint(folder)):
        discard(folder / WORK)


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
        sync(folder)
        text = (folder / index).read_text(encoding="utf-8")
        write_text(folder / f"{index}.new", text.replace(f'"{INCOMING}', '"'))
        os.replace(folder / f"{index}.new", folder / index)
        sync(folder)
    for shard in shards:
        leftover = f"{INCOMING}{shard.removeprefix(INCOMING)}"
        for name in (leftover, f"{leftover}.twin"):
            (folder / name).unlink(missing_ok=True)


def write_output(
    checkpoint: Checkpoint, new: dict[str, Path], work: Path, output: Path, report: dict[str, Any]
) -> None:
    """Make `output` a copy of the merged folder with the new shards; the file that readers look for comes last.

    Everything is written in `work` first, and then given its place.
    """
    write_text(work / REPORT, _report_text(report))
    names = _output_names(checkpoint)
    for name in names:
        source = checkpoint.folder / name
        if name == REPORT or name in new:
            continue
        discard(work / name)
        if source.is_dir():
            shutil.copytree(source, work / name)
        else:
            shutil.copy(source, work / name)
            sync(work / name)
    moved: list[Path] = []
    try:
        for name in names:
            moved.append(output / name)
            if name == names[-1]:
                sync(output)
            _place(work / name, output / name)
        sync(output)
    except BaseException:
        for path in reversed(moved):
            discard(path)
        raise


def discard_unfinished(checkpoint: Checkpoint, output: Path) -> None:
    """Remove from `output` what an interrupted `write_output` moved there, the file that readers look for first."""
    if (output / UNFINISHED).is_dir():
        for name in reversed(_output_names(checkpoint)):
            discard(output / name)


def _output_names(checkpoint: Checkpoint) -> list[str]:
    weights = [*checkpoint.shards, *([checkpoint.index] if checkpoint.index is not None else [])]
    others = sorted(entry.name for entry in checkpoint.folder.iterdir())
    skipped = {*weights, REPORT, WORK, UNFINISHED, *LOCKS}
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


def discard(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _place(source: Path, target: Path) -> None:
    """Give a file of the work folder a second name; a folder, or a file where it can have only one, is moved."""
    discard(target)
    try:
        os.link(source, target)
    except OSError:
        os.replace(source, target)


def _duplicate(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)
