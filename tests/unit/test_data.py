"""The data stage: which rows are chosen, what the models are given for them, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL.Image
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from featcal_hf.data import TaskData, load_task
from featcal_hf.errors import DataError
from featcal_hf.recipe import Task

WORDS = ["<s>", "</s>", "<unk>", "<pad>", "a", "b", "c", "d", "e", "f", "user:", "assistant:", "<half>"]
CHAT_TEMPLATE = "{{ bos_token }}{% for turn in messages %} {{ turn.role }}: {{ turn.content }}{% endfor %}"


def save_tokenizer(
    folder: Path,
    words: list[str] = WORDS,
    *,
    template: str | None = None,
    special: str = "<s> $A </s>",
    characters: bool = False,
    dropped: str | None = None,
    **options: Any,
) -> str:
    """A word-level tokenizer (of single characters with `characters`) that adds <s> and </s>."""
    ids = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    if dropped is not None:
        tokenizer.normalizer = normalizers.Replace(dropped, "")
    if characters:
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=special, special_tokens=[(word, ids[word]) for word in ("<s>", "</s>")]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", **options}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return str(folder)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sentences(count: int) -> list[dict[str, Any]]:
    """Rows of different content: the row's number, spelled with the letters that the tokenizer knows."""
    return [{"text": " ".join("abcdef"[int(digit)] for digit in np.base_repr(i, 6))} for i in range(count)]


def make_task(path: str, *, dataset: dict[str, Any] | None = None, **settings: Any) -> Task:
    source = {} if {"prompt", "messages", "image"} & set(settings) else {"text": "text"}
    return Task.model_validate(
        {"model": "org/math", "name": "math", "dataset": {"path": path, **(dataset or {})}, **source, **settings}
    )


def load(task: Task, student: str, expert: str | None = None, **options: Any) -> TaskData:
    options = {"encoder_decoder": False, **options}
    return load_task(task, student_path=student, expert_path=expert or student, **options)


def refusal(task: Task, student: str, expert: str | None = None, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(task, student, expert, **options)
    message = str(caught.value)
    assert message.startswith("task 'math': ")
    return message


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tokenizer(tmp_path_factory.mktemp("model"), template=CHAT_TEMPLATE)


# Rows


def test_rows_are_those_of_the_library_shuffle_and_held_out_rows_are_others(tmp_path: Path, model: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", sentences(40))
    data = load(make_task(path, samples=10, holdout=4), model)
    order = datasets.Dataset.from_dict({"row": list(range(40))}).shuffle(seed=42)["row"]
    assert data.record["calibration_indices"] == list(order[:10])
    assert data.record["holdout_indices"] == list(order[10:14])
    first = sentences(40)[order[0]]["text"].split()
    ids = [0, *(WORDS.index(word) for word in first), 1]
    assert data.calibration[0].student["input_ids"][0, : len(ids)].tolist() == ids
    assert [len(batch.student["input_ids"]) for batch in data.calibration] == [8, 2]
    assert [len(batch.student["input_ids"]) for batch in data.holdout] == [4]
    assert data.record["warnings"] == []
    json.dumps(data.record)


def test_the_same_seed_gives_the_same_rows_and_another_seed_others(tmp_path: Path, model: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", sentences(40))
    first, again, other = (load(make_task(path, samples=5, seed=seed), model).record for seed in (7, 7, 8))
    assert first == again
    assert first["sha256"] != other["sha256"]
    assert first["calibration_indices"] != other["calibration_indices"]


def test_the_hash_of_the_rows_changes_with_their_content(tmp_path: Path, model: str) -> None:
    rows = sentences(6)
    before = load(make_task(write_rows(tmp_path / "a.jsonl", rows), samples=6, holdout=0), model).record
    rows[3]["text"] += " f"
    after = load(make_task(write_rows(tmp_path / "b.jsonl", rows), samples=6, holdout=0), model).record
    assert before["calibration_indices"] == after["calibration_indices"]
    assert before["sha256"] != after["sha256"]


def test_copies_of_a_calibration_row_are_not_held_out(tmp_path: Path, model: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "a"}] * 20 + [{"text": "b"}] * 20)
    data = load(make_task(path, samples=1, holdout=5), model)
    (calibrated,) = data.calibration[0].student["input_ids"].tolist()
    held_out = data.holdout[0].student["input_ids"].tolist()
    assert len(held_out) == 5
    assert calibrated not in held_out
    assert data.record["duplicate_rows"] > 0


def test_copies_are_not_held_out_where_rows_run_short_either(tmp_path: Path, model: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "a"}] * 20)
    record = load(make_task(path, samples=100, holdout=10), model).record
    assert (record["calibration_rows"], record["holdout_rows"], record["duplicate_rows"]) == (16, 0, 4)


