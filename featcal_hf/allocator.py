"""Freed memory that stays with the process while blocks are computed.

The GNU C library gives what is freed at the end of its heap back to the system at once, and takes it again for the
next tensor, whose pages the system has to find and clear first. For the intermediate features of a small model's MLP
that takes longer than computing them.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # names of mallopt's settings
LARGEST_IN_HEAP = 32 * 2**20
KEPT_BYTES = 128 * 2**20


@contextmanager
def keeping_freed_memory() -> Iterator[None]:
    """While open, up to `KEPT_BYTES` of freed memory stay in the heap; other C libraries do as they always do.

    At the end they go back to the system, and the library goes on with what its own adaptive thresholds end at.
    """
    if platform.libc_ver()[0] != "glibc":
        yield
        return
    library = ctypes.CDLL(None)
    library.mallopt(MMAP_THRESHOLD, LARGEST_IN_HEAP)
    library.mallopt(TRIM_THRESHOLD, KEPT_BYTES)
    try:
        yield
    finally:
        library.mallopt(TRIM_THRESHOLD, 2 * LARGEST_IN_HEAP)
        library.malloc_trim(0)
