from __future__ import annotations

import pytest

from featcal_hf.hidden_paths import first_path, hide_paths, hide_paths_in, local_names

REPORT = {
    "parents": [
        {"id": "org/base", "path": "org/base", "folder": "/cache/models--org--base/snapshots/0a1b"},
        {"id": "org/mapped", "path": "org/mapped", "folder": "stand-ins/mapped"},
        {"id": None, "path": "./experts/a", "folder": "experts/a"},
        {"id": None, "path": "/models/b", "folder": "/models/b"},
    ],
    "models": {"merged model": {"folder": "work/merged"}, "expert org/x": {"folder": "/x/y", "adapter": "loras/z"}},
    "tasks": {
        "hub": {"kind": "hub", "read_from": "org/rows", "dataset": {"path": "org/rows", "data_files": None}},
        "mapped": {"kind": "file", "read_from": "here/m.jsonl", "dataset": {"path": "org/m", "data_files": None}},
        "local": {
            "kind": "folder",
            "read_from": "data/mine",
            "dataset": {"path": "data/mine", "data_files": {"train": ["parts/1.csv", "2.csv"]}},
        },
    },
}


def test_local_paths_of_a_report_are_known_by_their_ids_or_their_last_parts() -> None:
    assert local_names(REPORT) == {
        "/cache/models--org--base/snapshots/0a1b": "org/base",
        "stand-ins/mapped": "org/mapped",
        "./experts/a": "./a",
        "experts/a": "./a",
        "/models/b": "./b",
        "work/merged": "./merged",
        "/x/y": "./y",
        "loras/z": "./z",
        "here/m.jsonl": "org/m",
        "data/mine": "./mine",
        "parts/1.csv": "./1.csv",
    }


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("model: experts/a\n", "model: ./a\n"),
        ("model: experts/ab\n", "model: experts/ab\n"),
        ("model: experts/a.v2\n", "model: experts/a.v2\n"),
        ("model: org/experts/a\n", "model: org/experts/a\n"),
        ("see experts/a.", "see ./a."),
        ("/models/b+/models/b", "./b+./b"),
        ("rows: /home/someone/rows.jsonl, more", "rows: ./rows.jsonl, more"),
        ("(/home/someone/rows)", "(./rows)"),
        ("cache=/home/someone/rows", "cache=./rows"),
        ("~/models/x and ~someone/y/z", "./x and ./z"),
        (r"C:\Users\someone\model", "./model"),
        ("D:/models/x", "./x"),
        ("file:///home/someone/x", "./x"),
        ("https://huggingface.co/org/base", "https://huggingface.co/org/base"),
        ("http://x.org:8080/a/b", "http://x.org:8080/a/b"),
        ("yes/no, 1/2, org/base and </svg>", "yes/no, 1/2, org/base and </svg>"),
        ("/no_think", "/no_think"),
    ],
)
def test_a_local_path_is_replaced_and_nothing_else(text: str, hidden: str) -> None:
    assert hide_paths(text, local_names(REPORT)) == hidden


@pytest.mark.parametrize(
    ("page", "hidden"),
    [
        ("src=/home/someone/x.png", "src=/home/someone/x.png"),
        ("'/home/someone/x.png'", "'./x.png'"),
        ("data:image/png;base64,AAA+/tmp/AAA/BBB=", "data:image/png;base64,AAA+/tmp/AAA/BBB="),
        ("a / b /c/d/ e", "a / b /c/d/ e"),
    ],
)
def test_in_a_page_only_folders_where_people_keep_things_count(page: str, hidden: str) -> None:
    assert hide_paths(page, code=True) == hidden


def test_paths_in_json_are_replaced_in_keys_and_values_after_escaped_line_breaks_too() -> None:
    value = {"expert /models/b": ["base:\n/home/someone/x", 3, None, {"folder": "work/merged"}]}
    assert hide_paths_in(value, local_names(REPORT)) == {
        "expert ./b": ["base:\n./x", 3, None, {"folder": "./merged"}],
    }


def test_the_first_path_is_what_an_error_can_name() -> None:
    assert first_path("fine: org/base\nnot fine: /home/someone/x") == "/home/someone/x"
    assert first_path("https://huggingface.co/org/base/blob/main/README.md") is None
