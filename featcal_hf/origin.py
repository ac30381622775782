"""Where this package was installed from, in the words that pip takes."""

from __future__ import annotations

import json
from importlib.metadata import distribution
from typing import Any

PACKAGE = "featcal_hf"
_SHARED = ("https://", "http://")


def requirement() -> str | None:
    """What `pip install` takes to get the code that runs here; None where others can't: it came from a local folder."""
    found = distribution(PACKAGE)
    told = found.read_text("direct_url.json")
    if told is None:
        return f"{PACKAGE}=={found.version}"
    origin: dict[str, Any] = json.loads(told)
    url, repository = str(origin["url"]), origin.get("vcs_info")
    if not url.startswith(_SHARED):
        return None
    if repository is None:
        return f"{PACKAGE} @ {url}"
    return f"{PACKAGE} @ {repository['vcs']}+{url}@{repository['commit_id']}"
