"""Recognize vLLM's layers, name them as a checkpoint does, and run them, as read in vLLM 0.26 to 0.32."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def is_linear(layer: torch.nn.Module) -> bool:
    """Return True if a layer is one of vLLM's linears, quantized or not."""
    from vllm.model_executor.layers.linear import LinearBase

    return isinstance(layer, LinearBase)


def is_vocabulary(layer: torch.nn.Module) -> bool:
    """Return True if a layer is an embedding or a head, whose rows vLLM pads."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return isinstance(layer, VocabParallelEmbedding)


def is_attention(layer: torch.nn.Module) -> bool:
    """Return True if a layer is vLLM's attention, which holds the scales of the KV cache."""
    from vllm.model_executor.layers.attention import Attention

    return isinstance(layer, Attention)


def is_fused_experts(layer: torch.nn.Module) -> bool:
    """Return True if a layer holds the experts of a mixture of experts."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    return isinstance(layer, RoutedExperts)


def is_of_another_stage(layer: torch.nn.Module) -> bool:
    """Return True if a layer is a placeholder for one that another pipeline rank holds."""
    from vllm.model_executor.models.utils import PPMissingLayer

    return isinstance(layer, PPMissingLayer)


def attentions(vllm_config: Any) -> list[torch.nn.Module]:
    """Return a model's attention layers from vLLM's register; before 0.30 some are not among its modules."""
    return [layer for layer in vllm_config.compilation_config.static_forward_context.values() if is_attention(layer)]


def kv_cache_method(quant_config: Any) -> Any:
    """Return vLLM's own method for the scales of an FP8 KV cache."""
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    return BaseKVCacheMethod(quant_config)


def checkpoint_names(mappers: Iterable[Any], name: str) -> list[str]:
    """Return what vLLM's module ``name`` may be called in the checkpoint.

    The first is ``name`` itself; the others are names that ``mappers`` turn into it. ``mappers``: vLLM's WeightsMapper
    of the model and of the models inside it.
    """
    found = [name]
    for mapper in mappers:
        for kind in ("prefix", "substr"):
            for theirs, ours in getattr(mapper, f"orig_to_new_{kind}").items():
                if ours is None or ours not in f"{name}.":
                    continue
                if kind == "prefix" and not f"{name}.".startswith(ours):
                    continue
                candidate = f"{name}.weight".replace(ours, theirs, 1)
                if mapper.apply_list([candidate]) == [f"{name}.weight"]:
                    found.append(candidate.removesuffix(".weight"))
    return list(dict.fromkeys(found))


def keep_names(model: torch.nn.Module, checkpoint_names: list[str]) -> None:
    """Store the checkpoint's names for ``norm_layers`` where vLLM's differ, as in a vision-language model."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is not None:
        mapped = [(mapper.apply_list([name]), name) for name in checkpoint_names]
        model.qerl_checkpoint_names = {ours[0]: theirs for ours, theirs in mapped if len(ours) == 1}


def norm_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return every RMSNorm with a weight, Gemma's 1 + w included, by its parameter's name in the checkpoint."""
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

    names = getattr(model, "qerl_checkpoint_names", {})
    return {
        names.get(f"{name}.weight", f"{name}.weight"): module
        for name, module in model.named_modules()
        if isinstance(module, RMSNorm | GemmaRMSNorm) and isinstance(module.weight, torch.nn.Parameter)
    }


def output_sizes(layer: Any, parts: int) -> list[int]:
    """Return the rows of each of the ``parts`` of a vLLM linear, over all tensor-parallel ranks."""
    if parts == 1:
        return [layer.output_size]
    if hasattr(layer, "total_num_heads"):  # q, k, v; vLLM's own output_sizes count replicated key/value heads
        value_size = getattr(layer, "v_head_size", layer.head_size)
        key_heads = layer.total_num_kv_heads
        return [layer.total_num_heads * layer.head_size, key_heads * layer.head_size, key_heads * value_size]
    return [sum(layer.output_sizes[shard] for shard in group) for group in shard_groups(layer, parts)]


def shard_groups(layer: Any, parts: int) -> list[tuple[int, ...]]:
    """Return vLLM's shards that each of a fused linear's ``parts`` fills; raise ValueError if they are not known."""
    shards = len(layer.output_sizes)
    groups = getattr(layer, "qerl_groups", [(shard,) for shard in range(shards)])
    if len(groups) != parts:
        raise ValueError(f"{parts} linears of the checkpoint are {shards} in vLLM, and it is not known which are whose")
    return groups


def shard_id(layer: Any, part: int, parts: int) -> str | int | tuple[int, ...]:
    """Return the shard id by which vLLM's weight loader knows part number ``part`` of a fused linear."""
    if hasattr(layer, "total_num_heads"):
        return "qkv"[part]
    group = shard_groups(layer, parts)[part]
    return group if len(group) > 1 else group[0]


def forward_single_tokens(model: torch.nn.Module, vllm_config: "VllmConfig", tokens: torch.Tensor) -> torch.Tensor:
    """Return the last hidden state (T, H) of ``tokens: (T,)``, each the only token of a sequence of its own.

    It is computed eagerly from this rank's part of the model, and needs no KV cache: a token that attends only to
    itself gets its own values back. vLLM's attention returns nothing without a cache, so each attention layer returns
    those values meanwhile.
    """
    # (3, T) for a model whose rotary positions have three parts (M-RoPE)
    first = tokens.new_zeros((3, len(tokens)) if vllm_config.model_config.uses_mrope else len(tokens))
    with _attention_to_itself(vllm_config):
        hidden: torch.Tensor = model(input_ids=tokens, positions=first)
    return hidden


@contextmanager
def _attention_to_itself(vllm_config: "VllmConfig") -> Iterator[None]:
    from vllm.forward_context import set_forward_context

    found: list[Any] = attentions(vllm_config)
    for module in found:
        module.forward = partial(_own_values, module)  # some models call forward directly, past any hook
    try:
        with set_forward_context(None, vllm_config, skip_compiled=True):
            yield
    finally:
        for module in found:
            del module.forward


def _own_values(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output_shape: Any = None,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    """Return what attention to itself gives: the values of each key head, once for each of its query heads."""
    heads = value.reshape(query.shape[0], module.num_kv_heads, -1)  # (tokens, heads of keys, channels)
    own = heads.repeat_interleave(module.num_heads // module.num_kv_heads, dim=1)
    return own.reshape(output_shape or (query.shape[0], -1))
