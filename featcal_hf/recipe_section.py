"""What the recipe's `featcal:` section may say, as strict models: nothing unknown, nothing converted.

A field's `description` says what it does, its `Form` what a value looks like. `docs/recipe.md` and the errors about
values are made from these, so that each text stands here alone.
"""

from __future__ import annotations

import difflib
import re
import string
from typing import Annotated, Any, Literal

from mergekit.common import ModelReference
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from featcal_hf.errors import RecipeError
from featcal_hf.licenses import KNOWN
from featcal_hf.recipe_form import Form

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


_FLAG = Form("true or false")
_COLUMN = Form("the name of a column, as text")
_TEMPLATE = Form("text with {column} in it ({{ and }} are plain braces)")
_Float = Annotated[float, BeforeValidator(_number)]
_Column = Annotated[str, Field(min_length=1)]
_TaskName = Annotated[str, Field(min_length=1)]
_Template = Annotated[str, Field(min_length=1), AfterValidator(_template)]
_Words = Annotated[dict[_Column, Annotated[dict[int | str, str], Field(min_length=1)]], Field(min_length=1)]


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


_License = Annotated[str, AfterValidator(_license)]
_Language = Annotated[str, Field(pattern=r"\A([a-z]{2,3}(-[A-Za-z0-9]+)*|code|multilingual)\z")]
_Languages = Annotated[list[_Language], BeforeValidator(_one_or_more), Field(min_length=1)]
_Named = Annotated[list[_Column], Field(min_length=2)]
_Templates = Annotated[list[Annotated[str, AfterValidator(_blank)]], Field(min_length=1)]


def needs_base(rho: float | None) -> str:
    """What is wrong with a `rho` other than 1 where there is no base."""
    return f"is {rho}, but there is no base to blend with; add featcal.base_model, or set rho to 1."


class Settings(BaseModel):
    """How strongly, and towards what, to calibrate (the paper's λ, ρ, α).

    Raises:
        ValidationError: a value has the wrong type or is out of range.
    """

    model_config = _STRICT

    # validation_alias, not alias: to type checkers alias is the parameter's name, and `lambda` can't be one.
    lambda_: Annotated[_Float | None, Form("a number above 0", "the adaptive ridge")] = Field(
        default=None,
        validation_alias="lambda",
        serialization_alias="lambda",
        gt=0,
        description="ridge λ: the pull towards the anchor, relative to unit-norm Grams. The adaptive ridge takes "
        "tasks · √(inputs / tokens per task) for each linear module, and 0.01 for norms; it needs no search",
    )
    rho: Annotated[_Float | None, Form("a number of at least 0", "2 with a base and 1 without")] = Field(
        default=None,
        ge=0,
        description="the anchor is ρ·merged + (1-ρ)·base: 0 is the base, 1 the merged model, above 1 extrapolates "
        "away from the base",
    )
    alpha: Annotated[_Float, Form("a number from 0 to 1")] = Field(
        default=0.3,
        ge=0,
        le=1,
        description="the target is (1-α)·the merged model's own features + α·the expert's, under the expert's weights",
    )
    scale: Annotated[
        Literal["frobenius", "trace"] | None,
        Form("frobenius or trace", "frobenius with a lambda and trace without"),
    ] = Field(
        default=None,
        description="makes tasks comparable: each one's Gram is divided by its Frobenius norm, as in the paper, or by "
        "its mean eigenvalue, which a few massive activations don't set",
    )
    bias: Annotated[bool, _FLAG] = Field(default=True, description="calibrate the biases of linear modules")
    norm: Annotated[bool, _FLAG] = Field(default=True, description="calibrate the affine weights of norms")
    pooled_token: Annotated[Literal["auto", "first", "none"], Form("auto, first or none")] = Field(
        default="auto",
        description="`first`: the head reads the last block's first token (CLIP, ViT), and the others hardly count "
        "there; `none`: all count; `auto` asks the architecture",
    )

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

    path: Annotated[str, Form("a Hub id or a local path, as text")] = Field(
        min_length=1,
        description="a dataset of the Hub; a json, jsonl, csv, tsv, parquet or txt file; a folder of images; a saved "
        "dataset",
    )
    name: Annotated[str | None, Form("the name of the dataset's configuration, as text")] = Field(
        default=None, min_length=1, description="which configuration, where the dataset has several"
    )
    split: Annotated[str, Form("the name of a split, as text")] = Field(
        default="train", min_length=1, description="rows are taken from this split"
    )
    data_files: Annotated[
        str | list[str] | dict[str, str | list[str]] | None,
        Form("a file, a list of files, or a mapping from splits to these"),
    ] = Field(default=None, description="which of the dataset's files are read")
    revision: Annotated[str | None, Form("a branch, tag or commit, as text")] = Field(
        default=None, min_length=1, description="which state of a dataset on the Hub"
    )
    streaming: Annotated[bool, _FLAG] = Field(
        default=False, description="read rows one by one instead of downloading the whole split"
    )


