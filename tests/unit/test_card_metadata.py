from __future__ import annotations

from typing import Any

import pytest
from huggingface_hub import ModelCard

from featcal_hf.card_metadata import License, build_metadata, check_card, decide_license, eval_results
from featcal_hf.errors import CardError
from featcal_hf.parents import Parent

BASE = Parent("base", "org/base", "org/base", "/x", "0a1b", license="apache-2.0", language=("en",))
ADAPTER = Parent("adapter", "org/lora", "org/lora", "/y", None, license="apache-2.0", language=("en", "de"))
LOCAL = Parent("expert", "./mine", None, "./mine", None, license="apache-2.0")


def metadata(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "name": "a merge",
        "parents": [BASE, ADAPTER, LOCAL],
        "license": License("apache-2.0"),
        "languages": [],
        "datasets": ["org/rows", "org/rows"],
        "pipeline": "text-generation",
        "results": [],
    }
    return build_metadata(**(given | changes))


def card(**changes: Any) -> str:
    return f"---\n{metadata(**changes).to_yaml()}\n---\n# a merge\n"


def test_parents_are_base_models_by_their_ids_and_local_ones_are_left_out() -> None:
    assert metadata().to_dict() == {
        "base_model": ["org/base", "org/lora"],
        "base_model_relation": "merge",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": "apache-2.0",
        "language": ["en", "de"],
        "datasets": ["org/rows"],
        "tags": ["mergekit", "merge", "featcal"],
    }


def test_a_merge_of_local_models_has_neither_base_models_nor_a_relation() -> None:
    found = metadata(parents=[LOCAL], license=License(), datasets=[]).to_dict()
    assert set(found) == {"library_name", "pipeline_tag", "tags"}


def test_the_recipes_languages_go_before_the_parents() -> None:
    assert metadata(languages=["fr"]).to_dict()["language"] == ["fr"]


def parents(*licenses: str | None) -> list[Parent]:
    return [Parent("expert", f"org/{n}", f"org/{n}", "/x", None, license=one) for n, one in enumerate(licenses)]


@pytest.mark.parametrize(
    ("licenses", "id", "question"),
    [
        (["mit", "mit"], "mit", None),
        (["mit", "apache-2.0"], None, "different licences: org/0 (mit), org/1 (apache-2.0)"),
        (["llama3.2", "llama3.2"], None, "all parents have the licence llama3.2, which has conditions"),
        (["cc-by-nc-4.0", "mit"], None, "different licences"),
        (["mit", None], None, None),
        ([None, None], None, None),
        (["gemma", None], None, "org/1 say nothing of a licence, others have gemma"),
        (["other", "other"], None, "conditions"),
        ([], None, None),
    ],
)
def test_a_licence_is_passed_on_only_where_all_parents_have_the_same_permissive_one(
    licenses: list[str | None], id: str | None, question: str | None
) -> None:
    found = decide_license(License(), parents(*licenses))
    assert found.id == id
    assert (found.question is None) == (question is None)
    assert question is None or question in str(found.question)


def test_a_person_s_licence_settles_every_question() -> None:
    given = License("other", "mine", "https://example.org")
    assert decide_license(given, parents("llama3.2", "mit", None)) == given


EVALUATION: dict[str, Any] = {
    "tasks": {
        "math": {
            "dataset": {"path": "org/rows", "name": "main", "split": "test", "revision": None},
            "commit": "0a1b",
            "rows": 64,
        },
        "mine": {
            "dataset": {"path": "rows.jsonl", "name": None, "split": "train", "revision": None},
            "commit": None,
            "rows": 9,
        },
    },
    "results": [
        {"task": "math", "metric": "exact match", "merged": 0.25, "calibrated": 0.5},
        {"task": "math", "metric": "loss per token", "merged": 2.0, "calibrated": None},
        {"task": "math", "metric": "KL from expert", "merged": 2.0, "calibrated": 1.0},
        {"task": "mine", "metric": "exact match", "merged": 0.25, "calibrated": 0.5},
    ],
}


def test_results_on_data_of_the_hub_make_a_model_index_that_reads_back_the_same() -> None:
    results = eval_results(EVALUATION, "text-generation", ["org/rows"])
    text = card(results=results)
    check_card(text)
    (read,) = ModelCard(text).data.eval_results
    assert read == results[0]
    assert read.metric_value == 0.5
    assert (read.dataset_config, read.dataset_split, read.dataset_revision) == ("main", "test", "0a1b")
    assert (read.metric_type, read.metric_name) == ("exact_match", "exact match (math, 64 rows)")


def test_a_good_card_passes() -> None:
    check_card(card())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("- org/rows", "- null", "datasets[0] is empty; give it a value or remove it"),
        ("datasets:\n- org/rows", "datasets:", "datasets is empty"),
        ("- org/base", "- ./models/base", "base_model has './models/base', expected a model's id on the Hub"),
        ("- org/base", "- /models/base", "base_model has '/models/base'"),
        ("- org/base", "- a/b/c", "base_model has 'a/b/c'"),
        ("license: apache-2.0", "license: apache", "license is 'apache', which the Hub doesn't know"),
        ("license: apache-2.0", "license: other", "add license_name and license_link"),
        ("- en", "- english", "language is 'english'"),
        ("- en", "- no", "language is False"),
        ("- mergekit", "- 3", "tags has 3"),
        ("text-generation", "Text Generation", "pipeline_tag is 'Text Generation'"),
        ("_relation: merge", "_relation: merged", "base_model_relation is 'merged'"),
        ("tags:", "tags: [", "can't be read"),
        ("tags:", "model-index: 3\ntags:", "can't be read"),
        ("# a merge", "# a merge\nfrom /home/someone/merged", "the local path /home/someone/merged is in it"),
        ("---\nbase", "base", "has no metadata"),
    ],
)
def test_what_the_hub_would_refuse_is_refused_here_with_the_key(old: str, new: str, message: str) -> None:
    text = card()
    assert old in text
    with pytest.raises(CardError, match=r"mine\.md: ") as caught:
        check_card(text.replace(old, new, 1), "mine.md")
    assert message in str(caught.value)
