"""Everything that depends on the insides of vLLM, for 0.26 to 0.32, and the one graft on a class of another package."""

from typing import Any

import torch
import vllm
from packaging.version import InvalidVersion, Version
from vllm.logger import init_logger

logger = init_logger("vllm.qerl")

OLDEST, FIRST_UNSUPPORTED = Version("0.26"), Version("0.33")
TESTED = ("0.26.0", "0.31.0")


def check_vllm_version(version: str = vllm.__version__) -> None:
    """Raises RuntimeError for a vLLM that the plugin was not written for; warns once for one it was not tested with."""
    try:
        release = Version(Version(version).base_version)
    except InvalidVersion:
        logger.warning_once("cannot read vLLM's version %r; qerl_nvfp4 was tested with %s", version, ", ".join(TESTED))
        return
    if not OLDEST <= release < FIRST_UNSUPPORTED:
        raise RuntimeError(f"qerl_nvfp4 supports vLLM >= {OLDEST}, < {FIRST_UNSUPPORTED}; this is {version}")
    if str(release) not in TESTED:
        logger.warning_once("qerl_nvfp4 was tested with vLLM %s; this is %s", ", ".join(TESTED), version)


def add_worker_methods() -> None:
    """Gives vLLM's WorkerBase the ``qerl_*`` methods that ``collective_rpc`` reaches by name; idempotent.

    This is the one graft on another package's class. ``--worker-extension-cls`` would do the same, but would have to
    be typed by every user and excludes any other extension.
    """
    from vllm.v1.worker.worker_base import WorkerBase

    from qerl_vllm_plugin import worker

    for name in worker.METHODS:
        method = getattr(worker, name)
        present = getattr(WorkerBase, name, None)
        if present is None:
            setattr(WorkerBase, name, method)
        elif present is not method:
            raise RuntimeError(f"vLLM's WorkerBase already has a method {name} from {present.__module__}")


def max_over_tensor_parallel_ranks(amax: torch.Tensor) -> torch.Tensor:
    """The largest ``amax: ()`` of all tensor-parallel ranks, so that they share one tensor scale."""
    from vllm.config import get_current_vllm_config
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return amax
    extra = get_current_vllm_config().load_config.model_loader_extra_config or {}
    if isinstance(extra, dict) and extra.get("enable_multithread_load"):
        raise ValueError(
            "a BF16 checkpoint cannot be quantized on the way in with enable_multithread_load and tensor parallelism: "
            "the ranks would meet the layers in different orders. Quantize it first (qerl quantize)"
        )
    largest = amax.float().cpu()
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    return largest.to(amax)


def is_fused_experts(layer: torch.nn.Module) -> bool:
    """Whether a layer holds the experts of a mixture of experts."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    return isinstance(layer, RoutedExperts)


def is_linear(layer: torch.nn.Module) -> bool:
    """Whether a layer is one of vLLM's linears, quantized or not."""
    from vllm.model_executor.layers.linear import LinearBase

    return isinstance(layer, LinearBase)


def is_vocabulary(layer: torch.nn.Module) -> bool:
    """Whether a layer is an embedding or a head, whose rows vLLM pads."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return isinstance(layer, VocabParallelEmbedding)


def model_of(worker: Any) -> torch.nn.Module:
    return worker.model_runner.get_model()


def model_in_this_process(llm: Any) -> torch.nn.Module | None:
    """The model of a ``vllm.LLM`` whose worker runs in this process; None if it runs in another one."""
    executor = getattr(llm.llm_engine, "model_executor", None)
    worker = getattr(executor, "driver_worker", None)
    return None if worker is None else model_of(worker)


def norm_layers(worker: Any) -> dict[str, torch.nn.Module]:
    """Every RMSNorm with a weight, by the name of its parameter in the checkpoint."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    return {
        f"{name}.weight": module
        for name, module in model_of(worker).named_modules()
        if isinstance(module, RMSNorm) and isinstance(module.weight, torch.nn.Parameter)
    }


def output_sizes(layer: Any, parts: int) -> list[int]:
    """Rows of each part of a vLLM linear, over all tensor-parallel ranks."""
    if parts == 1:
        return [layer.output_size]
    if hasattr(layer, "total_num_heads"):  # q, k, v; vLLM's own output_sizes count replicated key/value heads
        value_size = getattr(layer, "v_head_size", layer.head_size)
        key_heads = layer.total_num_kv_heads
        return [layer.total_num_heads * layer.head_size, key_heads * layer.head_size, key_heads * value_size]
    return list(layer.output_sizes)


def shard_id(layer: Any, part: int) -> str | int:
    """What vLLM's weight loader calls a part of a fused linear."""
    return "qkv"[part] if hasattr(layer, "total_num_heads") else part
