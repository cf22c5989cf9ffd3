"""Add the routes to vLLM's API server, which loads the entry point ``qerl`` of the group ``vllm.endpoint_plugins``."""

from argparse import Namespace
from typing import Any

from vllm import envs
from vllm.logger import init_logger

from qerl_vllm_plugin.compat import engine
from qerl_vllm_plugin.options import Options
from qerl_vllm_plugin.server import routes
from qerl_vllm_plugin.server.changes import PolicyServer
from qerl_vllm_plugin.server.token import TOKEN, TOKEN_FILE, read_token
from qerl_vllm_plugin.server.versions import StampVersions

logger = init_logger("vllm.qerl")


class EndpointPlugin:
    """Serve /v1/qerl as vLLM's endpoint plugin; it adds routes only if an admin token is configured."""

    name = "qerl"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._token: bytes | None = None

    def attach_router(self, app: Any) -> None:
        """Add the routes to the server's application; raise ValueError for an admin token that cannot be used."""
        self._token = read_token()
        if self._token is None:
            logger.info("/v1/qerl: neither %s nor %s is set, so there are no such routes", TOKEN_FILE, TOKEN)
            return
        app.state.qerl = PolicyServer()
        routes.attach(app, self._token)
        app.add_middleware(StampVersions, server=app.state.qerl)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Open the policy of the server's engine; raise ValueError if it cannot change whole, or for bad options."""
        if self._token is None:
            return
        if engine_client is None:
            raise ValueError("/v1/qerl needs an engine; a render server has none")
        vllm_config = engine_client.vllm_config
        replicas = vllm_config.parallel_config.data_parallel_size
        if replicas > 1:
            raise ValueError(
                f"/v1/qerl: --data-parallel-size {replicas} would let one replica answer for all; start one server a "
                "replica, and change each"
            )
        if not engine.workers_share_this_machine(vllm_config):
            raise ValueError(
                "/v1/qerl: adapters reach the workers through memory of this machine; start the server with "
                "--distributed-executor-backend mp, on one machine"
            )
        engine.check_kv_connector(vllm_config)
        if envs.VLLM_SERVER_DEV_MODE:
            logger.warning(
                "VLLM_SERVER_DEV_MODE=1: whoever reaches this server changes its policy by /collective_rpc, without a "
                "token; leave it out wherever others can reach the server"
            )
        base = engine.checkpoint_folder(vllm_config)
        options = Options.parse(vllm_config.additional_config)
        options.check_folders()
        await state.qerl.open(engine_client, vllm_config, base, options.policy_folders, options.policy_timeout)