def test_with_too_few_rows_at_most_a_fifth_is_held_out(
    tmp_path: Path, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", sentences(11))
    record = load(make_task(path, samples=100, holdout=10), model).record
    assert (record["calibration_rows"], record["holdout_rows"]) == (9, 2)
    assert not set(record["calibration_indices"]) & set(record["holdout_indices"])
    assert "wanted 100 rows" in record["warnings"][0]
    assert record["warnings"][0] in caplog.text


def test_rows_without_tokens_are_passed_over_counted_and_replaced(tmp_path: Path, model: str) -> None:
    rows = [{"text": text} for text in ("", None, "  \n", "a", "b", "c")]
    record = load(make_task(write_rows(tmp_path / "rows.jsonl", rows), samples=3, holdout=1), model).record
    assert sorted(record["calibration_indices"]) == [3, 4, 5]
    assert record["empty_rows"] == 3
    assert any("3 rows that give no token" in warning for warning in record["warnings"])


def test_text_that_the_tokenizer_drops_altogether_is_passed_over(tmp_path: Path) -> None:
    student = save_tokenizer(tmp_path / "model", dropped="f")
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "f f"}, {"text": "f a"}])
    data = load(make_task(path), student)
    assert data.calibration[0].student["input_ids"].tolist() == [[0, 4, 1]]
    assert data.record["empty_rows"] == 1


def test_a_dataset_of_empty_rows_is_refused(tmp_path: Path, model: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"text": ""}, {"text": " "}])
    assert "none of the 2 rows gives a token" in refusal(make_task(path), model)


def test_a_stream_gives_rows_without_indices(tmp_path: Path, model: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", sentences(30))
    task = make_task(path, dataset={"streaming": True}, samples=10, holdout=5)
    data, again = load(task, model), load(task, model)
    assert data.record["calibration_indices"] is None
    assert (data.record["calibration_rows"], data.record["holdout_rows"]) == (10, 5)
    assert data.record["sha256"] == again.record["sha256"]
    assert torch.equal(data.calibration[0].student["input_ids"], again.calibration[0].student["input_ids"])


# Where the data is


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.json", b'[{"text": "a b"}]'),
        ("rows.jsonl", b'{"text": "a b"}\n'),
        ("rows.jsonl.gz", gzip.compress(b'{"text": "a b"}\n', mtime=0)),
        ("rows.csv", b"text,label\na b,1\n"),
        ("rows.tsv", b"label\ttext\n1\ta b\n"),
        ("rows.txt", b"a b\n"),
    ],
)
def test_a_local_file_is_read_by_its_ending(tmp_path: Path, model: str, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    data = load(make_task(str(tmp_path / name)), model)
    assert data.calibration[0].student["input_ids"].tolist() == [[0, 4, 5, 1]]
    assert data.record["kind"] == "file"


def test_a_parquet_file_is_read(tmp_path: Path, model: str) -> None:
    datasets.Dataset.from_list([{"text": "a b"}]).to_parquet(tmp_path / "rows.parquet")
    data = load(make_task(str(tmp_path / "rows.parquet")), model)
    assert data.calibration[0].student["input_ids"].tolist() == [[0, 4, 5, 1]]


def test_a_folder_is_read_split_by_split_and_an_unknown_split_is_answered_with_those_there_are(
    tmp_path: Path, model: str
) -> None:
    write_rows(tmp_path / "train.jsonl", [{"text": "a"}])
    write_rows(tmp_path / "test.jsonl", [{"text": "b"}])
    data = load(make_task(str(tmp_path), dataset={"split": "test"}), model)
    assert data.calibration[0].student["input_ids"].tolist() == [[0, 5, 1]]
    for streaming in (False, True):
        message = refusal(make_task(str(tmp_path), dataset={"split": "dev", "streaming": streaming}), model)
        assert "dev" in message
        assert "'train', 'test'" in message
    assert "Available: ['default']" in refusal(make_task(str(tmp_path), dataset={"name": "main"}), model)


def test_a_saved_dataset_is_read_with_its_splits(tmp_path: Path, model: str) -> None:
    rows = {"train": ["a", "b", "c"], "test": ["d", "e"]}
    splits = {name: datasets.Dataset.from_dict({"text": texts}) for name, texts in rows.items()}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "both")
    splits["train"].save_to_disk(tmp_path / "one")
    part = load(make_task(str(tmp_path / "both"), dataset={"split": "test[1:]"}), model)
    assert part.calibration[0].student["input_ids"].tolist() == [[0, 8, 1]]
    assert load(make_task(str(tmp_path / "one"), holdout=0), model).record["calibration_rows"] == 3
    message = refusal(make_task(str(tmp_path / "both"), dataset={"split": "validation"}), model)
    assert "'train', 'test'" in message


