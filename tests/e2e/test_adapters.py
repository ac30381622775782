"""Adapters as experts: each kind that PEFT makes is, block by block, the model that PEFT itself runs."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import peft
import pytest
import torch
from families import FAMILIES
from peft import LoraConfig, PeftConfig, PeftModel
from safetensors.torch import load_file
from test_streaming import cached_repo, resident_bytes
from tiny_merge import Merge, build_llama, change_tensors, contents, loaded_state, run_mergekit
from torch import Tensor, nn
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedModel

from featcal_hf import calibrate, calibrate_model
from featcal_hf.checkpoint import open_checkpoint
from featcal_hf.errors import CheckpointError
from featcal_hf.experts import AdaptedModel, open_adapter
from featcal_hf.forward import ParkedForward, find_blocks, first_tensor, forward_inputs, parking, run_block
from featcal_hf.models import ResidentAdapter
from featcal_hf.preparation import Prepared, prepare
from featcal_hf.run import calibrate_prepared
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


OLD_CONFIG = {  # every key that PEFT 0.6 wrote, and two that are gone since 0.1
    "alpha_pattern": {},
    "auto_mapping": None,
    "base_model_name_or_path": "org/llama",
    "bias": "none",
    "enable_lora": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layers_pattern": None,
    "layers_to_transform": None,
    "lora_alpha": 8,
    "lora_dropout": 0.05,
    "merge_weights": False,
    "modules_to_save": None,
    "peft_type": "LORA",
    "r": 4,
    "rank_pattern": {},
    "revision": None,
    "target_modules": PROJECTIONS,
    "task_type": "CAUSAL_LM",
}


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "pickle from before PyTorch 1.6"])
def test_an_adapter_with_the_config_and_pickle_of_peft_0_6_is_the_same_expert(
    zipped: bool, trained: Callable[[str], Trained], tmp_path: Path
) -> None:
    new = trained("lora")
    tensors = load_file(new.adapter / "adapter_model.safetensors")
    torch.save(tensors, tmp_path / "adapter_model.bin", _use_new_zipfile_serialization=zipped)
    (tmp_path / "adapter_config.json").write_text(json.dumps(OLD_CONFIG))
    found = outputs_of_ours(replace(new, adapter=tmp_path).adapted(), new.batch)
    wanted = outputs_of_ours(new.adapted(), new.batch)
    assert all(torch.equal(found[path], wanted[path]) for path in wanted)


@dataclass(frozen=True)
class AdaptedMerge:
    """A merge of the full expert a with the adapters x and y of one base."""

    root: Path

    @property
    def recipe(self) -> Path:
        return self.root / "recipe.yml"

    @property
    def merged(self) -> Path:
        return self.root / "merged"

    @property
    def adapter(self) -> Path:
        return self.root / "x"

    @property
    def weights(self) -> Path:
        return self.adapter / "adapter_model.safetensors"

    def prepare(self, **options: Any) -> Prepared:
        return prepare(self.recipe, self.merged, **options)

    def edit_config(self, folder: str = "x", name: str = "adapter_config.json", **changes: Any) -> None:
        path = self.root / folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    def train(self, config: PeftConfig, folder: str = "x", base: PreTrainedModel | None = None) -> None:
        """Put another adapter in the place of one."""
        shutil.rmtree(self.root / folder, ignore_errors=True)
        model = base or LlamaForCausalLM.from_pretrained(self.root / "base")
        adapted = peft.get_peft_model(model, config)
        train(adapted, batch_for(model))
        adapted.save_pretrained(self.root / folder)


def write_adapted_recipe(root: Path, experts: dict[str, str]) -> None:
    """A recipe whose experts are given by data file -> reference."""
    listed = "".join(f"  - {{model: {model}, parameters: {{weight: 0.4}}}}\n" for model in experts.values())
    tasks = "".join(
        f"    - {{name: {name}, model: {model}, dataset: {root / name}.jsonl, text: text}}\n"
        for name, model in experts.items()
    )
    (root / "recipe.yml").write_text(
        f"merge_method: task_arithmetic\nbase_model: {root / 'base'}\nmodels:\n{listed}dtype: float32\n"
        f"featcal:\n  samples: 12\n  holdout: 4\n  tasks:\n{tasks}"
    )


@pytest.fixture(scope="session")
def pristine_adapted(pristine: Merge, tmp_path_factory: pytest.TempPathFactory) -> AdaptedMerge:
    """Read it, don't change it."""
    root = tmp_path_factory.mktemp("adapted")
    for name in ("base", "a"):
        shutil.copytree(pristine.root / name, root / name)
    shutil.copyfile(pristine.root / "a.jsonl", root / "a.jsonl")
    made = AdaptedMerge(root)
    for name, config in (("x", LoraConfig(r=4, target_modules=PROJECTIONS)), ("y", KINDS["dora"].config())):
        made.train(config, name)
        shutil.copyfile(pristine.root / "b.jsonl", root / f"{name}.jsonl")
    write_adapted_recipe(root, {"a": f"{root}/a", "x": f"{root}/base+{root}/x", "y": f"{root}/base+{root}/y"})
    run_mergekit(made.recipe, made.merged, "--lora-merge-cache", str(root / "cache"))
    return made


