"""Test ``qerl export``: it writes a self-contained adapter folder, or base and adapter as one checkpoint."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from qerl_kernels.nvfp4 import dequantize
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from qerl_recipes import cli
from qerl_recipes.convert.export import export
from qerl_recipes.files.adapter import open_adapter
from qerl_recipes.files.run_state import base_hash
from qerl_recipes.model import loading as model
from qerl_vllm_plugin.weights.checkpoint import inspect_folder

Make = Callable[..., Path]
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "down_proj"], "bias": "none"}


@pytest.fixture
def trained(save_adapter: Make, make_nvfp4: Make, tmp_path: Path) -> Make:
    """Return trained(name="trained", base=None, norms=False, **state).

    It gives the folder of an adapter on a tiny Qwen2 in NVFP4.
    """

    def save(name: str = "trained", base: Path | None = None, norms: bool = False, **state: object) -> Path:
        base = base or make_nvfp4("qwen2")
        belongs = {"base": str(base), "base_hash": base_hash(base), "quantization": "qerl_nvfp4"}
        folder = save_adapter(tmp_path / name, 3, scale=0.2, **{**belongs, **state})
        (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, "base_model_name_or_path": str(base)}))
        if norms:
            norm = {"model.layers.1.input_layernorm.weight": torch.full((64,), 1.2345)}
            save_file(norm, folder / "norms.safetensors")
        return folder

    return save


def call(*words: object) -> Result:
    return CliRunner().invoke(cli.app, ["export", *map(str, words)])


@pytest.mark.parametrize("norms", [False, True])
def test_an_exported_adapter_loads_in_peft_and_knows_its_base(
    norms: bool, trained: Make, make_nvfp4: Make, make_bf16: Make, tmp_path: Path
) -> None:
    base, source = make_nvfp4("qwen2"), trained(norms=norms)
    (source / "optimizer.pt").write_bytes(b"x")
    folder = export(source, tmp_path / "exported")
    assert {file.name for file in folder.iterdir()} == {
        "adapter_model.safetensors",
        "adapter_config.json",
        "qerl_state.json",
        "README.md",
        *(["norms.safetensors"] if norms else []),
    }
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(make_bf16("qwen2")), folder)
    b = loaded.base_model.model.model.layers[1].mlp.down_proj.lora_B["default"].weight
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
    assert torch.equal(b, load_file(source / "adapter_model.safetensors")[name])
    card = (folder / "README.md").read_text()
    assert base_hash(base) in card and "vllm serve" in card
    assert ("do not travel in a LoRA request" in card) is norms
    with pytest.raises(ValueError, match="another base"):
        open_adapter(folder).check_base("0" * 64)


def dense(base: Path) -> dict[str, torch.Tensor]:
    """Return the checkpoint's weights in fp32; packed ones are value(code) * block scale / divisor."""
    tensors = load_file(base / "model.safetensors")
    whole = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight_packed")
        if module != name:
            w = dequantize(tensor, tensors[f"{module}.weight_scale"]).float() / tensors[f"{module}.weight_global_scale"]
            whole[f"{module}.weight"] = w
        elif not name.endswith(("weight_scale", "weight_global_scale")):
            whole[name] = tensor.float()
    return whole


@pytest.mark.parametrize("norms", [False, True])
def test_a_merge_has_pefts_weights_and_the_trained_norms(
    norms: bool, trained: Make, make_nvfp4: Make, make_bf16: Make, tmp_path: Path
) -> None:
    base, adapter = make_nvfp4("qwen2"), trained(norms=norms)
    merged = export(adapter, tmp_path / "merged", merge=True)
    report = inspect_folder(merged)
    assert report.scheme is None and report.complete

    reference = AutoModelForCausalLM.from_pretrained(make_bf16("qwen2"), dtype=torch.float32)
    missing = reference.load_state_dict(dense(base), strict=False)
    assert not missing.unexpected_keys
    reference = PeftModel.from_pretrained(reference, adapter).merge_and_unload()
    expected = {name: weight.to(torch.bfloat16) for name, weight in reference.state_dict().items()}
    if norms:
        trained = torch.full((64,), 1.2345).to(torch.bfloat16)
        assert not torch.equal(expected["model.layers.1.input_layernorm.weight"], trained)
        expected["model.layers.1.input_layernorm.weight"] = trained
    written = load_file(merged / "model.safetensors")
    assert written.keys() <= expected.keys()
    for name, weight in written.items():
        torch.testing.assert_close(weight, expected[name], rtol=2**-8, atol=1e-6, msg=name)  # one step of BF16

    ids = torch.arange(3, 19)[None]
    trainer = PeftModel.from_pretrained(model.load(base), adapter)
    if norms:
        from qerl_recipes.model.norms import load_norms

        assert load_norms(trainer.get_base_model(), adapter) == 1
    ours = trainer(input_ids=ids).logits.float()
    theirs = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.bfloat16)(input_ids=ids).logits.float()
    without = model.load(base)(input_ids=ids).logits.float()
    assert (ours - theirs).abs().mean() < 0.1 * (ours - without).abs().mean()


