"""Which tokens count, and how much: padding never does, unread tokens of a pooled block hardly."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from featcal_hf.errors import DataError
from featcal_hf.forward import ForwardInputs

UNREAD_TOKEN_WEIGHT = 0.01
FIRST_TOKEN_CLASSES = frozenset(
    {
        "CLIPModel",
        "CLIPVisionModel",
        "CLIPVisionModelWithProjection",
        "ViTForImageClassification",
        "ViTModel",
    }
)


def token_stream(model: PreTrainedModel, block: nn.Module) -> str:
    """Which mask a block's own tokens have: 'decoder', 'input', or 'none' for images and sound."""
    if model.config.is_encoder_decoder:
        decoder = model.get_decoder()
        if any(member is block for member in decoder.modules()):
            return "decoder"
    owners = [
        owner
        for owner in model.modules()
        if isinstance(owner, PreTrainedModel) and any(member is block for member in owner.modules())
    ]
    return "input" if owners[-1].main_input_name == "input_ids" else "none"


def own_mask(stream: str, inputs: ForwardInputs) -> Tensor | None:
    """The mask (batch, tokens) of a block's own tokens, None where all count."""
    return {"decoder": inputs.decoder_tokens, "input": inputs.tokens, "none": None}[stream]


def pooled_blocks(model: PreTrainedModel, paths: list[str], pooled_token: str) -> set[str]:
    """The blocks of which the model reads the first token only: the last block of an image encoder.

    Args:
        pooled_token: 'auto' decides by the model's class, 'first' says yes, 'none' says no.
    """
    if pooled_token == "none" or (pooled_token == "auto" and type(model).__name__ not in FIRST_TOKEN_CLASSES):
        return set()
    stacks = {path.rpartition(".")[0]: path for path in paths}
    if type(model).__name__ == "CLIPModel":
        return {last for stack, last in stacks.items() if "vision" in stack}
    return set(stacks.values())


def token_weights(features: Tensor, mask: Tensor | None, first_token_read: bool) -> Tensor | None:
    """Weights (batch, tokens) of `features` (batch, tokens, ...), None where all count 1.

    Raises:
        DataError: the mask belongs to other tokens.
    """
    shape = tuple(features.shape[:2])
    if mask is not None and tuple(mask.shape) != shape:
        raise DataError(
            f"the token mask is {tuple(mask.shape)} but the block's tokens are {shape}; give an attention_mask of "
            "one row per sequence, one column per token."
        )
    if not first_token_read:
        return None if mask is None else mask.to(features.device, torch.float32)
    weights = torch.full(shape, UNREAD_TOKEN_WEIGHT, device=features.device)
    weights[:, 0] = 1.0
    return weights if mask is None else weights * mask.to(features.device)


def counted(features: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The rows of `features` that count, (rows, width), and their weights (rows,), None where all are 1.

    `features` are (batch, tokens, width), (batch * tokens, width), or have heads before or after the tokens.
    """
    width = features.shape[-1]
    if weights is None:
        return features.reshape(-1, width), None
    tokens_first = _tokens_first(features, weights.shape).reshape(weights.numel(), -1, width)
    flat = weights.flatten()
    keep = flat.nonzero().squeeze(1)
    if len(keep) == len(flat):
        rows, kept = tokens_first.reshape(-1, width), flat
    else:
        rows, kept = tokens_first.index_select(0, keep).reshape(-1, width), flat.index_select(0, keep)
    if bool((kept == 1).all()):
        return rows, None
    return rows, kept.repeat_interleave(tokens_first.shape[1])


def _tokens_first(features: Tensor, shape: torch.Size) -> Tensor:
    batch, tokens = shape
    if features.dim() == 2 and len(features) == batch * tokens:
        return features
    axes = [axis for axis in range(1, features.dim() - 1) if features.shape[axis] == tokens]
    if features.shape[0] != batch or not axes:
        raise DataError(
            f"a module reads {tuple(features.shape)} features where {batch} x {tokens} tokens were expected; "
            "this architecture regroups its tokens inside a block and can't be calibrated with a token mask."
        )
    return features.movedim(max(axes, key=features.stride), 1)
