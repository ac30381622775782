"""Three kinds of real text that come with every CPython, and a tokenizer: code, prose and names for the demos.

Documents (a module's code, its docstrings, a topic of `help()`, a range of code points) are dealt out whole,
so that no row of the held-out text shares its document with a training, calibration or validation row.
"""

from __future__ import annotations

import ast
import json
import random
import sysconfig
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from featcal_hf.errors import DataError

END = "<|end|>"

ROW_CHARACTERS = 360
"""Length of a row before it is rounded up to a whole line: a little over 128 tokens of the demo's own tokenizer."""

SPLIT_ROWS = {"heldout": 128, "validation": 64, "calibration": 128}
"""Rows of each split at most; all other rows are for training."""

_ROWS_PER_DOCUMENT = 16
"""Rows that one document gives at most to a split other than training, so that none is about a single module."""

_CODE_POINTS_PER_DOCUMENT = 128


@dataclass(frozen=True)
class Rows:
    """One domain's rows of text; the four splits share no document."""

    train: tuple[str, ...]
    calibration: tuple[str, ...]
    validation: tuple[str, ...]
    heldout: tuple[str, ...]


def load_domains(
    seed: int = 0, row_characters: int = ROW_CHARACTERS, split_rows: Mapping[str, int] = SPLIT_ROWS
) -> dict[str, Rows]:
    """Read the three domains from the running Python's standard library and split them.

    Args:
        seed: decides which documents go to which split.
        row_characters: length of a row before it is rounded up to a whole line.
        split_rows: rows of each split at most; all others are for training.

    Returns:
        Rows of `python` (code without docstrings and comments), `english` (docstrings and the topics of `help()`)
        and `unicode` (names of characters).

    Raises:
        DataError: this Python comes without the sources of its standard library.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    modules = [_code_and_docstrings(module) for module in _parse_standard_library(root)]
    documents = {
        "python": [code for code, _ in modules],
        "english": [*topics.values(), *(docstrings for _, docstrings in modules)],
        "unicode": list(_character_names()),
    }
    return {domain: split(root, domain, texts, seed, row_characters, split_rows) for domain, texts in documents.items()}


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; `<|end|>` is its only special token and is never added to a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], length: int) -> Tensor:
    """Return the rows that fill `length` tokens, cut there; (rows, length). Shorter ones are left out."""
    encoded: list[list[int]] = tokenizer(list(texts), truncation=True, max_length=length)["input_ids"]
    return torch.tensor([row for row in encoded if len(row) == length])


def write_rows(folder: Path, domains: Mapping[str, Rows]) -> None:
    """Write each domain's calibration and held-out rows as JSON lines with one column, `text`."""
    for name, rows in domains.items():
        for part, texts in {"calibration": rows.calibration, "heldout": rows.heldout}.items():
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            (folder / f"{name}-{part}.jsonl").write_text(lines, encoding="utf-8")


def _parse_standard_library(root: Path) -> Iterator[ast.Module]:
    for path in sorted(root.glob("*.py")):
        if not path.name.startswith("_sysconfigdata"):
            yield ast.parse(path.read_bytes())


def _code_and_docstrings(module: ast.Module) -> tuple[str, str]:
    """Take a module apart; its tree is left without docstrings."""
    docstrings = []
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring is not None:
                docstrings.append(docstring)
                node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(module), "\n\n".join(docstrings)


def _character_names() -> Iterator[str]:
    """Yield the names of each range of code points that has any, but for ideographs named by their number."""
    for start in range(0, 0x20000, _CODE_POINTS_PER_DOCUMENT):
        names = (unicodedata.name(chr(point), "") for point in range(start, start + _CODE_POINTS_PER_DOCUMENT))
        yield "\n".join(name for name in names if name and not name.startswith(("CJK ", "HANGUL ")))


def split(
    source: Path,
    domain: str,
    documents: Iterable[str],
    seed: int,
    row_characters: int = ROW_CHARACTERS,
    split_rows: Mapping[str, int] = SPLIT_ROWS,
) -> Rows:
    """Deal out whole documents in random order; a row that was seen before, in any split, is left out.

    Raises:
        DataError: the documents leave fewer rows for training than are held out.
    """
    chance = random.Random(seed)
    rows_by_document = [list(_rows(document, row_characters)) for document in documents]
    chance.shuffle(rows_by_document)
    seen: set[str] = set()
    remaining = iter(rows_by_document)

    def deal(at_least: float, each: int | None) -> tuple[str, ...]:
        dealt: list[str] = []
        for rows in remaining:
            dealt += [row for row in dict.fromkeys(rows) if row not in seen][:each]
            seen.update(rows)
            if len(dealt) >= at_least:
                break
        chance.shuffle(dealt)
        return tuple(dealt)

    kept = {part: deal(rows, _ROWS_PER_DOCUMENT)[:rows] for part, rows in split_rows.items()}
    train = deal(float("inf"), None)
    if len(train) < split_rows["heldout"]:
        raise DataError(
            f"{source}: found too little text for the demo's domain {domain!r} ({len(train)} training rows, expected "
            f"at least {split_rows['heldout']}); install it whole, for Python itself with its library's sources."
        )
    return Rows(train=train, **kept)


def _rows(document: str, row_characters: int) -> Iterator[str]:
    row = ""
    for line in document.splitlines(keepends=True):
        row += line
        if len(row) >= row_characters:
            yield row
            row = ""
