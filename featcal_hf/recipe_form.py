"""What a field's value looks like in the recipe: the words that errors and `docs/recipe.md` share."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic.fields import FieldInfo


@dataclass(frozen=True)
class Form:
    """What a field's value looks like, in words that follow "give ".

    Attributes:
        value: the words.
        default: what leaving the field out means, where its default value doesn't say it.
    """

    value: str
    default: str | None = None


def form_of(field: FieldInfo) -> Form:
    """The form of a field's value, with the default in words; None where leaving it out means nothing special."""
    (form,) = (entry for entry in field.metadata if isinstance(entry, Form))
    if form.default is not None or field.is_required() or field.default is None:
        return form
    return Form(form.value, "none" if field.default == [] else str(field.default).lower())


def key_of(name: str, field: FieldInfo) -> str:
    """A field's key in the recipe."""
    return str(field.validation_alias or name)
