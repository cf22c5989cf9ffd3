"""Checkpoint folders that are damaged or something else: each is refused by name, with the limit and the way out."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl_vllm_plugin.weights.checkpoint import inspect_folder, read_quantization
from qerl_vllm_plugin.wire.safetensors_file import CheckpointError, read_header, read_tensor

FIXTURES = Path(__file__).parents[2] / "fixtures" / "llmcompressor"
NVFP4 = json.loads((FIXTURES / "qwen2-nvfp4" / "config.json").read_text())["quantization_config"]
UP = "model.layers.1.mlp.up_proj"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A packed checkpoint in one file."""
    return shutil.copytree(FIXTURES / "qwen2-nvfp4", tmp_path / "nvfp4")


@pytest.fixture
def shards(tmp_path) -> Path:
    """A BF16 checkpoint in ten shards."""
    return shutil.copytree(FIXTURES / "qwen2-bf16", tmp_path / "bf16")


def edit_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["qwen2-bf16", "qwen3-bf16", "qwen2-nvfp4", "qwen3-nvfp4"])
def test_a_sound_folder_is_accepted_whole(name):
    report = inspect_folder(FIXTURES / name)
    assert report.complete
    assert (report.scheme is not None) == name.endswith("nvfp4")
    if report.scheme:
        assert report.scheme.is_quantized(UP) and not report.scheme.is_quantized("lm_head")


def test_promise_09_a_folder_is_what_its_config_says_and_not_what_it_is_called(tmp_path):
    shutil.copytree(FIXTURES / "qwen2-bf16", tmp_path / "model-nvfp4-gptq")
    shutil.copytree(FIXTURES / "qwen2-nvfp4", tmp_path / "model-bf16")
    assert inspect_folder(tmp_path / "model-nvfp4-gptq").scheme is None
    assert inspect_folder(tmp_path / "model-bf16").scheme is not None


def test_reading_one_tensor_gives_what_the_safetensors_library_reads(folder):
    file = folder / "model.safetensors"
    reference = load_file(file)
    headers = read_header(file)
    assert headers.keys() == reference.keys()
    for name, tensor in reference.items():
        assert torch.equal(read_tensor(headers[name]).view(torch.uint8), tensor.view(torch.uint8))


def group_with(weights: dict | None = None, **changes) -> dict:
    group = NVFP4["config_groups"]["group_0"]
    group = group | {"weights": group["weights"] | (weights or {})} | changes
    return NVFP4 | {"config_groups": {"group_0": group}}


INPUTS = {"num_bits": 4, "type": "float", "group_size": 16}
FP8_BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
FP8_ROWS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
OTHER_QUANTIZATIONS = {
    "GPTQ": ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq'"),
    "AWQ": ({"quant_method": "awq", "bits": 4}, "quant_method 'awq'"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method 'bitsandbytes'"),
    "block FP8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "quant_method 'fp8'"),
    "modelopt FP8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt's quant_algo 'FP8'"),
    "modelopt AWQ": ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo 'NVFP4_AWQ'"),
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
def test_another_quantization_is_named_and_the_way_out_given(folder, config, what):
    way_out = r".*W4A16, blocks of 16; start from the BF16 checkpoint and run `qerl quantize"
    with pytest.raises(CheckpointError, match=what + way_out):
        read_quantization(config, weight_only=True)
    edit_config(folder, quantization_config=config)
    with pytest.raises(ValueError, match=what):
        inspect_folder(folder)


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
def test_what_has_more_than_weights_is_read_only_where_the_weights_alone_are_asked_for(folder, config, what):
    way_out = r".*write its weights alone with `qerl quantize.*\{\"weight_only\": true\}"
    with pytest.raises(CheckpointError, match=what + way_out):
        read_quantization(config)
    edit_config(folder, quantization_config=config)
    with pytest.raises(CheckpointError, match=what + way_out):
        inspect_folder(folder)
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


def test_a_layer_of_an_fp8_and_of_an_nvfp4_group_is_refused_and_a_name_goes_before_all_linears():
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


@pytest.mark.parametrize("missing_bytes", [1, 1000, 29000])
def test_a_truncated_shard_is_refused_by_name(folder, missing_bytes):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-missing_bytes])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*truncated.*download or quantize"):
        inspect_folder(folder)


def test_bytes_after_the_last_tensor_are_refused(folder):
    with (folder / "model.safetensors").open("ab") as stream:
        stream.write(b"x" * 7)
    with pytest.raises(CheckpointError, match="followed by bytes of no tensor"):
        inspect_folder(folder)


def test_a_missing_shard_is_refused_by_name(shards):
    (shards / "model-00003-of-00010.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00003-of-00010\.safetensors: this shard is .*but missing"):
        inspect_folder(shards)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**40, 100_000_001, 200_000])
def test_a_header_length_beyond_the_file_is_refused_without_allocating_it(folder, length):
    file = folder / "model.safetensors"
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])
    with pytest.raises(CheckpointError, match=rf"header claims {length} bytes; the file has \d+.*download or quantize"):
        inspect_folder(folder)


def with_header(folder: Path, edit) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


