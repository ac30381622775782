"""What a person sees during a run."""

from __future__ import annotations

import io

from rich.console import Console

from featcal_hf.calibrate import Step
from featcal_hf.progress import step_progress


def steps(blocks: int, tasks: list[str]) -> list[Step]:
    doing = [*tasks, "solve"]
    return [
        Step(f"layers.{block}", block, blocks, name, part, len(doing))
        for block in range(blocks)
        for part, name in enumerate(doing)
    ]


def shown(terminal: bool, quiet: bool = False) -> str:
    output = io.StringIO()
    with step_progress(Console(file=output, force_terminal=terminal, width=100), quiet) as on_step:
        for step in steps(3, ["math", "code"]):
            on_step(step)
    return output.getvalue()


def test_without_a_terminal_each_block_is_one_plain_line_with_the_time_left() -> None:
    lines = shown(terminal=False).splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "block 1/3 layers.0",
        "block 2/3 layers.1",
        "block 3/3 layers.2",
    ]
    assert "2 tasks" in lines[0]
    assert "left" not in lines[0]
    assert all("about 0 s left" in line for line in lines[1:])
    assert "\x1b" not in "".join(lines)


def test_on_a_terminal_a_bar_counts_blocks_times_tasks_and_solves() -> None:
    output = shown(terminal=True)
    assert "layers.2 solve" in output
    assert "8/9" in output


def test_quiet_shows_nothing() -> None:
    assert shown(terminal=True, quiet=True) == ""
