"""A checkpoint's tensors by name: which file holds which, read a few at a time."""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from mergekit.common import ModelReference
from safetensors import SafetensorError, safe_open

from featcal_hf.errors import CheckpointError, listed

SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"
SIDE_FILES = ["*.json", "*.model", "*.txt", "*.jinja", "README.md"]
SCAN_NUMBERS = 2**22
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


Mark = tuple[int, int, int]


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint: its file, dtype and shape."""

    shard: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class Checkpoint:
    """A folder of weights, opened: its table of tensors, none of them loaded.

    Attributes:
        folder: the local folder.
        tensors: name -> entry, in the order of the files.
        index: name of the shard index file, None for a single file.
        revision: commit of a Hub snapshot, None for a local folder.
        marks: what a weight file was when its table was read: bytes, time of change, number in the file system.
    """

    folder: Path
    tensors: dict[str, TensorEntry]
    index: str | None
    revision: str | None
    marks: dict[str, Mark] = field(default_factory=dict)

    @property
    def shards(self) -> list[str]:
        """The weight files, in order."""
        return list(dict.fromkeys(entry.shard for entry in self.tensors.values()))

    @property
    def pickled(self) -> bool:
        """Whether the weights are PyTorch pickles rather than safetensors."""
        return not self.shards[0].endswith(".safetensors")

    @contextmanager
    def reading(self, names: Iterable[str]) -> Iterator[dict[str, Any]]:
        """Lazy tensors by name: `value[...]` reads one. Files are mapped while open, and no longer."""
        by_shard: dict[str, list[str]] = {}
        for name in names:
            by_shard.setdefault(self.tensors[name].shard, []).append(name)
        lazy: dict[str, Any] = {}
        with ExitStack() as files:
            for shard, members in by_shard.items():
                path = self.folder / shard
                self._check_unchanged(shard)
                if self.pickled:
                    loaded = _load_pickle(path)
                    lazy.update((name, loaded[name]) for name in members)
                else:
                    file = files.enter_context(_open_safetensors(path))
                    lazy.update((name, file.get_slice(name)) for name in members)
            yield lazy

    def check_unchanged(self) -> None:
        """Refuse weight files that are no longer those whose tables were read.

        Raises:
            CheckpointError: names the file.
        """
        for shard in self.shards:
            self._check_unchanged(shard)

    def _check_unchanged(self, shard: str) -> None:
        if shard in self.marks and file_mark(self.folder / shard) != self.marks[shard]:
            raise CheckpointError(
                f"{self.folder / shard} was changed or replaced while it was in use; leave the models alone until the "
                "run has ended, and run the same command again."
            )

    def read(self, name: str) -> torch.Tensor:
        """One tensor, copied into memory."""
        with self.reading([name]) as lazy:
            value: torch.Tensor = lazy[name][...].clone()
            return value


def resolve(reference: ModelReference, cache_dir: str | None = None) -> tuple[Path, str | None]:
    """The local folder of a model, downloaded if it isn't there, and the commit of a Hub snapshot.

    Raises:
        CheckpointError: neither a folder nor to be had from the Hub.
    """
    path = Path(reference.model.path)
    if path.is_dir():
        return path, None
    if path.is_absolute() or str(reference.model.path).startswith((".", "~")) or path.exists():
        raise CheckpointError(f"model {reference} is not a folder here; check the name.")
    options: dict[str, Any] = {
        "revision": reference.model.revision,
        "cache_dir": cache_dir,
        "ignore_patterns": ["*/*"],
    }
    try:
        patterns = [*SIDE_FILES, "*.safetensors"]
        folder = Path(huggingface_hub.snapshot_download(str(path), allow_patterns=patterns, **options))
        if not any(folder.glob("*.safetensors")):
            patterns = [*SIDE_FILES, "*.bin"]
            folder = Path(huggingface_hub.snapshot_download(str(path), allow_patterns=patterns, **options))
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError) as error:
        raise CheckpointError(
            f"model {reference} is not a folder here and can't be had from the Hub ({error}); check the name, "
            "download it while online, or log in with `hf auth login` if it is gated."
        ) from error
    return folder, folder.name


def open_checkpoint(folder: Path, revision: str | None = None) -> Checkpoint:
    """Read the tensor table of a folder of weights.

    Raises:
        CheckpointError: no weights, an adapter alone, stale shards, unreadable or truncated files.
    """
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise CheckpointError(
                f"{folder} is a PEFT adapter, not a model (it has adapter_config.json and no config.json); name "
                f"it together with its base: BASE_MODEL+{folder}."
            )
        raise CheckpointError(f"{folder} has no config.json; expected a folder that from_pretrained can load.")
    index, shards, weight_map = _find_shards(folder)
    marks = {shard: file_mark(folder / shard) for shard in shards}
    tensors: dict[str, TensorEntry] = {}
    for shard in shards:
        for name, entry in read_table(folder, shard).items():
            if weight_map is None or weight_map.get(name) == shard:
                tensors[name] = entry
    lost = sorted(set(weight_map or ()) - set(tensors))
    if lost:
        raise CheckpointError(
            f"{folder / str(index)} lists {len(lost)} tensors that its shards don't hold ({listed(lost)}); the "
            "checkpoint is incomplete, make or download it again."
        )
    return Checkpoint(folder, tensors, index, revision, marks)


def file_mark(path: Path) -> Mark:
    """By what a file is known to be the same: bytes, time of change in nanoseconds, number in the file system."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return (-1, 0, 0)
    return (stat.st_size, stat.st_mtime_ns, stat.st_ino)


