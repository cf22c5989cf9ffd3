"""What the plugin cannot serve is refused while the engine starts, by name, with a way out."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl_vllm_plugin.options import Options

WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}


@pytest.fixture
def folder(make_nvfp4, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(make_nvfp4("qwen2"), tmp_path / "copy")


def refusal(boot, folder, **options) -> str:
    """The text of the exception that ends the start of the engine, with those that it was raised from."""
    with pytest.raises(Exception) as caught:
        boot(folder, **options)
    text, error = "", caught.value
    while error is not None:
        text += f"{type(error).__name__}: {error}\n"
        error = error.__cause__ or error.__context__
    return text


def edit(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ignored": []}, "unknown key 'ignored'"),
        ({"ignore": "lm_head"}, '"qerl.ignore" must be a list'),
        ({"ignore": [1]}, '"qerl.ignore" must be a list'),
        (["ignore"], '"qerl" must be an object'),
        ({"policy_adapter": 8}, '"qerl.policy_adapter" must be {"rank": R}'),
        ({"policy_adapter": {"rank": 513}}, "from 1 to 512"),
        ({"policy_adapter": {"rank": 8, "alpha": 1}}, '"qerl.policy_adapter" must be {"rank": R}'),
        ({"weight_only": 1}, '"qerl.weight_only" must be true or false'),
        ({"untested_models": "yes"}, '"qerl.untested_models" must be true or false'),
        ({"kernel": "cutlass"}, "it is one of auto, tiled, marlin, dequantize"),
        ({"kernel": "tiled"}, '"tiled" needs a Hopper GPU'),
        ({"kernel": "marlin"}, '"marlin" needs an NVIDIA GPU'),
    ],
    ids=[
        "unknown_key",
        "a_string",
        "a_number_in_the_list",
        "not_an_object",
        "adapter_a_number",
        "rank_too_large",
        "key_too_many",
        "weight_only_a_number",
        "untested_models_a_string",
        "unknown_kernel",
        "kernel_of_another_gpu",
        "kernel_without_a_gpu",
    ],
)
def test_promise_09_options(boot, make_bf16, options, message):
    assert message in refusal(boot, make_bf16("qwen2"), additional_config={"qerl": options})


@pytest.mark.parametrize(
    "adapter",
    [None, {}, {"rank": 0}, {"rank": -1}, {"rank": True}, {"rank": "8"}, {"rank": 8, "path": 1}],
    ids=str,
)
def test_promise_09_a_policy_adapter_is_one_of_a_rank_or_left_out(adapter):
    with pytest.raises(ValueError, match=r"from 1 to 512.*for a server without one leave it out"):
        Options.parse({"qerl": {"policy_adapter": adapter}})
    assert Options.parse({"qerl": {}}).adapter_rank == 0
    found = Options.parse({"qerl": {"policy_adapter": {"rank": 512, "path": "x"}}})
    assert (found.adapter_rank, found.adapter_path) == (512, "x")


def test_promise_09_ignore_is_refused_where_it_would_have_no_effect(boot, folder):
    text = refusal(boot, folder, additional_config={"qerl": {"ignore": ["lm_head", "model.layers.0.mlp.down_proj"]}})
    assert '"qerl.ignore" is for BF16 checkpoints' in text


def test_promise_09_an_ignored_layer_that_is_not_there(boot, make_bf16):
    options = {"qerl": {"ignore": ["lm_head", "model.layers.0.mlp.downproj"]}}
    assert "'model.layers.0.mlp.downproj', which is no layer" in refusal(
        boot, make_bf16("qwen2"), additional_config=options
    )


ORDINARY = {
    "cache_config": SimpleNamespace(cache_dtype="auto"),
    "model_config": SimpleNamespace(dtype=torch.float32),
}


@pytest.mark.parametrize("variable", [True, False])
def test_promise_09_batch_invariance_is_asked_for_in_both_places_or_in_none(monkeypatch, variable):
    from vllm import envs

    from qerl_vllm_plugin.quantization import QerlConfig

    monkeypatch.setitem(vars(envs), "VLLM_BATCH_INVARIANT", variable)  # an engine would change torch for good
    option = None if variable else {"qerl": {"kernel": "batch_invariant"}}
    with pytest.raises(ValueError, match=r"VLLM_BATCH_INVARIANT=1 is an experiment .* Set both or none"):
        QerlConfig()._prepare(SimpleNamespace(additional_config=option, **ORDINARY))


def test_batch_invariance_needs_our_kernel(monkeypatch):
    from qerl_vllm_plugin.weights import layouts

    with pytest.raises(ValueError, match=r'"qerl.kernel": "batch_invariant" needs a Hopper GPU'):
        layouts.choose(torch.bfloat16, "batch_invariant")


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_a_cache_that_the_cpu_reads_wrongly(boot, make_bf16, stored):
    message = refusal(boot, make_bf16("qwen2"), kv_cache_dtype=stored, dtype="float32")
    assert f"--kv-cache-dtype {stored} with --dtype float32" in message and "leave --kv-cache-dtype out" in message


def test_ignore_and_norms_are_named_as_in_the_checkpoint_of_a_vision_language_model():
    """vLLM's own mapper of such a model: its checkpoint says model.language_model, vLLM says language_model.model."""
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.models.utils import WeightsMapper

    from qerl_vllm_plugin.compat import layers as vllm_layers
    from qerl_vllm_plugin.quantization import QerlConfig

    mapper = WeightsMapper(orig_to_new_prefix={"model.language_model.": "language_model.model.", "model.visual.": "v."})
    config = QerlConfig()
    config.apply_vllm_mapper(mapper)
    with pytest.raises(ValueError, match=r"parts for images or sound.*re:\.\*visual"):
        config._set_ignore(None, "qwen2_vl", is_multimodal=True)
    config._set_ignore(("model.language_model.layers.0.mlp.down_proj",), "qwen2_vl", is_multimodal=True)
    assert config.kind("language_model.model.layers.0.mlp.down_proj") is None
    assert config.kind("language_model.model.layers.1.mlp.down_proj") == "nvfp4"
    model = torch.nn.Module()
    model.hf_to_vllm_mapper = mapper
    model.language_model = torch.nn.Module()
    model.language_model.model = torch.nn.Module()
    model.language_model.model.norm = torch.nn.Module.__new__(RMSNorm)
    torch.nn.Module.__init__(model.language_model.model.norm)
    model.language_model.model.norm.weight = torch.nn.Parameter(torch.ones(4))
    vllm_layers.keep_names(model, ["model.language_model.norm.weight", "model.visual.merger.ln_q.weight"])
    assert list(vllm_layers.norm_layers(model)) == ["model.language_model.norm.weight"]


