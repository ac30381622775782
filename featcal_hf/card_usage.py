"""How a model of each kind is used: its pipeline, and a few lines to copy and run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MODEL_ID = "MODEL_ID"
BASE_ID = "BASE_ID"


@dataclass(frozen=True)
class Usage:
    """How a kind of model is used.

    Attributes:
        pipeline: the Hub's task, as a card's `pipeline_tag`.
        code: Python, in which `MODEL_ID` and `BASE_ID` stand for the model and its base.
    """

    pipeline: str
    code: str


_CHAT = Usage(
    "text-generation",
    """
from transformers import AutoModelForCausalLM, AutoTokenizer

model_id = "MODEL_ID"
tokenizer = AutoTokenizer.from_pretrained(model_id)
model = AutoModelForCausalLM.from_pretrained(model_id, dtype="auto", device_map="auto")

messages = [{"role": "user", "content": "What is a merged model?"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
outputs = model.generate(**inputs.to(model.device), max_new_tokens=64)
print(tokenizer.decode(outputs[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
""",
)
_CAUSAL = Usage(
    "text-generation",
    """
from transformers import AutoModelForCausalLM, AutoTokenizer

model_id = "MODEL_ID"
tokenizer = AutoTokenizer.from_pretrained(model_id)
model = AutoModelForCausalLM.from_pretrained(model_id, dtype="auto", device_map="auto")

inputs = tokenizer("A merged model is", return_tensors="pt", return_token_type_ids=False).to(model.device)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0], skip_special_tokens=True))
""",
)
_SEQ2SEQ = Usage(
    # the Hub has no task of its own for encoder-decoders any more
    "text-generation",
    """
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

model_id = "MODEL_ID"
tokenizer = AutoTokenizer.from_pretrained(model_id)
model = AutoModelForSeq2SeqLM.from_pretrained(model_id, dtype="auto", device_map="auto")

inputs = tokenizer("Is this sentence positive or negative? What a day!", return_tensors="pt").to(model.device)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32)[0], skip_special_tokens=True))
""",
)
_TEXT_CLASSES = Usage(
    "text-classification",
    """
from transformers import pipeline

model_id = "MODEL_ID"
print(pipeline("text-classification", model=model_id)("What a day!"))
""",
)
_TEXT_FEATURES = Usage(
    "feature-extraction",
    """
from transformers import AutoModel, AutoTokenizer

model_id = "MODEL_ID"
tokenizer = AutoTokenizer.from_pretrained(model_id)
model = AutoModel.from_pretrained(model_id)

print(model(**tokenizer("What a day!", return_tensors="pt")).last_hidden_state.shape)
""",
)
_IMAGE_CLASSES = Usage(
    "image-classification",
    """
from PIL import Image
from transformers import pipeline

model_id = "MODEL_ID"
print(pipeline("image-classification", model=model_id)(Image.open("photo.jpg")))
""",
)
_IMAGE_FEATURES = Usage(
    "image-feature-extraction",
    """
from PIL import Image
from transformers import AutoImageProcessor, AutoModel

model_id = "MODEL_ID"
processor = AutoImageProcessor.from_pretrained(model_id)
model = AutoModel.from_pretrained(model_id)

print(model(**processor(Image.open("photo.jpg"), return_tensors="pt")).last_hidden_state.shape)
""",
)
_CLIP_TOWER = Usage(
    "zero-shot-image-classification",
    """
from PIL import Image
from transformers import CLIPModel, CLIPProcessor, CLIPVisionModel

model_id = "MODEL_ID"
clip = CLIPModel.from_pretrained("BASE_ID")  # its text tower and projections
clip.vision_model.load_state_dict(CLIPVisionModel.from_pretrained(model_id).state_dict())

processor = CLIPProcessor.from_pretrained("BASE_ID")
names = ["a photo of a cat.", "a photo of a dog."]
inputs = processor(text=names, images=Image.open("photo.jpg"), return_tensors="pt", padding=True)
print(dict(zip(names, clip(**inputs).logits_per_image.softmax(-1)[0].tolist())))
""",
)
_TWO_TOWERS = Usage(
    "zero-shot-image-classification",
    """
from PIL import Image
from transformers import pipeline

model_id = "MODEL_ID"
classify = pipeline("zero-shot-image-classification", model=model_id)
print(classify(Image.open("photo.jpg"), candidate_labels=["cat", "dog"]))
""",
)
_SPEECH = Usage(
    "automatic-speech-recognition",
    """
from transformers import pipeline

model_id = "MODEL_ID"
print(pipeline("automatic-speech-recognition", model=model_id)("speech.wav"))  # ffmpeg has to be installed
""",
)

_BY_ENDING = {
    "ForCausalLM": _CAUSAL,
    "LMHeadModel": _CAUSAL,
    "ForSequenceClassification": _TEXT_CLASSES,
    "ForImageClassification": _IMAGE_CLASSES,
    "ForSpeechSeq2Seq": _SPEECH,
}
_IMAGES = ("vit", "dinov2", "vision", "deit", "beit", "swin")


def usage_of(config: Mapping[str, Any], *, chat: bool, base: str | None) -> Usage:
    """How a model is used, by its config.

    Args:
        config: `config.json`.
        chat: its tokenizer has a chat template.
        base: the base's id on the Hub, which holds the rest of a CLIP of which this is one tower.
    """
    architecture = next(iter(config.get("architectures") or []), "")
    kind = str(config.get("model_type", ""))
    if kind == "whisper":
        return _SPEECH
    if config.get("is_encoder_decoder") or architecture.endswith("ForConditionalGeneration"):
        return _SEQ2SEQ
    found = next((usage for ending, usage in _BY_ENDING.items() if architecture.endswith(ending)), None)
    if found is not None:
        return _CHAT if found is _CAUSAL and chat else found
    if kind == "clip_vision_model" and base is not None and "WithProjection" not in architecture:
        return _CLIP_TOWER
    if kind in ("clip", "siglip"):
        return _TWO_TOWERS
    return _IMAGE_FEATURES if any(name in kind for name in _IMAGES) else _TEXT_FEATURES


def code_of(usage: Usage, model_id: str, base: str | None) -> str:
    """The lines to run, with the model's id in them."""
    return usage.code.strip().replace(MODEL_ID, model_id).replace(BASE_ID, base or "")
