"""Attention over a packed row: PyTorch's own, one sequence at a time, so that none sees another.

It is registered with transformers under ``NAME`` beside ``sdpa`` and is ``sdpa`` wherever no ``segments`` are given. A
mask over the whole row would cost its length squared; a causal product for each sequence costs what the sequences do,
and runs in PyTorch's flash attention on a GPU.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from qerl_recipes.packing import Segment

NAME = "qerl_packed_sdpa"


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    segments: Sequence[Segment] | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """``query: (1, heads, T, D)``, ``key`` and ``value``: (1, key heads, T, D) -> (1, T, heads, D) and no weights.

    Each of the ``segments`` attends to its prompt and to itself, causally, and no further back than
    ``sliding_window`` tokens; ``attention_mask`` counts only without segments.
    """
    if segments is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    pieces = []
    for segment in segments:
        parts = [_sequence(tensor, segment) for tensor in (query, key, value)]
        mask = _window(parts[0].shape[2], sliding_window, query.device)
        out, _ = sdpa_attention_forward(module, *parts, mask, **options)
        pieces.append(out if segment.is_first else out[:, segment.prompt :])
    return torch.cat(pieces, dim=1), None


def _sequence(states: torch.Tensor, segment: Segment) -> torch.Tensor:
    """Prompt and own tokens of one sequence: (1, heads, T, D) -> (1, heads, prompt + own, D)."""
    if segment.is_first:
        return states.narrow(2, segment.prompt_start, segment.prompt + segment.own)
    prompt = states.narrow(2, segment.prompt_start, segment.prompt)
    return torch.cat([prompt, states.narrow(2, segment.start, segment.own)], dim=2)


def _window(length: int, sliding_window: int | None, device: torch.device) -> torch.Tensor | None:
    """What is seen through a sliding window, (1, 1, length, length) bool; None where a causal mask is all there is."""
    if sliding_window is None or length <= sliding_window:
        return None
    position = torch.arange(length, device=device)
    behind = position[:, None] - position[None, :]
    return ((behind >= 0) & (behind < sliding_window))[None, None]


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
