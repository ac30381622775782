"""The same recipe, seed and batch size give the same bytes, and the report names what they depend on."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from test_resume import result
from tiny_merge import Merge

from featcal_hf import calibrate


@pytest.mark.slow
def test_two_processes_write_the_same_bytes_but_for_times(merge: Merge) -> None:
    results = []
    for number in range(2):
        output = merge.root / f"run-{number}" / "calibrated"
        command = [sys.executable, "-m", "featcal_hf", str(merge.recipe), str(merge.merged), "--output", str(output)]
        subprocess.run([*command, "--quiet"], check=True)
        results.append(result(output))
    assert results[0] == results[1]


def test_the_report_names_all_that_the_bytes_depend_on(merge: Merge) -> None:
    merge.edit_recipe("holdout: 4", "holdout: 4\n  batch_size: 5")
    calibrate(merge.recipe, merge.merged, random_seed=7)
    report: dict[str, Any] = json.loads((merge.merged / "featcal.json").read_text())
    assert report["threads"] == torch.get_num_threads()
    assert report["device"] == "cpu"
    assert report["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert isinstance(report["bfloat16_units"], bool)
    assert report["cpu"]
    assert {"featcal_hf", "torch", "transformers", "peft", "python"} <= set(report["versions"])
    assert report["random_seed"] == 7
    assert [task["batch_size"] for task in report["tasks"].values()] == [5, 5]
    assert len({task["inputs_sha256"] for task in report["tasks"].values()}) == 2
    assert report["recipe"] == merge.recipe.read_text()
