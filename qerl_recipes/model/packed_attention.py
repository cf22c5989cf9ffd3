"""Attention over a packed row: PyTorch's own, by sequence, so that none sees another.

It is registered with transformers under ``NAME`` beside ``sdpa`` and is ``sdpa`` wherever no ``segments`` are given. A
mask over the whole row would cost its length squared. On a GPU one call of PyTorch's flash attention takes all
sequences, each query once, with the keys of a shared prompt copied before those of each completion; elsewhere, and in
fp32, each sequence is a causal product of its own.
"""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from qerl_recipes.model.packing import Segment

NAME = "qerl_packed_sdpa"
# not cuDNN's, which plans anew for every length that it has not seen: in a rollout all lengths are new
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# torch 2.11 takes fewer heads of keys than of queries as they are, later versions when told so
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
LARGEST_HEAD = 256  # of flash attention


class Spans(NamedTuple):
    """Where the queries, and the keys that they see, of each sequence start and the last one ends: (sequences + 1,)
    int32 each; and the longest of both. Queries lie as in the row."""

    queries: torch.Tensor
    keys: torch.Tensor
    most_queries: int
    most_keys: int

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device) -> "Spans":
        """Built on the CPU and copied without waiting for the GPU."""
        keys = torch.tensor([s.prompt + s.own for s in segments])
        queries = torch.tensor([s.prompt + s.own if s.is_first else s.own for s in segments])
        of_queries, of_keys = (
            torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int().to(device, non_blocking=True)
            for sizes in (queries, keys)
        )
        return cls(of_queries, of_keys, int(queries.max()), int(keys.max()))


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    segments: Sequence[Segment] | None = None,
    spans: Spans | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """``query: (1, heads, T, D)``, ``key`` and ``value``: (1, key heads, T, D) -> (1, T, heads, D) and no weights.

    Each of the ``segments`` attends to its prompt and to itself, causally, and no further back than
    ``sliding_window`` tokens; ``attention_mask`` counts only without segments. Queries and keys may come in fp32 and
    are rounded to the dtype of the values. With ``spans`` of the segments one call takes all, where it can.
    """
    query, key = query.to(value.dtype), key.to(value.dtype)
    if segments is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    D = value.shape[-1]
    fits = value.dtype in (torch.bfloat16, torch.float16) and D <= LARGEST_HEAD and D % 8 == 0
    if spans is not None and fits and not options.get("dropout"):
        return _all_at_once(query, key, value, segments, spans, sliding_window, options.get("scaling")), None
    parts = [
        [part[0] if len(part) == 1 else torch.cat(part, dim=2) for part in _parts(states, segments)]
        for states in (query, key, value)
    ]
    pieces = []
    with sdpa_kernel(KERNELS):
        for segment, *sequence in zip(segments, *parts, strict=True):
            mask = _window(segment.prompt + segment.own, sliding_window, query.device)
            out, _ = sdpa_attention_forward(module, *sequence, mask, **options)
            pieces.append(out if segment.is_first else out[:, segment.prompt :])
    return torch.cat(pieces, dim=1), None


def _all_at_once(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Sequence[Segment],
    spans: Spans,
    sliding_window: int | None,
    scale: float | None,
) -> torch.Tensor:
    """As ``attention``. Flash attention aligns a causal mask with the last key: the queries of a later completion are
    the last of its keys."""
    if not all(segment.is_first for segment in segments):  # else the keys lie as in the row
        key, value = (
            torch.cat([part for parts in _parts(states, segments) for part in parts], dim=2) for states in (key, value)
        )
    rows = [states[0].transpose(0, 1) for states in (query, key, value)]  # (T, heads, D)
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    sizes = (spans.queries, spans.keys, spans.most_queries, spans.most_keys)
    out: torch.Tensor = varlen_attn(*rows, *sizes, scale=scale, window_size=window, **GROUPED)
    return out[None]


def _parts(states: torch.Tensor, segments: Sequence[Segment]) -> list[list[torch.Tensor]]:
    """Prompt and own tokens of each sequence, (1, heads, T, D), in one piece or in two.

    Cut by one ``split``, whose gradient is one concatenation; slices would each have one of the whole row.
    """
    alone = [s.is_first and not (t and not t.is_first) for s, t in zip(segments, (*segments[1:], None), strict=True)]
    sizes: list[int] = []
    for segment, is_alone in zip(segments, alone, strict=True):
        whole = segment.prompt + segment.own
        sizes += [whole] if is_alone else [segment.prompt, segment.own] if segment.is_first else [segment.own]
    cut = iter(states.split(sizes, dim=2))
    parts: list[list[torch.Tensor]] = []
    prompt = states
    for segment, is_alone in zip(segments, alone, strict=True):
        if is_alone:
            parts.append([next(cut)])
            continue
        if segment.is_first:
            prompt = next(cut)
        parts.append([prompt, next(cut)])
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
