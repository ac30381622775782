"""Open a task's dataset, from a local path or from the Hub, and read its rows in shuffled order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

from featcal_hf.errors import DataError

if TYPE_CHECKING:
    from featcal_hf.recipe import DatasetSpec

Row = dict[str, Any]

BUILDERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".ndjson": ("json", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".parquet": ("parquet", {}),
    ".txt": ("text", {}),
}
"""File ending -> the `datasets` builder that reads it, with its options."""

FOLDERS = {"saved": "a folder written by `save_to_disk`", "imagefolder": "a folder of images"}
"""Kinds of folder that hold exactly one dataset."""

STREAM_BUFFER = 10_000
"""Rows among which a streamed dataset is shuffled."""

# What `datasets` raises for data it can't find or read, depending on the builder; StopIteration is its
# JSON reader's answer to an empty file.
READ_ERRORS = (OSError, ValueError, RuntimeError, StopIteration, datasets.exceptions.DatasetsError)


@dataclass(frozen=True)
class Source:
    """An opened dataset: one split, nothing decoded yet."""

    rows: datasets.Dataset | datasets.IterableDataset
    kind: str
    """How it was read: `file`, `saved` (by `save_to_disk`), `imagefolder`, `folder` or `hub`."""
    where: str
    """The dataset as error messages name it."""
    folder: Path
    """What relative image paths in it start from."""

    @property
    def streaming(self) -> bool:
        """Whether rows come one after another, without indices."""
        return isinstance(self.rows, datasets.IterableDataset)

    @property
    def columns(self) -> list[str]:
        """Names of the columns; a stream without declared columns is asked for its first row.

        Raises:
            DataError: the stream can't be read.
        """
        if self.rows.column_names is not None:
            return list(self.rows.column_names)
        try:
            return list(next(iter(self.rows), {}))
        except READ_ERRORS as error:
            raise DataError(_unreadable(self.where, error)) from error

    def shuffled(self, seed: int, columns: list[str]) -> Iterator[tuple[int, Row]]:
        """Yield the given columns of every row in the order of `Dataset.shuffle(seed=seed)`.

        Images are left encoded, so only rows that are used get decoded.

        Yields:
            The row's index in the split (in a stream: its position in the shuffled stream) and the row.

        Raises:
            DataError: a row can't be read.
        """
        rows = self._undecoded(columns)
        numbered: Iterator[tuple[int, Row]]
        if isinstance(rows, datasets.IterableDataset):
            numbered = enumerate(rows.shuffle(seed=seed, buffer_size=STREAM_BUFFER))
        else:
            # The permutation that `Dataset.shuffle` makes; the method itself doesn't tell the old indices.
            order = np.random.default_rng(seed).permutation(len(rows))
            numbered = ((int(index), rows[int(index)]) for index in order)
        while True:
            try:
                item = next(numbered, None)
            except READ_ERRORS as error:
                raise DataError(_unreadable(self.where, error)) from error
            if item is None:
                return
            yield item

    def at(self, indices: Sequence[int], columns: list[str]) -> Iterator[tuple[int, Row]]:
        """Yield rows by their index in the split, as `shuffled` yields them; not of a stream.

        Raises:
            DataError: the split has no such row, or it can't be read.
        """
        rows = self._undecoded(columns)
        assert isinstance(rows, datasets.Dataset)
        for index in indices:
            if not 0 <= index < len(rows):
                raise DataError(
                    f"{self.where} has {len(rows)} rows, expected one with index {index}; put its data back"
                )
            try:
                yield index, rows[index]
            except READ_ERRORS as error:
                raise DataError(_unreadable(self.where, error)) from error

    def class_names(self, column: str) -> list[str] | None:
        """Names of a column's classes in the order of their labels; None where the dataset has none."""
        feature = (self.rows.features or {}).get(column)
        return list(feature.names) if isinstance(feature, datasets.ClassLabel) else None

    def _undecoded(self, columns: list[str]) -> datasets.Dataset | datasets.IterableDataset:
        rows = self.rows.select_columns(columns)
        for column, feature in (rows.features or {}).items():
            if isinstance(feature, datasets.Image):
                rows = rows.cast_column(column, datasets.Image(decode=False))
        return rows

    def provenance(self) -> dict[str, Any]:
        """What identifies the data: the library's fingerprint and the Hub commit, where known."""
        downloads = getattr(self.rows.info, "download_checksums", None) or {}
        commits = {match[1] for url in downloads if (match := re.search(r"@([0-9a-f]{40})/", url))}
        return {
            "kind": self.kind,
            "fingerprint": getattr(self.rows, "_fingerprint", None),
            "commit": commits.pop() if len(commits) == 1 else None,
        }


