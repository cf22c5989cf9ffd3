"""Counts the parameters of a model as the basis of a memory plan: it builds the model's class without weights."""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qerl_vllm_plugin.weights.expected import fused_with


@dataclass(frozen=True)
class LinearSize:
    """One linear layer of a block, whose weight has ``N`` rows and ``K`` columns."""

    name: str
    N: int
    K: int
    bias: bool
    quantized: bool = True  # by the NVFP4 arm


@dataclass(frozen=True)
class ExpertsSize:
    """The gated experts of one layer: ``count`` of them, of width ``inner``; each token goes through ``used``."""

    count: int
    hidden: int
    inner: int
    used: int
    quantized: bool = True  # by the NVFP4 arm

    @property
    def elements(self) -> int:
        """Return the number of weights of all experts."""
        return 3 * self.count * self.hidden * self.inner


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a causal language model.

    ``norms`` maps the name of each norm's weight to its number of elements. ``buffers`` is the bytes of the trainer's
    buffers. ``fused`` holds the linears grouped as vLLM fuses them. ``experts`` has one entry for each layer with
    experts, and ``routers`` is the number of elements of their routers.
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
    """Count a model on the meta device from its config.json; results are cached by config.

    Raises ValueError for a model that transformers cannot build, and for a quantization that QeRL does not read.
    """
    return _measure(json.dumps(config, sort_keys=True))


@functools.lru_cache(maxsize=16)
def _measure(config: str) -> ModelSize:
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    from qerl_recipes.model.frozen import dense_experts
    from qerl_vllm_plugin.weights.checkpoint import read_quantization

    values = json.loads(config)
    quantization = values.pop("quantization_config", None)
    scheme = read_quantization(quantization) if quantization is not None else None
    model_type = values.pop("model_type", None)
    try:
        built = AutoConfig.for_model(model_type, **values)
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(built)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"transformers cannot build a causal language model of type {model_type!r} ({error})"
        ) from error
    head = model.get_output_embeddings()
    linears = tuple(
        LinearSize(name, m.out_features, m.in_features, m.bias is not None, scheme is None or scheme.is_quantized(name))
        for name, m in model.named_modules()
        if isinstance(m, torch.nn.Linear) and m is not head
    )
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
        fused=_fuse(linears),
        experts=experts,
        routers=sum(layer.count * layer.hidden for layer in experts),
    )


def _fuse(linears: tuple[LinearSize, ...]) -> tuple[tuple[LinearSize, ...], ...]:
    """Group the linears as vLLM fuses them: q, k and v into one layer, gate and up into another."""
    named = {linear.name: linear for linear in linears}
    groups = dict.fromkeys(tuple(fused_with(name, named)) for name in named)
    return tuple(tuple(named[name] for name in group) for group in groups)
