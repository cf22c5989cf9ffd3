"""Register this package with verl: ``actor_rollout_ref.model.external_lib=qerl_recipes.verl.register``.

verl imports this module in each process that reads the model's configuration. From then on ``rollout.name=qerl``
selects the resident policy, and the strategy fsdp2 on NVIDIA GPUs trains on the frozen NVFP4 model.
"""

from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from qerl_recipes.verl import engine  # noqa: F401, registers itself
from qerl_vllm_plugin.verl import ROLLOUT


def _replica() -> type[RolloutReplica]:
    from qerl_vllm_plugin.verl.rollout import Replica

    return Replica


RolloutReplicaRegistry.register(ROLLOUT, _replica)
# verl has no function to register a ServerAdapter; its own finds the servers by rollout.name
base._ROLLOUT_REGISTRY[ROLLOUT, "async"] = base._ROLLOUT_REGISTRY["vllm", "async"]
