"""Control the policy of one vLLM engine from the program that holds its ``vllm.LLM``.

``Policy`` swaps the adapter, sets the noise on the norms, and knows which version is served.
"""

import functools
import hashlib
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from vllm import LLM
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest

from qerl_vllm_plugin import noise
from qerl_vllm_plugin.adapter import folder as adapter_folder
from qerl_vllm_plugin.adapter.check import AdapterError, joined, plain_config
from qerl_vllm_plugin.adapter.lora_slots import ADAPTER_ID, SCHEME
from qerl_vllm_plugin.compat import engine, engine_client
from qerl_vllm_plugin.compat.scheduler import scheduler_here, without_empty_blocks
from qerl_vllm_plugin.wire.sender import Sender, UnreachableError
from qerl_vllm_plugin.wire.timing import PATIENCE, Timer, begun, in_time
from qerl_vllm_plugin.worker.change import PolicyLostError as PolicyLostError
from qerl_vllm_plugin.worker.change import check_answers
from qerl_vllm_plugin.worker.kv_cache import RELEASED, KVCacheError
from qerl_vllm_plugin.worker.methods import add_worker_methods
from qerl_vllm_plugin.worker.policy import NO_CARRIER

logger = init_logger("vllm.qerl")
P = ParamSpec("P")
T = TypeVar("T")

EVERYWHERE = ("version", "hash", "sigma", "seed", "rollout", "targets")  # what all ranks say alike
# only the program that holds a vllm.LLM can send it requests, and ``Policy`` requires that each names the policy
VOUCHED: dict[str, Any] = {"every_request_names_the_policy": True}


@dataclass(frozen=True)
class NoiseReport:
    """Report what ``Policy.set_noise`` has done.

    ``noisy_norms`` is the number of norms that carry noise, 0 at sigma 0. ``swallowed`` is the share of their weights
    that rounding left unchanged.
    """

    sigma: float
    noisy_norms: int
    swallowed: float

    @property
    def touched(self) -> int:
        """Return ``noisy_norms``, by the name that it had before."""
        warnings.warn(
            "NoiseReport.touched is called noisy_norms now; its old name works for one more release",
            FutureWarning,
            stacklevel=2,
        )
        return self.noisy_norms


@dataclass(frozen=True)
class PolicyState:
    """Describe what an engine serves: the policy's version and its noise.

    ``version`` counts swaps. ``norms`` and ``adapter`` are SHA-256 digests of the tensors' bits, or None unless digests
    were asked for. They come from the first rank of each pipeline stage.
    """

    version: int
    sigma: float
    seed: int
    rollout: int
    targets: tuple[str, ...]
    norms: str | None = None
    adapter: str | None = None


def _alone(method: Callable[Concatenate["Policy", P], T]) -> Callable[Concatenate["Policy", P], T]:
    """Let a method of a policy wait until other threads have left such methods."""

    @functools.wraps(method)
    def call(self: "Policy", *args: P.args, **keywords: P.kwargs) -> T:
        with self._lock:
            return method(self, *args, **keywords)

    return call


