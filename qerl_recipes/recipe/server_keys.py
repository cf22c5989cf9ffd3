"""Refuse what the keys about a rollout server alone decide."""

import dataclasses
import json
import os
import shlex
import urllib.parse
from collections.abc import Iterator

from qerl_recipes.recipe.configs import SERVER, GRPOConfig
from qerl_recipes.recipe.keys import Refusal, refused
from qerl_vllm_plugin.wire.address import parted, shown

API_KEY = "VLLM_API_KEY"  # environment variable, which the server reads too
SERVER_KEYS = ("vllm_server_base_url", "vllm_server_timeout", "overlap")
# fields of vLLM's SamplingParams that a request to /v1/completions accepts under the same name
IN_A_REQUEST = {
    *("presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "allowed_token_ids", "structured_outputs"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens"),
    *("skip_special_tokens", "spaces_between_special_tokens"),
}
DEFAULTS = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}


def server_problems(training: GRPOConfig) -> Iterator[str]:
    """Yield a line for each key about a server that cannot be honoured in the recipe's ``vllm_mode``."""
    if training.vllm_mode != SERVER:
        for key in SERVER_KEYS:
            if (value := getattr(training, key)) != DEFAULTS[key]:
                way_out = f"vllm_mode: {training.vllm_mode} has an engine of its own; use vllm_mode: {SERVER}"
                yield refused(key, Refusal((), f"{way_out}, or remove the key"), value)
        return
    if training.rollout_engine != DEFAULTS["rollout_engine"]:
        yield f"vllm_mode: {SERVER} is a mode of rollout_engine: vllm, not of {training.rollout_engine}; remove one"
    if training.quantization != "qerl_nvfp4":
        yield (
            f"vllm_mode: {SERVER} changes the adapter in the server's layers, which only qerl_nvfp4 has, not "
            f"quantization: {training.quantization}; use vllm_mode: colocate for it"
        )
    if (size := training.vllm_tensor_parallel_size) != 1:
        yield (
            f"vllm_tensor_parallel_size: {size} is of an engine among the trainer's processes; with vllm_mode: "
            f"{SERVER} start the server with --tensor-parallel-size {size}, and remove the key"
        )
    if (drafts := training.vllm_speculative_config) is not None:
        yield (
            f"vllm_speculative_config is of an engine in the trainer's process; with vllm_mode: {SERVER} start the "
            f"server with --speculative-config {shlex.quote(json.dumps(drafts))}, and remove the key"
        )
    yield from _address_problems(training)
    if not training.vllm_server_timeout > 0:
        yield f"vllm_server_timeout must be above 0 seconds, not {training.vllm_server_timeout:g}"
    if unknown := sorted(set(training.generation_kwargs or ()) - IN_A_REQUEST):
        yield (
            f"generation_kwargs: a request to a server cannot carry {', '.join(unknown)}; it can "
            f"{', '.join(sorted(IN_A_REQUEST))}"
        )


def _address_problems(training: GRPOConfig) -> Iterator[str]:
    if (url := training.vllm_server_base_url) is None:
        return
    try:
        plain, login = parted(url)
        parts = urllib.parse.urlsplit(plain)
        is_plain = not any(character.isspace() or character in "@?#" for character in plain)
        is_address = is_plain and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port
        is_address = False
    if not is_address:
        yield (
            f"vllm_server_base_url: {shown(url)!r} is no address; it looks like http://127.0.0.1:8000, without a "
            "query, and in a user's password / ? # @ are %2F %3F %23 %40"
        )
    elif login is not None and os.environ.get(API_KEY):
        yield (
            f"vllm_server_base_url names a user, who would be sent in place of the key of {API_KEY}; leave one of the "
            "two out"
        )
