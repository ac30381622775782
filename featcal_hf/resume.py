"""Going on from where an earlier run was stopped: which of its blocks are whole on the disk, and still hold.

Nothing else is kept: the forwards are replayed through the finished blocks with the weights that were written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from featcal_hf.calibrate import BlockReport
from featcal_hf.errors import CheckpointError
from featcal_hf.journal import JOURNAL, FinishedBlock, Journal, read_journal
from featcal_hf.modules import linear_names, norms_of
from featcal_hf.save import discard, fingerprint
from featcal_hf.streamed import StreamedModel
from featcal_hf.writers import CheckpointWriter, open_writer

SHORT = 40


@dataclass(frozen=True)
class Unfinished:
    """What an earlier run left in a work folder.

    Attributes:
        journal: its journal.
        whole: blocks whose tensors are on the disk as the journal says.
        changed: what is no longer as it was, so that the blocks are of no use.
    """

    journal: Journal
    whole: int
    changed: tuple[str, ...]

    @property
    def usable(self) -> bool:
        """Whether a run can go on from it."""
        return not self.changed and self.whole > 0

    def __str__(self) -> str:
        finished, total, folder = len(self.journal.blocks), self.journal.total, self.journal.path.parent
        if self.changed:
            reasons = "; ".join(self.changed[:3]) + ("; ..." if len(self.changed) > 3 else "")
            return f"starting anew: {reasons}. Dropped: {finished} of {total} blocks that were finished in {folder}"
        damaged = f"; block {self.whole + 1} there is not as it was written, so it is done again"
        damage = damaged if self.whole < finished else ""
        if not self.whole:
            return f"starting anew: no block in {folder} is as it was written. Dropped: {finished} of {total} blocks"
        if (self.journal.complete or finished == total) and not damage:
            return f"going on: all blocks are finished in {folder}, and are now put in place"
        return f"going on from block {self.whole + 1} of {total}: {self.whole} are finished in {folder}{damage}"


def find_unfinished(
    student: StreamedModel, folder: Path, work: Callable[[], dict[str, Any]], conditions: dict[str, Any]
) -> Unfinished | None:
    """What an earlier run has finished in a work folder; None if nothing. Changes nothing.

    Args:
        student: the merged model.
        folder: the work folder; it needn't exist.
        work: gives what the result depends on, now.
        conditions: under what it is to be computed, now.

    Raises:
        CheckpointError: the finished blocks still hold, but were computed under other conditions.
    """
    journal = read_journal(folder)
    if journal is None or not journal.blocks:
        return None
    changed = tuple(differences(journal.work, work()))
    if changed:
        return Unfinished(journal, 0, changed)
    other = list(differences(journal.conditions, conditions))
    if other:
        raise CheckpointError(
            f"{folder} holds {len(journal.blocks)} finished blocks of {journal.total} from a run under other "
            f"conditions: {'; '.join(other)}. Bring that back (--num-threads and --device set two of them) and the run "
            "goes on; or give --restart to drop those blocks and begin anew."
        )
    return Unfinished(journal, _whole_blocks(student, folder, journal), ())


class FinishedBlocks:
    """The blocks that a run has finished: their tensors in new shards, and a journal of them.

    Args:
        student: the merged model.
        folder: the work folder.
        journal: the run's journal.
        writer: takes the blocks' tensors.
    """

    def __init__(self, student: StreamedModel, journal: Journal, writer: CheckpointWriter) -> None:
        self._student, self._journal, self._writer = student, journal, writer
        self._written: tuple[dict[str, str], dict[str, str]] = {}, {}

    @classmethod
    def begin(
        cls, student: StreamedModel, folder: Path, work: dict[str, Any], conditions: dict[str, Any]
    ) -> FinishedBlocks:
        """None yet, in an empty folder."""
        writer = open_writer(student.checkpoint, names_to_write(student), folder)
        journal = Journal(folder / JOURNAL, work, conditions, len(student.blocks))
        journal.begin()
        return cls(student, journal, writer)

    @classmethod
    def go_on(cls, student: StreamedModel, folder: Path, unfinished: Unfinished) -> FinishedBlocks:
        """Those of an earlier run; what it left half done is forgotten."""
        unfinished.journal.cut(unfinished.whole)
        writer = open_writer(student.checkpoint, names_to_write(student), folder, unfinished.whole)
        return cls(student, unfinished.journal, writer)

    @property
    def reports(self) -> list[BlockReport]:
        """Their reports, in forward order."""
        return [block.report for block in self._journal.blocks]

    @property
    def marks(self) -> dict[str, str]:
        """SHA-256 of every new tensor, by its name in the checkpoint."""
        return {name: mark for block in self._journal.blocks for name, mark in block.marks.items()}

    @property
    def complete(self) -> bool:
        """Whether no block is left to do."""
        return self._journal.complete or len(self._journal.blocks) == self._journal.total

    def write(self, path: str, parameters: dict[str, Tensor]) -> None:
        """Put a block's new parameters on the disk."""
        sources = {name: _source(self._student, path, name) for name in parameters}
        named = {sources[name]: value for name, value in parameters.items()}
        self._writer.write(named)
        self._written = sources, fingerprint(named)

    def note(self, report: BlockReport) -> None:
        """Note in the journal that the block last written is finished."""
        self._journal.add(FinishedBlock(report, *self._written))

    def read(self, path: str) -> dict[str, Tensor]:
        """A block's new parameters by their names in it."""
        block = next(block for block in self._journal.blocks if block.report.path == path)
        tensors = self._writer.read(list(block.sources.values()))
        return {name: tensors[source] for name, source in block.sources.items()}

    def close(self) -> dict[str, Path]:
        """All are done: finish the new shards; shard name -> new file."""
        self._journal.finish()
        return self._writer.complete()

    def state(self) -> str:
        """Where the run is, for whoever has just stopped it."""
        done, total = len(self._journal.blocks), self._journal.total
        if not done:
            return "no block was finished yet; the same command begins again."
        return f"{done} of {total} blocks are finished; the same command goes on from there."


