"""verl 0.9 rolls out with the resident policy: the worker's half and the server's. Nothing else imports this room."""

ROLLOUT = "qerl"  # rollout.name


def server_name(replica: int) -> str:
    """The Ray actor that holds the engine of a replica; verl's ServerAdapter looks it up by this name."""
    return f"{ROLLOUT}_server_{replica}_0"
