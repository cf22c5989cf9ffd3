"""Provide ``rollout.name=qerl``: verl's vLLM server with the resident policy in place of vLLM's LoRA slots.

verl turns ``enable_lora`` on for every LoRA rank above 0, after all other options, and uses a LoRA id of its own.
The resident adapter is faster and leaves no request without the policy, but its server must not know of LoRA.
"""

import asyncio
import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from vllm.logger import init_logger

from qerl_vllm_plugin import NAME
from qerl_vllm_plugin.adapter.check import plain_config
from qerl_vllm_plugin.compat import engine
from qerl_vllm_plugin.verl import ROLLOUT
from qerl_vllm_plugin.worker.change import check_answers

logger = init_logger("vllm.qerl")

EXTENSION = "qerl_vllm_plugin.verl.extension.Extension"
MANAGER = "qerl_vllm_plugin.verl.noise.NoisyAgentLoopManager"
OURS = ("quantization", "worker_extension_cls", "enable_lora", "max_lora_rank", "max_loras", "load_format")


def rank_of(model_config: Any) -> int:
    """Return the LoRA rank, from either of verl's two keys for it."""
    return int(model_config.lora.get("rank", 0) or model_config.lora_rank)


def refusals(rollout: Any, model: Any) -> list[str]:
    """Return what this rollout cannot honour in verl's configuration, each with the way out."""
    found = []
    if rank_of(model) <= 0:
        found.append("model.lora_rank is 0: the policy is a LoRA adapter; set actor_rollout_ref.model.lora_rank=32")
    if model.lora.get("merge", False):
        found.append("model.lora.merge merges the adapter into weights that are NVFP4 here; set it to false")
    if "dummy" in rollout.load_format:
        found.append(
            f"rollout.load_format={rollout.load_format} waits for full weights from the trainer, which sends the "
            "adapter alone; set actor_rollout_ref.rollout.load_format=safetensors"
        )
    if rollout.checkpoint_engine.backend != "naive":
        found.append(
            f"rollout.checkpoint_engine.backend={rollout.checkpoint_engine.backend} sends full weights; use naive "
            "(trainer and rollout on the same GPUs)"
        )
    if rollout.quantization is not None or (rollout.qat or {}).get("enable", False):
        found.append(f"rollout.quantization and rollout.qat must be unset: rollout.name={ROLLOUT} is {NAME}")
    if rollout.data_parallel_size > 1:
        found.append("rollout.data_parallel_size > 1: a refusal by another engine would be lost; use more replicas")
    manager = rollout.agent.agent_loop_manager_class or ""
    if (rollout.custom or {}).get(ROLLOUT) and not manager.endswith(".verl.noise.NoisyAgentLoopManager"):
        found.append(
            f"rollout.custom.{ROLLOUT} asks for noise, which nobody would set and, in validation, clear; set "
            f"actor_rollout_ref.rollout.agent.agent_loop_manager_class={MANAGER}"
        )
    kwargs = dict((rollout.engine_kwargs or {}).get("vllm") or {})
    for key in OURS:
        if kwargs.get(key) is not None:
            found.append(f"rollout.engine_kwargs.vllm.{key} is set by rollout.name={ROLLOUT}; leave it out")
    return found


def memory_warning(rollout: Any, engine_kwargs: Mapping[str, Any]) -> str | None:
    """Return why the KV cache will be larger than ``rollout`` asks for, with the way out; None if it will not be."""
    is_fixed = engine_kwargs.get("kv_cache_memory_bytes") is not None
    if is_fixed or not rollout.enable_sleep_mode or engine.counts_released_memory():
        return None
    return (
        "this vLLM counts memory that loading gave back twice in sleep mode, so that the KV cache becomes larger than "
        f"rollout.gpu_memory_utilization={rollout.gpu_memory_utilization:g} allows; set "
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=BYTES"
    )