@pytest.fixture
def adapted_merge(pristine_adapted: AdaptedMerge, tmp_path: Path) -> AdaptedMerge:
    """A copy of the merge, for one test to change."""
    shutil.copytree(pristine_adapted.root, tmp_path, dirs_exist_ok=True)
    copied = AdaptedMerge(tmp_path)
    copied.recipe.write_text(copied.recipe.read_text().replace(str(pristine_adapted.root), str(tmp_path)))
    return copied


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(distance(one[name], other[name]) for name in one)


def test_two_adapters_on_one_base_calibrate_like_the_full_models_that_peft_merges(
    adapted_merge: AdaptedMerge, tmp_path: Path
) -> None:
    full = tmp_path / "full"
    shutil.copytree(tmp_path / "base", full / "base")
    shutil.copytree(tmp_path / "a", full / "a")
    for name in ("a", "x", "y"):
        shutil.copyfile(tmp_path / f"{name}.jsonl", full / f"{name}.jsonl")
    for name in ("x", "y"):
        base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
        merged = PeftModel.from_pretrained(base, tmp_path / name).merge_and_unload()
        shutil.copytree(full / "base", full / name)
        merged.save_pretrained(full / name)
    write_adapted_recipe(full, {name: f"{full}/{name}" for name in ("a", "x", "y")})
    run_mergekit(full / "recipe.yml", full / "merged")
    uncalibrated = loaded_state(full / "merged")
    others = {path: digest for path, digest in contents(tmp_path).items() if not path.startswith("merged")}

    report = calibrate(adapted_merge.recipe, adapted_merge.merged)
    after = contents(tmp_path)
    assert {path: after.get(path) for path in others} == others
    assert {path for path in after if not path.startswith("merged")} == set(others)

    calibrate(full / "recipe.yml", full / "merged")
    assert largest_difference(loaded_state(adapted_merge.merged), loaded_state(full / "merged")) < 1e-5
    assert largest_difference(loaded_state(adapted_merge.merged), uncalibrated) > 1e-3
    assert report.as_dict()["models"][f"expert {tmp_path}/base+{tmp_path}/y"]["adapter"] == str(tmp_path / "y")


def test_of_an_adapted_expert_no_more_than_a_block_is_ever_in_memory(adapted_merge: AdaptedMerge) -> None:
    prepared = adapted_merge.prepare()
    models = prepared.models.all()
    experts = [model for label, model in models.items() if label.startswith("expert")]
    assert len(experts) == 3
    together: list[int] = []
    for model in models.values():
        for block in model.blocks.values():
            block.register_forward_pre_hook(lambda *_: together.append(sum(map(resident_bytes, experts))))
    calibrate_prepared(prepared, None, CPU, lambda step: None, 0.0)
    assert max(together) == max(experts[0].block_bytes(path) for path in experts[0].blocks)
    assert all(resident_bytes(model) == 0 for model in models.values())


