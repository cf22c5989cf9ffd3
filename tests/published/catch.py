"""Point multi_env's game of catch at its server."""

from multi_env import MultiEnv

MultiEnv.catch_url = "http://127.0.0.1:8001"


class Catch(MultiEnv):
    """Leave out the calls for whose arguments the demo's model has no words."""

    guess = move = None
