"""A model's attention with queries and keys rotated by one kernel, where its class computes what most do.

transformers rotates in a function of each model's file, operation by operation: in fp32, which one rounding takes, that
is a sixth of the memory traffic of a block. What a layer computes is found by asking a small one of its class.
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
PROBE = f"{packed_attention.NAME}_probe"  # the same attention, which answers with its options instead of weights


class RotatedAttention(torch.nn.Module):
    """Mixed into a model's own class of attention, whose parts, names and other paths it keeps."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> tuple[torch.Tensor, Any]:
        """``hidden_states: (B, T, H)``, cosines and sines (B or 1, T, D) fp32 -> (B, T, H); with a cache the model's
        own way."""
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
    """Let every layer of attention of ``model`` that computes this rotate in one pass -> how many.

    Its rotary embedding must give fp32 (engine_rounding.replace_rotations). Others stay as they are: they compute the
    same, slower.
    """
    found = 0
    for module in model.modules():
        if isinstance(module, RotatedAttention) or not all(
            isinstance(getattr(module, part, None), torch.nn.Module) for part in PARTS
        ):
            continue
        kind: type = type(module)
        if _rotates(kind, model.config, getattr(module, "layer_idx", 0)):
            module.__class__ = _rotated(kind)
            found += 1
    return found


@functools.cache
def _rotated(kind: Any) -> Any:
    return type(f"Rotated{kind.__name__}", (RotatedAttention, kind), {})


def _rotates(kind: type, config: Any, layer: int) -> bool:
    """Whether a small layer of that class gives the same attention the same options, and computes the same with it."""
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
        return False  # made from other arguments: nothing is known about it
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        ours = copy.deepcopy(theirs)
        ours.__class__ = _rotated(kind)
        x, angles = torch.randn(1, 9, 32, generator=generator), torch.randn(2, 1, 9, 8, generator=generator)
        segments = (Segment(0, 2, 2, 3), Segment(0, 2, 5, 4))
        given = {"position_embeddings": tuple(angles), "attention_mask": None, "segments": segments}
        try:
            (expected, asked), (out, options) = theirs(x, **given), ours(x, **given)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return False  # angles of another form, norms of another width, called another way
        return options == asked and torch.allclose(out, expected, rtol=1e-4, atol=1e-4)


def _probe(*arguments: Any, **options: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    return packed_attention.attention(*arguments, **options)[0], {
        **options,
        "sliding_window": options.get("sliding_window"),
    }


AttentionInterface.register(PROBE, _probe)
AttentionMaskInterface.register(PROBE, sdpa_mask)
