"""Query and change an engine in ways that depend on vLLM's insides, as read in 0.26 to 0.32.

The other files of this package have a subject each. They are an engine's clients (engine_client), a forward over single
tokens (first_tokens), loading, LoRA loading, KV-cache memory, the scheduler, and seeded requests on a CPU (seeds).
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import vllm
from packaging.version import InvalidVersion, Version
from vllm.logger import init_logger
from vllm.platforms import current_platform

from qerl_vllm_plugin import TESTED_VLLM

logger = init_logger("vllm.qerl")

OLDEST, FIRST_UNSUPPORTED = Version("0.26"), Version("0.33")
FIRST_THAT_COUNTS = Version("0.31")  # the first tested release of which counts_released_memory is true


def check_vllm_version(version: str = vllm.__version__) -> None:
    """Raise RuntimeError for a vLLM that the plugin does not support; warn once for one it was not tested with."""
    release = _release(version)
    if release is None:
        logger.warning_once(
            "cannot read vLLM's version %r; qerl_nvfp4 was tested with %s", version, ", ".join(TESTED_VLLM)
        )
        return
    if not OLDEST <= release < FIRST_UNSUPPORTED:
        raise RuntimeError(f"qerl_nvfp4 supports vLLM >= {OLDEST}, < {FIRST_UNSUPPORTED}; this is {version}")
    if str(release) not in TESTED_VLLM:
        logger.warning_once("qerl_nvfp4 was tested with vLLM %s; this is %s", ", ".join(TESTED_VLLM), version)


def counts_released_memory(version: str = vllm.__version__) -> bool:
    """Return True if an engine with sleep mode counts memory that loading took and gave back as free once, not twice.

    vLLM 0.26 counts it twice. It subtracts what torch has reserved from what the GPU has in use, but torch does not
    learn that the pool of weights gave some back. The KV cache then exceeds the engine's share by as much as repacking
    has freed (17 GB of a 32B model on an H200).
    """
    release = _release(version)
    return release is None or release >= FIRST_THAT_COUNTS


def _release(version: str) -> Version | None:
    """Return the version without its build or candidate suffix, or None if it is not a version."""
    try:
        return Version(Version(version).base_version)
    except InvalidVersion:
        return None


def highest(here: int) -> int:
    """Return the highest number that any rank of this model passes.

    This is a collective: all tensor-parallel and pipeline-parallel ranks must call it.
    """
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    flag = torch.tensor([here])
    for group in (get_tp_group(), get_pp_group()):
        if group.world_size > 1:
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    return int(flag.item())


def of_all_stages(value: Any) -> list[Any]:
    """Return the ``value`` of every rank in this rank's pipeline.

    This is a collective: all of these ranks must call it.
    """
    from vllm.distributed.parallel_state import get_pp_group

    found = [value] * (group := get_pp_group()).world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(found, value, group=group.cpu_group)
    return found


def workers_share_this_machine(vllm_config: Any) -> bool:
    """Return True if every worker can open a file that this process has written."""
    parallel = vllm_config.parallel_config
    return parallel.distributed_executor_backend in ("mp", "uni") and getattr(parallel, "nnodes", 1) == 1


def api_servers(vllm_config: Any) -> int:
    """Return how many API server processes serve one engine."""
    return int(vllm_config.parallel_config._api_process_count)


def check_kv_cache(vllm_config: Any) -> None:
    """Raise ValueError for a 16-bit KV cache under float32 activations, which vLLM's CPU attention reads wrongly.

    Seen with 0.31: log-probabilities of a prompt off by 0.5, without an error.
    """
    stored, computed = vllm_config.cache_config.cache_dtype, vllm_config.model_config.dtype
    if current_platform.is_cpu() and computed == torch.float32 and stored in ("bfloat16", "float16"):
        raise ValueError(
            f"--kv-cache-dtype {stored} with --dtype float32: vLLM's CPU attention computes wrong answers from such a "
            "cache; leave --kv-cache-dtype out, or use --dtype bfloat16"
        )


def check_kv_connector(vllm_config: Any) -> None:
    """Raise ValueError for an engine with a KV connector that keeps keys and values outside, and cannot empty them.

    After a change of the policy that computed them, they would be read again.
    """
    if vllm_config.kv_transfer_config is None:
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    connector = KVConnectorFactory.get_connector_class(vllm_config.kv_transfer_config)
    if connector.reset_cache is KVConnectorBase_V1.reset_cache:
        raise ValueError(
            f"{connector.__name__} keeps keys and values outside the engine and cannot empty them, so that answers of "
            "one policy would be made from those of another; start the engine without it"
        )


def pipeline_stage() -> int:
    """Return the index of this rank's pipeline stage: which part of the model it holds."""
    from vllm.distributed.parallel_state import get_pp_group

    return get_pp_group().rank_in_group


