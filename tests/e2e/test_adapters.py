"""Adapters as experts: each kind that PEFT makes is, block by block, the model that PEFT itself runs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from families import FAMILIES
from peft import LoraConfig, PeftConfig, PeftModel
from tiny_merge import build_llama
from torch import Tensor, nn
from transformers import PreTrainedModel

from featcal_hf.checkpoint import open_checkpoint
from featcal_hf.experts import AdaptedModel, open_adapter
from featcal_hf.forward import ParkedForward, find_blocks, first_tensor, forward_inputs, parking, run_block
from featcal_hf.streamed import StreamedModel, read_config

CPU = torch.device("cpu")
PROJECTIONS = ["q_proj", "v_proj", "down_proj"]


@dataclass(frozen=True)
class Kind:
    """A kind of adapter: the method and its options, and the model that it is trained on."""

    method: type[PeftConfig] = LoraConfig
    options: dict[str, Any] = field(default_factory=dict)
    family: str = "small llama"

    def config(self) -> PeftConfig:
        return self.method(**copy.deepcopy(self.options))

    def base(self) -> PreTrainedModel:
        torch.manual_seed(0)
        return build_llama() if self.family == "small llama" else FAMILIES[self.family].build()


def lora(family: str = "small llama", **options: Any) -> Kind:
    return Kind(LoraConfig, {"r": 4, "target_modules": PROJECTIONS, **options}, family)


KINDS = {
    "lora": lora(lora_alpha=8),
    "rslora": lora(use_rslora=True),
    "rank and alpha patterns": lora(
        use_rslora=True, rank_pattern={"layers.1.self_attn.q_proj": 2}, alpha_pattern={"down_proj": 3}
    ),
    "dora": lora(use_dora=True),
    "pissa": lora(init_lora_weights="pissa"),
    "olora": lora(init_lora_weights="olora"),
    "orthogonal": lora(init_lora_weights="orthogonal"),
    "ia3": Kind(
        peft.IA3Config, {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    ),
    "loha": Kind(peft.LoHaConfig, {"r": 4, "target_modules": PROJECTIONS}),
    "lokr": Kind(peft.LoKrConfig, {"r": 4, "target_modules": PROJECTIONS}),
    "adalora": Kind(peft.AdaLoraConfig, {"init_r": 4, "total_step": 9, "target_modules": PROJECTIONS}),
    "oft": Kind(peft.OFTConfig, {"oft_block_size": 8, "target_modules": PROJECTIONS}),
    "boft": Kind(peft.BOFTConfig, {"boft_block_size": 4, "target_modules": PROJECTIONS}),
    "hra": Kind(peft.HRAConfig, {"r": 4, "target_modules": PROJECTIONS}),
    "miss": Kind(peft.MissConfig, {"r": 4, "target_modules": PROJECTIONS}),
    "fourierft": Kind(peft.FourierFTConfig, {"n_frequency": 50, "target_modules": PROJECTIONS}),
    "c3a": Kind(peft.C3AConfig, {"block_size": 8, "target_modules": PROJECTIONS}),
    "delora": Kind(peft.DeloraConfig, {"r": 4, "target_modules": PROJECTIONS}),
    "gralora": Kind(peft.GraloraConfig, {"r": 4, "gralora_k": 2, "target_modules": PROJECTIONS}),
    "layer norm tuning": Kind(peft.LNTuningConfig, {"target_modules": ["input_layernorm", "norm"]}),
    "pattern of names": lora(target_modules=r".*\.layers\.[02]\..*(q|up)_proj"),
    "fan in, fan out": lora("gpt2", target_modules=["c_attn", "c_proj"], fan_in_fan_out=True),
    "norms and head saved": lora(modules_to_save=["input_layernorm", "lm_head"]),
    "norms saved in blocks without deltas": lora(layers_to_transform=[1], modules_to_save=["input_layernorm"]),
    "head saved on a tied model": lora("llama-tied", modules_to_save=["lm_head"]),
    "biases": lora("qwen2", bias="all"),
    "biases of the adapted layers": lora("gpt2", target_modules=["c_attn"], fan_in_fan_out=True, bias="lora_only"),
    "trained bias of the delta": lora("gpt2", target_modules=["c_attn"], fan_in_fan_out=True, lora_bias=True),
    "fused experts": lora("mixtral", target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"]),
    "both fused experts": lora(
        "mixtral", target_modules=[], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    ),
    "tokens beside lora": lora(trainable_token_indices=[3, 4, 5]),
    "tokens of a tied model": lora("llama-tied", trainable_token_indices={"embed_tokens": [3, 4, 5]}),
    "tokens alone": Kind(peft.TrainableTokensConfig, {"token_indices": [3, 4, 5], "target_modules": ["embed_tokens"]}),
    "some layers": lora(layers_to_transform=[1]),
    "all linear layers": lora(target_modules="all-linear"),
    "embeddings": lora(target_modules=[*PROJECTIONS, "embed_tokens"]),
    "embeddings of a tied model": lora("llama-tied", target_modules=[*PROJECTIONS, "embed_tokens"]),
    "encoder and decoder": lora("flan-t5", target_modules=["q", "v", "wo"], task_type="SEQ_2_SEQ_LM"),
    "embeddings of encoder and decoder": lora("flan-t5", target_modules=["q", "embed_tokens"]),
    "classifier": lora("bert", target_modules=["query", "dense"], task_type="SEQ_CLS"),
}


@dataclass(frozen=True)
class Trained:
    """A base and an adapter on disk."""

    kind: Kind
    base: Path
    adapter: Path
    batch: dict[str, Tensor]

    def peft_model(self, dtype: torch.dtype = torch.float32) -> PeftModel:
        """What PEFT makes of the two."""
        model = self.kind.base()
        loaded = type(model).from_pretrained(self.base, dtype=dtype)
        return PeftModel.from_pretrained(loaded, self.adapter).eval()

    def adapted(self, dtype: torch.dtype = torch.float32) -> AdaptedModel:
        """What we make of them, the base saved in some precision."""
        folder = self.base
        if dtype != torch.float32:
            folder = self.base.with_name(str(dtype))
            model = self.kind.base()
            type(model).from_pretrained(self.base, dtype=dtype).save_pretrained(folder)
        return AdaptedModel(
            StreamedModel(open_checkpoint(folder), type(self.kind.base()), read_config(folder)),
            open_adapter(self.adapter),
        )


def train(model: PeftModel, batch: dict[str, Tensor], steps: int = 4) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=0.05)
    for _ in range(steps):
        optimiser.zero_grad()
        model(**batch).loss.backward()
        optimiser.step()


def batch_for(model: PreTrainedModel) -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, 20, (3, 10))
    ids[0, :3] = torch.tensor([3, 4, 5])
    labels = torch.tensor([0, 1, 0]) if "Classification" in type(model).__name__ else ids
    return {"input_ids": ids, "labels": labels}


def make(kind: Kind, root: Path) -> Trained:
    base = kind.base()
    base.save_pretrained(root / "base")
    batch = batch_for(base)
    model = peft.get_peft_model(base, kind.config())
    train(model, batch)
    model.save_pretrained(root / "adapter")
    return Trained(kind, root / "base", root / "adapter", batch)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="peft")
        yield


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """Adapters by kind, each trained once: read them, don't change them."""
    made: dict[str, Trained] = {}

    def get(name: str) -> Trained:
        if name not in made:
            made[name] = make(KINDS[name], tmp_path_factory.mktemp("adapter"))
        return made[name]

    return get


