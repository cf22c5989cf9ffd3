"""The policy of one vLLM engine, as its driver sees it: swap the adapter, set the noise, know the version."""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from vllm import LLM
from vllm.lora.request import LoRARequest

from qerl_vllm_plugin import compat, noise
from qerl_vllm_plugin.adapter import AdapterError
from qerl_vllm_plugin.kv_cache import RELEASED, KVCacheError
from qerl_vllm_plugin.lora_slots import ADAPTER_ID
from qerl_vllm_plugin.worker import NO_CARRIER

# nothing but the program that holds a vllm.LLM can send it requests, and ``Policy`` asks it to name the policy in each
VOUCHED: dict[str, Any] = {"every_request_names_the_policy": True}

ADAPTER_FILE, CONFIG_FILE, NORMS_FILE = "adapter_model.safetensors", "adapter_config.json", "norms.safetensors"


@dataclass(frozen=True)
class NoiseReport:
    """``touched``: norms that carry noise, none at sigma 0. ``swallowed``: share of their weights that rounding left
    as they were."""

    sigma: float
    touched: int
    swallowed: float


@dataclass(frozen=True)
class PolicyState:
    """``version`` counts swaps; ``norms`` and ``adapter`` are SHA-256 digests of the first rank's bits if asked for."""

    version: int
    sigma: float
    seed: int
    rollout: int
    targets: tuple[str, ...]
    norms: str | None = None
    adapter: str | None = None


