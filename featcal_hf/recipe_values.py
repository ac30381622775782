"""What single values of the recipe's `featcal:` section look like: numbers, templates, licences, lists of names."""

from __future__ import annotations

import difflib
import re
import string
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from featcal_hf.licenses import KNOWN
from featcal_hf.recipe_form import Form

STRICT = ConfigDict(
    frozen=True,
    extra="forbid",
    strict=True,
    allow_inf_nan=False,
    populate_by_name=True,
)
_EXPONENT = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+")


def _number(value: object) -> object:
    """YAML 1.1 reads 5e-2, which has no point, as text."""
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def columns_of(text: str) -> dict[str, str]:
    """The fields of a template, each with the column that it names."""
    fields = [field for _, field, _, _ in string.Formatter().parse(text) if field is not None]
    return {field: re.split(r"[.\[]", field, maxsplit=1)[0] for field in fields}


def _template(text: str) -> str:
    try:
        columns = columns_of(text)
    except ValueError as error:
        raise ValueError(f"which is not a template ({error})") from error
    for field, column in columns.items():
        if not column or column.isdigit():
            raise ValueError(f"where {{{field}}} names no column")
    return text


def _blank(text: str) -> str:
    try:
        fields = [place for _, *place in string.Formatter().parse(text) if place[0] is not None]
    except ValueError as error:
        raise ValueError(f"which is not a template ({error})") from error
    if fields != [["", "", None]]:  # a format or a conversion may hold places of its own
        raise ValueError(f"where {text!r} should have one {{}}, the place of a class's name")
    return text


def _license(text: str) -> str:
    if text not in KNOWN:
        close = difflib.get_close_matches(text.lower(), sorted(KNOWN), n=1)
        raise ValueError(f"which the Hub doesn't know{f' (did you mean {close[0]!r}?)' if close else ''}")
    return text


def _one_or_more(value: object) -> object:
    return [value] if isinstance(value, str) else value


FLAG = Form("true or false")
COLUMN = Form("the name of a column, as text")
TEMPLATE = Form("text with {column} in it ({{ and }} are plain braces)")
Float = Annotated[float, BeforeValidator(_number)]
Column = Annotated[str, Field(min_length=1)]
TaskName = Annotated[str, Field(min_length=1)]
Template = Annotated[str, Field(min_length=1), AfterValidator(_template)]
Words = Annotated[dict[Column, Annotated[dict[int | str, str], Field(min_length=1)]], Field(min_length=1)]
License = Annotated[str, AfterValidator(_license)]
Language = Annotated[str, Field(pattern=r"\A([a-z]{2,3}(-[A-Za-z0-9]+)*|code|multilingual)\z")]
Languages = Annotated[list[Language], BeforeValidator(_one_or_more), Field(min_length=1)]
ClassNames = Annotated[list[Column], Field(min_length=2)]
Templates = Annotated[list[Annotated[str, AfterValidator(_blank)]], Field(min_length=1)]
