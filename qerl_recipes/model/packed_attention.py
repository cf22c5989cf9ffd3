"""Compute attention over a packed row with PyTorch's own kernels, so that no sequence sees another.

It is registered with transformers under ``NAME`` beside ``sdpa``, and equals ``sdpa`` if no ``segments`` are given. A
mask over the whole row would cost its length squared. On a GPU one call of PyTorch's flash attention takes all
sequences and each query once; the keys of a shared prompt are copied before those of each completion. Elsewhere, and
in fp32, each sequence has a causal attention call of its own.
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
# without cuDNN, which makes a new plan for every new length: in a rollout all lengths are new
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# torch 2.11 accepts fewer key heads than query heads as they are; later versions need a flag
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
LARGEST_HEAD = 256  # the largest head dimension of flash attention


class Spans(NamedTuple):
    """Hold where the queries and the keys of each sequence start and the last ends, (sequences + 1,) int32 each.

    ``most_queries`` and ``most_keys`` are the longest of both. Queries lie as in the row; keys include the prompt.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    most_queries: int
    most_keys: int

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device) -> "Spans":
        """Compute the spans of ``segments`` on the CPU, and copy them without waiting for the GPU."""
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
    """Return the attention's output, (1, T, heads, D), and None in place of weights.

    ``query`` is (1, heads, T, D), ``key`` and ``value`` are (1, key heads, T, D). Each of the ``segments`` attends to
    its prompt and to itself, causally, and no further back than ``sliding_window`` tokens. ``attention_mask`` counts
    only without segments. Queries and keys may be fp32; they are rounded to the dtype of the values.

    With ``spans`` of the segments one call of flash attention takes all of them. That needs FP16 or BF16, no dropout,
    and a head dimension that is a multiple of 8 and at most LARGEST_HEAD.
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
    """Compute ``attention`` of all ``segments`` in one call of flash attention.

    It aligns the causal mask with the last key. That suits a later completion of a prompt, whose queries belong to the
    last of its keys.
    """
    if not all(segment.is_first for segment in segments):  # otherwise the keys lie as in the row
        key, value = (
            torch.cat([part for parts in _parts(states, segments) for part in parts], dim=2) for states in (key, value)
        )
    rows = [states[0].transpose(0, 1) for states in (query, key, value)]  # (T, heads, D)
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    sizes = (spans.queries, spans.keys, spans.most_queries, spans.most_keys)
    out: torch.Tensor = varlen_attn(*rows, *sizes, scale=scale, window_size=window, **GROUPED)
    return out[None]


def _parts(states: torch.Tensor, segments: Sequence[Segment]) -> list[list[torch.Tensor]]:
    """Cut ``states``, (1, heads, T, D), into the prompt and own tokens of each sequence, in one piece or two.

    One ``split`` cuts all of them, and its gradient is one concatenation. Each slice would have a gradient of the
    whole row.
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
    """Return the sliding window's mask, (1, 1, length, length) bool, or None if a causal mask is enough."""
    if sliding_window is None or length <= sliding_window:
        return None
    position = torch.arange(length, device=device)
    behind = position[:, None] - position[None, :]
    return ((behind >= 0) & (behind < sliding_window))[None, None]


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