class Policy:
    """One policy on one engine; noise, trained norms and the adapter are engine-wide.

    Start the engine with ``enable_lora=True, max_loras=1, max_cpu_loras=1, max_lora_rank=R``, or, under qerl_nvfp4 and
    faster, with ``additional_config={"qerl": {"policy_adapter": {"rank": R}}}``, and pass
    ``lora_request=policy.request`` to ``generate``. In the second case that is None: the adapter is on for every
    request. With neither, only the noise can be set. In the first case every request must carry it while there is
    noise or a trained norm, for these change the answers to all others too: ``Policy`` vouches to the workers for that.

    Every change needs an engine at rest and empties its prefix cache first; as nothing can run until the change is
    made, keys and values that another policy computed are never read again.
    """

    def __init__(self, llm: LLM, name: str = "policy") -> None:
        """Raises AdapterError if the engine already uses the policy's LoRA id for another adapter."""
        self._llm = llm
        compat.add_worker_methods()
        opened = self._call("qerl_open")
        self.carrier: str | None = opened[0]["carrier"]
        self.version = int(opened[0]["version"])
        self._request = LoRARequest(name, ADAPTER_ID, f"qerl://{name}") if self.carrier == "lora" else None
        self._is_released = bool(opened[0]["is_released"])

    @property
    def request(self) -> LoRARequest | None:
        """What to pass to ``generate``. Raises KVCacheError while the KV cache is released."""
        if self._is_released:
            raise KVCacheError(RELEASED)
        return self._request

    def swap(
        self,
        tensors: Mapping[str, torch.Tensor] | None,
        config: Mapping[str, Any] | None = None,
        *,
        norms: Mapping[str, torch.Tensor] | None = None,
    ) -> int:
        """Install an adapter in place of the current one -> the new version.

        ``tensors`` and ``config`` are PEFT's state dict and ``adapter_config.json``; None serves the base alone.
        ``norms`` are trained norm weights by their checkpoint names; None are the checkpoint's. All or nothing: every
        worker checks and copies everything first. The caller's tensors are not modified.

        Raises AdapterError, with the version before still in service, and RuntimeError if requests are running.
        """
        if tensors is not None and config is None:
            raise AdapterError("an adapter needs its config: the content of adapter_config.json")
        if tensors is not None and self.carrier is None:
            raise AdapterError(NO_CARRIER)
        plain = json.loads(json.dumps(dict(config or {}), default=_plain))
        self._come_to_rest()
        try:
            self._call("qerl_stage", self._pack(tensors), plain, self._pack(norms), **VOUCHED)
        except AdapterError:
            self._call("qerl_discard")
            raise
        self._call("qerl_commit", self.version + 1)
        self.version += 1
        return self.version

    def swap_folder(self, folder: str | Path) -> int:
        """Install the adapter of a PEFT folder, with ``norms.safetensors`` where norms were trained."""
        folder = Path(folder)
        for name in (ADAPTER_FILE, CONFIG_FILE):
            if not (folder / name).is_file():
                raise AdapterError(f"{folder} holds no {name}; name a folder that PEFT or `qerl train` has saved")
        try:
            tensors = load_file(folder / ADAPTER_FILE)
            norms = load_file(folder / NORMS_FILE) if (folder / NORMS_FILE).exists() else None
            config = json.loads((folder / CONFIG_FILE).read_text())
        except (SafetensorError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise AdapterError(f"{folder} is damaged: {error}; save the adapter again") from error
        if not isinstance(config, dict):
            raise AdapterError(f"{folder / CONFIG_FILE} holds no JSON object; save the adapter again")
        return self.swap(tensors, config, norms=norms)

    def set_noise(
        self, sigma: float, *, seed: int, rollout: int, targets: Sequence[str] = noise.DEFAULT_TARGETS
    ) -> NoiseReport:
        """Set the target norms to base + sigma * z(seed, rollout, name), whatever noise was there before.

        Raises ValueError for a negative or non-finite sigma or for targets that name no norm of the model.
        """
        sigma = noise.check_sigma(sigma)
        self._come_to_rest()
        results = self._call("qerl_set_noise", sigma, int(seed), int(rollout), list(targets), **VOUCHED)
        report = NoiseReport(sigma, results[0]["touched"], results[0]["swallowed"])
        if report.swallowed:
            warnings.warn(
                f"the norms of this engine are not fp32: rounding swallowed {report.swallowed:.1%} of the noise "
                f"(sigma {sigma:g}). Serve with quantization='qerl_nvfp4' to keep all of it",
                stacklevel=2,
            )
        return report

    def clear_noise(self) -> None:
        """Give the norms back their bits without noise."""
        self.set_noise(0.0, seed=0, rollout=0, targets=())

    def release_kv_cache(self) -> int:
        """Give the GPU memory of the KV cache back -> bytes; for an engine on one GPU, started with enable_sleep_mode.

        Weights, adapter and norms stay where they are and may be read, but not written. Until ``resume_kv_cache``
        nothing can be generated and the policy cannot change; ``llm.sleep`` must not be called either.

        Raises KVCacheError for an engine that cannot do this, or has done it, and RuntimeError if requests are running.
        """
        ranks = self._llm.llm_engine.vllm_config.parallel_config.world_size
        if ranks > 1:
            raise KVCacheError(f"the KV cache of an engine that is cut over {ranks} GPUs cannot be released; use sleep")
        self._come_to_rest()
        released = self._call("qerl_release_kv_cache", refusal=KVCacheError)[0]["bytes"]
        self._is_released = True
        return released

    def resume_kv_cache(self) -> None:
        """Take that memory again, zeroed.

        Raises KVCacheError, with the KV cache still released, if it was not released, if its memory is in use, or if a
        weight, the adapter or a norm has changed meanwhile; the error names the first that did.
        """
        if self._llm.llm_engine.has_unfinished_requests():
            raise KVCacheError("requests have come in while the KV cache was released; abort them first")
        self._call("qerl_resume_kv_cache", refusal=KVCacheError)
        self._is_released = False
        self._empty_prefix_cache()

    def check_unchanged(self) -> None:
        """Raises KVCacheError, which names it, if a weight, the adapter or a norm has changed since the KV cache was
        released; for a trainer that is about to save what it has computed with them."""
        self._call("qerl_check_unchanged", refusal=KVCacheError)

    def state(self, *, digest: bool = False) -> PolicyState:
        """What the engine serves now. Raises RuntimeError if the ranks differ."""
        states = self._call("qerl_state", digest)
        shared = [{key: value for key, value in state.items() if key != "adapter"} for state in states]
        if any(state != shared[0] for state in shared):
            raise RuntimeError(f"the workers of this engine hold different policies: {states}; restart it")
        state = states[0]
        return PolicyState(**{**state, "targets": tuple(state["targets"])})

    def _call(
        self, method: str, *args: Any, refusal: type[Exception] = AdapterError, **keywords: Any
    ) -> list[dict[str, Any]]:
        results = self._llm.collective_rpc(method, args=args, kwargs=keywords)
        for result in results:
            if "error" in result:
                raise refusal(result["error"])
        return results

    def _pack(self, tensors: Mapping[str, torch.Tensor] | None) -> Any:
        """As they are for a worker in this process, as safetensors bytes for another one."""
        if tensors is None:
            return None
        executor = getattr(self._llm.llm_engine, "model_executor", None)
        if getattr(executor, "driver_worker", None) is not None:
            return tensors
        # copies: safetensors refuses tensors that share memory, such as one A under two names
        return save({name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()})

    def _come_to_rest(self) -> None:
        if self._is_released:
            raise KVCacheError(RELEASED)
        if self._llm.llm_engine.has_unfinished_requests():
            raise RuntimeError("requests are running; finish or abort them before the policy changes")
        self._empty_prefix_cache()  # before the change, which a refusal then leaves undone; takes time by the block

    def _empty_prefix_cache(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM could not empty its prefix cache, so answers of another policy could be reused; "
                "is a request still running?"
            )


def _plain(value: Any) -> Any:
    """JSON for what PEFT keeps in a LoraConfig: sets and enums."""
    return sorted(value) if isinstance(value, set | frozenset) else getattr(value, "value", str(value))
