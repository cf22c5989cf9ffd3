"""Know the formats of quantized checkpoints, one class each: what declares it, its tensors, and how they are decoded.

``CompressedTensors`` is ``nvfp4-pack-quantized``, W4A16, blocks of 16; it is always accepted. With ``weight_only``, it
is accepted with 4-bit activations, groups of FP8 layers or an FP8 KV cache too, and so is ``ModelOpt``. What a format
declares is read into an ``Nvfp4Scheme``; a checkpoint in BF16 has none. Everything else is refused by name.
"""

import fnmatch
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from qerl_kernels.nvfp4 import GROUP_SIZE

from qerl_vllm_plugin.wire.safetensors_file import CheckpointError

NVFP4, FP8 = "nvfp4", "fp8"  # how a quantized linear layer can be stored
NVFP4_FORMAT, FP8_FORMAT = "nvfp4-pack-quantized", "float-quantized"  # compressed-tensors' names of the two
OWN_FILE = "hf_quant_config.json"  # beside config.json; up to modelopt 0.29 only this file declares the quantization
MIXED = "MIXED_PRECISION"  # ModelOpt's algorithm of a checkpoint whose layers differ
ALGORITHMS = {"NVFP4": NVFP4, "W4A16_NVFP4": NVFP4, "FP8": FP8}  # ModelOpt's others

ACCEPTED = f"qerl_nvfp4 reads compressed-tensors {NVFP4_FORMAT}, W4A16, blocks of {GROUP_SIZE}"
WAY_OUT = "start from the BF16 checkpoint and run `qerl quantize SOURCE DESTINATION`"
WEIGHTS_ALONE = (
    "write its weights alone with `qerl quantize SOURCE DESTINATION`, or serve them with "
    '--additional-config \'{"qerl": {"weight_only": true}}\''
)
SCALAR = ((), (1,))  # the shapes of a tensor with one value
SCALE_DTYPES = ("F32", "BF16")  # the dtypes of scales of FP8 layers and of an FP8 KV cache
CACHE_KEYS = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
NVFP4_KEYS: dict[str, tuple[Any, ...]] = {  # the default of each key stands first
    "strategy": ("tensor_group",),
    "symmetric": (True,),
    "dynamic": (False,),
    "actorder": (None, False, "static", "weight"),  # others need a column permutation, weight_g_idx
    "scale_dtype": (None, "torch.float8_e4m3fn"),
}
FP8_KEYS = {"strategy": ("tensor", "channel"), "symmetric": (True,), "dynamic": (False,)}  # a scale a layer, or a row


@dataclass(frozen=True)
class Want:
    """Describe a tensor that must be there: one of ``dtypes`` and of ``shapes``. An ``optional`` one may be missing."""

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    optional: bool = False

    def __str__(self) -> str:
        shapes = " or ".join(str(list(shape)) for shape in self.shapes)
        return f"{' or '.join(self.dtypes)} {shapes}"


