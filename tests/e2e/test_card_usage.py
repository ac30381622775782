"""The lines to copy from a card run, for every kind of model that has lines of its own."""

from __future__ import annotations

import math
import os
import re
import struct
import sys
import wave
from pathlib import Path

import pytest
import transformers as hf
from families import CHAT_TEMPLATE, FAMILIES, Family, base_model
from PIL import Image
from tiny_merge import VOCABULARY, build_llama, word_tokenizer
from torch import nn

from featcal_hf.card_usage import code_of, usage_of


def text_model(model: nn.Module, folder: Path, chat: bool = False) -> None:
    tokenizer = word_tokenizer(VOCABULARY)
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def whisper(folder: Path) -> None:
    vocabulary = ["<|endoftext|>", *"abcdefghijklmnopqrstuvwxyz", "Ġ"]
    tokenizer = hf.WhisperTokenizerFast(vocab={token: index for index, token in enumerate(vocabulary)}, merges=[])
    special = ["<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    first, *_, no_times = tokenizer.convert_tokens_to_ids(special)
    model = hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            vocab_size=len(tokenizer),
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            num_mel_bins=8,
            max_target_positions=16,
            decoder_start_token_id=first,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
            begin_suppress_tokens=None,
        )
    )
    model.generation_config.update(is_multilingual=False, no_timestamps_token_id=no_times, max_length=12)
    hf.WhisperFeatureExtractor(feature_size=8).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def a_second_of_sound(path: Path) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(b"".join(struct.pack("<h", int(8000 * math.sin(index / 10))) for index in range(16000)))


def stand_in_for_ffmpeg(folder: Path) -> None:
    """A program that does what transformers asks of ffmpeg, for a sound that already has the rate asked for."""
    folder.mkdir()
    (folder / "ffmpeg").write_text(
        f"#!{sys.executable}\nimport io, struct, sys, wave\n"
        "sound = wave.open(io.BytesIO(sys.stdin.buffer.read()))\n"
        "values = struct.unpack(f'<{sound.getnframes()}h', sound.readframes(sound.getnframes()))\n"
        "sys.stdout.buffer.write(struct.pack(f'<{len(values)}f', *(value / 32768 for value in values)))\n"
    )
    (folder / "ffmpeg").chmod(0o755)


def tiny_bert(cls: type[hf.PreTrainedModel]) -> hf.PreTrainedModel:
    return cls(
        hf.BertConfig(vocab_size=24, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    )


def image_model(family: Family, model: nn.Module, folder: Path) -> None:
    assert family.processor is not None
    family.processor().save_pretrained(folder)
    model.save_pretrained(folder)


def tiny_clip(vision: hf.CLIPVisionConfig) -> hf.CLIPModel:
    text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return hf.CLIPModel(hf.CLIPConfig(text_config={**text, "vocab_size": 24}, vision_config=vision.to_dict()))


def make(kind: str, folder: Path) -> None:
    if kind in ("chat", "causal"):
        text_model(build_llama(max_position_embeddings=128), folder, chat=kind == "chat")
    elif kind == "seq2seq":
        config = hf.T5Config(vocab_size=24, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        config.decoder_start_token_id = 1
        text_model(hf.T5ForConditionalGeneration(config), folder)
    elif kind == "speech":
        whisper(folder)
    elif kind == "text classes":
        text_model(tiny_bert(hf.BertForSequenceClassification), folder)
    elif kind == "text features":
        text_model(tiny_bert(hf.BertModel), folder)
    else:
        tower = base_model(FAMILIES["clip-vision"])
        if kind == "clip tower":
            image_model(FAMILIES["clip-vision"], tower, folder)
            image_model(FAMILIES["clip-vision"], tiny_clip(tower.config), folder.parent / "base")
            word_tokenizer(VOCABULARY).save_pretrained(folder.parent / "base")
        elif kind == "two towers":
            image_model(FAMILIES["clip-vision"], tiny_clip(tower.config), folder)
            word_tokenizer(VOCABULARY).save_pretrained(folder)
        else:
            config = hf.ViTConfig(
                hidden_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=16,
                image_size=tower.config.image_size,
                patch_size=tower.config.patch_size,
            )
            cls = hf.ViTForImageClassification if kind == "image classes" else hf.ViTModel
            image_model(FAMILIES["clip-vision"], cls(config), folder)


PIPELINES = {
    "chat": "text-generation",
    "causal": "text-generation",
    "seq2seq": "text-generation",
    "text classes": "text-classification",
    "text features": "feature-extraction",
    "image classes": "image-classification",
    "image features": "image-feature-extraction",
    "clip tower": "zero-shot-image-classification",
    "two towers": "zero-shot-image-classification",
    "speech": "automatic-speech-recognition",
}


@pytest.mark.parametrize("kind", PIPELINES)
def test_the_lines_for_a_kind_of_model_run(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model"
    make(kind, folder)
    Image.new("RGB", (30, 20), "red").save("photo.jpg")
    a_second_of_sound(Path("speech.wav"))
    stand_in_for_ffmpeg(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    config = hf.AutoConfig.from_pretrained(folder).to_dict()
    usage = usage_of(config, chat=kind == "chat", base="./base")
    assert usage.pipeline == PIPELINES[kind]
    code = code_of(usage, "./model", "./base")
    assert re.search(r"MODEL_ID|BASE_ID", code) is None
    capsys.readouterr()
    exec(compile(code, kind, "exec"), {})
    assert capsys.readouterr().out, "it prints what it found"
