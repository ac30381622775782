"""The table of model families that calibration is tried on: tiny random models, their experts and their data."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

TASKS = ("left", "right")
ROWS = 112
SPECIAL = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
LETTERS = string.ascii_letters
VOCABULARY = [*SPECIAL.values(), *LETTERS, "Ġ", *(f"Ġ{letter}" for letter in LETTERS)]
CHAT_TEMPLATE = "{% for turn in messages %} {{ turn['content'] }}{% endfor %}"

_WIDTH = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_TOKENS = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
_TEXT = {**_WIDTH, **_TOKENS, "vocab_size": len(VOCABULARY)}
_LLAMA = {**_TEXT, "num_key_value_heads": 2, "max_position_embeddings": 64}
_IMAGE = {**_WIDTH, "image_size": 32, "patch_size": 8}
_T5 = {
    "vocab_size": len(VOCABULARY),
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 3,
    "decoder_start_token_id": 0,
}
_SHORTEST = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
_SQUARE = {"size": {"height": 32, "width": 32}}


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        build: makes the model; its weights are replaced by `base_model`.
        reads: the task's keys in the recipe.
        mergekit: whether mergekit merges it, without loss; the others are merged by arithmetic on their tensors.
        dtype: of the checkpoints.
        processor: the image processor saved beside the models.
        blocks: the stacks in the order in which a forward reaches them, with the mask of their tokens: the batch's
            'attention_mask', its 'labels', or None where all count.
    """

    build: Callable[[], PreTrainedModel]
    reads: dict[str, str] = field(default_factory=lambda: {"text": "text"})
    mergekit: bool = True
    dtype: torch.dtype = torch.float32
    processor: Callable[[], Any] | None = None
    blocks: tuple[tuple[str, str | None], ...] = (("layers", "attention_mask"),)


def _clip_processor() -> Any:
    return hf.CLIPImageProcessor(**_SHORTEST)


def _qwen3_moe() -> PreTrainedModel:
    return hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**_LLAMA, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    )


def _flan_t5() -> PreTrainedModel:
    """With an output matrix of its own in the file, though transformers writes tie_word_embeddings: true beside it."""
    model = hf.T5ForConditionalGeneration(hf.T5Config(**_T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False))
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


_IMAGES = {"image": "image"}
_SEQ2SEQ: dict[str, Any] = {
    "reads": {"prompt": "{question} a", "completion": "{answer}"},
    "blocks": (("encoder.block", "attention_mask"), ("decoder.block", "labels")),
}

FAMILIES = {
    "llama-tied": Family(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_LLAMA, tie_word_embeddings=True))),
    "llama": Family(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_LLAMA)), {"messages": "turns"}),
    "qwen2": Family(
        lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**_LLAMA)), {"prompt": "{question}", "completion": " {answer}"}
    ),
    "qwen3": Family(lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_LLAMA, head_dim=8))),
    "mistral": Family(lambda: hf.MistralForCausalLM(hf.MistralConfig(**_LLAMA)), dtype=torch.bfloat16),
    "gemma2": Family(lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**_LLAMA, head_dim=8))),
    "gemma3": Family(lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**_LLAMA, head_dim=8))),
    "phi3": Family(lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**_LLAMA))),
    "gpt2": Family(
        lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(**_TOKENS, n_embd=32, n_layer=2, n_head=4, vocab_size=len(VOCABULARY), n_positions=64)
        ),
        blocks=(("h", "attention_mask"),),
    ),
    "t5": Family(lambda: hf.T5ForConditionalGeneration(hf.T5Config(**_T5)), mergekit=False, **_SEQ2SEQ),
    "flan-t5": Family(_flan_t5, **_SEQ2SEQ),
    "bert": Family(
        lambda: hf.BertForSequenceClassification(hf.BertConfig(**_TEXT, max_position_embeddings=64)),
        blocks=(("encoder.layer", "attention_mask"),),
    ),
    "roberta": Family(
        lambda: hf.RobertaForSequenceClassification(hf.RobertaConfig(**_TEXT, max_position_embeddings=66)),
        blocks=(("encoder.layer", "attention_mask"),),
    ),
    "mixtral": Family(
        lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**_LLAMA, num_local_experts=4, num_experts_per_tok=2))
    ),
    "qwen3-moe": Family(_qwen3_moe),
    # mergekit fuses a mixture's experts in its output; transformers saves one tensor for each.
    "qwen3-moe-unfused": Family(_qwen3_moe, mergekit=False),
    "clip-vision": Family(
        lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**_IMAGE)),
        _IMAGES,
        processor=_clip_processor,
        blocks=(("encoder.layers", None),),
    ),
    "clip-vision-projection": Family(
        lambda: hf.CLIPVisionModelWithProjection(hf.CLIPVisionConfig(**_IMAGE, projection_dim=16)),
        _IMAGES,
        processor=_clip_processor,
        blocks=(("encoder.layers", None),),
    ),
    "clip": Family(
        lambda: hf.CLIPModel(
            hf.CLIPConfig(text_config={**_TEXT, "max_position_embeddings": 64}, vision_config=_IMAGE, projection_dim=16)
        ),
        {"image": "image", "text": "text"},
        mergekit=False,
        processor=_clip_processor,
        blocks=(("vision_model.encoder.layers", None), ("text_model.encoder.layers", "attention_mask")),
    ),
    "vit": Family(
        lambda: hf.ViTForImageClassification(hf.ViTConfig(**_IMAGE)),
        _IMAGES,
        mergekit=False,
        processor=lambda: hf.ViTImageProcessor(**_SQUARE),
        blocks=(("layers", None),),
    ),
    "dinov2": Family(
        lambda: hf.Dinov2Model(
            hf.Dinov2Config(
                hidden_size=32, num_hidden_layers=2, num_attention_heads=4, mlp_ratio=2, image_size=32, patch_size=8
            )
        ),
        _IMAGES,
        mergekit=False,
        processor=lambda: hf.BitImageProcessor(**_SHORTEST),
        blocks=(("encoder.layer", None),),
    ),
    "siglip": Family(
        lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**_IMAGE)),
        _IMAGES,
        processor=lambda: hf.SiglipImageProcessor(**_SQUARE),
        blocks=(("encoder.layers", None),),
    ),
    "whisper": Family(
        lambda: hf.WhisperForConditionalGeneration(
            hf.WhisperConfig(
                **_TOKENS,
                decoder_start_token_id=2,
                vocab_size=len(VOCABULARY),
                d_model=32,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=64,
                decoder_ffn_dim=64,
                num_mel_bins=8,
                max_source_positions=20,
                max_target_positions=32,
            )
        ),
        _SEQ2SEQ["reads"],
        mergekit=False,
        blocks=(("encoder.layers", None), ("decoder.layers", "labels")),
    ),
}
"""Name -> family. Whisper's sound is not for the recipe to read; its batches come from `sound_batches`."""


