"""Test damaged checkpoints of each family in the table, packed by `qerl quantize`. The refusal names the tensor or key
and the way out. A missing tensor outside the packed linears is noticed by an engine while it loads."""

import json
import re

import pytest
import torch

from qerl_vllm_plugin.weights.checkpoint import inspect_folder
from qerl_vllm_plugin.weights.families import FAMILIES
from qerl_vllm_plugin.wire.safetensors_file import CheckpointError

KNOWN = ("qwen2", "qwen3", "llama", "mistral", "qwen3_moe")  # families whose tensors are known without the model's code


def a_linear(tensors: dict[str, torch.Tensor]) -> str:
    """Return the name of a linear of the last layer, preferably an expert's."""
    names = sorted(name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed"))
    return next((name for name in names if ".layers.1.mlp.experts.2." in name), names[-1])


def pop(leaf: str):
    return lambda tensors, name: tensors.pop(f"{name}.{leaf}")


def change(leaf: str, how):
    return lambda tensors, name: tensors.update({f"{name}.{leaf}": how(tensors[f"{name}.{leaf}"])})


WAY_OUT = "; (download or quantize the checkpoint again|start from the BF16 checkpoint and run)"
TWINS = {
    "no codes": (pop("weight_packed"), "weight_packed"),
    "no block scales": (pop("weight_scale"), "weight_scale"),
    "no tensor scale": (pop("weight_global_scale"), "weight_global_scale"),
    "block scales in FP32": (change("weight_scale", torch.Tensor.float), "weight_scale"),
    "a tensor scale a row": (change("weight_global_scale", lambda t: t.repeat(2)), "weight_global_scale"),
}


@pytest.fixture
def copy(make_nvfp4, edited):
    """copy(family, change) returns an edited checkpoint after ``change(tensors)``."""
    return lambda family, edit: edited(make_nvfp4(family), edit)


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_damaged_linear_is_named(family, twin, copy):
    edit, leaf = TWINS[twin]
    named = []

    def damage(tensors):
        named.append(a_linear(tensors))
        edit(tensors, named[0])

    folder = copy(family, damage)
    with pytest.raises(CheckpointError, match=rf"{re.escape(named[0])}\.(weight_packed|{leaf})\b.*{WAY_OUT}"):
        inspect_folder(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_linear_both_excluded_and_packed_is_named(family, copy):
    named = []
    folder = copy(family, lambda tensors: named.append(a_linear(tensors)))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"].append(named[0])
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"{re.escape(named[0])}\.\w+ is quantized, but .* lists {named[0]}"):
        inspect_folder(folder)


@pytest.mark.usefixtures("torchvision")
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in KNOWN])
def test_a_missing_norm_is_named_by_an_engine(family, copy, boot):
    norm = "model.layers.1.input_layernorm.weight"
    norm = "model.layers.1.post_attention_layernorm.weight" if family == "olmo2" else norm
    folder = copy(family, lambda tensors: tensors.pop(norm))
    with pytest.raises(CheckpointError, match=re.escape(f"lacks {norm}")):
        boot(folder)