def forget_unfinished(folder: Path) -> None:
    """Let a work folder count for nothing: the next run there begins anew."""
    discard(folder / JOURNAL)


def holds_finished_blocks(folder: Path) -> bool:
    """Whether a work folder is worth keeping."""
    journal = read_journal(folder)
    return journal is not None and bool(journal.blocks)


def names_to_write(student: StreamedModel) -> list[str]:
    """The tensors of the checkpoint that calibration may replace."""
    names = []
    for path, block in student.blocks.items():
        for module in [*linear_names(block), *(norm.name for norm in norms_of(block))]:
            for part in ("weight", "bias"):
                if getattr(block.get_submodule(module), part, None) is not None:
                    source = student.source_of(path, f"{module}.{part}")
                    names += [source] if source is not None else []
    return names


def bytes_to_write(student: StreamedModel, whole: bool) -> int:
    """Bytes of the new shards, or of the whole checkpoint; pickles are put together from a file for each block."""
    checkpoint, names = student.checkpoint, names_to_write(student)
    shards = checkpoint.shards if whole else {checkpoint.tensors[name].shard for name in names}
    parts = sum(checkpoint.tensors[name].bytes for name in names) if checkpoint.pickled else 0
    return sum((checkpoint.folder / shard).stat().st_size for shard in shards) + parts


def _whole_blocks(student: StreamedModel, folder: Path, journal: Journal) -> int:
    """How many of the journal's blocks, from the first one on, lie on the disk as they were written."""
    checkpoint, names = student.checkpoint, names_to_write(student)
    shards = {checkpoint.tensors[name].shard for name in names}
    if not checkpoint.pickled and any(_size(folder / s) != _size(checkpoint.folder / s) for s in shards):
        return 0
    writer = open_writer(checkpoint, names, folder, len(journal.blocks))
    for number, block in enumerate(journal.blocks):
        if fingerprint(writer.read(list(block.marks))) != block.marks:
            return number
    return len(journal.blocks)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _source(student: StreamedModel, path: str, name: str) -> str:
    source = student.source_of(path, name)
    if source is None:
        raise CheckpointError(f"{path}.{name} has no tensor of its own in {student.checkpoint.folder}.")
    return source


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What is not as it was, one phrase each."""
    phrases = []
    for name in [*before, *(name for name in now if name not in before)]:
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if name in before and name in now and max(len(str(old)), len(str(new))) <= SHORT:
            phrases.append(f"{name} was {old} and is {new}")
        else:
            phrases.append(f"{name} {'changed' if name in before and name in now else 'came or went'}")
    return phrases
