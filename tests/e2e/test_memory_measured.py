"""The memory that `check` predicts is what a run takes, for six shapes of models: each run is a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from memory_shapes import SHAPES, build

MEASURED = """
import json, sys
from featcal_hf import cli
from featcal_hf.preparation import plan_of
from featcal_hf.run import calibrate
from featcal_hf.stages import peak_bytes

imports, predicted = peak_bytes(), []
calibrate(sys.argv[1], sys.argv[2], on_prepared=lambda prepared: predicted.append(plan_of(prepared).memory.peak))
print(json.dumps({"imports": imports, "predicted": predicted[0], "measured": peak_bytes()}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's own count of a process's peak")
@pytest.mark.parametrize(("experts", "long"), [(2, False), (4, True)], ids=["two-experts-short", "four-experts-long"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_peak_that_is_predicted_is_measured_within_a_quarter(
    name: str, experts: int, long: bool, tmp_path: Path
) -> None:
    recipe, merged = build(tmp_path, name, experts, SHAPES[name].lengths[long], rows=10)
    command = [sys.executable, "-c", MEASURED, str(recipe), str(merged)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    peaks = json.loads(run.stdout.splitlines()[-1])
    beyond_imports = {label: peaks[label] - peaks["imports"] for label in ("predicted", "measured")}
    print(name, experts, long, peaks, beyond_imports)
    assert peaks["predicted"] == pytest.approx(peaks["measured"], rel=0.25), peaks
    assert beyond_imports["predicted"] == pytest.approx(beyond_imports["measured"], rel=0.25), peaks
