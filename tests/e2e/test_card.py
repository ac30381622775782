"""The card of a calibrated folder: what it says, whose words it keeps, and that what it says to run runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers as hf
import yaml
from huggingface_hub import ModelCard
from tiny_merge import Merge, Outcome, contents, copy_merge

from featcal_hf import CardError, calibrate, evaluate, write_card
from featcal_hf.card_metadata import check_card
from featcal_hf.hidden_paths import first_path

Featcal = Callable[..., Outcome]
PERSON = "---\nlicense: mit\n---\n# My own card\n"


@pytest.fixture(scope="module")
def made(pristine: Merge, tmp_path_factory: pytest.TempPathFactory) -> Merge:
    """A merge that was calibrated in place: read it, don't change it."""
    merge = copy_merge(pristine, tmp_path_factory.mktemp("card"))
    calibrate(merge.recipe, merge.merged)
    return merge


@pytest.fixture
def calibrated(made: Merge, tmp_path: Path) -> Merge:
    return copy_merge(made, tmp_path)


def readme(merge: Merge) -> str:
    return (merge.merged / "README.md").read_text()


def test_calibration_replaces_mergekits_card_by_one_that_says_what_was_done(made: Merge) -> None:
    text = readme(made)
    check_card(text)
    assert ModelCard(text).data.tags == ["mergekit", "merge", "featcal"]
    assert "This model was merged using the [Task Arithmetic](https://arxiv.org/abs/2212.04089) merge method" in text
    assert "| a | ./a | ./a.jsonl (local) |  | train |  | 12 | 4 |" in text
    assert "λ adaptive, ρ 2.0, α 0.3" in text
    assert "27 modules in 3 blocks were calibrated" in text
    assert "used for calibration only" in text
    assert f"transformers=={hf.__version__.split('+')[0]}" in text
    drift = json.loads((made.merged / "featcal.json").read_text())["blocks"][-1]["drift"]["a"]
    assert f"| a | {drift['before']['relative']:.1%} | {drift['after']['relative']:.1%} |" in text


def test_the_card_shows_the_drift_of_every_block(made: Merge, calibrated: Merge) -> None:
    assert "](featcal_drift.png)" in readme(made)
    assert (made.merged / "featcal_drift.png").read_bytes().startswith(b"\x89PNG")
    report = calibrated.merged / "featcal.json"
    told = json.loads(report.read_text())
    for block in told["blocks"]:
        block["drift"] = {}
    report.write_text(json.dumps(told))
    write_card(calibrated.merged)
    assert "featcal_drift.png" not in readme(calibrated)


def test_the_recipe_in_the_card_is_the_recipe_with_names_in_place_of_local_paths(made: Merge) -> None:
    block = re.search(r"```yaml\n(.*?)\n```", readme(made), re.DOTALL)
    assert block is not None
    expected = made.recipe.read_text().replace(f"{made.root}/", "./")
    assert yaml.safe_load(block[1]) == yaml.safe_load(expected)


def test_no_local_path_is_in_the_card(made: Merge) -> None:
    assert first_path(readme(made)) is None
    assert made.root.name not in readme(made)


def test_without_a_card_mergekits_stays(merge: Merge, featcal: Featcal) -> None:
    before = readme(merge)
    assert featcal(merge.recipe, merge.merged, "--no-write-model-card", "--quiet").code == 0
    assert readme(merge) == before


@pytest.mark.parametrize("edit", ["a new card", "a word", "a key"])
def test_a_card_that_a_person_wrote_or_edited_is_kept_and_ours_stands_beside_it(
    edit: str, merge: Merge, featcal: Featcal
) -> None:
    path = merge.merged / "README.md"
    changed = {
        "a new card": PERSON,
        "a word": path.read_text().replace("## Merge Details", "It is good at sums.\n\n## Merge Details"),
        "a key": path.read_text().replace("library_name:", "license: mit\nlibrary_name:"),
    }
    path.write_text(changed[edit])
    outcome = featcal(merge.recipe, merge.merged)
    assert outcome.code == 0
    assert f"{path} was written by a person and is kept" in outcome.output
    assert path.read_text() == changed[edit]
    check_card((merge.merged / "featcal_card.md").read_text())


def test_an_empty_card_is_nobodys(merge: Merge) -> None:
    (merge.merged / "README.md").write_text("\n")
    calibrate(merge.recipe, merge.merged)
    assert "featcal:description" in readme(merge)
    assert not (merge.merged / "featcal_card.md").exists()


