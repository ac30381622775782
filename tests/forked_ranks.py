"""Ranks of one run as children of this process, as a launcher would start them; without a launcher to end them."""

from __future__ import annotations

import os
import pickle
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from featcal_hf.ranks import Ranks, joined_ranks


def run_ranks(size: int, action: Callable[[Ranks], Any], folder: Path) -> list[Any]:
    """What `action` gave on each rank: its value, the exception that it ended with, or the code of a dead child."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir(exist_ok=True)
    children = []
    for number in range(size):
        child = os.fork()
        if child == 0:
            os.environ |= {"RANK": str(number), "WORLD_SIZE": str(size)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            _run(action, folder / str(number))
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return [code or pickle.loads((folder / str(number)).read_bytes()) for number, code in enumerate(codes)]


def _run(action: Callable[[Ranks], Any], result: Path) -> None:
    try:
        try:
            with joined_ranks() as ranks:
                value = action(ranks)
        except Exception as error:
            traceback.print_exc()
            value = error
        result.write_bytes(pickle.dumps(value))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
