"""Answer what a driver asks of each vLLM worker: install an adapter, set and clear the noise, tell the state.

``collective_rpc`` calls these by name with the worker as ``self``. None of them ever raises: vLLM stops reading at the
first rank that has raised, and takes what the other ranks answered for the answers to its next call. A refusal is
``{"error": text}``.

A worker also ends when the process that drives it has died (``end_with``). vLLM ends its workers when the engine core
ends, and the core when the server asks it to; a server that was killed asks nothing, and its engine would keep the GPU
for ever.
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
from qerl_vllm_plugin.compat import engine, kv_cache_memory
from qerl_vllm_plugin.wire import cuda_ipc
from qerl_vllm_plugin.worker import kv_cache
from qerl_vllm_plugin.worker.change_log import ChangeLog
from qerl_vllm_plugin.worker.policy import (
    Answer,
    Change,
    Tensors,
    check_one_policy,
    check_weights,
    digest_of,
    most_bytes,
    on_all_ranks,
    policy_of,
    prepare_noise,
    prepare_swap,
)
from qerl_vllm_plugin.worker.received import received

logger = init_logger("vllm.qerl")

METHODS: dict[str, Callable[..., Answer]] = {}  # the functions below by their names


def worker_method(function: Callable[..., Answer]) -> Callable[..., Answer]:
    """Makes ``function`` reachable for ``collective_rpc``, and an answer of whatever it raises."""

    @functools.wraps(function)
    def answer(self: Any, *args: Any, **keywords: Any) -> Answer:
        try:
            return function(self, *args, **keywords)
        except Exception as error:
            logger.error("%s failed", function.__name__, exc_info=error)
            return {"error": str(error) or type(error).__name__}

    METHODS[function.__name__] = answer
    return answer


def add_worker_methods() -> None:
    """Gives vLLM's WorkerBase the ``qerl_*`` methods; idempotent.

    This is the one graft on another package's class. ``--worker-extension-cls`` would do the same, but would have to
    be typed by every user and excludes any other extension.
    """
    from vllm.v1.worker.worker_base import WorkerBase

    for name, method in METHODS.items():
        present = getattr(WorkerBase, name, None)
        if present is None:
            setattr(WorkerBase, name, method)
        elif present is not method:
            raise RuntimeError(f"vLLM's WorkerBase already has a method {name} from {present.__module__}")


@worker_method
def qerl_open(self: Any, driver: int | None = None) -> Answer:
    """Prepares this worker for a policy; idempotent. With ``driver``, a process of a server, it ends with that, and
    keeps a log of its changes for all of them."""
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
    if not engine.weights_are_away():
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
    """Installs an adapter and trained norms in place of the current ones, on all ranks or on none.

    Both are tensors by name, or a safetensors file: its bytes, or its path on this machine, or the description of GPU
    memory (``gpu_tensors``); of the latter two a rank reads what it needs. Where both are one, what is no part of an
    adapter is a norm. ``config`` may be JSON. ``version`` must be above the one that is served, None is the next; the
    same one again, with the same ``digest`` or with the base alone, changes nothing.
    Trained norms for LoRA slots are refused unless the caller vouches that ``every_request_names_the_policy``.
    """
    policy = policy_of(self)

    def prepare() -> Change:
        if norms:
            check_one_policy(policy, "trained norms", every_request_names_the_policy)
        found = json.loads(config) if isinstance(config, str) else config
        with received(tensors, norms, self.device, policy.file) as (given, trained, fetch):
            policy.laps.end("receive")
            return prepare_swap(policy, given, found, trained, version, digest, fetch)

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
    """Sets the norms to base + sigma * z(seed, rollout, name); sigma 0 restores the base bit for bit.

    Noise beside LoRA slots is refused unless the caller vouches that ``every_request_names_the_policy``.
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
    """Gives the memory of this worker's KV cache back."""
    try:
        return {"bytes": kv_cache.release(self, kv_cache_memory.KVCacheMemory(self))}
    except (kv_cache.KVCacheError, ValueError) as error:
        return {"error": str(error)}


@worker_method
def qerl_resume_kv_cache(self: Any) -> Answer:
    """Takes the memory again."""
    try:
        kv_cache.resume(self)
    except kv_cache.KVCacheError as error:
        return {"error": str(error)}
    return {}


@worker_method
def qerl_check_unchanged(self: Any) -> Answer:
    """Compares the checksums while the cache is released; there is nothing to compare while it is not."""
    try:
        kv_cache.check_unchanged(self)
    except kv_cache.KVCacheError as error:
        return {"error": str(error)}
    return {}


@worker_method
def qerl_state(self: Any, digest: bool = False) -> Answer:
    """Version and noise of this worker; with ``digest`` a SHA-256 over norms and adapter buffers as they are now."""
    policy = policy_of(self)
    state: Answer = {key: getattr(policy, key) for key in ("version", "sigma", "seed", "rollout")}
    state |= {"targets": list(policy.noise_targets), "hash": policy.digest, "stage": engine.pipeline_stage()}
    if policy.lost:
        return {"error": policy.lost, "lost": True}
    if digest:
        state["norms"] = digest_of(layer.weight.data for _, layer in sorted(policy.layers.items()))
        state["adapter"] = digest_of(policy.carrier.buffers()) if policy.carrier is not None else ""
    return state


GRACE = 10.0  # seconds that this process may take to end by itself


def end_with(driver: int) -> None:
    """Ends this process when the process ``driver`` of this machine has ended.

    Raises OSError if there is no such process.
    """
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
