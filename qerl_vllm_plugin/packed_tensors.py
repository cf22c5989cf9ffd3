"""The tensors that a quantized layer must have in its checkpoint, and those that it may have: names, dtypes, shapes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from qerl_vllm_plugin.safetensors_header import DOWNLOAD_AGAIN, TensorHeader
from qerl_vllm_plugin.scheme import (
    COMPRESSED,
    FP8,
    GROUP_SIZE,
    NVFP4,
    WAY_OUT,
    WEIGHTS_ALONE,
    CheckpointError,
    Nvfp4Scheme,
)

CONFIG = "config.json"
SCALAR = ((), (1,))
KV_SCALES = ("k_scale", "v_scale")
# what tells a quantized layer; `weight` and `weight_scale` are in several formats, where the dtype decides
_SUFFIXES = {"weight_packed", "weight_scale", "weight_global_scale", "weight_scale_2", "input_scale"}
_SUFFIXES |= {"input_global_scale", "pre_quant_scale", "weight_scale_inv", "weight_zero_point", "weight_shape"}
_CACHE_SUFFIXES = {*KV_SCALES, "q_scale", "kv_scale"}


@dataclass(frozen=True)
class Want:
    """What a tensor must be: one of ``dtypes`` and one of ``shapes``."""

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    optional: bool = False

    def __str__(self) -> str:
        shapes = " or ".join(str(list(shape)) for shape in self.shapes)
        return f"{' or '.join(self.dtypes)} {shapes}"


def tensors_of_layer(module: str, N: int, K: int, scheme: Nvfp4Scheme) -> dict[str, Want]:
    """The tensors of the quantized linear layer ``module: (N, K)`` by name, but for its bias.

    Raises CheckpointError where K is not a multiple of 16.
    """
    names = scheme.names
    if scheme.kind(module) == FP8:
        scale = (*SCALAR, (N, 1)) if names == COMPRESSED else SCALAR
        return {
            f"{module}.weight": Want(("F8_E4M3",), ((N, K),)),
            f"{module}.weight_scale": Want(("F32", "BF16"), scale),
            f"{module}.input_scale": Want(("F32", "BF16"), SCALAR, optional=True),
        }
    if K % GROUP_SIZE:
        raise CheckpointError(
            f"{module}: {K} columns, not a multiple of {GROUP_SIZE}, cannot be packed; ignore this layer:"
            f" `qerl quantize SOURCE DESTINATION --ignore {module}`"
        )
    wanted = {
        f"{module}.{names.codes}": Want(("U8",), ((N, K // 2),)),
        f"{module}.{names.block_scales}": Want(("F8_E4M3",), ((N, K // GROUP_SIZE),)),
        f"{module}.{names.tensor_scale}": Want(("F32",), ((1,),) if names == COMPRESSED else SCALAR),
    }
    if scheme.activations:
        wanted[f"{module}.{names.input_scale}"] = Want(("F32",), SCALAR, optional=True)
    return wanted


def check_quantized(tensors: Mapping[str, TensorHeader], scheme: Nvfp4Scheme | None) -> None:
    """Every quantized tensor belongs to a layer that the scheme names and that has all its tensors: any architecture.

    Raises CheckpointError naming the tensor.
    """
    checked: set[str] = set()
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        is_stored_small = suffix == "weight" and tensor.dtype in ("U8", "F8_E4M3")
        if suffix in _CACHE_SUFFIXES:
            _check_cache_scale(tensors, tensor, module, suffix, scheme)
        if (suffix not in _SUFFIXES and not is_stored_small) or name in checked:
            continue
        if scheme is None:
            raise CheckpointError(
                f"{tensor.file}: {name} is quantized, but {CONFIG} has no quantization_config; {WAY_OUT}"
            )
        kind = scheme.kind(module)
        if kind is None:
            listed = "lists {} in ignore" if scheme.is_ignored(module) else "names {} in no target"
            raise CheckpointError(
                f"{tensor.file}: {name} is quantized, but {CONFIG} {listed.format(module)}; {WAY_OUT}"
            )
        if module.rpartition(".")[2] == "lm_head":
            raise CheckpointError(
                f"{tensor.file}: {name}: a quantized output head is not supported, it stays in BF16; {WAY_OUT}"
            )
        codes_name = f"{module}.{scheme.names.codes if kind == NVFP4 else 'weight'}"
        codes = tensors.get(codes_name)
        if codes is None or len(codes.shape) != 2:
            raise CheckpointError(f"{tensor.file}: {name} has no two-dimensional {codes_name}; {WAY_OUT}")
        N, columns = codes.shape
        wanted = tensors_of_layer(module, N, columns if kind == FP8 else 2 * columns, scheme)
        for partner, want in wanted.items():
            check_one(tensors.get(partner), partner, tensor.file, want)
        checked.update(wanted)  # `|=` with keys makes a new set each time: 15 s for the experts of a 30B model
        if name not in wanted:
            _refuse_extra(tensor, scheme)
    if scheme is not None and scheme.kv_cache and not any(name.endswith("k_scale") for name in tensors):
        raise CheckpointError(
            f"{CONFIG} declares an FP8 KV cache, but no tensor ends with k_scale; take kv_cache_scheme (in ModelOpt's "
            f"file kv_cache_quant_algo) out of it, or {DOWNLOAD_AGAIN}"
        )


def _refuse_extra(tensor: TensorHeader, scheme: Nvfp4Scheme) -> None:
    if tensor.name.endswith(f".{scheme.names.input_scale}"):
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} belongs to W4A4, but {CONFIG} says that activations are not quantized;"
            f" {DOWNLOAD_AGAIN}"
        )
    raise CheckpointError(
        f"{tensor.file}: {tensor.name} has no place in NVFP4 as {CONFIG} describes it; the weights would be wrong"
        f" without it: {WAY_OUT}"
    )


def _check_cache_scale(
    tensors: Mapping[str, TensorHeader], tensor: TensorHeader, module: str, suffix: str, scheme: Nvfp4Scheme | None
) -> None:
    """``self_attn.k_scale`` and ``v_scale``, or ModelOpt's ``k_proj.k_scale`` and ``v_proj.v_scale``."""
    if suffix not in KV_SCALES:
        raise CheckpointError(f"{tensor.file}: {tensor.name}: a scale of {suffix} is not supported; {WAY_OUT}")
    if scheme is None or not scheme.kv_cache:
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} belongs to an FP8 KV cache, which {CONFIG} does not declare;"
            f" {DOWNLOAD_AGAIN if scheme is None else WEIGHTS_ALONE}"
        )
    want = Want(("F32", "BF16"), SCALAR)
    other = "v" if suffix == "k_scale" else "k"
    partner = f"{module}.{other}_scale".replace(f".{suffix[0]}_proj.", f".{other}_proj.")
    for name in (tensor.name, partner):
        check_one(tensors.get(name), name, tensor.file, want)


def cache_scales(tensors: Mapping[str, TensorHeader]) -> Iterator[str]:
    """The names of the scales of an FP8 KV cache."""
    yield from (name for name in tensors if name.rpartition(".")[2] in KV_SCALES)


def check_one(tensor: TensorHeader | None, name: str, place: Path, want: Want) -> None:
    """Raises CheckpointError where a tensor is missing or not what is wanted."""
    if tensor is None:
        if want.optional:
            return
        raise CheckpointError(
            f"{place}: tensor {name} ({want}) is missing, though {CONFIG} asks for it; {DOWNLOAD_AGAIN}"
        )
    if tensor.dtype not in want.dtypes or tensor.shape not in want.shapes:
        raise CheckpointError(
            f"{tensor.file}: tensor {name} is {tensor.dtype} {list(tensor.shape)}, but {CONFIG} asks for {want};"
            f" {DOWNLOAD_AGAIN}"
        )
