"""The pages say what is there: links, commands, flags, recipes and reference tables."""

from __future__ import annotations

import ast
import re
from importlib.metadata import metadata
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import click
import pytest
import yaml
from mergekit.scripts.run_yaml import main as mergekit_yaml
from pages import DOCS, PAGES, ROOT, read_page

from featcal_hf.cli import cli
from featcal_hf.recipe import read_recipe

each_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def flags_of(command: click.Command) -> set[str]:
    return {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)} | {"--help"}


FLAGS = set[str]().union(*map(flags_of, [cli, mergekit_yaml, *cli.commands.values()]))


def check_command(words: list[str]) -> None:
    """Fail where a command line has a command, flag, argument or file that isn't there."""
    program, arguments = words[0], words[1:]
    if program == "featcal-hf":
        own = cli.commands if arguments[0] in cli.commands else {"calibrate": cli.commands["calibrate"]}
        name = arguments.pop(0) if arguments[0] in own else "calibrate"
        own[name].make_context(name, arguments).close()
    elif program == "mergekit-yaml":
        mergekit_yaml.make_context(program, arguments).close()
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in arguments if "=" not in word} <= set(targets)
    elif program == "python":
        assert arguments[0] == "-m" or (ROOT / arguments[0]).is_file()
    elif program in {"torchrun", "accelerate"}:
        check_command(["featcal-hf", *arguments[arguments.index("featcal_hf") + 1 :]])
    elif program == "pip":
        extras = re.findall(r"featcal_hf\[([\w,-]+)\]", " ".join(arguments))
        assert set(",".join(extras).split(",")) - {""} <= set(metadata("featcal_hf").get_all("Provides-Extra"))
    else:
        assert program in {".venv/bin/pre-commit"}, f"no test knows the command {program}"


@each_page
def test_links_lead_to_files_and_headings(path: Path) -> None:
    page = read_page(path)
    for link in page.links():
        if not link.startswith("https://"):
            target, _, anchor = link.partition("#")
            place = (path.parent / target).resolve() if target else path
            assert place.exists(), link
            assert not anchor or anchor in read_page(place).anchors(), link


@each_page
def test_commands_and_their_flags_exist(path: Path) -> None:
    for words in read_page(path).commands():
        try:
            check_command(words)
        except click.ClickException as error:
            raise AssertionError(f"{' '.join(words)}: {error.format_message()}") from error


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yml")), ids=lambda path: path.name)
def test_the_commands_above_a_recipe_are_for_it(path: Path) -> None:
    lines = re.findall(r"^#   ((?:featcal-hf|mergekit-yaml) .*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert lines
    for words in map(str.split, lines):
        check_command(words)
        assert f"recipes/{path.name}" in words


@each_page
def test_commands_and_flags_in_the_text_exist(path: Path) -> None:
    for code in read_page(path).inline():
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", code):
            assert flag in FLAGS, code
        if (command := re.match(r"featcal-hf ([a-z]+)(?= |$)", code)) is not None:
            assert command[1] in cli.commands, code


@each_page
def test_recipes_in_the_text_can_be_read(path: Path, tmp_path: Path) -> None:
    for text in read_page(path).code("yaml"):
        recipe = yaml.safe_load(text)
        if "merge_method" not in recipe:
            models = {task["model"]: None for task in recipe["featcal"]["tasks"]}
            merge = {"merge_method": "task_arithmetic", "base_model": "org/base", "dtype": "float32"}
            recipe = {**merge, "models": [{"model": model, "parameters": {"weight": 0.3}} for model in models]}
            text = f"{yaml.safe_dump(recipe)}\n{text}"
        (tmp_path / "recipe.yml").write_text(text)
        assert read_recipe(tmp_path / "recipe.yml").tasks


def test_the_index_lists_every_page() -> None:
    listed = set(read_page(DOCS / "index.md").links())
    assert {page.name for page in DOCS.glob("*.md")} - {"index.md"} <= listed


def script(name: str) -> ModuleType:
    spec = spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return script("reference")


def test_every_figure_can_be_drawn_again_and_is_in_a_page() -> None:
    figures = {f"figures/{name}.svg" for name in script("figures").drawn()}
    assert figures == {f"figures/{path.name}" for path in (DOCS / "figures").glob("*.svg")}
    assert figures <= {link for path in DOCS.glob("*.md") for link in read_page(path).links()}


@pytest.mark.parametrize("name", ["recipe.md", "commands.md", "python.md"])
def test_the_reference_is_what_the_code_says(name: str, reference: ModuleType) -> None:
    page = (DOCS / name).read_text(encoding="utf-8")
    assert page == reference.renewed(page), "run `python docs/reference.py`"


def test_every_table_that_can_be_made_is_in_one_page(reference: ModuleType) -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    assert sorted(re.findall(r"<!-- made: (\w+) -->", pages)) == sorted(reference.MADE)
    assert pages.count("<!-- end -->") == len(reference.MADE)


def messages() -> list[str]:
    """Every text in the package's code but docstrings, `…` in the place of what is filled in."""
    found = []
    for path in (ROOT / "featcal_hf").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                found.append(node.value)
    return found


def test_every_message_that_is_explained_is_one_of_ours() -> None:
    quoted = re.findall(r"\*\*`([^`]+)`\*\*", read_page(DOCS / "troubleshooting.md").text)
    assert len(quoted) > 40
    texts = messages()
    for message in quoted:
        pattern = re.compile(".+".join(re.escape(part) for part in message.split("…")), re.DOTALL)
        assert any(pattern.search(text) for text in texts), message