class EvalSpec(BaseModel):
    """How `featcal-hf eval` measures a task, where the task itself doesn't say it.

    Raises:
        ValidationError: a value has the wrong type, or a text model comes without templates or the reverse.
    """

    model_config = _STRICT

    split: Annotated[str | None, Form("the name of a split, as text", "the task's own, without calibration's rows")] = (
        Field(default=None, min_length=1, description="rows are read from this split")
    )
    text_model: Annotated[str | None, Form("the Hub id or local path of a CLIP with its text tower, as text")] = Field(
        default=None,
        min_length=1,
        description="a CLIP whose text tower and projections make a classifier of an image tower",
    )
    class_names: Annotated[
        _Named | None,
        Form("a list of the classes' names in the order of their labels, each as text", "the dataset's names"),
    ] = Field(default=None, description="what the labels mean, from 0")
    templates: Annotated[
        _Templates | None, Form('a list of sentences with {} for the class, such as "a photo of a {}."')
    ] = Field(default=None, description="the sentences that stand for a class; their embeddings are averaged")

    @model_validator(mode="after")
    def _zero_shot_is_whole(self) -> EvalSpec:
        if self.text_model is None and (self.templates or self.class_names):
            given = "templates" if self.templates else "class_names"
            raise ValueError(f"has {given} and no text_model that could read them; add text_model.")
        if self.text_model is not None and self.templates is None:
            raise ValueError('has a text_model and no templates; add them, such as ["a photo of a {}."].')
        return self


class CardSpec(BaseModel):
    """What the model card says that can't be found out from the models.

    Raises:
        ValidationError: a value has the wrong type, or a licence is unknown, or `other` without a name and a link.
    """

    model_config = _STRICT

    name: Annotated[str | None, Form("the model's name, on one line", "the folder's or the repository's")] = Field(
        default=None, pattern=r"\A[^\r\n]*\S[^\r\n]*\z", description="the model's name in its card"
    )
    license: Annotated[
        _License | None,
        Form(
            "a licence's id on the Hub, such as apache-2.0 or llama3.2, or other", "the parents', if it is one and free"
        ),
    ] = Field(default=None, description="the licence in the model's card")
    license_name: Annotated[str | None, Form("the name of the licence, as text")] = Field(
        default=None, min_length=1, description="what `license: other` is called"
    )
    license_link: Annotated[str | None, Form("the address of the licence, as text")] = Field(
        default=None, min_length=1, description="where `license: other` is to be read"
    )
    language: Annotated[
        _Languages | None,
        Form('a language\'s ISO 639 code as text ("no" in quotes), or a list of them', "the parents'"),
    ] = Field(default=None, description="the languages in the model's card")

    @model_validator(mode="after")
    def _other_licence_is_named(self) -> CardSpec:
        named = self.license_name is not None and self.license_link is not None
        if self.license == "other" and not named:
            raise ValueError("has the license 'other' without its name and link; add license_name and license_link.")
        if self.license != "other" and (self.license_name or self.license_link):
            raise ValueError("has a license_name or license_link, which go with `license: other`; add that.")
        return self


class Harness(BaseModel):
    """What `featcal-hf eval` runs beside the tasks' own metrics.

    Raises:
        ValidationError: it isn't a list of texts.
    """

    model_config = _STRICT

    lm_eval: Annotated[list[_TaskName], Form("a list of tasks such as [gsm8k, mbpp], each as text")] = Field(
        default=[],
        description="tasks of EleutherAI's harness that `featcal-hf eval` runs on the merged and the calibrated model, "
        "by name or as local YAML files of tasks",
    )


