"""Define the methods that a driver calls on each vLLM worker: install an adapter, set the noise, return the state.

``collective_rpc`` calls them by name, with the worker as ``self``. They never raise; a refusal is ``{"error": text}``.
vLLM would stop reading at the first rank that raises, and take the other ranks' answers for those to its next call.

A worker also ends when the server process that drives it dies (``end_with``). vLLM ends its workers with the engine
core, and the core when the server asks for it. A killed server asks for nothing, and its engine would keep the GPU for
ever.
"""

import functools
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger

from qerl_vllm_plugin.adapter.lora_slots import LoraSlots
from qerl_vllm_plugin.adapter.resident import ResidentAdapter
from qerl_vllm_plugin.compat import kv_cache_memory
from qerl_vllm_plugin.compat import worker as vllm_worker
from qerl_vllm_plugin.wire import cuda_ipc
from qerl_vllm_plugin.wire.safetensors_file import Tensors
from qerl_vllm_plugin.worker import kv_cache
from qerl_vllm_plugin.worker.change import Answer, Change, check_weights, on_all_ranks
from qerl_vllm_plugin.worker.change_log import ChangeLog
from qerl_vllm_plugin.worker.policy import (
    check_one_policy,
    digest_of,
    most_bytes,
    policy_of,
    prepare_noise,
    prepare_swap,
)
from qerl_vllm_plugin.worker.received import received

logger = init_logger("vllm.qerl")

GRACE = 10.0  # seconds that this process may take to end by itself once its driver has died
METHODS: dict[str, Callable[..., Answer]] = {}  # the functions below by their names


def worker_method(function: Callable[..., Answer]) -> Callable[..., Answer]:
    """Make ``function`` callable by ``collective_rpc``, and turn whatever it raises into an answer.

    A KVCacheError is a refusal; everything else is logged as a failure.
    """

    @functools.wraps(function)
    def answer(self: Any, *args: Any, **keywords: Any) -> Answer:
        try:
            return function(self, *args, **keywords)
        except kv_cache.KVCacheError as error:
            return {"error": str(error)}
        except Exception as error:
            logger.error("%s failed", function.__name__, exc_info=error)
            return {"error": str(error) or type(error).__name__}

    METHODS[function.__name__] = answer
    return answer


def add_worker_methods() -> None:
    """Add the ``qerl_*`` methods to vLLM's WorkerBase; idempotent.

    ``--worker-extension-cls`` would do the same, but every user would have to type it, and it excludes any other
    extension.
    """
    from vllm.v1.worker.worker_base import WorkerBase

    for name, method in METHODS.items():
        setattr(WorkerBase, name, method)


@worker_method
def qerl_open(self: Any, driver: int | None = None) -> Answer:
    """Prepare this worker for a policy, and return what a driver must know of it; idempotent.

    ``driver`` is the process id of an API server. With one, the worker ends when that process ends, and it keeps one
    log of its changes for all of the engine's API servers.
    """
    if driver is not None:
        end_with(driver)
    policy = policy_of(self)
    if driver is not None and policy.changes is None:
        policy.changes = ChangeLog()
        policy.changes.add(policy.version)
    if policy.lost:
        return {"error": policy.lost, "lost": True}
    if policy.carrier is not None:
        policy.carrier.prepare()
    if not vllm_worker.weights_are_away():
        check_weights(policy)
    kind = {LoraSlots: "lora", ResidentAdapter: "resident"}.get(type(policy.carrier))
    return {
        "carrier": kind,
        "max_rank": policy.carrier.max_rank if policy.carrier is not None else 0,
        "max_bytes": most_bytes(policy),
        "version": policy.version,
        "changes": policy.changes.path if policy.changes is not None else None,
        "instance": policy.instance,
        "gpus": cuda_ipc.visible() if self.device is not None and self.device.type == "cuda" else [],
        "is_released": policy.released is not None,
    }


