"""Lend an engine's frozen weights to a trainer in the same process, as views by their checkpoint names.

A fused layer (q, k, v; gate, up) is cut into its parts by rows. No layout needs a copy for that:

    canonical  has codes, block scales and tensor scale of the checkpoint; a part may start at any row
    tiled      has tiles of 64 rows: a part must start at a multiple of 64 and end at one, or with the layer
    Marlin     has the same limits, in columns of its tensors; parts with different tensor scales are separate tensors

Norms are left out: the engine's norms hold the noise, and they are tiny.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from qerl_kernels.marlin_layout import BLOCK, MarlinWeight
from qerl_kernels.nvfp4 import GROUP_SIZE, NVFP4Weight
from qerl_kernels.tiles import COUNTERS, TILE, TiledWeight, common_scale

from qerl_vllm_plugin import NAME
from qerl_vllm_plugin.compat import engine
from qerl_vllm_plugin.compat import layers as vllm_layers
from qerl_vllm_plugin.weights import layouts
from qerl_vllm_plugin.weights.linear import QerlLinearMethod


class NotShareableError(ValueError):
    """Report that a trainer can read none of an engine's weights."""


@dataclass(frozen=True)
class FrozenWeight:
    """Hold a packed weight of the checkpoint, (N, K), and its ``bias: (N,)`` in the activations' dtype."""

    weight: NVFP4Weight | TiledWeight | MarlinWeight
    bias: torch.Tensor | None

    @property
    def device(self) -> torch.device:
        weight = self.weight
        if isinstance(weight, NVFP4Weight):
            return weight.codes.device
        return (weight.tiles if isinstance(weight, TiledWeight) else weight.words).device


@dataclass(frozen=True)
class FrozenWeights:
    """Hold the weights that an engine lends.

    ``linears`` are the quantized linears by module name. ``dense`` are the tensors of embedding, head and unquantized
    linears by parameter name. ``apart`` maps the modules that cannot be lent to the reason.
    """

    linears: dict[str, FrozenWeight] = field(default_factory=dict)
    dense: dict[str, torch.Tensor] = field(default_factory=dict)
    apart: dict[str, str] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Return the device of the quantized linears. Raises StopIteration if there are none."""
        return next(iter(self.linears.values())).device


def frozen_weights(llm: Any) -> FrozenWeights:
    """Return views of the frozen weights of ``llm``, a ``vllm.LLM``; no weight is copied, and none may be written to.

    The views are valid while the engine keeps its weights in place: ``Policy.release_kv_cache`` does, ``llm.sleep``
    does not. Raises NotShareableError for an engine in another process, on several GPUs, without quantization
    qerl_nvfp4, or with no linear that can be lent.
    """
    model = _model(llm)
    shared = FrozenWeights()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(getattr(module, "quant_method", None), QerlLinearMethod):
            _add_packed(shared, module)
        elif vllm_layers.is_vocabulary(module):
            _add_dense(shared, [name], [module.org_vocab_size], module)
        elif vllm_layers.is_linear(module):
            parts = llm.llm_engine.vllm_config.quant_config.part_names(name)
            _add_dense(shared, parts, vllm_layers.output_sizes(module, len(parts)), module)
    if not shared.linears:
        raise NotShareableError(next(iter(shared.apart.values()), "no linear of this model is quantized"))
    return shared


def _model(llm: Any) -> torch.nn.Module:
    """Return the engine's model in this process. Raises NotShareableError if it cannot be shared."""
    config = llm.llm_engine.vllm_config
    if config.parallel_config.world_size > 1:
        raise NotShareableError(
            f"the engine is cut over {config.parallel_config.world_size} GPUs, so that no one process holds all of a "
            "weight; give each engine one GPU"
        )
    if config.quant_config is None or config.quant_config.get_name() != NAME:
        raise NotShareableError("the engine has no NVFP4 linears; start it with quantization=qerl_nvfp4")
    model = engine.model_in_this_process(llm)
    if model is None:
        raise NotShareableError("the engine runs in a process of its own; set VLLM_ENABLE_V1_MULTIPROCESSING=0")
    return model


