"""Kill a process just before its n-th change to a folder: what `kill -9` may leave, at every point."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Opening a file to overwrite a part of it is none: what matters is when it gets its name.
CHANGES = frozenset({"os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"})


def crashes(action: Callable[[], object], folder: Path, restore: Callable[[], None]) -> Iterator[int]:
    """Run `action` in children of this process, killed before their first, second, ... change below `folder`.

    Yields the number of changes that were made, after each kill, until a child comes to its end; `restore` puts the
    folder back before each child.
    """
    changes = 0
    while True:
        restore()
        if run_killed(action, folder, changes):
            return
        yield changes
        changes += 1


def run_killed(action: Callable[[], object], folder: Path, changes: int) -> bool:
    """Run `action` in a child that is killed after so many changes below `folder`; whether it came to its end."""
    child = os.fork()
    if child == 0:
        try:
            _kill_after(changes, folder)
            action()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), f"the child ended by itself with {code}"
    return code == 0


def _kill_after(changes: int, folder: Path) -> None:
    left = changes

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event == "open":
            path, _, flags = arguments
            changing = isinstance(path, str) and bool(flags & (os.O_CREAT | os.O_TRUNC))
        else:
            changing = event in CHANGES
            path = arguments[0] if changing else ""
        if changing and Path(os.fsdecode(path)).is_relative_to(folder):
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(watch)
