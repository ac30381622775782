"""A tiny merge, made once with the real mergekit-yaml and copied for each test that changes it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from hub_server import Hub, running_hub
from huggingface_hub import constants
from huggingface_hub.utils import _http
from tiny_merge import Merge, Outcome, build_models, copy_merge, run_mergekit, write_recipe

from featcal_hf import cli


@pytest.fixture(scope="session", autouse=True)
def one_quiet_thread() -> Iterator[None]:
    """Models this small are slower on several threads, and much slower where tests share the cores."""
    transformers.utils.logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Merge:
    """The merge that all tests share: read it, don't change it. One float32 file."""
    root = tmp_path_factory.mktemp("merge")
    build_models(root, torch.float32, spread=0.3)
    write_recipe(root, "float32")
    run_mergekit(root / "recipe.yml", root / "merged")
    return Merge(root)


@pytest.fixture(scope="session")
def sharded(pristine: Merge, tmp_path_factory: pytest.TempPathFactory) -> Merge:
    """The same merge in several safetensors shards: read it, don't change it."""
    root = tmp_path_factory.mktemp("sharded")
    copied = copy_merge(pristine, root)
    shutil.rmtree(copied.merged)
    run_mergekit(copied.recipe, copied.merged, "--out-shard-size", "30000")
    assert len(list(copied.merged.glob("model-*.safetensors"))) >= 3
    return copied


@pytest.fixture
def merge(pristine: Merge, tmp_path: Path) -> Merge:
    """A copy of the merge, for one test to change."""
    return copy_merge(pristine, tmp_path)


@pytest.fixture
def featcal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """The command, run in this process as its entry point runs it."""

    def command(*arguments: str | Path) -> Outcome:
        capsys.readouterr()
        monkeypatch.setattr("sys.argv", ["featcal-hf", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        printed = capsys.readouterr()
        return Outcome(code, " ".join(printed.out.split()), " ".join(printed.err.split()))

    return command


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub that this process is logged in to, and nothing else that it could reach."""
    with running_hub() as server:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        monkeypatch.setenv("HF_TOKEN", "hf_writer")
        monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)  # between the library's own tries
        huggingface_hub.utils.close_session()
        yield server
    huggingface_hub.utils.close_session()
