"""Choose how a loaded layer's weights lie in memory and which kernel multiplies by them; there is only one copy.

``prepare(layer)`` takes a layer with ``weight_packed: (N, K/2)``, ``weight_scale: (N, K/16)`` and
``weight_global_scale: (parts,)`` (divisors). It replaces them by what ``apply`` needs. ``layer.logical_widths`` are the
rows of each part (q, k, v or gate, up).
"""

import hashlib
from itertools import accumulate
from typing import Protocol

import torch
from qerl_kernels import linear_tiles, marlin_layout, tiles
from qerl_kernels.compiler import CompileError
from qerl_kernels.linear import linear
from torch.nn import Parameter
from vllm.logger import init_logger
from vllm.platforms import current_platform

from qerl_vllm_plugin.adapter import resident

logger = init_logger("vllm.qerl")
_warned_of: list[str] = []
BATCH_INVARIANT = '"qerl.kernel": "batch_invariant"'


class Layout(Protocol):
    def prepare(self, layer: torch.nn.Module) -> "Layout":
        """Convert the layer's tensors and return the layout that it ends up in, which may be another one."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x W^T + bias, plus the product of the layer's resident adapter if it has one."""


class Canonical:
    """Multiply from the checkpoint's own layout after exact dequantization: on a CPU, and as fallback on CUDA."""

    def prepare(self, layer: torch.nn.Module) -> Layout:
        layer.register_buffer("weight_row_scale", _row_scale(layer), persistent=False)
        return self

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = linear(x, layer.weight_packed, layer.weight_scale, layer.weight_row_scale, bias)
        return resident.add(layer, x, y)


class Tiled:
    """Multiply by our own Hopper kernel, exact for every scale, from tiles in the order of the GPU's matrix unit."""

    def __init__(self, fixed_order: bool = False) -> None:
        """Take ``fixed_order``: with it sums have one order in every batch, and no other kernel takes over."""
        self.fixed_order = fixed_order

    def prepare(self, layer: torch.nn.Module) -> Layout:
        N, K, device = layer.output_size_per_partition, layer.input_size_per_partition, layer.weight_packed.device
        if N % 16 and self.fixed_order:
            raise ValueError(f"{layer.qerl_prefix} has {N} rows on this rank; {BATCH_INVARIANT} needs a multiple of 16")
        if N % 16:
            return Marlin().prepare(layer)
        layer.qerl_fixed_order = self.fixed_order
        try:
            linear_tiles.prepare(N, K, device, layer.params_dtype)
        except CompileError as error:
            if self.fixed_order:
                raise
            # as text: vLLM's warning_once compares its arguments, and two errors are never equal
            logger.warning_once("our kernel cannot be used here, Marlin runs in its place: %s", str(error))
            return Marlin().prepare(layer)
        packed = layer.weight_packed.data, layer.weight_scale.data
        weight = tiles.tile_weight(*packed, _row_scale(layer), layer.params_dtype)
        bias = getattr(layer, "bias", None)
        layer.register_buffer("bias_fp32", None if bias is None else bias.data.float(), persistent=False)
        layer.register_buffer("weight_row_scale", weight.row_scale, persistent=False)
        layer.register_buffer("weight_counters", weight.counters, persistent=False)
        layer.register_buffer("weight_scale_on_cpu", weight.scale, persistent=False)
        del layer.weight_packed, layer.weight_scale, layer.weight_global_scale
        layer.weight = Parameter(weight.tiles, requires_grad=False)  # vLLM's LoRA layers look here for the device
        return self

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        bias = None if bias is None else layer.bias_fp32
        return linear_tiles.linear(x, tiled_weight(layer), bias, resident.of(layer))


def tiled_weight(layer: torch.nn.Module) -> tiles.TiledWeight:
    """Return the weight of a layer that ``Tiled`` has prepared."""
    N, K = layer.output_size_per_partition, layer.input_size_per_partition
    tensors = layer.weight, layer.weight_row_scale, layer.weight_counters
    return tiles.TiledWeight(
        *tensors, N, K, layer.weight_scale_on_cpu, layer.params_dtype, getattr(layer, "qerl_fixed_order", False)
    )


