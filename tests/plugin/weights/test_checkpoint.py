"""Test that damaged or unsuitable checkpoints are refused by name, with the limit and the way out.

Missing tensors and keys of each format are tested in test_broken_twins.py.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from qerl_kernels.nvfp4 import quantize
from safetensors.torch import load_file

from qerl_vllm_plugin.weights.checkpoint import check_tensors, inspect_folder, read_quantization
from qerl_vllm_plugin.wire.safetensors_file import CheckpointError, read_header, read_tensor

FIXTURES = Path(__file__).parents[2] / "fixtures" / "llmcompressor"
NVFP4 = json.loads((FIXTURES / "qwen2-nvfp4" / "config.json").read_text())["quantization_config"]
UP = "model.layers.1.mlp.up_proj"


@pytest.fixture
def folder(tmp_path):
    """Copy a packed checkpoint in one file."""
    return shutil.copytree(FIXTURES / "qwen2-nvfp4", tmp_path / "nvfp4")


@pytest.fixture
def shards(tmp_path):
    """Copy a BF16 checkpoint in ten shards."""
    return shutil.copytree(FIXTURES / "qwen2-bf16", tmp_path / "bf16")


@pytest.mark.parametrize("name", ["qwen2-bf16", "qwen3-bf16", "qwen2-nvfp4", "qwen3-nvfp4"])
def test_a_sound_folder_is_accepted_whole(name):
    report = inspect_folder(FIXTURES / name)
    assert report.complete
    assert (report.scheme is not None) == name.endswith("nvfp4")
    if report.scheme:
        assert report.scheme.is_quantized(UP) and not report.scheme.is_quantized("lm_head")


def test_promise_09_a_folder_is_what_its_config_says(tmp_path):
    shutil.copytree(FIXTURES / "qwen2-bf16", tmp_path / "model-nvfp4-gptq")
    shutil.copytree(FIXTURES / "qwen2-nvfp4", tmp_path / "model-bf16")
    assert inspect_folder(tmp_path / "model-nvfp4-gptq").scheme is None
    assert inspect_folder(tmp_path / "model-bf16").scheme is not None


def test_one_tensor_is_read_as_safetensors_reads_it(folder):
    file = folder / "model.safetensors"
    reference = load_file(file)
    headers = read_header(file)
    assert headers.keys() == reference.keys()
    for name, tensor in reference.items():
        assert torch.equal(read_tensor(headers[name]).view(torch.uint8), tensor.view(torch.uint8))


def group_with(weights=None, **changes):
    group = NVFP4["config_groups"]["group_0"]
    group = group | {"weights": group["weights"] | (weights or {})} | changes
    return NVFP4 | {"config_groups": {"group_0": group}}


INPUTS = {"num_bits": 4, "type": "float", "group_size": 16}
FP8_BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
FP8_ROWS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
OTHER_QUANTIZATIONS = {
    "modelopt FP8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt's quant_algo 'FP8'"),
    "modelopt groups of 32": (
        {"quantization": {"quant_algo": "NVFP4", "group_size": 32, "exclude_modules": []}},
        "quant_algo has group_size 32",
    ),
    "modelopt mixed with INT4": (
        {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {UP: {"quant_algo": "W4A16_AWQ"}}}},
        rf"quant_algo 'W4A16_AWQ' for {UP}",
    ),
    "modelopt mixed without NVFP4": (
        {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {UP: {"quant_algo": "FP8"}}}},
        "MIXED_PRECISION without an NVFP4 layer",
    ),
    "modelopt NVFP4 cache": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"},
        "kv_cache_quant_algo 'NVFP4'",
    ),
    "no method": ({"bits": 4}, "quant_method None"),
    "compressed-tensors FP8": (group_with({"num_bits": 8, "group_size": None}), r"has 8-bit float weights \(FP8\)"),
    "compressed-tensors INT4": (group_with({"type": "int", "group_size": 128}), "has 4-bit int weights"),
    "FP8 in blocks beside NVFP4": (
        NVFP4 | {"config_groups": NVFP4["config_groups"] | {"b": {"weights": FP8_BLOCKS, "targets": ["re:.*k_proj"]}}},
        "config group b has strategy 'block'",
    ),
    "FP8 of another format beside NVFP4": (
        NVFP4 | {"config_groups": NVFP4["config_groups"] | {"b": {"weights": FP8_ROWS, "format": "int-quantized"}}},
        "format 'int-quantized'",
    ),
    "NVFP4 without targets beside FP8": (
        group_with(targets=[])
        | {
            "config_groups": {
                "a": NVFP4["config_groups"]["group_0"] | {"targets": []},
                "b": {"weights": FP8_ROWS, "format": "float-quantized", "targets": ["Linear"]},
            }
        },
        "name no targets in NVFP4",
    ),
    "outputs": (group_with(output_activations=INPUTS), "also quantizes output_activations"),
    "group size 32": (group_with({"group_size": 32}), "has group_size 32"),
    "no group size": (group_with({"group_size": None}), "has group_size None"),
    "asymmetric": (group_with({"symmetric": False}), "has symmetric False"),
    "column order": (group_with({"actorder": "group"}), "has actorder 'group'"),
    "column order by its switch": (group_with({"actorder": True}), "has actorder True"),
    "MXFP4 scales": (group_with({"scale_dtype": "torch.uint8"}), r"has scale_dtype 'torch\.uint8'"),
    "other format": (group_with(format="pack-quantized"), "format 'pack-quantized'"),
    "no groups": (NVFP4 | {"config_groups": {}}, "without config_groups"),
    "no targets": (group_with(targets=[]), r"name no targets\."),
    "no weights": (group_with(weights=None) | {"config_groups": {"g": {"weights": None}}}, "g has no weights scheme"),
    "sparse": (NVFP4 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "with sparsity_config"),
    "transformed": (NVFP4 | {"transform_config": {"R1": {}}}, "with transform_config"),
    "INT8 cache": (NVFP4 | {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "kv_cache_scheme has type 'int'"),
    "FP8 cache a head": (
        NVFP4 | {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "attn_head", "dynamic": False}},
        "kv_cache_scheme has strategy 'attn_head'",
    ),
    "not compressed": (NVFP4 | {"quantization_status": "frozen"}, "quantization_status 'frozen'"),
}


@pytest.mark.parametrize(("config", "what"), OTHER_QUANTIZATIONS.values(), ids=OTHER_QUANTIZATIONS)
def test_another_quantization_is_named(folder, edited, config, what):
    way_out = r".*W4A16, blocks of 16; start from the BF16 checkpoint and run `qerl quantize"
    with pytest.raises(CheckpointError, match=what + way_out):
        read_quantization(config, weight_only=True)
    with pytest.raises(CheckpointError, match=what):
        inspect_folder(edited(folder, quantization_config=config))


MORE_THAN_WEIGHTS = {
    "W4A4": (group_with(input_activations=INPUTS), r"activations of 4 bits in config group group_0 \(NVFP4 W4A4\)"),
    "FP8 cache": (NVFP4 | {"kv_cache_scheme": CACHE}, "an FP8 KV cache"),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        r"activations of 4 bits .*the layout of ModelOpt",
    ),
    "modelopt W4A16": ({"quantization": {"quant_algo": "W4A16_NVFP4"}}, "it has the layout of ModelOpt"),
}


@pytest.mark.parametrize(("config", "what"), MORE_THAN_WEIGHTS.values(), ids=MORE_THAN_WEIGHTS)
def test_more_than_weights_is_read_only_if_asked_for(folder, edited, config, what):
    way_out = r".*write its weights alone with `qerl quantize.*\{\"weight_only\": true\}"
    with pytest.raises(CheckpointError, match=what + way_out):
        read_quantization(config)
    with pytest.raises(CheckpointError, match=what + way_out):
        inspect_folder(edited(folder, quantization_config=config))
    assert read_quantization(config, weight_only=True).is_quantized(UP)


def test_ignore_and_targets_follow_compressed_tensors_patterns():
    scheme = read_quantization(NVFP4 | {"ignore": ["lm_head", r"re:.*\.mlp\.gate$"]})
    assert scheme.is_quantized("model.layers.0.mlp.gate_proj")
    assert not scheme.is_quantized("model.layers.0.mlp.gate") and not scheme.is_quantized("lm_head")
    only = read_quantization(group_with(targets=[r"re:.*\.mlp\..*"]))
    assert only.is_quantized(UP) and not only.is_quantized("model.layers.1.self_attn.q_proj")
    del (whole := dict(NVFP4))["ignore"]
    assert read_quantization(whole).is_quantized("model.embed_out")
    with pytest.raises(CheckpointError, match=r"'re:\*' is not a regular expression"):
        read_quantization(NVFP4 | {"ignore": ["re:*"]})


def test_a_name_goes_before_all_linears():
    group = NVFP4["config_groups"]["group_0"]

    def scheme(*targets):
        fp8 = {"weights": FP8_ROWS, "format": "float-quantized", "targets": list(targets)}
        return read_quantization(NVFP4 | {"config_groups": {"a": group, "b": fp8}}, weight_only=True)

    named = scheme(r"re:.*k_proj")
    assert [named.kind(name) for name in (UP, "model.layers.0.self_attn.k_proj", "lm_head")] == ["nvfp4", "fp8", None]
    with pytest.raises(
        CheckpointError, match=rf"{UP} is among the targets of an NVFP4 and of an FP8 group; start from"
    ):
        scheme("Linear").kind(UP)


def rewrite(name, change):
    """Return a function that damages a folder: it replaces the bytes of a file by ``change(bytes)``."""
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def header(change):
    """Return a function that damages a folder: it changes the header of the tensor file in place."""

    def changed(data):
        length = int.from_bytes(data[:8], "little")
        entries = json.loads(data[8 : 8 + length])
        change(entries)
        text = json.dumps(entries).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    return rewrite(MODEL, changed)


def index(change):
    """Return a function that damages a folder: it changes the index's ``weight_map`` in place."""

    def changed(data):
        values = json.loads(data)
        change(values["weight_map"])
        return json.dumps(values).encode()

    return rewrite(INDEX, changed)


