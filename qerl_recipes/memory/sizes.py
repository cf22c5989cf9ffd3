"""Count a model's parameters before anything loads, and the bytes of its weights, its adapter and their optimizer.

The engine holds NVFP4 weights in one of three layouts: tiles on Hopper, Marlin's on other GPUs, and the checkpoint's on
a CPU. Bytes are counted in the checkpoint's; the other two differ by padding and a few kilobytes a layer.
"""

import functools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from qerl_kernels.adapter import COLUMNS
from qerl_kernels.nvfp4 import GROUP_SIZE

from qerl_recipes.files.adapter import open_adapter
from qerl_recipes.model.families import on_meta
from qerl_recipes.recipe.configs import ModelConfig, ScriptArguments
from qerl_recipes.recipe.file import ConfigError
from qerl_vllm_plugin.adapter.check import AdapterError, named_modules
from qerl_vllm_plugin.weights.expected import fused_with

FP32 = 4
NF4_BLOCK, NF4_CODE_BOOK = 64, 16  # weights per fp32 scale in bitsandbytes; 16 fp32 values per layer
VOCABULARY_PADDING = 64  # vLLM pads the rows of embedding and head to a multiple of it
# of transformers' optimizers: the numbers that they keep for each parameter (all others keep 2), and the bytes of each
MOMENTS = {"ademamix": 3, "lion": 1, "rmsprop": 1, "adagrad": 1, "schedule_free_sgd": 1, "sgd": 0}
MOMENT_BYTES = {"8bit": 1.0, "4bit": 0.5}


@dataclass(frozen=True)
class LinearSize:
    """Describe one linear layer of a block, whose weight has ``N`` rows and ``K`` columns."""

    name: str
    N: int
    K: int
    bias: bool
    quantized: bool = True  # by the NVFP4 arm


@dataclass(frozen=True)
class ExpertsSize:
    """Describe the gated experts of one layer: ``count`` of them, of width ``inner``; a token goes through ``used``."""

    count: int
    hidden: int
    inner: int
    used: int
    quantized: bool = True  # by the NVFP4 arm

    @property
    def elements(self) -> int:
        return 3 * self.count * self.hidden * self.inner


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a causal language model.

    ``norms`` maps the name of each norm's weight to its number of elements. ``buffers`` are bytes, ``fused`` the
    linears grouped as vLLM fuses them. ``experts`` has one entry for each layer with experts, ``routers`` counts all
    their routers' elements.
    """

    linears: tuple[LinearSize, ...]
    norms: Mapping[str, int]
    vocabulary: int
    hidden: int
    tied: bool
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: int
    buffers: int = 0
    fused: tuple[tuple[LinearSize, ...], ...] = field(default=())
    experts: tuple[ExpertsSize, ...] = ()
    routers: int = 0

    @property
    def parameters(self) -> int:
        """Return the number of all parameters, counting a tied head once."""
        linears = sum(linear.N * linear.K + linear.bias * linear.N for linear in self.linears)
        experts = sum(layer.elements for layer in self.experts) + self.routers
        return linears + experts + self.embeddings + sum(self.norms.values())

    @property
    def embeddings(self) -> int:
        """Return the number of elements of the embedding and, if it is another tensor, of the head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def intermediate(self) -> int:
        """Return the width of the widest activation inside a block."""
        return max(max(linear.N, linear.K) for linear in self.linears)


def measure(config: Mapping[str, Any]) -> ModelSize:
    """Count a model from its config.json; raise ValueError for a model or a quantization that cannot be read."""
    return _measure(json.dumps(config, sort_keys=True))


@functools.lru_cache(maxsize=16)
def _measure(config: str) -> ModelSize:
    import torch

    from qerl_recipes.model.frozen import dense_experts
    from qerl_vllm_plugin.weights.checkpoint import read_quantization

    values = json.loads(config)
    scheme = read_quantization(values["quantization_config"]) if values.get("quantization_config") is not None else None
    model = on_meta(values)
    built, head = model.config, model.get_output_embeddings()
    linears = tuple(
        LinearSize(name, m.out_features, m.in_features, m.bias is not None, scheme is None or scheme.is_quantized(name))
        for name, m in model.named_modules()
        if isinstance(m, torch.nn.Linear) and m is not head
    )
    named = {linear.name: linear for linear in linears}
    groups = dict.fromkeys(tuple(fused_with(name, named)) for name in named)  # q, k and v; gate and up
    tied = bool(built.tie_word_embeddings)
    experts = tuple(
        ExpertsSize(
            *(module.gate_up_proj.shape[0], module.gate_up_proj.shape[2], module.down_proj.shape[2]),
            used=built.num_experts_per_tok,
            quantized=scheme is None or scheme.is_quantized(f"{name}.0.gate_proj"),
        )
        for name, module in dense_experts(model)
    )
    return ModelSize(
        linears=linears,
        norms={name: p.numel() for name, p in model.named_parameters() if p.dim() == 1 and not name.endswith(".bias")},
        vocabulary=built.vocab_size,
        hidden=built.hidden_size,
        tied=tied,
        layers=built.num_hidden_layers,
        heads=built.num_attention_heads,
        kv_heads=built.num_key_value_heads,
        head_dim=getattr(built, "head_dim", None) or built.hidden_size // built.num_attention_heads,
        positions=built.max_position_embeddings,
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
        fused=tuple(tuple(named[name] for name in group) for group in groups),
        experts=experts,
        routers=sum(layer.count * layer.hidden for layer in experts),
    )


