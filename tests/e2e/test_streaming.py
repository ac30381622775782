"""How much of each model is in memory while a run goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from mergekit.common import ModelReference
from tiny_merge import Merge, Outcome, contents, copy_merge
from torch import from_file
from transformers import LlamaForCausalLM

from featcal_hf.checkpoint import resolve
from featcal_hf.commands.options import Size
from featcal_hf.errors import CheckpointError
from featcal_hf.preparation import prepare
from featcal_hf.run import calibrate_prepared
from featcal_hf.save import UNFINISHED, WORK
from featcal_hf.streamed import StreamedModel


def resident_bytes(model: StreamedModel) -> int:
    """Of blocks; what lies outside them is views of mapped files."""
    return sum(
        parameter.numel() * parameter.element_size()
        for block in model.blocks.values()
        for parameter in block.parameters()
        if parameter.device.type != "meta"
    )


def largest_block(model: StreamedModel) -> int:
    return max(model.block_bytes(path) for path in model.blocks)


def test_at_every_forward_of_a_block_each_model_holds_that_block_at_most(merge: Merge) -> None:
    prepared = prepare(merge.recipe, merge.merged)
    models = prepared.models.all()
    seen: dict[str, list[int]] = {label: [] for label in models}
    together: list[int] = []

    def look(*_: object) -> None:
        sizes = {label: resident_bytes(model) for label, model in models.items()}
        for label, size in sizes.items():
            seen[label].append(size)
        together.append(sum(size for label, size in sizes.items() if label.startswith("expert")))

    for model in models.values():
        for block in model.blocks.values():
            block.register_forward_pre_hook(look)
    calibrate_prepared(prepared, None, torch.device("cpu"), lambda step: None, 0.0)
    block_size = largest_block(prepared.models.student)
    assert max(seen["merged model"]) == block_size
    assert max(seen["base model"]) == block_size
    assert max(together) == block_size
    assert all(resident_bytes(model) == 0 for model in models.values())


def test_outside_the_blocks_weights_come_with_outer_and_go_after_it(merge: Merge) -> None:
    student = prepare(merge.recipe, merge.merged).models.student
    reference = LlamaForCausalLM.from_pretrained(merge.merged)
    with student.outer():
        assert torch.equal(student.module.get_input_embeddings().weight, reference.get_input_embeddings().weight)
        assert torch.equal(student.module.lm_head.weight, reference.lm_head.weight)
        assert all(parameter.is_meta for parameter in student.blocks["layers.0"].parameters())
    assert all(parameter.is_meta for parameter in student.module.parameters())


@pytest.mark.parametrize("place", ["in place", "output"])
def test_features_in_files_give_the_same_bytes_and_leave_nothing_behind(
    place: str, merge: Merge, tmp_path: Path, featcal: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("featcal_hf.activations.SMALL_BYTES", 1)
    written: list[str] = []
    monkeypatch.setattr(
        "featcal_hf.activations.torch.from_file", lambda path, **how: written.append(path) or from_file(path, **how)
    )
    other = copy_merge(merge, tmp_path / "other")
    output = [] if place == "in place" else ["--output", tmp_path / "calibrated"]
    assert featcal(other.recipe, other.merged, "--activation-memory", "1TB").code == 0
    assert not written
    assert featcal(merge.recipe, merge.merged, *output, "--activation-memory", "1kB").code == 0
    target = merge.merged if place == "in place" else tmp_path / "calibrated"
    assert len(written) > 3 * 2 * 2
    assert {Path(path).parents[2] for path in written} == {target / (WORK if place == "in place" else UNFINISHED)}
    assert not any(Path(path).exists() for path in written)
    left, expected = contents(target), contents(other.merged)
    assert left.keys() == expected.keys()
    assert left["model.safetensors"] == expected["model.safetensors"]


def test_a_size_that_is_none_is_refused_with_an_example(merge: Merge, featcal: Callable[..., Outcome]) -> None:
    refused = featcal("check", merge.recipe, merge.merged, "--activation-memory", "plenty")
    assert refused.code == 2
    assert "'plenty' is no size; write bytes with a unit, such as 4GB" in refused.errors


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("4GB", 4 * 10**9), ("1.5 MiB", 3 * 2**19), ("200k", 200_000), ("7 b", 7)]
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert Size().convert(text, None, None) == size


def cached_repo(cache: Path, source: Path, repo: str, commit: str) -> Path:
    """A model as huggingface_hub leaves it in its cache after a download."""
    storage = cache / f"models--{repo.replace('/', '--')}"
    snapshot = storage / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file in source.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    (storage / "refs").mkdir()
    (storage / "refs" / "main").write_text(commit)
    return snapshot


def test_a_cached_hub_model_is_found_offline_by_name_and_by_revision(merge: Merge, tmp_path: Path) -> None:
    assert huggingface_hub.constants.HF_HUB_OFFLINE
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = cached_repo(tmp_path / "hub", merge.merged, "org/model", commit)
    for text in ("org/model", f"org/model@{commit}"):
        folder, revision = resolve(ModelReference.model_validate(text), str(tmp_path / "hub"))
        assert (folder, revision) == (snapshot, commit)


def test_a_model_that_is_nowhere_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"org/absent is not a folder here .* check the name"):
        resolve(ModelReference.model_validate("org/absent"), str(tmp_path))