def test_a_local_folder_wins_over_a_hub_id(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "rows").mkdir(parents=True)
    write_rows(tmp_path / "org" / "rows" / "train.jsonl", [{"text": "a"}])
    monkeypatch.chdir(tmp_path)
    assert load(make_task("org/rows"), model).record["kind"] == "folder"
    assert "nor a dataset that the Hub gives" in refusal(make_task("org/others"), model)


def test_a_hub_dataset_is_asked_for_as_given_and_its_commit_recorded(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789" * 4
    asked: dict[str, Any] = {}

    def load_dataset(path: str, **options: Any) -> datasets.Dataset:
        asked.update(options, path=path)
        rows = datasets.Dataset.from_list([{"text": "a"}])
        rows.info.download_checksums = {f"hf://datasets/org/rows@{commit}/train.parquet": {}}
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    given = {"name": "main", "split": "dev", "revision": "v1", "data_files": "x.csv", "streaming": False}
    record = load(make_task("org/rows", dataset=given), model).record
    assert asked == {"path": "org/rows", **given}
    assert record["dataset"] == {"path": "org/rows", **given}
    assert (record["kind"], record["commit"]) == ("hub", commit)


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.csv", "empty.txt"])
def test_an_empty_file_is_refused(tmp_path: Path, model: str, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    assert "has no rows" in refusal(make_task(str(tmp_path / name)), model)


def test_a_table_of_headings_alone_is_refused(tmp_path: Path, model: str) -> None:
    (tmp_path / "rows.csv").write_text("text,label\n")
    assert "has no rows" in refusal(make_task(str(tmp_path / "rows.csv")), model)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_malformed_file_is_refused_with_the_reason(tmp_path: Path, model: str, streaming: bool) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text":\n')
    message = refusal(make_task(str(tmp_path / "rows.jsonl"), dataset={"streaming": streaming}), model)
    assert "rows.jsonl' can't be read: JSON parse error" in message


def test_a_path_that_is_not_there_is_refused(tmp_path: Path, model: str) -> None:
    assert f"nothing at {tmp_path / 'rows.jsonl'}" in refusal(make_task(str(tmp_path / "rows.jsonl")), model)


def test_a_folder_with_nothing_readable_is_refused(tmp_path: Path, model: str) -> None:
    (tmp_path / "weights.bin").write_bytes(b"0")
    assert "can't be read: No (supported) data files" in refusal(make_task(str(tmp_path)), model)


def test_settings_that_a_file_has_no_use_for_are_refused(tmp_path: Path, model: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", sentences(3))
    assert "`name` is 'main': leave it out" in refusal(make_task(path, dataset={"name": "main"}), model)


@pytest.mark.parametrize(
    "settings",
    [{"text": "txet"}, {"prompt": "Q: {txet}"}, {"prompt": "{label}", "completion": "{label:{txet}}"}],
)
def test_a_missing_column_is_answered_with_those_there_are(
    tmp_path: Path, model: str, settings: dict[str, Any]
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "a", "label": 1}])
    message = refusal(make_task(path, **settings), model)
    assert "'txet'" in message
    assert "(it has text, label); did you mean 'text'?" in message


# Text


def test_rows_are_padded_on_the_right_and_padding_is_masked(tmp_path: Path, model: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "a b c"}, {"text": "d"}])
    data = load(make_task(path, holdout=0), model)
    batch = data.calibration[0].student
    rows = sorted(zip(batch["input_ids"].tolist(), batch["attention_mask"].tolist(), strict=True))
    assert rows == [([0, 4, 5, 6, 1], [1, 1, 1, 1, 1]), ([0, 7, 1, 3, 3], [1, 1, 1, 0, 0])]
    assert (data.record["tokens"], data.record["longest"]) == (8, 5)


