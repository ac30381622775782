"""`featcal-hf push`."""

from __future__ import annotations

from pathlib import Path

import click

from featcal_hf.commands.options import TALKING, open_console, options, show_push, stages
from featcal_hf.hub import push


@click.command("push")
@options(
    [
        click.argument("model_dir", type=click.Path(path_type=Path)),
        click.argument("repo_id"),
        click.option("--private", is_flag=True, help="Make the repository private."),
        click.option("--revision", help="Push to this branch, made if it isn't there."),
        click.option("--create-pr", is_flag=True, help="Open a pull request, also on a repository of others."),
        click.option("--commit-message", help="First line of the commit."),
        *TALKING,
    ]
)
def push_command(
    model_dir: Path,
    repo_id: str,
    private: bool,
    revision: str | None,
    create_pr: bool,
    commit_message: str | None,
    verbosity: int,
    quiet: bool,
) -> None:
    """Push the calibrated model in MODEL_DIR, with its card and figures, to REPO_ID on the Hub."""
    console = open_console(verbosity)
    report = push(
        model_dir,
        repo_id,
        private=private,
        revision=revision,
        create_pr=create_pr,
        commit_message=commit_message,
        on_stage=stages(console, quiet),
    )
    show_push(console, report, quiet)
