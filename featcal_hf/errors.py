"""What can go wrong, one class for each place where a user can act.

Every message says where, what was found, what was expected and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MOST_NAMES = 6


class FeatCalError(Exception):
    """Base of every error that a user can mend; the command prints it without a traceback."""


class RecipeError(FeatCalError):
    """The recipe can't be read or asks for something that can't be done."""


class CheckpointError(FeatCalError):
    """A checkpoint is missing, incomplete, damaged, or doesn't fit the others."""


class DataError(FeatCalError):
    """A task's examples can't be read or can't be turned into model inputs."""


class SolveError(FeatCalError):
    """A module's ridge regression has no finite solution."""


class RanksError(FeatCalError):
    """Processes that share a run can't work together, or one of them is gone; the same command goes on from there."""


class CardError(FeatCalError):
    """A model card can't be written, or says what the Hub would refuse or nobody should read."""


class HubError(FeatCalError):
    """A model can't be pushed to the Hub; the folder is as it was, and what was uploaded is not uploaded again."""


def listed(names: Iterable[object], like: str = "") -> str:
    """Names for a message: the first few, or those most `like` what was given, and how many more there are."""
    known = [str(name) for name in names]
    if len(known) <= MOST_NAMES:
        return ", ".join(known)
    if like:
        known.sort(key=lambda name: -difflib.SequenceMatcher(None, like, name).ratio())
    return f"{', '.join(known[:MOST_NAMES])}, ... {len(known) - MOST_NAMES} more"
