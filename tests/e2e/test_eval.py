"""`featcal-hf eval`: metrics of experts, merged and calibrated models, on rows that calibration never used."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers as hf
import yaml
from families import FAMILIES, TASKS, base_model, expert_model, save_side_files, write_data
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from tiny_merge import SAMPLES, WORDS, Merge, Outcome, build_llama, copy_merge, run_mergekit, word_tokenizer
from tokenizers import processors
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from featcal_hf import CheckpointError, DataError, EvalReport, calibrate, evaluate, evaluation, merge

Featcal = Callable[..., Outcome]
NUMBERS = ["1", "2", "3", "4", "5"]


@dataclass(frozen=True)
class Evaluated:
    """A merge with its calibrated folder, and what was measured."""

    merge: Merge
    report: EvalReport

    @property
    def out(self) -> Path:
        return self.merge.root / "out"


@pytest.fixture(scope="module")
def evaluated(pristine: Merge, tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    """The shared merge, calibrated into `out` and evaluated with its experts: read it, don't change it."""
    copied = copy_merge(pristine, tmp_path_factory.mktemp("evaluated"))
    calibrate(copied.recipe, copied.merged, copied.root / "out")
    return Evaluated(copied, evaluate(copied.recipe, copied.root / "out", copied.merged, experts=True))


def value(report: EvalReport, task: str, metric: str, label: str) -> float | None:
    (line,) = (line for line in report.lines if (line.task, line.metric.name) == (task, metric))
    return line.values[label]


def texts_of(path: Path, indices: Iterable[int], column: str = "text") -> list[str]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [rows[index][column] for index in indices]


