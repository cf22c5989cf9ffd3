"""Which quantization a checkpoint declares: its ``quantization_config``, accepted or refused by name.

Accepted is exactly one scheme: compressed-tensors ``nvfp4-pack-quantized``, W4A16, blocks of 16. The accepted keys are
those of compressed-tensors 0.17 to 0.19.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from qerl_kernels.nvfp4 import GROUP_SIZE

FORMAT = "nvfp4-pack-quantized"

ACCEPTED = f"qerl_nvfp4 reads compressed-tensors {FORMAT}, W4A16, blocks of {GROUP_SIZE}"
WAY_OUT = "start from the BF16 checkpoint and run `qerl quantize SOURCE DESTINATION`"


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message names the thing, the limit and the way out."""


@dataclass(frozen=True)
class Nvfp4Scheme:
    """An accepted scheme: the linear layers that match ``targets`` and not ``ignore`` are packed.

    A pattern is a module name, or ``re:`` and a regular expression matched from the start of the name, or (targets
    only) the class name ``Linear``, which means every linear layer but the embedding and the output head.
    """

    ignore: tuple[str, ...] = ()
    targets: tuple[str, ...] = ("Linear",)

    def is_quantized(self, name: str) -> bool:
        """Whether the linear layer ``name`` (Hugging Face module name) is stored packed."""
        return not any(_matches(p, name) for p in self.ignore) and any(
            p == "Linear" or _matches(p, name) for p in self.targets
        )


def read_quantization(config: Mapping[str, Any]) -> Nvfp4Scheme:
    """Check the ``quantization_config`` of a config.json and return its scheme.

    Raises CheckpointError naming what the checkpoint is, where it is anything but the accepted scheme.
    """
    method = config.get("quant_method")
    if method != "compressed-tensors":
        _refuse(f"quant_method {method!r}")
    for key in ("sparsity_config", "transform_config", "kv_cache_scheme"):
        value = config.get(key)
        if value and not (key == "sparsity_config" and value.get("format") == "dense"):
            _refuse(f"compressed-tensors with {key} {value!r}")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        _refuse("compressed-tensors without config_groups")
    if config.get("quantization_status", "compressed") != "compressed":
        _refuse(f"compressed-tensors with quantization_status {config['quantization_status']!r}")
    targets: list[str] = []
    for name, group in groups.items():
        _check_group(name, group, group.get("format") or config.get("format"))
        targets += group.get("targets") or []
    if not targets:
        _refuse("compressed-tensors whose config_groups name no targets")
    patterns = tuple(config.get("ignore") or ())
    for pattern in (*targets, *patterns):
        _check_pattern(pattern)
    return Nvfp4Scheme(ignore=patterns, targets=tuple(targets))


def _check_group(name: str, group: Mapping[str, Any], declared_format: Any) -> None:
    weights = group.get("weights")
    if not weights:
        _refuse(f"config group {name} has no weights scheme")
    bits, kind, size = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
    if (bits, kind) != (4, "float"):
        _refuse(
            f"config group {name} has {bits}-bit {kind} weights" + (" (FP8)" if (bits, kind) == (8, "float") else "")
        )
    if size != GROUP_SIZE:
        _refuse(f"config group {name} has group_size {size}")
    activations = group.get("input_activations") or group.get("output_activations")
    if activations:
        _refuse(f"config group {name} also quantizes activations to {activations.get('num_bits')} bits (NVFP4 W4A4)")
    wanted: dict[str, tuple[Any, ...]] = {
        "strategy": ("tensor_group",),
        "symmetric": (True,),
        "dynamic": (False,),
        "actorder": (None, False, "static", "weight"),  # the others need a column permutation, weight_g_idx
        "scale_dtype": (None, "torch.float8_e4m3fn"),
    }
    for key, values in wanted.items():
        if weights.get(key, values[0]) not in values:
            _refuse(f"config group {name} has {key} {weights[key]!r}")
    if declared_format != FORMAT:
        _refuse(f"format {declared_format!r}")


def _check_pattern(pattern: Any) -> None:
    if not isinstance(pattern, str):
        raise CheckpointError(f"quantization_config: {pattern!r} in targets or ignore is not a string; {WAY_OUT}")
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            raise CheckpointError(
                f"quantization_config: {pattern!r} is not a regular expression ({error}); {WAY_OUT}"
            ) from error


def _matches(pattern: str, name: str) -> bool:
    return re.match(pattern[3:], name) is not None if pattern.startswith("re:") else pattern == name


def _refuse(what: str) -> NoReturn:
    raise CheckpointError(f"this checkpoint's quantization_config is not supported: {what}. {ACCEPTED}; {WAY_OUT}")
