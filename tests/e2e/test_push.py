"""A calibrated model on its way to the Hub, spoken to over real HTTP: what arrives, and what a failure costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hub_server import Fault, Hub, Repo, running_hub
from huggingface_hub import constants
from tiny_merge import Merge, Outcome, contents, copy_merge
from transformers import LlamaForCausalLM

from featcal_hf import CardError, CheckpointError, HubError, calibrate, evaluate, push, write_card
from featcal_hf.hidden_paths import first_path

Featcal = Callable[..., Outcome]


@pytest.fixture(scope="module")
def made(sharded: Merge, tmp_path_factory: pytest.TempPathFactory) -> Merge:
    """A calibrated merge, evaluated, with what such folders gather: read it, don't change it."""
    merge = copy_merge(sharded, tmp_path_factory.mktemp("push"))
    before = merge.root / "before"
    merge.merged.rename(before)
    calibrate(merge.recipe, before, merge.merged)
    evaluate(merge.recipe, merge.merged, before)
    (merge.merged / "featcal_report").mkdir()
    (merge.merged / "featcal_report" / "report.html").write_text(f"<p>read from '{merge.root}/a'</p>")
    (merge.merged / "featcal_report" / "drift.png").write_bytes(b"\x89PNG\xff")
    for name in (
        ".featcal.lock",
        ".cache/huggingface/x",
        ".featcal/block-0",
        "optimizer.pt",
        "README.md.bak",
        "checkpoint-1/model.bin",
    ):
        (merge.merged / name).parent.mkdir(parents=True, exist_ok=True)
        (merge.merged / name).write_bytes(b"not to be shared")
    tokenizer = json.loads((merge.merged / "tokenizer_config.json").read_text())
    tokenizer["chat_template"] = "{{ '/think/hard' }} {% for m in messages %}</{{ m }}>/a/b{% endfor %}"
    (merge.merged / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    config = json.loads((merge.merged / "config.json").read_text())
    (merge.merged / "config.json").write_text(json.dumps(config | {"_name_or_path": "/home/someone/models/base"}))
    return merge


@pytest.fixture
def calibrated(made: Merge, tmp_path: Path) -> Merge:
    return copy_merge(made, tmp_path)


def pushed_files(hub: Hub, folder: Path, revision: str = "main") -> Path:
    """What the Hub has, as a folder."""
    target = folder / "pushed"
    for name, content in hub.files("me/sums", revision).items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(content)
    return target


def test_what_arrives_is_the_folder_without_what_is_nobody_s_business(
    calibrated: Merge, hub: Hub, featcal: Featcal
) -> None:
    outcome = featcal("push", calibrated.merged, "sums")
    assert outcome.code == 0, outcome
    assert outcome.output.endswith(f"Pushed {hub.address}/me/sums")
    assert "stayed here: .cache, .featcal, .featcal.lock, README.md.bak, checkpoint-1, optimizer.pt" in outcome.output
    there = hub.files("me/sums")
    weights = {path.name for path in calibrated.merged.glob("model*")}
    beside = {"README.md", "config.json", "featcal.json", "featcal_eval.json", "mergekit_config.yml"}
    assert weights | beside < set(there)
    assert set(there) - weights - beside == {
        "featcal_drift.png",
        "featcal_report/drift.png",
        "featcal_report/report.html",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    rewritten = {
        "config.json",
        "featcal.json",
        "featcal_eval.json",
        "mergekit_config.yml",
        "featcal_report/report.html",
    }
    for name, content in there.items():
        same = content == (calibrated.merged / name).read_bytes()
        assert same == (name not in rewritten), name


def test_no_file_that_arrives_has_a_local_path_in_it(calibrated: Merge, hub: Hub) -> None:
    push(calibrated.merged, "me/sums")
    for name, content in hub.files("me/sums").items():
        assert str(calibrated.root).encode() not in content, name
        assert b"someone" not in content, name
        if name.endswith((".json", ".md", ".yml")) and not name.startswith("tokenizer"):
            assert first_path(content.decode()) is None, name


def test_the_pushed_evaluation_speaks_of_the_pushed_report(calibrated: Merge, hub: Hub, tmp_path: Path) -> None:
    push(calibrated.merged, "me/sums")
    folder = pushed_files(hub, tmp_path)
    assert not any("speaks of an earlier calibration" in note for note in write_card(folder).notes)


def test_the_pushed_model_loads_and_its_card_s_example_loads_it_from_there(
    calibrated: Merge, hub: Hub, tmp_path: Path
) -> None:
    push(calibrated.merged, "me/sums")
    state = LlamaForCausalLM.from_pretrained(pushed_files(hub, tmp_path)).state_dict()
    for name, value in LlamaForCausalLM.from_pretrained(calibrated.merged).state_dict().items():
        assert torch.equal(state[name], value)
    assert 'model_id = "me/sums"' in hub.files("me/sums")["README.md"].decode()


def test_pushing_again_uploads_nothing_and_makes_no_commit(calibrated: Merge, hub: Hub) -> None:
    push(calibrated.merged, "me/sums")
    uploads, commits = hub.count("PUT "), hub.count("/commit/")
    assert uploads >= 1
    push(calibrated.merged, "me/sums")
    assert (hub.count("PUT "), hub.count("/commit/")) == (uploads, commits)


def test_a_large_file_goes_up_in_parts(calibrated: Merge, hub: Hub) -> None:
    hub.multipart = True
    push(calibrated.merged, "me/sums")
    assert hub.count(r"PUT /lfs/\w+/2") >= 1
    for path in calibrated.merged.glob("model*.safetensors"):
        assert hub.files("me/sums")[path.name] == path.read_bytes()


def test_a_private_repository_a_branch_and_a_message(calibrated: Merge, hub: Hub, featcal: Featcal) -> None:
    flags = ["--private", "--revision", "v1", "--commit-message", "first try", "--quiet"]
    outcome = featcal("push", calibrated.merged, "me/sums", *flags)
    assert (outcome.code, outcome.output) == (0, "")
    assert hub.repos["me/sums"].private
    assert hub.files("me/sums") == {}
    assert "README.md" in hub.files("me/sums", "v1")


def test_a_public_repository_is_not_taken_for_a_private_one(calibrated: Merge, hub: Hub) -> None:
    hub.repos["me/sums"] = Repo(private=False)
    with pytest.raises(HubError, match="is there already and public"):
        push(calibrated.merged, "me/sums", private=True)
    assert hub.files("me/sums") == {}


def test_a_pull_request_on_somebody_else_s_repository(calibrated: Merge, hub: Hub, featcal: Featcal) -> None:
    hub.repos["other/sums"] = Repo(private=False)
    outcome = featcal("push", calibrated.merged, "other/sums", "--create-pr")
    assert outcome.code == 0, outcome
    assert outcome.output.endswith(f"Pushed {hub.address}/other/sums/discussions/1")
    assert hub.files("other/sums") == {}
    assert "README.md" in hub.files("other/sums", "refs/pr/1")
    assert hub.count("repos/create") == 0


FAILURES = {
    "token": (Fault("whoami", 401), "the token is not valid"),
    "permission": (Fault("repos/create", 403, code="x"), "no permission to write there"),
    "gated": (Fault("preupload", 403, code="GatedRepo"), "the repository is gated"),
    "gone": (Fault("preupload", 404, code="RepoNotFound"), "there is no such repository"),
    "conflict": (Fault("commit", 409), "the repository has changed meanwhile (as the test wants)"),
    "500 on preupload": (Fault("preupload", 500, times=99), "it has a problem of its own"),
    "500 on an upload": (Fault("PUT", 503, times=99), "it has a problem of its own"),
    "500 on the commit": (Fault("commit", 500, times=99), "it has a problem of its own"),
    "too many": (Fault("validate-yaml", 429), "too many requests"),
    "broken upload": (Fault("PUT", None, times=99, after=1000), "the Hub can't be reached"),
    "broken commit": (Fault("commit", None, times=99, after=100), "the Hub can't be reached"),
    "broken hello": (Fault("whoami", None, times=99), "the Hub can't be reached"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_says_what_to_do_loses_nothing_and_the_printed_command_finishes(
    failure: str, calibrated: Merge, hub: Hub, featcal: Featcal
) -> None:
    fault, message = FAILURES[failure]
    hub.faults.append(replace(fault))
    before = contents(calibrated.merged)
    outcome = featcal("push", calibrated.merged, "me/sums")
    assert outcome.code == 1, outcome
    assert message in outcome.errors
    later = f"featcal-hf push {calibrated.merged} me/sums"
    assert outcome.errors.endswith(later)
    after = contents(calibrated.merged)
    assert {name for name in before if before[name] != after[name]} <= {"README.md"}
    assert set(before) == set(after)
    hub.faults.clear()
    stored = set(hub.objects)
    uploads = hub.count("PUT")
    assert featcal(*later.split()[1:]).code == 0
    weights = list(calibrated.merged.glob("model*.safetensors"))
    for path in weights:
        assert hub.files("me/sums")[path.name] == path.read_bytes()
    if stored:
        assert hub.count("PUT") - uploads < len(weights) + 1, "what was stored is not sent again"


@pytest.mark.parametrize("fault", [Fault("PUT", None, after=1000), Fault("PUT", 500), Fault("preupload", 503)])
def test_what_breaks_once_is_tried_again_without_a_word(fault: Fault, calibrated: Merge, hub: Hub) -> None:
    hub.faults.append(replace(fault))
    push(calibrated.merged, "me/sums")
    assert hub.faults[0].times == 0
    for path in calibrated.merged.glob("model*"):
        assert hub.files("me/sums")[path.name] == path.read_bytes()


def test_without_a_login_or_with_one_that_may_only_read_nothing_is_made(
    calibrated: Merge, hub: Hub, monkeypatch: pytest.MonkeyPatch, featcal: Featcal, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    assert "may only read" in featcal("push", calibrated.merged, "me/sums").errors
    monkeypatch.setenv("HF_TOKEN", "hf_nobody")
    assert "the token is not valid" in featcal("push", calibrated.merged, "me/sums").errors
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    assert "log in with `hf auth login`" in featcal("push", calibrated.merged, "me/sums").errors
    assert hub.repos == {}


def test_offline_says_so(calibrated: Merge, featcal: Featcal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_writer")
    outcome = featcal("push", calibrated.merged, "me/sums")
    assert outcome.code == 1
    assert "offline mode is on; unset HF_HUB_OFFLINE" in outcome.errors


@pytest.mark.parametrize("repo_id", ["a/b/c", "-x", "x--y", "me/", ".", "./merged"])
def test_what_can_t_be_a_repository_is_refused_before_anything_is_asked(
    repo_id: str, calibrated: Merge, hub: Hub
) -> None:
    with pytest.raises(HubError, match="can't be a repository on the Hub"):
        push(calibrated.merged, repo_id)
    assert hub.requests == []


def test_a_card_that_the_hub_would_refuse_or_whose_licence_is_open_stops_everything(
    calibrated: Merge, hub: Hub
) -> None:
    readme = calibrated.merged / "README.md"
    good = readme.read_text()
    readme.write_text(good.replace("tags:", "datasets: null\ntags:"))
    with pytest.raises(CardError, match="datasets is empty"):
        push(calibrated.merged, "me/sums")
    readme.write_text(good)
    report = calibrated.merged / "featcal.json"
    told = json.loads(report.read_text())
    for parent, license in zip(told["parents"], ["gemma", "mit", "mit"], strict=True):
        parent["license"] = license
    report.write_text(json.dumps(told))
    with pytest.raises(CardError, match=r"names no licence: .*/base \(gemma\)"):
        push(calibrated.merged, "me/sums")
    assert hub.requests == []
    readme.write_text(good.replace("tags:", "license: gemma\ntags:"))
    push(calibrated.merged, "me/sums")
    readme.unlink()
    with pytest.raises(CardError, match=r"has no README\.md; write it with"):
        push(calibrated.merged, "me/sums")


def test_weights_that_the_report_doesn_t_speak_of_are_not_pushed(calibrated: Merge, sharded: Merge, hub: Hub) -> None:
    for path in sharded.merged.glob("model*"):
        (calibrated.merged / path.name).write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match="holds other weights than those"):
        push(calibrated.merged, "me/sums")
    assert hub.repos.get("me/sums", Repo(False)).commits == []


def test_a_run_can_end_on_the_hub_and_what_would_stop_it_is_found_before(
    merge: Merge, hub: Hub, featcal: Featcal, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(merge.merged)
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    assert "may only read" in featcal(merge.recipe, merge.merged, "--push-to-hub", "me/sums").errors
    monkeypatch.setenv("HF_TOKEN", "hf_writer")
    assert "can't be a repository" in featcal(merge.recipe, merge.merged, "--push-to-hub", "a/b/c").errors
    both = ("--push-to-hub", "me/sums", "--no-write-model-card")
    assert "is pushed with its card" in featcal(merge.recipe, merge.merged, *both).errors
    (merge.root / "base" / "README.md").write_text("---\nlicense: gemma\n---\n")
    outcome = featcal(merge.recipe, merge.merged, "--push-to-hub", "me/sums")
    assert "add `license:` to the recipe's featcal section" in outcome.errors
    assert contents(merge.merged) == before
    merge.edit_recipe("featcal:\n", "featcal:\n  license: gemma\n")
    outcome = featcal(merge.recipe, merge.merged, "--push-to-hub", "me/sums")
    assert outcome.code == 0, outcome
    assert outcome.output.endswith(f"Pushed {hub.address}/me/sums")
    assert hub.files("me/sums")["README.md"] == (merge.merged / "README.md").read_bytes()
    assert b"# sums\n" in hub.files("me/sums")["README.md"]


def test_the_command_in_a_process_of_its_own_finds_the_hub_by_its_environment(merge: Merge) -> None:
    calibrate(merge.recipe, merge.merged)
    with running_hub() as hub:
        environment = os.environ | {
            "HF_ENDPOINT": hub.address,
            "HF_TOKEN": "hf_writer",
            "HF_HUB_OFFLINE": "0",
            "TRANSFORMERS_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
        }
        command = [sys.executable, "-m", "featcal_hf", "push", str(merge.merged), "me/sums"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert hub.files("me/sums")["model.safetensors"] == (merge.merged / "model.safetensors").read_bytes()
