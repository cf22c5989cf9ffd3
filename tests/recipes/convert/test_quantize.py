"""Test the quantizer: it writes llmcompressor's bytes and the right files, takes every kind of source, and refuses the
rest.
"""

import io
import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from qerl_kernels.nvfp4 import dequantize, quantize
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    StableLmConfig,
)

from qerl_recipes.convert.quantize import quantization_config, quantize_checkpoint
from qerl_vllm_plugin.weights.checkpoint import check_tensors, inspect_folder, read_quantization
from qerl_vllm_plugin.wire.safetensors_file import CheckpointError, read_tensor

FIXTURES = Path(__file__).parents[2] / "fixtures" / "llmcompressor"
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: read_tensor(header) for name, header in inspect_folder(folder).tensors.items()}


def save_model(config, folder: Path, dtype: torch.dtype = torch.bfloat16, shard: str = "8KB") -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    config = Qwen2Config(intermediate_size=48, tie_word_embeddings=False, **SIZES)
    return save_model(config, tmp_path_factory.mktemp("dense") / "bf16")


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_promise_01_the_bytes_are_those_of_llmcompressor(kind, tmp_path):
    quantize_checkpoint(FIXTURES / f"{kind}-bf16", tmp_path / "nvfp4")
    ours, theirs = tensors_of(tmp_path / "nvfp4"), tensors_of(FIXTURES / f"{kind}-nvfp4")
    assert ours.keys() == theirs.keys() and sum(name.endswith("_packed") for name in ours) >= 7
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and ours[name].shape == tensor.shape, name
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name
    ours_config, theirs_config = (
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "nvfp4", FIXTURES / f"{kind}-nvfp4")
    )
    assert ours_config["quantization_config"] == theirs_config["quantization_config"]


def test_the_folder_is_a_checkpoint_that_other_readers_accept(dense, tmp_path):
    folder = tmp_path / "nvfp4"
    (dense / "tokenizer.json").write_text("{}")
    (dense / "pytorch_model.bin").write_text("never copied")
    report = quantize_checkpoint(dense, folder)
    inspected = inspect_folder(folder)
    assert inspected.complete and inspected.scheme == read_quantization(quantization_config(["lm_head"]))
    assert {f.name for f in inspected.files} == {f.name for f in inspect_folder(dense).files}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in inspected.tensors.values())
    for file in inspected.files:  # the safetensors library reads each shard
        for name, tensor in load_file(file).items():
            assert torch.equal(tensor.view(torch.uint8), read_tensor(inspected.tensors[name]).view(torch.uint8))
    for layer in report.layers:
        names = (f"{layer.name}.weight_{part}" for part in ("packed", "scale", "global_scale"))
        check_tensors(layer.name, *(read_tensor(inspected.tensors[name]) for name in names))
    assert (folder / "tokenizer.json").is_file() and (folder / "generation_config.json").is_file()
    assert not (folder / "pytorch_model.bin").exists()
    assert AutoConfig.from_pretrained(folder).quantization_config["quant_method"] == "compressed-tensors"
    saved = json.loads((folder / "quantize_report.json").read_text())
    assert len(saved["layers"]) == len(report.layers) == 14


