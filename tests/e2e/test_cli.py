"""The command and what it writes: layouts, bytes, flags, folders."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_merge import (
    VOCABULARY,
    Merge,
    Outcome,
    all_but_work,
    build_llama,
    build_models,
    change_tensors,
    contents,
    copy_merge,
    equal_states,
    loaded_state,
    run_mergekit,
    write_recipe,
)
from torch import Tensor
from transformers import CLIPConfig, CLIPModel, CLIPVisionModel

from featcal_hf import Settings, SolveError, calibrate, calibrate_model
from featcal_hf.compare import open_models
from featcal_hf.recipe import read_recipe

Featcal = Callable[..., Outcome]


@pytest.fixture(scope="module")
def calibrated(pristine: Merge, tmp_path_factory: pytest.TempPathFactory) -> Merge:
    """The shared merge, calibrated in place: read it, don't change it."""
    merge = copy_merge(pristine, tmp_path_factory.mktemp("calibrated"))
    calibrate(merge.recipe, merge.merged)
    return merge


def weights(folder: Path) -> dict[str, str]:
    return {name: digest for name, digest in contents(folder).items() if re.search(r"safetensors|\.bin", name)}


def test_calibration_changes_the_blocks_weights_and_nothing_else(pristine: Merge, calibrated: Merge) -> None:
    before, after = (load_file(merge.merged / "model.safetensors") for merge in (pristine, calibrated))
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed == {name for name in before if ".layers." in name}
    assert {name: (value.dtype, value.shape) for name, value in before.items()} == {
        name: (value.dtype, value.shape) for name, value in after.items()
    }


def test_side_files_and_the_header_of_the_weights_stay_byte_for_byte(pristine: Merge, calibrated: Merge) -> None:
    before, after = contents(pristine.merged), contents(calibrated.merged)
    assert set(after) - set(before) == {"featcal.json", "featcal_drift.png"}
    assert {name for name in before if before[name] != after[name]} - {"README.md", "mergekit_config.yml"} == {
        "model.safetensors"
    }
    old, new = ((merge.merged / "model.safetensors").read_bytes() for merge in (pristine, calibrated))
    header = 8 + int.from_bytes(old[:8], "little")
    assert old[:header] == new[:header]
    assert len(old) == len(new)


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_equal_to_base_and_merged_give_every_tensor_back_bit_by_bit(
    dtype: str, pickled: bool, tmp_path: Path, featcal: Featcal
) -> None:
    build_models(tmp_path, getattr(torch, dtype), spread=0.0)
    write_recipe(tmp_path, dtype)
    merge = Merge(tmp_path)
    run_mergekit(merge.recipe, merge.merged, *(["--no-safe-serialization"] if pickled else []))
    file = merge.merged / ("pytorch_model.bin" if pickled else "model.safetensors")

    def read() -> dict[str, Tensor]:
        state: dict[str, Tensor] = torch.load(file, weights_only=True) if pickled else load_file(file)
        return {name: value.clone() for name, value in state.items()}

    before = read()
    assert {value.dtype for value in before.values()} == {getattr(torch, dtype)}
    outcome = featcal(merge.recipe, merge.merged, "--quiet")
    assert outcome.code == 0, outcome
    assert json.loads((merge.merged / "featcal.json").read_text())["blocks"]
    after = read()
    assert list(after) == list(before)
    assert equal_states(before, after)


def test_a_bin_merge_is_calibrated_to_the_same_weights(calibrated: Merge, merge: Merge, featcal: Featcal) -> None:
    shutil.rmtree(merge.merged)
    run_mergekit(merge.recipe, merge.merged, "--no-safe-serialization")
    assert featcal(merge.recipe, merge.merged, "--quiet").code == 0
    assert list(weights(merge.merged)) == ["pytorch_model.bin"]
    assert equal_states(loaded_state(merge.merged), loaded_state(calibrated.merged))


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "bin"])
def test_a_sharded_merge_keeps_its_shards_and_index(
    pickled: bool, calibrated: Merge, sharded: Merge, tmp_path: Path, featcal: Featcal
) -> None:
    merge = copy_merge(sharded, tmp_path)
    if pickled:
        shutil.rmtree(merge.merged)
        run_mergekit(merge.recipe, merge.merged, "--out-shard-size", "30000", "--no-safe-serialization")
    (index,) = merge.merged.glob("*.index.json")
    before, text = contents(merge.merged), index.read_bytes()
    assert featcal(merge.recipe, merge.merged, "--quiet").code == 0
    assert index.read_bytes() == text
    assert set(contents(merge.merged)) == {*before, "featcal.json", "featcal_drift.png"}
    assert equal_states(loaded_state(merge.merged), loaded_state(calibrated.merged))


