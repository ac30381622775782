"""What the recipe says of a task: its data, what is read of them, how many rows, how it is evaluated."""

from __future__ import annotations

from typing import Annotated

from mergekit.common import ModelReference
from pydantic import BaseModel, Field, model_validator

from featcal_hf.recipe_form import Form
from featcal_hf.recipe_values import COLUMN, FLAG, STRICT, TEMPLATE, ClassNames, Template, Templates, Words, columns_of

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


class DatasetSpec(BaseModel):
    """Where a task's examples are: the arguments of `datasets.load_dataset` with the same names.

    Raises:
        ValidationError: a value has the wrong type.
    """

    model_config = STRICT

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
    streaming: Annotated[bool, FLAG] = Field(
        default=False, description="read rows one by one instead of downloading the whole split"
    )


class EvalSpec(BaseModel):
    """How `featcal-hf eval` measures a task, where the task itself doesn't say it.

    Raises:
        ValidationError: a value has the wrong type, or a text model comes without templates or the reverse.
    """

    model_config = STRICT

    split: Annotated[str | None, Form("the name of a split, as text", "the task's own, without calibration's rows")] = (
        Field(default=None, min_length=1, description="rows are read from this split")
    )
    text_model: Annotated[str | None, Form("the Hub id or local path of a CLIP with its text tower, as text")] = Field(
        default=None,
        min_length=1,
        description="a CLIP whose text tower and projections make a classifier of an image tower",
    )
    class_names: Annotated[
        ClassNames | None,
        Form("a list of the classes' names in the order of their labels, each as text", "the dataset's names"),
    ] = Field(default=None, description="what the labels mean, from 0")
    templates: Annotated[
        Templates | None, Form('a list of sentences with {} for the class, such as "a photo of a {}."')
    ] = Field(default=None, description="the sentences that stand for a class; their embeddings are averaged")

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

    Raises:
        ValidationError: a value has the wrong type or is out of range.
    """

    model_config = STRICT

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
    text: Annotated[str | None, COLUMN] = Field(default=None, min_length=1, description="column of plain text")
    prompt: Annotated[Template | None, TEMPLATE] = Field(
        default=None, description="what the model reads; `{column}` is a column's value, `{column:.1f}` formats it"
    )
    completion: Annotated[Template | None, TEMPLATE] = Field(
        default=None,
        description="what the model answers; an encoder-decoder reads the prompt and writes this",
    )
    words: Annotated[
        Words | None,
        Form('a mapping like {label: {0: "no", 1: "yes"}}, every word as text (YAML reads a bare no as false)'),
    ] = Field(default=None, description="words for values of the templates' columns, such as class labels")
    messages: Annotated[str | None, COLUMN] = Field(
        default=None, min_length=1, description="column of chat turns, through the model's chat template"
    )
    image: Annotated[str | None, COLUMN] = Field(
        default=None,
        min_length=1,
        description="column of images, through the model's processor; with `text`, for both towers of a CLIP",
    )
    label: Annotated[str | None, COLUMN] = Field(
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
        read = [column for text in templates for column in columns_of(text).values()]
        for column in self.words or {}:
            if column not in read:
                found = ", ".join(dict.fromkeys(read)) or "nothing"
                raise ValueError(f"has words for {column!r}, which its templates don't read (they read {found}).")
        return self