def max_over_tensor_parallel_ranks(amax: torch.Tensor) -> torch.Tensor:
    """Return the largest ``amax: ()`` of all tensor-parallel ranks, so that they share one tensor scale.

    Raises ValueError for several ranks with enable_multithread_load.
    """
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
    """Return True if a layer holds the experts of a mixture of experts."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    return isinstance(layer, RoutedExperts)


def is_of_another_stage(layer: torch.nn.Module) -> bool:
    """Return True if a layer is a placeholder for one that another pipeline rank holds."""
    from vllm.model_executor.models.utils import PPMissingLayer

    return isinstance(layer, PPMissingLayer)


def is_attention(layer: torch.nn.Module) -> bool:
    """Return True if a layer is vLLM's attention, which holds the scales of the KV cache."""
    from vllm.model_executor.layers.attention import Attention

    return isinstance(layer, Attention)


def attentions(vllm_config: Any) -> list[torch.nn.Module]:
    """Return the attention layers of a loaded model, from vLLM's register of them.

    Before 0.30, a model that runs on transformers' own classes does not have them among its modules.
    """
    return [layer for layer in vllm_config.compilation_config.static_forward_context.values() if is_attention(layer)]


def kv_cache_method(quant_config: Any) -> Any:
    """Return vLLM's own method for the scales of an FP8 KV cache."""
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    return BaseKVCacheMethod(quant_config)


def checkpoint_names(mappers: Iterable[Any], name: str) -> list[str]:
    """Return what vLLM's module ``name`` may be called in the checkpoint.

    The first is ``name`` itself; the others are names that ``mappers`` turn into it. ``mappers``: vLLM's WeightsMapper
    of the model and of the models inside it.
    """
    found = [name]
    for mapper in mappers:
        for kind in ("prefix", "substr"):
            for theirs, ours in getattr(mapper, f"orig_to_new_{kind}").items():
                if ours is None or ours not in f"{name}.":
                    continue
                if kind == "prefix" and not f"{name}.".startswith(ours):
                    continue
                candidate = f"{name}.weight".replace(ours, theirs, 1)
                if mapper.apply_list([candidate]) == [f"{name}.weight"]:
                    found.append(candidate.removesuffix(".weight"))
    return list(dict.fromkeys(found))


def is_linear(layer: torch.nn.Module) -> bool:
    """Return True if a layer is one of vLLM's linears, quantized or not."""
    from vllm.model_executor.layers.linear import LinearBase

    return isinstance(layer, LinearBase)


def is_vocabulary(layer: torch.nn.Module) -> bool:
    """Return True if a layer is an embedding or a head, whose rows vLLM pads."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return isinstance(layer, VocabParallelEmbedding)


def model_of(worker: Any) -> torch.nn.Module:
    return worker.model_runner.get_model()


def runner_above() -> Any:
    """Find vLLM's model runner on the call stack; call this while the runner is building a model.

    Raises RuntimeError if there is none.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        owner = frame.f_locals.get("self")
        if hasattr(owner, "load_lora_model"):
            return owner
    raise RuntimeError("qerl_nvfp4: this vLLM builds its models in a way that is not known here")


