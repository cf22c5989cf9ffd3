"""Use a worker, its model runner and its ranks, as read in vLLM 0.26 to 0.32."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.platforms import current_platform


def model_of(worker: Any) -> torch.nn.Module:
    return worker.model_runner.get_model()


def may_sleep(worker: Any) -> bool:
    """Return True if a worker's engine was started with vLLM's sleep mode."""
    return bool(worker.vllm_config.model_config.enable_sleep_mode)


def weights_are_away() -> bool:
    """Return True if vLLM's sleep mode has taken the memory of this process's weights, adapter and norms."""
    if not current_platform.is_cuda():
        return False
    from vllm.device_allocator import cumem

    pool = cumem.CuMemAllocator.instance
    entries = () if pool is None else pool.pointer_to_data.values()
    return any(entry.tag == "weights" and entry.is_asleep for entry in entries)


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


def runner_above() -> Any:
    """Return vLLM's model runner, which is building a model, from the call stack; raise RuntimeError without one."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        owner = frame.f_locals.get("self")
        if hasattr(owner, "load_lora_model"):
            return owner
    raise RuntimeError("qerl_nvfp4: this vLLM builds its models in a way that is not known here")


def pipeline_stage() -> int:
    """Return the index of this rank's pipeline stage: which part of the model it holds."""
    return get_pp_group().rank_in_group


def highest(here: int) -> int:
    """Return the highest number of all tensor- and pipeline-parallel ranks, each of which must call this."""
    flag = torch.tensor([here])
    for group in (get_tp_group(), get_pp_group()):
        if group.world_size > 1:
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    return int(flag.item())


def of_all_stages(value: Any) -> list[Any]:
    """Return the ``value`` of every rank in this rank's pipeline, each of which must call this."""
    found = [value] * (group := get_pp_group()).world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(found, value, group=group.cpu_group)
    return found


def max_over_tensor_parallel_ranks(amax: torch.Tensor) -> torch.Tensor:
    """Return the largest ``amax: ()`` of all tensor-parallel ranks, so that they share one tensor scale.

    Raises ValueError for several ranks with enable_multithread_load.
    """
    from vllm.config import get_current_vllm_config

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


def draw_with_whole_prompts_alone() -> None:
    """Draw no random number for a seeded request whose prompt is incomplete after a step.

    Call it while a model is being built; it does nothing except on a CPU. It wraps one method of this engine's model
    runner. vLLM draws a token for such a request, too, throws it away and sets the request's generator back. A CPU
    generator cannot be set back, so the engine would end.
    """
    if not current_platform.is_cpu():
        return
    runner = runner_above()
    if "sample_tokens" in vars(runner):  # wrapped already: a drafter is built beside the model
        return
    sample_tokens = runner.sample_tokens

    @functools.wraps(sample_tokens)
    def sample_without_cut_prompts(*args: Any, **keywords: Any) -> Any:
        batch = runner.input_batch
        cut = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        kept = {row: batch.generators.pop(row) for row in cut if row in batch.generators}
        try:
            return sample_tokens(*args, **keywords)
        finally:
            batch.generators.update(kept)

    runner.sample_tokens = sample_without_cut_prompts
