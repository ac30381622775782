"""The example cards are what the code makes of the records beside them."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from featcal_hf.card_metadata import check_card

FOLDER = Path(__file__).parents[2] / "model_cards"
RENDER = runpy.run_path(str(FOLDER / "render.py"))


@pytest.mark.parametrize("example", RENDER["EXAMPLES"], ids=lambda path: path.name)
def test_an_example_is_what_is_rendered(example: Path) -> None:
    written = (example / "README.md").read_text(encoding="utf-8")
    assert RENDER["rendered"](example) == written, "python model_cards/render.py renews them"
    check_card(written)


def test_the_examples_show_adapters_results_and_a_licence_of_a_person_s() -> None:
    cards = {path.name: ModelCard((path / "README.md").read_text(encoding="utf-8")).data for path in RENDER["EXAMPLES"]}
    assert len(cards) == 3
    lora, llm, clip = (next(data for name, data in cards.items() if kind in name) for kind in ("lora", "llama", "clip"))
    assert lora.base_model[0] == "google/flan-t5-large"
    assert "tanganke/flan-t5-large_glue-stsb_lora-16" in lora.base_model
    assert {"loss", "perplexity", "exact_match"} <= {result.metric_type for result in lora.eval_results}
    assert (llm.license, llm.language) == ("llama3.2", ["en"])
    assert clip.license is None
    assert {result.metric_type for result in clip.eval_results} == {"accuracy"}
    assert all(data.base_model_relation == "merge" for data in cards.values())
