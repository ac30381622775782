"""Choose which rows are calibrated on and which are held out to measure what calibration did."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from featcal_hf.data.batches import Example
from featcal_hf.data.source import Row
from featcal_hf.errors import DataError

HOLDOUT_SHARE = 5
"""Where rows run short, at most one in this many is held out."""


@dataclass
class Choice:
    """The rows of one task, each with its index."""

    calibration: list[tuple[int, Example]] = field(default_factory=list)
    holdout: list[tuple[int, Example]] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)
    """Rows passed over because they give no token."""
    duplicates: list[int] = field(default_factory=list)
    """Rows not held out because a calibration row has the same content."""
    usable: int = 0
    """Rows that could be used, of those looked at."""


def choose(
    rows: Iterable[tuple[int, Row]], encode: Callable[[Row], Example | None], *, samples: int, holdout: int
) -> Choice:
    """Take the first `samples` usable rows to calibrate on and hold out the next `holdout` ones of other content.

    Reads no further than it has to. If the rows run out, at most a fifth of the usable ones is held out.

    Args:
        rows: Index and row, in the order of choice.
        encode: Makes a row an example; None for a row that gives no token.
        samples: Calibration rows wanted.
        holdout: Held-out rows wanted.

    Raises:
        DataError: a row can't be encoded (the message names it), or none is usable.
    """
    choice = Choice()
    pool: list[tuple[int, Example]] = []
    calibrated: set[str] = set()
    for index, row in rows:
        try:
            example = encode(row)
        except DataError as error:
            raise DataError(f"row {index}: {error}") from error
        if example is None:
            choice.empty.append(index)
            continue
        choice.usable += 1
        if len(pool) < samples:
            calibrated.add(example.digest)
        elif example.digest in calibrated:
            choice.duplicates.append(index)
            continue
        pool.append((index, example))
        if len(pool) == samples + holdout:
            break
    if not pool:
        raise DataError(
            f"none of the {len(choice.empty)} rows gives a token; check that the named columns hold text or images"
        )
    if len(pool) < samples + holdout:
        holdout = min(holdout, len(pool) // HOLDOUT_SHARE)
    choice.calibration = pool[: min(samples, len(pool) - holdout)]
    calibrated = {example.digest for _, example in choice.calibration}
    for index, example in pool[len(choice.calibration) :]:
        if example.digest in calibrated:
            choice.duplicates.append(index)
        elif len(choice.holdout) < holdout:
            choice.holdout.append((index, example))
    return choice
