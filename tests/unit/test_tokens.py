"""Which tokens count, and how much."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from featcal_hf.errors import DataError
from featcal_hf.forward import ForwardInputs, find_blocks
from featcal_hf.tokens import UNREAD_TOKEN_WEIGHT, counted, own_mask, pooled_blocks, token_stream, token_weights

MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])
TOWER = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}


def bert() -> PreTrainedModel:
    return BertModel(BertConfig(**TOWER, vocab_size=9))


def clip() -> PreTrainedModel:
    text = {**TOWER, "vocab_size": 9, "max_position_embeddings": 4}
    vision = {**TOWER, "image_size": 16, "patch_size": 8}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


def clip_vision() -> PreTrainedModel:
    return CLIPVisionModel(CLIPVisionConfig(**TOWER, image_size=16, patch_size=8))


def t5() -> PreTrainedModel:
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2, "vocab_size": 9}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


def whisper() -> PreTrainedModel:
    layers = {f"{side}_layers": 2 for side in ("encoder", "decoder")}
    heads = {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
    widths = {f"{side}_ffn_dim": 8 for side in ("encoder", "decoder")}
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1)
    return WhisperForConditionalGeneration(
        WhisperConfig(**layers, **heads, **widths, **special, d_model=8, vocab_size=9, num_mel_bins=4)
    )


def features(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


@pytest.mark.parametrize(
    ("model", "streams"),
    [
        (bert(), {"encoder": "input"}),
        (clip_vision(), {"encoder": "none"}),
        (clip(), {"text_model": "input", "vision_model": "none"}),
        (t5(), {"encoder": "input", "decoder": "decoder"}),
        (whisper(), {"encoder": "none", "decoder": "decoder"}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PreTrainedModel) else "",
)
def test_a_block_takes_the_mask_of_its_own_tokens(model: PreTrainedModel, streams: dict[str, str]) -> None:
    blocks = find_blocks(model)
    found = {part: {token_stream(model, block) for path, block in blocks.items() if part in path} for part in streams}
    assert found == {part: {stream} for part, stream in streams.items()}


def test_the_mask_is_that_of_the_stream() -> None:
    inputs = ForwardInputs({}, MASK, MASK[:1])
    assert own_mask("input", inputs) is MASK
    assert torch.equal(own_mask("decoder", inputs), MASK[:1])
    assert own_mask("none", inputs) is None


def test_a_pooled_block_is_the_last_one_of_an_image_encoder() -> None:
    vision, both, text = clip_vision(), clip(), bert()

    def pooled(model: PreTrainedModel, setting: str) -> set[str]:
        return pooled_blocks(model, list(find_blocks(model)), setting)

    (last,) = pooled(vision, "auto")
    assert last == list(find_blocks(vision))[-1]
    (last,) = pooled(both, "auto")
    assert "vision" in last
    assert last.endswith(".1")
    assert pooled(text, "auto") == set()
    assert pooled(vision, "none") == set()
    (last,) = pooled(text, "first")
    assert last.endswith("layer.1")


def test_without_a_mask_all_tokens_count_alike() -> None:
    assert token_weights(features(2, 3, 4), None, False) is None


def test_padding_weighs_nothing() -> None:
    weights = token_weights(features(2, 3, 4), MASK, False)
    assert weights is not None
    assert weights.dtype == torch.float32
    assert weights.tolist() == MASK.tolist()


def test_unread_tokens_of_a_pooled_block_hardly_count_and_padding_still_does_not() -> None:
    weights = token_weights(features(2, 3, 4), MASK, True)
    assert weights is not None
    torch.testing.assert_close(weights, torch.tensor([[1, UNREAD_TOKEN_WEIGHT, UNREAD_TOKEN_WEIGHT], [1, 0, 0]]))
    alone = token_weights(features(2, 3, 4), None, True)
    torch.testing.assert_close(alone, torch.tensor([[1, UNREAD_TOKEN_WEIGHT, UNREAD_TOKEN_WEIGHT]] * 2))


def test_a_mask_of_other_tokens_is_an_error_with_both_shapes() -> None:
    with pytest.raises(DataError, match=r"\(2, 3\) but the block's tokens are \(2, 5\).*attention_mask"):
        token_weights(features(2, 5, 4), MASK, False)


def test_rows_without_weight_are_left_out_and_the_rest_keeps_its_order() -> None:
    rows, weights = counted(features(2, 3, 2), MASK.float())
    assert weights is None
    assert rows.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    rows, weights = counted(features(2, 3, 2), MASK * 0.5)
    assert rows.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert weights is not None
    assert weights.tolist() == [0.5] * 4
    rows, weights = counted(features(2, 3, 2), None)
    assert weights is None
    assert rows.shape == (6, 2)


def test_tokens_that_a_module_flattened_are_still_told_apart() -> None:
    rows, _ = counted(features(6, 2), MASK.float())
    assert rows.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("heads_first", [False, True])
def test_heads_count_as_often_as_their_token(heads_first: bool) -> None:
    by_token = features(2, 3, 5, 2)  # batch, tokens, heads, width
    given = by_token.transpose(1, 2) if heads_first else by_token
    rows, weights = counted(given, MASK * 0.5)
    assert torch.equal(rows, torch.cat([by_token[0].reshape(-1, 2), by_token[1, 0]]))
    assert weights is not None
    assert weights.tolist() == [0.5] * 20


@pytest.mark.parametrize("heads_first", [False, True])
def test_as_many_heads_as_tokens_are_not_taken_for_tokens(heads_first: bool) -> None:
    by_token = features(2, 3, 3, 2)
    given = by_token.transpose(1, 2) if heads_first else by_token
    assert torch.equal(counted(given, MASK.float())[0], torch.cat([by_token[0].reshape(-1, 2), by_token[1, 0]]))


def test_tokens_that_a_block_regroups_are_an_error() -> None:
    with pytest.raises(DataError, match="regroups its tokens"):
        counted(features(4, 2, 2, 2), MASK.float())