def test_an_adapter_is_taken_at_the_revision_that_the_recipe_names(adapted_merge: AdaptedMerge) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    root = adapted_merge.root
    snapshot = cached_repo(root / "hub", adapted_merge.adapter, "org/lora", commit)
    adapted_merge.recipe.write_text(
        adapted_merge.recipe.read_text().replace(f"base+{root}/x,", f"base+org/lora@{commit},")
    )
    shutil.rmtree(adapted_merge.adapter)
    adapters = adapted_merge.prepare(cache_dir=str(root / "hub")).models.adapters()
    checkpoint = adapters[f"expert {root}/base+org/lora@{commit}"].checkpoint
    assert (checkpoint.folder, checkpoint.revision) == (snapshot, commit)


class Broken(NamedTuple):
    """A way to break the adapter x, and what the message must say."""

    spoil: Callable[[AdaptedMerge], object]
    says: tuple[str, ...]


TENSOR = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
SHORT = TENSOR.removeprefix("base_model.model.")
FOREIGN = "model.layers.9.mlp.up_proj.lora_A.weight"


def put(value: float) -> Callable[[AdaptedMerge], None]:
    def spoil(merge: AdaptedMerge) -> None:
        change_tensors(merge.weights, lambda tensors: tensors[TENSOR].view(-1)[5:6].fill_(value))

    return spoil


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("q_proj", "old_proj"): tensors.pop(name) for name in list(tensors) if "q_proj" in name}


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def only_truncated_pickle(merge: AdaptedMerge) -> None:
    torch.save(load_file(merge.weights), merge.adapter / "adapter_model.bin")
    merge.weights.unlink()
    truncate(merge.adapter / "adapter_model.bin")


def prompt(config: type[PeftConfig]) -> Callable[[AdaptedMerge], None]:
    return lambda merge: merge.train(config(task_type="CAUSAL_LM", num_virtual_tokens=3))


