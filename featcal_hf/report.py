"""The report: `featcal.json` and `featcal_eval.json` in, a page and figures out, in a folder that anyone can open."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from rich.filesize import decimal

from featcal_hf import figures, figures_solve
from featcal_hf.advice import advice, missing, verdict
from featcal_hf.errors import CheckpointError
from featcal_hf.eval_report import EVALUATION
from featcal_hf.figure_style import DARK, LIGHT, NARROW, WIDE, Look
from featcal_hf.figure_words import brief, duration, percent
from featcal_hf.figures_compare import drift_by_run, last_by_run
from featcal_hf.recorded import EvalRecord, RunRecord, read_evaluation, read_run

REPORT_FOLDER = "featcal_report"
PAGE = "report.html"
_INLINE = re.compile(r"^.*?(?=<svg )|<metadata>.*?</metadata>", re.DOTALL)


@dataclass(frozen=True)
class Plate:
    """A figure with its words.

    Attributes:
        name: of its files.
        heading: above it.
        words: what to look for.
        draw: makes it; None where the record has no data for it.
    """

    name: str
    heading: str
    words: str
    draw: Callable[[Look], Figure | None]


@dataclass(frozen=True)
class Drawn:
    """A plate with its figure: wide, as SVG, and as SVG for a phone. No figure where the record has no data for it."""

    plate: Plate
    figure: Figure | None
    svg: str
    narrow_svg: str

    @property
    def wide(self) -> Markup:
        """For the page."""
        return themed(self.svg)

    @property
    def narrow(self) -> Markup:
        """For the page on a phone."""
        return themed(self.narrow_svg)


def report(model_dir: str | Path, *more: str | Path, output: str | Path | None = None) -> Path:
    """Write a page with figures about a calibration, or about several beside each other.

    Args:
        model_dir: a calibrated folder; its `featcal_eval.json` is read as well, if there is one.
        more: others to compare it with.
        output: the report's folder; None for `featcal_report` in the model's folder, or in the current one where there
            are several.

    Returns:
        The page, `report.html`: one file that needs no other. PNG and SVG files of the figures are beside it.

    Raises:
        CheckpointError: a folder isn't calibrated, its files are damaged, or the report can't be written.
    """
    folders = [Path(model_dir), *map(Path, more)]
    runs = {
        name: (read_run(folder), read_evaluation(folder / EVALUATION))
        for name, folder in zip(_names(folders), folders, strict=True)
    }
    if output is not None:
        target = Path(output)
    else:
        target = folders[0] / REPORT_FOLDER if len(folders) == 1 else Path(REPORT_FOLDER)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_written(target, error) from error
    together = _comparison({name: run for name, (run, _) in runs.items()}) if len(runs) > 1 else []
    sections = {name: [_draw(plate) for plate in _plates(run, found)] for name, (run, found) in runs.items()}
    compared = [_draw(plate) for plate in together]
    page = _page(runs, sections, compared)
    try:
        for drawn in compared or next(iter(sections.values())):
            _write_figure(target, drawn)
        (target / PAGE).write_text(page, encoding="utf-8")
    except OSError as error:
        raise _not_written(target, error) from error
    return target / PAGE


def _not_written(target: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{target} can't be written ({error}); name another folder with --output.")


def themed(svg: str) -> Markup:
    """An SVG in the light palette as part of a page, whose theme it follows: colours become the page's variables."""
    inline = _INLINE.sub("", svg)
    for name, colour in vars(LIGHT).items():
        inline = inline.replace(colour, f"var(--{name})")
    return Markup(inline)  # made here, from text that the SVG writer has escaped


