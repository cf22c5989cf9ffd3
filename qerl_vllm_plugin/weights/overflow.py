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
LARGEST_SQUARED = 1e17  # in other dtypes: a norm sums the squares of up to 1e4 inputs in fp32, which ends at 3e38
NEEDS_BFLOAT16 = "This model needs bfloat16 (vllm serve: --dtype bfloat16; qerl train: --dtype bfloat16 --fp16 false)"
TOKENS = 256  # of the vocabulary that an engine tries
SMALLER = 2.0**-10  # what an input is multiplied by to see how far beyond LARGEST an output is


class ActivationOverflow(ValueError):
    """An activation too large for the dtype that a model computes in."""


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
    dtype: torch.dtype = torch.float16,
    way_out: str = NEEDS_BFLOAT16,
) -> Iterator[Calls]:
    """Look at every output in ``dtype`` of every module of ``model``.

    Raises ActivationOverflow at the end of the block, naming ``who`` computed, the first module with an output that is
    too large, and its value where that can be told: of what ``is_linear``, by default a linear of torch, by asking it
    again with a smaller input; ``on_several_ranks`` that is asked of every one, as all ranks must. ``way_out`` ends the
    message.
    """
    calls = Calls()
    limit = _limit(dtype)
    multiplies = is_linear or _is_linear

    def look(name: str) -> Any:
        @torch.no_grad()
        def after(module: torch.nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
            tensors = outputs if isinstance(outputs, tuple | list) else (outputs,)
            found = [t for t in tensors if isinstance(t, torch.Tensor) and t.dtype == dtype and t.numel()]
            if not found:
                return
            value = real = torch.stack([t.detach().abs().amax().float() for t in found]).amax()
            is_asked = multiplies(module) and inputs and isinstance(inputs[0], torch.Tensor)
            if is_asked and (on_several_ranks or not bool(value <= limit)):
                small = type(module).forward(module, inputs[0].detach() * SMALLER)
                small = small[0] if isinstance(small, tuple) else small
                real = small.abs().amax().float() / SMALLER
            calls.append((name, value, real))

        return after

    handles = [module.register_forward_hook(look(name)) for name, module in model.named_modules()]
    try:
        yield calls
    except Exception:
        _refuse_beyond(calls, who, dtype, way_out)  # which may be what the error comes from
        raise
    finally:
        for handle in handles:
            handle.remove()
    _refuse_beyond(calls, who, dtype, way_out)


def _limit(dtype: torch.dtype) -> float:
    """Return the largest activation that a model in ``dtype`` computes with rightly."""
    return LARGEST if dtype == torch.float16 else LARGEST_SQUARED


def _refuse_beyond(calls: Calls, who: str, dtype: torch.dtype, way_out: str) -> None:
    if not calls:
        return
    ends = f"float16 ends at {LARGEST:.0f}"
    if dtype != torch.float16:
        ends = f"beyond {LARGEST_SQUARED:.0e} the next norm's sum of squares is infinite"
    found = torch.stack([value for _, value, _ in calls]).tolist()
    for (name, _, real), value in zip(calls, found, strict=True):
        if value <= _limit(dtype):
            continue
        size = "that is infinite or no number, or is given one"
        if (number := float(real)) < float("inf"):
            size = f"of {number:.0f}" if number < 1e9 else f"of {number:.1e}"
        raise ActivationOverflow(f"{name}: {who} computes an activation {size}; {ends}. {way_out}")


def _is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear)


@torch.inference_mode()
def check_engine(
    model: torch.nn.Module, vllm_config: "VllmConfig", way_out: str = NEEDS_BFLOAT16, count: int = TOKENS
) -> Calls:
    """Compute ``count`` tokens of the vocabulary, each as the first of a sequence of its own.

    All ranks must ask. Raises ActivationOverflow, which ends with ``way_out``, where the loaded vLLM model computes
    what its dtype cannot hold.
    """
    from qerl_vllm_plugin.compat import engine, first_tokens

    vocabulary, device = vllm_config.model_config.get_vocab_size(), next(model.parameters()).device
    tokens = torch.linspace(0, vocabulary - 1, min(count, vocabulary), device=device).long()
    dtype, is_linear = vllm_config.model_config.dtype, engine.is_linear
    with watched(model, "the engine", is_linear, on_several_ranks=True, dtype=dtype, way_out=way_out) as calls:
        first_tokens.forward(model, vllm_config, tokens)
    return calls
