"""Push a calibrated model to the Hub: card and weights checked first, nothing but what others need, no local path."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub import errors as hub_errors
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from featcal_hf.card import open_question
from featcal_hf.card_facts import read_folder
from featcal_hf.card_files import read_card, write_text_as
from featcal_hf.card_metadata import check_card
from featcal_hf.errors import CardError, HubError
from featcal_hf.hub_ids import id_problem
from featcal_hf.parents import CARD
from featcal_hf.readme import is_ours, with_model_id
from featcal_hf.shared_files import shared_files

# Connections, timeouts, broken answers: the error of the client that the library has, which differs by its version.
_ClientError: type[Exception] = hub_errors.HTTPError  # type: ignore[attr-defined]
MESSAGE = "Upload a merge calibrated with featcal_hf"


@dataclass(frozen=True)
class PushReport:
    """What was pushed.

    Attributes:
        repo_id: the repository, with its owner.
        url: its page, or that of the pull request.
        commit: the last commit's page.
        files: what is there now of the folder.
        cleaned: those in which local paths were replaced on the way.
        left_out: what stayed in the folder.
    """

    repo_id: str
    url: str
    commit: str
    files: list[str]
    cleaned: list[str]
    left_out: list[str]


def push(
    model_dir: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    token: str | None = None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> PushReport:
    """Push a calibrated model with its card, its reports and their figures to a repository on the Hub.

    What was uploaded before an interruption is not uploaded again: run the same command.

    Args:
        model_dir: the calibrated model.
        repo_id: `owner/name`, or a name of your own; made if it isn't there.
        private: make the repository private; one that is there already and public is refused.
        revision: the branch to push to, made if it isn't there; None: main.
        create_pr: open a pull request, also on a repository of others.
        commit_message: first line of the commit.
        token: in place of the one of `hf auth login`.
        on_stage: called with the name of each stage.

    Returns:
        Where it is, which files are there, and what stayed here.

    Raises:
        CardError: there is no card, the Hub would refuse it, or its licence is open.
        CheckpointError: the weights are incomplete, or not those that the report speaks of.
        HubError: not logged in, no permission, offline, or the Hub failed; the command to run later is in it.
    """
    folder = Path(model_dir)
    later = _command(folder, repo_id, private, revision, create_pr, commit_message)
    check_repo_id(repo_id)
    if create_pr and revision is not None:
        raise HubError("--create-pr opens a pull request against main; leave --revision out.")
    on_stage("checking the card and the weights")
    _check_card(folder)
    api = HfApi(token=token)
    with explained(repo_id, later):
        on_stage("asking the Hub who you are")
        full = check_login(api, repo_id)
        url = _open_repo(api, full, private, create_pr)
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(full, branch=revision, exist_ok=True)
    _name_in_card(folder, full)
    shared = shared_files(folder, read_folder(folder).names)
    with tempfile.TemporaryDirectory(prefix="featcal-push-") as stage, explained(repo_id, later):
        shared.stage(folder, Path(stage))
        on_stage(f"uploading {len(shared.files)} files to {full}")
        commit = api.upload_folder(
            repo_id=full,
            folder_path=stage,
            commit_message=commit_message or MESSAGE,
            revision=revision,
            create_pr=create_pr,
        )
    return PushReport(
        full, commit.pr_url or url, commit.commit_url, shared.files, sorted(shared.texts), shared.left_out
    )


def check_repo_id(repo_id: str) -> None:
    """Refuse what can't be a repository's id.

    Raises:
        HubError: says why.
    """
    problem = id_problem(repo_id)
    if problem is not None:
        raise HubError(f"{repo_id!r} can't be a repository on the Hub: {problem}")


def check_before_run(repo_id: str, token: str | None = None) -> None:
    """Find what would stop a push, as far as it can be known before a long run.

    Raises:
        HubError: the id can't be one, nobody is logged in, the token may only read, or the Hub can't be reached.
    """
    check_repo_id(repo_id)
    with explained(repo_id, "the same command again"):
        check_login(HfApi(token=token), repo_id)


def check_login(api: HfApi, repo_id: str) -> str:
    """The repository's id with its owner, once it is known who asks and that they may write.

    Raises:
        HubError: the token may only read.
    """
    who: dict[str, Any] = api.whoami()
    role = who.get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        raise HubError(
            f"the token of {who['name']} may only read; make one that may write at "
            "https://huggingface.co/settings/tokens and log in with `hf auth login`."
        )
    return repo_id if "/" in repo_id else f"{who['name']}/{repo_id}"


@contextmanager
def explained(repo_id: str, later: str) -> Iterator[None]:
    """Turn what the Hub and the connection say into what to do.

    Raises:
        HubError: in place of theirs.
    """
    try:
        yield
    except HubError:
        raise
    except (OSError, ValueError, RuntimeError, _ClientError) as error:
        raise HubError(
            f"{repo_id} was not pushed: {_reason(error)}. The folder is as it was, and what has been uploaded is not "
            f"uploaded again; then run\n  {later}"
        ) from error


def _reason(error: BaseException) -> str:
    """What happened and what to do, by the first error in the chain that tells."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, LocalTokenNotFoundError):
            return "nobody is logged in; log in with `hf auth login`, or set HF_TOKEN"
        if isinstance(cause, OfflineModeIsEnabled):
            return "offline mode is on; unset HF_HUB_OFFLINE"
        if isinstance(cause, HfHubHTTPError):
            return _answer(cause)
        if isinstance(cause, _ClientError):
            return f"the Hub can't be reached ({type(cause).__name__}: {cause}); try when there is a connection"
        cause = cause.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _answer(error: HfHubHTTPError) -> str:
    status = error.response.status_code
    said = f"the Hub answered {status}"
    if isinstance(error, GatedRepoError):
        return f"{said}: the repository is gated; ask for access on its page"
    if status == 401 and not isinstance(error, RepositoryNotFoundError):
        return f"{said}: the token is not valid; log in again with `hf auth login --force`, or mend HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return f"{said}: there is no such repository, or you may not see it; check its name and who is logged in"
    if status == 403:
        return f"{said}: no permission to write there; check the token's permissions, or use --create-pr"
    if status == 409:
        return f"{said}: the repository has changed meanwhile ({_server(error)}); look at it"
    if status == 429:
        return f"{said}: too many requests; wait a while"
    if status >= 500:
        return f"{said}: it has a problem of its own; try later"
    return f"{said}: {_server(error)}"