def test_promise_10_resident_adapter_and_lora_exclude_each_other(boot, folder):
    options = {"enable_lora": True, "additional_config": {"qerl": {"policy_adapter": {"rank": 8}}}}
    assert "exclude each other" in refusal(boot, folder, **options)


def test_ignored_layers_of_a_bf16_checkpoint_stay_in_bf16(boot, make_bf16, measure):
    options = {"qerl": {"ignore": ["lm_head", "model.layers.0.mlp.down_proj", "re:.*self_attn.*"]}}
    model = measure.model(boot(make_bf16("qwen2"), additional_config=options))
    packed = {name for name, _ in model.named_parameters() if name.endswith("weight_packed")}
    assert packed == {
        "model.layers.0.mlp.gate_up_proj.weight_packed",
        "model.layers.1.mlp.gate_up_proj.weight_packed",
        "model.layers.1.mlp.down_proj.weight_packed",
    }


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "quant_method 'gptq'"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "quant_method 'awq'"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "quant_method 'fp8'"),
        ({"format": "float-quantized", "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}}}, "FP8"),
        (
            {
                "format": "nvfp4-pack-quantized",
                "config_groups": {
                    "g": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": {"num_bits": 4}}
                },
            },
            "W4A4",
        ),
        (
            {
                "format": "mxfp4-pack-quantized",
                "config_groups": {"g": {"targets": ["Linear"], "weights": {**WEIGHTS, "group_size": 32}}},
            },
            "group_size 32",
        ),
    ],
    ids=["gptq", "awq", "fp8", "compressed_fp8", "w4a4", "mxfp4"],
)
def test_promise_09_other_quantizations_by_name(boot, folder, quantization, message):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "ignore": ["lm_head"], **quantization}
    (folder / "config.json").write_text(json.dumps(config))
    text = refusal(boot, folder)
    assert message in text
    assert "qerl quantize" in text


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "bf16"])
@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        (
            "qwen2",
            {"architectures": ["LlamaForCausalLM"]},
            r"[qkv]_proj\.bias has no place .*LlamaForCausalLM",
        ),
        ("llama", {"architectures": ["Qwen2ForCausalLM"]}, r"lacks model\.layers\.0\.self_attn\.qkv_proj\.bias"),
        ("llama", {"tie_word_embeddings": True}, r"lm_head\.weight has no place"),
        ("qwen2", {"num_hidden_layers": 1}, r"model\.layers\.1\..* has no place"),
        ("qwen2", {"quantization_config": None}, "leave it out, and put another format into NVFP4"),
    ],
    ids=["biases_left_out", "biases_missing", "head_left_out", "layers_left_out", "another_quantization"],
)
def test_promise_09_what_is_built_is_what_the_checkpoint_holds(
    boot, make_nvfp4, make_bf16, packed, family, overrides, message
):
    text = refusal(boot, (make_nvfp4 if packed else make_bf16)(family), hf_overrides=overrides)
    assert re.search(message, text), text


