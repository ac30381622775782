"""What a user can get wrong: one clear error before any forward, and the merged folder as it was."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from tiny_merge import (
    HOLDOUT,
    ROWS,
    VOCABULARY,
    WORDS,
    Merge,
    Outcome,
    all_but_work,
    build_llama,
    change_tensors,
    contents,
    copy_merge,
    word_tokenizer,
)

from featcal_hf.save import work_folder
from featcal_hf.writers import SafetensorsWriter

Featcal = Callable[..., Outcome]
TENSOR = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def no_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*arguments: Any, **options: Any) -> None:
        pytest.fail("a forward was started")

    monkeypatch.setattr("featcal_hf.run.calibrate_blocks", started)


@pytest.fixture
def refused(featcal: Featcal, no_forward: None) -> Callable[..., str]:
    """Run the command on a merge that must be refused before any forward; gives the message."""

    def run(merge: Merge, code: int = 1, *options: str | Path) -> str:
        before = contents(merge.root)
        outcome = featcal(merge.recipe, merge.merged, *options)
        assert outcome.code == code, outcome
        assert contents(merge.root) == before
        assert len(re.findall(r"(?:^| )[eE]rror: ", outcome.errors)) == 1
        assert "Traceback" not in outcome.errors
        return outcome.errors

    return run


class Case(NamedTuple):
    """A way to break a merge, and what the message must say."""

    spoil: Callable[[Merge], None]
    says: tuple[str, ...]
    code: int = 1


def _edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _nan_in(folder: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[TENSOR][3, 5] = float("nan")

    change_tensors(folder / "model.safetensors", spoil)


def _drop_from(folder: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[TENSOR]

    change_tensors(folder / "model.safetensors", spoil)


def _replace_expert(merge: Merge, **shape: int) -> None:
    build_llama(**shape).save_pretrained(merge.expert)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _unknown_task(merge: Merge) -> None:
    merge.edit_recipe(f"{{model: {merge.expert}, dataset", "{model: org/x, dataset")


def _task_missing(merge: Merge) -> None:
    lines = merge.recipe.read_text().splitlines(keepends=True)
    merge.recipe.write_text("".join(line for line in lines if f"dataset: {merge.root}/b.jsonl" not in line))


def _no_expert(merge: Merge) -> None:
    shutil.rmtree(merge.expert)


def _adapter(merge: Merge) -> None:
    shutil.rmtree(merge.expert)
    merge.expert.mkdir()
    settings = {"peft_type": "LORA", "base_model_name_or_path": str(merge.base), "task_type": "CAUSAL_LM"}
    (merge.expert / "adapter_config.json").write_text(json.dumps(settings))
    (merge.expert / "adapter_model.safetensors").write_bytes(b"")


def _adapter_as_merged(merge: Merge) -> None:
    (merge.merged / "config.json").rename(merge.merged / "adapter_config.json")


def _other_boundaries(merge: Merge) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<unk>", "<pad>", *sorted(set("".join(WORDS)))]
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>")
    fast.save_pretrained(merge.expert)


def _no_column(merge: Merge) -> None:
    merge.edit_recipe("text: text", "text: txet")


def _no_rows(merge: Merge) -> None:
    merge.data.write_text("")


def _no_tokens(merge: Merge) -> None:
    merge.data.write_text('{"text": ""}\n{"text": "  "}\n')


def _index(merge: Merge, **changes: str) -> None:
    names = {name: "model.safetensors" for name in load_file(merge.merged / "model.safetensors")}
    (merge.merged / "model.safetensors").rename(merge.merged / "model-00001-of-00001.safetensors")
    weight_map = {**dict.fromkeys(names, "model-00001-of-00001.safetensors"), **changes}
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (merge.merged / "model.safetensors.index.json").write_text(text)


def _shard_missing(merge: Merge) -> None:
    _index(merge, **{TENSOR: "model-00002-of-00002.safetensors"})


def _index_lists_absent(merge: Merge) -> None:
    _index(merge, **{"model.layers.7.absent.weight": "model-00001-of-00001.safetensors"})


def _index_escapes(merge: Merge) -> None:
    shutil.copy(merge.merged / "model.safetensors", merge.root / "escape.safetensors")
    _index(merge, **{TENSOR: "../escape.safetensors"})


def _stale_index(merge: Merge) -> None:
    shutil.copy(merge.merged / "model.safetensors", merge.root / "new.safetensors")
    _index(merge)
    (merge.root / "new.safetensors").rename(merge.merged / "model.safetensors")


def _stale_and_empty_index(merge: Merge) -> None:
    (merge.merged / "model.safetensors.index.json").write_text('{"weight_map": {}}')


def _index_no_json(merge: Merge) -> None:
    (merge.merged / "model.safetensors.index.json").write_bytes(b"\xff\xfe not json")


def _quantised(folder: Path) -> None:
    _edit_config(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})


def _other_family(merge: Merge) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    shutil.rmtree(merge.expert)
    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=24)).save_pretrained(merge.expert)


def _other_merged(merge: Merge) -> None:
    from transformers import ResNetConfig, ResNetModel

    shutil.rmtree(merge.merged)
    ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])).save_pretrained(merge.merged)


def _nested_pickle(merge: Merge) -> None:
    state = load_file(merge.merged / "model.safetensors")
    (merge.merged / "model.safetensors").unlink()
    torch.save({"model": state, "step": 3}, merge.merged / "pytorch_model.bin")


def _pickle_truncated(merge: Merge) -> None:
    state = load_file(merge.merged / "model.safetensors")
    (merge.merged / "model.safetensors").unlink()
    torch.save(state, merge.merged / "pytorch_model.bin")
    _truncate(merge.merged / "pytorch_model.bin")


CASES = {
    "a task names an unknown expert": Case(_unknown_task, ("'org/x'", "not among the merge's experts", "/a"), 2),
    "an expert has no task": Case(_task_missing, ("has no task for the expert", "/b", "add one"), 2),
    "an expert is not there": Case(_no_expert, ("/a is not a folder", "check the name")),
    "an adapter is given as a model": Case(_adapter, ("/a is a PEFT adapter", "BASE_MODEL+")),
    "the merged folder is an adapter": Case(_adapter_as_merged, ("/merged is a PEFT adapter",)),
    "an expert's tokens have other boundaries": Case(_other_boundaries, ("task 'a'", "cut the text differently")),
    "an expert's depth differs": Case(
        lambda merge: _replace_expert(merge, num_hidden_layers=2), ("/a has 2 blocks", "merged model has 3")
    ),
    "an expert's width differs": Case(
        lambda merge: _replace_expert(merge, hidden_size=48), ("/a", "in block layers.0 is (48,)", "is (32,)")
    ),
    "an expert is of another family": Case(
        _other_family, ("/a is a gpt2 model", "the merged model is a llama (LlamaForCausalLM)")
    ),
    "a column is not there": Case(_no_column, ("task 'a'", "'txet'", "it has text", "did you mean 'text'")),
    "a dataset is empty": Case(_no_rows, ("task 'a'", "a.jsonl", "has no rows")),
    "no row gives a token": Case(_no_tokens, ("task 'a'", "none of the 2 rows gives a token")),
    "an expert holds NaN": Case(lambda merge: _nan_in(merge.expert), ("expert", "/a/model.safetensors", TENSOR)),
    "the merged model holds NaN": Case(lambda merge: _nan_in(merge.merged), ("merged model", TENSOR, "NaN")),
    "the base holds NaN": Case(lambda merge: _nan_in(merge.base), ("base model", TENSOR, "NaN")),
    "the merged model is truncated": Case(
        lambda merge: _truncate(merge.merged / "model.safetensors"), ("model.safetensors can't be read", "truncated")
    ),
    "an expert is truncated": Case(
        lambda merge: _truncate(merge.expert / "model.safetensors"), ("/a/model.safetensors can't be read",)
    ),
    "the merged model lacks a tensor": Case(
        lambda merge: _drop_from(merge.merged), ("merged model", "lacks 1 of 30 tensors", TENSOR, "merge again")
    ),
    "an expert lacks a tensor": Case(lambda merge: _drop_from(merge.expert), ("/a lacks 1 of 30 tensors", TENSOR)),
    "the weights are not there": Case(
        lambda merge: (merge.merged / "model.safetensors").unlink(), ("/merged has no model.safetensors",)
    ),
    "a shard is missing": Case(_shard_missing, ("model-00002-of-00002.safetensors, which is not there",)),
    "an index lists absent tensors": Case(
        _index_lists_absent, ("index.json lists 1 tensors", "model.layers.7.absent.weight")
    ),
    "an index leads out of the folder": Case(_index_escapes, ("'../escape.safetensors'", "own folder")),
    "an index is left over beside a new file": Case(_stale_index, ("both", "left over", "Delete what is stale")),
    "an index lists nothing": Case(_stale_and_empty_index, ("index.json lists no tensors",)),
    "an index is no JSON": Case(_index_no_json, ("index.json is not a shard index",)),
    "the merged folder is not there": Case(
        lambda merge: shutil.rmtree(merge.merged), ("/merged is not a folder", "run `mergekit-yaml")
    ),
    "the merged model is quantised": Case(lambda merge: _quantised(merge.merged), ("/merged is quantised",)),
    "an expert is quantised": Case(lambda merge: _quantised(merge.expert), ("/a is quantised", "full-precision")),
    "a class is unknown": Case(
        lambda merge: _edit_config(merge.merged, architectures=["XyzForCausalLM"]),
        ("config.json", "XyzForCausalLM", "expected one class of transformers"),
    ),
    "a class is no model": Case(
        lambda merge: _edit_config(merge.merged, architectures=["LlamaConfig"]),
        ("config.json", "LlamaConfig", "expected one class of transformers"),
    ),
    "a model type is unknown": Case(
        lambda merge: _edit_config(merge.merged, model_type="xyz"), ("/merged/config.json can't be read", "xyz")
    ),
    "a config's value is no number": Case(
        lambda merge: _edit_config(merge.merged, hidden_size="wide"), ("/merged/config.json can't be read", "wide")
    ),
    "a config is no JSON": Case(
        lambda merge: _truncate(merge.merged / "config.json"), ("/merged/config.json can't be read",)
    ),
    "a config has no file": Case(
        lambda merge: (merge.expert / "config.json").unlink(), ("/a has no config.json", "from_pretrained")
    ),
    "the merged model is of another family": Case(
        _other_merged, ("/base is a llama model", "is a resnet (ResNetModel)")
    ),
    "a pickle holds more than tensors by name": Case(_nested_pickle, ("pytorch_model.bin", "tensor", "'model'")),
    "a pickle is truncated": Case(_pickle_truncated, ("pytorch_model.bin can't be read", "truncated")),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_run_is_refused_before_any_forward_when(case: Case, merge: Merge, refused: Callable[..., str]) -> None:
    case.spoil(merge)
    message = refused(merge, case.code)
    for words in case.says:
        assert words in message


class Harmless:
    """Unpickling it makes a folder: what must not happen."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip file", "bare pickle"])