def test_without_a_padding_token_rows_are_padded_with_the_end_token(tmp_path: Path) -> None:
    student = save_tokenizer(tmp_path / "model", pad_token=None)
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "a b c"}, {"text": "d"}])
    batch = load(make_task(path, holdout=0), student).calibration[0].student
    assert [0, 7, 1, 1, 1] in batch["input_ids"].tolist()
    assert batch["attention_mask"].sum() == 8


@pytest.mark.parametrize(
    ("max_length", "max_positions", "model_max_length"), [(4, None, 99), (99, 4, 99), (99, None, 4)]
)
def test_texts_are_cut_to_the_least_limit(
    tmp_path: Path, max_length: int, max_positions: int | None, model_max_length: int
) -> None:
    student = save_tokenizer(tmp_path / "m", model_max_length=model_max_length, truncation_side="left")
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "a b c d e f"}, {"text": "f a"}])
    task = make_task(path, holdout=0, max_length=max_length)
    data = load(task, student, max_positions=max_positions)
    assert sorted(data.calibration[0].student["input_ids"].tolist()) == [[0, 4, 5, 1], [0, 9, 4, 1]]
    assert data.record["truncated_rows"] == 1


def test_a_limit_without_room_for_text_is_refused(tmp_path: Path, model: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", sentences(3))
    assert "raise `max_length` (it is 2)" in refusal(make_task(path, max_length=2), model)


def test_prompt_and_completion_are_filled_in_and_joined(tmp_path: Path, model: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"q": "a", "n": 2}])
    words = [*WORDS, "{q}", "2.0"]
    student = save_tokenizer(tmp_path / "model", words)
    task = make_task(path, prompt="{{q}} {q}", completion=" {n:.1f}")
    assert load(task, student).calibration[0].student["input_ids"].tolist() == [[0, 13, 4, 14, 1]]


def test_a_null_in_a_template_is_passed_over_instead_of_spelled_out(tmp_path: Path, model: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"q": "a", "r": None}, {"q": "b", "r": "c"}])
    record = load(make_task(path, prompt="{q}", completion=" {r}"), model).record
    assert record["calibration_indices"] == [1]
    assert record["empty_rows"] == 1


def test_a_text_that_begins_with_bos_gets_no_second_one(tmp_path: Path) -> None:
    student = save_tokenizer(tmp_path / "model")
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "<s> a b c"}])
    assert load(make_task(path), student).calibration[0].student["input_ids"].tolist() == [[0, 4, 5, 6, 1]]
    cut = load(make_task(path, max_length=4), student).calibration[0].student
    assert cut["input_ids"].tolist() == [[0, 4, 5, 1]]


def test_an_encoder_decoder_reads_the_prompt_and_labels_are_padded_out_of_the_loss(tmp_path: Path, model: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"q": "a", "r": "b c d"}, {"q": "e f", "r": "b"}])
    task = make_task(path, prompt="{q}", completion="{r}", holdout=0)
    data = load(task, model, encoder_decoder=True)
    batch = data.calibration[0].student
    rows = sorted(zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True))
    assert rows == [([0, 4, 1, 3], [0, 5, 6, 7, 1]), ([0, 8, 9, 1], [0, 5, 1, -100, -100])]
    assert (data.record["tokens"], data.record["target_tokens"]) == (7, 8)


def test_words_stand_for_class_labels(tmp_path: Path, model: str) -> None:
    features = datasets.Features({"q": datasets.Value("string"), "label": datasets.ClassLabel(names=["ja", "nein"])})
    rows = [{"q": "a", "label": 0}, {"q": "b", "label": 1}, {"q": "c", "label": None}]
    datasets.Dataset.from_list(rows, features=features).save_to_disk(tmp_path / "rows")
    task = make_task(str(tmp_path / "rows"), prompt="{q}", completion=" {label}", words={"label": {0: "d", 1: "e"}})
    data = load(task, model)
    rows = [row for batch in data.calibration for row in batch.student["input_ids"].tolist()]
    assert sorted(rows) == [[0, 4, 7, 1], [0, 5, 8, 1]]
    assert data.record["empty_rows"] == 1
    few = make_task(str(tmp_path / "rows"), prompt="{q}", completion=" {label}", words={"label": {1: "e"}})
    assert "column 'label' holds 0, and `words` has only 1; add it there" in refusal(few, model)


