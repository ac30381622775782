"""Peak memory and disk traffic of a calibration: Llama shapes with random weights, written shard by shard, never whole.

    python benchmarks/memory.py                      # 1B shape: 2 and 4 experts, 16 and 32 blocks
    python benchmarks/memory.py --runs 1b:2:16       # shape:experts:blocks, any number

Each run is a process of its own: its peak resident memory, and the bytes that it had to fetch from the disk, are what
the kernel counted. The models are put out of the page cache before, so that all that is read is fetched once at least.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

SHAPES = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8},
    "3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24, "num_key_value_heads": 8},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
}
VOCABULARY = 128256
WORDS = 4000
SAMPLES, HELD_OUT, TOKENS = 8, 2, 128


def main() -> None:
    """Build, run and print one row for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=["1b:2:16", "1b:4:16", "1b:2:32"], help="shape:experts:blocks")
    parser.add_argument("--work-dir", type=Path, help="where the models go; needs room for all of a run's models")
    arguments = parser.parse_args()
    print(
        f"{'shape':>6} {'experts':>7} {'blocks':>6} {'peak GiB':>9} {'seconds':>8} {'fetched GB':>10} {'models GB':>9}",
        flush=True,
    )
    for run in arguments.runs:
        shape, experts, blocks = run.split(":")
        with tempfile.TemporaryDirectory(dir=arguments.work_dir) as folder:
            recipe, merged = build(Path(folder), shape, int(experts), int(blocks))
            files = list(Path(folder).glob("*/*.safetensors"))
            size = sum(file.stat().st_size for file in files)
            for file in files:
                evict(file)
            peak, seconds, fetched = measure(recipe, merged)
        sizes = f"{peak / 2**30:9.2f} {seconds:8.1f} {fetched / 1e9:10.2f} {size / 1e9:9.2f}"
        print(f"{shape:>6} {experts:>7} {blocks:>6} {sizes}", flush=True)


def build(folder: Path, shape: str, experts: int, blocks: int) -> tuple[Path, Path]:
    """Write base, merged and expert checkpoints, tokenizer, texts and recipe; returns recipe and merged folder."""
    config = LlamaConfig(
        **SHAPES[shape],
        num_hidden_layers=blocks,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    names = [f"expert{number}" for number in range(experts)]
    for seed, name in enumerate(["base", "merged", *names]):
        _write_model(folder / name, config, noise=0.0 if name == "base" else 0.1, seed=seed)
    words = random.Random(0).sample(range(2, VOCABULARY), WORDS)
    vocabulary = {f"w{i}": token for i, token in enumerate(words)} | {"<unk>": 0, "<pad>": 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>")
    for name in ["base", "merged", *names]:
        fast.save_pretrained(folder / name)
    tasks = []
    for seed, name in enumerate(names):
        source = random.Random(seed)
        rows = [" ".join(f"w{source.randrange(WORDS)}" for _ in range(TOKENS)) for _ in range(SAMPLES + HELD_OUT)]
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows), encoding="utf-8")
        tasks.append({"model": str(folder / name), "dataset": {"path": str(data)}, "text": "text"})
    recipe = folder / "recipe.yml"
    recipe.write_text(
        json.dumps(
            {
                "merge_method": "task_arithmetic",
                "base_model": str(folder / "base"),
                "models": [{"model": str(folder / name), "parameters": {"weight": 0.3}} for name in names],
                "dtype": "bfloat16",
                "featcal": {"samples": SAMPLES, "holdout": HELD_OUT, "max_length": TOKENS, "tasks": tasks},
            },
            indent=1,
        ),
        encoding="utf-8",
    )
    return recipe, folder / "merged"


def measure(recipe: Path, merged: Path) -> tuple[int, float, int]:
    """Run the command; returns its peak resident bytes, seconds, and bytes fetched from the disk."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "featcal_hf", "calibrate", str(recipe), str(merged), "--quiet"]
    process = subprocess.Popen(command)
    status: dict[str, int] = {}
    watcher = threading.Thread(target=_watch, args=(process.pid, status))
    watcher.start()
    code = process.wait()
    watcher.join()
    if code != 0:
        raise SystemExit(f"featcal-hf failed with exit code {code}")
    return status["peak"], time.perf_counter() - started, status["fetched"]


def evict(file: Path) -> None:
    """Put a file out of the page cache."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _watch(pid: int, status: dict[str, int]) -> None:
    while True:
        try:
            fields = dict(_fields(Path(f"/proc/{pid}/status").read_text()))
            if "VmHWM" not in fields:
                return
            status["peak"] = int(fields["VmHWM"].split()[0]) * 1024
            status["fetched"] = int(dict(_fields(Path(f"/proc/{pid}/io").read_text()))["read_bytes"])
        except (FileNotFoundError, ProcessLookupError):
            return
        time.sleep(0.05)


def _fields(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        name, _, value = line.partition(":")
        yield name, value


def _write_model(folder: Path, config: LlamaConfig, noise: float, seed: int) -> None:
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    weight_map: dict[str, str] = {}
    shards = ["outer", *range(config.num_hidden_layers)]
    for number, shard in enumerate(shards):
        name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = _outer(config) if shard == "outer" else _block(config, int(shard))
        values = {key: _random(key, shape, noise, seed) for key, shape in tensors.items()}
        save_file(values, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(values, name))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _outer(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    return {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }


def _block(config: LlamaConfig, number: int) -> dict[str, tuple[int, ...]]:
    width, inner = config.hidden_size, config.intermediate_size
    keys = config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    return {f"model.layers.{number}.{name}.weight": shape for name, shape in shapes.items()}


def _random(name: str, shape: tuple[int, ...], noise: float, seed: int) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    start = torch.Generator().manual_seed(hash_of(name))
    value = torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=start)
    if noise:
        own = torch.Generator().manual_seed(hash_of(f"{seed}{name}"))
        value += torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02 * noise, generator=own)
    return value


def hash_of(text: str) -> int:
    """A number that is the same in every process."""
    return int.from_bytes(text.encode()[-7:], "little")


if __name__ == "__main__":
    main()
