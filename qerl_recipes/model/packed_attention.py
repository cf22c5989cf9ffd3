"""Attention over a packed row: PyTorch's own, one sequence at a time, so that none sees another.

It is registered with transformers under ``NAME`` beside ``sdpa`` and is ``sdpa`` wherever no ``segments`` are given. A
mask over the whole row would cost its length squared; a causal product for each sequence costs what the sequences do,
and runs in PyTorch's flash attention on a GPU.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from qerl_recipes.model.packing import Segment

NAME = "qerl_packed_sdpa"
# not cuDNN's, which plans anew for every length that it has not seen: in a rollout all lengths are new
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


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
    ``sliding_window`` tokens; ``attention_mask`` counts only without segments. Queries and keys may come in fp32 and
    are rounded to the dtype of the values.
    """
    query, key = query.to(value.dtype), key.to(value.dtype)
    if segments is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    parts = [_parts(states, segments) for states in (query, key, value)]
    pieces = []
    with sdpa_kernel(KERNELS):
        for segment, *sequence in zip(segments, *parts, strict=True):
            mask = _window(segment.prompt + segment.own, sliding_window, query.device)
            out, _ = sdpa_attention_forward(module, *sequence, mask, **options)
            pieces.append(out if segment.is_first else out[:, segment.prompt :])
    return torch.cat(pieces, dim=1), None


def _parts(states: torch.Tensor, segments: Sequence[Segment]) -> list[torch.Tensor]:
    """Prompt and own tokens of each sequence: (1, heads, T, D) -> (1, heads, prompt + own, D) for each segment.

    Cut by one ``split``, whose gradient is one concatenation; slices would each have one of the whole row.
    """
    alone = [s.is_first and not (t and not t.is_first) for s, t in zip(segments, (*segments[1:], None), strict=True)]
    sizes: list[int] = []
    for segment, is_alone in zip(segments, alone, strict=True):
        whole = segment.prompt + segment.own
        sizes += [whole] if is_alone else [segment.prompt, segment.own] if segment.is_first else [segment.own]
    cut = iter(states.split(sizes, dim=2))
    parts, prompt = [], states
    for segment, is_alone in zip(segments, alone, strict=True):
        if is_alone:
            parts.append(next(cut))
            continue
        if segment.is_first:
            prompt = next(cut)
        parts.append(torch.cat([prompt, next(cut)], dim=2))
    return parts


def _window(length: int, sliding_window: int | None, device: torch.device) -> torch.Tensor | None:
    """What is seen through a sliding window, (1, 1, length, length) bool; None where a causal mask is all there is."""
    if sliding_window is None or length <= sliding_window:
        return None
    position = torch.arange(length, device=device)
    behind = position[:, None] - position[None, :]
    return ((behind >= 0) & (behind < sliding_window))[None, None]


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
