"""A card's metadata: what the Hub reads of a model, decided from its parents and its runs, and checked offline."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from featcal_hf.errors import CardError
from featcal_hf.hidden_paths import first_path
from featcal_hf.hub_ids import id_problem
from featcal_hf.licenses import KNOWN, PERMISSIVE
from featcal_hf.parents import Parent

TAGS = ("mergekit", "merge", "featcal")
METRIC_IDS = {
    "accuracy": "accuracy",
    "zero-shot accuracy": "accuracy",
    "exact match": "exact_match",
    "perplexity": "perplexity",
    "loss per token": "loss",
    "Spearman's ρ": "spearmanr",
}
"""Our metrics -> the Hub's; those that compare with an expert are no results of the model alone."""
_LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]+)*|code|multilingual")
_TASK = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True)
class License:
    """A merge's licence as a card gives it.

    Attributes:
        id: the Hub's id; None where nothing can be said.
        name: of an `other` licence.
        link: of an `other` licence.
        question: what a person has to decide first; None where nothing is open.
    """

    id: str | None = None
    name: str | None = None
    link: str | None = None
    question: str | None = None


def public_name(parent: Parent) -> str:
    """A parent's name for readers of its card."""
    return parent.name


def recipe_name(parent: Parent) -> str:
    """A parent's name for whoever wrote the recipe."""
    return parent.path


def decide_license(given: License, parents: Sequence[Parent], named: Callable[[Parent], str] = public_name) -> License:
    """The licence that a person gave, else the parents', if it is one and the same and permissive.

    What can't be passed on without a person's word (different licences, one with conditions) is a question.

    Args:
        given: what a person decided.
        parents: what the merge is made of.
        named: how the question names a parent.
    """
    if given.id is not None:
        return given
    said = {parent.license for parent in parents}
    if None in said:
        unknown = ", ".join(named(parent) for parent in parents if parent.license is None)
        known = [license for license in said if license is not None]
        if all(license in PERMISSIVE for license in known):
            return License()
        return License(question=f"{unknown} say nothing of a licence, others have {', '.join(sorted(known))}")
    if len(said) > 1:
        listed = ", ".join(f"{named(parent)} ({parent.license})" for parent in parents)
        return License(question=f"the merge's parents have different licences: {listed}")
    only = next(iter(said), None)
    if only in PERMISSIVE:
        return License(only)
    return (
        License(question=f"all parents have the licence {only}, which has conditions of its own") if only else License()
    )


def unknown_license(parents: Sequence[Parent]) -> list[Parent]:
    """The parents of which no licence is known."""
    return [parent for parent in parents if parent.license is None]


def eval_results(evaluation: dict[str, Any], pipeline: str, datasets: Sequence[str]) -> list[EvalResult]:
    """The calibrated model's results on those datasets, from what `featcal_eval.json` holds, for the model index."""
    results = []
    for line in evaluation["results"]:
        task = evaluation["tasks"][line["task"]]
        data = task["dataset"]
        if line["metric"] not in METRIC_IDS or line.get("calibrated") is None or data["path"] not in datasets:
            continue
        results.append(
            EvalResult(
                task_type=pipeline,
                dataset_type=data["path"],
                dataset_name=" ".join(part for part in (data["path"], data["name"]) if part),
                dataset_config=data["name"],
                dataset_split=data["split"],
                dataset_revision=data["revision"] or task["commit"],
                metric_type=METRIC_IDS[line["metric"]],
                metric_name=f"{line['metric']} ({line['task']}, {task['rows']} rows)",
                metric_value=line["calibrated"],
            )
        )
    return results


def build_metadata(
    *,
    name: str,
    parents: Sequence[Parent],
    license: License,
    languages: Sequence[str],
    datasets: Sequence[str],
    pipeline: str,
    results: list[EvalResult],
) -> ModelCardData:
    """The metadata, in the Hub's order, with nothing empty in it."""
    bases = list(dict.fromkeys(parent.id for parent in parents if parent.id is not None))
    spoken = languages or list(dict.fromkeys(code for parent in parents for code in parent.language))
    return ModelCardData(
        base_model=bases or None,
        base_model_relation="merge" if bases else None,
        library_name="transformers",
        pipeline_tag=pipeline,
        license=license.id,
        license_name=license.name,
        license_link=license.link,
        language=list(spoken) or None,
        datasets=list(dict.fromkeys(datasets)) or None,
        tags=list(TAGS),
        model_name=name if results else None,
        eval_results=results or None,
    )


def check_card(text: str, where: str = "README.md") -> None:
    """Check offline what the Hub checks when a card arrives, and that no local path is in it.

    Raises:
        CardError: names the key, what was found, and what to do.
    """
    found = list(_problems(text))
    if found:
        raise CardError(f"{where}: " + "; ".join(found) + ".")


def _problems(text: str) -> Iterator[str]:
    block = REGEX_YAML_BLOCK.search(text)
    if block is None:
        yield "has no metadata; begin it with a block of YAML between two lines of ---"
        return
    try:
        written = yaml.safe_load(block[2])
        card = ModelCard(text)
    except (yaml.YAMLError, ValueError, TypeError, KeyError) as error:
        yield f"its metadata can't be read ({' '.join(str(error).split())}); mend the YAML between the two lines of ---"
        return
    yield from (f"{key} is empty; give it a value or remove it" for key in _nulls(written))
    yield from _ids("base_model", card.data.get("base_model"), "a model's id on the Hub")
    yield from _ids("datasets", card.data.get("datasets"), "a dataset's id on the Hub")
    yield from _license(card.data)
    for code in _listed(card.data.get("language")):
        if not isinstance(code, str) or not _LANGUAGE.fullmatch(code):
            yield f'language is {code!r}, expected an ISO 639 code in lower case ("no" in quotes), code or multilingual'
    for tag in _listed(card.data.get("tags")):
        if not isinstance(tag, str) or not tag:
            yield f"tags has {tag!r}, expected text"
    pipeline = card.data.get("pipeline_tag")
    if pipeline is not None and not (isinstance(pipeline, str) and _TASK.fullmatch(pipeline)):
        yield f"pipeline_tag is {pipeline!r}, expected a task of the Hub, such as text-generation"
    relation = card.data.get("base_model_relation")
    if relation not in (None, "merge", "finetune", "adapter", "quantized"):
        yield f"base_model_relation is {relation!r}, expected merge"
    for result in card.data.get("eval_results", []):
        if not isinstance(result.metric_value, int | float | str) or result.metric_value != result.metric_value:
            yield f"model-index has {result.metric_value!r} as the value of {result.metric_type}, expected a number"
    path = first_path(text)
    if path is not None:
        yield f"the local path {path} is in it; name what others can find"


def _license(data: Any) -> Iterator[str]:
    license = data.get("license")
    for one in _listed(license):
        if one not in KNOWN:
            yield f"license is {one!r}, which the Hub doesn't know; give its id, or other with a name and a link"
    if license == "other" and not (data.get("license_name") and data.get("license_link")):
        yield "license is other; add license_name and license_link"


def _ids(key: str, value: object, expected: str) -> Iterator[str]:
    for one in _listed(value):
        if not isinstance(one, str) or id_problem(one) is not None:
            yield f"{key} has {one!r}, expected {expected}"


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _nulls(value: object, where: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _nulls(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _nulls(item, f"{where}[{index}]")
    elif value is None:
        yield where or "the metadata"
