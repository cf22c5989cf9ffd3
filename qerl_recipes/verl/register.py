"""``actor_rollout_ref.model.external_lib=qerl_recipes.verl.register`` makes verl know of this package.

verl imports it in each of its processes that reads the model's configuration. From then on ``rollout.name=qerl`` is the
resident policy, and fsdp2 on NVIDIA GPUs is the frozen NVFP4 model.
"""

from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from qerl_recipes.verl import engine  # noqa: F401, registers itself
from qerl_vllm_plugin.verl import ROLLOUT


def _replica() -> type[RolloutReplica]:
    from qerl_vllm_plugin.verl.rollout import Replica

    return Replica


RolloutReplicaRegistry.register(ROLLOUT, _replica)
# verl has no function for this one; its ServerAdapter finds the servers by rollout.name
base._ROLLOUT_REGISTRY[ROLLOUT, "async"] = base._ROLLOUT_REGISTRY["vllm", "async"]
