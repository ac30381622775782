"""What can go wrong, one class for each place where a user can act.

Every message says where, what was found, what was expected and what to do.
"""

from __future__ import annotations


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
