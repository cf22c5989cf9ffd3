"""The bytes behind a memory plan, against published counts, measurements on a GPU, and tensors that exist."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from qerl_recipes.convert.quantize import quantization_config, quantize_checkpoint
from qerl_recipes.files.base_model import read_config
from qerl_recipes.memory import activation_bytes, weight_bytes
from qerl_recipes.memory.model_size import ModelSize, measure
from qerl_recipes.recipe import shapes

GIB = 2**30
DEMO_MODEL = Path(__file__).parents[3] / "recipes/demo/starting_model"


def size_of(name: str) -> ModelSize:
    return measure(read_config(name))


@pytest.mark.parametrize(
    ("name", "parameters", "without_embeddings"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 0.49, 0.36),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1.54, 1.31),
        ("Qwen/Qwen2.5-3B-Instruct", 3.09, 2.77),
        ("Qwen/Qwen2.5-7B-Instruct", 7.61, 6.53),
        ("Qwen/Qwen2.5-14B-Instruct", 14.7, 13.1),
        ("Qwen/Qwen2.5-32B-Instruct", 32.5, 31.0),
        ("Qwen/Qwen3-4B", 4.0, 3.6),
        ("Qwen/Qwen3-8B", 8.2, 6.95),
        ("Qwen/Qwen3-30B-A3B", 30.5, 29.9),
    ],
)
def test_parameters_are_those_of_the_model_cards(name: str, parameters: float, without_embeddings: float) -> None:
    size = size_of(name)
    assert size.parameters / 1e9 == pytest.approx(parameters, rel=0.01)
    assert (size.parameters - size.embeddings) / 1e9 == pytest.approx(without_embeddings, rel=0.01)


def test_the_engine_s_weights_are_those_measured_on_an_h200() -> None:
    """The weights of the README's table: 7B with a resident adapter of rank 32, 7B in BF16, the same on Marlin."""
    size = size_of("Qwen/Qwen2.5-7B-Instruct")
    ours = weight_bytes.engine_weights(size, "qerl_nvfp4", "tiled") + weight_bytes.resident_adapter(size, 32)
    assert ours / GIB == pytest.approx(5.69, abs=0.006)
    assert weight_bytes.engine_weights(size, "bf16", "tiled") / GIB == pytest.approx(14.19, abs=0.006)
    assert weight_bytes.engine_weights(size, "qerl_nvfp4", "marlin") / GIB == pytest.approx(5.5, abs=0.05)


