"""Test that what the plugin cannot serve is refused while the engine starts, by name and with a way out.

Options and kernels are checked without an engine. What a checkpoint's files show is tested in
weights/test_checkpoint.py.
"""

import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from vllm import envs
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models.utils import WeightsMapper

from qerl_vllm_plugin.adapter.check import AdapterError
from qerl_vllm_plugin.compat import layers as vllm_layers
from qerl_vllm_plugin.options import Options
from qerl_vllm_plugin.policy import Policy
from qerl_vllm_plugin.quantization import QerlConfig
from qerl_vllm_plugin.weights import layouts

DOWN = "model.layers.1.mlp.down_proj"
LEAVE_OUT = "from 1 to 512, .* or left out for a server without one"


@pytest.fixture
def refusal(boot):
    """refusal(folder, **options) returns the error text that ends the engine's start, with the errors that caused
    it."""

    def start(folder, **options):
        with pytest.raises(Exception) as caught:
            boot(folder, **options)
        text, error = "", caught.value
        while error is not None:
            text += f"{type(error).__name__}: {error}\n"
            error = error.__cause__ or error.__context__
        return text

    return start


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["ignore"], '"qerl" must be an object'),
        ({"ignored": []}, "unknown key 'ignored'"),
        ({"ignore": "lm_head"}, '"qerl.ignore" must be a list'),
        ({"ignore": [1]}, '"qerl.ignore" must be a list'),
        ({"ignore": ["re:("]}, '"qerl.ignore" must be a list of layer names, or of re: and a regular expression that'),
        ({"weight_only": 1}, '"qerl.weight_only" must be true or false'),
        ({"untested_models": "yes"}, '"qerl.untested_models" must be true or false'),
        ({"kernel": "cutlass"}, "must be one of auto, tiled, marlin, dequantize"),
        ({"policy_folders": 1}, '"qerl.policy_folders" must be the path of a directory'),
        ({"policy_folders": ""}, '"qerl.policy_folders" must be the path of a directory'),  # not the current folder
        ({"policy_timeout": 0}, '"qerl.policy_timeout" must be a number of seconds above 0'),
        ({"policy_timeout": True}, '"qerl.policy_timeout" must be a number of seconds above 0'),
        ({"policy_adapter": 8}, f'"qerl.policy_adapter" must be {{"rank": R}} .* {LEAVE_OUT}'),
        ({"policy_adapter": None}, LEAVE_OUT),
        ({"policy_adapter": {}}, LEAVE_OUT),
        ({"policy_adapter": {"rank": 0}}, LEAVE_OUT),
        ({"policy_adapter": {"rank": -1}}, LEAVE_OUT),
        ({"policy_adapter": {"rank": 513}}, LEAVE_OUT),
        ({"policy_adapter": {"rank": True}}, LEAVE_OUT),
        ({"policy_adapter": {"rank": "8"}}, LEAVE_OUT),
        ({"policy_adapter": {"rank": 8, "path": 1}}, LEAVE_OUT),
        ({"policy_adapter": {"rank": 8, "alpha": 1}}, LEAVE_OUT),
    ],
    ids=str,
)
def test_promise_09_options(options, message):
    with pytest.raises(ValueError, match=message):
        Options.parse({"qerl": options})


def test_a_policy_adapter_has_a_rank_and_perhaps_a_path():
    assert Options.parse({"qerl": {}}).adapter_rank == 0
    options = Options.parse({"qerl": {"policy_adapter": {"rank": 512, "path": "x"}}})
    assert (options.adapter_rank, options.adapter_path) == (512, "x")


@pytest.mark.parametrize("kernel", ["tiled", "marlin", "batch_invariant"])
def test_promise_09_kernels_of_another_machine(kernel):
    with pytest.raises(ValueError, match=rf'"qerl.kernel": "{kernel}" needs an? (Hopper|NVIDIA) GPU'):
        layouts.choose(torch.bfloat16, kernel)


@pytest.mark.parametrize("variable", [True, False])
def test_promise_09_batch_invariance_in_both_places_or_none(monkeypatch, variable):
    # patched here, since an engine would change torch for good
    monkeypatch.setitem(vars(envs), "VLLM_BATCH_INVARIANT", variable)
    config = SimpleNamespace(
        additional_config=None if variable else {"qerl": {"kernel": "batch_invariant"}},
        cache_config=SimpleNamespace(cache_dtype="auto"),
        model_config=SimpleNamespace(dtype=torch.float32),
    )
    with pytest.raises(ValueError, match=r"VLLM_BATCH_INVARIANT=1 is an experiment .* Set both or none"):
        QerlConfig()._prepare(config)


RESIDENT = {"policy_adapter": {"rank": 8}}
STARTS = {
    "an unknown option": ("bf16", {"qerl": {"ignored": []}}, {}, "unknown key 'ignored'"),
    "a kernel": ("bf16", {"qerl": {"kernel": "tiled"}}, {}, '"tiled" needs a Hopper GPU'),
    "ignore of a packed checkpoint": ("nvfp4", {"qerl": {"ignore": [DOWN]}}, {}, '"qerl.ignore" is for BF16'),
    "an ignored layer that is not there": (
        "bf16",
        {"qerl": {"ignore": ["lm_head", f"{DOWN}s"]}},
        {},
        f"'{DOWN}s', which is no layer",
    ),
    "both carriers": ("nvfp4", {"qerl": RESIDENT}, {"enable_lora": True}, "exclude each other"),
    "a BF16 cache": ("bf16", {}, {"kv_cache_dtype": "bfloat16", "dtype": "float32"}, "leave --kv-cache-dtype out"),
    "a float16 cache": ("bf16", {}, {"kv_cache_dtype": "float16", "dtype": "float32"}, "leave --kv-cache-dtype out"),
}


