"""Compute log-probabilities and entropies of completions from packed rows, without storing logits.

The model returns its last hidden state. ``qerl_kernels.linear_logprob`` multiplies by the output layer only the states
that predict a completion token, and holds no more than a chunk of logits. Logits are rounded to the dtype of the
weights, as in the engine that sampled from them.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from peft import PeftModel
from qerl_kernels.linear_logprob import linear_logprob
from transformers import PreTrainedModel

from qerl_recipes.model import attention, rounding
from qerl_recipes.model.packing import PackedRow

# transformers' attentions, which keep packed sequences apart by what `_arguments` passes
FLASH, BY_POSITIONS = "flash_attention_", ("sdpa", "eager", "flex_attention")


def prepare(model: PreTrainedModel | PeftModel) -> str | None:
    """Prepare ``model`` for packed rows; return the reason if it cannot take them, else None.

    In place of transformers' attention ``sdpa`` comes that of attention.py, which keeps the sequences of a row apart.
    """
    base = _base(model)
    reason = _head_obstacle(base)
    if "linear_attention" in (getattr(base.config, "layer_types", None) or ()):
        reason = "the state of the linear attention would go on from one sequence of a row to the next"
    if reason is None and base.config._attn_implementation == "sdpa":
        base.set_attn_implementation(attention.NAME)
        rounding.replace_rotations(base)
        attention.replace_attentions(base)
    name = base.config._attn_implementation
    if reason is None and name != attention.NAME and name not in BY_POSITIONS and not name.startswith(FLASH):
        reason = f"it is not known how the attention {name} keeps packed sequences apart; use attn_implementation: sdpa"
    return reason


def shares_prompts(model: PreTrainedModel | PeftModel) -> bool:
    """Return True if several completions can share one prompt in the attention of a prepared model."""
    return _base(model).config._attn_implementation == attention.NAME


def completion_logprobs(
    model: torch.nn.Module,
    unwrapped: PreTrainedModel | PeftModel,
    rows: list[PackedRow],
    shape: tuple[int, int],
    temperature: float,
    autocast: Callable[[], AbstractContextManager[Any]],
    *,
    has_entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probability and entropy of every completion token, (B, C) fp32 each, 0 where there is no token.

    ``model`` is called once for each row, under ``autocast``; ``unwrapped`` is the same without a launcher's wrapper.
    """
    base = _base(unwrapped)
    weight = base.get_output_embeddings().weight
    logps, entropies, places = [], [], []
    for row in (row.to(weight.device) for row in rows):
        with _last_hidden(base) as hidden, autocast():
            model(**_arguments(base, row))
        states = hidden[0][0, row.sources].to(weight.dtype)  # (S, H)
        ahead = not has_entropy_gradient
        logp, _, entropy = linear_logprob(states, weight, row.targets, temperature, rounded=True, ahead=ahead)
        logps.append(logp)
        entropies.append(entropy)
        places.append(row.places)
    where = torch.cat(places)
    results = (torch.cat(values) for values in (logps, entropies))
    scattered = [values.new_zeros(shape[0] * shape[1]).scatter(0, where, values).view(shape) for values in results]
    return scattered[0], scattered[1]


def _base(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _arguments(base: PreTrainedModel, row: PackedRow) -> dict[str, Any]:
    """Return the model's arguments: no logits, no cache, and what its attention needs to keep sequences apart."""
    nothing = torch.empty(0, dtype=torch.long, device=row.tokens.device)
    arguments = {"input_ids": row.tokens, "position_ids": row.positions, "use_cache": False, "logits_to_keep": nothing}
    name = base.config._attn_implementation
    if name == attention.NAME:
        # transformers passes a mask of four dimensions on; otherwise it would build one of T x T that is not used
        whole = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=row.tokens.device)
        spans = attention.Spans.of(row.segments, row.tokens.device) if row.tokens.is_cuda else None
        arguments |= {"attention_mask": whole, "segments": row.segments, "spans": spans}
    elif name.startswith(FLASH):
        starts, longest = row.starts().to(row.tokens.device), max(s.prompt + s.own for s in row.segments)
        arguments |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
        arguments |= {"max_length_q": longest, "max_length_k": longest}
    return arguments  # any other attention builds its mask from positions that restart


@contextmanager
def _last_hidden(base: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Collect the last hidden state, (1, T, H), of every forward within the ``with`` block."""
    states: list[torch.Tensor] = []
    hook = base.base_model.register_forward_hook(lambda module, inputs, out: states.append(out.last_hidden_state))
    try:
        yield states
    finally:
        hook.remove()


@torch.no_grad()
def _head_obstacle(base: PreTrainedModel) -> str | None:
    """Say why the logits of ``base`` are not just the last hidden state times a frozen matrix; None if they are."""
    head = base.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or not head.weight.is_floating_point():
        return f"the output layer is {type(head).__name__}, not a plain linear layer"
    if head.bias is not None:
        return "the output layer has a bias"
    if head.weight.requires_grad:
        return "the output layer is trained"
    tokens = torch.arange(2, device=head.weight.device)[None]
    with _last_hidden(base) as hidden:
        logits = base(input_ids=tokens, use_cache=False).logits.float()
    product = torch.nn.functional.linear(hidden[0].to(head.weight.dtype), head.weight).float()
    if not torch.allclose(logits, product, rtol=2**-7, atol=2**-7 * float(product.abs().max())):
        return "the logits are not the product of the last hidden state and the output layer alone"
    return None
