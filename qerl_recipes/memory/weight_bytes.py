"""Computes the exact bytes of the frozen weights and of the adapter, in each form that engine and trainer keep.

The engine's NVFP4 layers have one of three layouts, all of which the trainer can read in place: ``tiled`` (Hopper:
tiles of 64 x 64 weights in 2304 bytes), ``marlin`` (vLLM's, on other GPUs) and ``canonical`` (the checkpoint's, on a
CPU). Experts have Marlin's layout for MoE on every GPU. The trainer cannot read it, and keeps its own copy of the same
size.
"""

from collections.abc import Iterable, Sequence

from qerl_kernels.adapter import COLUMNS
from qerl_kernels.nvfp4 import GROUP_SIZE
from qerl_kernels.tiles import COUNTERS, TILE, TILE_BYTES

from qerl_recipes.memory.model_size import ExpertsSize, LinearSize, ModelSize

LAYOUTS = ("tiled", "marlin", "canonical")
FP32 = 4
NF4_BLOCK, NF4_CODE_BOOK = 64, 16  # weights per fp32 scale in bitsandbytes; 16 fp32 values per layer
VOCABULARY_PADDING = 64  # vLLM pads the rows of embedding and head to a multiple of it


def engine_weights(size: ModelSize, arm: str, layout: str, itemsize: int = 2) -> int:
    """Return the bytes of the engine's model without an adapter.

    ``itemsize`` is the bytes of an activation and of a dense weight.
    """
    norm = FP32 if arm == "qerl_nvfp4" else itemsize
    rotary = size.positions * size.head_dim * itemsize
    return (
        sum(_engine_layer(group, arm, layout, itemsize) for group in size.fused)
        + _round_up(size.vocabulary, VOCABULARY_PADDING) * size.hidden * itemsize * (1 if size.tied else 2)
        + sum(size.norms.values()) * norm
        + rotary
        + sum(_experts(layer, arm, itemsize) for layer in size.experts)
        + size.routers * itemsize
    )


def _experts(layer: ExpertsSize, arm: str, itemsize: int) -> int:
    """Return the bytes of one layer's experts, which are the same in engine and trainer.

    They are packed with three tensor scales per expert, or dense.
    """
    if arm == "qerl_nvfp4" and layer.quantized:
        return _packed(layer.elements, 1) + 3 * layer.count * FP32
    return layer.elements * itemsize


def _engine_layer(parts: Sequence[LinearSize], arm: str, layout: str, itemsize: int) -> int:
    N, K = sum(part.N for part in parts), parts[0].K
    bias = N * itemsize if parts[0].bias else 0
    if arm == "qerl_nvfp4" and parts[0].quantized:
        if layout == "tiled" and N % GROUP_SIZE == 0:
            tiles = _round_up(N, TILE) // TILE * _round_up(K, 2 * TILE) // TILE * TILE_BYTES
            return tiles + N * FP32 + COUNTERS * FP32 + bias + (N * FP32 if parts[0].bias else 0)
        row_scale = N * FP32 if layout == "canonical" else 0
        return _packed(N, K) + len(parts) * FP32 + row_scale + bias
    return (_nf4(N, K) if arm == "nf4" else N * K * itemsize) + bias


def trainer_weights(size: ModelSize, arm: str, layout: str, *, shared: bool, itemsize: int = 2) -> int:
    """Return the bytes of the trainer's frozen model: a whole copy, or with ``shared`` what the engine cannot lend."""
    own = sum(size.norms.values()) * FP32 + size.buffers
    own += sum(_experts(layer, arm, itemsize) for layer in size.experts)
    if shared:
        return own + sum(_read_in_place(group, layout, itemsize) for group in size.fused)
    linears = sum(_trainer_layer(linear, arm, itemsize) for linear in size.linears)
    return own + linears + (size.embeddings + size.routers) * itemsize


def _read_in_place(parts: Sequence[LinearSize], layout: str, itemsize: int) -> int:
    """Return the bytes that the trainer adds for one fused layer of the engine that it reads in place.

    They are small tensors for each part. A part is copied instead if its border with another part is not a tile
    boundary. Marlin's columns are split at the same boundaries, if the parts have one tensor scale, and need no small
    tensors.
    """
    if not parts[0].quantized:
        return 0
    if layout == "canonical":
        return len(parts) * FP32  # the row scale, computed from the divisor
    own, first, N = 0, 0, sum(part.N for part in parts)
    counters = COUNTERS * FP32 if layout == "tiled" else 0
    for part in parts:
        last = first + part.N
        apart = first % TILE or (last % TILE and last != N)
        own += _trainer_layer(part, "qerl_nvfp4", itemsize) if apart else counters
        first = last
    return own


def _trainer_layer(linear: LinearSize, arm: str, itemsize: int) -> int:
    N, K = linear.N, linear.K
    bias = N * itemsize if linear.bias else 0
    if arm == "qerl_nvfp4" and linear.quantized:
        return _packed(N, K) + 2 * FP32 + bias  # the divisor and its reciprocal
    return (_nf4(N, K) if arm == "nf4" else N * K * itemsize) + bias


def resident_adapter(size: ModelSize, rank: int, itemsize: int = 2) -> int:
    """Return the bytes of the adapter's buffers in the engine's quantized layers.

    A fused layer stacks the A matrices of its parts and has their B matrices in block-diagonal form.
    """
    return sum(
        _round_up(len(parts) * rank, COLUMNS) * (sum(part.N for part in parts) + parts[0].K) * itemsize
        for parts in size.fused
        if parts[0].quantized
    )


def adapter_slots(size: ModelSize, rank: int, itemsize: int = 2) -> int:
    """Return the bytes of vLLM's LoRA slots for one adapter: A and B of every part."""
    return sum(rank * (part.N + part.K) * itemsize for parts in size.fused for part in parts)


def adapter_elements(linears: Iterable[LinearSize], rank: int) -> int:
    """Return the number of trained parameters of a LoRA adapter on ``linears``."""
    return sum(rank * (linear.N + linear.K) for linear in linears)


def _packed(N: int, K: int) -> int:
    return N * K // 2 + N * K // GROUP_SIZE


def _nf4(N: int, K: int) -> int:
    return N * K // 2 + -(-N * K // NF4_BLOCK) * FP32 + NF4_CODE_BOOK * FP32


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
