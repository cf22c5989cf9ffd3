"""Receive verl's weight transfer: verl's LoRA tensors become the next version of the resident policy."""

from collections.abc import Mapping
from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.logger import init_logger

from qerl_vllm_plugin.adapter.check import AdapterError
from qerl_vllm_plugin.worker.change import Answer, on_all_ranks
from qerl_vllm_plugin.worker.policy import policy_of, prepare_swap

logger = init_logger("vllm.qerl")

FULL_WEIGHTS = (
    "verl has sent {count} tensors that are no LoRA adapter (full weights, or an adapter merged into them); this "
    "engine keeps its NVFP4 weights and takes an adapter alone. Set actor_rollout_ref.model.lora_rank, leave "
    "model.lora.merge false and set actor_rollout_ref.rollout.load_format=safetensors"
)


class Extension(vLLMColocateWorkerExtension):
    """Extend a vLLM worker for verl with frozen weights: what verl sends is swapped in as the policy's adapter.

    verl's transport is unchanged: buckets over ZeroMQ, with CUDA IPC or shared memory.
    """

    def receive_adapter(
        self,
        peft_config: Mapping[str, Any] | None = None,
        base_sync_done: bool = False,
        use_shm: bool = False,
        refusal: str = "",
    ) -> Answer:
        """Receive what verl sends and make it the policy's next version, on all ranks or on none.

        Refusals are returned, not raised, as by the plugin's other worker methods. The answer is ``{"version": N}``, or
        ``{"error": text}`` with the previous version still in service. A caller that refuses the adapter gives its
        reason as ``refusal``. Everything is received before anything is checked, because verl's sender would wait for
        ever for a receiver that has given up.
        """
        try:
            policy = policy_of(self)
        except Exception as error:
            # receive here, too: the sender waits until everything is received
            logger.exception("this engine holds no policy")
            self._receive(False, use_shm)
            return {"error": str(error) or type(error).__name__}
        is_adapter = bool(peft_config) and base_sync_done

        def prepare() -> Any:
            # a rank that cannot receive refuses, and the other ranks learn of it when they agree
            tensors, count = self._receive(is_adapter, use_shm)
            if refusal or not is_adapter:
                raise AdapterError(refusal or FULL_WEIGHTS.format(count=count))
            return prepare_swap(policy, tensors, peft_config, None, None, "")

        return on_all_ranks(policy, prepare)

    def _receive(self, keep: bool, use_shm: bool) -> tuple[dict[str, torch.Tensor], int]:
        """Receive all tensors; return them by name (none unless ``keep``), and how many came."""
        kept: dict[str, torch.Tensor] = {}
        names: list[str] = []

        def on_bucket(weights: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
            names.extend(name for name, _ in weights)
            if keep:  # clone: the bucket's memory is overwritten by the next bucket, and freed
                kept.update((name, tensor.clone()) for name, tensor in weights)

        device = self.device if self.device is not None else torch.device("cpu")
        receiver = BucketedWeightReceiver(zmq_handle=self._get_zmq_handle(), device=device, use_shm=use_shm)
        receiver.receive_weights(on_bucket_received=on_bucket)
        return kept, len(names)