def _add_packed(shared: FrozenWeights, layer: Any) -> None:
    method, bias = layer.quant_method, getattr(layer, "bias", None)
    groups = getattr(layer, "qerl_groups", [(part,) for part in range(len(layer.logical_widths))])
    widths = [sum(layer.logical_widths[part] for part in group) for group in groups]
    for (part, *more), (name, first, rows) in zip(groups, _parts(method.parts, widths), strict=True):
        weight: NVFP4Weight | TiledWeight | MarlinWeight | str
        if isinstance(method.layout, layouts.Canonical):
            weight = canonical_part(layer, part, first, rows)
        elif isinstance(method.layout, layouts.Tiled):
            weight = tiled_part(layouts.tiled_weight(layer), first, rows)
        elif more and len(layer.marlin_parts) > 1:
            weight = "the engine keeps the parts of this linear in tensors of their own"
        else:
            weight = marlin_part(layer, part, first, rows)
        if isinstance(weight, str):
            shared.apart[name] = weight
        else:
            own_bias = None if bias is None else bias.data[first : first + rows]
            shared.linears[name] = FrozenWeight(weight, own_bias)


def canonical_part(layer: Any, part: int, first: int, rows: int) -> NVFP4Weight:
    """Return part number ``part`` of a layer in the checkpoint's layout: its rows ``first`` to ``first + rows``."""
    return NVFP4Weight(
        layer.weight_packed.data[first : first + rows],
        layer.weight_scale.data[first : first + rows],
        layer.weight_global_scale.data[part],
    )


def tiled_part(whole: TiledWeight, first: int, rows: int) -> TiledWeight | str:
    """Return rows ``first`` to ``first + rows`` of a tiled weight, or the reason why they cannot be a view.

    The rows must share one tensor scale. The part gets its own counters (4 KB, the only allocation), because ``whole``
    may be in use at the same time.
    """
    last = first + rows
    if not _falls_on(TILE, first, last, whole.N):
        return _across(TILE, first, last)
    row_scale = whole.row_scale[first:last]
    counters = torch.zeros(COUNTERS, dtype=torch.int32, device=whole.tiles.device)
    tiles = whole.tiles.detach()[first // TILE : -(-last // TILE)]
    return TiledWeight(
        tiles, row_scale, counters, rows, whole.K, common_scale(row_scale), whole.operand, whole.fixed_order
    )


def marlin_part(layer: Any, part: int, first: int, rows: int) -> MarlinWeight | str:
    """Return part number ``part`` of a layer that ``layouts.Marlin`` has prepared, or why it cannot be a view.

    The part is the layer's rows ``first`` to ``first + rows``, which are columns of Marlin's tensors. Nothing is
    allocated.
    """
    whole = layer.marlin_parts[0]
    if len(layer.marlin_parts) > 1:
        whole, first = layer.marlin_parts[part], 0
    last, N, K = first + rows, whole.output_size_per_partition, whole.input_size_per_partition
    if whole.scale_exponent is None:
        return "this vLLM stores Marlin's block scales in a form that is not known here"
    if not _falls_on(BLOCK, first, last, N):
        return _across(BLOCK, first, last)
    end, steps = -(-last // BLOCK) * BLOCK, K // GROUP_SIZE  # without vLLM's padding of K
    words = whole.weight.data[:steps, 2 * first : 2 * end]
    scales = whole.weight_scale.data.view(torch.uint8)[:steps, first:end]
    return MarlinWeight(words, scales, whole.tensor_scale, whole.scale_exponent, rows, K)


def _falls_on(tile: int, first: int, last: int, N: int) -> bool:
    return first % tile == 0 and (last % tile == 0 or last == N)


def _across(tile: int, first: int, last: int) -> str:
    return (
        f"its rows {first} to {last} of a fused layer do not fall on the tiles of {tile} rows, in which the engine "
        "keeps its weights on this GPU"
    )


def _add_dense(shared: FrozenWeights, names: list[str], widths: list[int], module: Any) -> None:
    """Add views of an unquantized weight and bias, cut into parts by rows."""
    weight, bias = module.weight.data, getattr(module, "bias", None)
    for name, first, rows in _parts(names, widths):
        if weight.dim() != 2 or len(weight) < sum(widths):
            shared.apart[name] = "the engine has repacked this unquantized layer for its processor"
            continue
        shared.dense[f"{name}.weight"] = weight[first : first + rows]
        if bias is not None:
            shared.dense[f"{name}.bias"] = bias.data[first : first + rows]


def _parts(names: list[str], widths: list[int]) -> Iterator[tuple[str, int, int]]:
    """Yield the name, the first row and the number of rows of each part of a layer."""
    first = 0
    for name, rows in zip(names, widths, strict=True):
        yield name, first, rows
        first += rows
