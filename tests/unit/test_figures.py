from __future__ import annotations

from xml.etree import ElementTree

import pytest
from records import contents

from featcal_hf.figure_style import NARROW, WIDE, Look
from featcal_hf.figures import drift_figure, png, svg
from featcal_hf.recorded import run_record

ENCODER_DECODER = [f"{part}.block.{number}" for part in ("encoder", "decoder") for number in range(3)]


def test_the_drift_figure_has_a_panel_a_task_with_merged_above_calibrated() -> None:
    figure = drift_figure(run_record(contents(), "x"))

    assert figure is not None
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["math", "code"]
    merged, calibrated = figure.axes[0].lines
    assert list(merged.get_ydata()) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert list(calibrated.get_ydata()) == pytest.approx([0.025, 0.05, 0.075, 0.1])
    assert merged.get_color() == WIDE.palette.merged
    assert calibrated.get_color() == WIDE.palette.calibrated
    assert figure.axes[0].texts[0].get_text() == "last block: 40% → 10%"


def test_drift_is_drawn_from_zero_and_on_one_scale_for_all_tasks() -> None:
    figure = drift_figure(run_record(contents(), "x"))

    assert figure is not None
    assert [axis.get_ylim() for axis in figure.axes] == [(0, pytest.approx(0.448))] * 2


def test_encoder_and_decoder_are_two_lines_that_do_not_meet() -> None:
    figure = drift_figure(run_record(contents(ENCODER_DECODER, ["sst2"]), "x"))

    assert figure is not None
    lines = [line for line in figure.axes[0].lines if line.get_color() == WIDE.palette.merged]
    assert [list(line.get_xdata()) for line in lines] == [[0, 1, 2], [3, 4, 5]]
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["encoder", "decoder"]


@pytest.mark.parametrize("look", [WIDE, NARROW])
@pytest.mark.parametrize(("blocks", "tasks"), [(1, 1), (80, 20)])
def test_one_block_and_task_are_drawn_as_well_as_80_and_20(look: Look, blocks: int, tasks: int) -> None:
    paths = [f"layers.{number}" for number in range(blocks)]
    figure = drift_figure(run_record(contents(paths, [f"task {number}" for number in range(tasks)]), "x"), look)

    assert figure is not None
    assert len(figure.axes) == tasks
    assert figure.get_size_inches()[0] == look.width


def test_without_held_out_rows_there_is_no_drift_to_draw() -> None:
    assert drift_figure(run_record(contents(held_out=False), "x")) is None


def test_an_svg_is_the_same_each_time_and_holds_its_words_as_text() -> None:
    first, second = (svg(_drawn()) for _ in range(2))

    assert first == second
    words = {"".join(element.itertext()) for element in ElementTree.fromstring(first).iter() if "text" in element.tag}
    assert {"math", "merged", "calibrated"} <= words


def test_a_png_is_one() -> None:
    assert png(_drawn()).startswith(b"\x89PNG")


def _drawn():
    figure = drift_figure(run_record(contents(), "x"))
    assert figure is not None
    return figure
