"""Freed memory that stays with the process: pages are taken once, and given back at the end."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from featcal_hf.allocator import keeping_freed_memory

def taken():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        first, second = torch.ones(4_000_000), torch.ones(5_000_000)
        del first, second
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with keeping_freed_memory():
    taken()
    print(taken())
print(taken())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts the page faults of the GNU C library's heap")
def test_memory_that_is_freed_is_taken_from_the_system_once_and_given_back_at_the_end() -> None:
    run = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    kept, afterwards = (int(line) for line in run.stdout.split())
    pages = 36_000_000 // resource.getpagesize()
    assert kept < pages
    assert afterwards > pages // 2