@pytest.mark.parametrize("case", STARTS)
def test_promise_09_an_engine_does_not_start_with(refusal, make_bf16, make_nvfp4, case):
    kind, additional, options, message = STARTS[case]
    folder = (make_bf16 if kind == "bf16" else make_nvfp4)("qwen2")
    assert message in refusal(folder, additional_config=additional, **options)


DAMAGE = {
    "a missing tensor": ("nvfp4", lambda t: t.pop(f"{DOWN}.weight_scale"), f"{DOWN}.weight_scale"),
    "a divisor of 0": ("nvfp4", lambda t: t[f"{DOWN}.weight_global_scale"].zero_(), f"{DOWN}.weight_global_scale: 0.0"),
    "a block scale that is NaN": (
        "nvfp4",
        lambda t: t[f"{DOWN}.weight_scale"].view(torch.uint8)[3, 2].fill_(0x7F),
        "row 3, block 2",
    ),
    "one in a fused layer": (
        "nvfp4",
        lambda t: t["model.layers.0.self_attn.v_proj.weight_scale"].view(torch.uint8)[0, 0].fill_(0xFF),
        "model.layers.0.self_attn.qkv_proj",
    ),
    "a missing part of a fused layer": ("bf16", lambda t: t.pop("model.layers.0.self_attn.v_proj.weight"), "v_proj.we"),
    "a NaN": ("bf16", lambda t: t[f"{DOWN}.weight"][0, 0].fill_(float("nan")), f"{DOWN}.weight holds NaN"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_promise_09_an_engine_does_not_start_on(refusal, edited, make_bf16, make_nvfp4, case):
    kind, damage, message = DAMAGE[case]
    text = refusal(edited((make_bf16 if kind == "bf16" else make_nvfp4)("qwen2"), damage))
    assert message in text and "CheckpointError" in text


def test_promise_09_other_quantizations(refusal, edited, folder):
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    text = refusal(edited(folder, quantization_config=gptq))
    assert "quant_method 'gptq'" in text and "qerl quantize" in text


def test_columns_that_are_no_multiple_of_16(refusal, make_bf16):
    text = refusal(make_bf16("qwen2", intermediate_size=100))
    assert "down_proj: 100 input columns" in text and "multiple of 16" in text


def test_promise_09_memory_of_an_engine_beside_a_checkpoint(refusal, edited, folder):
    copy = edited(folder)
    shutil.copy(copy / "model.safetensors", copy / "model-rank-0-part-0.safetensors")
    assert "model-rank-0-part-0.safetensors: what vLLM's save_sharded_state writes" in refusal(copy)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "bf16"])
@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("qwen2", {"architectures": ["LlamaForCausalLM"]}, r"[qkv]_proj\.bias has no place .*LlamaForCausalLM"),
        ("llama", {"architectures": ["Qwen2ForCausalLM"]}, r"lacks model\.layers\.0\.self_attn\.qkv_proj\.bias"),
        ("llama", {"tie_word_embeddings": True}, r"lm_head\.weight has no place"),
        ("qwen2", {"num_hidden_layers": 1}, r"model\.layers\.1\..* has no place"),
        ("qwen2", {"quantization_config": None}, "leave it out, and put another format into NVFP4"),
    ],
    ids=["biases_left_out", "biases_missing", "head_left_out", "layers_left_out", "another_quantization"],
)
def test_promise_09_what_is_built_is_what_the_checkpoint_holds(
    refusal, make_nvfp4, make_bf16, packed, family, overrides, message
):
    text = refusal((make_nvfp4 if packed else make_bf16)(family), hf_overrides=overrides)
    assert re.search(message, text), text


def test_ignored_layers_of_a_bf16_checkpoint_stay_in_bf16(boot, make_bf16, measure):
    options = {"qerl": {"ignore": ["lm_head", "model.layers.0.mlp.down_proj", "re:.*self_attn.*"]}}
    model = measure.model(boot(make_bf16("qwen2"), additional_config=options))
    packed = {name for name, _ in model.named_parameters() if name.endswith("weight_packed")}
    assert packed == {
        "model.layers.0.mlp.gate_up_proj.weight_packed",
        "model.layers.1.mlp.gate_up_proj.weight_packed",
        f"{DOWN}.weight_packed",
    }


def test_names_of_a_vision_language_model_are_the_checkpoints():
    """Use vLLM's own mapper of such a model, which renames the checkpoint's model.language_model to
    language_model.model."""
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


def test_an_engine_without_room_for_an_adapter_serves_the_base(boot, folder):
    policy = Policy(boot(folder))
    assert policy.request is None
    with pytest.raises(AdapterError, match="enable_lora=True"):
        policy.swap({"base_model.model.x.lora_A.weight": torch.ones(1, 1)}, {"r": 1})
    assert policy.version == 0