def refuse_to_run(worker: Any, reason: Callable[[], Exception]) -> Callable[[], None]:
    """Make every further step of this worker raise ``reason``, which ends the engine; return what undoes this.

    The returned function does nothing if the worker has been refused anew since. The step is refused before its model
    is called, because a replayed CUDA graph calls no Python of the model.
    """

    def refuse(*_: Any, **__: Any) -> None:
        raise reason()

    steps = ("execute_model", "execute_dummy_batch")
    before = {name: worker.__dict__[name] for name in steps if name in worker.__dict__}
    worker.__dict__.update(dict.fromkeys(steps, refuse))

    def allow() -> None:
        if worker.__dict__.get(steps[0]) is refuse:
            for name in steps:
                del worker.__dict__[name]
            worker.__dict__.update(before)

    return allow


def may_sleep(worker: Any) -> bool:
    """Return True if a worker's engine was started with vLLM's sleep mode."""
    return bool(worker.vllm_config.model_config.enable_sleep_mode)


def weights_are_away() -> bool:
    """Return True if vLLM's sleep mode has taken the memory of this process's weights.

    Adapter and norms lie in the same memory.
    """
    if not current_platform.is_cuda():
        return False
    from vllm.device_allocator import cumem

    pool = cumem.CuMemAllocator.instance
    entries = () if pool is None else pool.pointer_to_data.values()
    return any(entry.tag == "weights" and entry.is_asleep for entry in entries)


def model_in_this_process(llm: Any) -> torch.nn.Module | None:
    """Return the model of a ``vllm.LLM`` whose worker runs in this process, or None if it runs in another one."""
    worker = getattr(getattr(llm.llm_engine, "model_executor", None), "driver_worker", None)
    return None if worker is None else model_of(worker)


def keep_names(model: torch.nn.Module, checkpoint_names: list[str]) -> None:
    """Store the checkpoint's names in the model for ``norm_layers``, where vLLM's names differ.

    They do for the language part of a vision-language model, for example.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is not None:
        mapped = [(mapper.apply_list([name]), name) for name in checkpoint_names]
        model.qerl_checkpoint_names = {ours[0]: theirs for ours, theirs in mapped if len(ours) == 1}


def norm_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return every RMSNorm with a weight, by its parameter's name in the checkpoint.

    Gemma's norms, which scale by 1 + w, are included.
    """
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

    names = getattr(model, "qerl_checkpoint_names", {})
    return {
        names.get(f"{name}.weight", f"{name}.weight"): module
        for name, module in model.named_modules()
        if isinstance(module, RMSNorm | GemmaRMSNorm) and isinstance(module.weight, torch.nn.Parameter)
    }


def output_sizes(layer: Any, parts: int) -> list[int]:
    """Return the rows of each of the ``parts`` of a vLLM linear, over all tensor-parallel ranks."""
    if parts == 1:
        return [layer.output_size]
    if hasattr(layer, "total_num_heads"):  # q, k, v; vLLM's own output_sizes count replicated key/value heads
        value_size = getattr(layer, "v_head_size", layer.head_size)
        key_heads = layer.total_num_kv_heads
        return [layer.total_num_heads * layer.head_size, key_heads * layer.head_size, key_heads * value_size]
    return [sum(layer.output_sizes[shard] for shard in group) for group in shard_groups(layer, parts)]


def shard_groups(layer: Any, parts: int) -> list[tuple[int, ...]]:
    """Return which of vLLM's shards of a fused linear each of the checkpoint's ``parts`` has been loaded into.

    Raises ValueError if that is not known.
    """
    shards = len(layer.output_sizes)
    groups = getattr(layer, "qerl_groups", [(shard,) for shard in range(shards)])
    if len(groups) != parts:
        raise ValueError(f"{parts} linears of the checkpoint are {shards} in vLLM, and it is not known which are whose")
    return groups


def shard_id(layer: Any, part: int, parts: int) -> str | int | tuple[int, ...]:
    """Return the shard id by which vLLM's weight loader knows part number ``part`` of a fused linear."""
    if hasattr(layer, "total_num_heads"):
        return "qkv"[part]
    group = shard_groups(layer, parts)[part]
    return group if len(group) > 1 else group[0]
