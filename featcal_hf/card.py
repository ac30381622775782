"""The model card of a calibrated folder: rendered from what the folder says of itself, never over a person's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from mergekit import merge_methods
from mergekit.card import method_md

from featcal_hf.card_facts import Folder, read_folder
from featcal_hf.card_files import keep, read_card, write_bytes_as, write_text_as
from featcal_hf.card_metadata import (
    License,
    build_metadata,
    check_card,
    decide_license,
    eval_results,
    public_name,
    recipe_name,
    unknown_license,
)
from featcal_hf.card_usage import code_of, usage_of
from featcal_hf.errors import CardError
from featcal_hf.figures import drift_figure, png
from featcal_hf.parents import CARD, Parent
from featcal_hf.readme import (
    filled,
    has_own_template,
    is_edited,
    is_mergekits,
    is_ours,
    kept_blocks,
    metadata_of,
    model_id_of,
    place,
    signed,
)
from featcal_hf.recipe import CardSpec
from featcal_hf.recorded import read_run

FIGURE = "featcal_drift.png"
BESIDE = "featcal_card.md"
"""Where the card goes where a person wrote README.md."""
_RECIPE = "<!-- featcal:recipe -->"
"""The recipe's place until the card's blank lines are tidied, for it is shown to the letter."""
_PACKAGES = ("mergekit", "torch", "transformers", "datasets")
_BY_MERGEKIT = {"text-generation", "text-classification"}
"""Tasks whose models mergekit-yaml merges; `featcal-hf merge` is there for the others."""


@dataclass(frozen=True)
class CardReport:
    """What became of a card.

    Attributes:
        path: the file written.
        notes: what a person should know or decide.
    """

    path: Path
    notes: list[str]


def write_card(
    model_dir: str | Path, *, template: str | Path | None = None, name: str | None = None, repo_id: str | None = None
) -> CardReport:
    """Write the model card of a calibrated folder as its README.md.

    mergekit's card and an earlier one of ours are replaced; what people wrote between our card's markers, the licence
    in its metadata and the id in its example stay. An earlier one that was edited elsewhere is kept as README.md.bak.
    A README.md that a person wrote, or mergekit's once it was edited, is kept, and the card comes to stand beside it.

    Args:
        model_dir: the calibrated model.
        template: a jinja2 template in place of ours.
        name: the model's name, where the recipe gives none.
        repo_id: its repository on the Hub, for the example.

    Returns:
        The file written, and what a person should know or decide.

    Raises:
        CardError: the folder wasn't calibrated, the template can't be rendered, or the card would be refused.
    """
    folder = read_folder(Path(model_dir))
    readme = folder.path / CARD
    before = read_card(readme)
    path = readme
    notes = [*folder.notes]
    if (
        before is not None
        and not is_ours(before)
        and not is_mergekits(before, read_card(folder.path / "mergekit_config.yml"))
    ):
        path = folder.path / BESIDE
        notes.append(f"{readme} was written by a person and is kept; the card is {BESIDE} beside it")
        before = read_card(path)
    before = before if before is not None and is_ours(before) else ""
    question = _license(folder, before, recipe_name).question
    license = _license(folder, before, public_name)
    if question:
        notes.append(
            f"the card names no licence: {question}; decide, and add `license:` to the metadata at the top of "
            f"{path}, or to the recipe's featcal section"
        )
    elif license.id is None:
        unknown = ", ".join(map(recipe_name, unknown_license(folder.parents)))
        notes.append(f"the card names no licence, because nothing is known of {unknown}; add `license:` to name one")
    rendered = render_card(folder, license, _template(template), before, name=name, repo_id=repo_id)
    text = signed(rendered, own_template=template is not None)
    check_card(text, str(path))
    if folder.drift():
        _draw(folder.path)
    if before and is_edited(before):
        kept = keep(path)
        notes.append(
            f"{path} was edited outside its markers; as it was, it is {kept.name} beside it: what you want to keep "
            "goes between the markers"
        )
    write_text_as(path, text)
    return CardReport(path, notes)


def renew_card(model_dir: Path) -> CardReport | None:
    """Write our card again where a folder has one, as after an evaluation; None where it has none.

    Raises:
        CardError: it was rendered by another template than ours, or what `write_card` says.
    """
    for path in (model_dir / CARD, model_dir / BESIDE):
        card = read_card(path)
        if card is None or not is_ours(card):
            continue
        if has_own_template(card):
            raise CardError(
                f"{path} was written with another template; `featcal-hf card {model_dir} --template FILE` writes it "
                "again."
            )
        return write_card(model_dir)
    return None


def render_card(
    folder: Folder,
    license: License,
    template: str,
    before: str = "",
    *,
    name: str | None = None,
    repo_id: str | None = None,
) -> str:
    """A card's text.

    Args:
        folder: what it speaks of.
        license: as decided.
        template: jinja2; see `_context` for its names.
        before: our card that this one replaces, if there is one.
        name: the model's name, where the recipe gives none.
        repo_id: its repository on the Hub.

    Raises:
        CardError: the template has an error or no place for what people wrote, or the earlier card lost a marker.
    """
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = lambda value: str(value).replace("|", "\\|").replace("\n", " ")
    environment.filters["license_of"] = _license_of
    try:
        text = environment.from_string(template).render(_context(folder, license, before, name, repo_id))
    except jinja2.TemplateError as error:
        raise CardError(
            f"the card's template can't be rendered ({error}); mend it, or leave --template out."
        ) from error
    tidy = re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"
    return filled(tidy.replace(_RECIPE, folder.report["recipe"].rstrip()), kept_blocks(before))


def check_license(given: CardSpec, parents: Sequence[Parent]) -> None:
    """Refuse a run whose model is to be shared while its licence is open.

    Raises:
        CardError: names the parents' licences.
    """
    question = decide_license(License(given.license), parents, recipe_name).question
    if question is not None:
        raise CardError(f"{question}; read them, decide, and add `license:` to the recipe's featcal section.")


def open_question(model_dir: Path, card: str) -> str | None:
    """What a person has to decide before a card without a licence is shared; None where nothing is open."""
    if metadata_of(card).get("license"):
        return None
    return decide_license(License(), read_folder(model_dir).parents, recipe_name).question


def default_template() -> str:
    """The text of our template."""
    return resources.files("featcal_hf").joinpath("templates/card.md.jinja").read_text(encoding="utf-8")


def _context(folder: Folder, license: License, before: str, name: str | None, repo_id: str | None) -> dict[str, Any]:
    report = folder.report
    model_id = repo_id or model_id_of(before) or f"./{folder.path.resolve().name}"
    title = report["card"]["name"] or name or Path(model_id).name
    base = folder.base
    usage = usage_of(folder.config, chat=folder.chat, base=base.id if base else None)
    on_hub = list(dict.fromkeys(one.path for one in folder.data if one.on_hub))
    results = eval_results(folder.evaluation, usage.pipeline, on_hub) if folder.evaluation else []
    metadata = build_metadata(
        name=title,
        parents=folder.parents,
        license=license,
        languages=report["card"]["language"] or [],
        datasets=on_hub,
        pipeline=usage.pipeline,
        results=results,
    )
    return {
        "metadata": metadata.to_yaml(),
        "name": title,
        "block": place,
        "base": base,
        "experts": [parent for parent in folder.parents if parent.role != "base"],
        "parents": folder.parents,
        "method": method_md(report["merge_method"]),
        "method_url": merge_methods.get(report["merge_method"]).spec.reference_url,
        "code": code_of(usage, model_id, base.id if base else None),
        "results": folder.results(),
        "drift": folder.drift(),
        "figure": FIGURE if folder.drift() else None,
        "recipe": _RECIPE,
        "fence": "`" * max(3, 1 + max((len(run) for run in re.findall("`+", report["recipe"])), default=0)),
        "settings": report["settings"],
        "modules": folder.modules(),
        "blocks": len(report["blocks"]),
        "kept": folder.kept(),
        "data": folder.data,
        "rows": sum(one.rows for one in folder.data),
        "license": license,
        "revisions": any(parent.revision for parent in folder.parents),
        "versions": " ".join(f"{package}=={_release(report['versions'][package])}" for package in _PACKAGES),
        "installed_from": report.get("installed_from"),
        "own_version": report["versions"]["featcal_hf"],
        "merge_command": _merge_command(folder, usage.pipeline),
        "seed": "" if report["random_seed"] is None else f" --random-seed {report['random_seed']}",
        "eval_flags": " --experts" if any(row["expert"] for row in folder.results()) else "",
    }


def _license(folder: Folder, before: str, named: Callable[[Parent], str]) -> License:
    """The licence in the earlier card, which a person may have changed; else the recipe's; else what parents say."""
    found, given = metadata_of(before), folder.report["card"]
    source = found if found.get("license") else given
    values = (source.get(key) for key in ("license", "license_name", "license_link"))
    given = License(*(value if isinstance(value, str) else None for value in values))
    return decide_license(given, folder.parents, named)


def _license_of(parent: Parent) -> str:
    if parent.license is None:
        return f"unknown: {parent.card_problem or 'its card names none'}"
    named = f"{parent.license} ({parent.license_name})" if parent.license_name else parent.license
    return f"[{named}]({parent.license_link})" if parent.license_link else named


def _merge_command(folder: Folder, pipeline: str) -> str:
    if pipeline not in _BY_MERGEKIT:
        return "featcal-hf merge"
    return "mergekit-yaml" + (" --lora-merge-cache ./loras" if any(p.role == "adapter" for p in folder.parents) else "")


def _release(installed: str) -> str:
    """A version as an index has it, without the build of one machine (2.13.0+cpu)."""
    return installed.split("+")[0]


def _template(path: str | Path | None) -> str:
    if path is None:
        return default_template()
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CardError(f"--template {path} can't be read ({error}); name a text file.") from error


def _draw(model_dir: Path) -> None:
    """Draw the drift of every block beside the card."""
    figure = drift_figure(read_run(model_dir))
    if figure is not None:
        write_bytes_as(model_dir / FIGURE, png(figure))
