"""What the recipe's `featcal:` section may say, as strict models: nothing unknown, nothing converted.

A field's `description` says what it does, its `Form` what a value looks like. `docs/recipe.md` and the errors about
values are made from these, so that each text stands here alone.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from featcal_hf.errors import RecipeError
from featcal_hf.recipe_form import Form
from featcal_hf.recipe_task import Sampling
from featcal_hf.recipe_values import FLAG, STRICT, Float, Languages, License, TaskName


def needs_base(rho: float | None) -> str:
    """What is wrong with a `rho` other than 1 where there is no base."""
    return f"is {rho}, but there is no base to blend with; add featcal.base_model, or set rho to 1."


class Settings(BaseModel):
    """How strongly, and towards what, to calibrate (the paper's λ, ρ, α).

    Raises:
        ValidationError: a value has the wrong type or is out of range.
    """

    model_config = STRICT

    # validation_alias, not alias: to type checkers alias is the parameter's name, and `lambda` can't be one.
    lambda_: Annotated[Float | None, Form("a number above 0", "the adaptive ridge")] = Field(
        default=None,
        validation_alias="lambda",
        serialization_alias="lambda",
        gt=0,
        description="ridge λ: the pull towards the anchor, relative to unit-norm Grams. The adaptive ridge takes "
        "tasks · max(1, √(inputs / tokens per task)) for each linear module, and 0.01 for norms; it needs no search",
    )
    rho: Annotated[Float | None, Form("a number of at least 0", "2 with a base and 1 without")] = Field(
        default=None,
        ge=0,
        description="the anchor is ρ·merged + (1-ρ)·base: 0 is the base, 1 the merged model, above 1 extrapolates "
        "away from the base",
    )
    alpha: Annotated[Float, Form("a number from 0 to 1")] = Field(
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
    bias: Annotated[bool, FLAG] = Field(default=True, description="calibrate the biases of linear modules")
    norm: Annotated[bool, FLAG] = Field(default=True, description="calibrate the affine weights of norms")
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


class CardSpec(BaseModel):
    """What the model card says that can't be found out from the models.

    Raises:
        ValidationError: a value has the wrong type, or a licence is unknown, or `other` without a name and a link.
    """

    model_config = STRICT

    name: Annotated[str | None, Form("the model's name, on one line", "the folder's or the repository's")] = Field(
        default=None, pattern=r"\A[^\r\n]*\S[^\r\n]*\z", description="the model's name in its card"
    )
    license: Annotated[
        License | None,
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
        Languages | None,
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

    model_config = STRICT

    lm_eval: Annotated[list[TaskName], Form("a list of tasks such as [gsm8k, mbpp], each as text")] = Field(
        default=[],
        description="tasks of EleutherAI's harness that `featcal-hf eval` runs on the merged and the calibrated model, "
        "by name or as local YAML files of tasks",
    )


class Section(CardSpec, Harness, Sampling, Settings):
    """All keys of the section; read part by part, so that an error points at its place in the file."""

    base_model: Annotated[str | None, Form("a model as text: a path or a Hub id", "the merge's")] = Field(
        default=None, description="another base for the anchor"
    )
    tasks: Annotated[list[Any], Form("a list of tasks")] = Field(
        description="the experts' examples, below; every expert needs a task, and may have several"
    )
