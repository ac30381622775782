"""Whole models, for evaluation: which they are, found and checked, and one at a time in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from mergekit.common import ModelReference
from peft import PeftModel
from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from featcal_hf.checkpoint import open_checkpoint, resolve
from featcal_hf.compare import config_for
from featcal_hf.errors import CheckpointError, listed
from featcal_hf.mapping import locate_model
from featcal_hf.recipe import Recipe
from featcal_hf.save import REPORT, is_calibrated
from featcal_hf.streamed import StreamedModel, model_class, read_config


@dataclass(frozen=True)
class WholeModel:
    """A model to be loaded as a whole.

    Attributes:
        folder: its checkpoint.
        config: what it is loaded with.
        revision: commit of a Hub snapshot.
        adapter: folder and commit of a PEFT adapter on it.
    """

    folder: Path
    config: PretrainedConfig
    revision: str | None = None
    adapter: tuple[Path, str | None] | None = None

    def record(self) -> dict[str, str | None]:
        """Where it was read, JSON-able."""
        entry = {"folder": str(self.folder), "revision": self.revision}
        if self.adapter is not None:
            entry |= {"adapter": str(self.adapter[0]), "adapter_revision": self.adapter[1]}
        return entry


def open_calibrated(recipe: Recipe, folder: Path, trust_remote_code: bool) -> tuple[WholeModel, StreamedModel]:
    """The calibrated model, and its blocks' tables.

    Raises:
        CheckpointError: it isn't one.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; name the one that holds the calibrated model.")
    checkpoint = open_checkpoint(folder)
    config = read_config(folder, trust_remote_code)
    if not is_calibrated(checkpoint):
        found = "speaks of other weights" if (folder / REPORT).is_file() else "isn't there"
        raise CheckpointError(
            f"{folder} is not a calibrated model ({REPORT} {found}); run `featcal-hf calibrate {recipe.path} {folder}` "
            "first (with --output to keep the merged model, which --merged then compares with)."
        )
    return WholeModel(folder, config), StreamedModel(checkpoint, model_class(config, folder), config)


def open_merged(folder: Path, student: StreamedModel, trust_remote_code: bool) -> WholeModel:
    """The merged model as it was before calibration.

    Raises:
        CheckpointError: it isn't there, is calibrated, or is another kind of model.
    """
    if not folder.is_dir():
        raise CheckpointError(f"--merged {folder} is not a folder; name the one that mergekit wrote.")
    if is_calibrated(open_checkpoint(folder)):
        raise CheckpointError(
            f"--merged {folder} holds calibrated weights; name the merged model as it was before, or leave "
            "--merged out (calibrate with --output to keep both)."
        )
    return WholeModel(folder, config_for(student.module, read_config(folder, trust_remote_code), folder))


def open_expert(
    reference: ModelReference,
    student: StreamedModel,
    mapping: Mapping[str, str],
    cache_dir: str | None,
    trust_remote_code: bool,
) -> WholeModel:
    """An expert, with its adapter if it is one.

    Raises:
        CheckpointError: it can't be had, or is another kind of model.
    """
    located = locate_model(reference, mapping)
    folder, revision = resolve(located, cache_dir)
    config = config_for(student.module, read_config(folder, trust_remote_code), folder)
    adapter = None if located.lora is None else resolve(ModelReference(model=located.lora), cache_dir)
    return WholeModel(folder, config, revision, adapter)


@contextmanager
def whole_model(whole: WholeModel, cls: type[PreTrainedModel], device: torch.device) -> Iterator[nn.Module]:
    """A whole model on the device, in its checkpoint's dtype, with a PEFT adapter's layers in it if it has one.

    Raises:
        CheckpointError: it can't be loaded, or lacks tensors, which would then be random.
    """
    folder = whole.folder
    bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        loaded: Any = cls.from_pretrained(folder, config=whole.config, dtype="auto", output_loading_info=True)
        model, info = loaded
        saved: list[str] = []
        if model.can_generate():
            model.generation_config = greedy(model.generation_config)
        if whole.adapter is not None:
            model = PeftModel.from_pretrained(model, str(whole.adapter[0]))
            saved = list(getattr(model.active_peft_config, "modules_to_save", None) or [])
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"{folder} can't be loaded as {cls.__name__}: {error}") from error
    finally:
        if bar:
            transformers_logging.enable_progress_bar()
    missing = [name for name in info["missing_keys"] if not any(part in saved for part in name.split("."))]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} tensors of {cls.__name__} ({listed(sorted(missing))}), which would be "
            "random; name a whole model, or evaluate without it (leave out --experts where it is an expert)."
        )
    try:
        yield cast(nn.Module, model).to(device).eval()
    finally:
        model.to("meta")  # frees the weights, whoever still holds the model
        if device.type == "cuda":
            torch.cuda.empty_cache()


def greedy(config: GenerationConfig) -> GenerationConfig:
    """Plain greedy generation with a model's own special tokens; what else its folder says can get lost in a merge."""
    kept = ("bos_token_id", "eos_token_id", "decoder_start_token_id", "forced_bos_token_id")
    return GenerationConfig(do_sample=False, num_beams=1, **{name: getattr(config, name, None) for name in kept})