def test_code_in_a_pickled_checkpoint_is_refused_and_not_executed(
    legacy: bool, merge: Merge, refused: Callable[..., str], tmp_path: Path
) -> None:
    mark, path = tmp_path / "executed", merge.expert / "pytorch_model.bin"
    (merge.expert / "model.safetensors").unlink()
    if legacy:
        path.write_bytes(pickle.dumps({"weight": Harmless(mark)}))
    else:
        torch.save({"weight": Harmless(mark)}, path)
    message = refused(merge)
    assert "pytorch_model.bin can't be read" in message
    assert "save it as safetensors" in message
    assert not mark.exists()
    torch.load(path, weights_only=False) if not legacy else pickle.loads(path.read_bytes())
    assert mark.exists(), "the file was harmless all along"


def test_permuted_token_ids_are_calibrated_by_each_models_own_ids(merge: Merge, featcal: Featcal) -> None:
    order = [0, 1, *reversed(range(2, len(VOCABULARY)))]
    word_tokenizer([VOCABULARY[number] for number in order]).save_pretrained(merge.expert)

    def permute(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name][: len(order)] = tensors[name][order]

    plain = copy_merge(merge, merge.root / "plain")
    word_tokenizer(VOCABULARY).save_pretrained(plain.expert)
    change_tensors(merge.expert / "model.safetensors", permute)
    assert featcal(plain.recipe, plain.merged, "--quiet").code == 0
    assert featcal(merge.recipe, merge.merged, "--quiet").code == 0
    report = json.loads((merge.merged / "featcal.json").read_text())
    assert report["tasks"]["a"]["tokenizers"]["same_ids"] is False
    assert report["tasks"]["b"]["tokenizers"]["same_ids"] is True
    expected = load_file(plain.merged / "model.safetensors")
    for name, value in load_file(merge.merged / "model.safetensors").items():
        assert torch.equal(value, expected[name]), name