def test_an_encoder_decoder_needs_prompt_and_completion(tmp_path: Path, model: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", sentences(3))
    assert "both `prompt` and `completion`" in refusal(make_task(path), model, encoder_decoder=True)


@pytest.mark.parametrize(
    "turns",
    [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
        [{"role": None, "from": "human", "value": "a"}, {"role": "assistant", "content": "b", "from": None}],
    ],
)
def test_conversations_go_through_the_chat_template_without_a_second_bos(
    tmp_path: Path, model: str, turns: list[dict[str, Any]]
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"chat": turns}, {"chat": []}])
    data = load(make_task(path, messages="chat"), model)
    assert data.calibration[0].student["input_ids"].tolist() == [[0, 10, 4, 11, 5]]
    assert data.record["empty_rows"] == 1


def test_a_conversation_is_written_once_with_the_template_of_the_merged_model(tmp_path: Path, model: str) -> None:
    expert = save_tokenizer(tmp_path / "expert", template="{{ messages[0].content }}")
    path = write_rows(tmp_path / "rows.jsonl", [{"chat": [{"role": "user", "content": "a"}]}])
    (batch,) = load(make_task(path, messages="chat"), model, expert).calibration
    assert batch.expert["input_ids"].tolist() == [[0, 10, 4]]


def test_a_missing_chat_template_and_a_refused_conversation_are_explained(tmp_path: Path) -> None:
    rows = [{"chat": [{"role": "user", "content": "a"}]}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    bare = save_tokenizer(tmp_path / "bare")
    assert "needs a chat template" in refusal(make_task(path, messages="chat"), bare)
    strict = save_tokenizer(tmp_path / "strict", template="{{ raise_exception('no users') }}")
    message = refusal(make_task(path, messages="chat"), strict)
    assert "row 0: " in message
    assert "no users" in message


def test_a_template_that_writes_the_date_is_given_a_fixed_one_or_warned_about(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"chat": [{"role": "user", "content": "a"}]}])
    llama = "{% if not date_string is defined %}{% set date_string = strftime_now('%d') %}{% endif %}{{ date_string }}"
    fixed = save_tokenizer(tmp_path / "fixed", [*WORDS, "26", "Jul", "2024"], template=llama)
    data = load(make_task(path, messages="chat", holdout=0, samples=1), fixed)
    assert data.calibration[0].student["input_ids"].tolist() == [[13, 14, 15]]
    assert data.record["warnings"] == []
    today = save_tokenizer(tmp_path / "today", template="{{ strftime_now('%d') }}")
    record = load(make_task(path, messages="chat", holdout=0, samples=1), today).record
    assert "today's date" in record["warnings"][0]


# Two tokenizers


def test_equal_tokenizers_share_one_set_of_tensors(tmp_path: Path, model: str) -> None:
    expert = save_tokenizer(tmp_path / "expert")
    path = write_rows(tmp_path / "rows.jsonl", sentences(20))
    data = load(make_task(path, samples=10, holdout=4), model, expert)
    assert all(batch.expert is batch.student for batch in data.calibration + data.holdout)
    assert data.record["tokenizers"] == {"student": model, "expert": expert, "same_ids": True}


def test_a_permuted_vocabulary_gives_each_model_its_own_ids(tmp_path: Path, model: str) -> None:
    expert = save_tokenizer(tmp_path / "expert", WORDS[::-1])
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "a b c"}, {"text": "d"}])
    (batch,) = load(make_task(path, holdout=0), model, expert).calibration
    # Word k of the one is word 12 - k of the other, padding too.
    assert torch.equal(batch.expert["input_ids"], 12 - batch.student["input_ids"])
    assert torch.equal(batch.expert["attention_mask"], batch.student["attention_mask"])


def test_tokenizers_that_cut_differently_are_refused_with_the_first_place(tmp_path: Path, model: str) -> None:
    expert = save_tokenizer(tmp_path / "expert", characters=True)
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "a"}, {"text": "b cd"}])
    message = refusal(make_task(path, holdout=0), model, expert)
    assert "row 1: " in message
    assert "token 2 is 'cd' (characters 2 to 4) in the merged model and ' ' (characters 1 to 2)" in message
    assert "tokenizer_source" in message


def test_tokenizers_with_other_special_tokens_are_refused(tmp_path: Path, model: str) -> None:
    expert = save_tokenizer(tmp_path / "expert", special="<s> $A")
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "a"}])
    message = refusal(make_task(path), model, expert)
    assert "token 2 is a special token in the merged model and past the end in the expert" in message


def test_an_expert_without_tokenizer_is_given_that_of_the_merged_model(tmp_path: Path, model: str) -> None:
    (tmp_path / "expert").mkdir()
    (tmp_path / "expert" / "config.json").write_text('{"model_type": "llama"}')
    path = write_rows(tmp_path / "rows.jsonl", sentences(3))
    data = load(make_task(path), model, str(tmp_path / "expert"))
    assert data.record["tokenizers"] == {"student": model, "expert": model, "same_ids": True}


