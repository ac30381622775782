"""Nothing in a repository, a recipe or a dataset can run code here or read what lies outside its folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from families import FAMILIES, base_model, expert_model, save_side_files, write_data
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from test_bad_input import Harmless
from tiny_merge import Merge, Outcome, build_llama, contents

Featcal = Callable[..., Outcome]
HOSTILE = """
from pathlib import Path
Path({mark!r}).write_text("executed")
from transformers import CLIPImageProcessor, LlamaConfig, PreTrainedTokenizerFast
class Config(LlamaConfig):
    pass
class Tokenizer(PreTrainedTokenizerFast):
    pass
class Processor(CLIPImageProcessor):
    pass
"""


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "executed"


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def spoil_config(folder: Path, mark: Path) -> None:
    (folder / "hostile.py").write_text(HOSTILE.format(mark=str(mark)))
    edit_json(folder / "config.json", auto_map={"AutoConfig": "hostile.Config"}, model_type="hostile")


def spoil_tokenizer(folder: Path, mark: Path) -> None:
    (folder / "hostile.py").write_text(HOSTILE.format(mark=str(mark)))
    edit_json(
        folder / "tokenizer_config.json",
        auto_map={"AutoTokenizer": [None, "hostile.Tokenizer"]},
        tokenizer_class="Tokenizer",
    )


@pytest.mark.parametrize("spoil", [spoil_config, spoil_tokenizer], ids=["config", "tokenizer"])
@pytest.mark.parametrize("which", ["merged", "a", "base"])
def test_code_of_a_models_folder_is_not_run_unless_it_is_trusted(
    spoil: Callable[[Path, Path], None], which: str, merge: Merge, mark: Path, featcal: Featcal
) -> None:
    spoil(merge.root / which, mark)
    outcome = featcal(merge.recipe, merge.merged)
    assert outcome.code in (0, 1)
    assert "Traceback" not in outcome.errors
    assert not mark.exists()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the merge of an image tower, its base, one expert, their image processors and a recipe."""
    root, family = tmp_path_factory.mktemp("images"), FAMILIES["clip-vision"]
    base = base_model(family)
    for name, model in (("base", base), ("expert", expert_model(family, base, 1)), ("merged", base)):
        model.save_pretrained(root / name)
        save_side_files(family, root / name)
    rows = write_data(root / "rows")["left"]
    (root / "recipe.yml").write_text(
        f"merge_method: task_arithmetic\nbase_model: {root / 'base'}\nmodels:\n"
        f"  - {{model: {root / 'expert'}, parameters: {{weight: 0.3}}}}\ndtype: float32\nfeatcal:\n  samples: 4\n"
        f"  tasks: [{{model: {root / 'expert'}, dataset: {rows}, image: image}}]\n"
    )
    return root


@pytest.mark.parametrize("kind", ["CLIPImageProcessor", "Processor"])
@pytest.mark.parametrize("file", ["preprocessor_config.json", "processor_config.json"])
def test_code_that_comes_with_an_image_processor_is_run_only_where_it_is_trusted(
    kind: str, file: str, images: Path, mark: Path, tmp_path: Path, featcal: Featcal
) -> None:
    root = tmp_path / "copy"
    shutil.copytree(images, root)
    recipe = root / "recipe.yml"
    recipe.write_text(recipe.read_text().replace(f"{images}/", f"{root}/"))
    for name in ("base", "expert", "merged"):
        own = root / name / "preprocessor_config.json"
        settings = json.loads(own.read_text()) | {"image_processor_type": kind}
        settings["auto_map"] = {"AutoImageProcessor": "hostile.Processor", "AutoProcessor": "hostile.Processor"}
        own.unlink()
        nested = {"image_processor": settings, "auto_map": settings["auto_map"]}
        (root / name / file).write_text(json.dumps(settings if file == own.name else nested))
        (root / name / "hostile.py").write_text(HOSTILE.format(mark=str(mark)))
    outcome = featcal("check", recipe, root / "merged")
    assert outcome.code in (0, 1)
    assert "Traceback" not in outcome.errors
    assert not mark.exists()
    featcal("check", recipe, root / "merged", "--trust-remote-code")
    assert mark.exists(), "or the above says nothing"


def test_trusted_code_is_run_so_the_test_above_says_something(merge: Merge, mark: Path, featcal: Featcal) -> None:
    spoil_config(merge.merged, mark)
    featcal("check", merge.recipe, merge.merged, "--trust-remote-code")
    assert mark.exists()


def test_a_datasets_script_is_never_run(merge: Merge, mark: Path, featcal: Featcal) -> None:
    folder = merge.root / "rows"
    folder.mkdir()
    (folder / "rows.py").write_text(HOSTILE.format(mark=str(mark)))
    merge.edit_recipe(f"dataset: {merge.data}", f"dataset: {folder}")
    for trust in ([], ["--trust-remote-code"]):
        assert featcal(merge.recipe, merge.merged, *trust).code == 1
        assert not mark.exists()


