"""Run verl 0.9's rollouts with the resident policy: the worker's half and the server's half.

Nothing else in the plugin imports this package.
"""

ROLLOUT = "qerl"  # rollout.name


def server_name(replica: int) -> str:
    """Return the name of the Ray actor that holds a replica's engine; verl's ServerAdapter looks it up by this name."""
    return f"{ROLLOUT}_server_{replica}_0"
