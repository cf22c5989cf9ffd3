"""Test a server behind a proxy that wants a user and a password.

The run must tell them to the proxy, and show them to no reader.
"""

import asyncio
import base64
import http.server
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.tensorboard import SummaryWriter
from transformers.integrations import TensorBoardCallback

from qerl_recipes.bench.results import conditions
from qerl_recipes.files.run_state import recorded
from qerl_recipes.recipe.configs import parse, parser
from qerl_recipes.recipe.file import ConfigError, defaults_from_yaml, help_text
from qerl_recipes.recipe.server_keys import server_problems
from qerl_recipes.rollout.sampling import Completion
from qerl_recipes.rollout.server import CompletionsClient, Request
from qerl_recipes.rollout.server_link import ServerLink, ServerLostError, ServerRefusedError

LOGIN = "user:se%2Fcret"
BASIC = "Basic " + base64.b64encode(b"user:se/cret").decode()
COMPLETION = {"token_ids": [7], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "length"}
MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "created": 0, "owned_by": "x"}]}
ANSWERS = {"/v1/models": MODELS, "/v1/completions": {"choices": [COMPLETION]}, "/v1/qerl/state": {"version": 3}}


@pytest.fixture
def proxy() -> Iterator[str]:
    """Start a proxy, and return its address, which contains user and password."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            is_known = self.headers.get("Authorization") == BASIC
            content = json.dumps(ANSWERS[self.path] if is_known else {"error": "who are you?"}).encode()
            self.send_response(200 if is_known else 401)
            headers = {"Content-Type": "application/json", "Content-Length": str(len(content))}
            for name, value in {**headers, "X-QeRL-Policy-Version": "3"}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *arguments: object) -> None:
            """Log nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://{LOGIN}@127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QERL_ADMIN_TOKEN", "a-token-of-these-32-characters!!")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


def recipe(url: str, *flags: str) -> Any:
    return parse(["--vllm_mode", "server", "--vllm_server_base_url", url, "--vllm_server_timeout", "1", *flags])


def nothing_of_it(text: object) -> bool:
    return "cret" not in str(text) and "user:" not in str(text)


def test_completions_are_requested_in_the_users_name(proxy: str) -> None:
    plain = proxy.replace(f"{LOGIN}@", "")

    async def complete(password: str) -> list[Any]:
        client = CompletionsClient(plain, None, {}, 1.0, ("user", password))
        return [one async for one in client.complete({0: Request([5], 1, 1)}, 3, lambda: asyncio.sleep(60))]

    with pytest.raises(ServerRefusedError, match="does not name its model: Error code: 401"):
        asyncio.run(complete("another"))
    assert asyncio.run(complete("se/cret")) == [{0: Completion([7], [-1.0])}, None]


def test_the_line_to_a_server_says_who_it_is_to_the_server_alone(
    proxy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a server that accepts the login but lacks all that a run needs."""
    monkeypatch.setattr("qerl_recipes.rollout.server_link.base_hash", lambda base: "0" * 64)
    training = recipe(proxy, "--output_dir", str(tmp_path))[1]
    with pytest.raises(ServerRefusedError, match=r"at http://127.0.0.1:\d+ does not fit this recipe") as refused:
        ServerLink("base", training, rank=4, dtype="float32")
    assert nothing_of_it(refused.value)
    training = recipe(proxy.replace("cret", "cret2"), "--output_dir", str(tmp_path))[1]
    with pytest.raises(ServerRefusedError, match="who are you") as refused:
        ServerLink("base", training, rank=4, dtype="float32")
    assert nothing_of_it(refused.value)


def test_a_silent_server_is_named_without_them(
    hold_port: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("qerl_recipes.rollout.server_link.base_hash", lambda base: "0" * 64)
    training = recipe(f"http://{LOGIN}@127.0.0.1:{hold_port()}", "--output_dir", str(tmp_path))[1]
    with pytest.raises(ServerLostError, match="has not answered") as lost:
        ServerLink("base", training, rank=4, dtype="float32")
    said = capfd.readouterr().err
    assert "does not answer" in said and nothing_of_it(said) and nothing_of_it(lost.value)


def test_no_report_of_a_configuration_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://{LOGIN}@gpu1:8000"
    parts = recipe(url, "--output_dir", str(tmp_path), "--hub_token", "hf_cret")
    training = parts[1]
    assert training.server_address == url  # and is asked for
    for text in (training.to_dict(), training.to_json_string(), training.to_sanitized_dict()):
        assert nothing_of_it(text) and "http://***@gpu1:8000" in str(text)
    for text in (str(training), repr(training), recorded(*parts)):
        assert nothing_of_it(text)
    monkeypatch.setattr(sys, "argv", ["qerl", "bench", "train", "--vllm_server_base_url", url])
    assert conditions()["command"] == "qerl bench train --vllm_server_base_url http://***@gpu1:8000"


def test_tensorboard_is_not_told(tmp_path: Path) -> None:
    training = recipe(f"http://{LOGIN}@gpu1:8000", "--output_dir", str(tmp_path))[1]
    with SummaryWriter(str(tmp_path / "logs")) as writer:
        state = type("State", (), {"is_world_process_zero": True, "is_hyper_param_search": False})()
        TensorBoardCallback(writer).on_train_begin(training, state, None)
    (file,) = (tmp_path / "logs").glob("events*")
    assert b"vllm_server_base_url" in file.read_bytes() and b"cret" not in file.read_bytes()


def test_the_help_of_a_recipe_shows_neither_them_nor_a_token() -> None:
    recipes = parser()
    defaults_from_yaml(recipes, {"vllm_server_base_url": f"http://{LOGIN}@gpu1", "hub_token": "hf_cret"}, "x.yaml")
    text = help_text(recipes)
    assert "http://***@gpu1" in text and nothing_of_it(text)


@pytest.mark.parametrize(
    ("url", "flags", "message"),
    [
        (f"{LOGIN}@gpu1:8000", [], r"vllm_server_base_url: '\*\*\*@gpu1:8000' is no address; it looks like"),
        (f"http://{LOGIN}@gpu1:80000", [], r"'http://\*\*\*@gpu1:80000' is no address"),
        (f"http://{LOGIN}@gpu1/?token=secret", [], r"'http://\*\*\*@gpu1/\?\*\*\*' is no address.* without a query"),
        ("http://user:se/cret@gpu1", [], r"'http://\*\*\*' is no address.*password / \? # @ are %2F"),
        (f"http://{LOGIN}@gpu1", ["--vllm_mode", "colocate"], r"vllm_server_base_url.*http://\*\*\*@gpu1"),
        ("http://gpu1", [f"http://{LOGIN}@gpu1"], r"http://\*\*\*@gpu1 belongs to no flag"),
    ],
    ids=["no scheme", "port", "query", "slash", "mode", "stray"],
)
def test_a_refusal_shows_neither(url: str, flags: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        raise ConfigError("\n".join(server_problems(recipe(url, "--output_dir", str(tmp_path), *flags)[1])))
    assert nothing_of_it(refused.value)


def test_a_user_beside_the_servers_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = recipe(f"http://{LOGIN}@gpu1", "--output_dir", str(tmp_path))[1]
    assert list(server_problems(training)) == []
    monkeypatch.setenv("VLLM_API_KEY", "key")
    (line,) = server_problems(training)
    assert line.startswith("vllm_server_base_url names a user, who would be sent in place of the key of VLLM_API_KEY")
