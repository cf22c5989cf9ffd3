"""Computes the bytes of an engine on one GPU: weights, room for the adapter, KV cache and scratch."""

from qerl_recipes.files.adapter import engine_rank
from qerl_recipes.machine.gpu import Gpu
from qerl_recipes.memory import activation_bytes, weight_bytes
from qerl_recipes.memory.model_size import ModelSize
from qerl_recipes.recipe.configs import GRPOConfig

BF16 = 2


def left_for_cache(size: ModelSize, training: GRPOConfig, gpu: Gpu, *, rank: int, itemsize: int = BF16) -> int:
    """Return the bytes planned for the engine's KV cache.

    They are the recipe's ``vllm_kv_cache_memory_bytes``, or else the rest of the engine's share of the GPU. The rest is
    negative if the share is too small. ``rank`` is that of the trained adapter.
    """
    if training.vllm_kv_cache_memory_bytes is not None:
        return training.vllm_kv_cache_memory_bytes
    budget = int(training.vllm_gpu_memory_utilization * gpu.memory)
    return budget - beside_cache(size, training, gpu, rank=rank, itemsize=itemsize)


def beside_cache(size: ModelSize, training: GRPOConfig, gpu: Gpu, *, rank: int, itemsize: int = BF16) -> int:
    """Return the bytes planned for the engine without its KV cache."""
    weights_and_adapter = weights(size, training, layout(gpu, itemsize), rank=rank, itemsize=itemsize)
    return sum(weights_and_adapter) + scratch(size, training, itemsize) + activation_bytes.GRAPHS


def cache_of_a_token(size: ModelSize, tensor_parallel: int, itemsize: int) -> int:
    """Return the bytes that one token takes in the KV cache of one GPU: keys and values of all layers.

    ``itemsize`` is the bytes of a number in the cache's dtype.
    """
    return 2 * size.layers * -(-size.kv_heads // tensor_parallel) * size.head_dim * itemsize


def layout(gpu: Gpu, itemsize: int) -> str:
    """Return the layout in which the engine holds NVFP4 weights, "tiled" or "marlin"."""
    return "tiled" if gpu.is_hopper and itemsize == BF16 else "marlin"


def sequences(training: GRPOConfig) -> int:
    """Return the number of sequences that one engine samples in a rollout, for all of its tensor-parallel ranks."""
    per_process = training.per_device_train_batch_size * (training.steps_per_generation or 1)
    return per_process * training.vllm_tensor_parallel_size


def weights(size: ModelSize, training: GRPOConfig, form: str, *, rank: int, itemsize: int) -> tuple[int, int]:
    """Return the bytes of the weights and of the room for the adapter on one GPU of the engine.

    ``form`` is the layout of NVFP4 weights.
    """
    arm, ranks = training.quantization, training.vllm_tensor_parallel_size
    slots = weight_bytes.resident_adapter if arm == "qerl_nvfp4" else weight_bytes.adapter_slots
    held = weight_bytes.engine_weights(size, arm, form, itemsize)
    return held // ranks, slots(size, engine_rank(rank), itemsize) // ranks


def scratch(size: ModelSize, training: GRPOConfig, itemsize: int) -> int:
    """Return the bytes of an engine's temporary tensors."""
    expands = training.quantization != "bf16"
    return activation_bytes.engine_scratch(size, sequences(training), expands=expands, itemsize=itemsize)