def test_merging_onto_a_bf16_base_quantizes_it_first(
    trained: Make, make_bf16: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapters = [trained("a", make_bf16("qwen2")), trained("b"), trained("c", make_bf16("qwen2"), quantization="bf16")]
    capsys.readouterr()
    one, two, three = (
        load_file(export(adapter, tmp_path / f"merged-{adapter.name}", merge=True) / "model.safetensors")
        for adapter in adapters
    )
    assert one.keys() == two.keys() == three.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    untouched = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(three[untouched], load_file(make_bf16("qwen2") / "model.safetensors")[untouched])
    assert not torch.equal(one[untouched], three[untouched])
    assert not (tmp_path / "merged-a" / "packed").exists()
    assert "packed" not in capsys.readouterr().out  # a folder that is already gone is not mentioned


def test_a_merge_keeps_the_shards_and_copies_no_other_weights(trained: Make, make_bf16: Make, tmp_path: Path) -> None:
    base = shutil.copytree(make_bf16("qwen2"), tmp_path / "base")
    (base / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(make_bf16("qwen2")).save_pretrained(base, max_shard_size="60KB")
    weights = ("model.h5", "flax_model.msgpack", "model.onnx", "model.gguf", "pytorch_model.bin", "model.pt", "m.pth")
    for name in (*weights, "README.md", "LICENSE", "pytorch_model.bin.index.json", ".gitattributes"):
        (base / name).write_text("the base's")
    adapter = trained(base=base, quantization="bf16")
    merged = export(adapter, tmp_path / "merged", merge=True)
    report = inspect_folder(merged)
    assert len(report.files) == len(inspect_folder(base).files) > 1
    index = json.loads((merged / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in report.tensors.values())
    left_out = {*weights, "pytorch_model.bin.index.json", ".gitattributes"}
    assert {file.name for file in merged.iterdir()} == {file.name for file in base.iterdir()} - left_out
    card = (merged / "README.md").read_text()
    assert f"vllm serve {merged}" in card and open_adapter(adapter).sha256() in card and str(base) not in card


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
NORM = {"model.layers.9.input_layernorm.weight": torch.ones(64)}


@pytest.mark.parametrize(
    ("state", "change", "message"),
    [
        ({}, lambda folder, tensors: tensors.update({A: torch.full((4, 64), torch.nan)}), "NaN or infinite"),
        ({}, lambda folder, tensors: tensors.pop(A), "is missing; save the whole adapter again"),
        ({}, lambda folder, tensors: save_file(NORM, folder / "norms.safetensors"), "no such tensor"),
        ({}, lambda folder, tensors: (folder / "norms.safetensors").write_bytes(b"\xff" * 100), "is damaged"),
        ({"base_hash": "0" * 64}, None, "trained on another base"),
        ({"quantization": "nf4"}, None, "NF4 weights, which are not merged"),
    ],
    ids=["nan", "half", "norms", "file", "hash", "arm"],
)
def test_a_spoiled_adapter_is_refused_and_nothing_is_written(
    state: dict[str, str], change: Any, message: str, trained: Make, tmp_path: Path
) -> None:
    adapter = trained(**state)
    if change is not None:
        tensors = load_file(adapter / "adapter_model.safetensors")
        change(adapter, tensors)
        save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=message):
        export(adapter, tmp_path / "merged", merge=True)
    assert [path.name for path in tmp_path.iterdir()] == ["trained"]


def test_a_full_destination_is_kept_unless_overwriting(trained: Make, tmp_path: Path) -> None:
    adapter = trained()
    export(adapter, tmp_path / "out")
    (tmp_path / "out" / "mine.txt").write_text("x")
    with pytest.raises(FileExistsError):
        export(adapter, tmp_path / "out")
    assert (tmp_path / "out" / "mine.txt").exists()
    export(adapter, tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "mine.txt").exists()


def test_a_name_is_of_the_adapter_in_the_cards_commands(trained: Make, tmp_path: Path) -> None:
    adapter = trained()
    for options, name in (((), "policy"), (("--name", "mine"), "mine")):
        assert call(adapter, tmp_path / name, *options).exit_code == 0
        assert f"--lora-modules {name}={tmp_path / name}" in (tmp_path / name / "README.md").read_text()
    refused = call(adapter, tmp_path / "merged", "--merge", "--name", "policy").exception
    assert isinstance(refused, ValueError) and "name 'policy' is of an adapter" in str(refused)


def test_an_adapter_without_a_base_asks_for_one(trained: Make, make_nvfp4: Make, tmp_path: Path) -> None:
    adapter = trained()
    (adapter / "qerl_state.json").unlink()
    (adapter / "adapter_config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ValueError, match="name it with --base"):
        export(adapter, tmp_path / "out")
    export(adapter, tmp_path / "out", base=str(make_nvfp4("qwen2")))
    assert json.loads((tmp_path / "out" / "qerl_state.json").read_text())["base_hash"]
