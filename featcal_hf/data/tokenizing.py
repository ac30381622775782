"""Turn text into token ids: the same text for the merged model and for the expert, cut at the same places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.hub import has_file

from featcal_hf.data.batches import Padding
from featcal_hf.errors import DataError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)

CHAT_DATE = "26 Jul 2024"
"""The date given to chat templates of Llama (their own default): the texts are then the same every day."""


@dataclass(frozen=True)
class Encoding:
    """One text as tokens."""

    inputs: dict[str, list[int]]
    """`input_ids`, and `token_type_ids` if the tokenizer gives them."""
    offsets: list[tuple[int, int]] | None
    """Characters of each token, (0, 0) for an added special token; None if the tokenizer can't tell."""
    added: list[int]
    """1 for a special token that was added, 0 for text."""
    truncated: bool

    @property
    def empty(self) -> bool:
        """Whether the text gave no token, so that there are at most added ones."""
        return all(self.added)

    @property
    def ids(self) -> list[int]:
        """The token ids."""
        return self.inputs["input_ids"]


@dataclass(frozen=True)
class TextEncoder:
    """A model's tokenizer, with the length at which texts are cut (on the right)."""

    tokenizer: PreTrainedTokenizerBase
    path: str
    limit: int

    @property
    def padding(self) -> Padding:
        """What pads a row; without a padding token the end token, else 0."""
        tokens = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        return Padding(
            token=next(token for token in tokens if token is not None),
            token_type=self.tokenizer.pad_token_type_id,
        )

    def __call__(self, text: str, *, special_tokens: bool = True, target: bool = False) -> Encoding:
        """Encode a text.

        Args:
            text: The text. If it begins with the text of the BOS token, no second one is put before it.
            special_tokens: Add the tokenizer's special tokens.
            target: It is a decoder's text, which some tokenizers encode in another way.
        """
        bos = self.tokenizer.bos_token
        doubled = bool(special_tokens and bos and text.startswith(bos) and self._adds_bos())
        options: dict[str, Any] = {
            "add_special_tokens": special_tokens,
            "return_special_tokens_mask": True,
            "return_offsets_mapping": self.tokenizer.is_fast,
            "verbose": False,
            "text_target" if target else "text": text,
        }
        limit = self.limit + doubled
        encoded = self.tokenizer(**options)
        truncated = len(encoded["input_ids"]) > limit
        if truncated:
            encoded = self.tokenizer(**options, truncation=True, max_length=limit)
        kept = slice(int(doubled), None)
        offsets = encoded.get("offset_mapping")
        return Encoding(
            inputs={name: encoded[name][kept] for name in ("input_ids", "token_type_ids") if name in encoded},
            offsets=None if offsets is None else [tuple(span) for span in offsets[kept]],
            added=encoded["special_tokens_mask"][kept],
            truncated=truncated,
        )

    def _adds_bos(self) -> bool:
        return list(self.tokenizer("")["input_ids"][:1]) == [self.tokenizer.bos_token_id]


def has_tokenizer(path: str) -> bool:
    """Whether a folder or Hub repository holds a tokenizer.

    Raises:
        DataError: there is no such repository.
    """
    try:
        return any(has_file(path, name) for name in TOKENIZER_FILES)
    except OSError as error:
        raise DataError(
            f"no tokenizer can be looked for in {path}: {error}; give a model's folder or Hub id"
        ) from error


