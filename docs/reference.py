"""Writes the tables of the reference pages from the code: the recipe's schema, the commands' flags, the docstrings.

`python docs/reference.py` renews what stands between `<!-- made: NAME -->` and `<!-- end -->` in the pages beside it. A
test fails where a page is not what this makes of it.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel

import featcal_hf
from featcal_hf.cli import cli
from featcal_hf.recipe_form import form_of, key_of
from featcal_hf.recipe_section import Section, Settings
from featcal_hf.recipe_task import DatasetSpec, EvalSpec, Sampling, Task

PAGES = Path(__file__).parent
PLACE = re.compile(r"(?<=<!-- made: )(?P<name>[^>]+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)
PART = re.compile(r"^(Args|Attributes|Returns|Raises):\n((?:    .*\n?|\n)+)", re.MULTILINE)
OPTION = re.compile(r"--?[\w-]+")
ENTRY = re.compile(r"^(\w[\w, ]*): ", re.MULTILINE)
INSIDE = {
    "BlockReport": "calibrate",
    "ModuleUpdate": "systems",
    "InputUpdate": "systems",
    "Drift": "drift",
    "TaskOutcome": "outcome",
    "FeatureView": "outcome",
    "OutputChange": "outcome",
    "OutputDistance": "outcome",
    "StageCost": "stages",
    "Line": "eval_report",
    "Step": "calibrate",
}
"""Classes that reports hold and callbacks are given, with their modules."""


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; a column with nothing in it is left out."""
    names, lines = list(head), [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    filled = [column for column in range(len(names)) if any(line[column] for line in lines)]
    shown = [[line[column] for column in filled] for line in [names, ["---"] * len(names), *lines]]
    return "".join(f"| {' | '.join(line)} |\n" for line in shown)


def keys(model: type[BaseModel], *shared: type[BaseModel]) -> str:
    """The keys of one mapping of the recipe, without those that it shares with others."""
    elsewhere = {name for other in shared for name in other.model_fields}
    rows = []
    for name, field in model.model_fields.items():
        if name not in elsewhere:
            form = form_of(field)
            default = "required" if field.is_required() and form.default is None else form.default or ""
            rows.append((f"`{key_of(name, field)}`", form.value, default, field.description or ""))
    return table(("key", "value", "left out", "what it is"), rows)


def commands() -> str:
    """Every command: what it does, and its flags; those that most commands have are a table of their own."""
    flags = {name: _flags(command) for name, command in cli.commands.items()}
    counts = Counter(flag for own in flags.values() for flag in own)
    common = [flag for flag, count in counts.items() if count > 2]
    parts = []
    for name, command in cli.commands.items():
        own = [flag for flag in flags[name] if flag not in common]
        shared = [_name(flag) for flag, what in flags[name] if (flag, what) in common]
        tables = table(("flag", "what it does"), own) if own else ""
        also = f"Also [flags in common](#flags-in-common): {', '.join(shared)}.\n" if shared else ""
        parts.append("\n".join(part for part in (_command(name, command), tables, also) if part))
    return "\n".join([*parts, f"## Flags in common\n\n{table(('flag', 'what it does'), common)}"])


def _name(flag: str) -> str:
    """The long form of a flag, of two opposite ones the first."""
    return f"`{max(OPTION.findall(flag.partition(' / ')[0]), key=len)}`"


def _flags(command: click.Command) -> list[tuple[str, str]]:
    context = click.Context(command)
    records = [option.get_help_record(context) for option in command.params if isinstance(option, click.Option)]
    return [(f"`{record[0]}`", record[1]) for record in records if record is not None]


def _command(name: str, command: click.Command) -> str:
    context = click.Context(command, info_name=f"featcal-hf {name}")
    usage = " ".join(piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]")
    return f"## {name}\n\n`{f'{context.command_path} {usage}'.strip()}`\n\n{inspect.cleandoc(command.help or '')}\n"


def functions() -> str:
    """Every public function: its signature, its docstring, its arguments."""
    public = {name: getattr(featcal_hf, name) for name in featcal_hf.__all__}
    return "\n".join(_function(name, value) for name, value in public.items() if inspect.isfunction(value))


def _function(name: str, function: Callable[..., Any]) -> str:
    text, parts = _docstring(function)
    parameters = inspect.signature(function).parameters
    arguments, is_keyword = [], False
    for parameter in parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword:
            arguments.append("*")
            is_keyword = True
        arguments.append(parameter.name + ("" if parameter.default is parameter.empty else f"={_shown(parameter)}"))
    call = textwrap.fill(f"{name}({', '.join(arguments)})", 110, subsequent_indent="    ", break_on_hyphens=False)
    meaning = _entries(parts.get("Args", ""))
    if set(meaning) != set(parameters):
        raise ValueError(f"{name}: arguments and docstring differ: {set(meaning) ^ set(parameters)}")
    rows = [(f"`{key}`", f"`{parameters[key].annotation}`", meaning[key]) for key in parameters]
    arguments_table = table(("argument", "type", "what it is"), rows) + "\n" if rows else ""
    returned = f"`{inspect.signature(function).return_annotation}`: {' '.join(parts['Returns'].split())}"
    raised = "".join(f"- `{error}`: {reason}\n" for error, reason in _entries(parts["Raises"]).items())
    return f"### {name}\n\n```text\n{call}\n```\n\n{text}\n\n{arguments_table}Returns {returned}\n\nRaises:\n\n{raised}"


def _shown(parameter: inspect.Parameter) -> str:
    return "..." if callable(parameter.default) else repr(parameter.default)


def _docstring(value: object) -> tuple[str, dict[str, str]]:
    """The words of a docstring, and its sections."""
    text = inspect.getdoc(value) or ""
    return PART.sub("", text).strip(), {part: textwrap.dedent(body) for part, body in PART.findall(text)}


def _entries(body: str) -> dict[str, str]:
    parts = ENTRY.split(body)[1:]
    return {name: " ".join(text.split()) for name, text in zip(parts[::2], parts[1::2], strict=True)}


def reports() -> str:
    """What functions return, and what these hold."""
    public = [getattr(featcal_hf, name) for name in featcal_hf.__all__ if name.endswith("Report")]
    inside = [getattr(import_module(f"featcal_hf.{module}"), name) for name, module in INSIDE.items()]
    return "\n".join(_report(value) for value in [*public, *inside])


def _report(value: type) -> str:
    text, parts = _docstring(value)
    types = value.__annotations__
    rows = [(f"`{name}`", f"`{types[name]}`", what) for name, what in _entries(parts["Attributes"]).items()]
    return f"### {value.__name__}\n\n{text}\n\n{table(('attribute', 'type', 'what it is'), rows)}"


def errors() -> str:
    """Every public error."""
    public = [getattr(featcal_hf, name) for name in featcal_hf.__all__ if name.endswith("Error")]
    return table(("error", "when"), [(f"`{error.__name__}`", inspect.getdoc(error) or "") for error in public])


MADE: dict[str, Callable[[], str]] = {
    "settings": lambda: keys(Settings),
    "sampling": lambda: keys(Sampling),
    "section": lambda: keys(Section, Settings, Sampling),
    "task": lambda: keys(Task, Sampling),
    "dataset": lambda: keys(DatasetSpec),
    "eval": lambda: keys(EvalSpec),
    "commands": commands,
    "functions": functions,
    "reports": reports,
    "errors": errors,
}


def renewed(page: str) -> str:
    """A page with everything in it that is made from the code."""
    return PLACE.sub(lambda place: f"{place['name']}{place[2]}{MADE[place['name']]()}", page)


if __name__ == "__main__":
    for path in sorted(PAGES.glob("*.md")):
        path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
