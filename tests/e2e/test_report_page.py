"""The report of a real calibration in a real browser."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from PIL import Image
from tiny_merge import Merge, Outcome, copy_merge

from featcal_hf import calibrate, report

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium to look at the page with; install it: apt-get install chromium"
)
FIGURES = ["drift", "split", "outputs", "metrics", "features", "cosine", "cosines", "steps", "grams", "cost"]
METRIC = {"metric": "perplexity", "higher_is_better": False, "expert": 4.0, "merged": 9.0, "calibrated": 5.0}
OVERFLOWING = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
SEEN = """[...document.querySelectorAll('figure')].map(figure => {
  const shown = [...figure.querySelectorAll('svg')].filter(svg => svg.getBoundingClientRect().height > 60)
  return [figure.id, shown.length, Math.max(...shown.map(svg => svg.getBoundingClientRect().right)),
          shown.flatMap(svg => [...svg.querySelectorAll('text')]).length > 2]
})"""
SMALLEST_LETTERS = """Math.min(...[...document.querySelectorAll('svg text')]
  .filter(text => text.getBoundingClientRect().height > 0)
  .map(text => [text.getScreenCTM(), parseFloat(getComputedStyle(text).fontSize)])
  .map(([shown, size]) => size * Math.hypot(shown.a, shown.b)))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def page(pristine: Merge, tmp_path_factory: pytest.TempPathFactory) -> Path:
    merge = copy_merge(pristine, tmp_path_factory.mktemp("reported"))
    calibrate(merge.recipe, merge.merged)
    folder = merge.merged
    lines = [{"task": task, "recovered": 0.8, **METRIC} for task in ("a", "b")]
    (folder / "featcal_eval.json").write_text(json.dumps({"results": lines, "lm_eval": []}))
    return report(folder)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1200, 390])
def test_every_figure_is_seen_nothing_is_fetched_and_nothing_complained_of(
    browser: Browser, page: Path, width: int, dark: bool
) -> None:
    visit = browser.open(page, width, dark=dark)

    assert visit.complaints == []
    assert [address for address in visit.requests if not address.startswith("data:")] == []
    assert browser.evaluate(OVERFLOWING) <= 0
    seen = browser.evaluate(SEEN)
    assert [name for name, *_ in seen] == FIGURES
    for name, count, right, has_words in seen:
        assert (count, has_words) == (1, True), name  # the wide one or the narrow one
        assert right <= width, name


def test_letters_in_figures_are_large_enough_on_a_phone(browser: Browser, page: Path) -> None:
    browser.open(page, 390)

    assert browser.evaluate(SMALLEST_LETTERS) >= 9  # pixels of the screen


def test_paper_is_light_or_dark_as_the_reader_has_it(browser: Browser, page: Path) -> None:
    shades = []
    for dark in (False, True):
        browser.open(page, 800, dark=dark)
        picture = Image.open(BytesIO(browser.screenshot())).convert("L")
        assert picture.height > 2000
        histogram = picture.histogram()
        shades.append(sum(shade * count for shade, count in enumerate(histogram)) / sum(histogram))

    light, dark_ = shades
    assert light > 215
    assert dark_ < 50


def test_compared_runs_open_on_a_click(
    browser: Browser, page: Path, tmp_path: Path, featcal: Callable[..., Outcome]
) -> None:
    model = str(page.parents[1])
    outcome = featcal("report", model, model, "--output", tmp_path / "both")
    assert outcome.code == 0
    assert outcome.output == f"Wrote {tmp_path / 'both' / 'report.html'}"

    visit = browser.open(tmp_path / "both" / "report.html", 390)

    assert visit.complaints == []
    assert browser.evaluate(OVERFLOWING) <= 0
    visible = "document.getElementById('run-2-drift').checkVisibility()"
    assert browser.evaluate(visible) is False
    browser.evaluate("document.querySelectorAll('summary')[1].click()")
    assert browser.evaluate(visible) is True
    assert browser.evaluate(OVERFLOWING) <= 0
