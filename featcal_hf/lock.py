"""One run at a time in a folder: the second is refused at once, and a dead one never stands in the way."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from featcal_hf.errors import CheckpointError
from featcal_hf.save import LOCKS


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder, which is made if it isn't there; the system frees it when the process ends, however that comes.

    Raises:
        CheckpointError: another run holds it; says which, where and since when.
    """
    made = [path for path in (folder, *folder.absolute().parents) if not path.exists()]
    lock_file, owner = (folder / name for name in LOCKS)
    lock = FileLock(lock_file)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except Timeout as error:
            raise CheckpointError(
                f"another run is at work in {folder}{_described(owner)}; wait until it has ended, or stop it."
            ) from error
        try:
            now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
            owner.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now}))
            yield
        finally:
            owner.unlink(missing_ok=True)
            with suppress(PermissionError):  # Windows: an open file stays until it is released, which removes it
                lock_file.unlink(missing_ok=True)
            lock.release()
    finally:
        for path in made:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def _described(owner: Path) -> str:
    try:
        run = json.loads(owner.read_text())
        return f" (process {run['pid']} on {run['host']}, since {run['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # it has only just begun, or is just ending
