"""What parked forwards hold while they wait: in memory up to a limit, beyond it in files mapped in their place.

A parked forward holds the tensors that it passed to its block and those in its own local variables (an embedding's
output stays in one until the forward ends). A tensor that goes to a file keeps its identity and its strides, so that
the forward goes on as it would have; blocks are given what is read from the file, and the mapped pages come into
memory only if the model itself looks at the tensor again.
"""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from featcal_hf.errors import CheckpointError
from featcal_hf.forward import Call, ParkedForward

SMALL_BYTES = 4096
SHARE_OF_FREE_MEMORY = 0.5
CONTROL_GROUP = Path("/sys/fs/cgroup")


@dataclass
class _Held:
    """A tensor that waits.

    Attributes:
        bytes: its size.
        version: PyTorch's count of changes made to it in place, when it was seen.
        file: where its bytes are, None while they are in memory.
        is_compared: it has been compared with the tensors that are held already.
        is_shared: other tensors are the same memory, so that moving it would free nothing.
    """

    bytes: int
    version: int
    file: Path | None = None
    is_compared: bool = False
    is_shared: bool = False


class Activations:
    """The tensors that the parked forwards of a run hold.

    Args:
        limit: bytes that may stay in memory.
        folder: where the others go; made when it is needed.
    """

    def __init__(self, limit: int, folder: Path) -> None:
        self._limit, self._folder = limit, folder
        self._held: dict[int, _Held] = {}
        self._idle: dict[int, weakref.ref[Tensor]] = {}
        self._by_content: weakref.WeakValueDictionary[tuple[object, ...], Tensor] = weakref.WeakValueDictionary()
        self._in_memory = self._files = 0

    @property
    def bytes_in_memory(self) -> int:
        """Bytes that are held in memory now."""
        return self._in_memory

    def keep(self, run: ParkedForward) -> None:
        """Take charge of what a forward holds; call it whenever one has parked.

        Masks and rotary embeddings that are equal become one tensor. Past the limit, what forwards hold but didn't
        pass to their blocks goes to files first, then what this one passed.

        Raises:
            CheckpointError: a file can't be written.
        """
        if run.call is None:
            return
        hidden, others = run.call.hidden_states, run.call.other_tensors
        for value in others:
            self._share(value)
        passed = {id(value): value for value in (hidden, *others)}
        for value in passed.values():
            self._see(value)
            self._idle.pop(id(value), None)
        for value in run.held():
            if id(value) not in passed and self._see(value):
                self._idle.setdefault(id(value), weakref.ref(value))
        if self._in_memory > self._limit:
            idle = [value for value in (reference() for reference in self._idle.values()) if value is not None]
            for value in (*idle, *passed.values()):
                if self._in_memory > self._limit:
                    self._move(value)

    def call(self, run: ParkedForward, device: torch.device) -> Call:
        """What a forward passed to its block, on `device`."""
        return run.waiting().map(lambda value: self._read(value).to(device))

    def close(self) -> None:
        """Remove all files."""
        self._held.clear()
        self._idle.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _see(self, value: Tensor) -> bool:
        """Take charge of a tensor; whether it is one to take charge of."""
        if isinstance(value, nn.Parameter) or value.device.type != "cpu" or _bytes(value) < SMALL_BYTES:
            return False
        known = self._held.get(id(value))
        if known is not None and known.version == value._version:
            return True
        if known is None:
            weakref.finalize(value, self._forget, id(value)).atexit = False
        else:
            self._forget(id(value))
        self._held[id(value)] = _Held(_bytes(value), value._version)
        self._in_memory += _bytes(value)
        return True

    def _forget(self, key: int) -> None:
        self._idle.pop(key, None)
        held = self._held.pop(key, None)
        if held is None:
            return
        if held.file is None:
            self._in_memory -= held.bytes
        else:
            held.file.unlink(missing_ok=True)

    def _share(self, value: Tensor) -> None:
        """Let a tensor use the memory of an equal one that is held already."""
        if not self._see(value) or self._held[id(value)].is_compared:
            return
        self._held[id(value)].is_compared = True
        key = (value.shape, value.stride(), value.dtype, float(value.sum(dtype=torch.float64)))
        other = self._by_content.setdefault(key, value)
        owner = self._held.get(id(other))
        if other is value or owner is None or owner.file is not None or not torch.equal(other, value):
            return
        value.data = other
        owner.is_shared = True
        self._in_memory -= _bytes(value)
        self._held[id(value)] = _Held(0, value._version, is_compared=True, is_shared=True)

    def _move(self, value: Tensor) -> None:
        """Move a tensor to a file, if that frees its memory."""
        self._idle.pop(id(value), None)
        held = self._held.get(id(value))
        if held is None or held.file is not None or held.is_shared or not _is_dense(value):
            return
        file = self._folder / f"{self._files}"
        self._files += 1
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with file.open("wb") as out:
                out.write(_memory(value).numpy().data)
        except OSError as error:
            raise CheckpointError(
                f"{file} can't be written ({error}): the parked features of the calibration rows beyond "
                f"--activation-memory go there. Free some space, raise --activation-memory, or take fewer or shorter "
                "rows; the merged model is as it was."
            ) from error
        mapped = torch.from_file(str(file), shared=False, size=value.numel(), dtype=value.dtype)
        value.data = mapped.as_strided(value.shape, value.stride())
        held.file, held.version = file, value._version
        self._in_memory -= held.bytes

    def _read(self, value: Tensor) -> Tensor:
        held = self._held.get(id(value))
        if held is None or held.file is None or held.version != value._version:
            return value
        copy = torch.empty(value.numel(), dtype=value.dtype)
        with held.file.open("rb") as file:
            read = file.readinto(copy.view(torch.uint8).numpy().data)
        if read != held.bytes:
            raise CheckpointError(
                f"{held.file} holds {read} bytes, expected {held.bytes}: something else has changed the run's own "
                "files. Run the same command again."
            )
        return copy.as_strided(value.shape, value.stride())


@contextmanager
def activations(limit: int | None, folder: Path, processes: int = 1) -> Iterator[Activations]:
    """Activations whose files are gone at the end, and those of a run that was killed at the beginning.

    Args:
        limit: see `Activations`; None for half of the memory that is free now.
        folder: see `Activations`.
        processes: how many on this machine hold activations, and share what is free.
    """
    shutil.rmtree(folder, ignore_errors=True)
    held = Activations(default_limit() // processes if limit is None else limit, folder)
    try:
        yield held
    finally:
        held.close()


def default_limit() -> int:
    """Half of the memory that is free now: of the machine, or of the control group that the process is in."""
    free = int(psutil.virtual_memory().available)
    limit = CONTROL_GROUP / "memory.max"
    if limit.is_file() and (bound := limit.read_text(encoding="ascii").strip()) != "max":
        usage = dict(line.split() for line in (CONTROL_GROUP / "memory.stat").read_text(encoding="ascii").splitlines())
        used = int((CONTROL_GROUP / "memory.current").read_text(encoding="ascii"))
        free = min(free, int(bound) - used + int(usage["inactive_file"]))
    return int(SHARE_OF_FREE_MEMORY * max(free, 0))


def _bytes(value: Tensor) -> int:
    return value.numel() * value.element_size()


def _is_dense(value: Tensor) -> bool:
    """Whether its elements lie side by side in memory, in whatever order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _memory(value: Tensor) -> Tensor:
    """A dense tensor's bytes in the order in which they lie in memory."""
    return value.detach().as_strided((value.numel(),), (1,)).view(torch.uint8)