def base_model(family: Family) -> PreTrainedModel:
    """A model whose blocks do something: weights of Xavier's size, no bias 0, no norm 1, embeddings of 1/2."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = family.build().eval().to(family.dtype)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                parameter.add_(0.1 * noise)
            elif id(parameter) in embeddings:
                parameter.copy_((0.1 if "position" in name else 0.5) * noise)
            else:
                is_image_kernel = parameter.dim() == 4
                fans = parameter[0].numel() + len(parameter) if is_image_kernel else sum(parameter.shape[-2:])
                parameter.copy_((2 / fans) ** 0.5 * noise)
    return model


def expert_model(family: Family, base: PreTrainedModel, seed: int) -> PreTrainedModel:
    """The base after 'training': its blocks' matrices move by rank 2 and 0.3 of their size, all else a little."""
    generator = torch.Generator().manual_seed(seed)
    expert = family.build().eval().to(family.dtype)
    expert.load_state_dict(base.state_dict())
    stacks = tuple(f"{stack}." for stack, _ in family.blocks)
    with torch.no_grad():
        for name, parameter in expert.named_parameters():
            inside = any(stack in name for stack in stacks)
            if inside and parameter.dim() >= 2:
                *experts, rows, columns = parameter.shape
                left = torch.randn(*experts, rows, 2, generator=generator)
                update = left @ torch.randn(*experts, 2, columns, generator=generator)
                size = 0.3
            else:
                update = torch.randn(parameter.shape, generator=generator)
                size = 0.05 if inside else 0.01
            parameter.add_(update * (size * parameter.float().norm() / update.norm()))
    return expert


def save_side_files(family: Family, folder: Path) -> None:
    """A tokenizer of letters with a chat template, and the family's image processor.

    It is byte-level BPE because transformers builds Qwen2's tokenizer as one, whatever `tokenizer.json` says.
    """
    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ġ", letter) for letter in LETTERS]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    if family.processor is not None:
        family.processor().save_pretrained(folder)


def write_data(folder: Path) -> dict[str, Path]:
    """Each task's rows as a jsonl file, with images beside it.

    The tasks have letters and textures of their own: were their features alike, the average of the experts would be
    the best there is, and calibration could win one task only what it loses another.
    """
    files = {}
    for number, task in enumerate(TASKS):
        random = np.random.default_rng(number)
        (folder / task).mkdir(parents=True)
        words = list(LETTERS[number::2])
        textures = random.normal(size=(4, 8, 8, 3))
        rows = []
        for index in range(ROWS):
            text = " ".join(random.choice(words, size=random.integers(6, 20)))
            patches = np.einsum("rct,thwk->rhcwk", random.normal(size=(4, 4, 4)), textures).reshape(32, 32, 3)
            pixels = 128 + 25 * patches + 5 * random.normal(size=patches.shape)
            Image.fromarray(pixels.clip(0, 255).astype("uint8")).save(folder / task / f"{index}.png")
            answer = " ".join(random.choice(words, size=random.integers(4, 12)))
            rows.append(
                {
                    "text": text,
                    "question": text,
                    "answer": answer,
                    "turns": [{"role": "user", "content": text}, {"role": "assistant", "content": answer}],
                    "image": f"{index}.png",
                }
            )
        files[task] = folder / task / "rows.jsonl"
        files[task].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files


def sound_batches(task: int, seed: int, batches: int) -> list[dict[str, Tensor]]:
    """A task's batches for Whisper: mel spectra of its two timbres, labels of its tokens, half the rows padded."""
    timbres = torch.randn(2, 8, generator=torch.Generator().manual_seed(task))
    tokens = torch.arange(4 + task, len(VOCABULARY), 2)
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(batches):
        spectra = (torch.randn(16, 40, 2, generator=generator) @ timbres).transpose(1, 2)
        labels = tokens[torch.randint(len(tokens), (16, 8), generator=generator)]
        labels[::2, 5:] = -100
        made.append({"input_features": spectra, "labels": labels})
    return made
