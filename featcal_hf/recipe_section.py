"""What the recipe's `featcal:` section may say, as strict models: nothing unknown, nothing converted."""

from __future__ import annotations

import re
import string
from typing import Annotated, Literal

from mergekit.common import ModelReference
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from featcal_hf.errors import RecipeError

_STRICT = ConfigDict(
    frozen=True,
    extra="forbid",
    strict=True,
    allow_inf_nan=False,
    populate_by_name=True,
)
_EXPONENT = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+")
_SOURCES = ("text", "prompt", "completion", "messages", "image")
_SOURCE_CHOICES = {
    ("text",),
    ("prompt",),
    ("prompt", "completion"),
    ("messages",),
    ("image",),
    ("text", "image"),
}
_SOURCE_ADVICE = "give one of text, prompt (with or without completion), messages, image, or text and image together"


def _number(value: object) -> object:
    """YAML 1.1 reads 5e-2, which has no point, as text."""
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _columns(text: str) -> dict[str, str]:
    """The fields of a template, each with the column that it names."""
    fields = [field for _, field, _, _ in string.Formatter().parse(text) if field is not None]
    return {field: re.split(r"[.\[]", field, maxsplit=1)[0] for field in fields}


def _template(text: str) -> str:
    try:
        columns = _columns(text)
    except ValueError as error:
        raise ValueError(f"which is not a template ({error})") from error
    for field, column in columns.items():
        if not column or column.isdigit():
            raise ValueError(f"where {{{field}}} names no column")
    return text


_Float = Annotated[float, BeforeValidator(_number)]
_Column = Annotated[str, Field(min_length=1)]
_Template = Annotated[str, Field(min_length=1), AfterValidator(_template)]
_Words = Annotated[dict[_Column, Annotated[dict[int | str, str], Field(min_length=1)]], Field(min_length=1)]


def _blank(text: str) -> str:
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(text) if field is not None]
    except ValueError as error:
        raise ValueError(f"which is not a template ({error})") from error
    if fields != [""]:
        raise ValueError(f"where {text!r} should have one {{}}, the place of a class's name")
    return text


_Named = Annotated[list[_Column], Field(min_length=2)]
_Templates = Annotated[list[Annotated[str, AfterValidator(_blank)]], Field(min_length=1)]


def needs_base(rho: float | None) -> str:
    """What is wrong with a `rho` other than 1 where there is no base."""
    return f"is {rho}, but there is no base to blend with; add featcal.base_model, or set rho to 1."


class Settings(BaseModel):
    """How strongly, and towards what, to calibrate (the paper's λ, ρ, α).

    Attributes:
        lambda_: ridge λ > 0, relative to unit-norm Grams; `lambda` in YAML. None: adaptive, from the tokens
            seen.
        rho: anchor blend ρ ≥ 0 in A = ρ W^merge + (1-ρ) W^base. None: 2 with a base, 1 without.
        alpha: target blend α in [0, 1] in X^tgt = (1-α) X^cal + α X^exp.
        scale: task weight, 1/‖G‖_F (`frobenius`) or d_in/tr G (`trace`). None: frobenius where λ is given,
            else trace.
        bias: calibrate the biases of linear modules.
        norm: calibrate the affine weights of norms.
        pooled_token: the token of the last block that the model's head reads; `auto` asks the architecture.

    Raises:
        ValidationError: a value has the wrong type or is out of range.
    """

    model_config = _STRICT

    # validation_alias, not alias: to type checkers alias is the parameter's name, and `lambda` can't be one.
    lambda_: _Float | None = Field(
        default=None,
        validation_alias="lambda",
        serialization_alias="lambda",
        gt=0,
        description="a number above 0, or leave it out for the adaptive ridge",
    )
    rho: _Float | None = Field(
        default=None, ge=0, description="a number of at least 0, or leave it out for 2 with a base and 1 without"
    )
    alpha: _Float = Field(default=0.3, ge=0, le=1, description="a number from 0 to 1")
    scale: Literal["frobenius", "trace"] | None = Field(
        default=None, description="frobenius or trace, or leave it out for frobenius with a lambda and trace without"
    )
    bias: bool = Field(default=True, description="true or false")
    norm: bool = Field(default=True, description="true or false")
    pooled_token: Literal["auto", "first", "none"] = Field(default="auto", description="auto, first or none")

    def resolved(self, has_base: bool) -> Settings:
        """These settings with `rho` and `scale` filled in.

        Raises:
            RecipeError: there is no base, and `rho` isn't 1.
        """
        if not has_base and self.rho not in (None, 1):
            raise RecipeError(f"rho {needs_base(self.rho)}")
        return self.model_copy(
            update={
                "rho": self.rho if self.rho is not None else 2.0 if has_base else 1.0,
                "scale": self.scale or ("trace" if self.lambda_ is None else "frobenius"),
            }
        )


class DatasetSpec(BaseModel):
    """Where a task's examples are: the arguments of `datasets.load_dataset` with the same names.

    Raises:
        ValidationError: a value has the wrong type.
    """

    model_config = _STRICT

    path: str = Field(min_length=1, description="a Hub id or a local path, as text")
    name: str | None = Field(default=None, min_length=1, description="the name of the dataset's configuration, as text")
    split: str = Field(default="train", min_length=1, description="the name of a split, as text")
    data_files: str | list[str] | dict[str, str | list[str]] | None = Field(
        default=None, description="a file, a list of files, or a mapping from splits to these"
    )
    revision: str | None = Field(default=None, min_length=1, description="a branch, tag or commit, as text")
    streaming: bool = Field(default=False, description="true or false")


