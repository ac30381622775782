"""Records of runs that never were, for tests of what is drawn and said of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BLOCKS = [f"model.layers.{number}" for number in range(4)]


def drift(size: float) -> dict[str, Any]:
    return {
        "drift": 10 * size,
        "relative": size,
        "mismatch": 4 * size,
        "propagation": 8 * size,
        "relative_mismatch": 0.4 * size,
        "relative_propagation": 0.8 * size,
        "cosine": 1 - size / 2,
        "cosine_spread": size / 10,
    }


def outcome(before: float, after: float) -> dict[str, Any]:
    points = [[float(row % 3), float(row % 5)] for row in range(8)]
    return {
        "cosines_before": [1 - before / 2 - row / 100 for row in range(8)],
        "cosines_after": [1 - after / 2 - row / 100 for row in range(8)],
        "features": {
            "explained": [0.5, 0.2],
            "expert": points,
            "merged": [[x + 10 * before, y] for x, y in points],
            "calibrated": [[x + 10 * after, y] for x, y in points],
        },
        "output": {
            "before": {"logit_l2": 30 * before, "kl": before, "agreement": 1 - before},
            "after": {"logit_l2": 30 * after, "kl": after, "agreement": 1 - after},
            "predictions": 512,
        },
        "no_output": None,
    }


def contents(
    paths: Sequence[str] = BLOCKS,
    tasks: Sequence[str] = ("math", "code"),
    *,
    before: float = 0.4,
    after: float = 0.1,
    held_out: bool = True,
) -> dict[str, Any]:
    """What a `featcal.json` holds; drift grows evenly up to `before` and `after` at the last block."""
    return {
        "settings": {"lambda": None, "rho": 2.0, "alpha": 0.3, "scale": "trace", "bias": True, "norm": True},
        "merge_method": "task_arithmetic",
        "recipe": "merge_method: task_arithmetic\n",
        "tasks": {
            task: {"expert": f"org/{task}", "calibration_rows": 64, "holdout_rows": 8, "tokens": 4096, "warnings": []}
            for task in tasks
        },
        "versions": {"featcal_hf": "0.1.0", "torch": "2.13.0"},
        "seconds": 12.5,
        "blocks": [
            {
                "path": path,
                "seconds": 3.0,
                "modules": [
                    {"name": "self_attn.q_proj", "step": 0.05, "lambda_": 0.01, "tokens": 8192.0},
                    {"name": "mlp.down_proj", "step": 0.1, "lambda_": 0.02, "tokens": 8192.0},
                ],
                "kept": {},
                "drift": {
                    task: {
                        "before": drift(before * (number + 1) / len(paths)),
                        "after": drift(after * (number + 1) / len(paths)),
                    }
                    for task in tasks
                }
                if held_out
                else {},
                "inputs": [
                    {
                        "modules": ["self_attn.q_proj"],
                        "width": 64,
                        "tokens": 8192.0,
                        "condition": 1e3,
                        "dominance": 0.3,
                    },
                    {"modules": ["mlp.down_proj"], "width": 256, "tokens": 8192.0, "condition": 1e4, "dominance": 0.5},
                ],
                "costs": {
                    "load": {"seconds": 0.1, "resident_bytes": 500_000_000},
                    "forwards": {"seconds": 1.0, "resident_bytes": 700_000_000 + number},
                    "solve": {"seconds": 1.5, "resident_bytes": 900_000_000},
                },
                "peak_bytes": 1_000_000_000 + number,
                "outcome": {task: outcome(before, after) for task in tasks}
                if held_out and number == len(paths) - 1
                else {},
            }
            for number, path in enumerate(paths)
        ],
    }
