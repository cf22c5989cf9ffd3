"""NVFP4 as nvidia-modelopt declares it: in config.json's ``quantization_config``, or in a file of its own.

The two forms hold the same under different keys (exports of modelopt 0.29 to 0.47): ``quant_algo``, the excluded
modules (``ignore`` or ``exclude_modules``, with shell wildcards), the KV cache (``kv_cache_scheme`` or
``kv_cache_quant_algo``), and for ``MIXED_PRECISION`` the algorithm of each layer (``quantized_layers``). The tensors:
``weight: (N, K/2)`` U8 with the even column in the low nibble, ``weight_scale: (N, K/16)`` F8_E4M3,
``weight_scale_2: ()`` F32, which multiplies, and ``input_scale: ()`` where activations are quantized.
"""

import fnmatch
import re
from collections.abc import Mapping
from typing import Any

from qerl_kernels.nvfp4 import GROUP_SIZE

from qerl_vllm_plugin.scheme import FP8, MODELOPT, NVFP4, Nvfp4Scheme, check_kv_cache, refuse

OWN_FILE = "hf_quant_config.json"  # beside config.json; alone in exports of modelopt 0.29 and before
ALGORITHMS = {"NVFP4": NVFP4, "W4A16_NVFP4": NVFP4, "FP8": FP8}
MIXED = "MIXED_PRECISION"


def is_modelopt(config: Mapping[str, Any]) -> bool:
    """Whether a quantization config is one of modelopt's: by its method, or by the form of its own file."""
    method = config.get("quant_method")
    if isinstance(method, str) and method.startswith("modelopt"):
        return True
    return method is None and isinstance(config.get("quantization"), Mapping)


def read(config: Mapping[str, Any]) -> Nvfp4Scheme:
    """The scheme of either form.

    Raises CheckpointError naming the key for any algorithm but NVFP4 in blocks of 16, alone or mixed with FP8 layers.
    """
    own = config.get("quantization")
    values: Mapping[str, Any] = own if isinstance(own, Mapping) else config
    algorithm = values.get("quant_algo")
    excluded = values.get("exclude_modules") or values.get("ignore") or ()
    ignore = tuple(_pattern(name) for name in excluded)
    if algorithm == MIXED:
        targets, fp8, algorithms = _mixed(values)
    elif ALGORITHMS.get(str(algorithm)) == NVFP4:
        _check_group_size("quant_algo", _group_size(values))
        targets, fp8, algorithms = ("Linear",), (), {str(algorithm)}
    else:
        refuse(f"modelopt's quant_algo {algorithm!r}")
    is_w4a4 = "NVFP4" in algorithms and not _is_weight_only(values)
    activations = "activations of 4 bits (NVFP4 W4A4)" if is_w4a4 else ""
    return Nvfp4Scheme(ignore, targets, fp8, MODELOPT, activations, _has_kv_cache(values))


def _mixed(values: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...], set[str]]:
    layers = values.get("quantized_layers")
    if not isinstance(layers, Mapping) or not layers:
        refuse(f"modelopt's quant_algo {MIXED} without quantized_layers")
    found: dict[str, list[str]] = {NVFP4: [], FP8: []}
    algorithms = set()
    for name, layer in layers.items():
        algorithm = layer.get("quant_algo")
        if algorithm not in ALGORITHMS:
            refuse(f"modelopt's quant_algo {algorithm!r} for {name}")
        if ALGORITHMS[algorithm] == NVFP4:
            _check_group_size(name, layer.get("group_size", GROUP_SIZE))
        found[ALGORITHMS[algorithm]].append(name)
        algorithms.add(algorithm)
    if not found[NVFP4]:
        refuse(f"modelopt's quant_algo {MIXED} without an NVFP4 layer")
    return tuple(found[NVFP4]), tuple(found[FP8]), algorithms


def _group_size(values: Mapping[str, Any]) -> Any:
    groups = [group.get("weights") or {} for group in (values.get("config_groups") or {}).values()]
    sizes = [weights.get("group_size") for weights in groups] or [values.get("group_size", GROUP_SIZE)]
    return next((size for size in sizes if size != GROUP_SIZE), GROUP_SIZE)


def _check_group_size(name: str, size: Any) -> None:
    if size != GROUP_SIZE:
        refuse(f"modelopt's {name} has group_size {size}")


def _is_weight_only(values: Mapping[str, Any]) -> bool:
    """config.json says for each group whether its activations are quantized; the other form has the algorithm only."""
    groups = values.get("config_groups") or {}
    return bool(groups) and all(not group.get("input_activations") for group in groups.values())


def _has_kv_cache(values: Mapping[str, Any]) -> bool:
    scheme, algorithm = values.get("kv_cache_scheme"), values.get("kv_cache_quant_algo")
    if scheme:
        return check_kv_cache(scheme)
    if algorithm and algorithm != "FP8":
        refuse(f"modelopt's kv_cache_quant_algo {algorithm!r}")
    return bool(algorithm)


def _pattern(name: Any) -> Any:
    """Modelopt's wildcards as a regular expression; a plain name also stands for all that is inside that module."""
    if not isinstance(name, str):
        return name
    expression = fnmatch.translate(name) if any(c in name for c in "*?[") else rf"{re.escape(name)}(\..*)?$"
    return f"re:{expression}"