def test_a_merged_model_without_tokenizer_is_refused(tmp_path: Path, model: str) -> None:
    (tmp_path / "merged").mkdir()
    path = write_rows(tmp_path / "rows.jsonl", sentences(3))
    message = refusal(make_task(path), str(tmp_path / "merged"), model)
    assert f"{tmp_path / 'merged'} has none of tokenizer.json" in message


# Images


def save_processor(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"image_processor_type": "ViTImageProcessor", "size": {"height": 2, "width": 2}, "do_normalize": False}
    (folder / "preprocessor_config.json").write_text(json.dumps(config))
    return str(folder)


def save_grey(path: Path, level: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.new("L", (4, 4), level).save(path)


def test_a_folder_of_grey_images_becomes_rgb_pixels(tmp_path: Path) -> None:
    for number, level in enumerate((0, 51, 255)):
        save_grey(tmp_path / "images" / f"class{number % 2}" / f"{number}.png", level)
    (tmp_path / "merged").mkdir()
    base = save_processor(tmp_path / "base")
    task = make_task(str(tmp_path / "images"), image="image", holdout=0)
    data = load(task, str(tmp_path / "merged"), processor_paths=[base])
    (batch,) = data.calibration
    assert batch.expert is batch.student
    assert set(batch.student) == {"pixel_values"}
    pixels = batch.student["pixel_values"]
    assert (pixels.shape, pixels.dtype) == ((3, 3, 2, 2), torch.float32)
    assert sorted(pixels[:, 0, 0, 0].tolist()) == pytest.approx([0.0, 0.2, 1.0])
    assert torch.equal(pixels[:, 0], pixels[:, 2])
    assert data.record["processor"]["path"] == base
    assert (data.record["kind"], data.record["tokenizers"]) == ("imagefolder", None)


def test_no_image_processor_anywhere_is_refused_with_the_places(tmp_path: Path, model: str) -> None:
    save_grey(tmp_path / "images" / "x" / "0.png", 3)
    message = refusal(make_task(str(tmp_path / "images"), image="image"), model, processor_paths=[str(tmp_path)])
    assert f"none of {model}, {tmp_path} has preprocessor_config.json" in message


def test_paths_of_images_start_from_the_datasets_folder_and_texts_come_along(tmp_path: Path) -> None:
    save_grey(tmp_path / "x" / "0.png", 255)
    student = save_processor(Path(save_tokenizer(tmp_path / "model")))
    rows = [{"image": "x/0.png", "caption": "a b"}]
    task = make_task(write_rows(tmp_path / "rows.jsonl", rows), image="image", text="caption")
    (batch,) = load(task, student).calibration
    assert batch.student["input_ids"].tolist() == [[0, 4, 5, 1]]
    assert batch.student["pixel_values"].eq(1).all()


def test_a_corrupt_image_is_named(tmp_path: Path) -> None:
    save_grey(tmp_path / "images" / "x" / "0.png", 3)
    (tmp_path / "images" / "x" / "1.png").write_bytes(b"\x89PNG no more")
    message = refusal(make_task(str(tmp_path / "images"), image="image"), save_processor(tmp_path / "model"))
    assert "row 1: " in message
    assert f"{tmp_path / 'images' / 'x' / '1.png'}) can't be decoded" in message


def test_only_chosen_images_are_decoded(tmp_path: Path) -> None:
    order = np.random.default_rng(42).permutation(6)
    for number in range(6):
        save_grey(tmp_path / "images" / "x" / f"{number}.png", number)
    (tmp_path / "images" / "x" / f"{order[-1]}.png").write_bytes(b"broken")
    task = make_task(str(tmp_path / "images"), image="image", samples=4, holdout=1)
    record = load(task, save_processor(tmp_path / "model")).record
    assert record["calibration_indices"] == order[:4].tolist()


def test_sixteen_bit_images_are_refused_instead_of_clipped(tmp_path: Path) -> None:
    (tmp_path / "images" / "x").mkdir(parents=True)
    PIL.Image.fromarray(np.full((4, 4), 40000, dtype=np.uint16)).save(tmp_path / "images" / "x" / "0.png")
    message = refusal(make_task(str(tmp_path / "images"), image="image"), save_processor(tmp_path / "model"))
    assert "more than 8 bits a channel" in message