def test_output_gets_every_side_file_and_leaves_the_merged_folder_alone(
    calibrated: Merge, merge: Merge, featcal: Featcal
) -> None:
    (merge.merged / "chat_template.jinja").write_text("{{ messages }}")
    (merge.merged / "assets").mkdir()
    (merge.merged / "assets" / "logo.png").write_bytes(b"png")
    torch.save({}, merge.merged / "pytorch_model.bin")  # stale: not what was calibrated
    before, output = contents(merge.merged), merge.root / "deep" / "output"
    outcome = featcal(merge.recipe, merge.merged, "--output", output)
    assert outcome.code == 0
    assert outcome.output.endswith(f"Wrote {output} See it: featcal-hf report {output}")
    assert contents(merge.merged) == before
    after = contents(output)
    assert set(after) == {*before, "featcal.json", "featcal_drift.png"} - {"pytorch_model.bin"}
    assert {name for name in after if before.get(name) != after[name]} == {
        "model.safetensors",
        "featcal.json",
        "featcal_drift.png",
        "README.md",
    }
    assert equal_states(loaded_state(output), loaded_state(calibrated.merged))


def test_a_sharded_output_has_the_merged_layout(sharded: Merge, calibrated: Merge, tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.mkdir()
    calibrate(sharded.recipe, sharded.merged, output)
    assert set(contents(output)) == {*contents(sharded.merged), "featcal.json", "featcal_drift.png"}
    assert equal_states(loaded_state(output), loaded_state(calibrated.merged))


@pytest.mark.parametrize("arguments", [["calibrate"], [], ["--quiet"]])
def test_the_word_calibrate_can_be_left_out(
    arguments: list[str], merge: Merge, calibrated: Merge, featcal: Featcal
) -> None:
    assert featcal(*arguments, merge.recipe, merge.merged).code == 0
    assert weights(merge.merged) == weights(calibrated.merged)


def test_quiet_prints_the_judgement_alone(merge: Merge, featcal: Featcal) -> None:
    outcome = featcal(merge.recipe, merge.merged, "--quiet")
    assert (outcome.code, outcome.errors) == (0, "")
    assert outcome.output.startswith(("Every task's features are closer", "Features moved away from the expert's for"))
    assert outcome.output.count(". ") == 0


def test_a_run_prints_its_plan_each_block_and_a_judgement(merge: Merge, featcal: Featcal) -> None:
    outcome = featcal(merge.recipe, merge.merged)
    for words in ("Calibration plan", "block 1/3 layers.0", "block 3/3 layers.2", "relative drift", f"Wrote {merge}"):
        assert words.replace(str(merge), str(merge.merged)) in outcome.output
    assert outcome.errors == ""


def test_check_prints_the_plan_and_changes_nothing(merge: Merge, featcal: Featcal) -> None:
    before = contents(merge.root)
    outcome = featcal("check", merge.recipe, merge.merged)
    assert outcome.code == 0
    assert "Calibration plan" in outcome.output
    assert "21 linear modules and 6 norms in 3 blocks" in outcome.output
    assert re.search(r"estimated: \d+\.\d MB peak memory, \d+\.\d kB disk, [1-9]\S* MFLOP ", f"{outcome.output} ")
    assert "block 1/3" not in outcome.output
    assert contents(merge.root) == before


def test_a_recipe_that_the_folder_was_not_merged_by_is_warned_of_and_recorded(merge: Merge, featcal: Featcal) -> None:
    merge.edit_recipe("{weight: 0.5}", "{weight: 0.7, wieght: 0.5}")
    for command in ("check", "calibrate"):
        outcome = featcal(command, merge.recipe, merge.merged)
        assert outcome.code == 0
        assert "warning: " + f"{merge.recipe}:4:" in outcome.output
        assert "did you mean 'weight'?" in outcome.output
        assert f"warning: {merge.merged} was merged by another recipe than {merge.recipe}" in outcome.output
        assert "models[a].parameters.weight is 0.7, there 0.5" in outcome.output
    typo, other = json.loads((merge.merged / "featcal.json").read_text())["warnings"]
    assert "wieght" in typo
    assert "was merged by another recipe" in other


@pytest.mark.parametrize("command", [["calibrate"], ["check"], ["eval"], ["merge"], []])
def test_a_folder_in_the_recipes_place_is_an_error_that_says_which_comes_first(
    command: list[str], merge: Merge, featcal: Featcal
) -> None:
    outcome = featcal(*command, merge.merged, merge.recipe)
    assert outcome.code == 2
    assert f"{merge.merged} is a folder, expected a recipe: the mergekit YAML comes first" in outcome.errors


def test_a_number_of_threads_is_used_and_one_that_can_t_be_is_refused(merge: Merge, featcal: Featcal) -> None:
    before = torch.get_num_threads()
    try:
        assert featcal("check", merge.recipe, merge.merged, "-j", before + 1).code == 0
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
    outcome = featcal("check", merge.recipe, merge.merged, "--num-threads", 0)
    assert outcome.code == 2
    assert "0 is not in the range x>=1" in outcome.errors


def test_check_leaves_the_unfinished_files_of_a_running_calibration_alone(merge: Merge, featcal: Featcal) -> None:
    (merge.merged / ".featcal").mkdir()
    (merge.merged / ".featcal" / "model.safetensors").write_bytes(b"half of it")
    before = contents(merge.root)
    assert featcal("check", merge.recipe, merge.merged).code == 0
    assert contents(merge.root) == before


def test_the_merged_folders_own_copy_of_the_recipe_works_as_the_recipe(
    merge: Merge, calibrated: Merge, featcal: Featcal
) -> None:
    shutil.rmtree(merge.merged)
    run_mergekit(merge.recipe, merge.merged)
    assert featcal(merge.merged / "mergekit_config.yml", merge.merged, "--quiet").code == 0
    assert weights(merge.merged) == weights(calibrated.merged)


def test_relative_paths_are_relative_to_the_working_folder(
    merge: Merge, calibrated: Merge, featcal: Featcal, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = merge.root / "elsewhere"
    elsewhere.mkdir()
    merge.recipe.write_text(merge.recipe.read_text().replace(f"{merge.root}/", "../"))
    monkeypatch.chdir(elsewhere)
    outcome = featcal("../recipe.yml", "../merged", "--output", "out")
    assert outcome.code == 0, outcome
    assert outcome.output.endswith("Wrote out See it: featcal-hf report out")
    assert equal_states(loaded_state(elsewhere / "out"), loaded_state(calibrated.merged))


def test_paths_with_brackets_and_colons_are_printed_as_they_are(merge: Merge, featcal: Featcal) -> None:
    odd = merge.root / "out[/bold] :smile:"
    outcome = featcal(merge.recipe, merge.merged, "--output", odd)
    assert outcome.code == 0
    assert outcome.output.endswith(f"Wrote {odd} See it: featcal-hf report {odd}")


def test_a_fresh_merge_beside_the_report_of_an_old_one_is_calibrated(merge: Merge, featcal: Featcal) -> None:
    """Also where calibration leaves the first tensors as they are: experts with the base's first attention."""
    frozen = re.compile(r"layers\.0\.(self_attn\.[qkv]_proj|input_layernorm)")

    def freeze(tensors: dict[str, Tensor]) -> None:
        base = load_file(merge.base / "model.safetensors")
        tensors.update({name: base[name] for name in tensors if frozen.search(name)})

    for expert in ("a", "b"):
        change_tensors(merge.root / expert / "model.safetensors", freeze)
    run_mergekit(merge.recipe, merge.merged)
    before, state = weights(merge.merged), loaded_state(merge.merged)
    assert featcal(merge.recipe, merge.merged, "--quiet").code == 0
    after, name = weights(merge.merged), "model.layers.0.self_attn.q_proj.weight"
    assert after != before
    assert torch.equal(loaded_state(merge.merged)[name], state[name])
    run_mergekit(merge.recipe, merge.merged)
    assert (merge.merged / "featcal.json").is_file()
    assert weights(merge.merged) == before
    assert featcal(merge.recipe, merge.merged, "--quiet").code == 0
    assert weights(merge.merged) == after


def test_another_random_seed_chooses_other_rows(merge: Merge, calibrated: Merge, featcal: Featcal) -> None:
    assert featcal(merge.recipe, merge.merged, "--quiet", "--random-seed", "7").code == 0
    reports = [json.loads((folder / "featcal.json").read_text()) for folder in (merge.merged, calibrated.merged)]
    ours, theirs = (report["tasks"]["a"]["calibration_indices"] for report in reports)
    assert ours != theirs
    assert weights(merge.merged) != weights(calibrated.merged)


def test_features_that_overflow_are_an_error_that_names_the_module_and_write_nothing(
    merge: Merge, featcal: Featcal
) -> None:
    def grow(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"].fill_(3e38)

    change_tensors(merge.expert / "model.safetensors", grow)
    before = contents(merge.root)
    outcome = featcal(merge.recipe, merge.merged)
    assert outcome.code == 1
    assert "task a, layers.1.mlp.down_proj" in outcome.errors
    assert "not finite" in outcome.errors
    assert all_but_work(merge.root) == before
    with pytest.raises(SolveError):
        calibrate(merge.recipe, merge.merged)


def test_the_same_text_padded_to_64_tokens_gives_the_same_weights() -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = (5, 9, 16, 12, 16, 7, 11, 16)
    texts = [torch.randint(2, len(VOCABULARY), (length,), generator=generator) for length in lengths]

    def batch(width: int) -> dict[str, Tensor]:
        ids, mask = torch.ones(len(texts), width, dtype=torch.long), torch.zeros(len(texts), width, dtype=torch.long)
        for row, text in enumerate(texts):
            ids[row, : len(text)], mask[row, : len(text)] = text, 1
        return {"input_ids": ids, "attention_mask": mask}

    def result(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        merged, base, expert = (build_llama() for _ in range(3))
        noise = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for model in (merged, expert):
                for parameter in model.parameters():
                    parameter += 0.02 * torch.randn(parameter.shape, generator=noise)
        settings = Settings(lambda_=0.05)
        calibrate_model(merged, base=base, experts={"a": expert}, batches={"a": batches}, settings=settings)
        return merged.state_dict()

    alone = [
        {name: value[row : row + 1, :length] for name, value in batch(64).items()} for row, length in enumerate(lengths)
    ]
    expected = result(alone)
    for padded in ([batch(16)], [batch(64)]):
        for name, value in result(padded).items():
            error = float((value - expected[name]).norm() / expected[name].norm())
            assert error < 1e-5, name


def test_a_whole_clip_can_be_the_base_of_its_image_tower(tmp_path: Path) -> None:
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**tower, "vocab_size": 9, "max_position_embeddings": 8},
        vision_config={**tower, "image_size": 16, "patch_size": 8},
        projection_dim=8,
    )
    CLIPModel(config).save_pretrained(tmp_path / "base")
    vision = CLIPVisionModel(config.vision_config)
    for name in ("a", "b", "merged"):
        vision.save_pretrained(tmp_path / name)
    write_recipe(tmp_path, "float32")
    models = open_models(read_recipe(tmp_path / "recipe.yml"), tmp_path / "merged")
    assert models.base is not None
    path = list(models.student.blocks)[-1]
    with models.base.block(path, torch.device("cpu")) as block:
        loaded = {name: value.clone() for name, value in block.state_dict().items()}
    expected = CLIPModel.from_pretrained(tmp_path / "base").vision_model.encoder.layers[1].state_dict()
    assert equal_states(loaded, expected)


def test_help_and_version_name_the_command(featcal: Featcal) -> None:
    assert "featcal-hf recipe.yml ./merged" in featcal("--help").output
    assert re.fullmatch(r"featcal-hf, version \d+\.\d+\.\d+", featcal("--version").output)


def test_a_misspelt_command_is_told_from_a_recipe(featcal: Featcal) -> None:
    misspelt, missing = featcal("chek", "recipe.yml", "merged"), featcal("chek.yml", "merged")
    assert (misspelt.code, missing.code) == (2, 2)
    assert misspelt.errors.endswith("Error: 'chek' is neither a command nor a recipe; did you mean 'check'?")
    assert "chek.yml: the recipe can't be read" in missing.errors


def test_python_runs_the_package_as_the_command() -> None:
    result = subprocess.run([sys.executable, "-m", "featcal_hf", "--version"], capture_output=True, text=True)
    assert result.stdout.startswith("featcal-hf, version ")


def test_the_installed_command_reports_a_missing_recipe_with_exit_code_2(tmp_path: Path) -> None:
    command = [Path(sys.executable).with_name("featcal-hf"), tmp_path / "no.yml", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {tmp_path / 'no.yml'}")
