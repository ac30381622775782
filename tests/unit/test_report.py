from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from records import contents

from featcal_hf import CheckpointError, report
from featcal_hf.report import themed

METRIC = {"metric": "accuracy", "higher_is_better": True, "expert": 0.9, "merged": 0.5, "calibrated": 0.8}


def folder(place: Path, evaluation: dict[str, Any] | None = None, **settings: Any) -> Path:
    place.mkdir(parents=True)
    (place / "featcal.json").write_text(json.dumps(contents(**settings)))
    if evaluation is not None:
        (place / "featcal_eval.json").write_text(json.dumps(evaluation))
    return place


def evaluation(tasks: tuple[str, ...] = ("math", "code")) -> dict[str, Any]:
    return {"results": [{"task": task, "recovered": 0.75, **METRIC} for task in tasks], "lm_eval": []}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report that tests read and don't change."""
    return report(folder(tmp_path_factory.mktemp("models") / "merged", evaluation()))


def test_a_report_is_one_page_and_two_files_for_each_figure(page: Path) -> None:
    assert page.parts[-3:] == ("merged", "featcal_report", "report.html")
    names = {"drift", "split", "outputs", "metrics", "features", "cosine", "cosines", "steps", "grams", "cost"}
    assert {path.name for path in page.parent.iterdir()} == {
        "report.html",
        *(f"{name}.{kind}" for name in names for kind in ("png", "svg")),
    }
    text = page.read_text()
    assert set(re.findall(r'<figure class="card" id="([^"]+)">', text)) == names
    assert "75% less drift on average" in text
    assert '40%</span> → <span class="new">10%' in text


def test_a_page_asks_nothing_of_the_network_and_tells_no_local_path(page: Path) -> None:
    text = page.read_text()

    namespaces = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"https?://[^\s\"'<>]+", text)) <= namespaces
    assert not re.search(r"<(script|link(?! rel=\"icon\" href=\"data:)|img|iframe)", text)
    assert str(page.parents[2]) not in text


def test_colours_of_inline_figures_follow_the_pages_theme(page: Path) -> None:
    text = page.read_text()
    body = text[text.index("<main>") :]

    assert "var(--merged)" in body
    assert "#d55e00" not in body
    assert "prefers-color-scheme: dark" in text
    assert themed('<?xml version="1.0"?>\n<svg ><path style="fill: #0072b2"/></svg>') == (
        '<svg ><path style="fill: var(--calibrated)"/></svg>'
    )


def test_names_are_text_and_never_markup(tmp_path: Path) -> None:
    task = "<script>alert('x')</script> & $x_1$"
    page = report(folder(tmp_path / "merged", evaluation((task,)), tasks=[task]))

    text = page.read_text()

    assert "<script" not in text
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &amp; $x_1$" in text


def test_without_held_out_rows_and_evaluation_the_page_says_how_to_get_them(tmp_path: Path) -> None:
    page = report(folder(tmp_path / "merged", held_out=False), output=tmp_path / "a" / "b")

    assert page == tmp_path / "a" / "b" / "report.html"
    text = page.read_text()

    assert "No drift was measured, because no rows were held out." in text
    assert "featcal-hf eval RECIPE MODEL_DIR" in text
    assert set(re.findall(r'<figure class="card" id="([^"]+)">', text)) == {"steps", "grams", "cost"}
    assert not (page.parent / "drift.svg").exists()


def test_a_figure_that_an_earlier_report_had_and_this_one_lacks_is_gone(tmp_path: Path) -> None:
    made = folder(tmp_path / "merged", held_out=False)
    (made / "featcal_report").mkdir()
    (made / "featcal_report" / "metrics.png").write_bytes(b"old")
    (made / "featcal_report" / "steps.svg").write_text("old")

    page = report(made)

    assert not (page.parent / "metrics.png").exists()
    assert (page.parent / "steps.svg").read_text() != "old"


def test_runs_are_compared_on_one_page_with_names_that_tell_them_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [
        folder(tmp_path / "one" / "out", evaluation(), after=0.1),
        folder(tmp_path / "two" / "out", after=0.2),
        folder(tmp_path / "three" / "out", tasks=["code"], paths=["layers.0"]),
    ]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    page = report(*runs)

    assert page.resolve() == tmp_path / "here" / "featcal_report" / "report.html"
    text = page.read_text()
    assert "3 runs compared" in text
    assert re.findall(r'<h2 id="run-\d">([^<]+)</h2>', text) == ["one/out", "two/out", "three/out"]
    assert {path.name for path in page.parent.iterdir()} == {
        "report.html",
        "compared.png",
        "compared.svg",
        "compared-blocks.png",
        "compared-blocks.svg",
    }
    assert re.search(r"math, accuracy</td><td>0.900</td><td>0.500</td><td>0.800</td><td>–</td><td>–</td>", text)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(CheckpointError, match=r"file/x can't be written .*; name another folder with --output"):
        report(folder(tmp_path / "merged"), output=tmp_path / "file" / "x")


@pytest.mark.slow
def test_the_largest_model_and_an_encoder_decoder_are_drawn(tmp_path: Path) -> None:
    large = folder(tmp_path / "large", paths=[f"layers.{n}" for n in range(80)], tasks=[f"task {n}" for n in range(20)])
    parts = folder(tmp_path / "t5", paths=[f"{part}.block.{n}" for part in ("encoder", "decoder") for n in range(12)])

    for made in (large, parts):
        text = report(made).read_text()
        assert len(text) < 12e6
        assert text.count("<figure") == 9
