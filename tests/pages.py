"""The project's pages in Markdown: their links, their code, their headings."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
CODE = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
INLINE = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True)
class Page:
    """One page: its text with code blocks taken out, and these."""

    path: Path
    text: str
    blocks: list[tuple[str, str]]

    def code(self, *languages: str) -> list[str]:
        return [code for language, code in self.blocks if language in languages]

    def commands(self) -> list[list[str]]:
        """The words of every command line in the page's console blocks, in order."""
        return command_lines("\n".join(self.code("console", "sh")))

    def links(self) -> list[str]:
        return [match["target"] for match in LINK.finditer(self.text)]

    def inline(self) -> list[str]:
        return INLINE.findall(self.text)

    def anchors(self) -> set[str]:
        """The fragments that a code host gives the page's headings."""
        anchors: set[str] = set()
        for title in re.findall(r"^#+ (.+)$", self.text, re.MULTILINE):
            slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
            anchors.add(next(name for n in range(99) if (name := f"{slug}-{n}" if n else slug) not in anchors))
        return anchors


def command_lines(code: str) -> list[list[str]]:
    """The words of every line, comments left out."""
    lines = code.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def read_page(path: Path) -> Page:
    content = path.read_text(encoding="utf-8")
    return Page(path, CODE.sub("", content), [(match["language"], match["code"]) for match in CODE.finditer(content)])
