"""Compute attention over a packed row with PyTorch's own kernels, so that no sequence sees another.

It is registered with transformers under ``NAME`` beside ``sdpa``. A mask over the whole row would cost its length
squared. On a GPU one call of PyTorch's flash attention takes all sequences and each query once; the keys of a shared
prompt are copied. Elsewhere, and in fp32, each sequence has a causal attention call of its own.

Queries and keys are rotated by one kernel, if the model's attention class computes what most classes do
(``replace_attentions``). transformers rotates operation by operation. In fp32, which a single rounding requires, that
is a sixth of a block's memory traffic.
"""

import copy
import functools
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from qerl_kernels.rotate import rotate
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qerl_recipes.model.lora import together
from qerl_recipes.model.packing import Segment
from qerl_recipes.model.rounding import small

NAME = "qerl_packed_sdpa"
PROBE = f"{NAME}_probe"  # the same attention, which returns its options in place of attention weights
# without cuDNN, which makes a new plan for every new length: in a rollout all lengths are new
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# torch 2.11 accepts fewer key heads than query heads as they are; later versions need a flag
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
LARGEST_HEAD = 256  # the largest head dimension of flash attention
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")


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
    its prompt and to itself, causally, and no further back than ``sliding_window`` tokens; without any,
    ``attention_mask`` counts. Queries and keys are rounded to the dtype of the values. With ``spans`` one call of flash
    attention takes all segments, in FP16 or BF16, without dropout, with a head dimension that it has.
    """
    query, key = query.to(value.dtype), key.to(value.dtype)
    if segments is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    D = value.shape[-1]
    fits = value.dtype in (torch.bfloat16, torch.float16) and D <= LARGEST_HEAD and D % 8 == 0
    if spans is not None and fits and not options.get("dropout"):
        if not all(segment.is_first for segment in segments):  # otherwise the keys lie as in the row
            key, value = (
                torch.cat([part for parts in _parts(states, segments) for part in parts], dim=2)
                for states in (key, value)
            )
        rows = [states[0].transpose(0, 1) for states in (query, key, value)]  # (T, heads, D)
        # The kernel aligns the causal mask with the last key. That suits a later completion of a prompt, whose queries
        # belong to the last of its keys.
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        varlen: torch.Tensor = varlen_attn(*rows, *spans, scale=options.get("scaling"), window_size=window, **GROUPED)
        return varlen[None], None
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


class RotatedAttention(torch.nn.Module):
    """Override ``forward`` of a model's own attention class; the layer keeps its parts, names and other paths."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> tuple[torch.Tensor, Any]:
        """Map ``hidden_states: (B, T, H)`` to (B, T, H), with cosines and sines (B or 1, T, D) in fp32.

        With a cache, another attention or no ``position_embeddings``, the model's own ``forward`` runs.
        """
        name = self.config._attn_implementation
        if name not in (NAME, PROBE) or past_key_values is not None or position_embeddings is None:
            arguments = (hidden_states, position_embeddings, attention_mask, past_key_values)
            return super().forward(*arguments, **options)  # type: ignore[misc]
        rows, D = hidden_states.shape[:-1], self.head_dim
        parts = together(hidden_states, self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (part.view(*rows, -1, D) for part in parts)  # (B, T, heads, D)
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        angles = [angle.expand(*rows, D) for angle in position_embeddings]
        states = [part.transpose(1, 2) for part in (rotate(query, *angles), rotate(key, *angles), value)]
        window = getattr(self, "sliding_window", getattr(self.config, "sliding_window", None))
        options |= {"scaling": self.scaling, "dropout": self.attention_dropout if self.training else 0.0}
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, attention)
        out, answer = attend(self, *states, attention_mask, sliding_window=window, **options)
        return self.o_proj(out.reshape(*rows, -1)), answer


def replace_attentions(model: PreTrainedModel) -> int:
    """Make every suitable attention layer of ``model`` rotate by the kernel, and return the number of these layers.

    The rotary embedding must return fp32 (rounding.replace_rotations). Other layers stay as they are: their rotation
    is only slower.
    """
    count = 0
    for module in model.modules():
        if isinstance(module, RotatedAttention) or not all(
            isinstance(getattr(module, part, None), torch.nn.Module) for part in PARTS
        ):
            continue
        kind: type = type(module)
        if _rotates(kind, model.config, getattr(module, "layer_idx", 0)):
            module.__class__ = _rotated(kind)
            count += 1
    return count


@functools.cache
def _rotated(kind: Any) -> Any:
    return type(f"Rotated{kind.__name__}", (RotatedAttention, kind), {})


def _rotates(kind: type, config: Any, layer: int) -> bool:
    """Return True if RotatedAttention computes, and calls the attention, as a small layer of class ``kind`` does."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 3}
    sizes = {name: size for name, size in sizes.items() if getattr(config, name, None) is not None}
    generator = torch.Generator().manual_seed(0)
    theirs = small(kind, config, {**sizes, "_attn_implementation": PROBE}, generator, layer)
    if theirs is None:
        return False
    with torch.no_grad():
        ours = copy.deepcopy(theirs)
        ours.__class__ = _rotated(kind)
        x, angles = torch.randn(1, 9, 32, generator=generator), torch.randn(2, 1, 9, 8, generator=generator)
        segments = (Segment(0, 2, 2, 3), Segment(0, 2, 5, 4))
        inputs = {"position_embeddings": tuple(angles), "attention_mask": None, "segments": segments}
        try:
            (expected, expected_options), (out, options) = theirs(x, **inputs), ours(x, **inputs)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return False  # angles or norms of other shapes, or another signature
        return options == expected_options and torch.allclose(out, expected, rtol=1e-4, atol=1e-4)


def _probe(*arguments: Any, **options: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the attention's output and the options it was called with; a window of None counts as none."""
    return attention(*arguments, **options)[0], {**options, "sliding_window": options.get("sliding_window")}


for name, function in ((NAME, attention), (PROBE, _probe)):
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)
