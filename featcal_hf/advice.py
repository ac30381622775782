"""What a record means in words: one sentence of judgement, and what to look at or try."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from featcal_hf.figure_words import brief, duration, percent, short_names
from featcal_hf.recorded import EvalLine, EvalRecord, RunRecord

LARGE_STEP = 0.4
FLOAT32_CONDITION = 1e7
SMALL_LAMBDA = 1e-7
MASSIVE = 0.9
FEW_ROWS = 8


@dataclass(frozen=True)
class Advice:
    """One thing worth knowing.

    Attributes:
        warning: it may have done harm; otherwise it is worth a look.
        found: what was seen.
        action: what to try.
    """

    warning: bool
    found: str
    action: str


def verdict(run: RunRecord) -> str:
    """One sentence on whether calibration helped."""
    seconds = duration(run.seconds)
    if not run.measured:
        blocks = f"{len(run.blocks)} block{'s' if len(run.blocks) > 1 else ''}"
        return f"Calibrated {blocks} in {seconds}; no rows were held out to measure drift on."
    drift = run.last.drift
    worse = _farther(run)
    if not worse:
        ratio = sum(change.after.relative / max(change.before.relative, 1e-12) for change in drift.values())
        return (
            f"Every task's features are closer to its expert's: {1 - ratio / len(drift):.0%} less drift on "
            f"average{_outputs(run)}, in {seconds}."
        )
    return (
        f"Features moved away from the expert's for {', '.join(worse)} ({len(drift) - len(worse)} of {len(drift)} "
        f"tasks improved, {seconds}); give more samples, or {_hold_back(run)}."
    )


def advice(run: RunRecord, evaluation: EvalRecord | None) -> list[Advice]:
    """What to look at in a run, warnings first."""
    found = [*_drift(run), *_steps(run), *_numbers(run), *_data(run), *_results(evaluation)]
    return sorted(found, key=lambda item: not item.warning)


def missing(run: RunRecord, evaluation: EvalRecord | None) -> list[Advice]:
    """What the record doesn't hold, and how to get it."""
    found = []
    if not run.measured:
        found.append(
            Advice(
                False,
                "No drift was measured, because no rows were held out.",
                "Set featcal.holdout to 32 (or leave it out) and calibrate again.",
            )
        )
    elif not run.last.outcome:
        found.append(
            Advice(
                False,
                "featcal.json was written before features, outputs and costs were recorded.",
                "Calibrate again to see them.",
            )
        )
    for task, outcome in run.last.outcome.items():
        if outcome.no_output:
            found.append(
                Advice(
                    False,
                    f"Task {task} has no output drift: {outcome.no_output}.",
                    "Its features say what there is to say; `featcal-hf eval` measures the task itself.",
                )
            )
    if evaluation is None:
        found.append(
            Advice(
                False,
                "No task metric was measured.",
                "Run `featcal-hf eval RECIPE MODEL_DIR --merged MERGED --experts`, then this report again.",
            )
        )
    return found


def _farther(run: RunRecord) -> list[str]:
    return [task for task, change in run.last.drift.items() if change.after.relative >= change.before.relative]


def _outputs(run: RunRecord) -> str:
    changes = [outcome.output for outcome in run.last.outcome.values() if outcome.output]
    pairs = [(change.before.kl, change.after.kl) for change in changes]
    known = [(before, after) for before, after in pairs if before is not None and after is not None]
    if not known:
        return ""
    before, after = (sum(values) / len(known) for values in zip(*known, strict=True))
    return f", the outputs' KL from the experts' {brief(before)} → {brief(after)}"


def _hold_back(run: RunRecord) -> str:
    return "lower rho towards 1" if run.settings.lambda_ is None else "raise lambda"


def _drift(run: RunRecord) -> Iterator[Advice]:
    for task in _farther(run):
        change = run.last.drift[task]
        yield Advice(
            True,
            f"Task {task} drifts more than before: {percent(change.before.relative)} → "
            f"{percent(change.after.relative)} at the last block.",
            f"Check that its rows look like what its expert was trained on (prompt, chat template); give more samples, "
            f"or {_hold_back(run)}.",
        )
    for task, outcome in run.last.outcome.items():
        before = outcome.output.before.kl if outcome.output else None
        after = outcome.output.after.kl if outcome.output else None
        if before is not None and after is not None and after > before and task not in _farther(run):
            yield Advice(
                True,
                f"Task {task}: features are closer to the expert's, outputs are not "
                f"(KL {brief(before)} → {brief(after)}).",
                "The head may not be the expert's; look at the task's metric with `featcal-hf eval`.",
            )
    few = [task for task, record in run.tasks.items() if 0 < record.holdout_rows < FEW_ROWS]
    if few:
        yield Advice(
            False,
            f"Drift of {', '.join(few)} is measured on fewer than {FEW_ROWS} rows.",
            "Take small differences there for noise, or give the task more rows.",
        )


