"""Processes that share a run: what they pass on, and how they end."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from forked_ranks import run_ranks

from featcal_hf import ranks as module
from featcal_hf.errors import DataError, RanksError
from featcal_hf.ranks import ALONE, Ranks, divide, joined_ranks


def test_each_piece_of_work_goes_to_the_rank_that_has_least_to_do() -> None:
    loads = [5.0, 0.0, 0.0]
    assert divide([4, 3, 2, 1], loads) == [1, 2, 2, 1]
    assert loads == [5.0, 5.0, 5.0]
    assert divide([1, 1, 1], [0.0]) == [0, 0, 0]


def test_one_process_alone_passes_nothing_on() -> None:
    total, tensors, parts = torch.ones(2), {"a": torch.ones(2)}, [(torch.ones(2),)]
    ALONE.add_up([total], 0)
    assert torch.equal(total, torch.ones(2))
    assert ALONE.pool(tensors) is tensors
    assert ALONE.collect(parts, 0) is parts
    assert ALONE.exchange("word") == ["word"]
    assert ALONE.place("cuda:1") == "cuda:1"
    assert ALONE.is_first


def test_without_a_launcher_a_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with joined_ranks() as ranks:
        assert ranks is ALONE
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with joined_ranks() as ranks:
        assert ranks is ALONE


def test_a_rank_that_finds_no_other_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(module, "JOINING", timedelta(seconds=1))
    with pytest.raises(RanksError, match="rank 1 of 2 doesn't find the others"), joined_ranks():
        pass


def test_ranks_add_up_collect_and_pool_what_each_has(tmp_path: Path) -> None:
    def action(ranks: Ranks) -> object:
        number = ranks.number
        total = torch.full((2, 2), 10.0**number)
        ranks.add_up([total], 2)
        part = (torch.full((number, 3), number, dtype=torch.bfloat16).T, torch.tensor(float(number)))
        collected = ranks.collect([part] * number, 1)
        pooled = ranks.pool({f"of {number}": torch.tensor([number, -0.5], dtype=torch.float16)})
        return ranks.exchange(number), total, collected, pooled, ranks.of_first(lambda: number)

    results = run_ranks(3, action, tmp_path)
    assert [result[0] for result in results] == [[0, 1, 2]] * 3
    assert torch.equal(results[2][1], torch.full((2, 2), 111.0))
    assert [len(result[2]) for result in results] == [0, 3, 0]
    assert [value.tolist() for value in results[1][2][2]] == [[[2, 2]] * 3, 2]
    assert results[1][2][2][0].dtype == torch.bfloat16
    for result in results:
        assert {name: value.tolist() for name, value in result[3].items()} == {f"of {n}": [n, -0.5] for n in range(3)}
        assert result[4] == 0


@pytest.mark.parametrize("where", ["before they meet", "while they wait for its sum"])
def test_an_error_of_one_rank_ends_all_with_the_same_words(where: str, tmp_path: Path) -> None:
    def action(ranks: Ranks) -> None:
        with ranks.together():
            if where != "before they meet":
                ranks.exchange(None)
            if ranks.number == 1:
                raise DataError("rows.jsonl: row 7 is empty")
            ranks.add_up([torch.ones(2)], 0)

    results = run_ranks(3, action, tmp_path)
    assert [(type(result), str(result)) for result in results] == [(DataError, "rows.jsonl: row 7 is empty")] * 3


def test_an_error_that_is_no_users_says_on_which_rank_it_was(tmp_path: Path) -> None:
    def action(ranks: Ranks) -> None:
        with ranks.together():
            if ranks.number == 0:
                raise ZeroDivisionError("no")
            ranks.exchange(None)

    first, other = run_ranks(2, action, tmp_path)
    assert isinstance(first, ZeroDivisionError)
    assert (type(other), str(other)) == (RanksError, "rank 0: ZeroDivisionError: no")


def test_a_rank_that_is_killed_ends_the_others_with_an_error(tmp_path: Path) -> None:
    def action(ranks: Ranks) -> None:
        with ranks.together():
            ranks.exchange(None)
            if ranks.number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            ranks.add_up([torch.ones(2)], 0)

    results = run_ranks(3, action, tmp_path)
    assert results[1] == -signal.SIGKILL
    for number in (0, 2):
        assert isinstance(results[number], RanksError)
        assert f"rank {number} of 3 has lost another one" in str(results[number])
        assert "the same command goes on" in str(results[number])


def test_a_rank_that_the_launcher_stops_ends_with_an_error(tmp_path: Path) -> None:
    def action(ranks: Ranks) -> None:
        with ranks.together():
            ranks.exchange(None)
            os.kill(os.getpid(), signal.SIGTERM)

    for number, result in enumerate(run_ranks(2, action, tmp_path)):
        assert isinstance(result, RanksError)
        assert f"rank {number} was stopped by the launcher" in str(result)


def test_ranks_that_cant_compute_beside_each_other_are_refused(tmp_path: Path) -> None:
    def action(ranks: Ranks) -> list[str]:
        messages = [ranks.place("cpu")]
        for device in ("mps", "cuda:1", "cuda"):
            try:
                messages.append(ranks.place(device))
            except RanksError as error:
                messages.append(str(error))
        return messages

    for cpu, *others in run_ranks(2, action, tmp_path):
        assert cpu == "cpu"
        assert others[0] == "2 ranks can't share the device mps; give --device cpu, or cuda for a GPU each."
        assert "can't share the device cuda:1" in others[1]
        if torch.cuda.device_count() < 2:
            assert f"2 ranks are on this machine, which has {torch.cuda.device_count()} GPUs" in others[2]
