"""What a reader is told to install is what pip takes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from featcal_hf import origin

GIT = {"url": "https://example.org/featcal.git", "vcs_info": {"vcs": "git", "commit_id": "0a1b2c"}}


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (None, "featcal_hf==1.2.3"),
        (GIT, "featcal_hf @ git+https://example.org/featcal.git@0a1b2c"),
        (
            {"url": "https://example.org/featcal.whl", "archive_info": {}},
            "featcal_hf @ https://example.org/featcal.whl",
        ),
        ({"url": "file:///home/me/featcal", "dir_info": {"editable": True}}, None),
        ({**GIT, "url": "file:///home/me/featcal"}, None),
    ],
)
def test_an_index_a_repository_and_an_archive_can_be_named_and_a_local_folder_can_t(
    told: object, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(version="1.2.3", read_text=lambda name: None if told is None else json.dumps(told))
    monkeypatch.setattr(origin, "distribution", lambda name: found)
    assert origin.requirement() == expected
    if expected is not None:
        assert Requirement(expected).name == "featcal_hf"
