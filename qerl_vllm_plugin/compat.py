"""Everything that depends on the insides of vLLM, for 0.26 to 0.32, and the one graft on a class of another package."""

from collections.abc import Iterator
from typing import Any

import torch
import vllm
from packaging.version import InvalidVersion, Version
from vllm.logger import init_logger

from qerl_vllm_plugin.adapter import AdapterError, Target

logger = init_logger("vllm.qerl")

OLDEST, FIRST_UNSUPPORTED = Version("0.26"), Version("0.33")
TESTED = ("0.26.0", "0.31.0")
ADAPTER_ID = 1  # the LoRA id that the policy uses in every engine


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


def model_of(worker: Any) -> torch.nn.Module:
    return worker.model_runner.get_model()


def norm_layers(worker: Any) -> dict[str, torch.nn.Module]:
    """Every RMSNorm with a weight, by the name of its parameter in the checkpoint."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    return {
        f"{name}.weight": module
        for name, module in model_of(worker).named_modules()
        if isinstance(module, RMSNorm) and isinstance(module.weight, torch.nn.Parameter)
    }


def _manager(worker: Any) -> Any:
    """vLLM's LoRA model manager. Raises AdapterError if the engine was started without --enable-lora."""
    manager = getattr(worker.model_runner, "lora_manager", None)
    if manager is None:
        raise AdapterError("this engine was started without LoRA; start it with enable_lora=True, max_lora_rank=R")
    return manager._adapter_manager


def has_lora(worker: Any) -> bool:
    return getattr(worker.model_runner, "lora_manager", None) is not None


def max_rank(worker: Any) -> int:
    return _manager(worker).lora_config.max_lora_rank


def lora_dtype(worker: Any) -> torch.dtype:
    return _manager(worker).lora_config.lora_dtype


def reserve_adapter(worker: Any) -> None:
    """Registers and pins an empty adapter under ADAPTER_ID, so that vLLM never looks for it on disk or evicts it."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights

    manager = _manager(worker)
    if ADAPTER_ID in manager.list_adapters():
        if getattr(manager.get_adapter(ADAPTER_ID), "is_qerl_policy", False):
            return
        raise AdapterError(
            f"LoRA id {ADAPTER_ID} is already in use in this engine; the policy adapter needs it. Start the engine "
            "without --lora-modules"
        )
    # vLLM wants at least one layer in an adapter; this one is zero
    name, layer = next((name, layer) for name, layer in _linears(worker).items() if layer.n_slices == 1)
    a = torch.zeros(1, getattr(layer.base_layer, "input_size", layer.input_size), dtype=lora_dtype(worker))
    b = torch.zeros(layer.base_layer.output_size, 1, dtype=lora_dtype(worker))
    empty = LoRAModel(ADAPTER_ID, rank=1, loras={name: LoRALayerWeights(name, 1, 1, a, b)})
    empty.is_qerl_policy = True
    manager.add_adapter(empty)
    manager.activate_adapter(ADAPTER_ID)
    manager.pin_adapter(ADAPTER_ID)


def _slot(worker: Any) -> int:
    manager = _manager(worker)
    if ADAPTER_ID not in manager.lora_index_to_id:
        raise AdapterError(
            "vLLM has dropped the policy adapter's slot (weights were reloaded?); swap the adapter again"
        )
    return manager.lora_index_to_id.index(ADAPTER_ID)


def _linears(worker: Any) -> dict[str, Any]:
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    modules = _manager(worker).modules
    return {name: layer for name, layer in modules.items() if isinstance(layer, BaseLinearLayerWithLoRA)}


def adapter_targets(worker: Any) -> dict[str, Target]:
    """Every linear that can carry an adapter, by its checkpoint name; sizes are those of all ranks together."""
    packed = _manager(worker).packed_modules
    targets: dict[str, Target] = {}
    for name, layer in _linears(worker).items():
        base = layer.base_layer
        parts = packed.get(name) or [name]
        inputs = getattr(base, "input_size", layer.input_size)
        for i, (part, outputs) in enumerate(zip(parts, _output_sizes(base, len(parts)), strict=True)):
            targets[part] = Target(name, i, inputs, outputs)
    return targets


def _output_sizes(base: Any, parts: int) -> list[int]:
    if parts == 1:
        return [base.output_size]
    if hasattr(base, "total_num_heads"):  # q, k, v; output_sizes would count replicated key/value heads
        value_size = getattr(base, "v_head_size", base.head_size)
        key_heads = base.total_num_kv_heads
        return [base.total_num_heads * base.head_size, key_heads * base.head_size, key_heads * value_size]
    return list(base.output_sizes)


def write_adapter(worker: Any, staged: dict[str, dict[int, tuple[torch.Tensor, torch.Tensor]]]) -> None:
    """Copies staged (A, B) into the policy's slot of every layer, in place; layers that are not staged become zero.

    ``staged``: engine module -> part -> (A, B), B already scaled. vLLM's own setter cuts out this rank's share.
    """
    slot = _slot(worker)
    for name, layer in _linears(worker).items():
        parts = staged.get(name)
        if parts is None:
            layer.reset_lora(slot)
        elif layer.n_slices == 1:
            layer.set_lora(slot, *parts[0])
        else:
            pairs = [parts.get(i, (None, None)) for i in range(layer.n_slices)]
            layer.set_lora(slot, [a for a, _ in pairs], [b for _, b in pairs])


def adapter_buffers(worker: Any) -> Iterator[torch.Tensor]:
    """This rank's A and B buffers of the policy's slot, in a fixed order."""
    slot = _slot(worker)
    for _, layer in sorted(_linears(worker).items()):
        for stacked in (*layer.lora_a_stacked, *layer.lora_b_stacked):
            yield stacked[slot]
