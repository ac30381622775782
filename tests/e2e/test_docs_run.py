"""The pages' commands and snippets, run in order on a tiny merge."""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pages import PAGES, ROOT, read_page
from tiny_merge import Merge, Outcome, run_mergekit
from transformers import LlamaForCausalLM

Featcal = Callable[..., Outcome]
NOT_RUN = {"make", "pip", "git", "python", ".venv/bin/pre-commit"}
"""Programs that install, train for minutes or are no part of the product; that they exist is tested elsewhere."""
LONG = {"demo", "push"}

with_code = pytest.mark.parametrize(
    "path",
    [path for path in PAGES if {language for language, _ in read_page(path).blocks} & {"console", "python"}],
    ids=lambda path: str(path.relative_to(ROOT)),
)


@pytest.fixture
def place(merge: Merge, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which recipe.yml and ./merged are there, and their data has enough rows to evaluate on."""
    monkeypatch.chdir(merge.root)
    shutil.copytree(merge.merged, merge.root / "fresh")
    return merge.root


def run(words: list[str], place: Path, featcal: Featcal) -> None:
    """One command line; where it calibrates in place, on a fresh merge."""
    if words[0] == "mergekit-yaml" or (words[0] == "featcal-hf" and words[1] == "merge"):
        shutil.rmtree(place / words[-1], ignore_errors=True)
    if words[0] == "mergekit-yaml":
        run_mergekit(Path(words[1]), Path(words[2]))
    else:
        if words[1] in ("calibrate", "check", "recipe.yml"):
            shutil.rmtree(place / "merged")
            shutil.copytree(place / "fresh", place / "merged")
            shutil.rmtree(place / "calibrated", ignore_errors=True)
        outcome = featcal(*words[1:])
        assert outcome.code == 0, (words, outcome)


@with_code
def test_the_commands_of_a_page_run_in_their_order(path: Path, place: Path, featcal: Featcal) -> None:
    for words in read_page(path).commands():
        if words[0] not in NOT_RUN and not LONG & set(words[1:2]):
            run(words, place, featcal)


@with_code
def test_the_python_of_a_page_runs_in_its_order(path: Path, place: Path) -> None:
    experts = [LlamaForCausalLM.from_pretrained(place / name) for name in ("a", "b")]
    tokens = torch.randint(2, 20, (4, 8), generator=torch.Generator().manual_seed(0))
    names = {
        "merged": LlamaForCausalLM.from_pretrained(place / "merged"),
        "base": LlamaForCausalLM.from_pretrained(place / "base"),
        "math_model": experts[0],
        "code_model": experts[1],
        "ids": tokens,
        "mask": torch.ones_like(tokens),
    }
    with contextlib.redirect_stdout(io.StringIO()):
        for code in read_page(path).code("python"):
            exec(compile(code, str(path), "exec"), names)