def test_compressed_tensors_itself_unpacks_the_same_weights(dense, tmp_path):
    quantize_checkpoint(dense, tmp_path / "nvfp4")
    how = CompressedTensorsConfig(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4", quantization_config=how, dtype=torch.bfloat16)
    tensors, weights = tensors_of(tmp_path / "nvfp4"), theirs.state_dict()
    modules = [name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")]
    assert len(modules) == 14
    for module in modules:
        w = dequantize(tensors[f"{module}.weight_packed"], tensors[f"{module}.weight_scale"]).float()
        w = w / tensors[f"{module}.weight_global_scale"]
        # llmcompressor divides the scale by the tensor scale and then multiplies by it. This differs by one fp32
        # rounding, then BF16.
        torch.testing.assert_close(weights[f"{module}.weight"].float(), w, rtol=2**-7, atol=0)


@pytest.mark.parametrize("scales", ["amax", "mse"])
def test_the_reported_error_is_that_of_weights_of_any_size(dense, scales, tmp_path):
    """Report errors for an outlier whose square overflows fp32, for weights whose squares underflow, and for weights
    that all become 0.
    """
    folder = shutil.copytree(dense, tmp_path / "bf16")
    changes = {
        "model.layers.0.self_attn.o_proj": lambda w: w[3, 5:6].fill_(1e25),
        "model.layers.1.self_attn.o_proj": lambda w: w.mul_(1e-25),
        "model.layers.1.mlp.down_proj": lambda w: w.fill_(1e-39),
    }
    for name, change in changes.items():
        file = inspect_folder(folder).tensors[f"{name}.weight"].file
        tensors = load_file(file)
        change(tensors[f"{name}.weight"])
        save_file(tensors, file)
    layers = quantize_checkpoint(folder, tmp_path / "nvfp4", scales=scales).layers
    errors = [{layer.name: layer.relative_error for layer in layers}[name] for name in changes]
    assert 0.0 < errors[0] < 0.01  # the outlier dominates the error
    assert 0.05 < errors[1] < 0.15 and errors[2] == 1.0


def test_the_error_is_reported_and_searched_scales_lower_it(dense, tmp_path):
    plain, searched = (
        quantize_checkpoint(dense, tmp_path / scales, scales=scales).layers for scales in ("amax", "mse")
    )
    source, packed = tensors_of(dense), tensors_of(tmp_path / "amax")
    for layer, better in zip(plain, searched, strict=True):
        w = source[f"{layer.name}.weight"].double()
        codes, scales = packed[f"{layer.name}.weight_packed"], packed[f"{layer.name}.weight_scale"]
        restored = dequantize(codes, scales).double() / packed[f"{layer.name}.weight_global_scale"].double()
        assert layer.shape == tuple(w.shape)
        assert layer.relative_error == pytest.approx(float((restored - w).norm() / w.norm()), rel=1e-4)
        assert 0.05 < layer.relative_error < 0.15
        assert better.name == layer.name and better.relative_error < 0.98 * layer.relative_error
    assert inspect_folder(tmp_path / "mse").scheme == inspect_folder(tmp_path / "amax").scheme


def test_experts_are_packed_and_routers_kept(tmp_path):
    config = Qwen3MoeConfig(
        intermediate_size=48, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, head_dim=16,
        mlp_only_layers=[1], tie_word_embeddings=False, **SIZES,
    )  # fmt: skip
    source = save_model(config, tmp_path / "bf16")
    report = quantize_checkpoint(source, tmp_path / "nvfp4")
    inspected, tensors = inspect_folder(tmp_path / "nvfp4"), tensors_of(tmp_path / "nvfp4")
    assert inspected.complete
    assert len(report.layers) == 2 * 4 + 4 * 3 + 3  # attention, experts of layer 0, and the dense layer 1
    assert inspected.scheme.ignore == ("model.layers.0.mlp.gate", "lm_head")
    assert tensors["model.layers.0.mlp.gate.weight"].dtype == torch.bfloat16
    experts = [f"model.layers.0.mlp.experts.{e}" for e in range(4)]
    divisors = [float(tensors[f"{e}.gate_proj.weight_global_scale"]) for e in experts]
    assert divisors == [float(tensors[f"{e}.up_proj.weight_global_scale"]) for e in experts]
    assert len(set(divisors)) > 1, "experts do not share a scale with one another"
    report.print(Console(file=(printed := io.StringIO()), width=300))
    lines = printed.getvalue().splitlines()
    for kind in ("q_proj", "gate_proj", "up_proj", "down_proj"):
        worst = max((one for one in report.layers if one.name.endswith(kind)), key=lambda one: one.relative_error)
        assert f"largest relative error: {worst.relative_error:.4f} {worst.name}" in lines


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_fp16_and_fp32_sources_are_rounded_to_bf16_first(dtype, tmp_path):
    config = LlamaConfig(intermediate_size=48, **SIZES)
    source = save_model(config, tmp_path / "wide", dtype, shard="1GB")
    quantize_checkpoint(source, tmp_path / "nvfp4")
    tensors = tensors_of(tmp_path / "nvfp4")
    w = load_file(source / "model.safetensors")["model.layers.1.self_attn.o_proj.weight"]
    assert torch.equal(tensors["model.layers.1.self_attn.o_proj.weight_packed"], quantize(w.bfloat16()).codes)
    assert {t.dtype for name, t in tensors.items() if "proj" not in name} == {torch.bfloat16}
    assert json.loads((tmp_path / "nvfp4" / "config.json").read_text())["dtype"] == "bfloat16"
    assert [f.name for f in inspect_folder(tmp_path / "nvfp4").files] == ["model.safetensors"]


def test_ignored_layers_stay_in_bf16_bit_for_bit(dense, tmp_path):
    quantize_checkpoint(dense, tmp_path / "nvfp4", ignore=("lm_head", r"re:model\.layers\.0\.mlp\..*"))
    tensors, scheme = tensors_of(tmp_path / "nvfp4"), inspect_folder(tmp_path / "nvfp4").scheme
    for name in ("gate", "up", "down"):
        module = f"model.layers.0.mlp.{name}_proj"
        assert not scheme.is_quantized(module) and torch.equal(
            tensors[f"{module}.weight"], tensors_of(dense)[f"{module}.weight"]
        )
    assert scheme.is_quantized("model.layers.1.mlp.up_proj")


def test_columns_that_are_no_multiple_of_16_are_refused(tmp_path):
    source = save_model(Qwen2Config(intermediate_size=40, **SIZES), tmp_path / "bf16")
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.down_proj\.weight has 40 columns.*--ignore model"):
        quantize_checkpoint(source, tmp_path / "nvfp4")
    report = quantize_checkpoint(source, tmp_path / "nvfp4", ignore=("lm_head", r"re:.*\.mlp\.down_proj"))
    assert len(report.layers) == 12


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_weight_that_is_not_finite_is_refused_by_name(dense, tmp_path, name, value):
    source = shutil.copytree(dense, tmp_path / "bf16")
    file = inspect_folder(source).tensors[name].file
    tensors = load_file(file)
    tensors[name].view(-1)[3] = value
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"tensor {name} holds 1 values that are NaN, infinite"):
        quantize_checkpoint(source, tmp_path / "nvfp4")
    assert not (tmp_path / "nvfp4").exists() and not list(tmp_path.glob(".nvfp4*"))


@pytest.fixture
def edited(dense, tmp_path):
    """Return edited(**changes), which copies the source and changes its config."""

    def edit(**changes) -> Path:
        source = shutil.copytree(dense, tmp_path / "edited")
        config = json.loads((source / "config.json").read_text()) | changes
        (source / "config.json").write_text(json.dumps(config))
        return source

    return edit


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, r"quant_method 'gptq'.*start from the BF16 checkpoint"),
        ({"model_type": "nobodys"}, "transformers cannot build a causal language model"),
    ],
)
def test_a_source_of_another_kind_is_refused(changes, message, edited, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        quantize_checkpoint(edited(**changes), tmp_path / "nvfp4")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": FIXTURES / "qwen2-nvfp4"}, "is an NVFP4 checkpoint already; start from the BF16 checkpoint"),
        ({"source": "nobody/no-such-model"}, "there is no such folder, and no such model could be fetched"),
        ({"destination": "SOURCE/nvfp4"}, "overlap; name another destination"),
        ({"ignore": ("model.layers.0.self_attn.q_proj",)}, r"vLLM stacks .*q_proj.*k_proj.*v_proj into one matrix; ig"),
        ({"ignore": ("model.layer.0",)}, r"ignore: 'model\.layer\.0' matches no linear layer"),
        ({"method": "rtm"}, "method: 'rtm' is unknown; choose one of rtn, gptq, awq"),
        ({"scales": "mae"}, "scales: 'mae' is unknown; choose one of amax, mse"),
        ({"device": "tpu"}, "device: 'tpu' is unknown; choose cpu or cuda"),
        ({"device": "cuda"}, "torch sees no CUDA device here; use --device cpu"),
        ({"method": "awq"}, "awq needs a CUDA device"),
        ({"method": "gptq"}, 'needs a file of JSON lines with a key "text"; name one'),
        ({"method": "gptq", "calibration": Path("none.jsonl")}, "there is no file none.jsonl"),
        ({"method": "gptq", "scales": "mse"}, "scales: 'mse' goes with --method rtn only"),
        ({"calibration": "texts.jsonl"}, "calibration: rtn uses no texts"),
        ({"calibration_samples": 1}, "calibration_samples: rtn uses no texts"),
        ({"method": "gptq", "calibration_samples": 0}, "calibration_samples is 0; it must be at least 1"),
    ],
    ids=lambda v: "-".join(map(str, v.values())) if isinstance(v, dict) else "",
)
def test_what_cannot_be_honoured_is_refused_by_name(dense, tmp_path, options, message, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = {"source": dense, "destination": str(tmp_path / "nvfp4"), **options}
    options["destination"] = options["destination"].replace("SOURCE", str(dense))
    with pytest.raises(ValueError, match=message):
        quantize_checkpoint(**options)
    assert not (tmp_path / "nvfp4").exists()


def test_a_family_that_is_not_served_is_packed_with_one_warning(dense, tmp_path):
    # No other test serves this family, since vLLM changes transformers' classes of a served family for good.
    config = StableLmConfig(intermediate_size=48, **SIZES)
    source, target = save_model(config, tmp_path / "bf16"), tmp_path / "nvfp4"
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(UserWarning, match=r"model_type 'stablelm': .*\{\"qerl\": \{\"untested_models\": true\}\}"):
            quantize_checkpoint(source, target)
        assert not target.exists() and not list(tmp_path.glob(".nvfp4*")), "it is said after the work, not before"
        quantize_checkpoint(dense, tmp_path / "served")  # a served family gives no warning
    with pytest.warns(UserWarning, match="`--quantization qerl_nvfp4` will refuse") as said:
        quantize_checkpoint(source, target)
    assert len(said) == 1 and inspect_folder(target).scheme is not None


def test_gpt_oss_is_refused_by_name(make_bf16, tmp_path):
    source = make_bf16("gpt_oss", num_local_experts=4, num_experts_per_tok=2)
    with pytest.raises(CheckpointError, match="is a gpt_oss: its experts lie in one tensor"):
        quantize_checkpoint(source, tmp_path / "nvfp4")
    assert not (tmp_path / "nvfp4").exists()


def test_an_architecture_without_linear_layers_is_not_supported(tmp_path):
    """Refuse GPT-2, whose layers are Conv1D with transposed weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(CheckpointError, match=r"GPT2LMHeadModel has no linear layer .* not supported; known .* qwen2"):
        quantize_checkpoint(tmp_path / "gpt2", tmp_path / "nvfp4")


def test_stacked_parts_of_linear_attention_share_a_scale(tmp_path):
    heads = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16}
    heads |= {"linear_value_head_dim": 16, "full_attention_interval": 2, "head_dim": 16, "intermediate_size": 48}
    source = save_model(AutoConfig.for_model("qwen3_5_text", **SIZES, **heads), tmp_path / "bf16", shard="1GB")
    quantize_checkpoint(source, tmp_path / "nvfp4")
    divisors = {
        name.split(".")[-2]: float(tensor)
        for name, tensor in tensors_of(tmp_path / "nvfp4").items()
        if ".linear_attn." in name and name.endswith("global_scale")
    }
    weights = {name.split(".")[-2]: tensor for name, tensor in tensors_of(source).items() if ".linear_attn." in name}
    largest = max(weights[part].abs().max() for part in ("in_proj_qkv", "in_proj_z"))
    # computed in the dtype of the weights
    assert divisors["in_proj_qkv"] == divisors["in_proj_z"] == float(2688 / largest)
    assert divisors["out_proj"] == float(2688 / weights["out_proj"].abs().max())
    assert not {"in_proj_b", "in_proj_a"} & divisors.keys()  # the gates stay in BF16


@pytest.mark.parametrize(("scales", "device"), [("amax", "cpu"), ("mse", "cuda")])
def test_a_search_runs_on_the_gpu_where_there_is_one(scales, device, dense, tmp_path, monkeypatch):
    seen = []

    def stop(report, plan, device):
        seen.append(device)
        raise LookupError

    monkeypatch.setattr("qerl_recipes.convert.quantize.find_divisors", stop)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(LookupError):
        quantize_checkpoint(dense, tmp_path / "out", scales=scales)
    assert seen == [device]