def length(value):
    return rewrite(MODEL, lambda data: value.to_bytes(8, "little") + data[8:])


MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"
SCALE, NORM, SECOND = f"{UP}.weight_scale", "model.norm.weight", "model-00002-of-00010.safetensors"
TOO_LONG = r"model\.safetensors: its header claims \d+ bytes; the file has \d+.*download or quantize"
DAMAGED_FILES = {
    "cut by 1 byte": (rewrite(MODEL, lambda data: data[:-1]), r"model\.safetensors: .*truncated.*download or quantize"),
    "cut in the header": (rewrite(MODEL, lambda data: data[:-29000]), r"model\.safetensors: .*truncated.*download or"),
    "longer": (rewrite(MODEL, lambda data: data + bytes(7)), "followed by bytes of no tensor"),
    "empty": (rewrite(MODEL, lambda data: b""), r"model\.safetensors: .*download or quantize the checkpoint again"),
    "7 bytes": (rewrite(MODEL, lambda data: b"1234567"), r"model\.safetensors: .*download or quantize the checkpoint"),
    "text": (rewrite(MODEL, lambda data: b"\x05" + bytes(7) + b"hello"), r"model\.safetensors: .*download or quantize"),
    "length 2^63": (length(2**63), TOO_LONG),
    "length 2^64 - 1": (length(2**64 - 1), TOO_LONG),
    "length above the limit": (length(100_000_001), TOO_LONG),
    "length above the file": (length(200_000), TOO_LONG),
    "shape and bytes disagree": (header(lambda h: h[SCALE].update(shape=[80, 4])), r"model\.safetens.*needs 320 bytes"),
    "negative shape": (header(lambda h: h[SCALE].update(shape=[-80, -3])), r"model\.safetensors: .*_scale of F8_E4M3"),
    "overlap": (header(lambda h: h[SCALE].update(data_offsets=[0, 240])), r"model\.safetensors: .*begins at byte"),
    "unknown dtype": (header(lambda h: h[SCALE].update(dtype="F4")), r"model\.safetensors: .*has dtype F4; supported"),
    "no offsets": (header(lambda h: h[SCALE].pop("data_offsets")), r"model\.safetensors: .*header cannot be read"),
    "no object": (header(lambda h: h.update({SCALE: 3})), r"model\.safetensors: .*header cannot be read"),
    "no tensor file": (lambda folder: (folder / MODEL).unlink(), r"holds neither model\.safetensors nor"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json: no such file"),
    "a config that is no JSON": (rewrite("config.json", lambda data: b"{"), r"config\.json: not valid JSON"),
}
DAMAGED_SHARDS = {
    "missing": (lambda folder: (folder / SECOND).unlink(), r"model-00002-of-00010\.safetensors: this shard .* missing"),
    "in another shard": (index(lambda m: m.update({NORM: SECOND})), r"model\.norm\.weight is not in model-00002"),
    "not in the index": (index(lambda m: m.pop(NORM)), r"tensor model\.norm\.weight of model-\S+ is not in the index"),
    "outside the folder": (index(lambda m: m.update({NORM: "../secret.safetensors"})), r"named in .* but missing"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGED_FILES.values(), ids=DAMAGED_FILES)
def test_a_damaged_file_is_refused(folder, damage, message):
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        inspect_folder(folder)


@pytest.mark.parametrize(("damage", "message"), DAMAGED_SHARDS.values(), ids=DAMAGED_SHARDS)
def test_damaged_shards_are_refused(shards, damage, message):
    (shards.parent / "secret.safetensors").write_bytes(b"")
    damage(shards)
    with pytest.raises(CheckpointError, match=message):
        inspect_folder(shards)


DISAGREEING_TENSORS = {
    "scale missing": (lambda t: t.pop(f"{UP}.weight_scale"), rf"{UP}\.weight_scale \(F8_E4M3 \[80, 3\]\) is missing"),
    "norm missing": (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight \(.*\[48\]\) is missing"),
    "bias missing": (lambda t: t.pop("model.layers.0.self_attn.q_proj.bias"), r"q_proj\.bias .*is missing"),
    "extra": (lambda t: t.update(surprise=torch.ones(1)), "tensor surprise has no place in the model"),
    "layer too many": (
        lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.ones(48)}),
        r"model\.layers\.2\.input_layernorm\.weight has no place",
    ),
    "quantized head": (
        lambda t: t.update({"lm_head.weight": torch.zeros(32, 24, dtype=torch.uint8)}),
        r"lm_head\.weight is quantized, but config\.json lists lm_head in ignore",
    ),
    "scales of AWQ": (
        lambda t: t.update({f"{UP}.pre_quant_scale": torch.ones(48)}),
        rf"{UP}\.pre_quant_scale has no place in NVFP4",
    ),
    "not packed": (lambda t: t.update({f"{UP}.weight": torch.ones(80, 48)}), rf"{UP}\.weight has no place"),
    "embedding shape": (
        lambda t: t.update({"model.embed_tokens.weight": torch.ones(31, 48)}),
        r"model\.embed_tokens\.weight is F32 \[31, 48\], but config\.json asks for BF16 or F16 or F32 \[32, 48\]",
    ),
    "groups of 8": (
        lambda t: t.update({f"{UP}.weight_scale": torch.ones(80, 6).to(torch.float8_e4m3fn)}),
        r"weight_scale is F8_E4M3 \[80, 6\], but config\.json asks for F8_E4M3 \[80, 3\]",
    ),
    "columns not a multiple of 16": (
        lambda t: t.update({f"{UP}.weight_packed": torch.zeros(80, 20, dtype=torch.uint8)}),
        rf"{UP}: 40 columns, not a multiple of 16, cannot be packed; ignore this layer: `qerl quantize .*--ignore",
    ),
}


@pytest.mark.parametrize(("change", "message"), DISAGREEING_TENSORS.values(), ids=DISAGREEING_TENSORS)
def test_tensors_that_the_config_does_not_describe(folder, edited, change, message):
    with pytest.raises(CheckpointError, match=message):
        inspect_folder(edited(folder, change))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quantization_config": NVFP4 | {"ignore": ["lm_head", UP]}},
            rf"{UP}\.\w+ is quantized, but config\.json lists {UP} in ignore",
        ),
        ({"quantization_config": None}, r"is quantized, but config\.json has no quantization_config"),
        ({"intermediate_size": 96}, r"_proj\.weight_packed is U8 .*, but config\.json asks for"),
        ({"intermediate_size": None}, "lacks the key 'intermediate_size'"),
    ],
    ids=["an ignored layer", "no quantization", "another size", "no size"],
)
def test_a_config_that_does_not_describe_the_tensors(folder, edited, config, message):
    with pytest.raises(CheckpointError, match=message):
        inspect_folder(edited(folder, **config))


