"""No test touches the network, the user's caches or the screen; set before any library reads it."""

from __future__ import annotations

import os
import tempfile

import hypothesis
import pytest

_datasets_cache = tempfile.TemporaryDirectory(prefix="featcal-datasets-")

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_DATASETS_CACHE=_datasets_cache.name,
    TOKENIZERS_PARALLELISM="false",
    MPLBACKEND="Agg",
)
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # several workers, each with every core, wait for one another

# The first example pays for imports and warm-up, so a deadline measures the machine.
hypothesis.settings.register_profile("featcal", deadline=None)
hypothesis.settings.load_profile("featcal")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
