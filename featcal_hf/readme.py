"""Whose README.md it is: mergekit's, ours, or a person's; and what people wrote in our card."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from mergekit.card import CARD_TEMPLATE

from featcal_hf.errors import CardError

BLOCKS = ("description", "credits")
_MODEL_ID = re.compile(r'^model_id = "([^"\r\n]*)"', re.MULTILINE)
_MARK = re.compile(r"<!-- featcal:made ([0-9a-f]{16})( with another template)? -->")
_LICENSE_LINE = re.compile(r"^license(_name|_link)?:.*\n", re.MULTILINE)


def is_ours(card: str) -> bool:
    """Whether a card has our markers."""
    return any(f"<!-- featcal:{block} -->" in card for block in BLOCKS)


def is_mergekits(card: str, recipe: str | None) -> bool:
    """Whether a card is what mergekit generates, word for word, for the recipe beside it; or holds nothing at all."""
    if not card.strip():
        return True
    if recipe is None:
        return False
    places = {
        "metadata": r"[\s\S]*?",
        "name": r"[^\n]*",
        "merge_method": r"[^\n]*",
        "base_text": r"[^\n]*",
        "model_list": r"(?:\* [^\n]*\n?)*",
        "config_yaml": re.escape(recipe),
    }
    pattern = re.escape(CARD_TEMPLATE)
    for place, form in places.items():
        pattern = pattern.replace(re.escape(f"{{{place}}}"), form)
    generated = metadata_of(card).keys() == {"base_model", "tags", "library_name"}
    return generated and re.fullmatch(pattern, card) is not None


def filled(card: str, kept: Mapping[str, str]) -> str:
    """A new card with what people wrote in the one that it replaces, between the same markers.

    Raises:
        CardError: the new card has no place for it.
    """
    for block, words in kept.items():
        empty = place(block)
        if empty not in card and words.strip():
            raise CardError(
                f"the template has no place for what is written between the card's {block} markers; add "
                f"{{{{ block('{block}') }}}} to it."
            )
        card = card.replace(empty, empty.replace("\n", f"\n{words}"))
    return card


def place(block: str) -> str:
    """A part of our card that is a person's to fill, between its markers."""
    return f"<!-- featcal:{block} -->\n<!-- /featcal:{block} -->"


def kept_blocks(card: str) -> dict[str, str]:
    """What stands between our card's markers, to the letter.

    Raises:
        CardError: a marker is missing, so that it can't be told where a person's words end.
    """
    kept = {}
    for block in BLOCKS:
        begin, end = f"<!-- featcal:{block} -->", f"<!-- /featcal:{block} -->"
        if begin not in card and end not in card:
            continue
        found = re.findall(rf"{begin}\r?\n(.*?){end}", card, re.DOTALL)
        if len(found) != 1 or card.count(begin) != 1 or card.count(end) != 1:
            raise CardError(
                f"the card doesn't have one {begin} on a line of its own and one {end} after it, so that it can't be "
                "told what is to be kept; put both markers back, or move the card away to have a new one."
            )
        kept[block] = found[0]
    return kept


def signed(card: str, *, own_template: bool) -> str:
    """A card with a mark at its end that tells later whether a person edited it outside its markers.

    Args:
        card: as it was rendered.
        own_template: by another template than ours.
    """
    return f"{card}\n<!-- featcal:made {_digest(card)}{' with another template' if own_template else ''} -->\n"


def is_edited(card: str) -> bool:
    """Whether our card holds what a new one would lose: words outside its markers; so does one without its mark."""
    mark = _MARK.search(card)
    return mark is None or mark[1] != _digest(card)


def has_own_template(card: str) -> bool:
    """Whether our card was rendered by another template than ours."""
    mark = _MARK.search(card)
    return mark is not None and mark[2] is not None


def _digest(card: str) -> str:
    """Of a card without what a new one takes over from it: people's words, the licence, the example's id."""
    text = with_model_id(_MARK.sub("", card.replace("\r\n", "\n")), "")
    for block in BLOCKS:
        begin, end = f"<!-- featcal:{block} -->", f"<!-- /featcal:{block} -->"
        text = re.sub(rf"{begin}.*?{end}", begin, text, flags=re.DOTALL)
    metadata = REGEX_YAML_BLOCK.search(text)
    if metadata is not None:
        text = text.replace(metadata[2], _LICENSE_LINE.sub("", f"{metadata[2]}\n"), 1)
    lines = [line.rstrip() for line in text.splitlines()]
    return hashlib.sha256("\n".join(line for line in lines if line).encode()).hexdigest()[:16]


def model_id_of(card: str) -> str | None:
    """The id in a card's example; None without one."""
    match = _MODEL_ID.search(card)
    return None if match is None else match[1]


def with_model_id(card: str, repo_id: str) -> str:
    """A card whose example loads the model from its repository on the Hub."""
    return _MODEL_ID.sub(lambda match: f'model_id = "{repo_id}"', card)


def metadata_of(card: str) -> dict[str, object]:
    """A card's metadata; empty where it has none that can be read."""
    block = REGEX_YAML_BLOCK.search(card)
    try:
        data = yaml.safe_load(block[2]) if block is not None else None
    except yaml.YAMLError:
        return {}
    return data if isinstance(data, dict) else {}
