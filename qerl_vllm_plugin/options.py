"""Parse the options that `--additional-config` may hold under "qerl".

This module needs neither vLLM nor torch, so a command can check the options at once.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from qerl_vllm_plugin.wire.timing import PATIENCE

KERNELS = ("auto", "tiled", "marlin", "dequantize", "batch_invariant")
NO_WEIGHT_TRANSFER = (
    "--weight-transfer-config has no place here: the weights of a qerl_nvfp4 engine are frozen, and no adapter fits "
    "into those calls: they have no field for its config, a rank cannot refuse for the others, and the prefix cache "
    "stays as it is (qerl_vllm_plugin/lora_updates.md). Push adapters with PUT /v1/qerl/policy or "
    "qerl_vllm_plugin.client"
)
ONE_CARRIER = (
    '"qerl.policy_adapter" and --enable-lora exclude each other: the policy adapter is part of every layer and on for '
    "every request. Use --enable-lora alone for several adapters"
)
MAX_ADAPTER_RANK = 512  # vLLM's own limit for --max-lora-rank


def _is_names(value: Any) -> bool:
    try:
        return value is None or (isinstance(value, list | tuple) and all(map(_is_name, value)))
    except re.error:
        return False


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and (not value.startswith("re:") or bool(re.compile(value[3:])))


def _is_adapter(value: Any) -> bool:
    if not isinstance(value, dict) or not {"rank"} <= set(value) <= {"rank", "path"}:
        return False
    is_rank = type(value["rank"]) is int and 0 < value["rank"] <= MAX_ADAPTER_RANK
    return is_rank and isinstance(value.get("path"), str | None)


KEYS: dict[str, tuple[Callable[[Any], bool], str]] = {  # which values a key may have, and how that is said
    "ignore": (_is_names, "a list of layer names, or of re: and a regular expression that compiles"),
    "policy_adapter": (
        _is_adapter,
        f'{{"rank": R}} with a whole number R from 1 to {MAX_ADAPTER_RANK}, and "path": FOLDER for an adapter that is '
        "there at start, or left out for a server without one",
    ),
    "kernel": (lambda value: value in KERNELS, f"one of {', '.join(KERNELS)}"),
    "policy_folders": (lambda value: isinstance(value, str | None) and value != "", "the path of a directory"),
    "weight_only": (lambda value: isinstance(value, bool), "true or false"),
    "untested_models": (lambda value: isinstance(value, bool), "true or false"),
    "policy_timeout": (
        lambda value: type(value) in (int, float) and 0 < value < float("inf"),
        "a number of seconds above 0",
    ),
}


@dataclass(frozen=True)
class Options:
    """Hold the options of ``--additional-config '{"qerl": {...}}'``.

    ``ignore``: layers of a BF16 checkpoint that stay in BF16, by name or ``re:`` pattern (compressed-tensors' syntax).
    It is None if not given.
    ``adapter_rank`` and ``adapter_path``: the rank and path of "policy_adapter". ``{"rank": R}`` keeps one adapter of
    rank up to R in the layers themselves, for all requests. With ``"path": FOLDER``, that adapter is installed at
    start.
    ``policy_folders``: the directory whose folders a running server may install by name.
    ``policy_timeout``: seconds after which a running server gives up an engine that does not answer to a change.
    ``kernel``: "auto" takes our tiled kernel on Hopper, Marlin on other GPUs, and dequantization on a CPU; or one of
    them by name. "batch_invariant" is an experiment for VLLM_BATCH_INVARIANT=1: tiled, with a fixed order of sums.
    ``weight_only``: also read checkpoints with more than packed weights (ModelOpt's NVFP4, W4A4, FP8 layers), for their
    weights alone. Activation scales are dropped, and FP8 layers are expanded to BF16.
    ``untested_models``: also serve a model family that was never compared with transformers (families.py).
    """

    ignore: tuple[str, ...] | None = None
    adapter_rank: int = 0
    kernel: str = "auto"
    adapter_path: str | None = None
    policy_folders: str | None = None
    weight_only: bool = False
    untested_models: bool = False
    policy_timeout: float = PATIENCE

    @classmethod
    def parse(cls, additional_config: Any) -> "Options":
        """Return the options in vLLM's ``additional_config``; raise ValueError for an unknown key or unusable value."""
        given = additional_config.get("qerl", {}) if isinstance(additional_config, dict) else {}
        if not isinstance(given, dict):
            raise ValueError(f'--additional-config: "qerl" must be an object, not {given!r}')
        others = additional_config if isinstance(additional_config, dict) else {}
        if beside := sorted(KEYS.keys() & others.keys()):
            raise ValueError(
                f'--additional-config: "{beside[0]}" stands beside "qerl", where nothing reads it; write '
                f'{{"qerl": {{"{beside[0]}": ...}}}}'
            )
        if alike := get_close_matches("qerl", [str(key) for key in others if key != "qerl"], n=1, cutoff=0.7):
            raise ValueError(f'--additional-config: nothing reads the key {alike[0]!r}; write "qerl"')
        for key, value in given.items():
            if key not in KEYS:
                raise ValueError(f'--additional-config: unknown key {key!r} under "qerl"; known: {sorted(KEYS)}')
            is_right, wanted = KEYS[key]
            if not is_right(value):
                raise ValueError(f'--additional-config: "qerl.{key}" must be {wanted}, not {value!r}')
        ignore, adapter = given.get("ignore"), given.get("policy_adapter", {})
        plain = given.keys() - {"ignore", "policy_adapter"}
        return cls(
            ignore=None if ignore is None else tuple(ignore),
            adapter_rank=adapter.get("rank", 0),
            adapter_path=adapter.get("path"),
            **{key: given[key] for key in plain},
        )

    def check_folders(self) -> None:
        """Raise ValueError if ``policy_folders`` is given and is no directory."""
        if self.policy_folders is not None and not Path(self.policy_folders).is_dir():
            raise ValueError(
                f'--additional-config: "qerl.policy_folders": {self.policy_folders} is no directory; make it first'
            )
