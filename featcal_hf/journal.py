"""What a run has finished, line by line on the disk, so that after a kill or a power cut it can go on from there.

The first line says what the run was made of, each further one that a block's tensors are on the disk, the last one that
all are. Each line begins with a digest of itself: a torn one is no line, nor is anything after it.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from featcal_hf.calibrate import BlockReport
from featcal_hf.errors import CheckpointError
from featcal_hf.writers import sync, write_text

JOURNAL = "featcal-journal.jsonl"
_REPORT = TypeAdapter(BlockReport)


@dataclass(frozen=True)
class FinishedBlock:
    """A block whose new tensors are on the disk.

    Attributes:
        report: what happened at it.
        sources: its new parameters -> their names in the checkpoint.
        marks: SHA-256 of the tensors, by their names in the checkpoint.
    """

    report: BlockReport
    sources: dict[str, str]
    marks: dict[str, str]


@dataclass
class Journal:
    """A run's journal.

    Attributes:
        path: its file.
        work: what the result depends on: settings, data, models.
        conditions: under what it was computed: versions, threads, device.
        total: blocks of the model.
        blocks: the finished ones, in forward order.
        complete: whether no block is left to do.
    """

    path: Path
    work: dict[str, Any]
    conditions: dict[str, Any]
    total: int
    blocks: list[FinishedBlock] = field(default_factory=list)
    complete: bool = False

    def begin(self) -> None:
        """Write the first line; the files that blocks are written into have to be on the disk by then."""
        write_text(self.path, _line(self._head()))
        sync(self.path.parent)
        sync(self.path.parent.parent)

    def add(self, block: FinishedBlock) -> None:
        """Note a block whose tensors are on the disk."""
        self._append(
            {
                "report": _REPORT.dump_python(block.report, mode="json"),
                "sources": block.sources,
                "marks": block.marks,
            }
        )
        self.blocks.append(block)

    def finish(self) -> None:
        """Note that no block is left to do."""
        if not self.complete:
            self._append({"complete": True})
            self.complete = True

    def cut(self, blocks: int) -> None:
        """Forget all but the first blocks, and what was torn."""
        self.complete = self.complete and blocks == len(self.blocks)
        del self.blocks[blocks:]
        lines = _whole_lines(self.path)[: 1 + blocks + self.complete]
        new = self.path.with_suffix(".new")
        write_text(new, "".join(map(_line, lines)))
        os.replace(new, self.path)
        sync(self.path.parent)

    def _head(self) -> dict[str, Any]:
        return {"work": self.work, "conditions": self.conditions, "total": self.total}

    def _append(self, entry: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(entry))
            file.flush()
            os.fsync(file.fileno())


def read_journal(folder: Path) -> Journal | None:
    """The journal in a work folder; None without one, or if it was torn at its very beginning.

    Raises:
        CheckpointError: its lines are whole, but not what this version writes.
    """
    path = folder / JOURNAL
    lines = _whole_lines(path) if path.is_file() else []
    if not lines:
        return None
    head, *entries = lines
    try:
        journal = Journal(path, head["work"], head["conditions"], head["total"])
        for entry in entries:
            if "complete" in entry:
                journal.complete = True
            else:
                report = _REPORT.validate_python(entry["report"])
                journal.blocks.append(FinishedBlock(report, entry["sources"], entry["marks"]))
    except (KeyError, TypeError, AttributeError, ValidationError) as error:
        raise CheckpointError(
            f"{path} was written by another version of featcal_hf; go on with that one, or give --restart to drop what "
            "it has finished."
        ) from error
    return journal


def _line(entry: dict[str, Any]) -> str:
    text = json.dumps(entry)
    return f"{_digest(text)} {text}\n"


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    entries = []
    *lines, _ = path.read_bytes().decode("ascii", errors="replace").split("\n")
    for line in lines:
        digest, _, text = line.partition(" ")
        if digest != _digest(text):
            break
        entries.append(json.loads(text))
    return entries


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
