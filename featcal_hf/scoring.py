"""One whole model on held-out rows: what its outputs are, and what they are worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    CLIPModel,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from featcal_hf import evaluate as measures
from featcal_hf.data import HeldOut, HeldOutBatch
from featcal_hf.errors import CheckpointError, DataError, listed
from featcal_hf.evaluate import Metric, OutputDrift
from featcal_hf.recipe import Task

CLASSIFIERS = ("ForImageClassification", "ForSequenceClassification")
POOLED = ("image_embeds", "text_embeds", "pooler_output")


@dataclass(frozen=True)
class Reading:
    """What a model's outputs are compared with on a task.

    Attributes:
        metric: loss, accuracy or zero-shot accuracy; None where there is only drift to measure.
        decoder: the model predicts each token from those before it.
        why: why there is no metric.
    """

    metric: Metric | None
    decoder: bool = False
    why: str | None = None


@dataclass(frozen=True)
class ZeroShotHead:
    """What makes a classifier of a CLIP's image tower: its projection, the classes, their unit vectors, the scale."""

    names: list[str]
    projection: nn.Module
    classes: Tensor
    scale: float


@dataclass
class Score:
    """What one model did on one task.

    Attributes:
        values: metric -> value; None where the metric has no value.
        counts: tokens, rows and answers behind the values.
        outputs: the counted outputs of the first batches, on the CPU, the last perhaps in part; kept of an expert.
        notes: what couldn't be measured, and why.
    """

    values: dict[Metric, float | None] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def reading_of(cls: type[PreTrainedModel], config: PretrainedConfig, task: Task) -> Reading:
    """What suits a model's class and a task's data."""
    name = cls.__name__
    has_text = bool(task.text or task.prompt or task.messages)
    if name.endswith(CLASSIFIERS):
        return Reading(measures.ACCURACY)
    if has_text and not task.image and cls.can_generate():
        return Reading(measures.LOSS, decoder=not config.is_encoder_decoder)
    if task.image and not has_text:
        if task.evaluation is None or task.evaluation.text_model is None:
            why = f"{name} has no classifier head; for zero-shot accuracy give eval.text_model and eval.templates"
            return Reading(None, why=why)
        if name.startswith("CLIPVision"):
            return Reading(measures.ZERO_SHOT)
        return Reading(None, why=f"{name} is no image tower of a CLIP, which eval.text_model could classify for")
    return Reading(None, why=f"{name} neither predicts the next token nor has a classifier head")


def load_zero_shot_head(
    path: str, names: Sequence[str], templates: Sequence[str], device: torch.device, cache_dir: str | None
) -> ZeroShotHead:
    """Write each class's name into each template and embed the sentences with a CLIP's text tower.

    Raises:
        CheckpointError: it can't be loaded, or isn't a CLIP.
    """
    bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        clip: Any = CLIPModel.from_pretrained(path, cache_dir=cache_dir)
        tokenizer = AutoTokenizer.from_pretrained(path, cache_dir=cache_dir)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"eval.text_model {path} can't be loaded as a CLIPModel with its tokenizer: {error}; name a whole CLIP, "
            "such as openai/clip-vit-base-patch32."
        ) from error
    finally:
        if bar:
            transformers_logging.enable_progress_bar()
    clip.to(device).eval()
    sentences = ([template.format(name) for template in templates] for name in names)
    with torch.inference_mode():
        embedded = []
        for texts in sentences:
            inputs = tokenizer(texts, return_tensors="pt", padding=True, truncation=True).to(device)
            pooled = clip.text_model(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
            ).pooler_output
            embedded.append(clip.text_projection(pooled))
        return ZeroShotHead(
            list(names), clip.visual_projection, measures.class_embeddings(embedded), float(clip.logit_scale.exp())
        )


