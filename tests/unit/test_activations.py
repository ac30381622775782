"""What parked forwards hold: in memory up to a limit, the rest in files, and the model doesn't notice."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from featcal_hf.activations import Activations, activations, default_limit
from featcal_hf.errors import CheckpointError
from featcal_hf.forward import ParkedForward, parking

CPU = torch.device("cpu")
WIDTH = 64
TENSOR = 4 * 100 * WIDTH


def batch(seed: int) -> Tensor:
    return torch.randn(100, WIDTH, generator=torch.Generator().manual_seed(seed))


class Block(nn.Module):
    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return hidden


class Stack(nn.Module):
    """Two blocks after an embedding whose output stays in a local variable, and is read again at the end."""

    base_model_prefix = ""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        embedded = x + shift
        mask = x > 0
        hidden = embedded.T.contiguous().T
        for layer in self.layers:
            hidden = 2 * layer(hidden, mask)
        return hidden + embedded


@pytest.fixture
def parked(tmp_path: Path) -> Any:
    """Gives forwards of the stack that are parked at its first block."""
    model = Stack()

    def start(seed: int) -> ParkedForward:
        run = ParkedForward(model, {"x": batch(seed)})
        run.start()
        return run

    with parking(model):  # type: ignore[arg-type]
        yield start


Start = Callable[[int], ParkedForward]


def files(folder: Path) -> list[int]:
    return sorted(file.stat().st_size for file in folder.iterdir()) if folder.is_dir() else []


def finish(held: Activations, run: ParkedForward) -> Tensor:
    for _ in range(2):
        run.resume(held.call(run, CPU).hidden_states)
        held.keep(run)
    result: Tensor = run.result
    return result


def test_forwards_end_with_the_same_bits_whatever_the_limit(parked: Start, tmp_path: Path) -> None:
    results = []
    for limit in (10 * TENSOR, TENSOR, 0):
        with activations(limit, tmp_path / str(limit)) as held:
            run = parked(0)
            held.keep(run)
            results.append(finish(held, run))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_past_the_limit_what_no_block_waits_for_goes_to_a_file_first(parked: Start, tmp_path: Path) -> None:
    with activations(2 * TENSOR, tmp_path / "files") as held:
        run = parked(0)
        held.keep(run)
        assert files(tmp_path / "files") == [TENSOR]  # the embedding's output; hidden states and mask stay
        assert held.bytes_in_memory == TENSOR + TENSOR // 4
    assert not (tmp_path / "files").exists()


def test_what_stays_in_memory_is_never_more_than_the_limit(parked: Start, tmp_path: Path) -> None:
    with activations(3 * TENSOR, tmp_path / "files") as held:
        runs = [parked(seed) for seed in range(8)]
        for run in runs:
            held.keep(run)
            assert held.bytes_in_memory <= 3 * TENSOR
        assert len(files(tmp_path / "files")) >= 13
        for run in runs:
            finish(held, run)
        del runs, run
        assert held.bytes_in_memory == 0
        assert files(tmp_path / "files") == []


def test_a_tensor_in_a_file_keeps_its_identity_strides_and_values(parked: Start, tmp_path: Path) -> None:
    with activations(0, tmp_path / "files") as held:
        run = parked(0)
        hidden = run.waiting().hidden_states
        values, strides = hidden.clone(), hidden.stride()
        assert strides == (1, 100)
        held.keep(run)
        assert run.waiting().hidden_states is hidden
        for seen in (hidden, held.call(run, CPU).hidden_states):
            assert torch.equal(seen, values)
            assert seen.stride() == strides


def test_a_tensor_that_the_model_changes_after_it_went_to_a_file_is_read_as_changed(
    parked: Start, tmp_path: Path
) -> None:
    with activations(0, tmp_path / "files") as held:
        run = parked(0)
        held.keep(run)
        run.waiting().hidden_states.add_(1)
        changed = run.waiting().hidden_states.clone()
        assert torch.equal(held.call(run, CPU).hidden_states, changed)
        held.keep(run)
        assert torch.equal(held.call(run, CPU).hidden_states, changed)


def test_equal_masks_are_one_tensor_and_unequal_ones_are_not(parked: Start, tmp_path: Path) -> None:
    with activations(100 * TENSOR, tmp_path / "files") as held:
        one, same, other = parked(0), parked(0), parked(1)
        for run in (one, same, other):
            held.keep(run)
        masks = [run.waiting().other_tensors[0] for run in (one, same, other)]
        assert masks[0].data_ptr() == masks[1].data_ptr() != masks[2].data_ptr()
        assert held.bytes_in_memory == 6 * TENSOR + 2 * (TENSOR // 4)


def test_a_batch_stays_its_owners(parked: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = batch(0)
    address = mine.data_ptr()
    monkeypatch.setattr("test_activations.batch", lambda seed: mine)
    with activations(0, tmp_path / "files") as held:
        held.keep(parked(0))
        assert mine.data_ptr() == address
    assert torch.equal(mine, torch.randn(100, WIDTH, generator=torch.Generator().manual_seed(0)))


def test_files_of_a_run_that_was_killed_are_removed(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "0").write_text("left")
    with activations(0, tmp_path / "files"):
        assert not (tmp_path / "files").exists()


def test_a_full_disk_is_named_with_what_to_do(parked: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with activations(0, tmp_path / "files") as held:
        run = parked(0)
        monkeypatch.setattr(Path, "open", full)
        with pytest.raises(CheckpointError, match=r"No space left on device.*--activation-memory"):
            held.keep(run)


def test_a_file_that_was_cut_is_an_error_not_a_wrong_result(parked: Start, tmp_path: Path) -> None:
    with activations(0, tmp_path / "files") as held:
        run = parked(0)
        held.keep(run)
        for file in (tmp_path / "files").iterdir():
            file.write_bytes(file.read_bytes()[:-4])
        with pytest.raises(CheckpointError, match=f"holds {TENSOR - 4} bytes, expected {TENSOR}"):
            held.call(run, CPU)


def test_the_default_is_half_of_what_is_free_and_heeds_a_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import featcal_hf.activations as module

    monkeypatch.setattr(module, "CONTROL_GROUP", tmp_path)
    machine = default_limit()
    assert machine > 10_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert default_limit() > 10_000_000
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("2000000\n")
    (tmp_path / "memory.stat").write_text("anon 1000000\ninactive_file 500000\n")
    assert default_limit() == 1_750_000
