"""Read which quantization a checkpoint declares, and refuse by name what is not accepted.

compressed-tensors ``nvfp4-pack-quantized``, W4A16, blocks of 16, is always accepted. With ``weight_only``, the same is
accepted with 4-bit activations, groups of FP8 layers or an FP8 KV cache, and so is ModelOpt's NVFP4.
The accepted keys are those of compressed-tensors 0.17 to 0.19.

nvidia-modelopt (exports of 0.29 to 0.47) declares NVFP4 in config.json's ``quantization_config`` or in a file of its
own. Both hold the same facts, partly under different keys:

    algorithm         ``quant_algo``; for ``MIXED_PRECISION`` that of each layer in ``quantized_layers``
    excluded modules  ``ignore`` or ``exclude_modules``, with shell wildcards
    KV cache          ``kv_cache_scheme`` or ``kv_cache_quant_algo``

Its tensors are ``weight: (N, K/2)`` U8 with the even column in the low nibble, ``weight_scale: (N, K/16)`` F8_E4M3 and
``weight_scale_2: ()`` F32, which multiplies. Where activations are quantized there is also ``input_scale: ()``.
"""

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from qerl_kernels.nvfp4 import GROUP_SIZE

from qerl_vllm_plugin.wire.safetensors_file import CheckpointError

FORMAT, FP8_FORMAT = "nvfp4-pack-quantized", "float-quantized"
NVFP4, FP8 = "nvfp4", "fp8"  # the formats in which a quantized linear layer can be stored

ACCEPTED = f"qerl_nvfp4 reads compressed-tensors {FORMAT}, W4A16, blocks of {GROUP_SIZE}"
WAY_OUT = "start from the BF16 checkpoint and run `qerl quantize SOURCE DESTINATION`"
WEIGHTS_ALONE = (
    "write its weights alone with `qerl quantize SOURCE DESTINATION`, or serve them with "
    '--additional-config \'{"qerl": {"weight_only": true}}\''
)


@dataclass(frozen=True)
class PackedNames:
    """A format's names for the tensors of a packed layer: codes, block scales, tensor scale, activation scale.

    ``is_divisor`` is true where the tensor scale divides, as ``weight_global_scale`` does. ModelOpt's
    ``weight_scale_2`` multiplies.
    """

    codes: str
    block_scales: str
    tensor_scale: str
    input_scale: str
    is_divisor: bool


COMPRESSED = PackedNames("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", True)
MODELOPT = PackedNames("weight", "weight_scale", "weight_scale_2", "input_scale", False)


@dataclass(frozen=True)
class Nvfp4Scheme:
    """An accepted scheme: the linear layers that match ``targets`` and not ``ignore`` are packed.

    A pattern is a module name, or ``re:`` and a regular expression matched from the start of the name. A target may
    also be the class name ``Linear``, which means every linear layer but the embedding and the output head.
    ``fp8`` are the patterns of layers stored in FP8. A pattern that matches a layer's name takes precedence over
    ``Linear``. ``activations`` describes quantized activations in words, "" for none. ``kv_cache`` is true if the
    checkpoint holds scales of an FP8 KV cache.
    """

    ignore: tuple[str, ...] = ()
    targets: tuple[str, ...] = ("Linear",)
    fp8: tuple[str, ...] = ()
    names: PackedNames = COMPRESSED
    activations: str = ""
    kv_cache: bool = False

    def kind(self, name: str) -> str | None:
        """Return how the linear layer ``name`` (Hugging Face module name) is stored: ``nvfp4``, ``fp8``, None for BF16.

        Raises CheckpointError if it is a target of both an NVFP4 and an FP8 group.
        """
        if self.is_ignored(name):
            return None
        for test in (lambda pattern: matches(pattern, name), lambda pattern: pattern == "Linear"):
            found = [kind for kind, patterns in ((NVFP4, self.targets), (FP8, self.fp8)) if any(map(test, patterns))]
            if len(found) > 1:
                raise CheckpointError(
                    f"quantization_config: {name} is among the targets of an NVFP4 and of an FP8 group; {WAY_OUT}"
                )
            if found:
                return found[0]
        return None

    def is_ignored(self, name: str) -> bool:
        """Return True if a pattern of ``ignore`` matches ``name``."""
        patterns = [pattern for pattern in self.ignore if pattern.startswith("re:")]
        return name in self.ignore or any(matches(pattern, name) for pattern in patterns)

    def is_quantized(self, name: str) -> bool:
        """Return True if the linear layer ``name`` (Hugging Face module name) is stored packed, in NVFP4."""
        return self.kind(name) == NVFP4

    @property
    def extras(self) -> str:
        """Describe what a checkpoint has beyond plain W4A16, which a reader of that would get wrong; "" for nothing."""
        found = [self.activations, "FP8 layers" if self.fp8 else "", "an FP8 KV cache" if self.kv_cache else ""]
        if self.names == MODELOPT:
            found.append("the layout of ModelOpt")
        return ", ".join(text for text in found if text)