def test_what_people_wrote_between_the_markers_and_their_licence_survive(calibrated: Merge, featcal: Featcal) -> None:
    path = calibrated.merged / "README.md"
    mine = "Good at {{ sums }}.\r\n\n* and <b>more</b>\n\n\n\nThanks.\n"
    text = path.read_bytes().decode().replace("<!-- featcal:description -->\n", f"<!-- featcal:description -->\n{mine}")
    text = text.replace("library_name:", "license: cc-by-nc-4.0\nlibrary_name:")
    path.write_bytes(text.replace('"./merged"', '"me/sums"').encode())
    outcome = featcal("card", calibrated.merged)
    assert outcome.code == 0
    after = path.read_bytes().decode()
    assert mine in after
    assert ModelCard(after).data.license == "cc-by-nc-4.0"
    assert 'model_id = "me/sums"' in after
    assert "# sums\n" in after
    assert "outside its markers" not in outcome.output
    assert not list(calibrated.merged.glob("*.bak*"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("## Limits", "## Nothing{}"),
        ("tags:\n", "tags:\n- mine{}\n"),
        ("<!-- featcal:credits -->", "Thanks{}.\n\n<!-- featcal:credits -->"),
    ],
)
def test_a_card_that_was_edited_elsewhere_is_kept_beside_the_new_one(
    old: str, new: str, calibrated: Merge, featcal: Featcal
) -> None:
    path, generated = calibrated.merged / "README.md", readme(calibrated)
    for number in ("", "2"):
        edited = generated.replace(old, new.format(number), 1).encode()
        path.write_bytes(edited)
        outcome = featcal("card", calibrated.merged)
        assert outcome.code == 0
        assert f"was edited outside its markers; as it was, it is README.md.bak{number} beside it" in outcome.output
        assert (calibrated.merged / f"README.md.bak{number}").read_bytes() == edited
        assert readme(calibrated) == generated
    assert "outside its markers" not in featcal("card", calibrated.merged).output


def test_a_card_without_its_mark_counts_as_edited(calibrated: Merge) -> None:
    path, text = calibrated.merged / "README.md", readme(calibrated)
    path.write_text(re.sub("<!-- featcal:made .* -->\n", "", text))
    assert any("README.md.bak" in note for note in write_card(calibrated.merged).notes)
    assert readme(calibrated) == text


@pytest.mark.parametrize("broken", ["<!-- /featcal:description -->", "<!-- featcal:credits -->"])
def test_a_card_whose_markers_are_broken_is_not_touched(broken: str, calibrated: Merge, featcal: Featcal) -> None:
    path = calibrated.merged / "README.md"
    path.write_text(readme(calibrated).replace(broken, ""))
    before = contents(calibrated.merged)
    outcome = featcal("card", calibrated.merged)
    assert outcome.code == 1
    assert "put both markers back" in outcome.errors
    assert contents(calibrated.merged) == before


def test_rendering_again_changes_nothing(calibrated: Merge, featcal: Featcal) -> None:
    before = contents(calibrated.merged)
    assert featcal("card", calibrated.merged).output.endswith(f"Wrote {calibrated.merged / 'README.md'}")
    assert contents(calibrated.merged) == before


def test_a_template_of_ones_own_is_rendered_with_the_same_names(calibrated: Merge, featcal: Featcal) -> None:
    template = calibrated.root / "mine.jinja"
    template.write_text("---\n{{ metadata }}\n---\n# {{ name }} by {{ method }}\n{{ block('credits') }}\n")
    assert featcal("card", calibrated.merged, "--template", template).code == 0
    assert "# merged by [Task Arithmetic]" in readme(calibrated)
    whole = readme(calibrated)
    (calibrated.merged / "README.md").write_text(
        whole.replace("<!-- /featcal:credits -->", "Thanks to all.\n<!-- /featcal:credits -->")
    )
    for wrong, message in (
        ("{{ nmae }}", "'nmae' is undefined"),
        ("---\n{{ metadata }}\n---\n", "no place for what is written between the card's credits markers"),
        ("{% if %}", "can't be rendered"),
        (None, "can't be read"),
    ):
        template.unlink()
        if wrong is not None:
            template.write_text(wrong)
        outcome = featcal("card", calibrated.merged, "--template", template)
        assert outcome.code == 1
        assert message in outcome.errors


def test_the_card_names_its_licence_once_a_person_decides(merge: Merge, featcal: Featcal) -> None:
    for name, license in (("base", "llama3.2"), ("a", "llama3.2"), ("b", "mit")):
        (merge.root / name / "README.md").write_text(f"---\nlicense: {license}\nlanguage: en\n---\n# {name}\n")
    outcome = featcal(merge.recipe, merge.merged)
    assert "the card names no licence: the merge's parents have different licences" in outcome.output
    named = ", ".join(f"{merge.root / name} ({said})" for name, said in (("base", "llama3.2"), ("a", "llama3.2")))
    assert f"{named}, {merge.root / 'b'} (mit); decide" in outcome.output, "as the recipe names them"
    assert "./base (llama3.2), ./a (llama3.2), ./b (mit)" in readme(merge), "as others know them"
    data = ModelCard(readme(merge)).data
    assert data.license is None
    assert data.language == ["en"]
    assert "**Open: the merge's parents have different licences" in readme(merge)
    assert "| ./b | mit |" in readme(merge)
    merge.edit_recipe("featcal:\n", "featcal:\n  license: llama3.2\n  language: [en, de]\n  name: Sums\n")
    outcome = featcal(merge.recipe, merge.merged, "--output", merge.root / "again")
    assert outcome.code == 1, "it has been calibrated"


