"""Merge models as `mergekit-yaml` does, with mergekit's own methods, whatever the architecture: a tensor at a time."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from mergekit.card import generate_card
from mergekit.common import ModelPath, ModelReference, dtype_from_name, parse_kmb
from mergekit.config import InputModelDefinition, MergeConfiguration
from torch import Tensor
from transformers import set_seed

from featcal_hf.calibrate import OnStep, Step
from featcal_hf.errors import CheckpointError, RecipeError
from featcal_hf.merge_plan import MergePlan, PlannedTensor, plan_merge
from featcal_hf.preparation import OnStage
from featcal_hf.recipe_merge import read_merge
from featcal_hf.recipe_yaml import Document, read_document
from featcal_hf.save import check_space, work_folder
from featcal_hf.shards import ShardWriter, plan_shards
from featcal_hf.writers import sync, write_text

SHARD_SIZE = "5B"
CARD_RECIPE = "the recipe's text"
CONFIGS = ("config.json", "generation_config.json")
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "normalizer.json",
    "spiece.model",
    "sentencepiece.bpe.model",
)
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MergeReport:
    """What a merge did.

    Attributes:
        merged: how many tensors were merged.
        copied: tensor -> why it was taken from one model as it is.
        left_out: model's label -> its weights for which the result has no place; "result" -> heads that it lacks.
        shards: the weight files.
        seconds: of the whole merge.
    """

    merged: int
    copied: dict[str, str]
    left_out: dict[str, list[str]]
    shards: list[str]
    seconds: float


def merge(
    recipe: str | Path,
    out: str | Path,
    *,
    out_shard_size: int | str = SHARD_SIZE,
    device: str = "cpu",
    cache_dir: str | None = None,
    trust_remote_code: bool = False,
    random_seed: int | None = None,
    copy_tokenizer: bool = True,
    write_model_card: bool = True,
    mapping: Mapping[str, str] | None = None,
    on_stage: OnStage = lambda stage: None,
    on_step: OnStep = lambda step: None,
) -> MergeReport:
    """Merge a recipe's models into the new folder `out`, each tensor by mergekit's own implementation of the method.

    The result has the names, order and config of the base (of the first model without one). What is the same in all
    models is merged; heads that differ are the base's. One tensor of each model is in memory at a time, and one block
    of those with an adapter. The folder appears when it is complete.

    Args:
        recipe: the mergekit YAML; a `featcal:` section may be there or not.
        out: the folder to make; it may exist if it is empty.
        out_shard_size: bytes of a shard's tensors, as mergekit's `--out-shard-size`.
        device: where tensors are merged.
        cache_dir: storage for downloaded models, as mergekit's `--transformers-cache`.
        trust_remote_code: let configs run code of their repository.
        random_seed: for methods that draw numbers (DARE, DELLA). They draw in another order than in mergekit-yaml.
        copy_tokenizer: copy the base's tokenizer and processor.
        write_model_card: write mergekit's README.md and mergekit_config.yml.
        mapping: ids of models in the recipe -> local paths to read instead.
        on_stage: called with the name of each stage of preparation.
        on_step: called before each block.

    Returns:
        What was done.

    Raises:
        RecipeError: the recipe can't be read, or asks for what can't be done.
        CheckpointError: a model is missing, incomplete or doesn't fit; `out` isn't empty; the disk is full. Nothing
            is left in `out` then.
    """
    started = time.perf_counter()
    out = Path(out).absolute()
    document = read_document(Path(recipe))
    described = read_merge(document)
    for warning in described.warnings:
        logger.warning(warning)
    _check_out(out)
    on_stage("opening checkpoints")
    plan = plan_merge(document, described, cache_dir=cache_dir, trust_remote_code=trust_remote_code, mapping=mapping)
    _report_heads(plan)
    table = plan_shards({tensor.name: (tensor.dtype, tensor.shape) for tensor in plan.tensors}, _bytes(out_shard_size))
    check_space(
        out, sum(entry.bytes for entry in table.values()), "the merge takes {}; free some space or name another folder."
    )
    if random_seed is not None:
        set_seed(random_seed)
    try:
        with work_folder(out.with_name(f".{out.name}.merging")) as work:
            folder = work / "model"
            folder.mkdir()
            writer = ShardWriter(folder, table)
            _write_tensors(plan, described.configuration, writer, torch.device(device), on_step)
            writer.complete()
            _write_side_files(plan, described.configuration, folder, copy_tokenizer)
            if write_model_card:
                _write_card(document, described.configuration, folder, out.name)
            if out.exists():
                out.rmdir()
            os.replace(folder, out)
    except OSError as error:
        raise CheckpointError(
            f"{out} can't be written ({error}); nothing was left there. Mend that and run the same command again."
        ) from error
    return MergeReport(
        sum(tensor.task is not None for tensor in plan.tensors),
        plan.copied,
        plan.left_out,
        writer.shards,
        time.perf_counter() - started,
    )


def _check_out(out: Path) -> None:
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise CheckpointError(
            f"{out} exists and isn't an empty folder; files of an earlier merge would be read together with the new "
            "ones. Name a new folder, or empty that one."
        )
    if out.is_mount():
        raise CheckpointError(f"{out} is a mount point, and can't be replaced by a finished folder; name one in it.")


def _bytes(size: int | str) -> int:
    try:
        parsed: int = parse_kmb(size)
    except (ValueError, IndexError) as error:
        raise CheckpointError(f"out_shard_size is {size!r}; give bytes, as 5B, 500M or a plain number.") from error
    return parsed


def _report_heads(plan: MergePlan) -> None:
    """Say what isn't merged although someone may think so."""
    heads = {name: reason for name, reason in plan.copied.items() if reason.startswith("not the same")}
    if heads and plan.base is not None:
        logger.warning("%s: taken from %s, %s", ", ".join(heads), plan.base.label, next(iter(heads.values())))
    for label, names in plan.left_out.items():
        if label == "result":
            reason = "not the same in every model, and no base_model has it; the result has no such head"
            logger.warning("%s: left out, %s", ", ".join(names), reason)
        else:
            shown = ", ".join(names) if len(names) <= 4 else f"{names[0]} and {len(names) - 1} more tensors"
            logger.warning("%s of %s: left out, %s has no place for it", shown, label, plan.donor.label)