def check_overrides(overrides: Any) -> None:
    """Raise ValueError for --hf-overrides that say how a checkpoint is quantized."""
    parts = [overrides, overrides.get("text_config")] if isinstance(overrides, Mapping) else []
    if any(isinstance(part, Mapping) and "quantization_config" in part for part in parts):
        raise ValueError(
            "--hf-overrides: quantization_config says how the bytes of the checkpoint are to be read, and nothing else "
            "would fit them; leave it out, and put another format into NVFP4 with `qerl quantize SOURCE DESTINATION`"
        )


def read_quantization(config: Mapping[str, Any], *, weight_only: bool = False) -> Nvfp4Scheme:
    """Check the ``quantization_config`` of a config.json (or ModelOpt's hf_quant_config.json) and return its scheme.

    ``weight_only`` also accepts more than packed weights: activation scales, FP8 layers, an FP8 KV cache, ModelOpt's
    layout. Raises CheckpointError naming the scheme if it is not an accepted one.
    """
    scheme = _read_modelopt(config) if is_modelopt(config) else _read_compressed(config)
    for pattern in (*scheme.targets, *scheme.fp8, *scheme.ignore):
        _check_pattern(pattern)
    check_weight_only(scheme, weight_only)
    return scheme


def check_weight_only(scheme: Nvfp4Scheme, weight_only: bool) -> None:
    """Raise CheckpointError if a scheme has more than plain W4A16 weights and ``weight_only`` is false."""
    if scheme.extras and not weight_only:
        raise CheckpointError(
            f"this checkpoint's quantization_config is not supported as it is: it has {scheme.extras}. {ACCEPTED};"
            f" {WEIGHTS_ALONE}"
        )


def _read_compressed(config: Mapping[str, Any]) -> Nvfp4Scheme:
    method = config.get("quant_method")
    if method != "compressed-tensors":
        refuse(f"quant_method {method!r}")
    for key in ("sparsity_config", "transform_config"):
        value = config.get(key)
        if value and not (key == "sparsity_config" and value.get("format") == "dense"):
            refuse(f"compressed-tensors with {key} {value!r}")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        refuse("compressed-tensors without config_groups")
    if config.get("quantization_status", "compressed") != "compressed":
        refuse(f"compressed-tensors with quantization_status {config['quantization_status']!r}")
    targets: dict[str, list[str]] = {NVFP4: [], FP8: []}
    activations = ""
    for name, group in groups.items():
        declared = group.get("format") or config.get("format")
        weights = group.get("weights") or refuse(f"config group {name} has no weights scheme")
        kind = FP8 if len(groups) > 1 and (weights.get("num_bits"), weights.get("type")) == (8, "float") else NVFP4
        (_check_fp8 if kind == FP8 else _check_nvfp4)(name, weights, declared)
        targets[kind] += group.get("targets") or []
        if group.get("output_activations"):
            refuse(f"config group {name} also quantizes output_activations")
        if inputs := group.get("input_activations"):
            bits = inputs.get("num_bits")
            activations = activations or f"activations of {bits} bits in config group {name} (NVFP4 W4A{bits})"
    if not targets[NVFP4]:
        refuse("compressed-tensors whose config_groups name no targets" + (" in NVFP4" if targets[FP8] else ""))
    scheme = Nvfp4Scheme(tuple(config.get("ignore") or ()), tuple(targets[NVFP4]), tuple(targets[FP8]))
    kv_cache = config.get("kv_cache_scheme")
    return replace(scheme, activations=activations, kv_cache=bool(kv_cache and check_kv_cache(kv_cache)))