def outputs_of_peft(model: PeftModel, batch: dict[str, Tensor], enabled: bool = True) -> dict[str, Tensor]:
    """Output of every block, and the logits, in PEFT's own forward."""
    seen: dict[str, Tensor] = {}

    def watch(path: str) -> Callable[..., None]:
        return lambda module, args, output: seen.update({path: first_tensor(output)})

    base = model.get_base_model()
    hooks = [block.register_forward_hook(watch(path)) for path, block in find_blocks(base).items()]
    with torch.no_grad():
        inputs = forward_inputs(base, batch).inputs
        if enabled:
            seen["logits"] = model(**inputs).logits
        else:
            with model.disable_adapter():
                seen["logits"] = model(**inputs).logits
    for hook in hooks:
        hook.remove()
    return seen


def outputs_of_ours(model: AdaptedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    with torch.no_grad(), parking(model.module):
        forward = ParkedForward(model.module, forward_inputs(model.module, batch).inputs)
        with model.outer():
            forward.start()
        while (call := forward.call) is not None:
            with model.block(call.path, CPU) as block:
                output = run_block(block, call)
            seen[call.path] = first_tensor(output)
            with model.outer():
                forward.resume(output)
    return {**seen, "logits": forward.result.logits}


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def tree(model: nn.Module) -> list[tuple[str, type, int]]:
    return [(name, type(module), id(module)) for name, module in model.named_modules()]


@pytest.mark.parametrize("name", KINDS)
def test_every_block_and_the_logits_are_those_of_pefts_own_forward(
    name: str, trained: Callable[[str], Trained]
) -> None:
    adapter = trained(name)
    wanted = outputs_of_peft(adapter.peft_model(), adapter.batch)
    without = outputs_of_peft(adapter.peft_model(), adapter.batch, enabled=False)
    model = adapter.adapted()
    before, parameters = tree(model.module), [name for name, _ in model.module.named_parameters()]
    found = outputs_of_ours(model, adapter.batch)
    assert list(found) == list(wanted)
    assert {path: error for path in wanted if (error := distance(found[path], wanted[path])) > 1e-5} == {}
    assert distance(without["logits"], wanted["logits"]) > 1e-3  # the adapter has learned something to lose
    assert tree(model.module) == before
    assert [name for name, _ in model.module.named_parameters()] == parameters
    assert all(parameter.is_meta for parameter in model.module.parameters())


@pytest.mark.parametrize("name", KINDS)
def test_over_a_bfloat16_base_blocks_are_merged_in_float32_and_cast_once(
    name: str, trained: Callable[[str], Trained]
) -> None:
    adapter = trained(name)
    rounded = adapter.peft_model(torch.bfloat16).get_base_model()
    base = type(rounded).from_pretrained(adapter.base, dtype=torch.bfloat16).float()
    merged = PeftModel.from_pretrained(base, adapter.adapter).merge_and_unload()
    reference = find_blocks(merged)
    model = adapter.adapted(torch.bfloat16)
    for path in model.base.blocks:
        with model.block(path, CPU) as block:
            found = dict(block.named_parameters())
            assert list(found) == [name for name, _ in reference[path].named_parameters()]
            for parameter, value in reference[path].named_parameters():
                assert found[parameter].dtype == torch.bfloat16
                assert torch.equal(found[parameter], value.bfloat16()), parameter