class Sampling(BaseModel):
    """How many examples of a task are taken, and how: given for all tasks in `featcal`, or for one task.

    Raises:
        ValidationError: a value has the wrong type or is out of range.
    """

    model_config = _STRICT

    samples: Annotated[int, Form("a whole number of at least 1")] = Field(
        default=256, ge=1, description="rows to calibrate on"
    )
    holdout: Annotated[int, Form("a whole number of at least 0")] = Field(
        default=32,
        ge=0,
        description="further rows, on which drift is measured; never calibrated on, and at most a fifth of the rows "
        "there are. They pass each block five times: 32 beside 256 rows are 0.63 of one more pass, 0 is none",
    )
    max_length: Annotated[int, Form("a whole number of at least 1")] = Field(
        default=1024, ge=1, description="tokens of a row; what is longer is cut"
    )
    seed: Annotated[int, Form("a whole number from 0 to 2^32 - 1, which is what NumPy takes")] = Field(
        default=42, ge=0, lt=2**32, description="of the shuffle that picks the rows"
    )
    batch_size: Annotated[int, Form("a whole number of at least 1")] = Field(
        default=8, ge=1, description="rows in one forward; changes memory and speed, not the result"
    )


class Task(Sampling):
    """One expert with the examples that show what it is for.

    Raises:
        ValidationError: a value has the wrong type or is out of range, or the sources don't go together.
    """

    model: Annotated[ModelReference, Form("one of the merge's experts")] = Field(
        description="the expert, written as in the merge: `org/model`, `org/model@revision`, `base+adapter`, a folder"
    )
    name: Annotated[
        str,
        Form("letters, digits and ._- that begin with a letter, a digit or _", "the expert's name"),
    ] = Field(
        pattern=r"\A[A-Za-z0-9_][A-Za-z0-9._-]*\z",
        description="what the task is called in tables and files; further tasks of one expert get -2, -3",
    )
    dataset: Annotated[DatasetSpec, Form("a Hub id or a local path, or a mapping with a path")] = Field(
        description="where the rows are; a mapping holds the keys of a dataset, below"
    )
    text: Annotated[str | None, _COLUMN] = Field(default=None, min_length=1, description="column of plain text")
    prompt: Annotated[_Template | None, _TEMPLATE] = Field(
        default=None, description="what the model reads; `{column}` is a column's value, `{column:.1f}` formats it"
    )
    completion: Annotated[_Template | None, _TEMPLATE] = Field(
        default=None,
        description="what the model answers; an encoder-decoder reads the prompt and writes this",
    )
    words: Annotated[
        _Words | None,
        Form('a mapping like {label: {0: "no", 1: "yes"}}, every word as text (YAML reads a bare no as false)'),
    ] = Field(default=None, description="words for values of the templates' columns, such as class labels")
    messages: Annotated[str | None, _COLUMN] = Field(
        default=None, min_length=1, description="column of chat turns, through the model's chat template"
    )
    image: Annotated[str | None, _COLUMN] = Field(
        default=None,
        min_length=1,
        description="column of images, through the model's processor; with `text`, for both towers of a CLIP",
    )
    label: Annotated[str | None, _COLUMN] = Field(
        default=None,
        min_length=1,
        description="column with classes, for `featcal-hf eval` of a classifier (it looks for `label` where nothing "
        "is said); never calibrated on",
    )
    evaluation: Annotated[EvalSpec | None, Form("a mapping such as {split: test}")] = Field(
        default=None,
        validation_alias="eval",
        serialization_alias="eval",
        description="how `featcal-hf eval` measures the task, below",
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


class Section(CardSpec, Harness, Sampling, Settings):
    """All keys of the section; read part by part, so that an error points at its place in the file."""

    base_model: Annotated[str | None, Form("a model as text: a path or a Hub id", "the merge's")] = Field(
        default=None, description="another base for the anchor"
    )
    tasks: Annotated[list[Any], Form("a list of tasks")] = Field(
        description="the experts' examples, below; every expert needs a task, and may have several"
    )