def engine_weights(size: ModelSize, arm: str, itemsize: int = 2) -> int:
    """Return the bytes of the engine's model without an adapter; a dense number has ``itemsize``."""
    norm = FP32 if arm == "qerl_nvfp4" else itemsize
    vocabulary = _round_up(size.vocabulary, VOCABULARY_PADDING) * size.hidden * (1 if size.tied else 2)
    rotary = size.positions * size.head_dim
    own = (vocabulary + rotary + size.routers) * itemsize + sum(size.norms.values()) * norm
    for parts in size.fused:  # a divisor for each part, and a scale for each row
        own += sum(_linear(part, arm, itemsize) for part in parts)
        if arm == "qerl_nvfp4" and parts[0].quantized:
            own += (len(parts) + sum(part.N for part in parts)) * FP32
    return own + sum(_experts(layer, arm, itemsize) for layer in size.experts)


def trainer_weights(size: ModelSize, arm: str, *, shared: bool, itemsize: int = 2) -> int:
    """Return the bytes of the trainer's frozen model: a whole copy, or with ``shared`` what the engine cannot lend.

    The trainer cannot read the engine's experts, whose layout is Marlin's for MoE, and keeps a copy of the same size.
    """
    own = sum(size.norms.values()) * FP32 + size.buffers
    own += sum(_experts(layer, arm, itemsize) for layer in size.experts)
    if shared:
        return own
    for linear in size.linears:
        own += _linear(linear, arm, itemsize)
        own += 2 * FP32 if arm == "qerl_nvfp4" and linear.quantized else 0  # the divisor and its reciprocal
    return own + (size.embeddings + size.routers) * itemsize


def _linear(linear: LinearSize, arm: str, itemsize: int) -> int:
    """Return the bytes of a linear's weight and bias, without tensor and row scales."""
    weights, bias = linear.N * linear.K, linear.N * itemsize if linear.bias else 0
    if arm == "nf4":
        return weights // 2 + (-(-weights // NF4_BLOCK) + NF4_CODE_BOOK) * FP32 + bias
    return (_packed(weights) if arm == "qerl_nvfp4" and linear.quantized else weights * itemsize) + bias


def _experts(layer: ExpertsSize, arm: str, itemsize: int) -> int:
    """Return the bytes of one layer's experts: packed with three tensor scales for each expert, or dense."""
    if arm == "qerl_nvfp4" and layer.quantized:
        return _packed(layer.elements) + 3 * layer.count * FP32
    return layer.elements * itemsize


def _packed(weights: int) -> int:
    return weights // 2 + weights // GROUP_SIZE


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def resident_adapter(size: ModelSize, rank: int, itemsize: int = 2) -> int:
    """Return the bytes of an adapter in the layers: A stacked, B block-diagonal in those that vLLM fuses."""
    return sum(
        _round_up(len(parts) * rank, COLUMNS) * (sum(part.N for part in parts) + parts[0].K) * itemsize
        for parts in size.fused
        if parts[0].quantized
    )


def adapter_slots(size: ModelSize, rank: int, itemsize: int = 2) -> int:
    """Return the bytes of vLLM's LoRA slots for one adapter: A and B of every part."""
    return adapter_elements(size.linears, rank) * itemsize


def adapter_elements(linears: Iterable[LinearSize], rank: int) -> int:
    """Return the number of trained parameters of a LoRA adapter on ``linears``."""
    return sum(rank * (linear.N + linear.K) for linear in linears)


def trained_adapter(script: ScriptArguments, model: ModelConfig, size: ModelSize) -> tuple[int, list[LinearSize]]:
    """Return rank and linears of the recipe's adapter, or of the one it starts from; raise ValueError for none."""
    if script.adapter_name_or_path is not None:
        folder = open_adapter(script.adapter_name_or_path)
        folder.check_plain()
        return folder.rank, adapted(folder.config, size, f"adapter_name_or_path {folder.path}")
    targets = model.lora_target_modules or "all-linear"
    targets = "all-linear" if targets == ["all-linear"] else targets
    return model.lora_r, adapted({"target_modules": targets}, size, "lora_target_modules")


def adapted(config: Mapping[str, Any], size: ModelSize, source: str) -> list[LinearSize]:
    """Return the linears that an adapter's ``config`` names; raise ConfigError, beginning with ``source``, for none."""
    try:
        names = named_modules(config, [linear.name for linear in size.linears])
    except AdapterError as error:
        raise ConfigError(f"{source}: {error}") from error
    return [linear for linear in size.linears if linear.name in names]


def most_in_a_block(linears: Sequence[LinearSize]) -> int:
    """Return the largest number of ``linears`` in one block; blocks may have different ones, or none."""
    return max(Counter(".".join(linear.name.split(".")[:3]) for linear in linears).values())


def optimizer_state(name: str, shapes: Sequence[tuple[int, ...]]) -> int:
    """Return the bytes of the state of transformers' optimizer ``name`` (the key ``optim``) for tensors of ``shapes``.

    Adafactor keeps a row and a column for each matrix. Nothing counts as moved to the CPU, and scales of 8-bit and
    4-bit states, up to 3 %, are left out.
    """
    if "adafactor" in name:
        return FP32 * sum(map(sum, shapes))
    moments = next((moments for kind, moments in MOMENTS.items() if kind in name), 2)
    each = next((each for kind, each in MOMENT_BYTES.items() if kind in name), FP32)
    return int(moments * each * sum(map(prod, shapes)))