def _server(error: HfHubHTTPError) -> str:
    return " ".join((error.server_message or str(error)).split())


def _check_card(folder: Path) -> None:
    path = folder / CARD
    text = read_card(path)
    if text is None:
        raise CardError(f"{folder} has no {CARD}; write it with `featcal-hf card {folder}`.")
    check_card(text, str(path))
    question = open_question(folder, text)
    if question is not None:
        raise CardError(
            f"{path} names no licence: {question}; read them, decide, and add `license:` to the metadata at its top."
        )


def _open_repo(api: HfApi, repo_id: str, private: bool, create_pr: bool) -> str:
    if not create_pr:
        url = str(api.create_repo(repo_id, private=private or None, exist_ok=True))
    else:
        url = f"{api.endpoint}/{repo_id}"
    if private and not api.model_info(repo_id).private:
        raise HubError(f"{repo_id} is there already and public; make it private on its page, or leave --private out.")
    return url


def _name_in_card(folder: Path, repo_id: str) -> None:
    """Have the example of our card load the model from where it is pushed to."""
    text = read_card(folder / CARD) or ""
    named = with_model_id(text, repo_id)
    if is_ours(text) and named != text:
        write_text_as(folder / CARD, named)


def _command(
    folder: Path, repo_id: str, private: bool, revision: str | None, create_pr: bool, commit_message: str | None
) -> str:
    flags = [
        *(["--private"] if private else []),
        *(["--revision", revision] if revision else []),
        *(["--create-pr"] if create_pr else []),
        *(["--commit-message", commit_message] if commit_message else []),
    ]
    return shlex.join(["featcal-hf", "push", str(folder), repo_id, *flags])
