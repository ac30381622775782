"""Every supported family through the whole of it: saved, merged, calibrated from a recipe, loaded again."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from families import (
    FAMILIES,
    TASKS,
    VOCABULARY,
    Family,
    base_model,
    expert_model,
    save_side_files,
    sound_batches,
    write_data,
)
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from featcal_hf import CheckpointError, Settings, calibrate, calibrate_model
from featcal_hf.compare import open_models
from featcal_hf.data import TaskData
from featcal_hf.data.batches import Batch
from featcal_hf.forward import (
    ParkedForward,
    find_blocks,
    first_tensor,
    forward_inputs,
    parking,
    run_block,
    run_block_watched,
)
from featcal_hf.modules import norms_of
from featcal_hf.preparation import Prepared
from featcal_hf.recipe import read_recipe
from featcal_hf.record import RunReport
from featcal_hf.run import calibrate_prepared
from featcal_hf.systems import BlockPlan, plan_block, watched_names
from featcal_hf.tokens import pooled_blocks

CPU = torch.device("cpu")
MERGE_WEIGHT = 0.3
SHARD_BYTES = 60_000
SETTINGS = {"lambda": 0.05, "scale": "trace", "rho": 1.0, "alpha": 0.25}
"""A ridge that lets such small models move far enough for every block to show it."""
ALL = pytest.mark.parametrize("name", FAMILIES)


@dataclass(frozen=True)
class Run:
    """A family's models in `folder`: base, one expert for each task, merged, calibrated; and what the run reported."""

    family: Family
    folder: Path
    prepared: Prepared
    report: RunReport