def read_table(folder: Path, shard: str) -> dict[str, TensorEntry]:
    """The tensors of one weight file, safetensors or pickle, by name.

    Raises:
        CheckpointError: it can't be read.
    """
    return _pickle_table(folder, shard) if shard.endswith(".bin") else _safetensors_table(folder, shard)


def check_finite(checkpoint: Checkpoint, label: str) -> None:
    """Read every tensor once and refuse NaN and infinity.

    Raises:
        CheckpointError: names the tensor.
    """
    for name, entry in checkpoint.tensors.items():
        if not entry.dtype.is_floating_point:
            continue
        with checkpoint.reading([name]) as lazy:
            value = lazy[name][...].reshape(-1)
            if not all(bool(part.isfinite().all()) for part in value.split(SCAN_NUMBERS)):
                raise CheckpointError(
                    f"{label} {checkpoint.folder / entry.shard}: tensor {name} holds NaN or infinity; the model "
                    "is broken, make or download it again."
                )


def _find_shards(folder: Path) -> tuple[str | None, list[str], dict[str, str] | None]:
    for single in (SAFETENSORS, PICKLED):
        index = f"{single}.index.json"
        has_single, has_index = (folder / single).is_file(), (folder / index).is_file()
        if has_index:
            weight_map = read_index(folder, index)
            shards = list(dict.fromkeys(weight_map.values()))
            if has_single and single not in shards:
                raise CheckpointError(
                    f"{folder} has both {single} and {index} naming other files ({listed(shards)}), left over from "
                    "an earlier merge; readers disagree about which to load. Delete what is stale and run again."
                )
            missing = [shard for shard in shards if not (folder / shard).is_file()]
            if missing:
                raise CheckpointError(
                    f"{folder / index} names {listed(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
                    "there; the checkpoint is incomplete, make or download it again."
                )
            return index, shards, weight_map
        if has_single:
            return None, [single], None
    raise CheckpointError(
        f"{folder} has no {SAFETENSORS} or {PICKLED} (nor their .index.json); mergekit can end without an error "
        "and without weights for architectures that it doesn't describe; `featcal-hf merge RECIPE DIR` merges those."
    )


def read_index(folder: Path, index: str) -> dict[str, str]:
    """Tensor name -> shard, from a shard index.

    Raises:
        CheckpointError: it can't be read, or leads out of the folder.
    """
    try:
        weight_map = json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder / index} is not a shard index ({error!r}); make or download the checkpoint again."
        ) from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / index} lists no tensors; make or download the checkpoint again.")
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".."):
            raise CheckpointError(
                f"{folder / index} names the file {shard!r}; a shard must lie in the checkpoint's own folder."
            )
    return weight_map


def _safetensors_table(folder: Path, shard: str) -> dict[str, TensorEntry]:
    with _open_safetensors(folder / shard) as file:
        table = {}
        for name in file.keys():  # noqa: SIM118 - not a mapping
            view = file.get_slice(name)
            if view.get_dtype() not in DTYPES:
                raise CheckpointError(
                    f"{folder / shard}: tensor {name} is {view.get_dtype()}; calibration needs float weights, name "
                    "the model's full-precision checkpoint."
                )
            table[name] = TensorEntry(shard, DTYPES[view.get_dtype()], tuple(view.get_shape()))
        return table


def _pickle_table(folder: Path, shard: str) -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(shard, value.dtype, tuple(value.shape))
        for name, value in _load_pickle(folder / shard).items()
    }


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} can't be read as safetensors ({error}); it may be truncated, make or download it again."
        ) from error


def _load_pickle(path: Path) -> Mapping[str, torch.Tensor]:
    try:
        # Files from before PyTorch 1.6 are no zip archives, and only those can be mapped.
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (RuntimeError, OSError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{path} can't be read as a PyTorch weight file ({_reason(error)}); it may be truncated or hold more "
            "than tensors. Make it again, or save it as safetensors."
        ) from error
    tensors: Mapping[str, torch.Tensor] = loaded if isinstance(loaded, dict) else {"": loaded}
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{path}: {name!r} is {type(value).__name__}, expected a dictionary of tensors by name; save the "
                "model's state_dict alone, or save it as safetensors."
            )
    return tensors


def _reason(error: Exception) -> str:
    """What PyTorch found, without its advice to run the file's code."""
    if not isinstance(error, pickle.UnpicklingError):
        return str(error).partition("\n")[0].rstrip(".")
    refused = re.search(r"(GLOBAL|global|function|class) (\S+)", str(error))
    return f"it calls {refused[2]}" if refused else "it is no pickle of tensors"
