"""Bytes of the frozen weights and of the adapter in each form in which engine and trainer keep them; exact.

Layouts of the engine's NVFP4 layers: ``tiled`` (Hopper: tiles of 64 x 64 weights in 2304 bytes), ``marlin`` (vLLM's,
on other GPUs) and ``canonical`` (the checkpoint's, on a CPU). The trainer can read all of them in place. Experts are in
Marlin's layout for mixtures on every GPU, which the trainer cannot read: it has a copy of its own, of the same size.
"""

from collections.abc import Iterable, Sequence

from qerl_kernels.adapter import COLUMNS
from qerl_kernels.nvfp4 import GROUP_SIZE
from qerl_kernels.tiles import COUNTERS, TILE, TILE_BYTES

from qerl_recipes.memory.model_size import ExpertsSize, LinearSize, ModelSize

LAYOUTS = ("tiled", "marlin", "canonical")
FP32 = 4
NF4_BLOCK, NF4_CODE_BOOK = 64, 16  # weights an fp32 scale of bitsandbytes; its 16 fp32 values come with every layer
VOCABULARY_PADDING = 64  # vLLM pads the rows of embedding and head to a multiple of it


def engine_weights(size: ModelSize, arm: str, layout: str, itemsize: int = 2) -> int:
    """The engine's model without an adapter; ``itemsize``: bytes of an activation and of a dense weight."""
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
    """Those of one layer, in engine and trainer alike: packed with three tensor scales an expert, or dense."""
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
    """The trainer's frozen model: a whole copy, or with ``shared`` what cannot be read in the engine."""
    own = sum(size.norms.values()) * FP32 + size.buffers
    own += sum(_experts(layer, arm, itemsize) for layer in size.experts)
    if shared:
        return own + sum(_read_in_place(group, layout, itemsize) for group in size.fused)
    linears = sum(_trainer_layer(linear, arm, itemsize) for linear in size.linears)
    return own + linears + (size.embeddings + size.routers) * itemsize


def _read_in_place(parts: Sequence[LinearSize], layout: str, itemsize: int) -> int:
    """Small tensors of the trainer's own a linear; a part that does not fall on tiles is copied.

    Marlin's columns are cut as tiles are, where the parts have one tensor scale, and then need nothing.
    """
    if not parts[0].quantized:
        return 0
    if layout == "canonical":
        return len(parts) * FP32  # the row scale, out of the divisor
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
        return _packed(N, K) + 2 * FP32 + bias  # the divisor and one over it
    return (_nf4(N, K) if arm == "nf4" else N * K * itemsize) + bias


def resident_adapter(size: ModelSize, rank: int, itemsize: int = 2) -> int:
    """The buffers in the engine's quantized layers: A of all parts below each other, B block diagonal."""
    return sum(
        _round_up(len(parts) * rank, COLUMNS) * (sum(part.N for part in parts) + parts[0].K) * itemsize
        for parts in size.fused
        if parts[0].quantized
    )


def adapter_slots(size: ModelSize, rank: int, itemsize: int = 2) -> int:
    """vLLM's LoRA slots, one adapter: A and B of every part."""
    return sum(rank * (part.N + part.K) * itemsize for parts in size.fused for part in parts)


def adapter_elements(linears: Iterable[LinearSize], rank: int) -> int:
    """Trained numbers of a LoRA adapter on ``linears``."""
    return sum(rank * (linear.N + linear.K) for linear in linears)


def _packed(N: int, K: int) -> int:
    return N * K // 2 + N * K // GROUP_SIZE


def _nf4(N: int, K: int) -> int:
    return N * K // 2 + -(-N * K // NF4_BLOCK) * FP32 + NF4_CODE_BOOK * FP32


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
