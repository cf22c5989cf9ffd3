"""Which quantization a checkpoint declares: its ``quantization_config``, accepted or refused by name.

Accepted as it is: compressed-tensors ``nvfp4-pack-quantized``, W4A16, blocks of 16. Accepted where the weights alone
are asked for: the same with 4-bit activations, with groups of FP8 layers or with an FP8 KV cache, and ModelOpt's NVFP4
(modelopt.py). The accepted keys are those of compressed-tensors 0.17 to 0.19.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from qerl_kernels.nvfp4 import GROUP_SIZE

FORMAT, FP8_FORMAT = "nvfp4-pack-quantized", "float-quantized"
NVFP4, FP8 = "nvfp4", "fp8"  # how a linear layer is stored

ACCEPTED = f"qerl_nvfp4 reads compressed-tensors {FORMAT}, W4A16, blocks of {GROUP_SIZE}"
WAY_OUT = "start from the BF16 checkpoint and run `qerl quantize SOURCE DESTINATION`"
WEIGHTS_ALONE = (
    "write its weights alone with `qerl quantize SOURCE DESTINATION`, or serve them with "
    '--additional-config \'{"qerl": {"weight_only": true}}\''
)


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message names the thing, the limit and the way out."""


@dataclass(frozen=True)
class PackedNames:
    """What a format calls the tensors of a packed layer: codes, block scales, tensor scale, activation scale.

    ``is_divisor``: the tensor scale divides, as ``weight_global_scale`` does; ModelOpt's ``weight_scale_2`` multiplies.
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

    A pattern is a module name, or ``re:`` and a regular expression matched from the start of the name, or (targets
    only) the class name ``Linear``, which means every linear layer but the embedding and the output head.
    ``fp8``: patterns of layers stored in FP8; a name goes before ``Linear``. ``activations``: the words for quantized
    activations, "" for none. ``kv_cache``: the checkpoint holds scales of an FP8 KV cache.
    """

    ignore: tuple[str, ...] = ()
    targets: tuple[str, ...] = ("Linear",)
    fp8: tuple[str, ...] = ()
    names: PackedNames = COMPRESSED
    activations: str = ""
    kv_cache: bool = False

    def kind(self, name: str) -> str | None:
        """How the linear layer ``name`` (Hugging Face module name) is stored: ``nvfp4``, ``fp8``, None for BF16."""
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
        """Whether a pattern of ``ignore`` matches."""
        patterns = [pattern for pattern in self.ignore if pattern.startswith("re:")]
        return name in self.ignore or any(matches(pattern, name) for pattern in patterns)

    def is_quantized(self, name: str) -> bool:
        """Whether the linear layer ``name`` (Hugging Face module name) is stored packed."""
        return self.kind(name) == NVFP4

    @property
    def extras(self) -> str:
        """What a reader of plain W4A16 folders would get wrong, in words; "" for such a folder."""
        found = [self.activations, "FP8 layers" if self.fp8 else "", "an FP8 KV cache" if self.kv_cache else ""]
        if self.names == MODELOPT:
            found.append("the layout of ModelOpt")
        return ", ".join(text for text in found if text)


def check_overrides(overrides: Any) -> None:
    """Raises ValueError for --hf-overrides that say how a checkpoint is quantized."""
    parts = [overrides, overrides.get("text_config")] if isinstance(overrides, Mapping) else []
    if any(isinstance(part, Mapping) and "quantization_config" in part for part in parts):
        raise ValueError(
            "--hf-overrides: quantization_config says how the bytes of the checkpoint are to be read, and nothing else "
            "would fit them; leave it out, and put another format into NVFP4 with `qerl quantize SOURCE DESTINATION`"
        )


def read_quantization(config: Mapping[str, Any], *, weight_only: bool = False) -> Nvfp4Scheme:
    """Check the ``quantization_config`` of a config.json (or ModelOpt's hf_quant_config.json) and return its scheme.

    ``weight_only`` accepts what has more than packed weights: activation scales, FP8 layers, an FP8 KV cache.
    Raises CheckpointError naming what the checkpoint is, where it is anything but an accepted scheme.
    """
    from qerl_vllm_plugin import modelopt

    scheme = modelopt.read(config) if modelopt.is_modelopt(config) else _read_compressed(config)
    for pattern in (*scheme.targets, *scheme.fp8, *scheme.ignore):
        _check_pattern(pattern)
    check_weight_only(scheme, weight_only)
    return scheme


def check_weight_only(scheme: Nvfp4Scheme, weight_only: bool) -> None:
    """Raises CheckpointError where a scheme has more than packed weights and those alone were not asked for."""
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
    """True for an FP8 KV cache with one fixed scale for the keys of a layer and one for its values.

    Raises CheckpointError naming the key for any other.
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
        "actorder": (None, False, "static", "weight"),  # the others need a column permutation, weight_g_idx
        "scale_dtype": (None, "torch.float8_e4m3fn"),
    }
    _check_values(name, weights, wanted)
    if declared_format not in (FORMAT, "mixed-precision"):
        refuse(f"format {declared_format!r}")


def _check_fp8(name: str, weights: Mapping[str, Any], declared_format: Any) -> None:
    """FP8 beside NVFP4: one scale for a layer, or one for each row."""
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
    """Whether ``name`` is what the pattern names: itself, or after ``re:`` an expression matched from the start."""
    return re.match(pattern[3:], name) is not None if pattern.startswith("re:") else pattern == name


def refuse(what: str) -> NoReturn:
    """Raises CheckpointError: ``what`` is not supported."""
    raise CheckpointError(f"this checkpoint's quantization_config is not supported: {what}. {ACCEPTED}; {WAY_OUT}")
