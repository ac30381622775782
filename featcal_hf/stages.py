"""What the stages of a run cost: seconds, and memory where the system says."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

STAGES = ("prepare", "load", "forwards", "moments", "solve", "write", "drift")
_MEMORY, _STATUS = Path("/proc/self/statm"), Path("/proc/self/status")
_Opened = TypeVar("_Opened")


@dataclass(frozen=True)
class StageCost:
    """What one stage took.

    Attributes:
        seconds: wall time. Work that a device still does when the stage ends counts where it is waited for.
        resident_bytes: the most memory the process held at the end of one of its steps; None where the system
            doesn't say.
    """

    seconds: float
    resident_bytes: int | None


class StageClock:
    """Adds up what each stage of a run takes; stages follow each other, they don't nest."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._resident: dict[str, int] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count what runs inside towards a stage."""
        started = time.perf_counter()
        yield
        self.add(name, time.perf_counter() - started)

    @contextmanager
    def loading(self, manager: AbstractContextManager[_Opened]) -> Iterator[_Opened]:
        """Open something; opening it counts as loading, what is done with it doesn't."""
        with ExitStack() as opened:
            with self.stage("load"):
                value = opened.enter_context(manager)
            yield value

    def add(self, name: str, seconds: float) -> None:
        """Count seconds that have passed towards a stage."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        resident = resident_bytes()
        if resident is not None:
            self._resident[name] = max(self._resident.get(name, 0), resident)

    def costs(self) -> dict[str, StageCost]:
        """What each stage took so far, in the order of a run."""
        return {
            name: StageCost(self._seconds[name], self._resident.get(name)) for name in STAGES if name in self._seconds
        }


def resident_bytes() -> int | None:
    """Memory of this process, mapped files included; None where there is no /proc."""
    if not _MEMORY.exists():
        return None
    return int(_MEMORY.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int | None:
    """The most memory that this process has held so far; None on Windows.

    Linux's own count of the program is taken where there is one: what `getrusage` says may be that of the process
    that started this one.
    """
    if sys.platform == "win32":
        return None
    if _STATUS.exists():
        fields = dict(line.split(":", 1) for line in _STATUS.read_text(encoding="ascii").splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
