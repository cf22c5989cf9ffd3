"""Test the language model of a vision-language checkpoint as a checkpoint of its own."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from qerl_recipes.convert.quantize import quantize_checkpoint
from qerl_recipes.convert.sources import write_text_model
from qerl_recipes.recipe.configs import parse
from qerl_recipes.tasks import running_sum
from qerl_recipes.train.preflight import check
from qerl_vllm_plugin.weights.checkpoint import inspect_folder
from qerl_vllm_plugin.weights.families import FAMILIES, LANGUAGE_MODELS, check_family
from qerl_vllm_plugin.wire.safetensors_file import CheckpointError

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
LINEAR = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 32}
TEXT = {
    "gemma3": {"query_pre_attn_scalar": 32, "sliding_window": 8},
    "qwen3_5": {**LINEAR, "linear_value_head_dim": 32, "layer_types": ["linear_attention", "full_attention"]},
    "qwen2_5_vl": {"rope_parameters": ROPE},
    "qwen3_vl": {"rope_parameters": {**ROPE, "mrope_interleaved": True}},
}
SIGLIP = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
VISION = {
    "gemma3": {**SIGLIP, "image_size": 28, "patch_size": 14},
    "qwen3_vl": {**TOWER, "deepstack_visual_indexes": []},
}
IDS = torch.tensor([[2, 9, 4, 17, 30, 11, 5, 8, 21, 40, 33, 7]])


def whole(kind: str, folder: Path, *, tied: bool = False) -> AutoModelForImageTextToText:
    """Write to ``folder`` a random BF16 model with vision and language halves and random norms."""
    torch.manual_seed(3)
    text = {**SIZES, **TEXT[kind], "tie_word_embeddings": tied}
    vision = VISION.get(kind, TOWER)
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, tie_word_embeddings=tied)
    model = AutoModelForImageTextToText.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if "norm" in name or parameter.dim() < 2 else parameter.shape[-1] ** -0.5
            parameter.copy_(("norm" in name) + scale * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model, ids=IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_the_language_model_alone_answers_as_the_whole(kind, tied, tmp_path):
    model = whole(kind, tmp_path / "whole", tied=tied)
    (tmp_path / "whole" / "preprocessor_config.json").write_text("{}")
    (tmp_path / "whole" / "tokenizer_config.json").write_text("{}")
    write_text_model(tmp_path / "whole", tmp_path / "text")
    config = json.loads((tmp_path / "text" / "config.json").read_text())
    assert config["model_type"] == LANGUAGE_MODELS[kind] in FAMILIES
    assert "mrope" not in json.dumps(config)  # with it, vLLM would expect three positions per token
    assert "vision_config" not in config and not (tmp_path / "text" / "preprocessor_config.json").exists()
    assert (tmp_path / "text" / "tokenizer_config.json").exists()
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "text", dtype=torch.float32).eval()
    assert (text.config.eos_token_id, text.config.pad_token_id) == (1, 0)
    torch.testing.assert_close(logits(text), logits(model), rtol=1e-4, atol=1e-4)


def test_both_layouts_of_names_are_known(tmp_path):
    model, folder = whole("gemma3", tmp_path / "whole"), tmp_path / "whole"
    tensors = load_file(folder / "model.safetensors")
    # the hub has these names; Qwen and some versions have the other ones
    assert "language_model.model.norm.weight" in tensors
    other = {
        name.replace("language_model.model.", "model.language_model.")
        .replace("vision_tower.", "model.vision_tower.")
        .replace("multi_modal_projector.", "model.multi_modal_projector.")
        .replace("language_model.lm_head.", "lm_head."): tensor
        for name, tensor in tensors.items()
    }
    assert not other.keys() & tensors.keys()
    save_file(other, folder / "model.safetensors", metadata={"format": "pt"})
    write_text_model(folder, tmp_path / "text")
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "text", dtype=torch.float32).eval()
    torch.testing.assert_close(logits(text), logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl"])
def test_promise_06_it_is_trained_as_any_text_checkpoint(kind, tmp_path, make_trainer, read_metrics):
    whole(kind, tmp_path / "whole")
    running_sum.tokenizer().save_pretrained(tmp_path / "whole")
    write_text_model(tmp_path / "whole", tmp_path / "text")
    quantize_checkpoint(tmp_path / "text", tmp_path / "nvfp4", quiet=True)
    trainer = make_trainer(tmp_path / "nvfp4", dtype=torch.float32, max_steps=1)
    assert any(name.endswith("weight_packed") for name in trainer.model.state_dict())
    trainer.train()
    assert read_metrics(trainer)[0]["logp_diff_mean"] < 1e-5


def packed_whole(kind: str, tmp_path: Path, *, w4a4: bool = False) -> tuple[Path, Path]:
    """Write a published-style checkpoint of both halves, whose language model's linears are in NVFP4.

    Also write that language model extracted first and quantized afterwards; return both folders.
    """
    whole(kind, tmp_path / "whole")
    write_text_model(tmp_path / "whole", tmp_path / "text")
    quantize_checkpoint(tmp_path / "text", tmp_path / "nvfp4", quiet=True)
    folder = tmp_path / "whole"
    tensors, packed = load_file(folder / "model.safetensors"), load_file(tmp_path / "nvfp4" / "model.safetensors")
    (embedding,) = [name for name in tensors if name.endswith("embed_tokens.weight")]
    prefix = embedding.removesuffix("embed_tokens.weight")
    for name, tensor in packed.items():
        module, _, suffix = name.replace("model.", prefix, 1).rpartition(".")
        if suffix in ("weight_packed", "weight_scale", "weight_global_scale"):
            tensors.pop(f"{module}.weight", None)
            tensors[f"{module}.{suffix}"] = tensor
            if w4a4:
                tensors[f"{module}.input_global_scale"] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = json.loads((tmp_path / "nvfp4" / "config.json").read_text())["quantization_config"]
    config["quantization_config"]["ignore"] = [
        "re:.*lm_head",
        "re:.*(visual|vision_tower|projector)",
        "re:.*in_proj_[ab]",
    ]
    if w4a4:
        (group,) = config["quantization_config"]["config_groups"].values()
        group["input_activations"] = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": "local"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, tmp_path / "nvfp4"


@pytest.mark.parametrize(("kind", "w4a4"), [*((kind, False) for kind in LANGUAGE_MODELS), ("gemma3", True)])
def test_a_packed_language_model_keeps_its_bytes(kind, w4a4, tmp_path):
    folder, wanted = packed_whole(kind, tmp_path, w4a4=w4a4)
    if w4a4:
        with pytest.raises(
            CheckpointError, match=r"activations of 4 bits.* write its weights alone with `qerl quantize"
        ):
            write_text_model(folder, tmp_path / "taken")
        quantize_checkpoint(folder, tmp_path / "weights", quiet=True)
        folder = tmp_path / "weights"
    write_text_model(folder, tmp_path / "taken")
    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "taken", wanted))
    assert ours.keys() == theirs.keys() and sum(name.endswith("weight_packed") for name in ours) >= 10
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    mine, its = (inspect_folder(path) for path in (tmp_path / "taken", wanted))
    assert mine.config["model_type"] == LANGUAGE_MODELS[kind] and set(mine.scheme.ignore) == set(its.scheme.ignore)
    assert mine.complete == its.complete


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_a_vision_language_checkpoint_is_refused(kind, tmp_path, write_recipe):
    whole(kind, tmp_path / "whole")
    message = f"{kind} reads images, too; take its language model: qerl text-model SOURCE DESTINATION"
    with pytest.raises(CheckpointError, match=message):
        quantize_checkpoint(tmp_path / "whole", tmp_path / "nvfp4")
    with pytest.raises(ValueError, match=f"{message} .*untested_models"):
        check_family(kind, untested_models=False)
    recipe = write_recipe(model_name_or_path=str(tmp_path / "whole"))
    for arm in ("qerl_nvfp4", "bf16"):
        with pytest.raises(ValueError, match=message):
            check(*parse(["--config", recipe, "--quantization", arm]))


def test_an_unknown_vision_tower_is_refused(make_bf16, tmp_path):
    config = json.loads((make_bf16("qwen2") / "config.json").read_text())
    folder = tmp_path / "other"
    folder.mkdir()
    save_file(load_file(make_bf16("qwen2") / "model.safetensors"), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "eye", "vision_config": {"depth": 1}}))
    with pytest.raises(CheckpointError, match="eye has a vision_config: models that also read images or sound"):
        quantize_checkpoint(folder, tmp_path / "nvfp4")
    with pytest.raises(CheckpointError, match="model_type 'eye' has no language model that is known here"):
        write_text_model(folder, tmp_path / "text")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight has shape none: it is missing"),
        (lambda t: t.update({"model.eyes.weight": torch.ones(1)}), r"model\.eyes\.weight is neither of the language"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(3)}),
            r"model\.norm\.weight has shape \(3,\) and qwen2 \(64,\)",
        ),
    ],
    ids=["missing", "unknown", "another shape"],
)
def test_a_layout_that_is_not_known_leaves_nothing_behind(change, message, tmp_path):
    whole("qwen2_5_vl", tmp_path / "whole")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "whole" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        write_text_model(tmp_path / "whole", tmp_path / "text")
    assert not (tmp_path / "text").exists()
