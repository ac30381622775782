"""Writes the example cards from the records beside them: `python model_cards/render.py`; a test compares.

The records are of runs of `recipes/` on tiny stand-ins for the models and data: their words are those of a real run,
their numbers are not.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from featcal_hf import write_card

EXAMPLES = sorted(path.parent for path in Path(__file__).parent.glob("*/featcal.json"))


def rendered(example: Path) -> str:
    """The card of an example."""
    with tempfile.TemporaryDirectory() as copy:
        folder = Path(copy) / example.name
        shutil.copytree(example, folder, ignore=shutil.ignore_patterns("README.md"))
        return write_card(folder).path.read_text(encoding="utf-8")


if __name__ == "__main__":
    for example in EXAMPLES:
        (example / "README.md").write_text(rendered(example), encoding="utf-8")