class Server(vLLMHttpServer):
    """Serve one replica for verl; ``policy_version`` is the version of the last adapter, and is in every answer."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        """Raise ValueError for a configuration that cannot be honoured; the message names every key."""
        self.policy_version = 0
        self._noise: tuple[float, int, int, tuple[str, ...]] = (0.0, 0, 0, ())
        self._change = asyncio.Lock()
        super().__init__(*args, **keywords)

    def _init_model_config(self, model_config: Any) -> Any:
        model = copy.copy(super()._init_model_config(model_config))
        if reasons := refusals(self.config, model):
            raise ValueError("; ".join(reasons))
        self._rank = rank_of(model)
        for key, value in (("lora_rank", 0), ("lora", {})):  # verl's configurations are frozen
            object.__setattr__(model, key, value)
        return model

    def _get_worker_extension_cls(self) -> str:
        return EXTENSION

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        if warning := memory_warning(self.config, engine_kwargs):
            logger.warning(warning)
        engine_kwargs["quantization"] = NAME
        engine_kwargs["additional_config"] = with_policy(engine_kwargs.get("additional_config"), self._rank)

    def _resolve_sleep_level(self) -> int:
        return 1  # 2 discards the weights, and the trainer has none to send

    async def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Call a worker method for verl; for ``update_weights_from_ipc``, receive the adapter as the next version.

        Raises AdapterError for a refused adapter or while requests are running; the previous policy then stays in
        service. Raises PolicyLostError if the engine holds half of a policy, and RuntimeError as ``clear_kv_cache``.
        """
        if method != "update_weights_from_ipc":
            await super().collective_rpc(method, timeout, args, kwargs)
            return
        given = dict(kwargs or {})
        if given.get("peft_config"):  # sets and enums cannot be sent to the workers
            given["peft_config"] = plain_config(given["peft_config"])
        async with self._change:
            if self.engine.output_processor.has_unfinished_requests():
                given["refusal"] = "requests are running; finish or abort them before the policy changes"
            results = await self.engine.collective_rpc("receive_adapter", timeout=timeout, args=args, kwargs=given)
            check_answers(results)
            self.policy_version = int(results[0]["version"])
            await self.clear_kv_cache()

    async def clear_kv_cache(self) -> None:
        """Clear the KV cache and the prefix cache; raise RuntimeError if another policy's keys could be read again."""
        await super().clear_kv_cache()
        if self.node_rank != 0:
            return
        # vLLM 0.26 reports a failure when asked to reset a KV connector that the engine does not have
        has_connector = self.engine.vllm_config.kv_transfer_config is not None
        if not await self.engine.reset_prefix_cache(reset_connector=has_connector):
            raise RuntimeError("vLLM could not empty its prefix cache, so answers of another policy could be reused")

    async def set_noise(self, sigma: float, seed: int, rollout: int, targets: Sequence[str]) -> None:
        """Set the norms to base + sigma * z(seed, rollout, name), or to the base for sigma 0.

        Setting the same noise again does nothing. Raises ValueError for targets that name no norm, and RuntimeError if
        requests are running.
        """
        wanted = (float(sigma), seed, rollout, tuple(targets)) if sigma else (0.0, 0, 0, ())
        async with self._change:
            if wanted == self._noise:
                return
            if self.engine.output_processor.has_unfinished_requests():
                raise RuntimeError("requests are running; the noise is that of a whole rollout and cannot change now")
            await self.clear_kv_cache()
            answers = await self.engine.collective_rpc("qerl_set_noise", args=(*wanted[:3], list(wanted[3])))
            check_answers(answers, ValueError)
            self._noise = wanted

    async def policy_state(self) -> dict[str, Any]:
        """Return the first rank's version and noise, and the SHA-256 of its norms and of its adapter."""
        return (await self.engine.collective_rpc("qerl_state", args=(True,)))[0]

    async def generate(self, *args: Any, **keywords: Any) -> Any:
        """Generate as verl's server does, and add ``policy_version`` to the output's extra fields."""
        output = await super().generate(*args, **keywords)
        output.extra_fields["policy_version"] = self.policy_version
        return output


def with_policy(given: Any, rank: int) -> dict[str, Any]:
    """Return vLLM's additional_config with room for an adapter; raise ValueError if it has a policy adapter already."""
    config = dict(json.loads(given) if isinstance(given, str) else given or {})
    options = dict(config.get("qerl", {}))
    if "policy_adapter" in options:
        raise ValueError("additional_config.qerl.policy_adapter follows from model.lora_rank; leave it out")
    return {**config, "qerl": {**options, "policy_adapter": {"rank": rank}}}


class Replica(vLLMReplica):
    """Start ``Server`` for verl's replica, in place of verl's own server."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        if self.is_reward_model or self.is_teacher_model:
            raise ValueError(f"rollout.name={ROLLOUT} is for the policy; reward models and teachers run under vllm")
        self.server_class = ray.remote(Server)

    def _get_server_name_prefix(self) -> str:
        return f"{ROLLOUT}_"
