"""The memory of several engines on one GPU, planned before any of them starts: vLLM's own measuring would take what
another engine has for its own."""

from collections.abc import Mapping, Sequence
from typing import Any

from qerl_recipes.bench import rollout_cases
from qerl_recipes.bench.rollout_arm import options
from qerl_recipes.bench.rollout_cases import Case
from qerl_recipes.machine.gpu import GB, Gpu, gigabytes, installed_gpu, used_bytes
from qerl_recipes.memory import activation_bytes, engine_bytes, weight_bytes
from qerl_recipes.memory.model_size import ModelSize, measure
from qerl_recipes.recipe.shapes import config_json
from qerl_recipes.rollout.arms import ENGINE_QUANTIZATION

SET_HERE = ("kv_cache_memory_bytes", "gpu_memory_utilization")
ITEMSIZE = 2  # of an activation: BF16 or float16
MARGIN = 1.1  # of the cache, for blocks that a step ahead takes
ALLOWANCE = 3 * GB  # of an engine on each GPU: CUDA's context, NCCL, workspaces, what torch's allocator keeps
# vLLM refuses to start where less than this share of the GPU is free, and so would one that another engine's start has
# outrun; whether all of them fit is known before
LEAST_SHARE = 0.01
BLOCK = 16  # tokens of vLLM's blocks on a GPU
LARGE_GPU = 70 * 2**30  # from here on vLLM computes more tokens at once
TOKENS_AT_ONCE = {True: 16384, False: 8192}  # vLLM's max_num_batched_tokens by that


def plan(shape: str, requests: Mapping[str, Mapping[str, Any]], cases: Sequence[Case]) -> dict[str, dict[str, Any]]:
    """For each arm by its name the arguments of ``vllm.LLM`` that say how much memory it has; none on a CPU, where
    vLLM's VLLM_CPU_KVCACHE_SPACE says it.

    Raises ValueError, with the bytes of each, for arms that do not fit on the GPU together.
    """
    gpu, size = installed_gpu(), measure(config_json(shape))
    if gpu is None:
        return {name: {} for name in requests}
    caches = {name: cache(size, request, cases) for name, request in requests.items()}
    _check(gpu, {name: _parts(size, gpu, request, cases) for name, request in requests.items()}, caches)
    return {
        name: {"kv_cache_memory_bytes": held, "gpu_memory_utilization": LEAST_SHARE} for name, held in caches.items()
    }


def cache(size: ModelSize, request: Mapping[str, Any], cases: Sequence[Case]) -> int:
    """Bytes on each GPU of a KV cache in which no sequence of any case waits for another."""
    block = request["engine"].get("block_size") or BLOCK
    tokens = max(batch * (-(-length // block) + 1) * block for batch, length in rollout_cases.rows(cases))
    itemsize = 1 if request["kv_cache_dtype"].startswith("fp8") else ITEMSIZE
    return int(MARGIN * tokens * engine_bytes.cache_of_a_token(size, request["tensor_parallel"], itemsize))


def _check(gpu: Gpu, parts: Mapping[str, Mapping[str, int]], caches: Mapping[str, int]) -> None:
    needed = {name: sum(held.values()) + caches[name] for name, held in parts.items()}
    used = used_bytes()
    if (total := sum(needed.values())) <= gpu.memory - used:
        return
    each = "; ".join(
        f"{name} {gigabytes(needed[name])} (cache {gigabytes(caches[name])}, "
        + ", ".join(f"{part} {gigabytes(count)}" for part, count in held.items())
        + ")"
        for name, held in parts.items()
    )
    raise ValueError(
        f"--interleave has {len(needed)} engines at once, which take {gigabytes(total)} of each GPU, and "
        f"{gigabytes(gpu.memory - used)} of its {gigabytes(gpu.memory)} are free: {each}. Name fewer arms, caches or "
        "variants, or smaller cases; or leave --interleave out, and they are measured one after the other"
    )


def _parts(size: ModelSize, gpu: Gpu, request: Mapping[str, Any], cases: Sequence[Case]) -> dict[str, int]:
    """Bytes on each GPU of all but the cache."""
    arm, rank, ranks = request["arm"], request["rank"], request["tensor_parallel"]
    chosen = options(arm, rank, config_json(request["shape"]))
    ours = chosen.get("additional_config", {}).get("qerl", {})
    is_stock = arm == "stock_nvfp4"  # packed by its checkpoint, and not by an option
    kinds = {theirs: kind for kind, theirs in ENGINE_QUANTIZATION.items()}
    kind = "qerl_nvfp4" if is_stock else kinds[chosen.get("quantization")]
    layout = "marlin" if is_stock or ours.get("kernel") == "marlin" else engine_bytes.layout(gpu, ITEMSIZE)
    weights = weight_bytes.engine_weights(size, kind, layout, ITEMSIZE)
    if "policy_adapter" in ours:
        weights += weight_bytes.resident_adapter(size, ours["policy_adapter"]["rank"], ITEMSIZE)
    if "max_lora_rank" in chosen:
        weights += weight_bytes.adapter_slots(size, chosen["max_lora_rank"], ITEMSIZE)
    sequences = rollout_cases.sequences(cases)
    tokens = request["engine"].get("max_num_batched_tokens") or TOKENS_AT_ONCE[gpu.memory >= LARGE_GPU]
    work = activation_bytes.engine_scratch(
        size,
        sequences,
        expands=kind != "bf16",
        itemsize=ITEMSIZE,
        tokens=min(tokens, sequences * rollout_cases.length(cases)),
    )
    return {"weights": weights // ranks, "at work": work + activation_bytes.GRAPHS, "allowance": ALLOWANCE}
