"""Plan the memory of several engines on one GPU before any of them starts.

vLLM's own measuring would count what another engine has taken as its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from qerl_recipes.bench.arms import Figures
from qerl_recipes.bench.engines import FP8, options
from qerl_recipes.bench.rollout_arm import Case, longest, most_sequences, prefill
from qerl_recipes.machine.gpu import GB, gigabytes, installed_gpu, used_bytes
from qerl_recipes.memory import estimates, sizes
from qerl_recipes.memory.sizes import ModelSize, measure
from qerl_recipes.recipe.shapes import config_json
from qerl_recipes.rollout.arms import ENGINE_QUANTIZATION

SET_HERE = ("kv_cache_memory_bytes", "gpu_memory_utilization")
ITEMSIZE = 2  # bytes of an activation in BF16 or float16
MARGIN = 1.1  # of the cache, for blocks that a step ahead takes
ALLOWANCE = 3 * GB  # of an engine on each GPU: CUDA's context, NCCL, workspaces, what torch's allocator keeps
# vLLM refuses to start where less than this share of the GPU is free, also where another engine's start has just taken
# it. Whether all engines fit is known before.
LEAST_SHARE = 0.01
BLOCK = 16  # tokens of vLLM's blocks on a GPU
TOKENS_AT_ONCE = 16384  # vLLM's max_num_batched_tokens, on a GPU of 70 GiB or more; half of it on a smaller one


def plan(shape: str, requests: Mapping[str, Figures], cases: Sequence[Case]) -> dict[str, Figures]:
    """Return what says to ``vllm.LLM`` how much memory each arm has; raise ValueError if they do not fit together."""
    gpu, size = installed_gpu(), measure(config_json(shape))
    if gpu is None:
        return {name: {} for name in requests}
    parts = {name: _parts(size, request, cases) for name, request in requests.items()}
    needed = {name: sum(bytes_of.values()) for name, bytes_of in parts.items()}
    free, total = gpu.memory - used_bytes(), sum(needed.values())
    if total > free:
        each = "; ".join(
            f"{name} {gigabytes(needed[name])} "
            f"({', '.join(f'{part} {gigabytes(count)}' for part, count in bytes_of.items())})"
            for name, bytes_of in parts.items()
        )
        raise ValueError(
            f"--interleave has {len(needed)} engines at once, which take {gigabytes(total)} of each GPU, and "
            f"{gigabytes(free)} of its {gigabytes(gpu.memory)} are free: {each}. Name fewer arms, caches or variants, "
            "or smaller cases; or leave --interleave out, and they are measured one after the other"
        )
    return {
        name: {"kv_cache_memory_bytes": bytes_of["cache"], "gpu_memory_utilization": LEAST_SHARE}
        for name, bytes_of in parts.items()
    }


def _cache(size: ModelSize, request: Mapping[str, Any], cases: Sequence[Case]) -> int:
    """Return the bytes on each GPU of a KV cache in which no sequence of any case waits for another."""
    block = request["engine"].get("block_size") or BLOCK
    blocks = [sum(-(-(case.input + n) // block) + 1 for n in case.outputs) for case in (*cases, prefill(cases))]
    tokens = max(blocks) * block
    itemsize = 1 if request["kv_cache_dtype"].startswith("fp8") else ITEMSIZE
    return int(MARGIN * tokens * estimates.cache_of_a_token(size, request["tensor_parallel"], itemsize))


def _parts(size: ModelSize, request: Mapping[str, Any], cases: Sequence[Case]) -> dict[str, int]:
    """Return the bytes on each GPU of one arm's engine, by what they are for."""
    arm, rank = request["arm"], request["rank"]
    chosen = options(arm, rank, config_json(request["shape"]))
    plugin_options = chosen.get("additional_config", {}).get("qerl", {})
    is_fp8 = chosen.get("quantization") == FP8
    if arm.startswith("stock_nvfp4"):  # packed by its checkpoint, and not by an option
        kind = "qerl_nvfp4"
    else:
        kinds: dict[str | None, str] = {theirs: kind for kind, theirs in ENGINE_QUANTIZATION.items()}
        kind = (kinds | {FP8: "bf16"})[chosen.get("quantization")]
    weights = sizes.engine_weights(size, kind, ITEMSIZE)
    if is_fp8:  # experts are left at what they take in 16 bits
        weights -= sum((ITEMSIZE - 1) * part.N * part.K for parts in size.fused for part in parts)
    if "policy_adapter" in plugin_options:
        weights += sizes.resident_adapter(size, plugin_options["policy_adapter"]["rank"], ITEMSIZE)
    if "max_lora_rank" in chosen:
        weights += sizes.adapter_slots(size, chosen["max_lora_rank"], ITEMSIZE)
    sequences = most_sequences(cases)
    tokens = request["engine"].get("max_num_batched_tokens") or TOKENS_AT_ONCE
    scratch = estimates.engine_scratch(
        size, sequences, expands=kind != "bf16", itemsize=ITEMSIZE, tokens=min(tokens, sequences * longest(cases))
    )
    return {
        "cache": _cache(size, request, cases),
        "weights": weights // request["tensor_parallel"],
        "at work": scratch + estimates.GRAPHS,
        "allowance": ALLOWANCE,
    }