@dataclass(frozen=True)
class Format(ABC):
    """Hold a format's names for the tensors of a packed layer, their shapes and their decoding.

    ``codes: (N, K/2)`` U8 hold the even column in the low nibble, ``block_scales: (N, K/16)`` are F8_E4M3.
    ``tensor_scale`` is F32 in one of ``scale_shapes``. ``input_scale`` belongs to quantized activations.
    An FP8 layer has ``weight: (N, K)`` and ``weight_scale``, for the whole layer or, with ``has_row_scales``, each row.
    """

    codes: str
    block_scales: str
    tensor_scale: str
    input_scale: str
    scale_shapes: tuple[tuple[int, ...], ...]
    has_row_scales: bool

    @property
    def packed_names(self) -> tuple[str, str, str]:
        return self.codes, self.block_scales, self.tensor_scale

    def tensors(self, module: str, N: int, K: int, kind: str, *, has_input_scales: bool) -> dict[str, Want]:
        """Return the tensors of the linear layer ``module: (N, K)``, stored as ``kind``, by name, without its bias.

        Raises CheckpointError where K of an NVFP4 layer is not a multiple of 16.
        """
        if kind == FP8:
            scale_shapes = (*SCALAR, (N, 1)) if self.has_row_scales else SCALAR
            return {
                f"{module}.weight": Want(("F8_E4M3",), ((N, K),)),
                f"{module}.weight_scale": Want(SCALE_DTYPES, scale_shapes),
                f"{module}.input_scale": Want(SCALE_DTYPES, SCALAR, optional=True),
            }
        if K % GROUP_SIZE:
            raise CheckpointError(
                f"{module}: {K} columns, not a multiple of {GROUP_SIZE}, cannot be packed; ignore this layer:"
                f" `qerl quantize SOURCE DESTINATION --ignore {module}`"
            )
        wanted = {
            f"{module}.{self.codes}": Want(("U8",), ((N, K // 2),)),
            f"{module}.{self.block_scales}": Want(("F8_E4M3",), ((N, K // GROUP_SIZE),)),
            f"{module}.{self.tensor_scale}": Want(("F32",), self.scale_shapes),
        }
        if has_input_scales:
            wanted[f"{module}.{self.input_scale}"] = Want(("F32",), SCALAR, optional=True)
        return wanted

    @abstractmethod
    def divisor(self, module: str, scale: torch.Tensor) -> torch.Tensor:
        """Return the number by which codes times block scales are divided. Raises CheckpointError for a bad scale."""

    @abstractmethod
    def read(self, config: Mapping[str, Any]) -> "Nvfp4Scheme":
        """Return the scheme that a quantization config declares. Raises CheckpointError naming what is unknown."""


class CompressedTensors(Format):
    """Read compressed-tensors, whose keys are those of 0.17 to 0.19. Its tensor scale divides."""

    def divisor(self, module: str, scale: torch.Tensor) -> torch.Tensor:
        """Return ``scale`` itself; ``check_tensors`` checks it with the other tensors of its layer."""
        return scale

    def read(self, config: Mapping[str, Any]) -> "Nvfp4Scheme":
        if (method := config.get("quant_method")) != "compressed-tensors":
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
            weights = group.get("weights") or refuse(f"config group {name} has no weights scheme")
            is_fp8 = len(groups) > 1 and (weights.get("num_bits"), weights.get("type")) == (8, "float")
            _check_group(name, weights, group.get("format") or config.get("format"), is_fp8=is_fp8)
            targets[FP8 if is_fp8 else NVFP4] += group.get("targets") or []
            if group.get("output_activations"):
                refuse(f"config group {name} also quantizes output_activations")
            if inputs := group.get("input_activations"):
                bits = inputs.get("num_bits")
                activations = activations or f"activations of {bits} bits in config group {name} (NVFP4 W4A{bits})"
        if not targets[NVFP4]:
            refuse("compressed-tensors whose config_groups name no targets" + (" in NVFP4" if targets[FP8] else ""))
        ignore, cache = tuple(config.get("ignore") or ()), config.get("kv_cache_scheme")
        has_cache = _is_fp8_cache(cache) if cache else False
        return Nvfp4Scheme(ignore, tuple(targets[NVFP4]), tuple(targets[FP8]), self, activations, has_cache)


class ModelOpt(Format):
    """Read nvidia-modelopt's exports of 0.29 to 0.47. Their tensor scale multiplies.

    The quantization stands in config.json's ``quantization_config`` or in OWN_FILE, partly under different keys:

        algorithm         ``quant_algo``; for ``MIXED_PRECISION`` that of each layer in ``quantized_layers``
        excluded modules  ``ignore`` or ``exclude_modules``, with shell wildcards
        KV cache          ``kv_cache_scheme`` or ``kv_cache_quant_algo``
    """

    def divisor(self, module: str, scale: torch.Tensor) -> torch.Tensor:
        """Return 1 / scale in float32; inverted again, weights are within two roundings, 2^-23, of ModelOpt's."""
        divisor = 1.0 / scale.float()
        if not bool((scale > 0).all() and torch.isfinite(scale).all() and torch.isfinite(divisor).all()):
            raise CheckpointError(
                f"{module}.{self.tensor_scale}: {scale.tolist()} is not a usable tensor scale: it and its reciprocal"
                f" must be positive finite float32 numbers; {WAY_OUT}"
            )
        return divisor

    def declares(self, config: Mapping[str, Any]) -> bool:
        """Return True if a quantization config is modelopt's, by its ``quant_method`` or by the form of OWN_FILE."""
        method = config.get("quant_method")
        if isinstance(method, str) and method.startswith("modelopt"):
            return True
        return method is None and isinstance(config.get("quantization"), Mapping)

    def read(self, config: Mapping[str, Any]) -> "Nvfp4Scheme":
        own = config.get("quantization")
        values: Mapping[str, Any] = own if isinstance(own, Mapping) else config
        algorithm = values.get("quant_algo")
        excluded = values.get("exclude_modules") or values.get("ignore") or ()
        ignore = tuple(_from_wildcards(name) for name in excluded)
        targets: tuple[str, ...] = ("Linear",)
        fp8: tuple[str, ...] = ()
        algorithms = {str(algorithm)}
        if algorithm == MIXED:
            targets, fp8, algorithms = _read_layers(values.get("quantized_layers"))
        elif ALGORITHMS.get(str(algorithm)) != NVFP4:
            refuse(f"modelopt's quant_algo {algorithm!r}")
        else:
            groups = (values.get("config_groups") or {}).values()
            sizes = [(group.get("weights") or {}).get("group_size") for group in groups]
            for size in sizes or [values.get("group_size", GROUP_SIZE)]:
                _check_group_size("quant_algo", size)
        is_w4a4 = "NVFP4" in algorithms and not _is_weight_only(values)
        activations = "activations of 4 bits (NVFP4 W4A4)" if is_w4a4 else ""
        cache, cache_algorithm = values.get("kv_cache_scheme"), values.get("kv_cache_quant_algo")
        if not cache and cache_algorithm and cache_algorithm != "FP8":
            refuse(f"modelopt's kv_cache_quant_algo {cache_algorithm!r}")
        has_cache = _is_fp8_cache(cache) if cache else bool(cache_algorithm)
        return Nvfp4Scheme(ignore, targets, fp8, self, activations, has_cache)


COMPRESSED = CompressedTensors(
    "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", ((1,),), has_row_scales=True
)
MODELOPT = ModelOpt("weight", "weight_scale", "weight_scale_2", "input_scale", SCALAR, has_row_scales=False)


@dataclass(frozen=True)
class Nvfp4Scheme:
    """Hold an accepted scheme: the linear layers that match ``targets`` and not ``ignore`` are packed.

    A pattern is a module name, or ``re:`` and a regular expression matched from the start of the name. A target may
    also be the class name ``Linear``, which means every linear layer but the embedding and the output head.
    ``fp8`` are the patterns of layers stored in FP8. A pattern that matches a layer's name takes precedence over
    ``Linear``. ``activations`` describes quantized activations in words, "" for none. ``kv_cache`` is true if the
    checkpoint holds scales of an FP8 KV cache.
    """

    ignore: tuple[str, ...] = ()
    targets: tuple[str, ...] = ("Linear",)
    fp8: tuple[str, ...] = ()
    format: Format = COMPRESSED
    activations: str = ""
    kv_cache: bool = False

    def kind(self, name: str) -> str | None:
        """Return ``nvfp4``, ``fp8``, or None for BF16; raise CheckpointError for a target of NVFP4 and FP8 groups."""
        if self.is_ignored(name):
            return None
        for test in (lambda pattern: matches(pattern, name), lambda pattern: pattern == "Linear"):
            kinds = [kind for kind, patterns in ((NVFP4, self.targets), (FP8, self.fp8)) if any(map(test, patterns))]
            if len(kinds) > 1:
                raise CheckpointError(
                    f"quantization_config: {name} is among the targets of an NVFP4 and of an FP8 group; {WAY_OUT}"
                )
            if kinds:
                return kinds[0]
        return None

    def is_ignored(self, name: str) -> bool:
        """Return True if a pattern of ``ignore`` matches ``name``."""
        patterns = [pattern for pattern in self.ignore if pattern.startswith("re:")]
        return name in self.ignore or any(matches(pattern, name) for pattern in patterns)

    def is_quantized(self, name: str) -> bool:
        """Return True if the linear layer ``name`` (Hugging Face module name) is stored packed, in NVFP4."""
        return self.kind(name) == NVFP4

    def tensors(self, module: str, N: int, K: int) -> dict[str, Want]:
        """Return the tensors of the quantized linear layer ``module: (N, K)``, as ``Format.tensors`` does."""
        kind = self.kind(module)
        assert kind is not None
        return self.format.tensors(module, N, K, kind, has_input_scales=bool(self.activations))

    @property
    def extras(self) -> str:
        """Describe what a checkpoint has beyond plain W4A16, which a reader of that would get wrong; "" for nothing."""
        texts = [self.activations, "FP8 layers" if self.fp8 else "", "an FP8 KV cache" if self.kv_cache else ""]
        if self.format == MODELOPT:
            texts.append("the layout of ModelOpt")
        return ", ".join(text for text in texts if text)


def read_quantization(config: Mapping[str, Any], *, weight_only: bool = False) -> Nvfp4Scheme:
    """Check the ``quantization_config`` of a config.json (or ModelOpt's hf_quant_config.json) and return its scheme.

    ``weight_only`` also accepts more than packed weights: activation scales, FP8 layers, an FP8 KV cache, ModelOpt's
    layout. Raises CheckpointError naming the scheme if it is not an accepted one.
    """
    scheme = (MODELOPT if MODELOPT.declares(config) else COMPRESSED).read(config)
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


def matches(pattern: str, name: str) -> bool:
    """Return True if ``pattern`` equals ``name``, or is ``re:`` and an expression that matches its start."""
    return re.match(pattern[3:], name) is not None if pattern.startswith("re:") else pattern == name


def refuse(what: str) -> NoReturn:
    """Raise CheckpointError, which says that ``what`` is not supported."""
    raise CheckpointError(f"this checkpoint's quantization_config is not supported: {what}. {ACCEPTED}; {WAY_OUT}")


def expand_fp8(module: str, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the BF16 weight of an FP8 layer, rounded once.

    ``weight: (N, K)`` float8_e4m3fn, ``scale: ()``, ``(1,)`` or ``(N, 1)``. Raises CheckpointError where either holds
    NaN or an infinity.
    """
    expanded = (weight.float() * scale.float()).bfloat16()
    if not bool(torch.isfinite(expanded).all()):
        raise CheckpointError(f"{module}: the FP8 weight or its weight_scale holds NaN or infinite values; {WAY_OUT}")
    return expanded


def _check_group(name: str, weights: Mapping[str, Any], declared_format: Any, *, is_fp8: bool) -> None:
    """Refuse a config group of compressed-tensors unless it is NVFP4 in blocks of 16, or FP8 as in FP8_KEYS."""
    if not is_fp8:
        bits, kind, size = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
        if (bits, kind) != (4, "float"):
            is_float8 = (bits, kind) == (8, "float")
            refuse(f"config group {name} has {bits}-bit {kind} weights" + (" (FP8)" if is_float8 else ""))
        if size != GROUP_SIZE:
            refuse(f"config group {name} has group_size {size}" + (" (MXFP4)" if size == 32 else ""))
    for key, values in (FP8_KEYS if is_fp8 else NVFP4_KEYS).items():
        if weights.get(key, values[0]) not in values:
            refuse(f"config group {name} has {key} {weights[key]!r}")
    if declared_format not in (FP8_FORMAT if is_fp8 else NVFP4_FORMAT, "mixed-precision"):
        refuse(f"format {declared_format!r}")


def _is_fp8_cache(scheme: Mapping[str, Any]) -> bool:
    """Return True for an FP8 KV cache with static scales for keys and values; raise CheckpointError for any other."""
    for key, value in CACHE_KEYS.items():
        if scheme.get(key, value if key in ("strategy", "symmetric") else None) != value:
            refuse(f"kv_cache_scheme has {key} {scheme.get(key)!r}, not {value!r}")
    return True


def _read_layers(layers: Any) -> tuple[tuple[str, ...], tuple[str, ...], set[str]]:
    """Return the layers that ModelOpt's ``quantized_layers`` names in NVFP4 and in FP8, and all their algorithms."""
    if not isinstance(layers, Mapping) or not layers:
        refuse(f"modelopt's quant_algo {MIXED} without quantized_layers")
    names: dict[str, list[str]] = {NVFP4: [], FP8: []}
    for name, layer in layers.items():
        algorithm = layer.get("quant_algo")
        if algorithm not in ALGORITHMS:
            refuse(f"modelopt's quant_algo {algorithm!r} for {name}")
        if ALGORITHMS[algorithm] == NVFP4:
            _check_group_size(name, layer.get("group_size", GROUP_SIZE))
        names[ALGORITHMS[algorithm]].append(name)
    if not names[NVFP4]:
        refuse(f"modelopt's quant_algo {MIXED} without an NVFP4 layer")
    return tuple(names[NVFP4]), tuple(names[FP8]), {layer["quant_algo"] for layer in layers.values()}


def _check_group_size(name: str, size: Any) -> None:
    if size != GROUP_SIZE:
        refuse(f"modelopt's {name} has group_size {size}")


def _is_weight_only(values: Mapping[str, Any]) -> bool:
    """Return True if config.json says that no group has quantized activations; OWN_FILE does not say so."""
    groups = values.get("config_groups") or {}
    return bool(groups) and all(not group.get("input_activations") for group in groups.values())


def _from_wildcards(name: Any) -> Any:
    """Turn modelopt's wildcards into a ``re:`` pattern. A plain name also matches everything inside that module."""
    if not isinstance(name, str):
        return name
    expression = fnmatch.translate(name) if any(c in name for c in "*?[") else rf"{re.escape(name)}(\..*)?$"
    return f"re:{expression}"


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