def test_an_unknown_architecture_is_checked_where_it_is_packed(folder, edited):
    assert not inspect_folder(edited(folder, model_type="another")).complete
    with pytest.raises(CheckpointError, match=rf"{UP}\.weight_scale .*is missing"):
        inspect_folder(edited(folder, lambda t: t.pop(f"{UP}.weight_scale"), model_type="another"))


def packed():
    weight = quantize(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16())
    return {"codes": weight.codes, "block_scales": weight.block_scales, "divisor": weight.divisor.reshape(1)}


def with_scale_byte(byte):
    scales = packed()["block_scales"].view(torch.uint8).clone()
    scales[7, 2] = byte
    return scales.view(torch.float8_e4m3fn)


BAD_VALUES = {
    "scale is NaN": ({"block_scales": with_scale_byte(0x7F)}, r"weight_scale: 1 .*NaN or.* row 7, block 2.*0 to 448"),
    "scale is negative NaN": ({"block_scales": with_scale_byte(0xFF)}, "NaN or negative, the first at row 7, block 2"),
    "scale is negative": ({"block_scales": with_scale_byte(0x81)}, "NaN or negative, the first at row 7, block 2"),
    "scales are infinite": ({"block_scales": torch.full((32, 4), float("inf"))}, r"torch\.float32.*not uint8"),
    "divisor is zero": ({"divisor": torch.zeros(1)}, r"weight_global_scale: 0\.0 is not a usable tensor scale"),
    "divisor is infinite": ({"divisor": torch.tensor([float("inf")])}, "weight_global_scale: inf is not a usable"),
    "divisor is NaN": ({"divisor": torch.tensor([float("nan")])}, "weight_global_scale: nan is not a usable"),
    "divisor is negative": ({"divisor": torch.tensor([-1.0])}, r"weight_global_scale: -1\.0 is not a usable"),
    "tensor scale overflows": ({"divisor": torch.tensor([1e-45])}, "it and its reciprocal must be positive"),
    "divisor for each row": ({"divisor": torch.ones(32)}, r"must be \(N, K/2\), \(N, K/16\) and \(1,\)"),
    "groups of 32": ({"block_scales": packed()["block_scales"][:, ::2].contiguous()}, r"do not fit"),
    "codes are signed": ({"codes": packed()["codes"].view(torch.int8)}, r"are torch\.int8.*not uint8"),
    "columns not a multiple of 16": ({"codes": packed()["codes"][:, :30].contiguous()}, "do not fit"),
}


@pytest.mark.parametrize(("change", "message"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_values_that_would_poison_a_layer_are_refused(change, message):
    check_tensors("a.layer", **packed())
    with pytest.raises(CheckpointError, match=r"^a\.layer.*" + message + ".*qerl quantize"):
        check_tensors("a.layer", **(packed() | change))
