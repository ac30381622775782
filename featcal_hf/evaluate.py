"""Measures of a model on held-out rows: tensors and texts in, numbers out.

A measure that has no value (Spearman's ρ of a constant, the mean of nothing, an overflow) is None, never NaN.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

NUMBERS_AT_ONCE = 2**22
"""Logits that are worked on at once: their float32 copies are a few times as many."""
"""Rows of logits that are made float32 at a time: a vocabulary of 128k takes 0.5 GB of them."""
_NUMBER = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")


@dataclass(frozen=True)
class Metric:
    """What a number is.

    Attributes:
        name: as tables show it.
        higher_is_better: which way is up.
        digits: decimals shown; two fewer where it is shown in percent.
        percent: a share, shown in percent.
        drift: measured against the expert, whose own value is `ideal`.
        ideal: the value of an expert compared with itself.
    """

    name: str
    higher_is_better: bool
    digits: int
    percent: bool = False
    drift: bool = False
    ideal: float | None = None

    def shown(self, value: float | None) -> str:
        """The value in a table."""
        if value is None:
            return "undefined"
        return f"{value:.{self.digits - 2}%}" if self.percent else f"{value:.{self.digits}f}"


LOSS = Metric("loss per token", False, 4)
PERPLEXITY = Metric("perplexity", False, 2)
EXACT_MATCH = Metric("exact match", True, 3, percent=True)
SPEARMAN = Metric("Spearman's ρ", True, 3)
ACCURACY = Metric("accuracy", True, 3, percent=True)
ZERO_SHOT = Metric("zero-shot accuracy", True, 3, percent=True)
LOGIT_L2 = Metric("logit L2 to expert", False, 3, drift=True, ideal=0.0)
KL = Metric("KL from expert", False, 4, drift=True, ideal=0.0)
AGREEMENT = Metric("top-1 as expert", True, 3, percent=True, drift=True, ideal=1.0)
COSINE = Metric("cosine with expert", True, 4, drift=True, ideal=1.0)


def finite(value: float) -> float | None:
    """The value, None in place of NaN and infinity."""
    return value if math.isfinite(value) else None


def mean(total: float, count: int) -> float | None:
    """The mean of `count` values that sum to `total`; None of nothing."""
    return finite(total / count) if count else None


def next_tokens(logits: Tensor, ids: Tensor, scored: Tensor) -> tuple[Tensor, Tensor]:
    """The predictions of a decoder that count, and what they should have been.

    Args:
        logits: (batch, tokens, vocabulary); those at token t predict token t+1.
        ids: (batch, tokens).
        scored: (batch, tokens), true for each token whose prediction counts; a row's first has none.

    Returns:
        Logits (counted, vocabulary) and ids (counted,).
    """
    counted = scored[:, 1:].bool()
    return logits[:, :-1][counted], ids[:, 1:][counted]


def total_loss(logits: Tensor, targets: Tensor) -> float:
    """Sum of the cross entropies in nats, in float32: logits (n, classes), targets (n,)."""
    parts = zip(*_split(logits, targets), strict=True)
    return sum(float(cross_entropy(part.float(), target, reduction="sum")) for part, target in parts)


def perplexity(loss: float | None) -> float | None:
    """Perplexity from a mean loss in nats."""
    return None if loss is None or loss > 700 else math.exp(loss)


def hits(logits: Tensor, targets: Tensor) -> int:
    """Rows of logits (n, classes) whose largest is at their target (n,)."""
    return int((logits.argmax(dim=-1) == targets).sum())


def is_exact(generated: str, reference: str) -> bool:
    """Whether two texts are the same but for whitespace around them."""
    return generated.strip() == reference.strip()


def parse_number(text: str) -> float | None:
    """The number that a text is, whitespace around it aside; None if it is something else."""
    text = text.strip()
    return finite(float(text)) if _NUMBER.fullmatch(text) else None


def ranks(values: Sequence[float]) -> Tensor:
    """Ranks from 1, (n,) float64; equal values share the mean of theirs."""
    numbers = torch.tensor(values, dtype=torch.float64)
    _, places, counts = numbers.unique(return_inverse=True, return_counts=True)
    shared: Tensor = counts.cumsum(0).double() - (counts - 1) / 2
    return shared[places]


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's ρ: Pearson's correlation of the ranks; None where either is constant or there are fewer than two."""
    if len(one) < 2:
        return None
    first, second = (rank - rank.mean() for rank in (ranks(one), ranks(other)))
    size = first.norm() * second.norm()
    return None if size == 0 else float(first @ second / size)


