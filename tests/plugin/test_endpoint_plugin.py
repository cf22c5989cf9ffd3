"""Test when the server has the plugin's routes at all, and which servers refuse to start with them."""

import asyncio
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from vllm.config import KVTransferConfig

from qerl_vllm_plugin.server import plugin as plugin_file
from qerl_vllm_plugin.server.plugin import EndpointPlugin
from qerl_vllm_plugin.server.token import matches, read_token

LONG = "a-token-that-is-long-enough"


@pytest.fixture
def environment(monkeypatch):
    """environment(**variables) sets the token's variables and removes the others."""

    def put(**variables):
        for name in ("QERL_ADMIN_TOKEN_FILE", "QERL_ADMIN_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return put


def routes(app: FastAPI) -> set[str]:
    return {path for route in app.routes if (path := getattr(route, "path", "")).startswith("/v1/qerl")}


def test_without_a_token_there_are_no_routes(environment):
    environment()
    app = FastAPI()
    plugin = EndpointPlugin()
    plugin.attach_router(app)
    assert routes(app) == set()
    asyncio.run(plugin.init_state(None, app.state, SimpleNamespace()))
    environment(QERL_ADMIN_TOKEN=LONG)
    EndpointPlugin().attach_router(app)
    assert routes(app) == {"/v1/qerl/policy", "/v1/qerl/noise", "/v1/qerl/state"}


def test_the_token_is_that_of_the_file_or_of_the_environment(environment, tmp_path):
    (tmp_path / "token").write_text(f"{LONG}\n")
    for variables in ({"QERL_ADMIN_TOKEN_FILE": str(tmp_path / "token")}, {"QERL_ADMIN_TOKEN": LONG}):
        environment(**variables)
        token = read_token()
        assert token is not None
        assert LONG.encode() not in token
        assert matches(LONG, token)
        assert not any(
            matches(other, token) for other in (None, "", LONG[:-1], LONG + "x", LONG.upper(), "\u00e9" * 27)
        )


def test_a_token_that_cannot_be_meant_ends_the_start(environment, tmp_path):
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff" * 40)
    cases = [
        ({"QERL_ADMIN_TOKEN": ""}, "too short"),
        ({"QERL_ADMIN_TOKEN": "secret"}, "too short"),
        ({"QERL_ADMIN_TOKEN": "secret-with-a-snowman-\u2603"}, "no header can carry"),
        ({"QERL_ADMIN_TOKEN": "secret-with-a-space-behind "}, "no header can carry"),
        ({"QERL_ADMIN_TOKEN_FILE": str(tmp_path / "empty")}, "too short"),
        ({"QERL_ADMIN_TOKEN_FILE": str(tmp_path / "missing")}, "cannot be read"),
        ({"QERL_ADMIN_TOKEN_FILE": str(tmp_path / "binary")}, "cannot be read"),
        ({"QERL_ADMIN_TOKEN": LONG, "QERL_ADMIN_TOKEN_FILE": str(tmp_path / "empty")}, "set one"),
    ]
    for variables, text in cases:
        environment(**variables)
        with pytest.raises(ValueError, match=text) as refused:
            EndpointPlugin().attach_router(FastAPI())
        assert "secret" not in str(refused.value)


@pytest.fixture
def start(environment, make_nvfp4):
    """start(replicas=1, executor="uni", connector=None, options={}) returns the error text of opening the policy."""

    def open_policy(replicas=1, executor="uni", connector=None, options=None):
        environment(QERL_ADMIN_TOKEN=LONG)
        app, plugin = FastAPI(), EndpointPlugin()
        plugin.attach_router(app)
        parallel = {"data_parallel_size": replicas, "distributed_executor_backend": executor, "_api_process_count": 1}
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(**parallel),
            kv_transfer_config=connector,
            model_config=SimpleNamespace(model=str(make_nvfp4("qwen2")), revision=None),
            additional_config={"qerl": options or {}},
        )
        with pytest.raises(ValueError) as refused:
            asyncio.run(plugin.init_state(SimpleNamespace(vllm_config=config), app.state, None))
        return str(refused.value)

    return open_policy


NO_DIRECTORY = {"policy_folders": "/no/such/directory"}
CONNECTOR = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")


@pytest.mark.parametrize(
    ("server", "text"),
    [
        ({"replicas": 2}, "--data-parallel-size 2"),
        ({"options": NO_DIRECTORY}, "/no/such/directory is no directory"),
        ({"executor": "ray"}, "--distributed-executor-backend mp"),
        ({"connector": CONNECTOR}, "ExampleConnector keeps keys and values outside"),
    ],
    ids=["replicas", "folders", "executor", "connector"],
)
def test_servers_of_which_only_a_part_would_change(start, server, text):
    assert text in start(**server)


@pytest.mark.parametrize("is_dev", [True, False])
def test_endpoints_without_a_token_are_warned_of(start, monkeypatch, warnings_of, is_dev):
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", str(int(is_dev)))
    warnings = warnings_of(plugin_file.logger)
    assert "is no directory" in start(options=NO_DIRECTORY)  # the start gets as far as this refusal
    assert [text.partition(":")[0] for text in warnings] == ["VLLM_SERVER_DEV_MODE=1"] * is_dev


def test_a_server_without_an_engine_has_no_such_routes(environment):
    for variables, is_refused in (({"QERL_ADMIN_TOKEN": LONG}, True), ({}, False)):
        environment(**variables)
        plugin = EndpointPlugin()
        plugin.attach_router(app := FastAPI())
        start = plugin.init_state(None, app.state, SimpleNamespace())
        if is_refused:
            with pytest.raises(ValueError, match="needs an engine; a render server has none"):
                asyncio.run(start)
        else:
            asyncio.run(start)