DAMAGED_HEADERS = {
    "shape and bytes disagree": (lambda h: h[f"{UP}.weight_scale"].update(shape=[80, 4]), "needs 320 bytes"),
    "negative shape": (lambda h: h[f"{UP}.weight_scale"].update(shape=[-80, -3]), "_scale of F8_E4M3"),
    "overlap": (lambda h: h[f"{UP}.weight_scale"].update(data_offsets=[0, 240]), "begins at byte"),
    "unknown dtype": (lambda h: h[f"{UP}.weight_scale"].update(dtype="F4"), "has dtype F4; supported are"),
    "no offsets": (lambda h: h[f"{UP}.weight_scale"].pop("data_offsets"), "header cannot be read"),
    "no object": (lambda h: h.update({f"{UP}.weight_scale": 3}), "header cannot be read"),
}


@pytest.mark.parametrize(("edit", "message"), DAMAGED_HEADERS.values(), ids=DAMAGED_HEADERS)
def test_a_damaged_header_is_refused(folder, edit, message):
    with_header(folder, edit)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{message}"):
        inspect_folder(folder)


@pytest.mark.parametrize("data", [b"", b"1234567", b"\x05" + bytes(7) + b"hello"], ids=["empty", "7 bytes", "text"])
def test_a_file_that_is_no_safetensors_file_is_refused(folder, data):
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*download or quantize the checkpoint again"):
        inspect_folder(folder)


DISAGREEMENTS = {
    "packed tensor missing": (lambda t: t.pop(f"{UP}.weight_packed"), rf"{UP}\.weight_packed"),
    "scale missing": (lambda t: t.pop(f"{UP}.weight_scale"), rf"{UP}\.weight_scale \(F8_E4M3 \[80, 3\]\) is missing"),
    "divisor missing": (lambda t: t.pop(f"{UP}.weight_global_scale"), rf"{UP}\.weight_global_scale .*is missing"),
    "norm missing": (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight \(.*\[48\]\) is missing"),
    "bias missing": (lambda t: t.pop("model.layers.0.self_attn.q_proj.bias"), r"q_proj\.bias .*is missing"),
    "extra": (lambda t: t.update(surprise=torch.ones(1)), "tensor surprise has no place in the model"),
    "layer too many": (
        lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.ones(48)}),
        r"model\.layers\.2\.input_layernorm\.weight has no place",
    ),
    "activation scale": (lambda t: t.update({f"{UP}.input_global_scale": torch.ones(1)}), "belongs to W4A4"),
    "cache scale": (
        lambda t: t.update({"model.layers.0.self_attn.k_scale": torch.ones(1)}),
        r"k_scale belongs to an FP8 KV cache, which config\.json does not declare",
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
    "scale dtype": (
        lambda t: t.update({f"{UP}.weight_scale": torch.ones(80, 3)}),
        r"weight_scale is F32 \[80, 3\]",
    ),
    "codes dtype": (
        lambda t: t.update({f"{UP}.weight_packed": t[f"{UP}.weight_packed"].view(torch.int8)}),
        r"weight_packed is I8 .*asks for U8 \[80, 24\]",
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


@pytest.mark.parametrize(("edit", "message"), DISAGREEMENTS.values(), ids=DISAGREEMENTS)
def test_config_and_tensors_that_disagree_are_refused_by_name(folder, edit, message):
    edit_tensors(folder, edit)
    with pytest.raises(CheckpointError, match=message):
        inspect_folder(folder)


def test_a_packed_layer_that_config_lists_as_ignored_is_refused(folder):
    edit_config(folder, quantization_config=NVFP4 | {"ignore": ["lm_head", UP]})
    with pytest.raises(CheckpointError, match=rf"{UP}\.\w+ is quantized, but config\.json lists {UP} in ignore"):
        inspect_folder(folder)


def test_packed_tensors_without_a_quantization_config_are_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"is quantized, but config\.json has no quantization_config"):
        inspect_folder(folder)


def test_a_config_of_another_size_is_refused(folder):
    edit_config(folder, intermediate_size=96)
    with pytest.raises(CheckpointError, match=r"_proj\.weight_packed is U8 .*, but config\.json asks for"):
        inspect_folder(folder)


def test_a_config_without_a_size_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["intermediate_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="lacks the key 'intermediate_size'"):
        inspect_folder(folder)


def test_an_index_and_its_shards_that_disagree_are_refused(shards):
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "model-00002-of-00010.safetensors"
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight is not in model-00002"):
        inspect_folder(shards)


def test_a_tensor_outside_the_index_is_refused(shards):
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    file = index["weight_map"].pop("model.norm.weight")
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"tensor model\.norm\.weight of {file} is not in the index"):
        inspect_folder(shards)


def test_a_shard_outside_the_folder_is_refused(shards):
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "../secret.safetensors"
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    (shards.parent / "secret.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"named in .* but missing"):
        inspect_folder(shards)


@pytest.mark.parametrize(
    ("name", "message"),
    [("config.json", "no such file"), ("model.safetensors", r"holds neither model\.safetensors nor")],
)
def test_a_folder_without_a_needed_file_is_refused(folder, name, message):
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=message):
        inspect_folder(folder)


def test_a_config_that_is_no_json_is_refused(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not valid JSON"):
        inspect_folder(folder)


def test_an_unknown_architecture_is_checked_as_far_as_its_packed_tensors(folder):
    edit_config(folder, model_type="another")
    assert not inspect_folder(folder).complete
    edit_tensors(folder, lambda t: t.pop(f"{UP}.weight_scale"))
    with pytest.raises(CheckpointError, match=rf"{UP}\.weight_scale .*is missing"):
        inspect_folder(folder)