class OutputDrift:
    """Sums how far a model's outputs are from its expert's, batch after batch.

    With logits z of the model and z^exp of the expert, over the counted rows: mean ‖z - z^exp‖, mean
    KL(softmax z^exp ‖ softmax z) in nats, and how often both have their largest logit at the same place. For pooled
    outputs, the mean cosine.

    Args:
        logits: the outputs are logits, not pooled features.
    """

    def __init__(self, logits: bool) -> None:
        self._logits = logits
        self._sums = torch.zeros(3 if logits else 1, dtype=torch.float64)
        self.rows = 0

    def add(self, model: Tensor, expert: Tensor) -> None:
        """Add outputs (n, width) of both for the same rows."""
        for ours, theirs in zip(*_split(model, expert), strict=True):
            h, target = ours.float(), theirs.to(ours.device).float()
            if self._logits:
                log_p, log_q = target.log_softmax(dim=1), h.log_softmax(dim=1)
                p = log_p.exp()
                terms = torch.where(p == 0, 0.0, p * (log_p - log_q))  # 0 · ∞ of masked logits
                parts = [
                    (h - target).norm(dim=1),
                    terms.sum(dim=1).clamp_min(0),
                    (h.argmax(dim=1) == target.argmax(dim=1)).float(),
                ]
            else:
                parts = [torch.cosine_similarity(h, target, dim=1)]
            self._sums += torch.stack([part.sum() for part in parts]).double().cpu()
            self.rows += len(h)

    def means(self) -> dict[Metric, float | None]:
        """The means over all rows added; nothing if there were none."""
        metrics = (LOGIT_L2, KL, AGREEMENT) if self._logits else (COSINE,)
        if not self.rows:
            return {}
        return {metric: mean(float(total), self.rows) for metric, total in zip(metrics, self._sums, strict=True)}


def _split(values: Tensor, others: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Rows of both, as many at once as `values` (n, width) has room for."""
    rows = max(1, NUMBERS_AT_ONCE // values.shape[-1])
    return values.split(rows), others.split(rows)


def class_embeddings(embeddings: Iterable[Tensor]) -> Tensor:
    """One unit vector a class, (classes, width), from its sentences' embeddings, each (templates, width)."""
    return torch.stack([normalize(normalize(sentences, dim=-1).mean(dim=0), dim=-1) for sentences in embeddings])


def zero_shot_logits(images: Tensor, classes: Tensor, scale: float) -> Tensor:
    """CLIP's logits (n, classes): scaled cosines of images (n, width) with classes' unit vectors (classes, width)."""
    return scale * normalize(images, dim=-1) @ classes.T


def recovered(metric: Metric, expert: float | None, merged: float | None, calibrated: float | None) -> float | None:
    """Share of the gap between merged model and expert that calibration closed: 1 all, 0 none, below 0 it grew.

    (merged - calibrated) / (merged - expert), which is the same for metrics that fall and that rise.

    Returns:
        None where a value is missing, or the merged model is as good as the expert within the digits shown.
    """
    if expert is None or merged is None or calibrated is None or not has_gap(metric, expert, merged):
        return None
    return (merged - calibrated) / (merged - expert)


def has_gap(metric: Metric, expert: float, merged: float) -> bool:
    """Whether the expert is better than the merged model within the digits shown."""
    better, worse = (round(value, metric.digits) for value in (expert, merged))
    return better > worse if metric.higher_is_better else better < worse
