"""The command line: one group of commands, errors to exit codes."""

from __future__ import annotations

import ctypes
import difflib
import logging
import sys
from pathlib import Path

import click
from rich.console import Console

from featcal_hf import __version__
from featcal_hf.commands.calibrate import calibrate_command, check_command
from featcal_hf.commands.card import card_command
from featcal_hf.commands.demo import demo_command
from featcal_hf.commands.evaluate import eval_command
from featcal_hf.commands.merge import merge_command
from featcal_hf.commands.push import push_command
from featcal_hf.commands.report import report_command
from featcal_hf.errors import FeatCalError, RanksError, RecipeError
from featcal_hf.ranks import ALONE, Ranks, joined_ranks

BAD_RECIPE, FAILED, INTERRUPTED = 2, 1, 130
MALLOPT_MMAP_THRESHOLD, RETURNED_BYTES = -3, 4 * 2**20


class DefaultToCalibrate(click.Group):
    """`featcal-hf RECIPE MODEL_DIR` is `featcal-hf calibrate RECIPE MODEL_DIR`, so that it reads like mergekit's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert the command where the first argument is none, unless it looks like one that is misspelt."""
        own = {option for parameter in self.get_params(ctx) for option in parameter.opts}
        if args and args[0] not in self.commands and args[0] not in own:
            close = difflib.get_close_matches(args[0], self.commands, n=1)
            if close and not Path(args[0]).suffix and not Path(args[0]).exists():
                ctx.fail(f"{args[0]!r} is neither a command nor a recipe; did you mean {close[0]!r}?")
            args = ["calibrate", *args]
        return super().parse_args(ctx, args)


@click.group(
    cls=DefaultToCalibrate,
    commands=[
        calibrate_command,
        check_command,
        eval_command,
        report_command,
        merge_command,
        card_command,
        push_command,
        demo_command,
    ],
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="featcal-hf")
@click.pass_context
def cli(context: click.Context) -> None:
    """Repair a merged model: calibrate its features towards its experts', block by block, in closed form.

    Run `mergekit-yaml recipe.yml ./merged` first, then `featcal-hf recipe.yml ./merged`.
    """
    ranks = context.find_object(Ranks) or ALONE
    if ranks.size > 1 and context.invoked_subcommand != calibrate_command.name:
        raise RanksError(
            f"{context.invoked_subcommand} runs in one process, and {ranks.size} were started; start it without a "
            "launcher. Only calibrate is shared."
        )


def main() -> None:
    """Run the command; errors that a user can mend are one message and an exit code."""
    _return_freed_memory()
    try:
        with joined_ranks() as ranks:
            if not ranks.is_first:
                logging.disable(logging.WARNING)
            _run(ranks)
    except RanksError as error:
        _fail(str(error), FAILED)


def _run(ranks: Ranks) -> None:
    try:
        with ranks.telling():
            cli.main(standalone_mode=False, obj=ranks)
    except RecipeError as error:
        _fail(str(error), BAD_RECIPE, ranks)
    except FeatCalError as error:
        _fail(str(error), FAILED, ranks)
    except click.ClickException as error:
        if not ranks.leaves_it_to_the_first:
            error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt) as error:
        where = str(error.__cause__ or error) or "the model's folder holds a whole model, or none; run it again."
        _fail(f"interrupted: {where}", INTERRUPTED, ranks)


def _return_freed_memory() -> None:
    """Have glibc give tensors of a few MB back as they are freed, instead of keeping them for later.

    Its threshold rises to 32 MB by itself, and what it keeps then adds up from block to block.
    """
    if sys.platform == "linux":
        allocator = ctypes.CDLL(None)
        if hasattr(allocator, "mallopt"):
            allocator.mallopt(MALLOPT_MMAP_THRESHOLD, RETURNED_BYTES)


def _fail(message: str, code: int, ranks: Ranks = ALONE) -> None:
    if ranks.leaves_it_to_the_first:
        sys.exit(code)
    Console(stderr=True).print(f"error: {message}", style="bold red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)
