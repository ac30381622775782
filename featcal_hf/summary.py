"""The words and tables around a run: its plan before, what moved after."""

from __future__ import annotations

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from featcal_hf.plan import Plan
from featcal_hf.run import Prepared, RunReport


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
        f"estimated: {decimal(plan.peak_bytes)} peak memory, {decimal(plan.disk_bytes)} disk, {_work(plan.flops)}",
        highlight=False,
        soft_wrap=True,
    )
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
    """Print, for each task, the drift of the last block's features before and after, and one sentence."""
    last = report.blocks[-1]
    if last.drift:
        table = Table(
            "task",
            "drift before",
            "after",
            "cosine before",
            "after",
            title=f"Relative drift from the expert after {last.path}, held-out rows",
            title_justify="left",
        )
        for task, (before, after) in last.drift.items():
            table.add_row(
                task,
                f"{before.relative:.1%}",
                f"{after.relative:.1%}",
                f"{before.cosine:.4f}",
                f"{after.cosine:.4f}",
            )
        console.print(table)
    console.print(judgement(report), highlight=False, soft_wrap=True)


def judgement(report: RunReport) -> str:
    """One sentence on whether calibration helped."""
    seconds = f"{report.seconds:.0f} s"
    drift = report.blocks[-1].drift
    if not drift:
        return f"Calibrated {len(report.blocks)} blocks in {seconds}; no rows were held out to measure drift on."
    closer = [task for task, (before, after) in drift.items() if after.relative < before.relative]
    ratio = sum(after.relative / max(before.relative, 1e-12) for before, after in drift.values()) / len(drift)
    if len(closer) == len(drift):
        return f"Every task's features are closer to its expert's: {1 - ratio:.0%} less drift on average, in {seconds}."
    worse = ", ".join(task for task in drift if task not in closer)
    advice = "lower rho towards 1" if report.settings.lambda_ is None else "raise lambda"
    return (
        f"Features moved away from the expert's for {worse} ({len(closer)} of {len(drift)} tasks improved, {seconds}); "
        f"give more samples, or {advice}."
    )