def test_code_in_a_pickled_adapter_is_not_run(merge: Merge, mark: Path, featcal: Featcal) -> None:
    adapter = merge.root / "lora"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "base_model_name_or_path": str(merge.base), "task_type": "CAUSAL_LM"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"auto_mapping": {"parent_library": "os"}}))
    torch.save({"weight": Harmless(mark)}, adapter / "adapter_model.bin")
    text = merge.recipe.read_text().replace(f"model: {merge.expert},", f"model: {merge.base}+{adapter},")
    merge.recipe.write_text(text)
    outcome = featcal(merge.recipe, merge.merged)
    assert outcome.code == 1
    assert "adapter_model.bin can't be read" in outcome.errors
    assert not mark.exists()


def test_code_that_comes_with_an_adapter_is_not_run_trusted_or_not(
    merge: Merge, mark: Path, featcal: Featcal, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = merge.root / "lora"
    get_peft_model(build_llama(), LoraConfig(target_modules=["q_proj"])).save_pretrained(adapter)
    (adapter / "hostile.py").write_text(HOSTILE.format(mark=str(mark)))
    (adapter / "__init__.py").write_text(HOSTILE.format(mark=str(mark)))
    edit_json(
        adapter / "adapter_config.json",
        auto_mapping={"base_model_class": "Config", "parent_library": "hostile"},
        auto_map={"AutoConfig": "hostile.Config"},
        megatron_config={"hidden_size": 32},
        megatron_core="hostile",
    )
    shutil.copy(merge.base / "config.json", adapter / "config.json")
    edit_json(adapter / "config.json", auto_map={"AutoConfig": "hostile.Config"}, model_type="hostile")
    text = merge.recipe.read_text().replace(f"model: {merge.expert},", f"model: {merge.base}+{adapter},")
    merge.recipe.write_text(text)
    monkeypatch.chdir(adapter)
    monkeypatch.syspath_prepend(adapter)
    for command in (("check",), ("check", "--trust-remote-code"), ("calibrate", "--output", merge.root / "out")):
        outcome = featcal(*command[:1], merge.recipe, merge.merged, *command[1:])
        assert outcome.code in (0, 1)
        assert "Traceback" not in outcome.errors
        assert not mark.exists()


@pytest.mark.parametrize("shard", ["../b/model.safetensors", "/etc/passwd", "", ".."])
@pytest.mark.parametrize("which", ["merged", "a"])
def test_an_index_cannot_lead_out_of_its_folder(shard: str, which: str, merge: Merge, featcal: Featcal) -> None:
    folder = merge.root / which
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    before = contents(merge.root)
    outcome = featcal(merge.recipe, merge.merged)
    assert outcome.code == 1
    assert "a shard must lie in the checkpoint's own folder" in outcome.errors
    assert contents(merge.root) == before


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "pickle"])
def test_what_a_linked_shard_leads_to_is_never_written(pickled: bool, merge: Merge, featcal: Featcal) -> None:
    """The Hub's cache is made of links, so they are read through; in place, the link is replaced and not its target."""
    name, store = "model.safetensors", merge.root / "store"
    if pickled:
        name = "pytorch_model.bin"
        torch.save(load_file(merge.merged / "model.safetensors"), merge.merged / name)
        (merge.merged / "model.safetensors").unlink()
    shutil.move(merge.merged / name, store)
    (merge.merged / name).symlink_to(store)
    before = store.read_bytes()
    assert featcal(merge.recipe, merge.merged, "--quiet").code == 0
    assert store.read_bytes() == before
    assert not (merge.merged / name).is_symlink()


@pytest.mark.parametrize(
    "template",
    ["{text.__class__}", "{text.__class__.__mro__}", "{text[0].__class__}", "{text:{text.__class__}}"],
)
def test_a_template_reaches_columns_and_not_attributes(template: str, merge: Merge, featcal: Featcal) -> None:
    merge.edit_recipe("text: text", f'prompt: "{template}"')
    outcome = featcal("check", merge.recipe, merge.merged)
    assert outcome.code == 1
    assert "reaches into a value with a dot" in outcome.errors


@pytest.mark.parametrize(
    "template", ["{.__class__}", "{0.__class__}", "{:{.__class__}}", "{!r}", "{:>9}", "{}{}", "{name}", "a photo."]
)
def test_a_zero_shot_template_has_one_place_for_a_name_and_reaches_nothing_in_it(
    template: str, merge: Merge, featcal: Featcal
) -> None:
    zero_shot = f"eval: {{text_model: {merge.base}, templates: ['{template}']}}"
    merge.edit_recipe("text: text", f"image: text, {zero_shot}")
    outcome = featcal("check", merge.recipe, merge.merged)
    assert outcome.code == 2
    assert "should have one {}, the place of a class's name" in outcome.errors


@pytest.mark.parametrize(
    "attack",
    ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__.os.mkdir(MARK) }}"],
)
def test_a_chat_template_is_held_in_a_sandbox(attack: str, merge: Merge, mark: Path, featcal: Featcal) -> None:
    for which in ("merged", "base", "a", "b"):
        template = attack.replace("MARK", f"'{mark}'")
        edit_json(merge.root / which / "tokenizer_config.json", chat_template=template)
    rows = [{"chat": [{"role": "user", "content": "the cat sat"}]}] * 20
    merge.data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    merge.edit_recipe("text: text", "messages: chat")
    outcome = featcal("check", merge.recipe, merge.merged)
    assert outcome.code == 1
    assert "chat template" in outcome.errors
    assert not mark.exists()
    assert os.listdir(merge.root).count("executed") == 0
