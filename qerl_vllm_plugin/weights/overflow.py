"""Find activations that are too large for a model's dtype, by looking at the outputs of every module.

A linear sums in fp32 and rounds to the dtype once. In FP16, values of 65520 and more become infinite there. The next
norm turns an infinity into NaN, and an engine samples from NaN without an error. A few models have such activations,
most of them at the first token of a sequence.

So an engine is checked before it serves if it has ``--dtype float16`` or loads an adapter at startup. It computes some
tokens of the vocabulary, each as the first of a sequence of its own, where attention returns the token's own values.
A worker makes the same check before a policy change that may overflow. A trainer in FP16 checks the sequences of its
first micro-batch.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# vLLM's own logger, as it has set it up: a trainer imports this module without vLLM
logger: Any = logging.getLogger("vllm.qerl")
LARGEST = torch.finfo(torch.float16).max  # 65504
# the limit in other dtypes: a norm sums the squares of up to 1e4 inputs in fp32, whose largest number is 3e38
LARGEST_SQUARED = 1e17
NEEDS_BFLOAT16 = "This model needs bfloat16 (vllm serve: --dtype bfloat16; qerl train: --dtype bfloat16 --fp16 false)"
TOKENS = 256  # how many tokens of the vocabulary an engine tries
SMALLER = 2.0**-10  # factor on a linear's input when an output that overflows is computed again to learn its size


class ActivationOverflow(ValueError):
    """Report an activation that is too large for the dtype that a model computes in."""


class Calls(list[tuple[str, torch.Tensor, torch.Tensor]]):
    """Record each call of a module with outputs in the watched dtype, in the order in which the calls end.

    An entry has the module's name, the largest magnitude of its outputs, and the magnitude without overflow. The last
    equals the second where it is not computed. Both are () fp32.
    """

    def largest(self) -> tuple[str, float]:
        """Return the module with the largest activation and its magnitude, or ("", 0) if nothing was called."""
        sizes = ((name, float(value)) for name, value, _ in self)
        return max(sizes, key=lambda pair: pair[1], default=("", 0.0))


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
    """Record the largest output in ``dtype`` of every module of ``model`` that is called in the block.

    Raises ActivationOverflow at the end of the block if an output is too large. The message names ``who`` computed it,
    the first such module and, where known, the value. It ends with ``way_out``.

    The value is known for linears, which compute once more with a smaller input. ``is_linear`` says which modules
    are linears, by default torch's. Without ``on_several_ranks`` only linears that overflow compute again. With it all
    do, because all tensor-parallel ranks must make the same calls.
    """
    calls = Calls()
    limit, _ = _limit(dtype)
    multiplies = is_linear or (lambda module: isinstance(module, torch.nn.Linear))

    def look(name: str) -> Any:
        @torch.no_grad()
        def after(module: torch.nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
            tensors = outputs if isinstance(outputs, tuple | list) else (outputs,)
            watched_outputs = [t for t in tensors if isinstance(t, torch.Tensor) and t.dtype == dtype and t.numel()]
            if not watched_outputs:
                return
            value = real = torch.stack([t.detach().abs().amax().float() for t in watched_outputs]).amax()
            is_linear_call = multiplies(module) and inputs and isinstance(inputs[0], torch.Tensor)
            if is_linear_call and (on_several_ranks or not bool(value <= limit)):
                small = type(module).forward(module, inputs[0].detach() * SMALLER)
                small = small[0] if isinstance(small, tuple) else small
                real = small.abs().amax().float() / SMALLER
            calls.append((name, value, real))

        return after

    handles = [module.register_forward_hook(look(name)) for name, module in model.named_modules()]
    try:
        yield calls
    except Exception:
        _refuse_beyond(calls, who, dtype, way_out)  # the overflow may have caused the error
        raise
    finally:
        for handle in handles:
            handle.remove()
    _refuse_beyond(calls, who, dtype, way_out)


def _limit(dtype: torch.dtype) -> tuple[float, str]:
    """Return the largest activation with which a model in ``dtype`` still computes correctly, and why."""
    if dtype == torch.float16:
        return LARGEST, f"float16 ends at {LARGEST:.0f}"
    return LARGEST_SQUARED, f"beyond {LARGEST_SQUARED:.0e} the next norm's sum of squares is infinite"


def _refuse_beyond(calls: Calls, who: str, dtype: torch.dtype, way_out: str) -> None:
    limit, ends = _limit(dtype)
    sizes = torch.stack([value for _, value, _ in calls]).tolist() if calls else []
    for (name, _, real), value in zip(calls, sizes, strict=True):
        if value <= limit:
            continue
        size = "that is infinite or no number, or is given one"
        if (number := float(real)) < float("inf"):
            size = f"of {number:.0f}" if number < 1e9 else f"of {number:.1e}"
        raise ActivationOverflow(f"{name}: {who} computes an activation {size}; {ends}. {way_out}")


def can_check(vllm_config: "VllmConfig") -> bool:
    """Return False, with a warning, for an engine of several pipeline stages, none of which can compute alone."""
    if vllm_config.parallel_config.pipeline_parallel_size == 1:
        return True
    logger.warning_once("pipeline parallelism: activations too large for the engine's dtype are not looked for")
    return False


@torch.inference_mode()
def check_engine(
    model: torch.nn.Module, vllm_config: "VllmConfig", way_out: str = NEEDS_BFLOAT16, count: int = TOKENS
) -> Calls:
    """Compute ``count`` tokens of the vocabulary, each as the first of a sequence of its own, and return the calls.

    All tensor-parallel ranks must call this. Raises ActivationOverflow, which ends with ``way_out``, if the loaded vLLM
    model computes activations that are too large for its dtype.
    """
    from qerl_vllm_plugin.compat import layers as vllm_layers

    vocabulary, device = vllm_config.model_config.get_vocab_size(), next(model.parameters()).device
    tokens = torch.linspace(0, vocabulary - 1, min(count, vocabulary), device=device).long()
    dtype, is_linear = vllm_config.model_config.dtype, vllm_layers.is_linear
    with watched(model, "the engine", is_linear, on_several_ranks=True, dtype=dtype, way_out=way_out) as calls:
        vllm_layers.forward_single_tokens(model, vllm_config, tokens)
    return calls
