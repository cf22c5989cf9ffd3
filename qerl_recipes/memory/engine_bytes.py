"""What an engine on a GPU holds, in bytes: weights, room for the adapter, KV cache, and what it computes with."""

from qerl_recipes.files.adapter import engine_rank
from qerl_recipes.machine.gpu import Gpu
from qerl_recipes.memory import activation_bytes, weight_bytes
from qerl_recipes.memory.model_size import ModelSize
from qerl_recipes.recipe.configs import GRPOConfig

BF16 = 2


def left_for_cache(size: ModelSize, training: GRPOConfig, gpu: Gpu, *, rank: int, itemsize: int = BF16) -> int:
    """Bytes that are planned for the engine's KV cache: as the recipe has it, or what is left of the engine's share of
    a GPU, below 0 where there is nothing; ``rank`` is the trained adapter's."""
    if training.vllm_kv_cache_memory_bytes is not None:
        return training.vllm_kv_cache_memory_bytes
    budget = int(training.vllm_gpu_memory_utilization * gpu.memory)
    return budget - beside_cache(size, training, gpu, rank=rank, itemsize=itemsize)


def beside_cache(size: ModelSize, training: GRPOConfig, gpu: Gpu, *, rank: int, itemsize: int = BF16) -> int:
    """Bytes that are planned for all of the engine but its KV cache."""
    held = weights(size, training, layout(gpu, itemsize), rank=rank, itemsize=itemsize)
    return sum(held) + scratch(size, training, itemsize) + activation_bytes.GRAPHS


def cache_of_a_token(size: ModelSize, tensor_parallel: int, itemsize: int) -> int:
    """Bytes: keys and values of all layers, on one GPU of the engine; ``itemsize``: of the cache's dtype."""
    return 2 * size.layers * -(-size.kv_heads // tensor_parallel) * size.head_dim * itemsize


def layout(gpu: Gpu, itemsize: int) -> str:
    """The form in which the engine holds NVFP4 weights, "tiled" or "marlin"."""
    return "tiled" if gpu.is_hopper and itemsize == BF16 else "marlin"


def sequences(training: GRPOConfig) -> int:
    """How many sequences one engine computes at a time."""
    own = training.per_device_train_batch_size * (training.steps_per_generation or 1)
    return own * training.vllm_tensor_parallel_size


def weights(size: ModelSize, training: GRPOConfig, form: str, *, rank: int, itemsize: int) -> tuple[int, int]:
    """Weights and room for the adapter on one GPU of the engine."""
    arm, ranks = training.quantization, training.vllm_tensor_parallel_size
    slots = weight_bytes.resident_adapter if arm == "qerl_nvfp4" else weight_bytes.adapter_slots
    held = weight_bytes.engine_weights(size, arm, form, itemsize)
    return held // ranks, slots(size, engine_rank(rank), itemsize) // ranks


def scratch(size: ModelSize, training: GRPOConfig, itemsize: int) -> int:
    """Bytes of what an engine computes with."""
    expands = training.quantization != "bf16"
    return activation_bytes.engine_scratch(size, sequences(training), expands=expands, itemsize=itemsize)