class EvalSpec(BaseModel):
    """How `featcal-hf eval` measures a task, where the task itself doesn't say it.

    Attributes:
        split: rows are read from this split; None: from the task's own, those of calibration left out.
        text_model: a CLIP whose text tower and projections make a classifier of an image tower.
        class_names: the class of each label, from 0; None: as the dataset names them.
        templates: sentences with `{}` in the place of a class's name.

    Raises:
        ValidationError: a value has the wrong type, or a text model comes without templates or the reverse.
    """

    model_config = _STRICT

    split: str | None = Field(default=None, min_length=1, description="the name of a split, as text")
    text_model: str | None = Field(
        default=None, min_length=1, description="the Hub id or local path of a CLIP with its text tower, as text"
    )
    class_names: _Named | None = Field(
        default=None, description="a list of the classes' names in the order of their labels, each as text"
    )
    templates: _Templates | None = Field(
        default=None, description='a list of sentences with {} for the class, such as "a photo of a {}."'
    )

    @model_validator(mode="after")
    def _zero_shot_is_whole(self) -> EvalSpec:
        if self.text_model is None and (self.templates or self.class_names):
            given = "templates" if self.templates else "class_names"
            raise ValueError(f"has {given} and no text_model that could read them; add text_model.")
        if self.text_model is not None and self.templates is None:
            raise ValueError('has a text_model and no templates; add them, such as ["a photo of a {}."].')
        return self


class Sampling(BaseModel):
    """How many examples of a task are taken, and how: given for all tasks in `featcal`, or for one task.

    Attributes:
        samples: examples to calibrate on.
        holdout: further examples, kept apart to measure the drift on; may be 0.
        max_length: tokens of an example, what is longer is cut.
        seed: of the shuffle that picks the examples.
        batch_size: examples in one forward.

    Raises:
        ValidationError: a value has the wrong type or is out of range.
    """

    model_config = _STRICT

    samples: int = Field(default=256, ge=1, description="a whole number of at least 1")
    holdout: int = Field(default=32, ge=0, description="a whole number of at least 0")
    max_length: int = Field(default=1024, ge=1, description="a whole number of at least 1")
    seed: int = Field(
        default=42, ge=0, lt=2**32, description="a whole number from 0 to 2^32 - 1, which is what NumPy takes"
    )
    batch_size: int = Field(default=8, ge=1, description="a whole number of at least 1")


class Task(Sampling):
    """One expert with the examples that show what it is for.

    Attributes:
        model: the expert, as the merge refers to it.
        name: unique among the tasks, made of letters, digits and `._-`; stands in tables and file names.
        dataset: where the examples are.
        text: name of the column with plain text.
        prompt: template of what the model reads; `{column}` is a column's value, `{column:.1f}` formats it.
        completion: template of what the model answers.
        words: column -> value -> the word that stands for it in the templates, as for class labels.
        messages: name of the column with chat turns.
        image: name of the column with images; with `text`, both towers of a CLIP are calibrated.
        label: name of the column with classes, which `featcal-hf eval` compares a classifier's answers with; never
            calibrated on.
        evaluation: how the task is measured; `eval` in YAML.

    Raises:
        ValidationError: a value has the wrong type or is out of range, or the sources don't go together.
    """

    model: ModelReference = Field(description="one of the merge's experts")
    name: str = Field(
        pattern=r"\A[A-Za-z0-9_][A-Za-z0-9._-]*\z",
        description="letters, digits and ._- that begin with a letter, a digit or _",
    )
    dataset: DatasetSpec = Field(description="a Hub id or a local path, or a mapping with a path")
    text: _Column | None = Field(default=None, description="the name of a column, as text")
    prompt: _Template | None = Field(default=None, description="text with {column} in it ({{ and }} are plain braces)")
    completion: _Template | None = Field(
        default=None, description="text with {column} in it ({{ and }} are plain braces)"
    )
    words: _Words | None = Field(
        default=None,
        description='a mapping like {label: {0: "no", 1: "yes"}}, every word as text (YAML reads a bare no as false)',
    )
    messages: _Column | None = Field(default=None, description="the name of a column, as text")
    image: _Column | None = Field(default=None, description="the name of a column, as text")
    label: _Column | None = Field(default=None, description="the name of a column, as text")
    evaluation: EvalSpec | None = Field(
        default=None,
        validation_alias="eval",
        serialization_alias="eval",
        description="a mapping such as {split: test}",
    )

    @model_validator(mode="after")
    def _sources_go_together(self) -> Task:
        given = tuple(source for source in _SOURCES if getattr(self, source) is not None)
        if given not in _SOURCE_CHOICES:
            found = f"has {' and '.join(given)}, which don't go together" if given else "names nothing to read"
            raise ValueError(f"{found}; {_SOURCE_ADVICE}.")
        return self

    @model_validator(mode="after")
    def _words_stand_for_columns(self) -> Task:
        templates = [text for text in (self.prompt, self.completion) if text is not None]
        read = [column for text in templates for column in _columns(text).values()]
        for column in self.words or {}:
            if column not in read:
                found = ", ".join(dict.fromkeys(read)) or "nothing"
                raise ValueError(f"has words for {column!r}, which its templates don't read (they read {found}).")
        return self
