"""An adapter as callers give it: tensors in PEFT's names, trained norms, and a config."""

import json
from collections.abc import Mapping
from typing import Any

import torch

from qerl_vllm_plugin.adapter import AdapterError

Tensors = Mapping[str, torch.Tensor]


def joined(tensors: Tensors | None, norms: Tensors | None) -> dict[str, torch.Tensor]:
    """An adapter and trained norms as one. Raises AdapterError for a name that is in both."""
    if both := sorted((tensors or {}).keys() & (norms or {}).keys()):
        raise AdapterError(f"{both[0]} is a tensor of the adapter and a trained norm; name it once")
    return {**(tensors or {}), **(norms or {})}


def plain_config(given: Any) -> dict[str, Any]:
    """An adapter's config, as JSON has it, from what ``Policy.swap`` takes. Raises AdapterError for anything else."""
    if given is not None and not isinstance(given, Mapping):
        if not callable(getattr(given, "to_dict", None)):
            raise AdapterError(f"the adapter's config is {type(given).__name__}; give a dict or PEFT's LoraConfig")
        given = given.to_dict()
    return json.loads(json.dumps(dict(given or {}), default=_plain))


def _plain(value: Any) -> Any:
    """JSON for what PEFT keeps in a LoraConfig: sets and enums."""
    return sorted(value) if isinstance(value, set | frozenset) else getattr(value, "value", str(value))