WRONG_BASE = "name the base that it was trained on"
AGAIN = "download the adapter again"
BROKEN = {
    "a missing tensor": Broken(
        lambda merge: change_tensors(merge.weights, lambda tensors: tensors.__delitem__(TENSOR)),
        ("doesn't fit", "1 that its config asks for are missing", SHORT, WRONG_BASE, AGAIN),
    ),
    "a foreign tensor": Broken(
        lambda merge: change_tensors(
            merge.weights, lambda tensors: tensors.update({f"base_model.model.{FOREIGN}": torch.ones(4, 32)})
        ),
        ("doesn't fit", "1 of its tensors have no place there", FOREIGN, WRONG_BASE),
    ),
    "names that PEFT converts from an older transformers": Broken(
        lambda merge: change_tensors(merge.weights, lambda tensors: tensors.update(renamed(tensors))),
        ("6 of its tensors have no place there", "model.layers.0.self_attn.old_proj.lora_A.weight", "merge_and_unload"),
    ),
    "another width": Broken(
        lambda merge: merge.train(LoraConfig(r=4, target_modules=PROJECTIONS), base=build_llama(hidden_size=64)),
        ("doesn't fit", "mlp.down_proj.lora_B.weight is (64, 4), expected (32, 4)", WRONG_BASE),
    ),
    "another depth": Broken(
        lambda merge: merge.train(LoraConfig(r=4, target_modules=PROJECTIONS), base=build_llama(num_hidden_layers=2)),
        ("doesn't fit", "model.layers.2.", WRONG_BASE),
    ),
    "another rank in its config": Broken(
        lambda merge: merge.edit_config(r=8), ("lora_A.weight is (4, ", "expected (8, ", WRONG_BASE)
    ),
    "modules that the base hasn't": Broken(
        lambda merge: merge.edit_config(target_modules=["c_attn"]), ("can't be put on", "c_attn", WRONG_BASE)
    ),
    "no config": Broken(
        lambda merge: (merge.adapter / "adapter_config.json").unlink(), ("has no adapter_config.json", "after the '+'")
    ),
    "a config that is no JSON": Broken(
        lambda merge: truncate(merge.adapter / "adapter_config.json"), ("adapter_config.json can't be read", AGAIN)
    ),
    "a method that PEFT doesn't know": Broken(
        lambda merge: merge.edit_config(peft_type="LORA9000"), ("adapter_config.json can't be read", "LORA9000")
    ),
    "no weights": Broken(
        lambda merge: merge.weights.unlink(), ("adapter_model.safetensors", "incomplete", "download it again")
    ),
    "weights without tensors": Broken(
        lambda merge: change_tensors(merge.weights, lambda tensors: tensors.clear()), ("holds no tensors", AGAIN)
    ),
    "truncated safetensors": Broken(lambda merge: truncate(merge.weights), ("adapter_model.safetensors", "truncated")),
    "a truncated pickle": Broken(only_truncated_pickle, ("adapter_model.bin", "truncated")),
    "NaN": Broken(put(float("nan")), ("adapter_model.safetensors", TENSOR, "NaN", "download it again")),
    "infinity": Broken(put(float("inf")), ("adapter_model.safetensors", TENSOR, "infinity", "download it again")),
    "prefix tuning": Broken(prompt(peft.PrefixTuningConfig), ("PREFIX_TUNING", "adds inputs", "LoRA")),
    "prompt tuning": Broken(prompt(peft.PromptTuningConfig), ("PROMPT_TUNING", "adds inputs", "LoRA")),
    "vectors shared by all layers": Broken(
        lambda merge: merge.train(peft.VeraConfig(r=4, target_modules=["q_proj"])),
        ("VERA", "expected one of LORA", "merge_and_unload"),
    ),
    "a delta that depends on the tokens": Broken(
        lambda merge: merge.edit_config(alora_invocation_tokens=[3], task_type="CAUSAL_LM"),
        ("can't be put on", "aLoRA does not support merging", "merge_and_unload"),
    ),
    "a quantised base": Broken(
        lambda merge: merge.edit_config("base", "config.json", quantization_config={"quant_method": "fp8"}),
        ("base is quantised", "full-precision", "name that one"),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_adapter_is_refused_before_any_forward_with_what_to_do(
    name: str, adapted_merge: AdaptedMerge, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = BROKEN[name]
    broken.spoil(adapted_merge)
    monkeypatch.setattr(LlamaForCausalLM, "forward", lambda *_, **__: pytest.fail("a forward was started"))
    with pytest.raises(CheckpointError) as refusal:
        adapted_merge.prepare()
    message = str(refusal.value)
    assert [part for part in broken.says if part not in message] == [], message
    assert str(adapted_merge.root / ("base" if "base is" in message else "x")) in message


def test_an_adapter_of_another_head_is_an_expert_as_a_model_of_another_head_is(
    adapted_merge: AdaptedMerge,
) -> None:
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=PROJECTIONS, task_type="SEQ_CLS", modules_to_save=["score"])
    classifier = LlamaForSequenceClassification.from_pretrained(adapted_merge.root / "base")
    classifier.config.pad_token_id = 1
    adapted_merge.train(config, base=classifier)
    assert any("score" in name for name in load_file(adapted_merge.weights))
    calibrate(adapted_merge.recipe, adapted_merge.merged)


IN_MEMORY = [
    *("lora", "rank and alpha patterns", "dora", "pissa", "ia3", "loha", "oft", "fan in, fan out", "biases"),
    *("norms and head saved", "both fused experts", "tokens beside lora", "embeddings", "encoder and decoder"),
]


@pytest.mark.parametrize("name", IN_MEMORY)
def test_a_peft_model_in_memory_calibrates_like_its_merged_expert_and_stays_as_it_was(
    name: str, trained: Callable[[str], Trained]
) -> None:
    adapter = trained(name)
    model = adapter.peft_model().train()
    model.get_base_model().lm_head.eval()
    expert = copy.deepcopy(model).eval().merge_and_unload()
    base = type(expert).from_pretrained(adapter.base)
    results = []
    state = {key: value.clone() for key, value in model.state_dict().items()}
    before, modes = tree(model), [module.training for module in model.modules()]
    for given in (expert, model):
        merged = halfway(base, expert)
        calibrate_model(
            merged, base=base, experts={"a": given, "b": base}, batches={"a": batches(adapter), "b": batches(adapter)}
        )
        results.append(dict(merged.state_dict()))
    assert largest_difference(*results) < 1e-5
    assert largest_difference(results[0], dict(halfway(base, expert).state_dict())) > 1e-3
    assert tree(model) == before
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert model.state_dict().keys() == state.keys()


def batches(adapter: Trained) -> list[dict[str, Tensor]]:
    torch.manual_seed(2)
    return [{**adapter.batch, "input_ids": torch.randint(3, 20, (8, 12)), "labels": torch.randint(3, 20, (8, 12))}]


def halfway(base: PreTrainedModel, expert: PreTrainedModel) -> PreTrainedModel:
    merged = type(base)(copy.deepcopy(base.config)).eval()
    own, other = base.state_dict(), expert.state_dict()
    merged.load_state_dict({name: (value + other[name]) / 2 for name, value in own.items()})
    return merged


def test_the_base_inside_a_peft_model_is_taken_without_its_adapters(trained: Callable[[str], Trained]) -> None:
    adapter = trained("lora")
    model, base = adapter.peft_model(), LlamaForCausalLM.from_pretrained(adapter.base)
    results = []
    for given in (base, model.get_base_model()):
        merged = halfway(base, copy.deepcopy(model).merge_and_unload())
        calibrate_model(merged, base=given, experts={"a": model}, batches={"a": batches(adapter)})
        results.append(dict(merged.state_dict()))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("name", ["lora", "dora", "rank and alpha patterns"])
def test_in_memory_a_bfloat16_adapter_and_base_are_merged_in_float32_and_cast_once(
    name: str, trained: Callable[[str], Trained]
) -> None:
    adapter = trained(name)
    model = adapter.peft_model().bfloat16()
    wanted = find_blocks(copy.deepcopy(model).float().merge_and_unload())
    resident = ResidentAdapter(model.get_base_model(), merge=True)
    for path, reference in wanted.items():
        with resident.block(path, CPU) as block:
            found = dict(block.named_parameters())
            assert found.keys() == dict(reference.named_parameters()).keys()
            assert all(torch.equal(found[key], value.bfloat16()) for key, value in reference.named_parameters())


def test_a_disabled_adapter_is_no_part_of_the_expert(trained: Callable[[str], Trained]) -> None:
    adapter = trained("norms and head saved")
    model, base = adapter.peft_model(), LlamaForCausalLM.from_pretrained(adapter.base)
    resident = ResidentAdapter(model.get_base_model(), merge=True)
    with model.disable_adapter(), resident.block("layers.0", CPU) as block:
        found = {name: value.clone() for name, value in block.named_parameters()}
    assert all(torch.equal(found[name], value) for name, value in base.model.layers[0].named_parameters())


def test_models_in_memory_that_are_no_base_or_no_expert_are_refused(trained: Callable[[str], Trained]) -> None:
    lora_model, pissa = trained("lora").peft_model(), trained("pissa").peft_model()
    plain = build_llama()
    prompts = peft.get_peft_model(build_llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    quantised = build_llama()
    quantised.config.quantization_config = {"quant_method": "fp8"}
    merged_in = trained("lora").peft_model()
    merged_in.merge_adapter()

    def refused(says: str, **models: Any) -> None:
        given = {"merged": plain, "experts": {"a": lora_model}, "base": None, **models}
        with pytest.raises(CheckpointError, match=says):
            calibrate_model(given.pop("merged"), **given, batches={"a": batches(trained("lora"))})

    refused("moved a part of its weights into the adapter; load the base", base=pissa.get_base_model())
    refused("an adapter is merged into it; load the base", base=merged_in.get_base_model())
    refused("expert a has a PROMPT_TUNING adapter, which adds inputs", experts={"a": prompts})
    refused(r"the merged model has PEFT's layers .* merge_and_unload", merged=lora_model.get_base_model())
    refused("expert a is quantised; load it in full precision", experts={"a": quantised})
    wide = peft.get_peft_model(build_llama(hidden_size=64), LoraConfig(target_modules=["q_proj"]))
    refused("block layers.0 is self_attn.q_proj.weight 64x64", experts={"a": wide})
