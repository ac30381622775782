"""The pages' commands and snippets, run in order on a tiny merge."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pages import DOCS, PAGES, ROOT, command_lines, read_page
from tiny_merge import Merge, Outcome, run_mergekit
from transformers import LlamaForCausalLM

Featcal = Callable[..., Outcome]
NOT_RUN = {"make", "pip", "python", "demo", "push", "torchrun", "accelerate"}
"""What installs, trains for minutes, or needs the Hub or several processes; that it exists is tested elsewhere."""

with_code = pytest.mark.parametrize(
    "path",
    [path for path in PAGES if {language for language, _ in read_page(path).blocks} & {"console", "python"}],
    ids=lambda path: str(path.relative_to(ROOT)),
)


@pytest.fixture
def place(merge: Merge, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: recipe.yml and ./merged are there, as the pages name them."""
    monkeypatch.chdir(merge.root)
    shutil.copytree(merge.merged, merge.root / "fresh")
    return merge.root


def start_afresh(place: Path, *, output: bool) -> None:
    """A merged folder that isn't calibrated yet, and the way free for what is written."""
    shutil.rmtree(place / "merged", ignore_errors=True)
    shutil.copytree(place / "fresh", place / "merged")
    if output:
        shutil.rmtree(place / "calibrated", ignore_errors=True)


def run_line(words: list[str], place: Path, featcal: Featcal) -> None:
    name = words[1] if words[0] == "featcal-hf" else words[0]
    if name in NOT_RUN:
        return
    if name in ("mergekit-yaml", "merge"):
        shutil.rmtree(place / "merged")
    elif name in ("calibrate", "check", "recipe.yml"):
        start_afresh(place, output="--output" in words)
    if name == "mergekit-yaml":
        run_mergekit(Path(words[1]), Path(words[2]))
    else:
        outcome = featcal(*words[1:])
        assert outcome.code == 0, (words, outcome)


def names_of_snippets(place: Path) -> dict[str, object]:
    """What the snippets for models in memory say they begin with."""
    tokens = torch.randint(2, 20, (4, 8), generator=torch.Generator().manual_seed(0))
    folders = {"merged": "fresh", "base": "base", "math_model": "a", "code_model": "b"}
    models = {name: LlamaForCausalLM.from_pretrained(place / folder) for name, folder in folders.items()}
    return models | {"ids": tokens, "mask": torch.ones_like(tokens)}


@with_code
def test_the_code_of_a_page_runs_in_its_order(path: Path, place: Path, featcal: Featcal) -> None:
    names = names_of_snippets(place)
    for language, code in read_page(path).blocks:
        if language == "console":
            for words in command_lines(code):
                run_line(words, place, featcal)
        elif language == "python":
            if "featcal_hf.calibrate(" in code:
                start_afresh(place, output=True)
            exec(compile(code, str(path), "exec"), names)


def run_notebook(short: dict[str, str], capsys: pytest.CaptureFixture[str]) -> list[int]:
    """Run every cell, with some texts replaced; the percentages of the gap that it prints."""
    cells = json.loads((DOCS / "calibrate.ipynb").read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for long, brief in short.items():
        assert long in code
        code = code.replace(long, brief)
    exec(compile(code, "calibrate.ipynb", "exec"), {})
    return [int(share) for share in re.findall(r"gap recovered (-?\d+)%", capsys.readouterr().out)]


def test_the_notebook_runs_with_hardly_any_training(capsys: pytest.CaptureFixture[str]) -> None:
    short = {
        "steps=250": "steps=2",
        "expert_steps=60": "expert_steps=2",
        "[:1500]": "[:200]",
        "(0.0, 0.3, 0.6)": "(0.3,)",
    }
    assert len(run_notebook(short, capsys)) == 3


@pytest.mark.slow
def test_the_notebook_recovers_some_of_every_tasks_gap(capsys: pytest.CaptureFixture[str]) -> None:
    shares = run_notebook({}, capsys)
    assert len(shares) == 3
    assert min(shares) > 0
