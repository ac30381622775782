"""The table of an evaluation, and what there is to say about it."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from featcal_hf.eval_report import EvalReport, Line

NOT_MEASURED = "–"


def show_evaluation(console: Console, report: EvalReport) -> None:
    """Print each metric for expert, merged and calibrated model, the rows behind them, and what wasn't measured."""
    table = Table(
        "task", "metric", *("expert", "merged", "calibrated"), "gap recovered", title="Evaluation", title_justify="left"
    )
    for column in table.columns[2:]:
        column.justify = "right"
    task = None
    for line in [*report.lines, *report.harness]:
        if task not in (None, line.task):
            table.add_section()
        table.add_row(line.task if line.task != task else "", line.metric.name, *cells(line))
        task = line.task
    if table.rows:
        console.print(table)
    for name, record in report.tasks.items():
        where = record["dataset"]["split"]
        console.print(
            f"{name}: {record['rows']} rows of {where}, none of them used for calibration "
            f"({record['left_out_rows']} left out); sha256 {record['sha256'][:16]}",
            highlight=False,
            soft_wrap=True,
        )
        for text in remarks(record):
            console.print(f"  {text}", highlight=False, soft_wrap=True)


def cells(line: Line) -> list[str]:
    """A line's numbers: expert, merged, calibrated, and the share of the gap that calibration closed."""
    shown = [
        line.metric.shown(line.values[label]) if label in line.values else NOT_MEASURED
        for label in ("expert", "merged", "calibrated")
    ]
    if line.has_gap is False:
        return [*shown, "no gap"]
    return [*shown, NOT_MEASURED if line.recovered is None else f"{round(line.recovered, 2) + 0:.0%}"]


def remarks(record: dict[str, object]) -> list[str]:
    """What a reader should know of a task's numbers: answers that are no numbers, what wasn't measured and why."""
    counts = record["counts"]
    notes = record["notes"]
    assert isinstance(counts, dict)
    assert isinstance(notes, list)
    unparsable = {
        label: count["unparsable_answers"] for label, count in counts.items() if "unparsable_answers" in count
    }
    found = []
    if any(unparsable.values()):
        each = ", ".join(f"{label} {count}" for label, count in unparsable.items())
        found.append(f"answers that are no number, left out of Spearman's ρ: {each}")
    return [*found, *notes]
