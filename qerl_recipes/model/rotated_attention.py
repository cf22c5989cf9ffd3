"""Rotate the queries and keys of a model's attention by one kernel, if its class computes what most classes do.

transformers rotates in a function of each model's file, operation by operation. In fp32, which a single rounding
requires, that is a sixth of a block's memory traffic. A small layer of the same class shows what a layer computes.
"""

import copy
import functools
from typing import Any

import torch
from qerl_kernels.rotate import rotate
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qerl_recipes.model import packed_attention
from qerl_recipes.model.fused_lora import together
from qerl_recipes.model.packing import Segment

PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")
PROBE = f"{packed_attention.NAME}_probe"  # the same attention, which returns its options in place of attention weights


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

        The second result is what the attention function returns beside its output. With a cache, another attention
        implementation or no ``position_embeddings``, the model's own ``forward`` runs.
        """
        name = self.config._attn_implementation
        if name not in (packed_attention.NAME, PROBE) or past_key_values is not None or position_embeddings is None:
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
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, packed_attention.attention)
        out, answer = attend(self, *states, attention_mask, sliding_window=window, **options)
        return self.o_proj(out.reshape(*rows, -1)), answer


def replace_attentions(model: PreTrainedModel) -> int:
    """Make every suitable attention layer of ``model`` rotate by the kernel, and return the number of these layers.

    The rotary embedding must return fp32 (engine_rounding.replace_rotations). Other layers stay as they are: their
    rotation is only slower.
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
    """Return True if RotatedAttention computes the same as a small layer of class ``kind``.

    Both must also call the attention with the same options.
    """
    small = copy.deepcopy(config)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 3}
    for name, size in sizes.items():
        if getattr(small, name, None) is not None:
            setattr(small, name, size)
    small._attn_implementation = PROBE
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.device("cpu"):
            theirs = kind(small, layer).float().eval()
    except (AttributeError, TypeError):
        return False  # built from other arguments: nothing is known about it
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
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
    return packed_attention.attention(*arguments, **options)[0], {
        **options,
        "sliding_window": options.get("sliding_window"),
    }


AttentionInterface.register(PROBE, _probe)
AttentionMaskInterface.register(PROBE, sdpa_mask)