class Scorer:
    """Runs one model over the held-out rows of one task.

    Args:
        model: the whole model, on `device`.
        data: the rows.
        reading: what the outputs are compared with.
        head: for a zero-shot reading.
        is_expert: give it the expert's inputs.
        positions: tokens that the model has positions for; None where any number will do.
    """

    def __init__(
        self,
        model: nn.Module,
        data: HeldOut,
        reading: Reading,
        head: ZeroShotHead | None,
        device: torch.device,
        *,
        is_expert: bool,
        positions: int | None,
    ) -> None:
        self.model: Any = model
        self.data, self.reading, self.head, self.device = data, reading, head, device
        self._is_expert, self._positions = is_expert, positions

    @torch.inference_mode()
    def score(self, expert: Sequence[Tensor] | None = None, keep_bytes: int = 0) -> Score:
        """Measure the model.

        Args:
            expert: the expert's kept outputs, to measure the drift from them.
            keep_bytes: keep as many of the first outputs as fit.
        """
        score = Score()
        total, count, rows = 0.0, 0, 0
        compares = expert is not None
        drift: OutputDrift | None = None
        for number, batch in enumerate(self.data.batches):
            outputs, targets = self._outputs(batch)
            rows += len(outputs)
            if targets is not None:
                loss = self.reading.metric is measures.LOSS
                total += measures.total_loss(outputs, targets) if loss else measures.hits(outputs, targets)
                count += len(targets)
            kept = outputs[: keep_bytes // (outputs.element_size() * outputs.shape[-1])]
            if len(kept):
                score.outputs.append(kept.cpu())
                keep_bytes -= kept.nbytes if len(kept) == len(outputs) else keep_bytes
            if expert is not None and number < len(expert):
                drift = drift or OutputDrift(self._gives_logits)
                if outputs.shape[-1] != expert[number].shape[-1]:
                    widths = f"{outputs.shape[-1]} outputs, the expert {expert[number].shape[-1]}"
                    score.notes.append(f"no drift: the model has {widths}")
                    expert, drift, compares = None, None, False
                else:
                    drift.add(outputs[: len(expert[number])], expert[number])
        if self.reading.metric is not None:
            value = measures.mean(total, count)
            score.values[self.reading.metric] = value
            if self.reading.metric is measures.LOSS:
                score.values[measures.PERPLEXITY] = measures.perplexity(value)
                score.counts["tokens"] = count
        if any(batch.prompts for batch in self.data.batches):
            self._generated(score)
        compared = drift.rows if drift is not None else 0
        if compares and compared < rows:
            score.notes.append(
                f"drift is of the first {compared} of {rows} outputs, as many of the expert's as are kept"
            )
        if drift is not None:
            score.values |= drift.means()
            score.counts["drift_rows"] = drift.rows
        return score

    def _outputs(self, batch: HeldOutBatch) -> tuple[Tensor, Tensor | None]:
        """The outputs of a batch that count, (n, width), and what they should be, (n,); None without a metric."""
        inputs = {
            name: value.to(self.device) for name, value in (batch.expert if self._is_expert else batch.student).items()
        }
        if "pixel_values" in inputs:
            dtype = next(parameter.dtype for parameter in self.model.parameters() if parameter.is_floating_point())
            inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
        outputs = self.model(**inputs)
        metric = self.reading.metric
        if metric is measures.LOSS and self.reading.decoder:
            assert batch.scored is not None
            return measures.next_tokens(outputs.logits, inputs["input_ids"], batch.scored.to(self.device))
        if metric is measures.LOSS:
            counted = inputs["labels"] >= 0
            return outputs.logits[counted], inputs["labels"][counted]
        if metric is measures.ACCURACY:
            return outputs.logits, self._labels(batch, self.model.config.label2id, outputs.logits.shape[-1])
        if metric is measures.ZERO_SHOT:
            assert self.head is not None
            logits = self._zero_shot(outputs)
            return logits, self._labels(batch, _numbered(self.head.names), logits.shape[-1])
        return _pooled(outputs, inputs.get("attention_mask")), None

    @property
    def _gives_logits(self) -> bool:
        return self.reading.metric is not None

    def _zero_shot(self, outputs: Any) -> Tensor:
        assert self.head is not None
        images = getattr(outputs, "image_embeds", None)
        if images is None:
            projection: Any = self.head.projection
            pooled = outputs.pooler_output.float()
            if pooled.shape[-1] != projection.in_features:
                raise CheckpointError(
                    f"eval.text_model projects image features of width {projection.in_features}, and the model's have "
                    f"{pooled.shape[-1]}; name the CLIP that the experts were trained from."
                )
            images = projection(pooled)
        return measures.zero_shot_logits(images.float(), self.head.classes, self.head.scale)

    def _labels(self, batch: HeldOutBatch, numbers: Mapping[str, int], classes: int) -> Tensor:
        labels = []
        for label in batch.labels:
            number = numbers.get(label, -1) if isinstance(label, str) else label
            if not 0 <= number < classes:
                known = f"names {listed(list(numbers))}" if isinstance(label, str) else f"classes 0 to {classes - 1}"
                raise DataError(
                    f"the label {label!r} is not among the classifier's {known}; name the right column as `label`, a "
                    "split that has labels, or the model that was trained on them"
                )
            labels.append(number)
        return torch.tensor(labels, device=self.device)

    def _generated(self, score: Score) -> None:
        """Generate greedily from every prompt, and compare with the references as texts and as numbers."""
        references: list[str] = []
        answers: list[str] = []
        for batch in self.data.batches:
            answers += self._answers(batch)
            references += batch.references
        right = sum(measures.is_exact(*pair) for pair in zip(answers, references, strict=True))
        score.values[measures.EXACT_MATCH] = measures.mean(right, len(references))
        score.counts["answers"] = len(references)
        numbers = [measures.parse_number(reference) for reference in references]
        if any(number is None for number in numbers):
            return
        pairs = [(measures.parse_number(answer), number) for answer, number in zip(answers, numbers, strict=True)]
        parsed = [(one, other) for one, other in pairs if one is not None and other is not None]
        score.values[measures.SPEARMAN] = measures.spearman([one for one, _ in parsed], [other for _, other in parsed])
        score.counts["unparsable_answers"] = len(pairs) - len(parsed)

    def _answers(self, batch: HeldOutBatch) -> list[str]:
        assert batch.prompts is not None
        assert self.data.encoders is not None
        side = int(self._is_expert)
        encoder = self.data.encoders[side]
        inputs = {name: value.to(self.device) for name, value in batch.prompts[side].items()}
        start = inputs["input_ids"].shape[1] if self.reading.decoder else 0
        room = self.data.new_tokens
        if self.reading.decoder and self._positions is not None:
            room = min(room, self._positions - start)
        if room < 1:
            return [""] * len(batch.references)
        ends = {encoder.tokenizer.eos_token_id}
        own = self.model.generation_config.eos_token_id
        ends |= set(own) if isinstance(own, list) else {own}
        produced = self.model.generate(
            **inputs,
            max_new_tokens=room,
            pad_token_id=encoder.padding.token,
            eos_token_id=sorted(token for token in ends if token is not None) or None,
        )
        return [str(encoder.tokenizer.decode(row, skip_special_tokens=True)) for row in produced[:, start:].tolist()]


def _pooled(outputs: Any, mask: Tensor | None) -> Tensor:
    """An encoder's pooled outputs, (n, width): its pooler's, else the mean over the tokens that count."""
    found = [value for name in POOLED if (value := getattr(outputs, name, None)) is not None]
    if found:
        return torch.cat(found)
    features: Tensor | None = getattr(outputs, "last_hidden_state", None)
    if features is None:
        features = outputs.logits
    if features.dim() == 2:
        return features
    if mask is None:
        return features.float().mean(dim=1)
    weights = mask.unsqueeze(-1).float()
    return (features.float() * weights).sum(dim=1) / weights.sum(dim=1)


def _numbered(names: Sequence[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}