def open_source(spec: DatasetSpec) -> Source:
    """Open one split of a dataset. A path that exists locally wins over a Hub id of the same name.

    Raises:
        DataError: nothing is there, it can't be read, or it has no rows or no such split or configuration.
    """
    path = Path(spec.path).expanduser()
    where = f"dataset {spec.path!r}"
    options: dict[str, Any] = {"split": spec.split, "streaming": spec.streaming}
    if path.is_file():
        kind, folder = "file", path.parent
        _refuse(spec, "a file", "name", "data_files", "revision")
        name, arguments = _file_builder(path, spec)
    elif path.is_dir():
        kind, folder = _folder_kind(path, spec), path
        if kind == "folder":
            _refuse(spec, "a local folder", "revision")
            name, arguments = str(path), {"name": spec.name, "data_files": spec.data_files}
        else:
            _refuse(spec, FOLDERS[kind], "name", "data_files", "revision")
            name, arguments = kind, {"data_dir": str(path)}
    elif _looks_local(spec.path):
        raise DataError(f"{where}: nothing at {path.absolute()}; give an existing file or folder, or a Hub id")
    else:
        kind, folder, name = "hub", Path(), spec.path
        arguments = {"name": spec.name, "data_files": spec.data_files, "revision": spec.revision}
    try:
        rows = _load_saved(path, spec) if kind == "saved" else datasets.load_dataset(name, **arguments, **options)
    except (datasets.exceptions.DatasetNotFoundError, ConnectionError) as error:
        raise DataError(
            f"{where} is neither a local file or folder nor a dataset that the Hub gives ({error}); "
            "check the spelling, the network and, for a gated dataset, your access"
        ) from error
    except READ_ERRORS as error:
        raise DataError(_unreadable(where, error)) from error
    if isinstance(rows, datasets.Dataset) and len(rows) == 0:
        raise DataError(_empty(where))
    return Source(rows, kind, where, folder)


def _refuse(spec: DatasetSpec, what: str, *fields: str) -> None:
    """Refuse settings that `datasets` would silently ignore for this kind of path."""
    for field in fields:
        if getattr(spec, field) is not None:
            raise DataError(
                f"dataset {spec.path!r} is {what}, which has no {field}, "
                f"and `{field}` is {getattr(spec, field)!r}: leave it out"
            )


def _file_builder(path: Path, spec: DatasetSpec) -> tuple[str, dict[str, Any]]:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    ending = suffixes[-2] if suffixes[-1:] == [".gz"] and len(suffixes) > 1 else "".join(suffixes[-1:])
    if ending not in BUILDERS:
        raise DataError(
            f"dataset {spec.path!r} ends in {ending or 'nothing'!r}; expected one of {', '.join(BUILDERS)} "
            "(.gz may follow): convert it, or give a folder or a Hub id"
        )
    if path.stat().st_size == 0:
        raise DataError(_empty(f"dataset {spec.path!r}"))
    builder, options = BUILDERS[ending]
    return builder, {"data_files": str(path), **options}


def _folder_kind(path: Path, spec: DatasetSpec) -> str:
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return "saved"
    if spec.data_files is not None or (path / "README.md").is_file():
        return "folder"  # the user, or the dataset's own card, says which files are its data
    endings = {file.suffix.lower() for file in path.rglob("*") if file.is_file() and file.stem.lower() != "metadata"}
    return "imagefolder" if endings & set(ImageFolder.EXTENSIONS) and not endings & set(BUILDERS) else "folder"


def _load_saved(path: Path, spec: DatasetSpec) -> datasets.Dataset | datasets.IterableDataset:
    saved = datasets.load_from_disk(str(path))
    if isinstance(saved, datasets.Dataset):
        # A saved `train[:10%]` is called by that name; what it is a part of is the split.
        name = re.match(r"[\w.]+", str(saved.split or "train"))
        splits = {name[0] if name else "train": saved}
    else:
        splits = dict(saved)
    chosen = datasets.ReadInstruction.from_spec(spec.split).to_absolute({k: len(v) for k, v in splits.items()})
    rows = datasets.concatenate_datasets([splits[part.splitname].select(range(part.from_, part.to)) for part in chosen])
    return rows.to_iterable_dataset() if spec.streaming else rows


def _looks_local(path: str) -> bool:
    return path.startswith(("/", ".", "~")) or path.count("/") > 1 or Path(path).suffix.lower() in BUILDERS


def _empty(where: str) -> str:
    return f"{where} has no rows; give a file or split with at least one"


def _unreadable(where: str, error: BaseException) -> str:
    """Say what `datasets` found, from the error that tells it, and what to do about it."""
    root = error.__cause__ or error
    found = str(root).strip() or type(root).__name__
    if isinstance(root, StopIteration) or "no data!" in found or "at least one example" in found:
        return _empty(where)
    if "plit" in found and ("Should be one of" in found or "Available splits" in found):
        return f"{where}: {found.rstrip('.')}; give one of these as `split`"
    if "BuilderConfig" in found or "onfig name is missing" in found:
        return f"{where}: {found.rstrip('.')}; give one of these as `name`"
    return (
        f"{where} can't be read: {found.rstrip('.')} ({type(root).__name__}); "
        "expected well-formed JSON, CSV, TSV, Parquet, text, images in class folders, or a saved dataset"
    )