def test_fewer_rows_than_asked_for_are_used_with_a_warning_that_the_report_keeps(
    merge: Merge, featcal: Featcal
) -> None:
    merge.edit_recipe("samples: 12", "samples: 500")
    outcome = featcal(merge.recipe, merge.merged)
    assert outcome.code == 0
    assert f"wanted 500 rows to calibrate on and {HOLDOUT} to hold out" in outcome.output
    task = json.loads((merge.merged / "featcal.json").read_text())["tasks"]["a"]
    assert task["calibration_rows"] + task["holdout_rows"] == ROWS
    assert any("wanted 500 rows" in warning for warning in task["warnings"])


def test_rows_without_tokens_are_passed_over_with_a_warning(merge: Merge, featcal: Featcal) -> None:
    merge.data.write_text('{"text": ""}\n' * 3 + merge.data.read_text())
    outcome = featcal("check", merge.recipe, merge.merged)
    assert outcome.code == 0
    assert "passed over" in outcome.output
    assert "rows that give no token" in outcome.output


def test_an_output_folder_that_holds_something_is_refused(merge: Merge, refused: Callable[..., str]) -> None:
    output = merge.root / "output"
    output.mkdir()
    (output / "precious.txt").write_text("mine")
    message = refused(merge, 1, "--output", output)
    assert f"--output {output} exists and isn't an empty folder" in message
    assert "leave --output out" in message