@worker_method
def qerl_swap(
    self: Any,
    tensors: Tensors | bytes | str | None,
    config: Any,
    norms: Tensors | bytes | str | None,
    every_request_names_the_policy: bool = False,
    version: int | None = None,
    digest: str = "",
) -> Answer:
    """Install an adapter and trained norms in place of the current ones, on all ranks or on none.

    ``tensors`` and ``norms`` are tensors by name, the bytes of a safetensors file, its path on this machine, or a
    description of GPU memory (wire/gpu_memory.py). From a path or a description, a rank reads only what it needs. If
    both are the same, the tensors that belong to no adapter are the norms. ``config`` may be JSON.

    ``version`` must be above the one that is served; None takes the next. The served version with the same ``digest``
    changes nothing. Without a digest this holds only if ``tensors`` and ``norms`` are None.
    Trained norms beside LoRA slots are refused unless the caller promises ``every_request_names_the_policy``.
    """
    policy = policy_of(self)

    def prepare() -> Change:
        if norms:
            check_one_policy(policy, "trained norms", every_request_names_the_policy)
        values = json.loads(config) if isinstance(config, str) else config
        with received(tensors, norms, self.device, policy.file) as (adapter, trained, fetch):
            policy.timer.end("receive")
            return prepare_swap(policy, adapter, values, trained, version, digest, fetch)

    return on_all_ranks(policy, prepare)


@worker_method
def qerl_set_noise(
    self: Any,
    sigma: float,
    seed: int,
    rollout: int,
    targets: list[str],
    every_request_names_the_policy: bool = False,
) -> Answer:
    """Set the target norms to base + sigma * z(seed, rollout, name); sigma 0 restores the base bit for bit.

    Noise beside LoRA slots is refused unless the caller promises ``every_request_names_the_policy``.
    """
    policy = policy_of(self)

    def prepare() -> Change:
        change = prepare_noise(policy, sigma, seed, rollout, targets)
        if float(sigma):
            check_one_policy(policy, f"noise of sigma {float(sigma):g}", every_request_names_the_policy)
        return change

    return on_all_ranks(policy, prepare)


@worker_method
def qerl_release_kv_cache(self: Any) -> Answer:
    """Release the memory of this worker's KV cache, and return its size as ``bytes``."""
    try:
        memory = kv_cache_memory.KVCacheMemory(self)
    except ValueError as error:
        return {"error": str(error)}
    return {"bytes": kv_cache.release(self, memory)}


@worker_method
def qerl_resume_kv_cache(self: Any) -> Answer:
    """Allocate the memory of this worker's KV cache again."""
    kv_cache.resume(self)
    return {}


@worker_method
def qerl_check_unchanged(self: Any) -> Answer:
    """Return an error if a tensor has changed since the KV cache was released; nothing is compared if it is not."""
    kv_cache.check_unchanged(self)
    return {}


@worker_method
def qerl_state(self: Any, digest: bool = False) -> Answer:
    """Return this worker's version and noise; with ``digest``, also the SHA-256 of its norms and of its adapter."""
    policy = policy_of(self)
    state: Answer = {key: getattr(policy, key) for key in ("version", "sigma", "seed", "rollout")}
    state |= {"targets": list(policy.noise_targets), "hash": policy.digest, "stage": vllm_worker.pipeline_stage()}
    if policy.lost:
        return {"error": policy.lost, "lost": True}
    if digest:
        state["norms"] = digest_of(layer.weight.data for _, layer in sorted(policy.layers.items()))
        state["adapter"] = digest_of(policy.carrier.buffers()) if policy.carrier is not None else ""
    return state


def end_with(driver: int) -> None:
    """End this process with the process ``driver`` of this machine, if it is another; raise OSError without one."""
    if driver != os.getpid():
        threading.Thread(target=_watch, args=(os.pidfd_open(driver), driver), daemon=True, name="qerl-driver").start()


def _watch(handle: int, driver: int) -> None:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.poll()  # a pidfd becomes readable when its process ends
    logger.error("the server's process %d has died: this one ends too", driver)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os.kill(os.getpid(), signal.SIGKILL)
