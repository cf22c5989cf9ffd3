"""What FP16 cannot hold: where in a model an activation is beyond its largest number, found by looking at every module.

A linear sums in fp32 and rounds once; beyond 65504 (65520 and more) that gives an infinity, which the next norm makes
NaN of, and an engine samples from NaN without a word. A few models have such activations, most of them in the first
token of a sequence. So an engine with ``--dtype float16`` is looked at once before it serves: some tokens of the
vocabulary, each as the first of a sequence of its own, in which the attention gives back the values it was given. A
trainer looks at the sequences of its first micro-batch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LARGEST = torch.finfo(torch.float16).max  # 65504
TOKENS = 256  # of the vocabulary that an engine tries
SMALLER = 2.0**-10  # what an input is multiplied by to see how far beyond LARGEST an output is


class ActivationOverflow(ValueError):
    """An activation that FP16 cannot hold."""


class Calls(list[tuple[str, torch.Tensor, torch.Tensor]]):
    """One entry a call of a module, in the order of their ends, inner modules first: its name, the largest magnitude of
    its outputs, and that as it would be if numbers had no upper end, where that can be told; () fp32 each."""

    def largest(self) -> tuple[str, float]:
        """The module with the largest activation, and that; ("", 0) where nothing was called."""
        found = ((name, float(value)) for name, value, _ in self)
        return max(found, key=lambda pair: pair[1], default=("", 0.0))


@contextmanager
def watched(
    model: torch.nn.Module,
    who: str,
    is_linear: Callable[[torch.nn.Module], bool] | None = None,
    *,
    on_several_ranks: bool = False,
) -> Iterator[Calls]:
    """Look at every float16 output of every module of ``model``.

    Raises ActivationOverflow at the end of the block, naming ``who`` computed, the first module with an output that is
    not finite, and its value where that can be told: of what ``is_linear``, by default a linear of torch, by asking it
    again with a smaller input; ``on_several_ranks`` that is asked of every one, as all ranks must.
    """
    calls = Calls()
    multiplies = is_linear or _is_linear

    def look(name: str) -> Any:
        @torch.no_grad()
        def after(module: torch.nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
            tensors = outputs if isinstance(outputs, tuple | list) else (outputs,)
            halves = [t for t in tensors if isinstance(t, torch.Tensor) and t.dtype == torch.float16 and t.numel()]
            if not halves:
                return
            value = real = torch.stack([t.detach().abs().amax().float() for t in halves]).amax()
            is_asked = multiplies(module) and inputs and isinstance(inputs[0], torch.Tensor)
            if is_asked and (on_several_ranks or not bool(value <= LARGEST)):
                small = type(module).forward(module, inputs[0].detach() * SMALLER)
                small = small[0] if isinstance(small, tuple) else small
                real = small.abs().amax().float() / SMALLER
            calls.append((name, value, real))

        return after

    handles = [module.register_forward_hook(look(name)) for name, module in model.named_modules()]
    try:
        yield calls
    except Exception:
        _refuse_beyond(calls, who)  # which may be what the error comes from
        raise
    finally:
        for handle in handles:
            handle.remove()
    _refuse_beyond(calls, who)


def _refuse_beyond(calls: Calls, who: str) -> None:
    if not calls:
        return
    found = torch.stack([value for _, value, _ in calls]).tolist()
    for (name, _, real), value in zip(calls, found, strict=True):
        if value <= LARGEST:
            continue
        size = (
            f"of {float(real):.0f}" if float(real) < float("inf") else "that is infinite or no number, or is given one"
        )
        raise ActivationOverflow(
            f"{name}: {who} computes an activation {size}; float16 ends at {LARGEST:.0f}. This model needs bfloat16 "
            "(vllm serve: --dtype bfloat16; qerl train: --dtype bfloat16 --fp16 false)"
        )


def _is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear)


@torch.inference_mode()
def check_engine(model: torch.nn.Module, vllm_config: "VllmConfig") -> None:
    """Raises ActivationOverflow where a loaded vLLM model computes what float16 cannot hold; all its ranks must ask."""
    from vllm.logger import init_logger

    from qerl_vllm_plugin import compat, first_tokens

    vocabulary, device = vllm_config.model_config.get_vocab_size(), next(model.parameters()).device
    tokens = torch.linspace(0, vocabulary - 1, min(TOKENS, vocabulary), device=device).long()
    with watched(model, "the engine", compat.is_linear, on_several_ranks=True) as calls:
        first_tokens.forward(model, vllm_config, tokens)
    name, value = calls.largest()
    told = "float16: the largest activation of %d first tokens is %.0f (%s), the limit %.0f"
    init_logger("vllm.qerl").info(told, len(tokens), value, name, LARGEST)