def test_a_parent_s_card_that_can_t_be_read_is_said_to_be_so(merge: Merge) -> None:
    (merge.base / "README.md").write_text("---\nlicense: [\n---\n")
    (merge.expert / "README.md").write_text("---\nlicense: [mit, apache-2.0]\nlanguage: [en, 3]\n---\n")
    calibrate(merge.recipe, merge.merged)
    assert re.search(r"\| \./base \| unknown: its card can't be read \(\w+Error\) \|", readme(merge))
    assert "| ./a | mit, apache-2.0 |" in readme(merge)
    assert ModelCard(readme(merge)).data.language == ["en"]


def test_the_recipe_names_the_model_its_licence_and_its_languages(merge: Merge) -> None:
    card = "  license: llama3.2\n  language: [en, de]\n  name: Sums\n"
    merge.edit_recipe("featcal:\n", f"# ```\n\n\n\nfeatcal:\n{card}")
    report = calibrate(merge.recipe, merge.merged, random_seed=7)
    data = ModelCard(readme(merge)).data
    assert (data.license, data.language) == ("llama3.2", ["en", "de"])
    assert "# Sums\n" in readme(merge)
    assert "--random-seed 7" in readme(merge)
    assert f"````yaml\n{merge.recipe.read_text().replace(str(merge.root), '.')}````\n" in readme(merge), "to the letter"
    assert report.card is not None
    assert not any("licence" in note for note in report.card.notes)


def test_an_evaluation_fills_the_table_and_a_stale_one_does_not(calibrated: Merge, pristine: Merge) -> None:
    report = evaluate(calibrated.recipe, calibrated.merged, pristine.merged, experts=True)
    assert report.card == calibrated.merged / "README.md"
    results = json.loads((calibrated.merged / "featcal_eval.json").read_text())["results"]
    line = next(line for line in results if line["task"] == "b" and line["metric"] == "perplexity")
    row = f"| b | perplexity | {line['expert']:.2f} | {line['merged']:.2f} | {line['calibrated']:.2f} |"
    assert row in readme(calibrated)
    assert "KL from expert" not in readme(calibrated)
    assert "featcal-hf eval recipe.yml ./calibrated --merged ./merged --experts" in readme(calibrated)
    report = calibrated.merged / "featcal.json"
    report.write_text(report.read_text() + "\n")
    notes = write_card(calibrated.merged).notes
    assert any("speaks of an earlier calibration" in note for note in notes)
    assert row not in readme(calibrated)


def test_an_evaluation_leaves_a_card_that_it_can_t_write_and_says_why(calibrated: Merge, featcal: Featcal) -> None:
    path, ours = calibrated.merged / "README.md", readme(calibrated)
    template = calibrated.root / "mine.jinja"
    template.write_text("---\n{{ metadata }}\n---\n# {{ name }}\n{{ block('credits') }}\n")
    assert featcal("card", calibrated.merged, "--template", template).code == 0
    cases = {
        readme(calibrated): f"was written with another template; `featcal-hf card {calibrated.merged} --template FILE`",
        ours.replace("<!-- /featcal:credits -->", ""): "put both markers back",
        PERSON: f"there is no model card yet for the results; `featcal-hf card {calibrated.merged}` writes it",
    }
    for text, note in cases.items():
        path.write_text(text)
        outcome = featcal("eval", calibrated.recipe, calibrated.merged, "--rows", 2)
        assert outcome.code == 0
        assert note in outcome.output
        assert path.read_text() == text


def test_an_evaluation_written_elsewhere_leaves_the_card_alone(calibrated: Merge) -> None:
    before = readme(calibrated)
    report = evaluate(calibrated.recipe, calibrated.merged, rows=2, output=calibrated.root / "elsewhere.json")
    assert (report.card, report.notes) == (None, [])
    assert readme(calibrated) == before


def test_a_folder_that_was_not_calibrated_has_no_card(merge: Merge, featcal: Featcal) -> None:
    outcome = featcal("card", merge.merged)
    assert outcome.code == 1
    assert "calibrate the model first: `featcal-hf calibrate RECIPE" in outcome.errors
    (merge.merged / "featcal.json").write_text("{}")
    with pytest.raises(CardError, match="an older version wrote it"):
        write_card(merge.merged)


def test_a_card_that_cannot_be_written_leaves_the_model_calibrated(merge: Merge, featcal: Featcal) -> None:
    (merge.merged / "README.md").write_bytes(b"\xff\xfe broken")
    outcome = featcal(merge.recipe, merge.merged)
    assert outcome.code == 1
    assert "can't be read" in outcome.errors
    assert json.loads((merge.merged / "featcal.json").read_text())["fingerprint"]
    (merge.merged / "README.md").unlink()
    assert featcal("card", merge.merged).code == 0


def test_the_example_in_the_card_runs(made: Merge) -> None:
    code = re.search(r"```python\n(.*?)```", readme(made), re.DOTALL)
    assert code is not None
    done = subprocess.run([sys.executable, "-c", code[1]], cwd=made.root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