def check_kv_cache(scheme: Mapping[str, Any]) -> bool:
    """Return True for an FP8 KV cache with one static scale for a layer's keys and one for its values.

    Raises CheckpointError naming the key for any other cache.
    """
    wanted = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    for key, value in wanted.items():
        if scheme.get(key, value if key in ("strategy", "symmetric") else None) != value:
            refuse(f"kv_cache_scheme has {key} {scheme.get(key)!r}, not {value!r}")
    return True


def _check_nvfp4(name: str, weights: Mapping[str, Any], declared_format: Any) -> None:
    bits, kind, size = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
    if (bits, kind) != (4, "float"):
        refuse(
            f"config group {name} has {bits}-bit {kind} weights" + (" (FP8)" if (bits, kind) == (8, "float") else "")
        )
    if size != GROUP_SIZE:
        refuse(f"config group {name} has group_size {size}" + (" (MXFP4)" if size == 32 else ""))
    wanted: dict[str, tuple[Any, ...]] = {
        "strategy": ("tensor_group",),
        "symmetric": (True,),
        "dynamic": (False,),
        "actorder": (None, False, "static", "weight"),  # others need a column permutation, weight_g_idx
        "scale_dtype": (None, "torch.float8_e4m3fn"),
    }
    _check_values(name, weights, wanted)
    if declared_format not in (FORMAT, "mixed-precision"):
        refuse(f"format {declared_format!r}")


def _check_fp8(name: str, weights: Mapping[str, Any], declared_format: Any) -> None:
    """Refuse an FP8 group beside NVFP4 unless it has one static scale for each layer or for each row."""
    _check_values(name, weights, {"strategy": ("tensor", "channel"), "symmetric": (True,), "dynamic": (False,)})
    if declared_format not in (FP8_FORMAT, "mixed-precision"):
        refuse(f"format {declared_format!r}")


def _check_values(name: str, weights: Mapping[str, Any], wanted: Mapping[str, tuple[Any, ...]]) -> None:
    for key, values in wanted.items():
        if weights.get(key, values[0]) not in values:
            refuse(f"config group {name} has {key} {weights[key]!r}")


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


def matches(pattern: str, name: str) -> bool:
    """Return True if ``pattern`` equals ``name``, or is ``re:`` and an expression that matches its start."""
    return re.match(pattern[3:], name) is not None if pattern.startswith("re:") else pattern == name


def refuse(what: str) -> NoReturn:
    """Raise CheckpointError, which says that ``what`` is not supported."""
    raise CheckpointError(f"this checkpoint's quantization_config is not supported: {what}. {ACCEPTED}; {WAY_OUT}")


OWN_FILE = "hf_quant_config.json"  # beside config.json; up to modelopt 0.29 only this file declares the quantization
ALGORITHMS = {"NVFP4": NVFP4, "W4A16_NVFP4": NVFP4, "FP8": FP8}
MIXED = "MIXED_PRECISION"


def is_modelopt(config: Mapping[str, Any]) -> bool:
    """Return True if a quantization config is modelopt's, by its ``quant_method`` or by the form of its own file."""
    method = config.get("quant_method")
    if isinstance(method, str) and method.startswith("modelopt"):
        return True
    return method is None and isinstance(config.get("quantization"), Mapping)


def _read_modelopt(config: Mapping[str, Any]) -> Nvfp4Scheme:
    """Return the scheme of modelopt's config in either form.

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
    """Return True if the config says of every group that its activations are not quantized.

    Only config.json says so. modelopt's own file gives the algorithm alone, so this returns False for it.
    """
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
    """Turn modelopt's wildcards into a ``re:`` pattern. A plain name also matches everything inside that module."""
    if not isinstance(name, str):
        return name
    expression = fnmatch.translate(name) if any(c in name for c in "*?[") else rf"{re.escape(name)}(\..*)?$"
    return f"re:{expression}"
