"""The words and tables around a run: its plan before, what moved after."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from featcal_hf.advice import verdict
from featcal_hf.figure_words import brief, percent
from featcal_hf.plan import FORWARDS, Plan
from featcal_hf.preparation import Prepared
from featcal_hf.record import RunReport
from featcal_hf.recorded import run_record


def show_plan(console: Console, prepared: Prepared, plan: Plan) -> None:
    """Print what a run will calibrate, on which examples, and what it will take."""
    table = Table("task", "expert", "rows", "tokens", "held out", title="Calibration plan", title_justify="left")
    for task, data in zip(prepared.recipe.tasks, prepared.data, strict=True):
        table.add_row(
            task.name,
            str(task.model),
            str(data.record["calibration_rows"]),
            f"{plan.tokens[task.name]:,}",
            str(data.record["holdout_rows"]),
        )
    console.print(table)
    settings = prepared.settings
    ridge = "adaptive" if settings.lambda_ is None else f"{settings.lambda_:g}"
    console.print(
        f"lambda {ridge}, rho {settings.rho:g}, alpha {settings.alpha:g}, scale {settings.scale}; "
        f"{plan.linears} linear modules and {plan.norms} norms in {plan.blocks} blocks",
        highlight=False,
        soft_wrap=True,
    )
    for reason, names in plan.kept.items():
        console.print(
            f"kept as merged: {len(names)} tensors ({names[0]}{', ...' if len(names) > 1 else ''}): {reason}",
            highlight=False,
            soft_wrap=True,
        )
    console.print(
        f"estimated: {decimal(plan.memory.peak)} peak memory, {decimal(plan.disk_bytes + plan.memory.in_files)} disk, "
        f"{_work(plan.flops)}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"between blocks {decimal(plan.memory.waiting)} of the rows' features wait"
        + (f", {decimal(plan.memory.in_files)} of them in files" if plan.memory.in_files else " in memory"),
        highlight=False,
        soft_wrap=True,
    )
    if plan.drift_passes:
        console.print(
            f"measuring drift takes {plan.drift_passes:.2f} passes over these tokens besides the calibration's "
            f"{FORWARDS}; none with holdout: 0",
            highlight=False,
            soft_wrap=True,
        )
    if prepared.unfinished is not None:
        console.print(f"{prepared.unfinished}", highlight=False, soft_wrap=True, markup=False)
    for warning in prepared.warnings:
        console.print(f"warning: {warning}", highlight=False, soft_wrap=True, markup=False)
    for task, data in zip(prepared.recipe.tasks, prepared.data, strict=True):
        for warning in data.record["warnings"]:
            console.print(f"warning: task {task.name}: {warning}", highlight=False, soft_wrap=True, markup=False)


def _work(operations: float) -> str:
    """Floating-point operations with the prefix that leaves one to three digits before the point."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if operations < 999.5:
            return f"{operations:.3g} {prefix}FLOP"
        operations /= 1000
    return f"{operations:.3g} EFLOP"


def show_result(console: Console, report: RunReport) -> None:
    """Print a line for each task on its held-out rows, merged → calibrated, and one sentence."""
    last = report.blocks[-1]
    if last.drift:
        outputs = {task: outcome.output for task, outcome in last.outcome.items() if outcome.output}
        table = Table("task", title="Held-out rows, merged → calibrated", title_justify="left")
        for column in ("relative drift", "cosine", *(("KL from expert", "same first choice") if outputs else ())):
            table.add_column(column, justify="right")
        for task, (before, after) in last.drift.items():
            cells = [
                f"{percent(before.relative)} → {percent(after.relative)}",
                f"{before.cosine:.3f} → {after.cosine:.3f}",
            ]
            change = outputs.get(task)
            if change is not None:
                cells += [
                    _change(change.before.kl, change.after.kl, brief),
                    _change(change.before.agreement, change.after.agreement, percent),
                ]
            table.add_row(task, *cells)
        console.print(table)
    show_verdict(console, report)


def show_verdict(console: Console, report: RunReport) -> None:
    """Print one sentence on whether calibration helped."""
    record = run_record(report.as_dict(), "the run's report")
    console.print(verdict(record), highlight=False, soft_wrap=True)


def _change(before: float | None, after: float | None, words: Callable[[float], str]) -> str:
    return "–" if before is None or after is None else f"{words(before)} → {words(after)}"
