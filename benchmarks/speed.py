"""How long a calibration takes, against the plain schedule of one module at a time, and where the time goes.

    python benchmarks/speed.py                        # CLIP-ViT-B/32 shape, 8 tasks x 64 images, float32 and bfloat16
    python benchmarks/speed.py --tasks 2 --blocks 3   # a short look
    python benchmarks/speed.py --scaling              # how time grows with blocks, tasks and tokens
    python benchmarks/speed.py --grams                # Grams of bfloat16 features: error and seconds

Models have random weights near one base. Both ways start from the same folders and end with a written checkpoint, in
one process, one after the other; ours is what `featcal-hf calibrate` runs once recipe and data are read.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import per_module
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel
from transformers.utils import logging

from featcal_hf import streams
from featcal_hf.activations import activations
from featcal_hf.calibrate import calibrate_blocks
from featcal_hf.checkpoint import open_checkpoint
from featcal_hf.forward import ParkedForward
from featcal_hf.grams import GATHERED_ROWS
from featcal_hf.products import add_lower_triangle, float32_products
from featcal_hf.recipe import Settings
from featcal_hf.save import work_folder
from featcal_hf.streamed import StreamedModel
from featcal_hf.streams import CalibrationTask
from featcal_hf.systems import BlockSystems, TaskMoments
from featcal_hf.writers import SafetensorsWriter, open_writer

LAMBDA, RHO, ALPHA = 0.05, 2.0, 0.3
MERGE_WEIGHT = 0.3
SCALING_RUNS = 2
WEIGHT_TOLERANCE, AFFINE_TOLERANCE = 3e-4, 5e-3
BFLOAT16_TOLERANCE = 2**-8  # one rounding of the result
PARTS = {
    "loading": [
        (StreamedModel, "__init__"),
        (StreamedModel, "_load"),
        (StreamedModel, "_unload"),
    ],
    "forwards": [
        (streams, "run_block"),
        (streams, "run_block_watched"),
        (sys.modules["featcal_hf.calibrate"], "run_block_watched"),
        (ParkedForward, "start"),
        (ParkedForward, "resume"),
    ],
    "moments": [
        (TaskMoments, "__init__"),
        (TaskMoments, "add"),
        (TaskMoments, "average"),
    ],
    "systems": [
        (BlockSystems, "__init__"),
        (BlockSystems, "add_task"),
    ],
    "solves": [(BlockSystems, "solve")],
    "saving": [
        (SafetensorsWriter, "__init__"),
        (SafetensorsWriter, "write"),
        (SafetensorsWriter, "complete"),
    ],
}


@dataclass(frozen=True)
class Shape:
    """What is calibrated: the model's sizes and the amount of data."""

    hidden: int = 768
    intermediate: int = 3072
    heads: int = 12
    blocks: int = 12
    image: int = 224
    patch: int = 32
    tasks: int = 8
    samples: int = 64
    batch: int = 32

    @property
    def tokens(self) -> int:
        """Tokens of an image, the class token included."""
        return (self.image // self.patch) ** 2 + 1

    def flops(self) -> float:
        """What a calibration has to compute: see docs/speed.md."""
        d, f, n = self.hidden, self.intermediate, self.tasks * self.samples * self.tokens
        weights = 4 * d * d + 2 * d * f
        attention = 4 * self.tokens * d
        forwards = 3 * (2 * weights + attention) - 2 * d * f
        grams = 3 * d * d + f * f
        crosses = 3 * 2 * d * d + 2 * d * f
        answers = self.tasks * 2 * (4 * d**3 + d * d * f + d * f * f)
        solves = (3 * d**3 + f**3) / 3 + 2 * (4 * d**3 + f * d * d + d * f * f)
        return self.blocks * (n * (forwards + grams + crosses) + answers + solves)


@dataclass
class Stopwatch:
    """Wall and processor seconds spent in each part, what runs inside another part left out of that one."""

    seconds: dict[str, tuple[float, float]] = field(default_factory=dict)
    _inner: list[tuple[float, float]] = field(default_factory=list)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time the parts of the product while open."""
        with ExitStack() as stack:
            for part, places in PARTS.items():
                for owner, name in places:
                    stack.enter_context(patch.object(owner, name, self._timed(part, getattr(owner, name))))
            yield

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = now()
            self._inner.append((0.0, 0.0))
            try:
                return function(*args, **kwargs)
            finally:
                spent = less(now(), started)
                own = less(spent, self._inner.pop())
                self.seconds[part] = more(self.seconds.get(part, (0.0, 0.0)), own)
                if self._inner:
                    self._inner[-1] = more(self._inner[-1], spent)

        return timed


def now() -> tuple[float, float]:
    """Wall and processor seconds."""
    return time.perf_counter(), time.process_time()


def less(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """The difference of two pairs."""
    return a[0] - b[0], a[1] - b[1]


def more(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """The sum of two pairs."""
    return a[0] + b[0], a[1] + b[1]


@dataclass(frozen=True)
class Timing:
    """Wall seconds and processor seconds of a run, and of its parts."""

    wall: float
    processor: float
    parts: dict[str, tuple[float, float]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--samples", type=int, default=64, help="images per task")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32, help="images per batch")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--ours-only", action="store_true", help="leave the plain schedule out")
    parser.add_argument("--scaling", action="store_true", help="how time grows with blocks, tasks and tokens")
    parser.add_argument("--grams", action="store_true", help="Grams of bfloat16 features: error and seconds")
    parser.add_argument("--work-dir", type=Path, help="where the models go")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    if arguments.scaling:
        scaling(arguments.work_dir)
        return
    if arguments.grams:
        grams()
        return
    shape = Shape(tasks=arguments.tasks, samples=arguments.samples, blocks=arguments.blocks, batch=arguments.batch)
    print(f"{shape}\n{shape.flops() / 1e12:.2f} TFLOP needed, {torch.get_num_threads()} threads", flush=True)
    reference: Timing | None = None
    for dtype in arguments.dtypes:
        with tempfile.TemporaryDirectory(dir=arguments.work_dir) as folder:
            precision = getattr(torch, dtype)
            build(Path(folder), shape, precision)
            rates = [matmul_rate(shape)]
            mine = ours(Path(folder), shape, precision)
            rates.append(matmul_rate(shape))
            print(f"\n{dtype}: ours {mine.wall:.1f} s ({mine.processor:.1f} s of processor)")
            rest = (mine.wall, mine.processor)
            for seconds in mine.parts.values():
                rest = less(rest, seconds)
            for part, (wall, processor) in [*mine.parts.items(), ("rest", rest)]:
                print(f"    {part:>9} {wall:7.2f} s {wall / mine.wall:6.1%} {processor:9.2f} s of processor")
            if not arguments.ours_only:
                plain = theirs(Path(folder), shape, precision)
                rates.append(matmul_rate(shape))
                reference = reference or plain
                print(f"    one module at a time {plain.wall:.1f} s ({plain.processor:.1f} s of processor)")
                print(f"    {plain.wall / mine.wall:.2f} times as fast ({plain.processor / mine.processor:.2f})")
                if reference is not plain:
                    print(f"    {reference.wall / mine.wall:.2f} times as fast as one module at a time in float32")
                compare(Path(folder))
            rate = statistics.median(rates)
            listed = ", ".join(f"{value / 1e9:.0f}" for value in rates)
            print(f"    float32 matmul {listed} GFLOP/s; efficiency {mine.wall * rate / shape.flops():.2f}", flush=True)


def build(folder: Path, shape: Shape, dtype: torch.dtype) -> None:
    """Write base, merged and experts: a random base, experts near it, their task arithmetic."""
    config = CLIPVisionConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.blocks,
        num_attention_heads=shape.heads,
        image_size=shape.image,
        patch_size=shape.patch,
        architectures=["CLIPVisionModel"],
    )
    torch.manual_seed(0)
    model = CLIPVisionModel(config).eval()
    base = {name: value.clone() for name, value in model.state_dict().items()}
    merged = {name: value.clone() for name, value in base.items()}
    for number in range(shape.tasks):
        generator = torch.Generator().manual_seed(number + 1)
        expert = {name: _near(value, generator) for name, value in base.items()}
        for name, value in merged.items():
            if value.is_floating_point():
                value += MERGE_WEIGHT * (expert[name] - base[name])
        _write(model, expert, folder / f"expert{number}", dtype)
    _write(model, base, folder / "base", dtype)
    _write(model, merged, folder / "merged", dtype)


def _near(value: Tensor, generator: torch.Generator) -> Tensor:
    if not value.is_floating_point():
        return value
    noise = torch.randn(value.shape, generator=generator)
    return value + 0.1 * value.std().nan_to_num(0.0).clamp_min(0.01) * noise


def _write(model: CLIPVisionModel, state: dict[str, Tensor], folder: Path, dtype: torch.dtype) -> None:
    model.float().load_state_dict(state)
    model.to(dtype).save_pretrained(folder)


def pixels(shape: Shape, dtype: torch.dtype) -> dict[str, list[Tensor]]:
    """Batches of random images for each task."""
    images = {}
    for number in range(shape.tasks):
        generator = torch.Generator().manual_seed(number)
        drawn = torch.randn(shape.samples, 3, shape.image, shape.image, generator=generator)
        images[f"expert{number}"] = list(drawn.to(dtype).split(shape.batch))
    return images


def ours(folder: Path, shape: Shape, dtype: torch.dtype) -> Timing:
    """What `featcal-hf calibrate` runs: streamed models, a shard written block by block."""
    watch = Stopwatch()
    with watch.watching(), torch.no_grad():
        images = pixels(shape, dtype)
        started = now()
        student = _streamed(folder / "merged")
        with work_folder(folder / "ours.work") as work, activations(2**34, work / "activations") as held:
            writer = open_writer(student.checkpoint, list(student.checkpoint.tensors), work)
            calibrate_blocks(
                student,
                _streamed(folder / "base"),
                [_task(folder, name, batches) for name, batches in images.items()],
                Settings(lambda_=LAMBDA, rho=RHO, alpha=ALPHA).resolved(True),
                device=torch.device("cpu"),
                activations=held,
                write=lambda path, new: writer.write({student.source_of(path, name): v for name, v in new.items()}),
                on_step=lambda step: None,
            )
            for file in writer.complete().values():
                file.rename(folder / "ours.safetensors")
        return Timing(*less(now(), started), watch.seconds)


def _streamed(folder: Path) -> StreamedModel:
    checkpoint = open_checkpoint(folder)
    return StreamedModel(checkpoint, CLIPVisionModel, CLIPVisionConfig.from_pretrained(folder))


def _task(folder: Path, name: str, batches: list[Tensor]) -> CalibrationTask:
    inputs = [({"pixel_values": batch}, {"pixel_values": batch}) for batch in batches]
    return CalibrationTask(name, _streamed(folder / name), inputs, [])


def theirs(folder: Path, shape: Shape, dtype: torch.dtype) -> Timing:
    """The plain schedule: all models loaded, one module at a time, the result saved."""
    names = ["merged", "base", *(f"expert{number}" for number in range(shape.tasks))]
    images = pixels(shape, dtype)
    started = now()
    models = {name: CLIPVisionModel.from_pretrained(folder / name).eval() for name in names}
    experts = {name: model for name, model in models.items() if name.startswith("expert")}
    per_module.calibrate(models["merged"], models["base"], experts, images, LAMBDA, RHO, ALPHA)
    models["merged"].save_pretrained(folder / "theirs")
    return Timing(*less(now(), started), {})


def compare(folder: Path) -> None:
    """Check that both ways gave the same parameters; print the largest differences."""
    mine, plain = load_file(folder / "ours.safetensors"), load_file(folder / "theirs" / "model.safetensors")
    errors = {name: _difference(value, plain[name]) for name, value in mine.items()}
    for kind, tolerance in (("weights", WEIGHT_TOLERANCE), ("affines", AFFINE_TOLERANCE)):
        names = [name for name, value in mine.items() if (value.dim() > 1) == (kind == "weights")]
        if mine[names[0]].dtype == torch.bfloat16:
            tolerance = max(tolerance, BFLOAT16_TOLERANCE)
        worst = max(names, key=lambda name: errors[name])
        verdict = "the same" if errors[worst] <= tolerance else "NOT THE SAME"
        print(f"    {kind}: {verdict}, largest relative difference {errors[worst]:.1e} ({worst})", flush=True)


def _difference(mine: Tensor, plain: Tensor) -> float:
    return float((mine.double() - plain.double()).norm() / plain.double().norm().clamp_min(1e-30))


def matmul_rate(shape: Shape) -> float:
    """Float32 operations per second over the products that a calibration is made of, each at its own size."""
    d, f, rows = shape.hidden, shape.intermediate, min(shape.samples, shape.batch) * shape.tokens
    narrow, wide, square = torch.randn(rows, d), torch.randn(rows, f), torch.randn(d, d)
    up, down = torch.randn(f, d), torch.randn(d, f)
    products: list[tuple[int, Callable[[], Tensor]]] = [
        (12, lambda: nn.functional.linear(narrow, square)),
        (3, lambda: nn.functional.linear(narrow, up)),
        (2, lambda: nn.functional.linear(wide, down)),
        (5, lambda: narrow.T @ narrow),
        (1, lambda: narrow.T @ wide),
        (1, lambda: wide.T @ wide),
    ]
    sizes = [rows * d * d, rows * d * f, rows * f * d, rows * d * d, rows * d * f, rows * f * f]
    work = sum(2.0 * count * size for (count, _), size in zip(products, sizes, strict=True))
    best = math.inf
    for _ in range(5):
        started = time.perf_counter()
        for count, product in products:
            for _ in range(count):
                product()
        best = min(best, time.perf_counter() - started)
    return work / best


def grams() -> None:
    """Print how exact and how fast Grams of bfloat16 features are, as float32 and as bfloat16 products."""
    print(f"{'tokens':>7} {'width':>6} {'float32':>18} {'bfloat16 units':>18} {'gain':>6}")
    for width in (768, 2048, 3072):
        features = torch.randn(GATHERED_ROWS, width, generator=torch.Generator().manual_seed(0)).bfloat16()
        exact = torch.tril(features.double().T @ features.double())
        results = []
        for rounded in (False, True):
            with float32_products(rounded):
                seconds = min(_gram(features)[1] for _ in range(7))
                results.append((float((_gram(features)[0].double() - exact).norm() / exact.norm()), seconds))
        listed = " ".join(f"{error:8.1e} {seconds * 1e3:6.1f} ms" for error, seconds in results)
        print(f"{GATHERED_ROWS:>7} {width:>6} {listed} {results[0][1] / results[1][1]:6.2f}", flush=True)


def _gram(features: Tensor) -> tuple[Tensor, float]:
    total, rows = torch.zeros(features.shape[1], features.shape[1]), features.float()
    started = time.perf_counter()
    add_lower_triangle(total, rows, rows)
    return torch.tril(total), time.perf_counter() - started


def scaling(work_dir: Path | None) -> None:
    """Print times at 1, 2 and 4 times the blocks, tasks and tokens, and the exponents fitted to them."""
    start = Shape(hidden=256, intermediate=1024, heads=4, blocks=3, image=64, patch=8, tasks=2, samples=128, batch=32)
    print(f"{start}\n{'':>8} {'1x':>8} {'2x':>8} {'4x':>8} {'exponent':>9}")
    once = _best_seconds(start, work_dir)
    for what in ("blocks", "tasks", "samples"):
        shapes = [replace(start, **{what: getattr(start, what) * factor}) for factor in (2, 4)]
        seconds = [once, *(_best_seconds(shape, work_dir) for shape in shapes)]
        exponent = math.log(seconds[2] / seconds[0]) / math.log(4)  # the least-squares slope of three such points
        print(f"{what:>8} {seconds[0]:8.2f} {seconds[1]:8.2f} {seconds[2]:8.2f} {exponent:9.2f}", flush=True)


def _best_seconds(shape: Shape, work_dir: Path | None) -> float:
    with tempfile.TemporaryDirectory(dir=work_dir) as folder:
        build(Path(folder), shape, torch.float32)
        return min(ours(Path(folder), shape, torch.float32).wall for _ in range(SCALING_RUNS))


if __name__ == "__main__":
    main()
