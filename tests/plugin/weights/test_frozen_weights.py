"""Test that an engine lends its frozen weights as views: no copies, the checkpoint's bits, and a clear reason where it
cannot."""

import dataclasses
import types

import pytest
import torch
from qerl_kernels import nvfp4, tiles
from safetensors.torch import load_file

from qerl_vllm_plugin.weights.frozen_weights import NotShareableError, frozen_weights, tiled_part


def storages(model):
    return {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}


@pytest.mark.parametrize("case", ["qwen2", "own scales", "tied head"])
def test_every_weight_is_a_view_with_the_checkpoints_bits(case, make_bf16, write_packed, boot, measure):
    source = make_bf16("qwen2", **({"tie_word_embeddings": True} if case == "tied head" else {}))
    folder = write_packed(source, shared=case != "own scales")
    engine = boot(folder)
    lent, stored = frozen_weights(engine), load_file(folder / "model.safetensors")
    theirs = storages(measure.model(engine))
    packed = {name.removesuffix(".weight_packed") for name in stored if name.endswith(".weight_packed")}
    assert lent.linears.keys() == packed and not lent.apart
    for name, frozen in lent.linears.items():
        parts = {"packed": frozen.weight.codes, "scale": frozen.weight.block_scales}
        parts["global_scale"] = frozen.weight.divisor.reshape(1)
        for part, tensor in parts.items():
            assert tensor.untyped_storage().data_ptr() in theirs, (name, part)
            assert torch.equal(tensor.view(torch.uint8), stored[f"{name}.weight_{part}"].view(torch.uint8)), (
                name,
                part,
            )
        assert (frozen.bias is None) == (f"{name}.bias" not in stored)
        if frozen.bias is not None:
            assert frozen.bias.untyped_storage().data_ptr() in theirs
            assert torch.equal(frozen.bias, stored[f"{name}.bias"])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert lent.dense[name].untyped_storage().data_ptr() in theirs
        assert torch.equal(lent.dense[name], stored.get(name, stored["model.embed_tokens.weight"]))
    assert not any("norm" in name for name in lent.dense), "the engine's norms hold the noise"


def test_padded_rows_of_the_vocabulary_are_left_out(make_nvfp4, boot):
    lent = frozen_weights(boot(make_nvfp4("qwen2", vocab_size=50)))
    assert lent.dense["model.embed_tokens.weight"].shape == lent.dense["lm_head.weight"].shape == (50, 64)


def packed_weight(N, K=96):
    generator = torch.Generator().manual_seed(N)
    weight = nvfp4.quantize(torch.randn(N, K, generator=generator).bfloat16())
    scales = torch.where(torch.arange(N) < 64, 0.5, 2.0)  # the first 64 rows are a part of their own
    return weight, tiles.tile_weight(weight.codes, weight.block_scales, scales)


@pytest.mark.parametrize(("first", "rows"), [(0, 64), (64, 128), (192, 16), (64, 144)])
def test_a_part_on_whole_tiles_is_a_view_of_the_tiled_weight(first, rows):
    packed, whole = packed_weight(208)
    part = tiled_part(whole, first, rows)
    assert part.tiles.untyped_storage().data_ptr() == whole.tiles.untyped_storage().data_ptr()
    assert part.row_scale.untyped_storage().data_ptr() == whole.row_scale.untyped_storage().data_ptr()
    assert part.counters.untyped_storage().data_ptr() != whole.counters.untyped_storage().data_ptr()
    expected = nvfp4.dequantize(packed.codes, packed.block_scales)[first : first + rows]
    assert torch.equal(tiles.dequantize(part.tiles, part.N, part.K), expected)
    assert part.scale == (0.5 if first == 0 else 2.0)


def test_a_part_is_multiplied_as_the_whole_is():
    packed, _ = packed_weight(208)
    whole = tiles.tile_weight(packed.codes, packed.block_scales, torch.tensor(0.5), torch.float16)
    part = tiled_part(dataclasses.replace(whole, fixed_order=True), 64, 128)
    assert (part.operand, part.fixed_order) == (torch.float16, True)
    found = tiles.dequantize(part.tiles, part.N, part.K, part.operand)
    assert torch.equal(found.float(), nvfp4.dequantize(packed.codes, packed.block_scales)[64:192].float())


@pytest.mark.parametrize(("first", "rows"), [(32, 64), (0, 32), (64, 80)])
def test_a_part_across_tiles_is_refused_with_the_reason(first, rows):
    _, whole = packed_weight(208)
    assert f"its rows {first} to {first + rows}" in tiled_part(whole, first, rows)


def test_an_engine_on_several_gpus_cannot_lend_and_says_why():
    config = types.SimpleNamespace(parallel_config=types.SimpleNamespace(world_size=2))
    with pytest.raises(NotShareableError, match="cut over 2 GPUs"):
        frozen_weights(types.SimpleNamespace(llm_engine=types.SimpleNamespace(vllm_config=config)))


def test_an_engine_without_packed_linears_is_refused(make_bf16, boot):
    with pytest.raises(NotShareableError, match="no NVFP4 linears"):
        frozen_weights(boot(make_bf16("qwen2"), quantization=None))
