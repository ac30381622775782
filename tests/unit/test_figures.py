from __future__ import annotations

from xml.etree import ElementTree

import pytest
from records import contents

from featcal_hf.figure_style import NARROW, WIDE, Look
from featcal_hf.figures import (
    cosine_figure,
    drift_figure,
    feature_figure,
    histogram_figure,
    metric_figure,
    output_figure,
    png,
    split_figure,
    svg,
)
from featcal_hf.figures_compare import drift_by_run, last_by_run
from featcal_hf.figures_solve import cost_figure, gram_figure, step_figure
from featcal_hf.recorded import EvalRecord, RunRecord, run_record

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
    words = {
        "".join(element.itertext()).strip() for element in ElementTree.fromstring(first).iter() if "text" in element.tag
    }
    assert {"math", "merged", "calibrated"} <= words


def test_a_png_is_one() -> None:
    assert png(_drawn()).startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def run() -> RunRecord:
    return run_record(contents(), "x")


def marks(axis, colour: str) -> list[tuple[float, float]]:
    """The points that are drawn as marks of a colour."""
    return [
        (float(line.get_xdata()[0]), float(line.get_ydata()[0]))
        for line in axis.lines
        if line.get_color() == colour and line.get_marker() not in ("", "None", None) and len(line.get_xdata()) == 1
    ]


def test_the_split_has_what_a_block_adds_dotted_and_what_it_is_handed_solid(run: RunRecord) -> None:
    figure = split_figure(run)

    assert figure is not None
    lines = {(line.get_color(), line.get_linestyle()): list(line.get_ydata()) for line in figure.axes[1].lines}
    assert lines[WIDE.palette.merged, ":"] == pytest.approx([0.04, 0.08, 0.12, 0.16])
    assert lines[WIDE.palette.merged, "-"] == pytest.approx([0.08, 0.16, 0.24, 0.32])
    assert lines[WIDE.palette.calibrated, ":"] == pytest.approx([0.01, 0.02, 0.03, 0.04])
    assert lines[WIDE.palette.calibrated, "-"] == pytest.approx([0.02, 0.04, 0.06, 0.08])


def test_a_record_without_relative_parts_has_no_split_to_draw() -> None:
    old = contents()
    for block in old["blocks"]:
        for change in block["drift"].values():
            for part in change.values():
                del part["relative_mismatch"]

    assert split_figure(run_record(old, "x")) is None


def test_cosines_are_a_mark_for_each_task_with_a_standard_deviation_each_way(run: RunRecord) -> None:
    figure = cosine_figure(run)

    assert figure is not None
    (axis,) = figure.axes
    assert marks(axis, WIDE.palette.merged) == [(0.8, 0.0), (0.8, 1.0)]
    assert marks(axis, WIDE.palette.calibrated) == [(0.95, 0.0), (0.95, 1.0)]
    spreads = [line.get_xdata() for line in axis.lines if line.get_alpha() is not None]
    assert list(spreads[0]) == pytest.approx([0.76, 0.84])
    assert list(spreads[1]) == pytest.approx([0.94, 0.96])
    low, high = axis.get_xlim()
    assert low < 0.76
    assert high > 1


def test_the_histogram_counts_every_row_of_both_models_in_the_same_bins(run: RunRecord) -> None:
    figure = histogram_figure(run)

    assert figure is not None
    bars = [patch for patch in figure.axes[0].patches if patch.get_fill() and hasattr(patch, "get_height")]
    assert sum(bar.get_height() for bar in bars) == 16
    assert len({round(bar.get_width(), 9) for bar in bars}) == 1


def test_the_feature_view_has_each_models_points_and_the_experts_variances(run: RunRecord) -> None:
    figure = feature_figure(run)

    assert figure is not None
    merged, expert, calibrated = figure.axes[0].collections
    assert expert.get_offsets().tolist()[4] == [1, 4]
    assert merged.get_offsets().tolist()[4] == [5, 4]
    assert calibrated.get_offsets().tolist()[4] == [2, 4]
    assert figure.axes[0].get_xlabel() == "first axis (50% of variance)"
    assert figure.axes[0].get_ylabel() == "second (20%)"


def test_output_drift_has_a_panel_for_each_measure(run: RunRecord) -> None:
    figure = output_figure(run)

    assert figure is not None
    kl, l2, agreement = figure.axes
    assert marks(kl, WIDE.palette.merged)[0] == (0.4, 0.0)
    assert marks(l2, WIDE.palette.calibrated)[0] == (3.0, 0.0)
    assert marks(agreement, WIDE.palette.calibrated)[1] == (0.9, 1.0)
    assert kl.get_xlim()[0] == l2.get_xlim()[0] == 0


