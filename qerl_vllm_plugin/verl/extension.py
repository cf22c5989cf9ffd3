"""verl's weight transfer, received by the resident policy: verl's LoRA tensors become the policy's next version."""

from collections.abc import Mapping
from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.logger import init_logger

from qerl_vllm_plugin.adapter.check import AdapterError, plain_config
from qerl_vllm_plugin.worker.answers import check_answers
from qerl_vllm_plugin.worker.policy import Answer, on_all_ranks, policy_of, prepare_swap

logger = init_logger("vllm.qerl")

FULL_WEIGHTS = (
    "verl has sent {count} tensors that are no LoRA adapter (full weights, or an adapter merged into them); this "
    "engine keeps its NVFP4 weights and takes an adapter alone. Set actor_rollout_ref.model.lora_rank, leave "
    "model.lora.merge false and set actor_rollout_ref.rollout.load_format=safetensors"
)
DELTAS = "this engine keeps its NVFP4 weights and takes no deltas to them; set rollout.checkpoint_engine.backend=naive"


class Extension(vLLMColocateWorkerExtension):
    """A vLLM worker as verl wants it, whose weights never change: what verl sends is swapped in as the policy.

    Of verl's transport everything stays: ZeroMQ, and CUDA IPC or shared memory, in buckets.
    """

    def receive_adapter(
        self,
        peft_config: Mapping[str, Any] | None = None,
        base_sync_done: bool = False,
        use_shm: bool = False,
        refusal: str = "",
    ) -> Answer:
        """Receives what verl sends and makes it the policy's next version, on all ranks or on none.

        Never raises, as the plugin's other worker methods: ``{"version": N}``, or ``{"error": text}`` with the version
        before still in service; ``refusal`` is one that the caller has found. All is received before anything is
        checked, since verl's sender waits for ever for a receiver that has given up.
        """
        try:
            policy = policy_of(self)
        except Exception as error:
            # the sender must be heard out here, too
            logger.exception("this engine holds no policy")
            self._receive(False, use_shm)
            return {"error": str(error) or type(error).__name__}
        is_adapter = bool(peft_config) and base_sync_done

        def prepare() -> Any:
            # a rank that cannot receive is one that refuses: the others learn of it where they agree
            tensors, count = self._receive(is_adapter, use_shm)
            if refusal or not is_adapter:
                raise AdapterError(refusal or FULL_WEIGHTS.format(count=count))
            return prepare_swap(policy, tensors, peft_config, None, None, "")

        return on_all_ranks(policy, prepare)

    def update_weights_from_ipc(
        self, peft_config: dict[str, Any] | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """verl's own name for it. Raises what ``receive_adapter`` answers: AdapterError or PolicyLostError.

        Behind verl's stock server, which looks at no answer. With several ranks use ``Server`` (rollout.py): vLLM stops
        reading at the first rank that raises.
        """
        check_answers([self.receive_adapter(peft_config and plain_config(peft_config), base_sync_done, use_shm)])

    def _update_weights(self, weights: Any, peft_config: Any, base_sync_done: bool) -> None:
        raise AdapterError(FULL_WEIGHTS.format(count=len(weights)))

    def update_verl_delta_weights(self, update_info: dict[str, Any]) -> None:
        """Raises AdapterError: deltas are changes of full weights."""
        raise AdapterError(DELTAS)

    def _receive(self, keep: bool, use_shm: bool) -> tuple[dict[str, torch.Tensor], int]:
        """The tensors by name if they are to be kept, and how many came."""
        kept: dict[str, torch.Tensor] = {}
        names: list[str] = []

        def on_bucket(weights: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
            names.extend(name for name, _ in weights)
            if keep:  # copies: the bucket is written again, and freed
                kept.update((name, tensor.clone()) for name, tensor in weights)

        device = self.device if self.device is not None else torch.device("cpu")
        receiver = BucketedWeightReceiver(zmq_handle=self._get_zmq_handle(), device=device, use_shm=use_shm)
        receiver.receive_weights(on_bucket_received=on_bucket)
        return kept, len(names)