@torch.no_grad()
def plain_loss(model: PreTrainedModel, folder: Path, texts: list[str]) -> float:
    """Mean loss per token as anyone would compute it: one text at a time, labels = input_ids."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total = tokens = 0.0
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        count = ids.shape[1] - 1
        total += float(model.eval()(input_ids=ids, labels=ids).loss) * count
        tokens += count
    return total / tokens


def test_losses_equal_those_of_plain_from_pretrained_models(evaluated: Evaluated) -> None:
    root = evaluated.merge.root
    for task in ("a", "b"):
        texts = texts_of(root / f"{task}.jsonl", evaluated.report.tasks[task]["indices"])
        for label, folder in {"expert": root / task, "merged": root / "merged", "calibrated": root / "out"}.items():
            expected = plain_loss(hf.LlamaForCausalLM.from_pretrained(folder), folder, texts)
            assert value(evaluated.report, task, "loss per token", label) == pytest.approx(expected, abs=1e-5)


@torch.no_grad()
def test_drift_equals_a_plain_comparison_of_logits(evaluated: Evaluated) -> None:
    root = evaluated.merge.root
    expert, merged = (hf.LlamaForCausalLM.from_pretrained(root / name).eval() for name in ("a", "merged"))
    tokenizer = AutoTokenizer.from_pretrained(root / "a")
    rows: list[tuple[Tensor, Tensor]] = []
    for text in texts_of(root / "a.jsonl", evaluated.report.tasks["a"]["indices"]):
        ids = tokenizer(text, return_tensors="pt").input_ids
        rows.append((merged(ids).logits[0, :-1], expert(ids).logits[0, :-1]))
    ours, theirs = (torch.cat(side) for side in zip(*rows, strict=True))
    divergence = torch.nn.functional.kl_div(
        ours.log_softmax(1), theirs.log_softmax(1), log_target=True, reduction="batchmean"
    )
    expected = {
        "logit L2 to expert": float((ours - theirs).norm(dim=1).mean()),
        "KL from expert": float(divergence),
        "top-1 as expert": float((ours.argmax(1) == theirs.argmax(1)).float().mean()),
    }
    for metric, number in expected.items():
        assert value(evaluated.report, "a", metric, "merged") == pytest.approx(number, abs=1e-5)


def test_where_not_all_outputs_of_the_expert_can_be_kept_drift_is_of_the_first(
    evaluated: Evaluated, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    vocabulary, kept = 24, 5
    monkeypatch.setattr(evaluation, "KEPT_BYTES", 2 * kept * vocabulary * 4)
    report = evaluate(
        evaluated.merge.recipe, evaluated.out, experts=True, rows=3, batch_size=1, output=tmp_path / "report.json"
    )
    counts = report.tasks["a"]["counts"]["calibrated"]
    assert counts["drift_rows"] == kept < counts["tokens"]
    assert report.tasks["a"]["notes"] == [
        f"drift is of the first {kept} of {counts['tokens']} outputs, as many of the expert's as are kept"
    ]


def test_no_row_that_was_calibrated_on_or_held_out_is_evaluated(evaluated: Evaluated) -> None:
    used = json.loads((evaluated.out / "featcal.json").read_text())["tasks"]
    for task in ("a", "b"):
        file = evaluated.merge.root / f"{task}.jsonl"
        before = {*used[task]["calibration_indices"], *used[task]["holdout_indices"]}
        now = evaluated.report.tasks[task]["indices"]
        assert len(now) == evaluated.report.tasks[task]["rows"] == 4
        assert not before & set(now)
        assert not set(texts_of(file, before)) & set(texts_of(file, now))


def test_the_report_is_json_beside_the_weights_with_what_a_card_needs(evaluated: Evaluated) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    report = json.loads((evaluated.out / "featcal_eval.json").read_text(), parse_constant=refuse)
    assert report == evaluated.report.as_dict()
    assert report["recipe"] == evaluated.merge.recipe.read_text()
    assert report["models"]["calibrated"]["folder"] == str(evaluated.out)
    assert set(report["models"]) == {
        *(f"expert {evaluated.merge.root / name}" for name in ("a", "b")),
        "merged",
        "calibrated",
    }
    first = report["results"][0]
    assert first["task"] == "a"
    assert first["metric"] == "loss per token"
    assert first["higher_is_better"] is False
    assert {"expert", "merged", "calibrated", "has_gap", "recovered"} <= set(first)
    assert len(report["tasks"]["a"]["sha256"]) == 64
    assert report["tasks"]["a"]["dataset"]["split"] == "train"
    assert report["tasks"]["a"]["counts"]["expert"]["tokens"] > 10


def test_the_command_prints_the_table_and_writes_where_it_is_told(evaluated: Evaluated, featcal: Featcal) -> None:
    recipe, root, output = evaluated.merge.recipe, evaluated.merge.root, evaluated.merge.root / "reports" / "one.json"
    arguments = ("eval", recipe, evaluated.out, "--merged", root / "merged", "--output", output)
    outcome = featcal(*arguments, "--rows", "2", "--batch-size", "1")
    assert outcome.code == 0, outcome
    for words in ("Evaluation", "loss per token", "perplexity", "calibrated", "gap recovered", f"Wrote {output}"):
        assert words in outcome.output
    assert "a: 2 rows of train, none of them used for calibration" in outcome.output
    assert "KL from expert" not in outcome.output
    assert "nan" not in outcome.output
    report = json.loads(output.read_text())
    assert "expert" not in report["results"][0]
    assert featcal(*arguments, "--experts", "--quiet") == Outcome(0, "", "")
    assert "expert" in json.loads(output.read_text())["results"][0]


def test_batches_and_padding_leave_every_number_alone(evaluated: Evaluated) -> None:
    recipe, root, output = evaluated.merge.recipe, evaluated.merge.root, evaluated.merge.root / "single.json"
    alone = evaluate(recipe, evaluated.out, root / "merged", experts=True, batch_size=1, output=output)
    for one, other in zip(alone.lines, evaluated.report.lines, strict=True):
        assert one.metric == other.metric
        assert one.values == pytest.approx(other.values, abs=1e-5)


def test_results_of_the_harness_are_added_and_running_it_says_what_to_install(
    evaluated: Evaluated, featcal: Featcal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("featcal_hf.harness.find_spec", lambda name: None)
    for label, score in {"merged": 0.25, "calibrated": 0.5}.items():
        folder = evaluated.out if label == "calibrated" else evaluated.merge.merged
        content = {
            "results": {"gsm8k": {"exact_match,none": score, "exact_match_stderr,none": 0.1}},
            "higher_is_better": {"gsm8k": {"exact_match": True}},
            "config": {"model_args": {"pretrained": str(folder)}},
        }
        (tmp_path / f"{label}.json").write_text(json.dumps(content))
    files = [part for label in ("merged", "calibrated") for part in ("--lm-eval-results", tmp_path / f"{label}.json")]
    output = tmp_path / "report.json"
    command = ("eval", evaluated.merge.recipe, evaluated.out, "--merged", evaluated.merge.merged, "--output", output)
    outcome = featcal(*command, *files)
    assert outcome.code == 0, outcome
    assert "exact_match" in outcome.output
    (line,) = json.loads(output.read_text())["lm_eval"]
    assert (line["task"], line["merged"], line["calibrated"]) == ("gsm8k", 0.25, 0.5)
    refused = featcal(*command, "--lm-eval", "gsm8k")
    assert refused.code == 1
    assert 'pip install "featcal_hf[lm-eval]"' in refused.errors


def test_the_harness_is_run_on_the_merged_and_the_calibrated_model(
    evaluated: Evaluated, featcal: Featcal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a stand-in for the harness, which is no dependency."""
    ran: list[dict[str, Any]] = []

    def simple_evaluate(**arguments: Any) -> dict[str, Any]:
        ran.append(arguments)
        return {"results": {"arc_easy": {"acc,none": 0.1 * len(ran)}}, "higher_is_better": {"arc_easy": {"acc": True}}}

    harness = ModuleType("lm_eval")
    harness.__spec__ = ModuleSpec("lm_eval", None)
    monkeypatch.setattr(harness, "simple_evaluate", simple_evaluate, raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", harness)
    output = tmp_path / "report.json"
    command = ("eval", evaluated.merge.recipe, evaluated.out, "--merged", evaluated.merge.merged, "--output", output)
    outcome = featcal(*command, "--lm-eval", "arc_easy, gsm8k", "--batch-size", "4")
    assert outcome.code == 0, outcome
    assert [arguments["model_args"]["pretrained"] for arguments in ran] == [
        str(evaluated.merge.merged),
        str(evaluated.out),
    ]
    assert ran[0]["tasks"] == ["arc_easy", "gsm8k"]
    (line,) = json.loads(output.read_text())["lm_eval"]
    assert (line["merged"], line["calibrated"]) == pytest.approx((0.1, 0.2))
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(evaluated.merge.recipe.read_text().replace("featcal:", "featcal:\n  lm_eval: [mbpp]"))
    command = ("eval", recipe, evaluated.out, "--merged", evaluated.merge.merged, "--output", output)
    assert featcal(*command).code == 0
    assert [arguments["tasks"] for arguments in ran[2:]] == [["mbpp"], ["mbpp"]]
    assert featcal(*command, "--no-lm-eval").code == 0
    assert len(ran) == 4


@pytest.mark.slow
def test_the_real_harness_runs_a_local_task_and_gives_what_the_model_gives(
    evaluated: Evaluated, featcal: Featcal, tmp_path: Path
) -> None:
    """Skipped where `pip install "featcal_hf[lm-eval]"` wasn't run."""
    pytest.importorskip("lm_eval")
    words = [f"{first} {second}" for first, second in zip(WORDS[:8], WORDS[8:16], strict=True)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in words))
    task = tmp_path / "words.yaml"
    task.write_text(
        yaml.safe_dump(
            {
                "task": "words",
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": {"test": str(data)}},
                "test_split": "test",
                "output_type": "loglikelihood",
                "doc_to_text": "{{text.split()[0]}}",
                "doc_to_target": " {{text.split()[1]}}",
                "metric_list": [{"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}],
            }
        )
    )
    folders = {"merged": tmp_path / "merged", "calibrated": tmp_path / "out"}
    for folder, source in zip(folders.values(), (evaluated.merge.merged, evaluated.out), strict=True):
        shutil.copytree(source, folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.bos_token = "<pad>"  # the harness wants one
        tokenizer.save_pretrained(folder)
    output = tmp_path / "report.json"
    command = ("eval", evaluated.merge.recipe, folders["calibrated"], "--merged", folders["merged"], "--output", output)
    outcome = featcal(*command, "--lm-eval", task, "--batch-size", "2")
    assert outcome.code == 0, outcome
    (line,) = json.loads(output.read_text())["lm_eval"]
    for label, folder in folders.items():
        model = hf.LlamaForCausalLM.from_pretrained(folder).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        losses = []
        for text in words:
            ids = tokenizer(text, return_tensors="pt").input_ids
            scores = model(ids).logits.log_softmax(-1)
            losses.append(-float(scores[0, -2, ids[0, -1]].detach()))
        assert line[label] == pytest.approx(float(torch.tensor(losses).mean().exp()), rel=1e-4)


def test_folders_that_are_not_what_they_are_named_as_are_refused(evaluated: Evaluated, tmp_path: Path) -> None:
    recipe, merged = evaluated.merge.recipe, evaluated.merge.merged
    with pytest.raises(CheckpointError, match=r"merged is not a calibrated model \(featcal.json isn't there\)"):
        evaluate(recipe, merged)
    with pytest.raises(CheckpointError, match="holds calibrated weights"):
        evaluate(recipe, evaluated.out, evaluated.out)
    with pytest.raises(CheckpointError, match="is not a folder"):
        evaluate(recipe, tmp_path / "nowhere")
    shutil.copytree(merged, tmp_path / "stale")
    shutil.copy(evaluated.out / "featcal.json", tmp_path / "stale")
    with pytest.raises(CheckpointError, match="speaks of other weights"):
        evaluate(recipe, tmp_path / "stale")


def test_a_set_of_rows_that_was_all_used_is_refused(merge: Merge) -> None:
    rows = merge.data.read_text().splitlines(keepends=True)
    merge.data.write_text("".join(rows[: SAMPLES + 4]))
    calibrate(merge.recipe, merge.merged)
    with pytest.raises(DataError, match=r"task 'a': no row is left .* 16 were calibrated on .*--split"):
        evaluate(merge.recipe, merge.merged)


def test_rows_of_a_calibration_with_another_seed_are_left_out_and_changed_data_is_refused(merge: Merge) -> None:
    calibrate(merge.recipe, merge.merged, random_seed=7)
    used = json.loads((merge.merged / "featcal.json").read_text())["tasks"]["a"]
    report = evaluate(merge.recipe, merge.merged, random_seed=7)
    assert not {*used["calibration_indices"], *used["holdout_indices"]} & set(report.tasks["a"]["indices"])
    rows = [json.dumps({"text": f"{' '.join(WORDS)} {index}"}) for index in range(8)]
    with merge.data.open("a") as file:  # the permutation of more rows is another one
        file.write("\n".join(rows) + "\n")
    report = evaluate(merge.recipe, merge.merged)
    assert not {*used["calibration_indices"], *used["holdout_indices"]} & set(report.tasks["a"]["indices"])
    merge.data.write_text(merge.data.read_text().replace("cat", "dog"))
    with pytest.raises(DataError, match=r"the rows that featcal\.json says were calibrated on are no longer there"):
        evaluate(merge.recipe, merge.merged)


def test_copies_of_used_rows_in_another_split_or_task_are_left_out(merge: Merge) -> None:
    for name in ("a", "b"):
        (merge.root / name / "data").mkdir()
        shutil.move(merge.root / f"{name}.jsonl", merge.root / name / "data" / "train.jsonl")
    train = (merge.root / "a" / "data" / "train.jsonl").read_text()
    other = (merge.root / "b" / "data" / "train.jsonl").read_text()
    fresh = "".join(json.dumps({"text": f"sun moon {word}"}) + "\n" for word in WORDS[:5])
    for name in ("a", "b"):
        (merge.root / name / "data" / "test.jsonl").write_text(train + other + fresh)
        merge.edit_recipe(f"dataset: {merge.root / name}.jsonl", f"dataset: {merge.root / name / 'data'}")
    merge.edit_recipe("data, text: text}", "data, text: text, eval: {split: test}}")
    calibrate(merge.recipe, merge.merged)
    used = json.loads((merge.merged / "featcal.json").read_text())["tasks"]
    seen = {
        text
        for name in ("a", "b")
        for part in ("calibration_indices", "holdout_indices")
        for text in texts_of(merge.root / name / "data" / "train.jsonl", used[name][part])
    }
    report = evaluate(merge.recipe, merge.merged)
    test = merge.root / "a" / "data" / "test.jsonl"
    assert report.tasks["a"]["dataset"]["split"] == "test"
    assert report.tasks["b"]["dataset"]["split"] == "train"
    assert report.tasks["a"]["rows"] == 4 + 4 + 5
    assert not seen & set(texts_of(test, report.tasks["a"]["indices"]))
    assert evaluate(merge.recipe, merge.merged, split="test").tasks["b"]["rows"] == 13
    with pytest.raises(DataError, match=r"task 'a'.*validation"):
        evaluate(merge.recipe, merge.merged, split="validation")


def test_an_adapter_is_evaluated_through_peft(merge: Merge) -> None:
    torch.manual_seed(1)
    base = hf.LlamaForCausalLM.from_pretrained(merge.base)
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    adapted.save_pretrained(merge.root / "lora")
    merge.recipe.write_text(
        merge.recipe.read_text().replace(f"model: {merge.root / 'a'},", f"model: {merge.base}+{merge.root / 'lora'},")
    )
    shutil.rmtree(merge.merged)
    run_mergekit(merge.recipe, merge.merged, "--lora-merge-cache", str(merge.root / "cache"))
    calibrate(merge.recipe, merge.merged)
    report = evaluate(merge.recipe, merge.merged, experts=True)
    task = next(iter(report.tasks))
    texts = texts_of(merge.data, report.tasks[task]["indices"])
    plain = PeftModel.from_pretrained(hf.LlamaForCausalLM.from_pretrained(merge.base), str(merge.root / "lora"))
    expected = plain_loss(plain, merge.base, texts)
    assert value(report, task, "loss per token", "expert") == pytest.approx(expected, abs=1e-5)
    assert report.models[f"expert {merge.base}+{merge.root / 'lora'}"]["adapter"] == str(merge.root / "lora")


def test_only_the_completion_of_a_decoder_is_scored_and_it_is_generated_from_the_prompt(merge: Merge) -> None:
    rows = [
        json.dumps({"q": " ".join(words), "a": words[0]})
        for words in (random.Random(i).choices(WORDS, k=3 + i % 5) for i in range(20))
    ]
    for name in ("a", "b"):
        (merge.root / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    merge.recipe.write_text(merge.recipe.read_text().replace("text: text", 'prompt: "{q} and", completion: " {a}"'))
    calibrate(merge.recipe, merge.merged, merge.root / "out")
    report = evaluate(merge.recipe, merge.root / "out")
    model = hf.LlamaForCausalLM.from_pretrained(merge.root / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(merge.root / "out")
    losses, right = [], 0
    for row in (json.loads(rows[index]) for index in report.tasks["a"]["indices"]):
        prompt = tokenizer(f"{row['q']} and", return_tensors="pt").input_ids
        ids = torch.cat([prompt, tokenizer(row["a"], return_tensors="pt").input_ids], dim=1)
        labels = ids.clone()
        labels[:, : prompt.shape[1]] = -100
        with torch.no_grad():
            losses.append(float(model(input_ids=ids, labels=labels).loss))
        produced = model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=1)
        right += tokenizer.decode(produced[0, prompt.shape[1] :], skip_special_tokens=True).strip() == row["a"]
    assert report.tasks["a"]["new_tokens"] == 5
    assert value(report, "a", "loss per token", "calibrated") == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert value(report, "a", "exact match", "calibrated") == pytest.approx(right / len(losses))


@pytest.fixture(scope="module")
def number_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny T5 that learned a number for each text, its base, a merge between them, calibrated."""
    root = tmp_path_factory.mktemp("numbers")
    words = ["<pad>", "</s>", "<unk>", *WORDS, *NUMBERS]
    tokenizer = word_tokenizer(["<unk>", "<pad>", "</s>", *words[3:]])
    tokenizer.eos_token = "</s>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    torch.manual_seed(0)
    config = hf.T5Config(
        vocab_size=len(words), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu",
        pad_token_id=1, eos_token_id=2, decoder_start_token_id=1, dropout_rate=0.0,
    )  # fmt: skip
    model = hf.T5ForConditionalGeneration(config)
    generator = random.Random(0)
    rows = []
    for index in range(40):
        number = index % 5
        rows.append(
            {"q": " ".join([WORDS[number], *generator.choices(WORDS[5:], k=2 + index % 4)]), "a": NUMBERS[number]}
        )
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model.save_pretrained(root / "base")
    inputs = tokenizer([row["q"] for row in rows], return_tensors="pt", padding=True)
    labels = tokenizer([row["a"] for row in rows], return_tensors="pt").input_ids
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(60):
        loss = model(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.1
    model.save_pretrained(root / "expert")
    for name in ("base", "expert"):
        tokenizer.save_pretrained(root / name)
    write(
        root,
        {"model": str(root / "expert"), "dataset": str(root / "rows.jsonl"), "prompt": "{q}", "completion": "{a}"},
        weight=0.35,
    )
    merge(root / "recipe.yml", root / "merged")
    calibrate(root / "recipe.yml", root / "merged", root / "out")
    return root


def write(root: Path, *tasks: dict[str, Any], weight: float = 0.5, samples: int = 12) -> None:
    models = dict.fromkeys(task["model"] for task in tasks)
    recipe = {
        "merge_method": "task_arithmetic",
        "base_model": str(root / "base"),
        "models": [{"model": model, "parameters": {"weight": weight}} for model in models],
        "dtype": "float32",
        "featcal": {"samples": samples, "holdout": 4, "tasks": list(tasks)},
    }
    (root / "recipe.yml").write_text(yaml.safe_dump(recipe, sort_keys=False))


def test_answers_of_an_encoder_decoder_are_matched_and_numbers_are_ranked(number_model: Path, featcal: Featcal) -> None:
    report = evaluate(number_model / "recipe.yml", number_model / "out", number_model / "merged", experts=True)
    rows = [json.loads(line) for line in (number_model / "rows.jsonl").read_text().splitlines()]
    chosen = [rows[index] for index in report.tasks["expert"]["indices"]]
    assert len(chosen) == 24
    tokenizer = AutoTokenizer.from_pretrained(number_model / "out")
    for label, folder in {"expert": "expert", "merged": "merged", "calibrated": "out"}.items():
        model = hf.T5ForConditionalGeneration.from_pretrained(number_model / folder).eval()
        answers, losses = [], []
        for row in chosen:
            inputs = tokenizer(row["q"], return_tensors="pt").input_ids
            labels = tokenizer(row["a"], return_tensors="pt").input_ids
            with torch.no_grad():
                losses.append(float(model(input_ids=inputs, labels=labels).loss))
            produced = model.generate(inputs, max_new_tokens=6, do_sample=False)[0]
            answers.append(tokenizer.decode(produced, skip_special_tokens=True).strip())
        right = sum(answer == row["a"] for answer, row in zip(answers, chosen, strict=True))
        unparsable = sum(answer not in NUMBERS for answer in answers)
        assert value(report, "expert", "exact match", label) == pytest.approx(right / 24)
        assert value(report, "expert", "loss per token", label) == pytest.approx(sum(losses) / 24, abs=1e-5)
        assert report.tasks["expert"]["counts"][label]["unparsable_answers"] == unparsable
    assert value(report, "expert", "exact match", "expert") == 1.0
    assert value(report, "expert", "Spearman's ρ", "expert") == pytest.approx(1.0)
    assert report.tasks["expert"]["new_tokens"] == 6
    outcome = featcal("eval", number_model / "recipe.yml", number_model / "out", "--experts", "--rows", "3")
    assert outcome.code == 0, outcome
    assert "Spearman's ρ" in outcome.output


def image_models(root: Path, name: str, rows: int = 40) -> list[dict[str, Any]]:
    """A family's base and its two experts with labelled images; their tasks."""
    family = FAMILIES[name]
    base = base_model(family)
    models = {"base": base} | {task: expert_model(family, base, seed) for seed, task in enumerate(TASKS, 1)}
    for label, model in models.items():
        model.save_pretrained(root / label)
        save_side_files(family, root / label)
    tasks = []
    for task, file in write_data(root / "rows").items():
        lines = [json.loads(line) for line in file.read_text().splitlines()[:rows]]
        labelled = [{"image": line["image"], "label": index % 2} for index, line in enumerate(lines)]
        file.write_text("".join(json.dumps(line) + "\n" for line in labelled))
        tasks.append({"model": str(root / task), "dataset": str(file), "image": "image"})
    return tasks


def pixels_of(root: Path, task: str, indices: list[int]) -> tuple[Tensor, Tensor]:
    processor = hf.AutoImageProcessor.from_pretrained(root / "base")
    images = [Image.open(root / "rows" / task / f"{index}.png").convert("RGB") for index in indices]
    return processor(images=images, return_tensors="pt").pixel_values, torch.tensor([index % 2 for index in indices])


@torch.no_grad()
def test_a_classifier_is_measured_by_its_accuracy_and_needs_labels(tmp_path: Path) -> None:
    left, right = image_models(tmp_path, "vit")
    write(tmp_path, left, right)
    merge(tmp_path / "recipe.yml", tmp_path / "merged")
    calibrate(tmp_path / "recipe.yml", tmp_path / "merged", tmp_path / "out")
    report = evaluate(tmp_path / "recipe.yml", tmp_path / "out", tmp_path / "merged", experts=True)
    pixels, labels = pixels_of(tmp_path, "left", report.tasks["left"]["indices"])
    assert len(labels) == 24
    for label, folder in {"expert": "left", "merged": "merged", "calibrated": "out"}.items():
        logits = hf.ViTForImageClassification.from_pretrained(tmp_path / folder).eval()(pixels).logits
        expected = float((logits.argmax(1) == labels).float().mean())
        assert value(report, "left", "accuracy", label) == pytest.approx(expected)
    for changed, problem in {
        "lable": "task 'left': accuracy needs each row's class, and there is no column 'lable' .*image, label",
        "image": "task 'left'.*expected a class's number or name|is not among the classifier's",
    }.items():
        write(tmp_path, {**left, "label": changed}, right)
        with pytest.raises(DataError, match=problem):
            evaluate(tmp_path / "recipe.yml", tmp_path / "out")
    file = Path(left["dataset"])
    file.write_text(file.read_text().replace('"label": 1', '"label": 7'))
    write(tmp_path, left, right)
    with pytest.raises(DataError, match="the label 7 is not among the classifier's classes 0 to 1"):
        evaluate(tmp_path / "recipe.yml", tmp_path / "out")


@torch.no_grad()
def test_an_image_tower_is_measured_zero_shot_with_a_clips_text_or_by_drift_alone(
    tmp_path: Path, featcal: Featcal
) -> None:
    left, right = image_models(tmp_path, "clip-vision")
    text = FAMILIES["clip"].build().eval()
    text.save_pretrained(tmp_path / "clip")
    save_side_files(FAMILIES["clip"], tmp_path / "clip")
    names, templates = ["a b", "c"], ["x {} y", "{} z"]
    zero_shot = {"text_model": "org/clip", "class_names": names, "templates": templates}
    write(tmp_path, {**left, "eval": zero_shot}, right)
    merge(tmp_path / "recipe.yml", tmp_path / "merged")
    calibrate(tmp_path / "recipe.yml", tmp_path / "merged", tmp_path / "out")
    mapping = {"org/clip": str(tmp_path / "clip")}
    report = evaluate(tmp_path / "recipe.yml", tmp_path / "out", tmp_path / "merged", experts=True, mapping=mapping)
    pixels, labels = pixels_of(tmp_path, "left", report.tasks["left"]["indices"])
    text.vision_model = hf.CLIPVisionModel.from_pretrained(tmp_path / "merged").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "clip")
    sums = []
    for name in names:
        inputs = tokenizer([template.format(name) for template in templates], return_tensors="pt", padding=True)
        out = text(pixel_values=pixels[:1], input_ids=inputs.input_ids, attention_mask=inputs.attention_mask)
        sums.append(out.text_embeds.mean(0))
    classes = torch.nn.functional.normalize(torch.stack(sums), dim=1)
    expected = float(((out_images(text, pixels) @ classes.T).argmax(1) == labels).float().mean())
    assert value(report, "left", "zero-shot accuracy", "merged") == pytest.approx(expected)
    assert 0.9 < (value(report, "right", "cosine with expert", "calibrated") or 0) < 1
    assert "no classifier head" in report.tasks["right"]["notes"][0]
    outcome = featcal(
        "eval", tmp_path / "recipe.yml", tmp_path / "out", "--experts", "--map", f"org/clip={tmp_path / 'clip'}"
    )
    assert outcome.code == 0, outcome
    assert "for zero-shot accuracy give eval.text_model and eval.templates" in outcome.output
    write(tmp_path, left, right)
    with pytest.raises(DataError, match="without experts nothing can be measured; give --experts"):
        evaluate(tmp_path / "recipe.yml", tmp_path / "out")
    del zero_shot["class_names"]
    write(tmp_path, {**left, "eval": zero_shot}, right)
    with pytest.raises(DataError, match="needs the classes' names"):
        evaluate(tmp_path / "recipe.yml", tmp_path / "out", mapping=mapping)


def out_images(clip: Any, pixels: Tensor) -> Tensor:
    return clip.visual_projection(clip.vision_model(pixel_values=pixels).pooler_output)


def test_an_expert_without_its_head_is_refused_rather_than_given_a_random_one(merge: Merge) -> None:
    calibrate(merge.recipe, merge.merged)
    torch.manual_seed(0)
    build_llama().model.save_pretrained(merge.expert)
    with pytest.raises(
        CheckpointError, match=r"lacks 1 tensors of LlamaForCausalLM .*lm_head\.weight.*would be random"
    ):
        evaluate(merge.recipe, merge.merged, experts=True)
