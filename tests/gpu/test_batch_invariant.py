"""Measure an experiment: our product and vLLM's kernels sum in one order whatever the batch.

The tests show its effect and its cost. Run them by:

VLLM_BATCH_INVARIANT=1 tests/gpu/run.sh tests/gpu/test_batch_invariant.py
"""

import dataclasses
import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
sys.path.insert(0, str(Path(__file__).parents[2] / "kernels" / "bench"))

LAYERS = {"7B qkv": (4608, 3584), "7B gate_up": (37888, 3584), "7B down": (3584, 18944)}
PROMPTS = [[(13 * i + 7 * j) % 500 + 2 for j in range(60)] for i in range(4)]


def example(N, K, operand):
    """Return a tiled weight with free order, the same with fixed order, and an adapter."""
    import gate
    from qerl_kernels import tiles

    codes = torch.randint(0, 256, (N, K // 2), device="cuda", dtype=torch.uint8)
    scales = torch.randint(40, 110, (N, K // 16), device="cuda", dtype=torch.uint8).view(torch.float8_e4m3fn)
    free = tiles.tile_weight(codes, scales, torch.full((), 1e-4, device="cuda"), operand)
    return free, dataclasses.replace(free, fixed_order=True), gate.two_parts(N, K, 32, operand)


@pytest.mark.parametrize("operand", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(4608, 3584), (3584, 18944), (640, 1536)], ids=str)
def test_a_token_has_the_same_bits_in_every_batch(shape, operand):
    from qerl_kernels import linear_tiles

    torch.manual_seed(0)
    N, K = shape
    free, fixed, adapter = example(N, K, operand)
    x = torch.randn(2100, K, device="cuda").to(operand)
    for given in (None, adapter):
        whole = linear_tiles.linear(x, fixed, None, given)
        exact = linear_tiles.linear(x[:64], free, None, given).double()
        assert (whole[:64].double() - exact).norm() < 5e-3 * exact.norm()
        for M in (1, 7, 8, 9, 16, 33, 64, 129, 200, 256, 300, 513, 1024, 2100):
            assert torch.equal(linear_tiles.linear(x[:M], fixed, None, given), whole[:M]), M
            first = 2100 - M
            assert torch.equal(linear_tiles.linear(x[first:], fixed, None, given), whole[first:]), M
    # Control: without the fixed order, bits depend on M. In a small layer rounded to bfloat16 only a few numbers show
    # it.
    ordinary = [linear_tiles.linear(x[:M], free)[:8] for M in (8, 64, 256, 1024)]
    assert not all(torch.equal(y, ordinary[0]) for y in ordinary)


def test_what_one_order_costs(record):
    import timing
    from qerl_kernels import linear_tiles, tiles

    for name, (N, K) in LAYERS.items():
        free, fixed, adapter = example(N, K, torch.bfloat16)
        count = timing.copies(free.tiles.numel())
        copies: dict[str, list[tiles.TiledWeight]] = {"free": [free], "fixed": [fixed]}
        for _ in range(count - 1):
            own = {"tiles": free.tiles.clone(), "counters": torch.zeros_like(free.counters)}
            copies["free"].append(dataclasses.replace(free, **own))
            copies["fixed"].append(dataclasses.replace(fixed, **own))
        for M in (8, 64, 256, 1024):
            x = torch.randn(M, K, device="cuda").bfloat16()
            calls = {
                order: [partial(linear_tiles.linear, x, w, None, adapter) for w in weights]
                for order, weights in copies.items()
            }
            took = timing.interleaved(calls)
            ratio = took["fixed"] / took["free"]
            record(f"{name}, {M} tokens: us in one order, over the usual", f"{took['fixed']:.1f}, {ratio:.2f}")
        del copies, free, fixed
        torch.cuda.empty_cache()


@pytest.mark.skipif(os.environ.get("VLLM_BATCH_INVARIANT") != "1", reason="set VLLM_BATCH_INVARIANT=1")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_mismatch_of_a_trainer_on_the_same_kernel(dtype, deep, start_engine, off_by, record):
    """Use the model of test_depth.py; its trainer reads the engine's weights with the engine's kernel."""
    from vllm import SamplingParams

    from qerl_recipes.model import loading
    from qerl_vllm_plugin.weights.frozen_weights import frozen_weights

    folder, options = deep[1], {"policy_adapter": {"rank": 16}, "kernel": "batch_invariant"}
    engine = start_engine(
        folder,
        dtype=dtype,
        gpu_memory_utilization=0.15,
        max_model_len=256,
        max_num_seqs=8,
        enable_prefix_caching=False,
        additional_config={"qerl": options},
    )
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)

    def score(prompts):
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return [
            [output.prompt_logprobs[at][ids[at]].logprob for at in range(1, len(ids))]
            for ids, output in zip(prompts, outputs, strict=True)
        ]

    together, alone = score(PROMPTS), [score([ids])[0] for ids in PROMPTS]
    record(f"batch invariant {dtype}: the same bits alone and in a batch of 4", together == alone)
    trainer = loading.load(folder, getattr(torch, dtype), weights=frozen_weights(engine))
    found = off_by(engine, trainer, PROMPTS)
    record(f"batch invariant {dtype}, 32 layers: log-probability difference of engine and trainer: mean",
           f"{sum(found) / len(found):.5f}")  # fmt: skip
    assert together == alone