def test_promise_09_the_saved_state_of_an_engine_is_no_checkpoint(boot, folder):
    assert "serve the checkpoint that it was made from" in refusal(boot, folder, load_format="sharded_state")
    shutil.copy(folder / "model.safetensors", folder / "model-rank-0-part-0.safetensors")
    text = refusal(boot, folder)
    assert "model-rank-0-part-0.safetensors: what vLLM's save_sharded_state writes" in text


def test_columns_that_are_no_multiple_of_16(boot, make_bf16):
    text = refusal(boot, make_bf16("qwen2", intermediate_size=100))
    assert "down_proj: 100 input columns" in text
    assert "multiple of 16" in text


DOWN = "model.layers.1.mlp.down_proj"
DAMAGE = {
    "packed_missing": (lambda t: t.pop(f"{DOWN}.weight_packed"), DOWN),
    "scale_missing": (lambda t: t.pop(f"{DOWN}.weight_scale"), f"{DOWN}.weight_scale"),
    "divisor_missing": (lambda t: t.pop(f"{DOWN}.weight_global_scale"), f"{DOWN}.weight_global_scale"),
    "norm_missing": (lambda t: t.pop("model.norm.weight"), "model.norm.weight"),
    "bias_missing": (lambda t: t.pop("model.layers.0.self_attn.k_proj.bias"), "k_proj.bias"),
    "zero_divisor": (lambda t: t[f"{DOWN}.weight_global_scale"].zero_(), f"{DOWN}.weight_global_scale: 0.0"),
    "infinite_divisor": (lambda t: t[f"{DOWN}.weight_global_scale"].fill_(float("inf")), f"{DOWN}.weight_global_scale"),
    "nan_scale": (lambda t: t[f"{DOWN}.weight_scale"].view(torch.uint8)[3, 2].fill_(0x7F), "row 3, block 2"),
    "negative_scale": (lambda t: t[f"{DOWN}.weight_scale"].view(torch.uint8)[0, 0].fill_(0x90), "NaN or negative"),
    "shape": (lambda t: t.update({f"{DOWN}.weight_packed": t[f"{DOWN}.weight_packed"][:-1].clone()}), DOWN),
    "dtype": (lambda t: t.update({f"{DOWN}.weight_scale": t[f"{DOWN}.weight_scale"].float()}), DOWN),
    "nan_scale_in_a_fused_layer": (
        lambda t: t["model.layers.0.self_attn.v_proj.weight_scale"].view(torch.uint8)[0, 0].fill_(0xFF),
        "model.layers.0.self_attn.qkv_proj",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_promise_09_damaged_packed_checkpoint(boot, folder, case):
    change, message = DAMAGE[case]
    edit(folder, change)
    text = refusal(boot, folder)
    assert message in text
    assert "CheckpointError" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.0.input_layernorm.weight"), "model.layers.0.input_layernorm.weight"),
        (lambda t: t.pop("model.layers.0.self_attn.v_proj.weight"), "v_proj.weight"),
        (lambda t: t[f"{DOWN}.weight"][0, 0].fill_(float("nan")), f"{DOWN}.weight holds NaN"),
    ],
    ids=["norm_missing", "part_of_a_fused_layer_missing", "nan"],
)
def test_promise_09_damaged_bf16_checkpoint(boot, make_bf16, tmp_path, change, message):
    folder = shutil.copytree(make_bf16("qwen2"), tmp_path / "copy")
    edit(folder, change)
    text = refusal(boot, folder)
    assert message in text
    assert "CheckpointError" in text


def test_promise_09_truncated_file(boot, folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "truncated" in refusal(boot, folder)


def test_a_policy_adapter_needs_the_engine_to_have_lora(boot, make_nvfp4):
    from qerl_vllm_plugin.adapter.check import AdapterError
    from qerl_vllm_plugin.policy import Policy

    policy = Policy(boot(make_nvfp4("qwen2")))
    assert policy.request is None
    with pytest.raises(AdapterError, match="enable_lora=True"):
        policy.swap({"base_model.model.x.lora_A.weight": torch.ones(1, 1)}, {"r": 1})
    assert policy.version == 0
