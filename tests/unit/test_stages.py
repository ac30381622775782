from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from featcal_hf import stages
from featcal_hf.stages import StageClock, peak_bytes, resident_bytes


def test_a_stage_adds_up_its_seconds_and_keeps_its_largest_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    held = iter([100, 300, 200])
    monkeypatch.setattr(stages, "resident_bytes", lambda: next(held))
    clock = StageClock()
    for seconds in (1.0, 2.0):
        clock.add("solve", seconds)
    clock.add("forwards", 5.0)

    costs = clock.costs()

    assert list(costs) == ["forwards", "solve"]
    assert costs["solve"].seconds == 3.0
    assert costs["solve"].resident_bytes == 300


def test_opening_counts_as_loading_and_what_is_done_with_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(stages.time, "perf_counter", lambda: now[0])
    closed = []

    @contextmanager
    def block() -> Iterator[str]:
        now[0] += 2
        yield "block"
        closed.append(True)

    clock = StageClock()
    with clock.loading(block()) as opened:
        assert opened == "block"
        now[0] += 50
    assert clock.costs()["load"].seconds == 2
    assert closed == [True]


def test_memory_of_the_process_is_in_bytes() -> None:
    peak, now = peak_bytes(), resident_bytes()

    assert peak is None or 10e6 < peak < 1e12
    assert now is None or 10e6 < now < 1e12