@torch.no_grad()
def _write_tensors(
    plan: MergePlan, configuration: MergeConfiguration, writer: ShardWriter, device: torch.device, on_step: OnStep
) -> None:
    blocks = plan.blocks
    for index, path in enumerate(blocks):
        on_step(Step(path or "outside the blocks", index, len(blocks), "merging", 0, 1))
        tensors = [tensor for tensor in plan.tensors if tensor.block == path]
        needed: dict[ModelReference, list[str]] = {}
        for tensor in tensors:
            for reference, name in tensor.sources.items():
                needed.setdefault(reference, []).append(name)
        with ExitStack() as open_:
            read = {ref: open_.enter_context(plan.inputs[ref].reading(path, names)) for ref, names in needed.items()}
            for tensor in tensors:
                values = {reference: read[reference](name) for reference, name in tensor.sources.items()}
                writer.write(tensor.name, _merge_tensor(tensor, values, configuration, device))


def _merge_tensor(
    tensor: PlannedTensor, values: dict[ModelReference, Tensor], configuration: MergeConfiguration, device: torch.device
) -> Tensor:
    """Cast, merge, cast, as mergekit-yaml does it."""
    if not tensor.dtype.is_floating_point:
        return next(iter(values.values()))
    dtype, out_dtype = dtype_from_name(configuration.dtype), dtype_from_name(configuration.out_dtype)
    cast = {reference: value.to(dtype=dtype or value.dtype).to(device) for reference, value in values.items()}
    if tensor.task is None:
        result: Tensor = next(iter(cast.values()))
    else:
        try:
            result = tensor.task.execute(cast)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise RecipeError(
                f"mergekit's {configuration.merge_method} can't merge {tensor.name} of shape {tensor.shape} with these "
                f"parameters: {str(error).splitlines()[0]}. Change them, or the method."
            ) from error
    return result.to(dtype=out_dtype or result.dtype)


def _write_side_files(plan: MergePlan, configuration: MergeConfiguration, folder: Path, copy_tokenizer: bool) -> None:
    donor = plan.donor.checkpoint.folder
    for name in CONFIGS:
        if (donor / name).is_file():
            shutil.copyfile(donor / name, folder / name)
    dtype = configuration.out_dtype or configuration.dtype
    if dtype is not None:
        _set_dtype(folder / "config.json", dtype.removeprefix("torch."))
    if copy_tokenizer:
        origins = [donor] if plan.base is None else [plan.base.checkpoint.folder, donor]
        for names in (TOKENIZERS, PROCESSORS):
            origin = next((one for one in origins if any((one / name).is_file() for name in names)), donor)
            for name in names:
                if (origin / name).is_file():
                    shutil.copyfile(origin / name, folder / name)
    for path in folder.glob("*.json"):
        sync(path)


def _set_dtype(path: Path, dtype: str) -> None:
    """Make a config say what the weights are; it keeps its bytes where it does already."""
    config = json.loads(path.read_text(encoding="utf-8"))
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    if config.get(key) != dtype:
        write_text(path, json.dumps(config | {key: dtype}, indent=2, ensure_ascii=False) + "\n")


def _write_card(document: Document, configuration: MergeConfiguration, folder: Path, name: str) -> None:
    """Write mergekit's card; it is given local folders as absolute paths, or it would ask the Hub for them."""
    write_text(folder / "mergekit_config.yml", document.text)
    local = {
        str(Path(path.path).absolute()): path.path
        for reference in configuration.referenced_models()
        for path in (reference.model, reference.lora)
        if path is not None and Path(path.path).exists()
    }
    named = MergeConfiguration(
        merge_method=configuration.merge_method,
        base_model=None if configuration.base_model is None else _absolute(configuration.base_model),
        models=[InputModelDefinition(model=_absolute(model)) for model in configuration.referenced_models()],
    )
    card: str = generate_card(config=named, config_yaml=CARD_RECIPE, name=name)
    for path in sorted(local, key=len, reverse=True):
        card = card.replace(path, local[path])
    write_text(folder / "README.md", card.replace(CARD_RECIPE, document.text))


def _absolute(reference: ModelReference) -> ModelReference:
    def located(path: ModelPath) -> ModelPath:
        return ModelPath(path=str(Path(path.path).absolute())) if Path(path.path).exists() else path

    lora = None if reference.lora is None else located(reference.lora)
    return ModelReference(model=located(reference.model), lora=lora)