def _steps(run: RunRecord) -> Iterator[Advice]:
    names = short_names([block.path for block in run.blocks])
    moved = [
        (module.step, name, module.name)
        for block, name in zip(run.blocks, names, strict=True)
        for module in block.modules
        if LARGE_STEP < module.step < math.inf
    ]
    if not moved:
        return
    step, block, module = max(moved)
    others = f", and {len(moved) - 1} more modules moved over {LARGE_STEP:.0%}" if len(moved) > 1 else ""
    rho = f"lower rho towards 1 (now {run.settings.rho:g}), which moves the anchor itself"
    ridge = run.settings.lambda_
    held = f"raise lambda (now {ridge:g})" if ridge is not None else "give more samples"
    action = f"{held}, or {rho}" if run.settings.rho > 1 else held
    yield Advice(
        bool(_farther(run)),
        f"Block {block} moved {step:.0%} from the merged weights ({module}){others}.",
        f"If a task got worse, {action}.",
    )


def _numbers(run: RunRecord) -> Iterator[Advice]:
    ridge = run.settings.lambda_
    if ridge is not None and ridge < SMALL_LAMBDA:
        yield Advice(
            True,
            f"lambda {ridge:g} is below the rounding of float32 (1e-7): in directions that few tokens have, the "
            "right-hand side is noise.",
            "Raise lambda to 1e-5 or more, or leave it out for the adaptive ridge.",
        )
    inputs = [
        (item.condition, item.dominance, name, ", ".join(item.modules))
        for block, name in zip(run.blocks, short_names([block.path for block in run.blocks]), strict=True)
        for item in block.inputs
    ]
    bad = [(condition, block, modules) for condition, _, block, modules in inputs if condition > FLOAT32_CONDITION]
    if bad:
        condition, block, modules = max(bad)
        yield Advice(
            True,
            f"{len(bad)} systems are worse conditioned than float32 resolves, the worst {condition:.0e} "
            f"(block {block}, {modules}).",
            "Raise lambda.",
        )
    massive = [(dominance, block, modules) for _, dominance, block, modules in inputs if dominance > MASSIVE]
    if massive and run.settings.scale == "frobenius":
        dominance, block, modules = max(massive)
        yield Advice(
            False,
            f"Massive activations: in {len(massive)} inputs one direction holds over {MASSIVE:.0%} of the Gram's norm "
            f"(most in block {block}, {modules}: {dominance:.0%}), so that lambda outweighs all others.",
            "Set scale: trace, or leave lambda out for the adaptive ridge.",
        )


def _data(run: RunRecord) -> Iterator[Advice]:
    widest = max((item.width for block in run.blocks for item in block.inputs), default=0)
    few = [task for task, record in run.tasks.items() if 0 < record.tokens < widest]
    if few:
        yield Advice(
            False,
            f"{', '.join(few)} gave fewer tokens than the widest modules have inputs ({widest:,}): directions that no "
            "token has stay at the anchor.",
            "Give these tasks more or longer samples.",
        )
    for warning in run.warnings:
        yield Advice(True, warning if warning.endswith("?") else f"{warning}.", "Look at the recipe.")
    for task, record in run.tasks.items():
        for warning in record.warnings:
            yield Advice(True, f"Task {task}: {warning}.", "Look at the task's rows and template.")


def _results(evaluation: EvalRecord | None) -> Iterator[Advice]:
    for line in [] if evaluation is None else [*evaluation.results, *evaluation.lm_eval]:
        if _fell(line):
            yield Advice(
                True,
                f"{line.task}: {line.metric} is worse than the merged model's ({line.merged:.4g} → "
                f"{line.calibrated:.4g}).",
                "Is the task among those calibrated on? If it is, give it more samples; if not, add it.",
            )


def _fell(line: EvalLine) -> bool:
    if line.merged is None or line.calibrated is None:
        return False
    change = line.calibrated - line.merged if line.higher_is_better else line.merged - line.calibrated
    return change < -1e-3 * abs(line.merged)
