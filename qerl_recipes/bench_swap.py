"""``qerl bench swap``: how long a change of policy takes, adapter and noise, from tensors on the engine's own device.

Weights and adapter are random and of the real shapes, so nothing is downloaded. The adapter is in fp32, as it is
trained. A change empties vLLM's prefix cache, which takes time by the block and is measured by itself too.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qerl_recipes.arms import engine_options
from qerl_recipes.bench_conditions import conditions, save
from qerl_recipes.bench_engine import check_shape, in_own_process, random_adapter, start
from qerl_recipes.shapes import config_json

WARM_UP, REPEATS = 3, 10


def run(shape: str, *, rank: int = 32, output: Path | None = None) -> dict[str, Any]:
    """Measure, print the figures, and write them to ``output`` as JSON.

    Raises ValueError for an unknown shape, and for a large one without a GPU, RuntimeError if the engine's process
    fails.
    """
    check_shape(shape)
    result = {"shape": shape, "rank": rank, **conditions(), **in_own_process(__name__, shape, str(rank))}
    save(result, output)
    milliseconds = {what: 1e3 * seconds for what, seconds in result["seconds"].items()}
    print(
        f"{shape}, rank {rank}, {result['gpu']}: a swap takes {milliseconds['swap']:.1f} ms, a change of noise "
        f"{milliseconds['noise']:.1f} ms, each with {milliseconds['prefix_cache']:.1f} ms in which vLLM empties its "
        f"prefix cache of {result['blocks']} blocks"
    )
    return result


def measure(shape: str, rank: int) -> dict[str, Any]:
    """In this process -> median seconds of each change, and the blocks of the KV cache."""
    import torch

    from qerl_vllm_plugin.policy import Policy

    config = config_json(shape)
    # nothing is generated: graphs would only take time
    options = {**engine_options("qerl_nvfp4", rank), "enforce_eager": True, "enable_prefix_caching": True}
    llm = start(config, length=256, sequences=8, **options)
    policy = Policy(llm)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors, adapter_config = random_adapter(config, rank)
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

    seconds = {
        "swap": median(lambda: policy.swap(tensors, adapter_config)),
        "noise": median(lambda: policy.set_noise(1e-2, seed=0, rollout=1)),
        "prefix_cache": median(llm.reset_prefix_cache),
    }
    return {"seconds": seconds, "blocks": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks}


if __name__ == "__main__":
    from qerl_recipes.environment import prepare

    prepare()
    _shape, _rank = sys.argv[1:]
    print(json.dumps(measure(_shape, int(_rank))))