Runs = Callable[[str], Run]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_data(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def runs(rows: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    @functools.cache
    def run(name: str) -> Run:
        return _run(name, rows, tmp_path_factory.mktemp(name))

    bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    yield run
    if bar:
        transformers_logging.enable_progress_bar()


def _run(name: str, rows: dict[str, Path], folder: Path) -> Run:
    family = FAMILIES[name]
    base = base_model(family)
    models = {"base": base} | {task: expert_model(family, base, seed) for seed, task in enumerate(TASKS, 1)}
    for label, model in models.items():
        model.save_pretrained(folder / label)
        save_side_files(family, folder / label)
    recipe = folder / "recipe.yml"
    recipe.write_text(_recipe(family, folder, rows))
    merge_with_mergekit(recipe, folder / "merged") if family.mergekit else merge_by_hand(folder)
    seen: list[Prepared] = []
    if name == "whisper":
        seen.append(_prepare_with_sound(recipe, folder / "merged"))
        report = calibrate_prepared(seen[0], folder / "calibrated", CPU, lambda step: None, time.perf_counter())
    else:
        report = calibrate(recipe, folder / "merged", folder / "calibrated", on_prepared=seen.append)
    return Run(family, folder, seen[0], report)


def _recipe(family: Family, folder: Path, rows: dict[str, Path]) -> str:
    recipe = {
        "merge_method": "task_arithmetic",
        "base_model": str(folder / "base"),
        "models": [{"model": str(folder / task), "parameters": {"weight": MERGE_WEIGHT}} for task in TASKS],
        "dtype": str(family.dtype).removeprefix("torch."),
        "featcal": {
            **SETTINGS,
            "samples": 80,
            "holdout": 32,
            "batch_size": 16,
            "tasks": [
                {"model": str(folder / task), "name": task, "dataset": str(rows[task]), **family.reads}
                for task in TASKS
            ],
        },
    }
    return yaml.safe_dump(recipe, sort_keys=False)


def merge_with_mergekit(recipe: Path, out: Path) -> None:
    text = recipe.read_text()
    run_merge(
        MergeConfiguration.model_validate(yaml.safe_load(text)),
        str(out),
        MergeOptions(copy_tokenizer=True, out_shard_size=SHARD_BYTES, quiet=True),
        config_source=text,
    )


def merge_by_hand(folder: Path) -> None:
    base, *experts = (tensors_of(folder / label) for label in ("base", *TASKS))
    shutil.copytree(folder / "base", folder / "merged")
    save_file(task_arithmetic(base, experts), folder / "merged" / "model.safetensors", {"format": "pt"})


def task_arithmetic(base: dict[str, Tensor], experts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    merged = {}
    for name, value in base.items():
        steps = [MERGE_WEIGHT * (expert[name].float() - value.float()) for expert in experts]
        merged[name] = sum(steps, start=value.float()).to(value.dtype)
    return merged


def _prepare_with_sound(recipe: Path, merged: Path) -> Prepared:
    read = read_recipe(recipe)

    def batches(task: int, seed: int, count: int) -> list[Batch]:
        return [Batch(inputs, inputs) for inputs in sound_batches(task, seed, count)]

    data = [TaskData(batches(task, 0, 5), batches(task, 1, 2), {}) for task in range(len(TASKS))]
    return Prepared(read, read.settings.resolved(True), open_models(read, merged), data)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return tensors


def file_table(folder: Path) -> dict[str, dict[str, tuple[str, list[int]]]]:
    table = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            table[path.name] = {name: (view.get_dtype(), view.get_shape()) for name, view in views.items()}
    return table


def loaded(run: Run, label: str) -> PreTrainedModel:
    """A model as anyone would load it; nothing may be missing, unexpected, mismatched or in error."""
    model, info = type(run.prepared.models.student.module).from_pretrained(run.folder / label, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def block_outputs(model: PreTrainedModel, batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Each block's hidden states in plain forwards, one dictionary a batch."""
    seen: list[dict[str, Tensor]] = []
    handles = [
        block.register_forward_hook(lambda _, __, output, path=path: seen[-1].update({path: first_tensor(output)}))
        for path, block in find_blocks(model).items()
    ]
    for batch in batches:
        seen.append({})
        model(**forward_inputs(model, batch).inputs)
    for handle in handles:
        handle.remove()
    return seen


def counted(family: Family, path: str, batch: dict[str, Tensor]) -> Tensor | slice:
    masks = dict(family.blocks)
    name = masks[path.rpartition(".")[0]]
    if name is None:
        return slice(None)
    return batch[name].ne(-100) if name == "labels" else batch[name].bool()


def read_further_on(run: Run, path: str, batch: dict[str, Tensor]) -> Tensor | slice | tuple[slice, int]:
    """The tokens of a block whose drift matters: those that count, or the one that the model reads."""
    module = run.prepared.models.student.module
    pooled = pooled_blocks(module, list(find_blocks(module)), "auto")
    return (slice(None), 0) if path in pooled else counted(run.family, path, batch)


@ALL
@torch.no_grad()
def test_a_forward_parked_at_every_block_gives_the_bits_of_a_plain_one(runs: Runs, name: str) -> None:
    run = runs(name)
    student, plain = run.prepared.models.student, loaded(run, "merged")
    batch = run.prepared.data[0].calibration[0].student
    order = []
    with parking(student.module):
        forward = ParkedForward(student.module, forward_inputs(student.module, batch).inputs)
        with student.outer():
            forward.start()
        while forward.call is not None:
            order.append(forward.call.path)
            with student.block(forward.call.path, CPU) as block:
                output = run_block(block, forward.call)
            with student.outer():
                forward.resume(output)
    assert order == [f"{stack}.{index}" for stack, _ in run.family.blocks for index in range(2)]
    assert "attention_mask" not in batch or not batch["attention_mask"].all()
    ours = tree_leaves(forward.result)
    theirs = tree_leaves(plain(**forward_inputs(plain, batch).inputs))
    assert len(ours) == len(theirs) > 0
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.mergekit])
def test_mergekit_merges_the_whole_family_exactly(runs: Runs, name: str) -> None:
    run = runs(name)
    base, *experts = (loaded(run, label).state_dict() for label in ("base", *TASKS))
    expected = task_arithmetic(base, experts)
    precision = 2**-7 if run.family.dtype == torch.bfloat16 else 1e-6
    for tensor, value in loaded(run, "merged").state_dict().items():
        wanted = expected[tensor].float()
        assert (value.float() - wanted).abs().max() <= precision * wanted.abs().max(), tensor


@ALL
def test_the_calibrated_folder_has_the_merged_ones_tensors_and_loads_completely(runs: Runs, name: str) -> None:
    run = runs(name)
    assert file_table(run.folder / "calibrated") == file_table(run.folder / "merged")
    assert loaded(run, "calibrated").dtype == run.family.dtype


@ALL
def test_what_the_report_says_was_calibrated_and_nothing_else_has_new_values(runs: Runs, name: str) -> None:
    run = runs(name)
    student = run.prepared.models.student
    merged, calibrated = tensors_of(run.folder / "merged"), tensors_of(run.folder / "calibrated")
    changed = {tensor for tensor, value in merged.items() if not torch.equal(calibrated[tensor], value)}
    reported = set()
    for block in run.report.blocks:
        inside = {parameter for parameter, _ in student.blocks[block.path].named_parameters()}
        updated = {f"{module.name}.{part}" for module in block.modules for part in ("weight", "bias")} & inside
        assert updated | set(block.kept) == inside
        assert not updated & set(block.kept)
        reported |= {student.source_of(block.path, parameter) for parameter in updated}
    assert changed == reported


@ALL
@torch.no_grad()
def test_drift_on_held_out_rows_falls_at_every_block_and_is_what_the_saved_models_show(runs: Runs, name: str) -> None:
    run = runs(name)
    merged, calibrated = loaded(run, "merged"), loaded(run, "calibrated")
    for task, data in zip(TASKS, run.prepared.data, strict=True):
        batches = [batch.student for batch in data.holdout]
        targets = block_outputs(loaded(run, task), batches)
        for block in run.report.blocks:
            measured = []
            for model in (merged, calibrated):
                errors = [
                    (output[block.path].float() - target[block.path].float())
                    .norm(dim=-1)[read_further_on(run, block.path, batch)]
                    .flatten()
                    for output, target, batch in zip(block_outputs(model, batches), targets, batches, strict=True)
                ]
                measured.append(float(torch.cat(errors).mean()))
            before, after = block.drift[task]
            assert [before.drift, after.drift] == pytest.approx(measured, rel=1e-4), block.path
            assert after.drift < 0.97 * before.drift, (task, block.path)


@ALL
@torch.no_grad()
def test_output_drift_is_what_the_saved_models_show(runs: Runs, name: str) -> None:
    run = runs(name)
    outcomes = run.report.blocks[-1].outcome
    assert list(outcomes) == list(TASKS)
    for task, data in zip(TASKS, run.prepared.data, strict=True):
        expert, *ours = (loaded(run, label) for label in (task, "merged", "calibrated"))
        logits = [
            [outputs_of(run, model, batch, len(data.holdout)) for batch in (held.student for held in data.holdout)]
            for model in (expert, *ours)
        ]
        found = outcomes[task]
        if logits[0][0] is None:
            assert found.output is None
            assert found.no_output == f"{type(expert).__name__} has no logits"
            continue
        assert found.output is not None, found.no_output
        target, *students = (torch.cat(rows).float() for rows in logits)
        assert found.output.predictions == len(target)
        for student, change in zip(students, (found.output.before, found.output.after), strict=True):
            log_p, log_q = target.log_softmax(-1), student.log_softmax(-1)
            expected = [
                float((student - target).norm(dim=-1).mean()),
                float((log_p.exp() * (log_p - log_q)).sum(-1).mean()),
                float((student.argmax(-1) == target.argmax(-1)).float().mean()),
            ]
            assert [change.logit_l2, change.kl] == pytest.approx(expected[:2], rel=2e-3, abs=1e-6)
            assert change.agreement == pytest.approx(expected[2], abs=2e-2)


def outputs_of(run: Run, model: PreTrainedModel, batch: dict[str, Tensor], batches: int) -> Tensor | None:
    """The logits that count of a plain forward, one row for each token or sample; None for a model without logits.

    Of tokens there are at most 512 in all batches together, evenly spread in each.
    """
    logits = getattr(model(**forward_inputs(model, batch).inputs), "logits", None)
    if logits is None or logits.dim() == 2:
        return logits
    rows = logits[counted(run.family, list(find_blocks(model))[-1], batch)]
    most = 512 // batches
    return rows if len(rows) <= most else rows[[(len(rows) - 1) * place // (most - 1) for place in range(most)]]


@ALL
def test_every_file_but_the_weights_keeps_its_bytes(runs: Runs, name: str) -> None:
    run = runs(name)
    files = {
        label: {
            path.name: path.read_bytes() for path in (run.folder / label).iterdir() if path.suffix != ".safetensors"
        }
        for label in ("merged", "calibrated")
    }
    report = json.loads(files["calibrated"].pop("featcal.json"))
    written = {name for name, _ in files["calibrated"].items() - files["merged"].items()}
    assert written in (set(), {"README.md", "featcal_drift.png"})  # the card, where the command ran
    assert files["merged"].keys() <= files["calibrated"].keys()
    expected = {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    if run.prepared.models.student.module.can_generate():
        expected |= {"generation_config.json"}
    if run.family.processor is not None and not run.family.mergekit:  # which doesn't copy it
        expected |= {"preprocessor_config.json"}
    assert expected <= files["merged"].keys()
    filled_in = {"bias": True, "norm": True, "pooled_token": "auto"}
    assert report["settings"] == SETTINGS | filled_in
    assert report["recipe"] == (run.folder / "recipe.yml").read_text()
    assert list(report["tasks"]) == list(TASKS)


@ALL
def test_a_norms_stored_weight_is_gamma_and_in_gemma_gamma_less_one(name: str) -> None:
    offset = 1.0 if name.startswith("gemma") else 0.0
    for block in find_blocks(FAMILIES[name].build()).values():
        norms = norms_of(block)
        assert len(norms) >= 2
        assert {norm.offset for norm in norms} == {offset}


def test_mergekit_yaml_on_the_command_line_makes_the_same_folder(runs: Runs, tmp_path: Path) -> None:
    run = runs("llama")
    command = [str(Path(sys.executable).with_name("mergekit-yaml")), str(run.folder / "recipe.yml"), str(tmp_path)]
    subprocess.run([*command, "--out-shard-size", str(SHARD_BYTES)], check=True, capture_output=True)
    for path in (run.folder / "merged").iterdir():
        if path.name != "README.md":  # lists the models in the order of a set
            assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_folder_that_mergekit_left_incomplete_without_an_error_is_refused(runs: Runs, tmp_path: Path) -> None:
    recipe = runs("vit").folder / "recipe.yml"
    merge_with_mergekit(recipe, tmp_path / "merged")
    with pytest.raises(CheckpointError, match="lacks 32 of 40 tensors that ViTForImageClassification needs"):
        calibrate(recipe, tmp_path / "merged")


def test_in_place_and_into_an_output_folder_give_the_same_files(runs: Runs, tmp_path: Path) -> None:
    run = runs("qwen2")
    folder = shutil.copytree(run.folder / "merged", tmp_path / "merged")
    calibrate(run.folder / "recipe.yml", folder)
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert {path.name for path in folder.iterdir()} == {path.name for path in (run.folder / "calibrated").iterdir()}
    for path in folder.glob("*.safetensors*"):
        assert path.read_bytes() == (run.folder / "calibrated" / path.name).read_bytes(), path.name


@pytest.mark.parametrize("name", ["llama", "t5", "clip-vision"])
def test_in_memory_and_streamed_runs_give_the_same_tensors(runs: Runs, name: str) -> None:
    run = runs(name)
    merged, streamed = loaded(run, "merged"), loaded(run, "calibrated").state_dict()
    data = dict(zip(TASKS, run.prepared.data, strict=True))
    calibrate_model(
        merged,
        base=loaded(run, "base"),
        experts={task: loaded(run, task) for task in TASKS},
        batches={task: [batch.student for batch in data[task].calibration] for task in TASKS},
        settings=Settings(**SETTINGS),
    )
    for tensor, value in merged.state_dict().items():
        torch.testing.assert_close(value, streamed[tensor], rtol=1e-5, atol=1e-7, msg=tensor)


@torch.no_grad()
def plan_of(name: str, batch: dict[str, Tensor], wanted: str) -> BlockPlan:
    """The plan of one block, reached by a forward of a plain model."""
    model = base_model(FAMILIES[name])
    with parking(model) as blocks:
        forward = ParkedForward(model, forward_inputs(model, batch).inputs)
        forward.start()
        while forward.call is not None and forward.call.path != wanted:
            forward.resume(run_block(blocks[forward.call.path], forward.call))
        assert forward.call is not None
        seen = run_block_watched(blocks[wanted], forward.call, watched_names(blocks[wanted]))
        plan = plan_block(blocks[wanted], seen, forward.call, Settings().resolved(True), False, {})
        forward.stop()
    return plan


def groups_of(plan: BlockPlan) -> dict[tuple[str, ...], bool]:
    return {group.names: group.reads_encoder for group in plan.groups}


def test_llamas_query_key_and_value_share_an_input_as_do_gate_and_up() -> None:
    ids = torch.arange(4, 16).reshape(2, 6)
    assert groups_of(plan_of("llama", {"input_ids": ids}, "layers.1")) == {
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"): False,
        ("self_attn.o_proj",): False,
        ("mlp.gate_proj", "mlp.up_proj"): False,
        ("mlp.down_proj",): False,
    }


def test_t5s_cross_attention_reads_keys_and_values_from_the_encoder() -> None:
    ids = torch.arange(4, 16).reshape(2, 6)  # as many tokens on both sides: shapes can't tell them apart
    assert groups_of(plan_of("flan-t5", {"input_ids": ids, "labels": ids}, "decoder.block.1")) == {
        ("layer.0.SelfAttention.q", "layer.0.SelfAttention.k", "layer.0.SelfAttention.v"): False,
        ("layer.0.SelfAttention.o",): False,
        ("layer.1.EncDecAttention.q",): False,
        ("layer.1.EncDecAttention.k", "layer.1.EncDecAttention.v"): True,
        ("layer.1.EncDecAttention.o",): False,
        ("layer.2.DenseReluDense.wi_0", "layer.2.DenseReluDense.wi_1"): False,
        ("layer.2.DenseReluDense.wo",): False,
    }


def test_whispers_cross_attention_reads_keys_and_values_from_the_encoder() -> None:
    assert groups_of(plan_of("whisper", sound_batches(0, 0, 1)[0], "decoder.layers.1")) == {
        ("self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"): False,
        ("self_attn.out_proj",): False,
        ("encoder_attn.k_proj", "encoder_attn.v_proj"): True,
        ("encoder_attn.q_proj",): False,
        ("encoder_attn.out_proj",): False,
        ("fc1",): False,
        ("fc2",): False,
    }


@pytest.mark.parametrize(
    ("name", "tensors_a_block", "reason"),
    [
        ("mixtral", 2, "no closed-form update"),
        ("qwen3-moe", 2, "no closed-form update"),
        ("qwen3-moe-unfused", 3 * 4, "fused by the loader from several tensors of the checkpoint"),
    ],
)
def test_a_mixtures_experts_are_reported_as_kept_and_keep_their_bytes(
    runs: Runs, name: str, tensors_a_block: int, reason: str
) -> None:
    run = runs(name)
    for block in run.report.blocks:
        experts = {parameter: why for parameter, why in block.kept.items() if ".experts." in parameter}
        assert experts == dict.fromkeys(("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), reason)
        assert {module.name for module in block.modules} >= {"self_attn.q_proj", "self_attn.o_proj"}
    merged, calibrated = tensors_of(run.folder / "merged"), tensors_of(run.folder / "calibrated")
    tensors = [tensor for tensor in merged if ".experts." in tensor]
    assert len(tensors) == 2 * tensors_a_block
    assert all(torch.equal(calibrated[tensor], merged[tensor]) for tensor in tensors)


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_one_expert_and_hardly_any_ridge_give_the_experts_own_stored_weights(name: str) -> None:
    family = FAMILIES[name]
    base = base_model(family)
    expert = expert_model(family, base, 1)
    merged = expert_model(family, base, 2)
    start = {key: value.clone() for key, value in merged.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, len(VOCABULARY), (64, 24), generator=generator)
    report = calibrate_model(
        merged,
        experts={"only": expert},
        batches={"only": [{"input_ids": ids}]},
        settings=Settings(lambda_=1e-7, alpha=0.0),
    )
    calibrated, target = merged.state_dict(), expert.state_dict()
    for block in report.blocks:
        for module in block.modules:
            for part in ("weight", "bias"):
                key = f"{merged.base_model_prefix}.{block.path}.{module.name}.{part}"
                if key in target:
                    assert (calibrated[key] - target[key]).norm() < 0.02 * (start[key] - target[key]).norm(), key


@pytest.mark.parametrize("name", ["llama", "bert", "flan-t5", "clip"])
def test_more_padding_changes_no_weight(runs: Runs, name: str) -> None:
    run = runs(name)
    fill = {"labels": -100}

    def calibrated(extra: int) -> dict[str, Tensor]:
        batches = {
            task: [
                {
                    key: value if value.dim() > 2 else pad(value, (0, extra), value=fill.get(key, 0))
                    for key, value in batch.student.items()
                }
                for batch in data.calibration[:2]
            ]
            for task, data in zip(TASKS, run.prepared.data, strict=True)
        }
        model = loaded(run, "merged")
        experts = {task: loaded(run, task) for task in TASKS}
        calibrate_model(
            model, base=loaded(run, "base"), experts=experts, batches=batches, settings=Settings(**SETTINGS)
        )
        return model.state_dict()

    padded = calibrated(9)
    for tensor, value in calibrated(0).items():
        assert (padded[tensor] - value).norm() <= 1e-4 * value.norm(), tensor
