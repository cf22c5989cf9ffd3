"""Check the keys of ``vllm_mode: server``.

They say where the server is. Some keys exclude each other, and some have no effect on a server.
"""

import dataclasses
import os
import urllib.parse
from collections.abc import Iterator

from qerl_recipes.recipe.configs import GRPOConfig
from qerl_recipes.recipe.keys import Refusal, refused
from qerl_vllm_plugin.server.token import TOKEN, TOKEN_FILE, configured_token
from qerl_vllm_plugin.wire.address import parted, shown

SERVER = "server"  # the value of vllm_mode
API_KEY = "VLLM_API_KEY"  # environment variable, which the server reads too
ADDRESS = ("vllm_server_host", "vllm_server_port")
OF_A_SERVER = ("vllm_server_base_url", *ADDRESS, "vllm_server_timeout")
# keys of an engine in the trainer's process -> what to set on a server instead
OF_AN_ENGINE = {
    "vllm_gpu_memory_utilization": "--gpu-memory-utilization of the server",
    "vllm_kv_cache_memory_bytes": "--kv-cache-memory-bytes of the server",
    "vllm_enable_sleep_mode": "the server keeps its memory while the trainer works",
}
# fields of vLLM's SamplingParams that a request to /v1/completions accepts under the same name
IN_A_REQUEST = {
    *("presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "allowed_token_ids", "structured_outputs"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens"),
    *("skip_special_tokens", "spaces_between_special_tokens"),
}
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}


def is_wanted(training: GRPOConfig) -> bool:
    """Return True if rollouts come from a server."""
    return training.vllm_mode == SERVER


def address(training: GRPOConfig) -> str:
    """Return the server's address, such as http://127.0.0.1:8000, without /v1.

    It may contain user and password: use it for requests, do not show it.
    """
    url = training.vllm_server_base_url
    if url is None:
        host = training.vllm_server_host
        return f"http://{f'[{host}]' if ':' in host else host}:{training.vllm_server_port}"  # IPv6 needs brackets
    return url.rstrip("/").removesuffix("/v1")


def problems(training: GRPOConfig) -> Iterator[str]:
    """Yield one line for each key that cannot be honoured in the recipe's ``vllm_mode``."""
    if not is_wanted(training):
        for key in OF_A_SERVER:
            if (value := getattr(training, key)) != _DEFAULTS[key]:
                way_out = f"vllm_mode: {training.vllm_mode} has an engine of its own; use vllm_mode: {SERVER}"
                yield refused(key, Refusal((), f"{way_out}, or remove the key"), _for_people(value))
        return
    if training.rollout_engine != _DEFAULTS["rollout_engine"]:
        yield f"vllm_mode: {SERVER} is a mode of rollout_engine: vllm, not of {training.rollout_engine}; remove one"
    if training.quantization != "qerl_nvfp4":
        yield (
            f"vllm_mode: {SERVER} changes the adapter in the server's layers, which only qerl_nvfp4 has, not "
            f"quantization: {training.quantization}; use vllm_mode: colocate for this arm"
        )
    if training.vllm_tensor_parallel_size != 1:
        size = training.vllm_tensor_parallel_size
        yield (
            f"vllm_tensor_parallel_size: {size} is of an engine among the trainer's processes; with vllm_mode: "
            f"{SERVER} start the server with --tensor-parallel-size {size}, and remove the key"
        )
    yield from _address_problems(training)
    if not training.vllm_server_timeout > 0:
        yield f"vllm_server_timeout must be above 0 seconds, not {training.vllm_server_timeout:g}"
    if unknown := sorted(set(training.generation_kwargs or ()) - IN_A_REQUEST):
        yield (
            f"generation_kwargs: a request to a server cannot carry {', '.join(unknown)}; it can "
            f"{', '.join(sorted(IN_A_REQUEST))}"
        )
    try:
        has_token = configured_token() is not None
    except ValueError as error:
        yield f"vllm_mode: {SERVER}: {error}"
    else:
        if not has_token:
            yield (
                f"vllm_mode: {SERVER} pushes the policy under the server's admin token; export {TOKEN_FILE}=FILE or "
                f"{TOKEN}, the same for server and trainer"
            )


def _address_problems(training: GRPOConfig) -> Iterator[str]:
    url = training.vllm_server_base_url
    if url is None:
        if not _is_address(assembled := address(training)) or "@" in assembled:
            yield (
                f"vllm_server_host: {shown(training.vllm_server_host)!r} with vllm_server_port: "
                f"{training.vllm_server_port} gives {shown(assembled)}, which is no address; a host is a name or a "
                "number, such as gpu1 or ::1"
            )
        return
    if not _is_address(url):
        yield (
            f"vllm_server_base_url: {shown(url)!r} is no address; it looks like http://127.0.0.1:8000, without a "
            "query, and in a user's password / ? # @ are %2F %3F %23 %40"
        )
    elif parted(url)[1] is not None and os.environ.get(API_KEY):
        yield (
            f"vllm_server_base_url names a user, who would be sent in place of the key of {API_KEY}; leave one of the "
            "two out"
        )
    for key in ADDRESS:
        if (value := getattr(training, key)) != _DEFAULTS[key]:
            yield f"{key}: {value} would be ignored beside vllm_server_base_url; remove one of the two"


def _is_address(url: str) -> bool:
    try:
        plain, _ = parted(url)
        parts = urllib.parse.urlsplit(plain)
        is_plain = not any(character.isspace() or character in "@?#" for character in plain)
        return is_plain and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port
        return False


def _for_people(value: object) -> object:
    return shown(value) if isinstance(value, str) else value


def without_effect(training: GRPOConfig) -> Iterator[str]:
    """Yield one line for each key that has no effect with a server.

    It says what to set on the server instead.
    """
    if is_wanted(training):
        for key, instead in OF_AN_ENGINE.items():
            if (value := getattr(training, key)) != _DEFAULTS[key]:
                yield f"{key}: {value} has no effect with vllm_mode: {SERVER} ({instead})"