def load_encoders(
    student_path: str,
    expert_path: str,
    *,
    max_length: int,
    max_positions: int | None,
    trust_remote_code: bool,
) -> tuple[TextEncoder, TextEncoder]:
    """Load the tokenizers of the merged model and of the expert, which may have none of its own.

    An expert that has none is given the merged model's. Both cut at the least of `max_length`, `max_positions`
    and what either tokenizer says its model can take.

    Raises:
        DataError: the merged model has no tokenizer, one can't be loaded, or the limit leaves no room.
    """
    if not has_tokenizer(student_path):
        raise DataError(
            f"the merged model has no tokenizer: {student_path} has none of {', '.join(TOKENIZER_FILES)}; "
            "set `tokenizer_source: base` in the merge, or copy the tokenizer's files there"
        )
    student = _load_tokenizer(student_path, trust_remote_code)
    if expert_path == student_path or not has_tokenizer(expert_path):
        expert, expert_path = student, student_path
    else:
        expert = _load_tokenizer(expert_path, trust_remote_code)
    limits = [max_length, student.model_max_length, expert.model_max_length]
    limit = int(min(limits if max_positions is None else [*limits, max_positions]))
    special = max(tokenizer.num_special_tokens_to_add() for tokenizer in (student, expert))
    if limit <= special:
        raise DataError(
            f"texts are cut to {limit} tokens, and the tokenizer adds {special} special ones; "
            f"raise `max_length` (it is {max_length})"
        )
    merged = TextEncoder(student, student_path, limit)
    return merged, merged if expert is student else TextEncoder(expert, expert_path, limit)


def _load_tokenizer(path: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises plain Exception for a malformed file
        raise DataError(
            f"the tokenizer of {path} can't be loaded: {error} ({type(error).__name__}); put back its files"
        ) from error
    tokenizer.truncation_side = "right"
    return tokenizer


def check_boundaries(text: str, student: Encoding, expert: Encoding, paths: Sequence[str]) -> None:
    """Check that two tokenizations with different ids cut a text at the same characters.

    Calibration compares features token by token, so token k has to be the same piece of text in both models.

    Args:
        text: The text.
        student: Its tokens in the merged model.
        expert: Its tokens in the expert.
        paths: Where the two tokenizers are.

    Raises:
        DataError: the boundaries differ or can't be compared.
    """
    remedy = (
        "calibration compares features token by token: make the merge and its experts use one tokenizer "
        "(`tokenizer_source` in the merge), or leave this expert's task out"
    )
    ours, theirs = paths
    if student.offsets is None or expert.offsets is None:
        raise DataError(
            f"the tokenizers of the merged model ({ours}) and of the expert ({theirs}) give different ids, "
            f"and one of them can't tell which characters a token covers (it has no tokenizer.json); {remedy}"
        )
    spans = list(zip(student.offsets, student.added, strict=True))
    others = list(zip(expert.offsets, expert.added, strict=True))
    if spans == others:
        return
    same = zip(spans, others, strict=False)  # one may be longer
    token = next((k for k, (a, b) in enumerate(same) if a != b), min(len(spans), len(others)))
    raise DataError(
        f"the tokenizers of the merged model ({ours}) and of the expert ({theirs}) cut the text differently: "
        f"token {token} is {_piece(text, spans, token)} in the merged model and "
        f"{_piece(text, others, token)} in the expert; {remedy}"
    )


def _piece(text: str, spans: list[tuple[tuple[int, int], int]], token: int) -> str:
    if token >= len(spans):
        return "past the end"
    (start, end), added = spans[token]
    return "a special token" if added else f"{text[start:end]!r} (characters {start} to {end})"


def chat_renderer(encoder: TextEncoder) -> tuple[Callable[[list[dict[str, Any]]], str], list[str]]:
    """The chat template of a tokenizer as a function, and warnings about what it writes.

    Raises:
        DataError: the tokenizer has no chat template. The function: the template refuses a conversation.
    """
    tokenizer = encoder.tokenizer
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:
        raise DataError(
            f"`messages` needs a chat template, and the tokenizer of {encoder.path} has none; "
            "set `chat_template` in the merge, or give `prompt` and `completion` instead"
        ) from error
    warnings = []
    if "strftime_now" in template and "date_string" not in template:
        warnings.append("the chat template may write today's date, so the texts can differ from day to day")

    def render(turns: list[dict[str, Any]]) -> str:
        try:
            return str(tokenizer.apply_chat_template(turns, tokenize=False, date_string=CHAT_DATE))
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise DataError(
                f"the chat template of {encoder.path} refuses the conversation: {error}; "
                "leave the row out, or give `prompt` and `completion` instead"
            ) from error

    return render, warnings
