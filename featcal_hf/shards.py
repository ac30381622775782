"""Safetensors shards of known contents, written one tensor at a time and in any order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from featcal_hf.checkpoint import DTYPES, SAFETENSORS, TensorEntry
from featcal_hf.writers import raw_bytes, sync, write_text

NAMES = {dtype: name for name, dtype in DTYPES.items()}


def plan_shards(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], max_bytes: int) -> dict[str, TensorEntry]:
    """Divide tensors, in their order, among shards named as on the Hub.

    Args:
        tensors: name -> dtype and shape.
        max_bytes: of a shard's tensors; a larger tensor has a shard of its own. None is larger where it is 0.
    """
    groups: list[dict[str, TensorEntry]] = [{}]
    filled = 0
    for name, (dtype, shape) in tensors.items():
        entry = TensorEntry("", dtype, shape)
        if groups[-1] and 0 < max_bytes < filled + entry.bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = entry
        filled += entry.bytes
    stem = SAFETENSORS.removesuffix(".safetensors")
    files = [f"{stem}-{number + 1:05d}-of-{len(groups):05d}.safetensors" for number in range(len(groups))]
    if len(groups) == 1:
        files = [SAFETENSORS]
    return {
        name: TensorEntry(file, entry.dtype, entry.shape)
        for file, group in zip(files, groups, strict=True)
        for name, entry in group.items()
    }


class ShardWriter:
    """Writes each tensor to its place in its shard; nothing is held in memory.

    Args:
        folder: an empty folder.
        tensors: the table of `plan_shards`.
    """

    def __init__(self, folder: Path, tensors: dict[str, TensorEntry]) -> None:
        self._folder, self._tensors = folder, tensors
        self._offsets: dict[str, int] = {}
        self._left = set(tensors)
        for shard in self.shards:
            self._begin(shard)

    @property
    def shards(self) -> list[str]:
        """The files, in order."""
        return list(dict.fromkeys(entry.shard for entry in self._tensors.values()))

    def write(self, name: str, value: Tensor) -> None:
        """Write one tensor.

        Raises:
            ValueError: it is not of the planned dtype and shape.
        """
        entry = self._tensors[name]
        if value.dtype != entry.dtype or tuple(value.shape) != entry.shape:
            raise ValueError(f"{name} is {value.dtype} {tuple(value.shape)}, planned was {entry.dtype} {entry.shape}")
        with (self._folder / entry.shard).open("r+b") as file:
            file.seek(self._offsets[name])
            file.write(raw_bytes(value))
        self._left.discard(name)

    def complete(self) -> None:
        """Flush the shards to disk and write their index, if there are several.

        Raises:
            ValueError: a tensor has not been written.
        """
        if self._left:
            raise ValueError(f"not written: {', '.join(sorted(self._left))}")
        for shard in self.shards:
            sync(self._folder / shard)
        if len(self.shards) > 1:
            index = {
                "metadata": {"total_size": sum(entry.bytes for entry in self._tensors.values())},
                "weight_map": {name: entry.shard for name, entry in self._tensors.items()},
            }
            write_text(self._folder / f"{SAFETENSORS}.index.json", json.dumps(index, indent=2) + "\n")

    def _begin(self, shard: str) -> None:
        members = [(name, entry) for name, entry in self._tensors.items() if entry.shard == shard]
        members.sort(key=lambda member: -member[1].dtype.itemsize)  # so that every tensor is aligned to its numbers
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, entry in members:
            start, end = end, end + entry.bytes
            header[name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end]}
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with (self._folder / shard).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
        for name, _ in members:
            self._offsets[name] = 8 + len(text) + int(header[name]["data_offsets"][0])
