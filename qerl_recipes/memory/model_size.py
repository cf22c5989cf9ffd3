"""What a model consists of, counted on the model class itself without its weights: the basis of a memory plan."""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qerl_recipes.recipe.shapes import BY_MODEL_ID, as_config
from qerl_vllm_plugin.expected_tensors import fused_with


@dataclass(frozen=True)
class LinearSize:
    """One linear layer of a block: ``N`` rows, ``K`` columns."""

    name: str
    N: int
    K: int
    bias: bool
    quantized: bool = True  # by the NVFP4 arm


@dataclass(frozen=True)
class ExpertsSize:
    """The experts of one layer: ``count`` of them, gated, (H, ``inner``); each token goes through ``used``."""

    count: int
    hidden: int
    inner: int
    used: int
    quantized: bool = True  # by the NVFP4 arm

    @property
    def elements(self) -> int:
        """Weights of all of them."""
        return 3 * self.count * self.hidden * self.inner


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a causal language model.

    ``norms``: elements of each norm by the name of its weight. ``buffers``: bytes of the trainer's buffers.
    ``experts``: one entry for each layer that has some. ``routers``: elements of their routers.
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
        """All parameters, a tied head once."""
        linears = sum(linear.N * linear.K + linear.bias * linear.N for linear in self.linears)
        experts = sum(layer.elements for layer in self.experts) + self.routers
        return linears + experts + self.embeddings + sum(self.norms.values())

    @property
    def embeddings(self) -> int:
        """Elements of the embedding and, where it is not the same tensor, of the head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def intermediate(self) -> int:
        """The widest activation inside a block."""
        return max(max(linear.N, linear.K) for linear in self.linears)


def read_config(name: str | Path, revision: str | None = None) -> dict[str, Any]:
    """The config.json of a checkpoint folder or of a model of the hub; models that recipes/ name are known offline.

    Raises ValueError where there is none of the three.
    """
    file = Path(name).expanduser() / "config.json"
    if file.is_file():
        return json.loads(file.read_text(encoding="utf-8"))
    if str(name) in BY_MODEL_ID and revision in (None, "main"):
        return as_config(BY_MODEL_ID[str(name)])
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return json.loads(Path(hf_hub_download(str(name), "config.json", revision=revision)).read_text("utf-8"))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise ValueError(
            f"{name}: no config.json in a folder of that name or on the Hugging Face hub ({type(error).__name__}); give"
            " the folder of a checkpoint"
        ) from error


def measure(config: Mapping[str, Any]) -> ModelSize:
    """Count a model from its config.json, on the meta device; the same config is counted once.

    Raises ValueError for a model that transformers does not know, and for a quantization that is not ours.
    """
    return _measure(json.dumps(config, sort_keys=True))


@functools.lru_cache(maxsize=16)
def _measure(config: str) -> ModelSize:
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    from qerl_recipes.model.frozen_experts import dense_experts
    from qerl_vllm_plugin.checkpoint import read_quantization

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
    """The layers as vLLM has them: q, k, v and gate, up as one."""
    named = {linear.name: linear for linear in linears}
    groups = dict.fromkeys(tuple(fused_with(name, named)) for name in named)
    return tuple(tuple(named[name] for name in group) for group in groups)