class Marlin:
    """Multiply by vLLM's Marlin FP4 kernel, from its layout.

    Marlin cannot store block scales below 2^-6 times a power of two. A layer that would lose one keeps the canonical
    layout. Parts with different tensor scales take one Marlin call each.

    Each of ``layer.marlin_parts`` holds vLLM's tensors and what restores the checkpoint's: ``tensor_scale: ()`` fp32
    and ``scale_exponent`` (see marlin_layout.py). The exponent is None where vLLM's form of the block scales is
    unknown. ``layer.bias`` stays in the order of the rows.
    """

    def prepare(self, layer: torch.nn.Module) -> Layout:
        from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_fp4_layer_for_marlin

        divisors = layer.weight_global_scale.data.float()
        bias = getattr(layer, "bias", None)
        widths = list(layer.logical_widths)
        if bool((divisors == divisors[0]).all()):
            widths, divisors = [sum(widths)], divisors[:1]
        parts, flushed = [], 0
        for end, width, divisor in zip(accumulate(widths), widths, divisors, strict=True):
            part, rows = torch.nn.Module(), slice(end - width, end)
            part.weight = Parameter(layer.weight_packed.data[rows].contiguous(), requires_grad=False)
            scales = layer.weight_scale.data[rows].contiguous()
            part.weight_scale = Parameter(scales, requires_grad=False)
            part.register_buffer("tensor_scale", (1.0 / divisor).reshape(()), persistent=False)
            part.weight_global_scale = Parameter(part.tensor_scale, requires_grad=False)
            part.output_size_per_partition, part.input_size_per_partition = width, layer.input_size_per_partition
            part.params_dtype = layer.params_dtype
            if bias is not None:
                part.bias = Parameter(bias.data[rows], requires_grad=False)
            prepare_fp4_layer_for_marlin(part)  # repacks the weight and permutes the bias
            flushed += _flushed(scales, part.weight_scale.data)
            part.scale_exponent = _exponent(scales, part.weight_scale.data)
            parts.append(part)
        if flushed:
            _warn_of_flushed(layer.qerl_prefix, flushed)
            return Canonical().prepare(layer)
        layer.marlin_parts = torch.nn.ModuleList(parts)
        del layer.weight_packed, layer.weight_scale, layer.weight_global_scale
        layer.weight = parts[0].weight  # vLLM's LoRA layers look here for the device
        return self

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import apply_fp4_marlin_linear

        outputs = [
            apply_fp4_marlin_linear(
                input=x,
                weight=part.weight,
                weight_scale=part.weight_scale,
                weight_global_scale=part.weight_global_scale,
                workspace=getattr(part, "workspace", None),  # vLLM 0.26 keeps one per layer, 0.31 has none
                size_n=part.output_size_per_partition,
                size_k=part.input_size_per_partition,
                bias=part.bias if bias is not None else None,
            )
            for part in layer.marlin_parts
        ]
        return resident.add(layer, x, outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1))


def choose(params_dtype: torch.dtype, kernel: str = "auto") -> Layout:
    """Return the layout that ``kernel`` names, for "auto" the best here; raise ValueError if it cannot run here."""
    is_cuda = current_platform.is_cuda()
    can_tile = is_cuda and current_platform.is_device_capability(90) and params_dtype in tiles.ORDERS
    if kernel in ("tiled", "batch_invariant") and not can_tile:
        raise ValueError(
            f'"qerl.kernel": "{kernel}" needs a Hopper GPU (H100, H200) and --dtype bfloat16 or float16; use "auto"'
        )
    if kernel == "marlin" and not is_cuda:
        raise ValueError('"qerl.kernel": "marlin" needs an NVIDIA GPU; use "auto"')
    if kernel == "dequantize" or not is_cuda:
        return Canonical()
    return Tiled(fixed_order=kernel == "batch_invariant") if can_tile and kernel != "marlin" else Marlin()


def digest(model: torch.nn.Module) -> str:
    """Return a digest of the layout of each layer of a loaded model.

    A layout may follow from the weights (block scales that Marlin would flush, parts with tensor scales of their own),
    or from a compiler that is missing. Experts have one layout on a CPU. On CUDA vLLM compiles none of them: the
    operator that it calls finds them by name.
    """
    found = hashlib.sha256()
    for name, layer in model.named_modules():
        if (layout := getattr(getattr(layer, "quant_method", None), "layout", None)) is not None:
            found.update(f"{name} {type(layout).__name__} {len(getattr(layer, 'marlin_parts', ()))}\n".encode())
    return found.hexdigest()


def _warn_of_flushed(name: str, scales: int) -> None:
    """Warn of the first such layer, and log the others at debug level: a checkpoint has none or hundreds."""
    log = logger.debug if _warned_of else logger.warning
    _warned_of.append(name)
    log(
        "%s: Marlin would flush %d block scales to zero; this layer runs on dequantize + cuBLAS instead, which is "
        "exact and slower. Further such layers are named at VLLM_LOGGING_LEVEL=DEBUG",
        name,
        scales,
    )


def _row_scale(layer: torch.nn.Module) -> torch.Tensor:
    """Return the tensor scale of each row's part: (N,) fp32."""
    widths = torch.tensor(layer.logical_widths, device=layer.weight_global_scale.device)
    return torch.repeat_interleave(1.0 / layer.weight_global_scale.data.float(), widths)


def _exponent(block_scales: torch.Tensor, stored: torch.Tensor) -> int | None:
    """Return the exponent of Marlin's block scales (see marlin_layout.py), or None if their form is unknown.

    ``stored`` is vLLM's form of ``block_scales: (N, K/16)``, with its padding in N and K.
    """
    N, groups = block_scales.shape
    rows = -(-N // marlin_layout.BLOCK) * marlin_layout.BLOCK
    if stored.dim() != 2 or stored.dtype.itemsize != 1 or stored.shape[0] < groups or stored.shape[1] < rows:
        return None
    whole = torch.zeros(rows, groups, dtype=torch.uint8, device=block_scales.device)
    whole[:N] = block_scales.view(torch.uint8)
    return marlin_layout.scale_exponent(whole.view(torch.float8_e4m3fn), stored.view(torch.uint8)[:groups, :rows])


def _flushed(scales: torch.Tensor, stored: torch.Tensor) -> int:
    """Count the block scales that are zero only in Marlin's form. E4M3 has a sign bit, Marlin's bytes have none."""
    return int(((scales.view(torch.uint8) & 0x7F) != 0).sum() - (stored.view(torch.uint8) != 0).sum())