def _page(
    runs: Mapping[str, tuple[RunRecord, EvalRecord | None]],
    sections: Mapping[str, list[Drawn]],
    together: list[Drawn],
) -> str:
    environment = Environment(
        loader=PackageLoader("featcal_hf"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "brief": brief, "duration": duration, "size": decimal}
    return environment.get_template("report.html.jinja").render(
        light=vars(LIGHT),
        dark=vars(DARK),
        compares=len(runs) > 1,
        together=[drawn for drawn in together if drawn.figure],
        metrics=_metrics([evaluation for _, evaluation in runs.values()]),
        runs=[
            {
                "name": name,
                "record": run,
                "verdict": verdict(run),
                "advice": advice(run, evaluation),
                "missing": missing(run, evaluation),
                "figures": [drawn for drawn in sections[name] if drawn.figure],
                "evaluation": evaluation,
                "means": _means(run),
                "kept": _kept(run),
            }
            for name, (run, evaluation) in runs.items()
        ],
    )


def _draw(plate: Plate) -> Drawn:
    wide, narrow = plate.draw(WIDE), plate.draw(NARROW)
    if wide is None or narrow is None:
        return Drawn(plate, None, "", "")
    return Drawn(plate, wide, figures.svg(wide), figures.svg(narrow))


def _write_figure(folder: Path, drawn: Drawn) -> None:
    """Write a figure's two files, or remove those of an earlier report that had it."""
    picture, drawing = (folder / f"{drawn.plate.name}.{kind}" for kind in ("png", "svg"))
    if drawn.figure is None:
        picture.unlink(missing_ok=True)
        drawing.unlink(missing_ok=True)
        return
    picture.write_bytes(figures.png(drawn.figure))
    drawing.write_text(drawn.svg, encoding="utf-8")


def _plates(run: RunRecord, evaluation: EvalRecord | None) -> list[Plate]:
    return [
        Plate(
            "drift",
            "Drift from the expert, block by block",
            "How far each block's output is from what the task's expert computes, relative to the expert's. Blue below "
            "orange means that calibration helped there; a blue line that climbs says that later blocks can't make up "
            "for what earlier ones pass on.",
            partial(figures.drift_figure, run),
        ),
        Plate(
            "split",
            "Where drift comes from",
            "Drift is the sum of what a block adds itself (dotted) and what it is handed from earlier ones (solid). "
            "As vectors they add up exactly, their lengths don't. Calibration should lower both; a dotted line that "
            "stays high names the block to look at.",
            partial(figures.split_figure, run),
        ),
        Plate(
            "outputs",
            "What becomes of the predictions",
            "The same held-out rows at the model's end, through its head: blue should be nearer to the expert than "
            "orange, that is left, left, and right.",
            partial(figures.output_figure, run),
        ),
        Plate(
            "metrics",
            "Tasks, on rows that calibration never saw",
            "From featcal-hf eval. Blue should be nearer to green than orange is.",
            lambda look: None if evaluation is None else figures.metric_figure(evaluation, look),
        ),
        Plate(
            "features",
            "Final features",
            "One point for each held-out row, along the two directions in which the expert's features vary most. Blue "
            "should lie on green where orange doesn't.",
            partial(figures.feature_figure, run),
        ),
        Plate(
            "cosine",
            "Direction of the final features",
            "The mean cosine between a model's features and its expert's after the last block; the thin line is one "
            "standard deviation over rows. The axis is cut at the left: read the numbers, not the lengths.",
            partial(figures.cosine_figure, run),
        ),
        Plate(
            "cosines",
            "Row by row",
            "How many rows have which cosine. A tail at the left holds the rows that calibration doesn't reach: are "
            "they unlike those it was given?",
            partial(figures.histogram_figure, run),
        ),
        Plate(
            "steps",
            "How far modules moved",
            "The size of each module's step, relative to its merged weights. A few strong cells are usual; a whole "
            "strong row or column together with a task that got worse asks for more samples or a larger lambda.",
            partial(figures_solve.step_figure, run),
        ),
        Plate(
            "grams",
            "How well the equations are posed",
            "Above 7, the condition number is more than float32 resolves: raise lambda. A dominance near 100 means "
            "massive activations, one direction that outweighs all others; with the paper's frobenius scale lambda "
            "then decides the rest.",
            partial(figures_solve.gram_figure, run),
        ),
        Plate(
            "cost",
            "Time and memory",
            "Moments and solving grow with the square and cube of the width, forwards with the tokens. Fewer samples "
            "make all but solving cheaper; drift is off with holdout: 0. Memory holds mapped weights too, which the "
            "system takes back when it needs to.",
            partial(figures_solve.cost_figure, run),
        ),
    ]


def _comparison(runs: Mapping[str, RunRecord]) -> list[Plate]:
    return [
        Plate(
            "compared",
            "Drift after the last block, run by run",
            "The farther left, the closer to the expert; the grey tick is the merged model. Differences smaller than "
            "those between seeds don't count.",
            partial(last_by_run, runs),
        ),
        Plate(
            "compared-blocks",
            "Drift block by block, run by run",
            "Grey is the merged model of the first run that measured the task.",
            partial(drift_by_run, runs),
        ),
    ]


def _metrics(evaluations: Sequence[EvalRecord | None]) -> list[dict[str, Any]]:
    """A row for each metric of a task: expert and merged of the first run that has them, calibrated of each run."""
    lines = [
        {(line.task, line.metric): line for line in (*found.results, *found.lm_eval)} if found else {}
        for found in evaluations
    ]
    rows = []
    for place in dict.fromkeys(place for of_run in lines for place in of_run):
        found = [of_run.get(place) for of_run in lines]
        expert, merged = (
            next((value for line in found if line and (value := getattr(line, model)) is not None), None)
            for model in ("expert", "merged")
        )
        numbers = [expert, merged, *(line.calibrated if line else None for line in found)]
        rows.append({"name": ", ".join(place), "numbers": numbers})
    return rows


def _means(run: RunRecord) -> dict[str, float | None]:
    """Means over tasks of what the tiles and the comparison show; None where it wasn't measured."""
    changes = list(run.last.drift.values())
    outputs = [outcome.output for outcome in run.last.outcome.values() if outcome.output]
    return {
        "drift_before": _mean([change.before.relative for change in changes]),
        "drift_after": _mean([change.after.relative for change in changes]),
        "kl_before": _mean([output.before.kl for output in outputs]),
        "kl_after": _mean([output.after.kl for output in outputs]),
        "agreement_before": _mean([output.before.agreement for output in outputs]),
        "agreement_after": _mean([output.after.agreement for output in outputs]),
    }


def _mean(values: list[float] | list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _kept(run: RunRecord) -> dict[str, int]:
    """Why parameters kept their merged values, and how many did."""
    reasons: dict[str, int] = {}
    for block in run.blocks:
        for reason in block.kept.values():
            reasons[reason] = reasons.get(reason, 0) + 1
    return reasons


def _names(folders: list[Path]) -> list[str]:
    """A name for each folder: as many of its last parts as it takes to tell them apart, numbered if that fails."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(own[-length:]) for own in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{own[-1]} ({number})" for number, own in enumerate(parts, 1)]