def test_metrics_show_expert_merged_and_calibrated_and_distances_are_left_out() -> None:
    lines = [
        {"metric": name, "higher_is_better": False, "expert": 3.0, "merged": 9.0, "calibrated": 4.5, "recovered": 0.75}
        for name in ("loss per token", "perplexity", "KL from expert")
    ]
    evaluation = EvalRecord.model_validate({"results": [{"task": "math", **line} for line in lines]})
    figure = metric_figure(evaluation)

    assert figure is not None
    (axis,) = figure.axes
    assert axis.get_title(loc="left") == "perplexity"
    assert marks(axis, WIDE.palette.expert) == [(3.0, 0.0)]
    assert marks(axis, WIDE.palette.merged) == [(9.0, 0.0)]
    assert marks(axis, WIDE.palette.calibrated) == [(4.5, 0.0)]
    assert "math · 75% of the gap closed" in [text.get_text() for text in axis.texts]
    assert metric_figure(EvalRecord(results=[])) is None


@pytest.mark.parametrize("look", [WIDE, NARROW])
def test_heat_maps_have_a_cell_for_each_module_and_block_the_stronger_the_larger(run: RunRecord, look: Look) -> None:
    figure = step_figure(run, look)

    (cells,) = figure.axes[0].collections
    strengths = cells.get_facecolor()[:, 3]
    assert len(strengths) == 8
    assert sorted(set(strengths.round(3))) == pytest.approx([0.06 + 0.94 / 2, 1.0])
    words = [text.get_text() for text in figure.axes[0].texts]
    assert words.count("5") == words.count("10") == 4


def test_grams_are_shown_as_powers_of_ten_and_shares(run: RunRecord) -> None:
    figure = gram_figure(run)

    assert figure is not None
    condition, dominance = figure.axes
    assert {text.get_text() for text in condition.texts} >= {"3.0", "4.0"}
    assert {text.get_text() for text in dominance.texts} >= {"30", "50"}


def test_time_adds_up_to_the_whole_run_and_memory_is_the_most_of_any_block(run: RunRecord) -> None:
    figure = cost_figure(run)

    assert figure is not None
    time, memory = figure.axes
    assert [bar.get_width() for bar in time.patches] == pytest.approx([0.4, 4.0, 6.0, 2.1])
    assert sum(bar.get_width() for bar in time.patches) == pytest.approx(run.seconds)
    assert [bar.get_width() for bar in memory.patches] == [500e6, 700e6 + 3, 900e6]
    assert "peak 1.0 GB" in [text.get_text() for text in memory.texts]


def test_runs_have_a_mark_and_colour_each_and_merged_is_grey() -> None:
    runs = {name: run_record(contents(after=after), "x") for name, after in (("one", 0.1), ("_two", 0.2))}

    last, blocks = last_by_run(runs), drift_by_run(runs)

    assert last is not None
    assert marks(last.axes[0], WIDE.palette.calibrated) == [(0.1, 0.0), (0.1, 1.0)]
    assert marks(last.axes[0], WIDE.palette.merged) == [(0.2, 0.0), (0.2, 1.0)]
    assert [text.get_text() for text in last.legends[0].get_texts()] == ["merged", "one", " _two"]
    assert blocks is not None
    grey, first, second = blocks.axes[0].lines
    assert list(grey.get_ydata()) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert list(second.get_ydata()) == pytest.approx([0.05, 0.1, 0.15, 0.2])
    assert first.get_color() != second.get_color()


def test_runs_without_a_task_in_common_have_nothing_to_compare() -> None:
    runs = {name: run_record(contents(tasks=[name]), "x") for name in ("one", "two")}

    assert last_by_run(runs) is None
    assert drift_by_run(runs) is None


@pytest.mark.filterwarnings("error")
def test_no_drift_at_all_and_names_with_dollars_are_drawn_as_they_are() -> None:
    record = run_record(contents(tasks=["$\\nothing$", "b"], paths=["l.0"], before=0.0, after=0.0), "x")
    drawn = [
        draw(record)
        for draw in (drift_figure, split_figure, cosine_figure, histogram_figure, feature_figure, output_figure)
    ]
    drawn += [last_by_run({"one": record, "two": record}), drift_by_run({"$1": record, "2$": record})]

    for figure in drawn:
        assert figure is not None
        assert "$\\nothing$" in svg(figure)


def _drawn():
    figure = drift_figure(run_record(contents(), "x"))
    assert figure is not None
    return figure