def test_an_output_folder_inside_the_merged_one_is_refused(merge: Merge, refused: Callable[..., str]) -> None:
    message = refused(merge, 1, "--output", merge.merged / "calibrated")
    assert "inside" in message


def test_an_output_that_is_a_file_is_refused(merge: Merge, refused: Callable[..., str]) -> None:
    assert "isn't an empty folder" in refused(merge, 1, "--output", merge.data)


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "meta", "cpu:x"])
def test_a_device_that_is_not_there_is_refused(device: str, merge: Merge, refused: Callable[..., str]) -> None:
    assert f"Invalid value for --device: {device} can't be used here" in refused(merge, 2, "--device", device)


def test_a_disk_without_room_is_found_before_the_run(
    merge: Merge, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(merge.root)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=50_000))
    for options in ((), ("--output", merge.root / "output")):
        message = refused(merge, 1, *options)
        assert "0.00 GB free" in message
        assert "free some space" in message


def test_a_disk_that_fills_up_in_the_middle_leaves_the_merged_model_as_it_was(
    merge: Merge, featcal: Featcal, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = SafetensorsWriter.write
    calls: list[int] = []

    def fill_up(writer: SafetensorsWriter, tensors: dict[str, torch.Tensor]) -> None:
        calls.append(len(tensors))
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        written(writer, tensors)

    monkeypatch.setattr(SafetensorsWriter, "write", fill_up)
    before = contents(merge.root)
    outcome = featcal(merge.recipe, merge.merged)
    assert outcome.code == 1
    assert len(calls) == 2
    assert "the disk is full" in outcome.errors
    assert "run the same command again: it goes on from the last finished block" in outcome.errors
    assert all_but_work(merge.root) == before
    assert "going on from block 2 of 3" in featcal("check", merge.recipe, merge.merged).output


@pytest.mark.parametrize(("pickled", "kilobytes"), [(False, 20), (True, 20), (True, 60)])
def test_a_write_that_the_system_refuses_leaves_the_merged_model_as_it_was(
    pickled: bool, kilobytes: int, merge: Merge, featcal: Featcal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of pickles, the smaller limit stops a block's file and the larger one the file of all of them."""
    if pickled:
        torch.save(load_file(merge.merged / "model.safetensors"), merge.merged / "pytorch_model.bin")
        (merge.merged / "model.safetensors").unlink()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(*arguments: Any, **options: Any) -> Any:
        resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes * 1024, hard))
        return work_folder(*arguments, **options)

    before = contents(merge.root)
    try:
        with monkeypatch.context() as patch:
            patch.setattr("featcal_hf.run.work_folder", limit)
            outcome = featcal(merge.recipe, merge.merged)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert outcome.code == 1
    assert "can't be written" in outcome.errors
    assert "run the same command again" in outcome.errors
    assert all_but_work(merge.root) == before
    assert featcal(merge.recipe, merge.merged, "--quiet").code == 0


def test_a_calibrated_folder_is_not_calibrated_twice(merge: Merge, featcal: Featcal) -> None:
    assert featcal(merge.recipe, merge.merged, "--quiet").code == 0
    before = contents(merge.root)
    for command in ("calibrate", "check"):
        outcome = featcal(command, merge.recipe, merge.merged)
        assert outcome.code == 1
        assert "has been calibrated already" in outcome.errors
        assert "merge again with" in outcome.errors
    assert contents(merge.root) == before


@pytest.mark.parametrize("model", ["base", "a"])
@pytest.mark.parametrize("command", ["check", "calibrate"])
def test_an_input_of_the_merge_is_not_calibrated_in_place(
    merge: Merge, featcal: Callable[..., Outcome], command: str, model: str
) -> None:
    before = contents(merge.root / model)
    outcome = featcal(command, merge.recipe, merge.root / model)
    assert outcome.code == 1
    assert re.search(rf"{model} is the recipe's (base model|expert .*), which calibrating in place", outcome.errors)
    assert contents(merge.root / model) == before


def test_a_file_in_place_of_the_merged_folder_is_named(merge: Merge, featcal: Callable[..., Outcome]) -> None:
    outcome = featcal("calibrate", merge.recipe, merge.data)
    assert outcome.code == 1
    assert "a.jsonl is not a folder" in outcome.errors


def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(merge: Merge, featcal: Callable[..., Outcome]) -> None:
    merge.edit_recipe(f"base_model: {merge.base}", "base_model: ./absent")
    outcome = featcal("check", merge.recipe, merge.merged)
    assert outcome.code == 1
    assert "./absent is not a folder here" in outcome.errors
    assert "Hub" not in outcome.errors