class Policy:
    """Control the policy of one engine: one adapter, trained norms and noise, all engine-wide.

    Start the engine in one of two ways, and pass ``lora_request=policy.request`` to ``generate``:

    * ``enable_lora=True, max_loras=1, max_cpu_loras=1, max_lora_rank=R`` keeps the adapter in vLLM's LoRA slots. While
      there is noise or a trained norm, every request must carry ``policy.request``: both change the answers to all
      other requests too. ``Policy`` promises the workers that every request does.
    * ``additional_config={"qerl": {"policy_adapter": {"rank": R}}}``, under qerl_nvfp4 only, is faster. The adapter is
      on for every request, and ``policy.request`` is None.

    With neither, only the noise can be set.

    Every change needs an engine without running requests, and empties its prefix cache first. Nothing can run until
    the change is made, so keys and values that another policy computed are never read again. Several threads may call
    this class, and each then waits for the others; ``generate`` itself vLLM leaves to one thread, between changes.

    ``parts`` holds the host's seconds of the last change, for benchmarks:

    * ``empty``: emptying the prefix cache; for an engine in another process, only the time beyond packing.
    * ``pack``: packing the tensors. ``way``: sending them to the workers and waiting for the answer.
    * ``free``: freeing what was sent.
    * The first worker's parts: receive, check, stage, agree with the other ranks, commit.
    """

    def __init__(self, llm: LLM, name: str = "policy", *, transport: str = "auto", timeout: float = PATIENCE) -> None:
        """Open the policy of ``llm``.

        ``transport`` says how tensors reach workers in other processes. With "auto", tensors on a GPU of this machine
        go from GPU to GPU, and all others through shared memory. "ipc" and "shared" allow one of the two alone.
        If such workers do not answer within ``timeout`` seconds, the engine is given up: PolicyLostError.

        Raises ValueError if the engine's KV connector keeps keys and values that cannot be emptied, or if it cannot use
        that transport.
        """
        self._llm, self._lock = llm, threading.RLock()
        self._sender = Sender(
            transport,
            is_here=engine.model_in_this_process(llm) is not None,
            is_near=engine.workers_share_this_machine(llm.llm_engine.vllm_config),
            refusal=AdapterError,
            warn=logger.warning_once,
        )
        self._lost: str | None = None
        self._timeout = timeout
        self.parts: dict[str, float] = {}
        add_worker_methods()
        engine.check_kv_connector(llm.llm_engine.vllm_config)
        opened = self._call("qerl_open")
        self.carrier: str | None = opened[0]["carrier"]
        self.version = int(opened[0]["version"])
        self._request = LoRARequest(name, ADAPTER_ID, f"{SCHEME}{name}") if self.carrier == "lora" else None
        self._is_released = bool(opened[0]["is_released"])

    @property
    def request(self) -> LoRARequest | None:
        """Return the ``lora_request`` for ``generate``; raise KVCacheError without a cache, PolicyLostError if lost."""
        if self._lost is not None:
            raise PolicyLostError(self._lost)
        if self._is_released:
            raise KVCacheError(RELEASED)
        return self._request

    @_alone
    def swap(
        self,
        tensors: Mapping[str, torch.Tensor] | None,
        config: Mapping[str, Any] | Any | None = None,
        *,
        norms: Mapping[str, torch.Tensor] | None = None,
    ) -> int:
        """Install an adapter in place of the current one and return the new version.

        ``tensors`` is PEFT's state dict; None serves the base alone. ``config`` is the content of
        ``adapter_config.json`` or PEFT's LoraConfig (``model.peft_config["default"]``). ``norms`` are trained norm
        weights by their checkpoint names; None restores the checkpoint's norms.

        Every worker checks and copies everything before any worker changes, so a swap happens on all ranks or on none.
        The caller's tensors are not modified.

        Raises AdapterError for a refused adapter; the previous version then stays in service. Raises RuntimeError if
        requests are running, and KVCacheError while the KV cache is released. Raises PolicyLostError if a rank failed
        half-way or the engine does not answer: that engine serves nothing any more.
        """
        if tensors is not None and config is None:
            raise AdapterError("an adapter needs its config: the content of adapter_config.json")
        if tensors is not None and self.carrier is None:
            raise AdapterError(NO_CARRIER)
        plain, given = plain_config(config), joined(tensors, norms)
        timer, emptied = self._come_to_rest()

        def send(sent: Any) -> list[dict[str, Any]]:
            timer.end("pack")
            self._check_empty(emptied)
            timer.end("empty")
            pair = (sent if tensors is not None else None, sent if norms is not None else None)
            results = self._rpc("qerl_swap", pair[0], plain, pair[1], **VOUCHED)
            timer.end("way")
            return results

        try:
            first = self._sent(given, send)[0]
        finally:
            if self._lost is None:
                self._answer(emptied)  # tensors may be refused before; two threads must not send at a time
        timer.end("free")
        self.parts = _parts(timer, first)
        self.version = int(first["version"])
        return self.version

    def _sent(
        self, given: dict[str, torch.Tensor], send: Callable[[Any], list[dict[str, Any]]]
    ) -> list[dict[str, Any]]:
        """Return the workers' answers to ``send``, which gets ``given`` in a form that they can read."""
        if not given:
            return self._checked(send(given))

        def send_and_check(sent: Any) -> list[dict[str, Any]]:
            results = send(sent)
            for result in results:
                if result.get("unreachable"):
                    raise UnreachableError(result["error"])
            return self._checked(results)

        return self._sender.deliver(given, send_and_check)

    def swap_folder(self, folder: str | Path) -> int:
        """Install the adapter of a PEFT folder and return the new version.

        If the folder has ``norms.safetensors``, its trained norms are installed too. Raises as ``swap`` does, and
        AdapterError for a damaged folder or one that names another base.
        """
        base = engine.checkpoint_folder(self._llm.llm_engine.vllm_config)
        if base is not None:
            adapter_folder.check_base(folder, base)
        saved = adapter_folder.read(folder)
        return self.swap(saved.tensors, saved.config, norms=saved.norms)

    @_alone
    def set_noise(
        self, sigma: float, *, seed: int, rollout: int, targets: Sequence[str] = noise.DEFAULT_TARGETS
    ) -> NoiseReport:
        """Set the target norms to base + sigma * z(seed, rollout, name); this replaces any earlier noise.

        Raises ValueError for a sigma that is negative, not finite or above noise.MAX_SIGMA, and for values of
        another kind. Raises AdapterError, a
        ValueError, for targets that name no norm of the model. Raises the other errors of ``swap`` as well.
        """
        sigma, seed, rollout, names = noise.checked(sigma, seed, rollout, targets)
        timer, emptied = self._come_to_rest()
        self._check_empty(emptied)
        timer.end("empty")
        results = self._call("qerl_set_noise", sigma, seed, rollout, names, **VOUCHED)
        timer.end("way")
        self.parts = _parts(timer, results[0])
        report = NoiseReport(sigma, results[0]["noisy_norms"], results[0]["swallowed"])
        if report.swallowed:
            warnings.warn(
                f"the norms of this engine are not fp32: rounding swallowed {report.swallowed:.1%} of the noise "
                f"(sigma {sigma:g}). Serve with quantization='qerl_nvfp4' to keep all of it",
                stacklevel=3,
            )
        return report

    def clear_noise(self) -> None:
        """Restore the norms without noise, bit for bit."""
        self.set_noise(0.0, seed=0, rollout=0, targets=())

    @_alone
    def release_kv_cache(self) -> int:
        """Release the GPU memory of the KV cache and return its size in bytes.

        The engine must run on one GPU and have been started with enable_sleep_mode. Weights, adapter and norms stay
        where they are; they may be read, but not written. Until ``resume_kv_cache`` nothing can be generated, the
        policy cannot change, and ``llm.sleep`` must not be called.

        Raises KVCacheError for an engine that cannot release its KV cache or has released it already. Raises
        RuntimeError if requests are running.
        """
        ranks = self._llm.llm_engine.vllm_config.parallel_config.world_size
        if ranks > 1:
            raise KVCacheError(f"the KV cache of an engine that is cut over {ranks} GPUs cannot be released; use sleep")
        self._check_empty(self._come_to_rest()[1])
        released = self._call("qerl_release_kv_cache", refusal=KVCacheError)[0]["bytes"]
        self._is_released = True
        return released

    @_alone
    def resume_kv_cache(self) -> None:
        """Allocate the released memory of the KV cache again, filled with zeros.

        Raises KVCacheError, and leaves the KV cache as it is, in four cases: it was not released, requests have come
        in, its memory is in use, or a weight, the adapter or a norm has changed meanwhile. The error names the first
        tensor that changed.
        """
        if self._llm.llm_engine.has_unfinished_requests():
            raise KVCacheError("requests have come in while the KV cache was released; abort them first")
        self._call("qerl_resume_kv_cache", refusal=KVCacheError)
        self._is_released = False
        self._check_empty(self._emptied())

    @_alone
    def check_unchanged(self) -> None:
        """Raise KVCacheError, naming the first, if a weight, adapter tensor or norm has changed since the release."""
        self._call("qerl_check_unchanged", refusal=KVCacheError)

    @_alone
    def state(self, *, digest: bool = False) -> PolicyState:
        """Return what the engine serves now. Raises RuntimeError if the ranks differ."""
        ranks = self._call("qerl_state", digest)
        stages = {rank["stage"]: rank for rank in reversed(ranks)}  # the first rank of each pipeline stage
        alike = all(rank[key] == ranks[0][key] for rank in ranks for key in EVERYWHERE)
        if not alike or any(rank.get("norms") != stages[rank["stage"]].get("norms") for rank in ranks):
            raise RuntimeError(f"the workers of this engine hold different policies: {ranks}; restart it")
        found = {key: ranks[0][key] for key in ("version", "sigma", "seed", "rollout")}
        norms, adapter = (
            _joined([stages[stage][key] for stage in sorted(stages)]) if digest else None
            for key in ("norms", "adapter")
        )
        return PolicyState(**found, targets=tuple(ranks[0]["targets"]), norms=norms, adapter=adapter)

    def _call(
        self, method: str, *args: Any, refusal: type[Exception] = AdapterError, **keywords: Any
    ) -> list[dict[str, Any]]:
        return self._checked(self._rpc(method, *args, **keywords), refusal)

    def _rpc(self, method: str, *args: Any, **keywords: Any) -> list[dict[str, Any]]:
        return self._answer(self._asked(self._llm.collective_rpc, method, args=args, kwargs=keywords))

    def _asked(self, call: Callable[..., T], *args: Any, **keywords: Any) -> Future[T]:
        """Start a call of the engine, and return the future of its answer.

        For workers in this process the call has already ended when this returns. Raises PolicyLostError once the
        engine is lost: after an unanswered call, later answers no longer belong to the calls that wait for them.
        """
        if self._lost is not None:
            raise PolicyLostError(self._lost)
        call = functools.partial(call, *args, **keywords)
        if self._sender.is_here:
            answer: Future[T] = Future()
            answer.set_result(call())
            return answer
        return begun(call)

    def _answer(self, asked: Future[T]) -> T:
        """Return the engine's answer; raise PolicyLostError if none comes in time or the engine core has died."""
        try:
            return in_time(asked, self._timeout, functools.partial(engine_client.has_died, self._llm))
        except TimeoutError as error:
            self._lost = str(error)
            raise PolicyLostError(self._lost) from error

    def _checked(self, results: list[dict[str, Any]], refusal: type[Exception] = AdapterError) -> list[dict[str, Any]]:
        try:
            check_answers(results, refusal)
        except PolicyLostError as error:
            self._lost = str(error)
            raise
        return results

    def _come_to_rest(self) -> tuple[Timer, Future[bool]]:
        """Refuse a change while requests run, and start emptying the prefix cache.

        Return the change's timer and the future of the emptying. Pass the latter to ``_check_empty`` before asking for
        the change. Raises KVCacheError while the KV cache is released, and RuntimeError if requests are running.
        """
        timer = Timer()
        if self._is_released:
            raise KVCacheError(RELEASED)
        if self._llm.llm_engine.has_unfinished_requests():
            raise RuntimeError("requests are running; finish or abort them before the policy changes")
        emptied = self._emptied()
        timer.end("empty")
        return timer, emptied

    def _emptied(self) -> Future[bool]:
        """Ask the engine to empty its prefix cache, while this process goes on; the future says whether it could."""
        # vLLM 0.26 reports a failure when asked to reset a KV connector that the engine does not have
        has_connector = self._llm.llm_engine.vllm_config.kv_transfer_config is not None
        scheduler = scheduler_here(self._llm)
        with without_empty_blocks(scheduler):
            asked = self._asked(self._llm.reset_prefix_cache, reset_connector=has_connector)
            if scheduler is not None:
                self._answer(asked)
        return asked

    def _check_empty(self, emptied: Future[bool]) -> None:
        """Raise RuntimeError if the prefix cache could not be emptied; to be called before a change is asked for."""
        if not self._answer(emptied):
            raise RuntimeError(
                "vLLM could not empty its prefix cache, so answers of another policy could be reused; "
                "is a request still running?"
            )


def _parts(timer: Timer, first: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of a change by part, those of the ``first`` worker's answer taken out of ``way``."""
    timer.seconds["way"] -= sum(first["parts"].values())
    return {**timer.seconds, **first["parts"]}


def _joined(digests: list[str]) -> str:
    """Return one digest for the whole model: that of its only pipeline stage, or a digest of all stages' digests."""
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
