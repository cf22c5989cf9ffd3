"""Run a loaded vLLM model over tokens that are each the first, and only, token of a sequence.

There is no KV cache yet, and none is needed: a token that attends only to itself gets its own values back. vLLM's
attention returns nothing without a cache, so each attention layer of this model returns those values during the
forward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from qerl_vllm_plugin.compat import engine

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def forward(model: torch.nn.Module, vllm_config: "VllmConfig", tokens: torch.Tensor) -> torch.Tensor:
    """Return the last hidden state (T, H) of ``tokens: (T,)``, computed eagerly from this rank's part of the model."""
    # (3, T) for a model whose rotary positions have three parts (M-RoPE)
    first = tokens.new_zeros((3, len(tokens)) if vllm_config.model_config.uses_mrope else len(tokens))
    with _attention_to_itself(vllm_config):
        hidden: torch.Tensor = model(input_ids=tokens, positions=first)
    return hidden


@contextmanager
def _attention_to_itself(vllm_config: "VllmConfig") -> Iterator[None]:
    from vllm.forward_context import set_forward_context

    attentions: list[Any] = engine.attentions(vllm_config)
    for module in attentions:
        module.forward = partial(_own_values, module)  # some models call forward directly, past any hook
    try:
        with set_forward_context(None, vllm_config, skip_compiled=True):
            yield
    finally:
        for module in attentions:
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
