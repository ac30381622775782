"""The oracle against the FeatCal authors' own results (public code, float32) on a tiny CLIP vision tower."""

import json
from pathlib import Path

import pytest
import torch
from oracle import calibrate
from safetensors import safe_open
from torch import Tensor
from transformers import CLIPVisionConfig, CLIPVisionModel

GOLDEN = Path(__file__).with_name("featcal_clip_tiny.safetensors")
RELATIVE_ERROR = 1e-4


def tensors_under(prefix: str) -> dict[str, Tensor]:
    with safe_open(GOLDEN, "pt") as file:
        return {k.removeprefix(prefix): file.get_tensor(k) for k in file.keys() if k.startswith(prefix)}  # noqa: SIM118


def metadata() -> dict[str, str]:
    with safe_open(GOLDEN, "pt") as file:
        return file.metadata()


def clip(prefix: str) -> CLIPVisionModel:
    model = CLIPVisionModel(CLIPVisionConfig(**json.loads(metadata()["config"])))
    model.load_state_dict(tensors_under(prefix))
    return model


@pytest.mark.parametrize("run", ["paper", "weights_only", "aggressive"])
def test_the_oracle_reproduces_the_authors_results(run: str) -> None:
    tasks, settings = json.loads(metadata()["tasks"]), json.loads(metadata()["runs"])[run]
    size = int(metadata()["batch_size"])
    ours = calibrate(
        clip("merged/"),
        clip("base/"),
        {task: clip(f"expert/{task}/") for task in tasks},
        {t: [{"pixel_values": x} for x in tensors_under("pixels/")[t].split(size)] for t in tasks},
        lambda_=settings["lambda"],
        pooled_last_block=True,
        **{k: settings[k] for k in ("rho", "alpha", "bias", "norm")},
    )
    theirs, merged = tensors_under(f"calibrated/{run}/"), tensors_under("merged/")
    changed = {name for name, value in theirs.items() if not torch.equal(value, merged[name])}
    assert ours.keys() == changed, "the oracle calibrates other parameters than the authors' code"

    error = {k: float((ours[k] - theirs[k]).norm() / theirs[k].norm()) for k in ours}
    worst = max(error, key=error.__getitem__)
    print(f"{run}: worst relative error {error[worst]:.2e} in {worst}, of {len(error)} parameters")
    assert error[worst] <= RELATIVE_ERROR
