import ast
import io
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console

from featcal_hf import demo_texts
from featcal_hf.demo import demo, recipe_text
from featcal_hf.demo_result import DemoResult, DomainLosses, show_result
from featcal_hf.demo_texts import load_domains, tokenize, train_tokenizer
from featcal_hf.demo_training import BaseSettings, DemoSettings, evaluate, new_model, train_expert
from featcal_hf.errors import CheckpointError, DataError

TINY = DemoSettings(length=16, batch_rows=2, expert_steps=3, calibration_rows=4)
TINY_BASE = BaseSettings(vocabulary=300, width=16, blocks=2, steps=3)
SPLITS = ("train", "calibration", "validation", "heldout")
TEXTS = ["the quick brown fox jumps over the lazy dog, " * 3, "def fox(dog):\n    return dog + 1\n" * 4] * 4


@pytest.fixture(scope="module")
def domains():
    return load_domains()


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, TINY_BASE.vocabulary)


@pytest.fixture
def base(tokenizer):
    return new_model(TINY_BASE, TINY, tokenizer)


def ignore(step, loss):
    pass


def test_no_row_is_in_two_splits_or_twice_in_one(domains):
    for rows in domains.values():
        texts = [text for split in SPLITS for text in getattr(rows, split)]
        assert len(texts) == len(set(texts))


def test_every_split_has_the_rows_it_should(domains):
    assert set(domains) == {"python", "english", "unicode"}
    for rows in domains.values():
        for split, count in demo_texts.SPLIT_ROWS.items():
            assert len(getattr(rows, split)) == count
        assert len(rows.train) > 1000


def test_no_document_is_in_two_splits():
    documents = ["\n".join(f"document {d}, line {line}, {'x' * 400}" for line in range(20)) for d in range(200)]
    rows = demo_texts.split(Path("here"), "made up", documents, seed=0)
    owners = [{text.split(",")[0] for text in getattr(rows, split)} for split in SPLITS]
    assert sum(map(len, owners)) == len(set.union(*owners))


def test_code_rows_come_without_docstrings_and_those_are_the_prose():
    module = ast.parse('"""Say what."""\n\ndef f():\n    """Do it."""\n\nclass C:\n    x = "kept"\n')
    code, prose = demo_texts._code_and_docstrings(module)
    assert code == "def f():\n    pass\n\nclass C:\n    x = 'kept'"
    assert prose == "Say what.\n\nDo it."


def test_too_little_text_is_an_error_that_names_the_domain():
    with pytest.raises(DataError, match=r"here: .*'made up' \(0 training rows"):
        demo_texts.split(Path("here"), "made up", ["short"], seed=0)


def test_rows_fill_the_length_or_are_left_out(tokenizer):
    rows = tokenize(tokenizer, ["a", *TEXTS], TINY.length)
    assert rows.shape == (len(TEXTS), TINY.length)


def test_a_new_model_is_the_same_each_time_and_leaves_the_callers_random_state(tokenizer, base):
    state = torch.random.get_rng_state()
    again = new_model(TINY_BASE, TINY, tokenizer)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in base.state_dict().items())


def test_experts_share_all_but_the_blocks_with_the_base(tokenizer, base):
    before = {name: value.clone() for name, value in base.state_dict().items()}
    expert = train_expert(base, tokenize(tokenizer, TEXTS, TINY.length), TINY, ignore).state_dict()
    for name, value in base.state_dict().items():
        assert torch.equal(value, before[name])
        assert torch.equal(expert[name], value) == (not name.startswith("model.layers.")), name


def test_training_is_the_same_each_time_and_lowers_the_loss(tokenizer, base):
    rows = tokenize(tokenizer, TEXTS, TINY.length)
    first, second = (train_expert(base, rows, TINY, ignore) for _ in range(2))
    assert evaluate(first, rows) == evaluate(second, rows) < evaluate(base, rows)


def test_the_recipe_merges_by_task_arithmetic_and_binds_every_expert_to_its_rows():
    folder = Path("/models")
    experts = {"python": "/models/python", "english": "/models/base+/models/adapter"}
    recipe = yaml.safe_load(recipe_text(folder, experts, TINY, {"alpha": 0.5}))
    assert recipe == {
        "merge_method": "task_arithmetic",
        "base_model": "/models/base",
        "models": [
            {"model": "/models/python", "parameters": {"weight": 1.0}},
            {"model": "/models/base+/models/adapter", "parameters": {"weight": 1.0}},
        ],
        "dtype": "float32",
        "featcal": {
            "samples": 4,
            "max_length": 16,
            "rho": 1.0,
            "alpha": 0.5,
            "tasks": [
                {
                    "model": "/models/python",
                    "name": "python",
                    "dataset": {"path": "/models/python-calibration.jsonl"},
                    "text": "text",
                },
                {
                    "model": "/models/base+/models/adapter",
                    "name": "english",
                    "dataset": {"path": "/models/english-calibration.jsonl"},
                    "text": "text",
                },
            ],
        },
    }


def test_the_share_recovered_is_of_the_gap_between_merged_and_expert():
    first = DomainLosses("a", base=5.0, expert=2.0, merged=4.0, calibrated=2.5)
    second = DomainLosses("b", base=5.0, expert=2.0, merged=3.0, calibrated=2.75)
    result = DemoResult((first, second), (), 1.0, modules=18, blocks=2, seconds={"merge": 1.0}, folder=None)
    assert (first.recovered, second.recovered, result.recovered) == (0.75, 0.25, 0.5)
    output = io.StringIO()
    show_result(Console(file=output, width=120), result)
    for text in ("4.000 (54.6)", "2.500 (12.2)", "75%", "50%", "weight 1 ", "18 modules in 2 blocks", "merge 1 s"):
        assert text in output.getvalue()


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(CheckpointError, match="isn't empty"):
        demo(tmp_path)


def test_a_path_that_mergekit_would_take_apart_is_refused_before_anything_is_made(tmp_path):
    with pytest.raises(CheckpointError, match="holds @ or"):
        demo(tmp_path / "me@home")
    assert not (tmp_path / "me@home").exists()


@pytest.mark.parametrize(("base", "said"), [(5.0, False), (3.0, True)])
def test_a_merge_that_is_worse_than_its_base_is_said_to_be(base, said):
    losses = DomainLosses("a", base=base, expert=2.0, merged=4.0, calibrated=2.5)
    output = io.StringIO()
    show_result(Console(file=output, width=120), DemoResult((losses,), (), 1.0, 18, 2, {}, None))
    assert ("worse than its base" in output.getvalue()) == said


def test_a_merge_as_good_as_its_expert_has_no_gap_to_recover():
    losses = DomainLosses("a", base=5.0, expert=2.0, merged=2.0, calibrated=2.5)
    output = io.StringIO()
    show_result(Console(file=output, width=120), DemoResult((losses,), (), 1.0, 18, 2, {}, None))
    assert output.getvalue().count("no gap") == 2