def test_experts_are_counted_twice_since_the_trainer_cannot_read_marlin_s() -> None:
    """Qwen3-30B-A3B: 48 x 128 experts of 3 x 2048 x 768 weights at 4.5 bits are 16.3 GB of each copy."""
    size = size_of("Qwen/Qwen3-30B-A3B")
    packed = 48 * 128 * (3 * 2048 * 768 * 9 // 16 + 3 * 4)
    assert len(size.experts) == 48 and 16.3e9 < packed < 16.4e9
    without = dataclasses.replace(size, experts=())
    for weights in (
        lambda size: weight_bytes.engine_weights(size, "qerl_nvfp4", "tiled"),
        lambda size: weight_bytes.trainer_weights(size, "qerl_nvfp4", "tiled", shared=True),
        lambda size: weight_bytes.trainer_weights(size, "qerl_nvfp4", "tiled", shared=False),
    ):
        assert weights(size) - weights(without) == packed
    dense = weight_bytes.engine_weights(size, "bf16", "tiled") - weight_bytes.engine_weights(without, "bf16", "tiled")
    assert dense == 2 * 48 * 128 * 3 * 2048 * 768


def test_the_weights_of_32b_are_those_of_the_paper() -> None:
    """arXiv 2510.11696, Table 8: 20.7 GB in NVFP4."""
    size = size_of("Qwen/Qwen2.5-32B-Instruct")
    assert weight_bytes.engine_weights(size, "qerl_nvfp4", "tiled") / 1e9 == pytest.approx(20.7, abs=0.05)
    assert weight_bytes.trainer_weights(size, "nf4", "tiled", shared=False) / 1e9 == pytest.approx(20.7, abs=0.05)


def test_the_head_needs_what_was_measured_on_an_h200() -> None:
    """1.37 GiB for linear_logprob with its backward: 8192 tokens of the 7B model, kernels/results/README.md."""
    batch = activation_bytes.MicroBatch(8192, 8192, 8192, 0, 8192)
    size = size_of("Qwen/Qwen2.5-7B-Instruct")
    _, head = activation_bytes.at_work(size, batch, 0, checkpointing=True, expands=False)
    assert head / GIB == pytest.approx(1.37, abs=0.02)


def test_a_tile_is_padded_and_has_its_share_of_row_scales_and_counters() -> None:
    """A layer of 80 x 192 takes 2 x 4 tiles of 2304 bytes."""
    layer = (weight_bytes.LinearSize("model.layers.0.mlp.down_proj", 80, 192, False),)
    tiles, row_scale, counters = 2 * 4 * 2304, 4 * 80, 4 * 1024
    assert weight_bytes._engine_layer(layer, "qerl_nvfp4", "tiled", 2) == tiles + row_scale + counters


@pytest.mark.parametrize("kept_whole", [None, "model.layers.0.mlp.down_proj"])
def test_a_layer_that_the_checkpoint_keeps_in_bf16_is_counted_so(kept_whole: str | None) -> None:
    config = shapes.config_json("0.5B")
    ignore = ["lm_head"] + ([kept_whole] if kept_whole else [])
    size = measure({**config, "quantization_config": quantization_config(ignore)})
    packed = [linear for linear in size.linears if linear.quantized]
    assert len(packed) == 7 * 24 - (kept_whole is not None)


def unique_bytes(tensors: Any) -> int:
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor.numel()}.values())


def test_a_plan_is_the_sum_of_the_bytes_of_real_tensors(make_trainer: Any, tmp_path: Path) -> None:
    """Engine, trainer and adapter of the demo's model, each tensor counted; the scales of the cache apart."""
    base = tmp_path / "nvfp4"
    quantize_checkpoint(DEMO_MODEL, base)
    trainer, size = make_trainer(base, rank=32), measure(read_config(base))
    runner = trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker.worker.model_runner
    engine = runner.get_model()
    named = [*engine.named_parameters(), *engine.named_buffers()]
    adapter = sum(tensor.nbytes for name, tensor in named if name.endswith((".policy_a", ".policy_b")))
    assert weight_bytes.resident_adapter(size, 32) == adapter
    weights = [tensor for name, tensor in named if ".policy_" not in name and ".attn._" not in name]
    assert weight_bytes.engine_weights(size, "qerl_nvfp4", "canonical") == unique_bytes(weights)
    model = trainer.model
    frozen = [t for n, t in [*model.named_parameters(), *model.named_buffers()] if ".lora_" not in n]
    assert weight_bytes.trainer_weights(size, "qerl_nvfp4", "canonical", shared=False) == unique_bytes(frozen)
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    assert 4 * weight_bytes.adapter_elements(size.linears, 32) == trained


def test_a_checkpoint_that_nobody_knows_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"no config\.json in a folder of that name"):
        read_config(tmp_path / "nothing")
    with pytest.raises(ValueError, match="cannot build a causal language model of type 'no_such_type'"):
        measure({"model_type": "no_such_type"})


def test_the_engine_computes_as_many_tokens_at_once_as_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    from qerl_recipes.recipe.configs import GRPOConfig
    from qerl_recipes.rollout.engine import VLLMRollouts

    engine = object.__new__(VLLMRollouts)
    engine._training = GRPOConfig(output_dir="unused", use_cpu=True, bf16=False)
    engine._tensor_parallel, engine._processes = 1, 1
    engine._accelerator = type("Accelerator", (), {"process_index": 0})()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = engine._options("Qwen/Qwen3-8B", 16, torch.bfloat16)
    assert options["max_num_batched_tokens"] == activation_bytes.ENGINE_TOKENS
