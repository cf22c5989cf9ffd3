"""``qerl bench swap``: how long a change of policy takes, adapter and noise, from tensors on the engine's own device.

Weights and adapter are random and of the real shapes, so nothing is downloaded. The adapter is in fp32, as it is
trained. A change empties vLLM's prefix cache, which takes time by the block and is measured by itself too.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qerl_recipes.bench.process import answer, check_gpus, check_shape, in_own_process
from qerl_recipes.machine.conditions import conditions, save
from qerl_recipes.recipe.shapes import config_json
from qerl_recipes.rollout.arms import engine_options

WARM_UP, REPEATS = 3, 10


def run(shape: str, *, rank: int = 32, tensor_parallel_size: int = 1, output: Path | None = None) -> dict[str, Any]:
    """Measure, print the figures, and write them to ``output`` as JSON.

    Raises ValueError for an unknown shape, and for a large one without a GPU, ArmFailedError if the engine's process
    does.
    """
    check_shape(shape)
    check_gpus(tensor_parallel_size)
    result = {
        "shape": shape,
        "rank": rank,
        "tensor_parallel_size": tensor_parallel_size,
        **conditions(),
        **in_own_process(__name__, {"shape": shape, "rank": rank, "tensor_parallel": tensor_parallel_size}),
    }
    save(result, output)
    milliseconds = {what: 1e3 * seconds for what, seconds in result["seconds"].items()}
    print(
        f"{shape}, rank {rank}, {result['gpu']}, engine in {result['engine']}, "
        f"tensors on {result['tensors']}: a swap takes {milliseconds['swap']:.1f} ms, a change of noise "
        f"{milliseconds['noise']:.1f} ms, each with {milliseconds['prefix_cache']:.1f} ms in which vLLM empties its "
        f"prefix cache of {result['blocks']} blocks"
    )
    return result


def measure(request: dict[str, Any], found: dict[str, Any]) -> None:
    """In this process: median seconds of each change, and the blocks of the KV cache."""
    import torch

    from qerl_recipes.bench import random_model
    from qerl_vllm_plugin.policy import Policy

    config, rank = config_json(request["shape"]), request["rank"]
    # nothing is generated: graphs would only take time
    options = {**engine_options("qerl_nvfp4", rank), "enforce_eager": True, "enable_prefix_caching": True}
    parallel = request["tensor_parallel"]
    options["tensor_parallel_size"] = parallel
    found["engine"] = "the caller's process" if parallel == 1 else f"{parallel} processes of its own"
    llm = random_model.start(config, length=256, sequences=8, **options)
    policy = Policy(llm)
    device = "cuda" if torch.cuda.is_available() and parallel == 1 else "cpu"
    found["tensors"] = "the engine's device" if parallel == 1 else "the CPU"
    tensors, adapter_config = random_model.adapter(config, rank)
    tensors = {name: tensor.to(device, torch.float32) for name, tensor in tensors.items()}

    def median(change: Callable[[], object]) -> float:
        found = []
        for _ in range(WARM_UP + REPEATS):
            began = time.perf_counter()
            change()
            if device == "cuda":
                torch.cuda.synchronize()
            found.append(time.perf_counter() - began)
        return statistics.median(found[WARM_UP:])

    found["seconds"] = {
        "swap": median(lambda: policy.swap(tensors, adapter_config)),
        "noise": median(lambda: policy.set_noise(1e-2, seed=0, rollout=1)),
        "prefix_cache": median(llm.reset_prefix_cache),
    }
    found["blocks"] = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks


if __name__ == "__main__":
    from qerl_recipes.machine.environment import prepare

    prepare()
    answer(measure)
