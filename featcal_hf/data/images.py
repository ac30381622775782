"""Images: decode what a row holds to RGB, and make it pixel values with the model's own processor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import PIL.Image
import torch
from transformers import AutoImageProcessor
from transformers.utils.hub import has_file

from featcal_hf.errors import DataError, listed

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class ImageProcessor:
    """An image processor and where it was found."""

    process: Any
    path: str

    def __call__(self, image: PIL.Image.Image) -> torch.Tensor:
        """Pixel values of one RGB image, (channels, height, width), float32.

        Raises:
            DataError: the processor makes something else of an image.
        """
        inputs = self.process(images=image, return_tensors="pt")
        pixels = inputs.get("pixel_values")
        if not isinstance(pixels, torch.Tensor) or pixels.shape[0] != 1 or pixels.dim() != 4:
            raise DataError(
                f"{type(self.process).__name__} of {self.path} gives {', '.join(inputs)}; "
                "expected pixel_values of shape (1, channels, height, width): such models aren't handled"
            )
        return pixels[0].float()


def load_image_processor(paths: Sequence[str], *, trust_remote_code: bool) -> ImageProcessor:
    """Load the processor of the first of `paths` (folders or Hub ids) that has one.

    mergekit's vision outputs have none, so the merged model's own folder often isn't the one.

    Raises:
        DataError: none of them has a processor, or it can't be loaded.
    """
    for path in dict.fromkeys(paths):
        try:
            if not any(has_file(path, name) for name in PROCESSOR_FILES):
                continue
            process = AutoImageProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise DataError(
                f"the image processor of {path} can't be loaded: {error}; put a valid {PROCESSOR_FILES[0]} there"
            ) from error
        return ImageProcessor(process, path)
    raise DataError(
        f"no image processor: none of {listed(dict.fromkeys(paths))} has {' or '.join(PROCESSOR_FILES)}; "
        "copy the one of the base model into the merged model's folder"
    )


def read_image(column: str, value: Any, folder: Path) -> PIL.Image.Image:
    """Decode an image to RGB.

    Args:
        column: The column it comes from, for messages.
        value: A PIL image, a path or URL of the Hub, encoded bytes, or a dict with `bytes` or `path`.
        folder: What a relative path starts from.

    Raises:
        DataError: it is no image, it can't be decoded, or it has more than 8 bits a channel.
    """
    path, encoded = None, None
    if isinstance(value, dict) and (value.get("bytes") is not None or value.get("path") is not None):
        path, encoded = value.get("path"), value.get("bytes")
    elif isinstance(value, str):
        path = value
    elif isinstance(value, bytes):
        encoded = value
    elif not isinstance(value, PIL.Image.Image):
        raise DataError(f"column {column!r} holds {type(value).__name__}; expected an image, a path or encoded bytes")
    if encoded is None and path is not None and "://" not in path:
        path = str(folder / Path(path).expanduser())
    named = f"the image in column {column!r}" + (f" ({path})" if path else "")
    try:
        image = value if path is None and encoded is None else _decode(path, encoded)
        image.load()
    except FileNotFoundError as error:
        raise DataError(f"{named} isn't there; relative paths start from the dataset's folder, {folder}") from error
    except Exception as error:  # Pillow's readers raise whatever a damaged file makes them trip over
        raise DataError(f"{named} can't be decoded: {error}; replace it or leave its row out") from error
    if image.mode.startswith(("I", "F")):
        # Conversion to RGB would clip everything above 255 to white.
        raise DataError(f"{named} has mode {image.mode}, more than 8 bits a channel; convert it to 8 bits first")
    return image.convert("RGB")


def _decode(path: str | None, encoded: bytes | None) -> PIL.Image.Image:
    image: PIL.Image.Image = datasets.Image().decode_example({"path": path, "bytes": encoded})
    return image
