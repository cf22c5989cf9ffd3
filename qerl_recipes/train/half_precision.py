"""Train a model that computes in float16.

accelerate's loss scale would skip steps. Instead the gradients of activations are scaled, so that they do not
underflow: d loss / d log p of one token is 1e-5 or less, and float16's smallest step is 2^-24. A power of two brings
the largest gradient of a micro-batch's log-probabilities to 4 or more and below 8. The same power divides the gradient
of each parameter, in fp32, as it arrives. Both are exact, and no state is tuned from step to step.

The first micro-batch is checked for activations that float16 cannot hold. Later overflows show in the gradient norm
(``train/divergence.py``).

Measured with SmolLM2-135M and an adapter on all linears, if the largest gradient of a log-probability is 1: the largest
gradient of an activation is 190. The median of a layer is 1e-3 to 5e-2, and that of what an adapter's B sends back is
1e-5.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch.nn import Linear

from qerl_recipes.recipe.configs import GRPOConfig
from qerl_vllm_plugin.weights import overflow

LARGEST = 3  # the largest gradient of a log-probability is scaled to below two to this power


class GradientScale:
    """Scale the gradients of one model. Create it after its trainable ``parameters`` are settled."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.inverse: torch.Tensor | None = None  # 1 / factor of the current backward, () fp32
        for parameter in parameters:
            parameter.register_hook(self._unscaled)

    def scaled(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the fp32 ``values`` of one micro-batch, of any shape, unchanged; their gradients are scaled."""
        return _Scaled.apply(self, *values)

    def _unscaled(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient if self.inverse is None else gradient * self.inverse.to(gradient.dtype)


class HalfPrecision(GradientScale):
    """Train one policy in float16; create this once the trainable parameters are final."""

    def __init__(self, policy: PeftModel, args: GRPOConfig) -> None:
        super().__init__(parameter for parameter in policy.parameters() if parameter.requires_grad)
        self._policy, self._is_autocast, self._is_checked = policy, args.fp16, False

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context for a forward of the model; it does nothing if ``fp16`` is off."""
        if not self._is_autocast:
            return nullcontext()
        return torch.autocast(self._policy.device.type, dtype=torch.float16)

    def watched(self) -> AbstractContextManager[Any]:
        """Return a context that checks the forward inside; it raises ActivationOverflow, naming the module."""
        return overflow.watched(self._policy, "the trainer", lambda module: isinstance(module, Linear | LoraLayer))

    @contextmanager
    def first_watched(self) -> Iterator[None]:
        """Check the forward inside the block, which is one of a loss, if it is the first."""
        with nullcontext() if self._is_checked else self.watched():
            yield
        self._is_checked = True


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: GradientScale, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        present = [gradient for gradient in gradients if gradient is not None and gradient.numel()]
        if not present:
            return None, *gradients
        largest = torch.stack([gradient.abs().amax().float() for gradient in present]).amax()
        exponent = torch.frexp(torch.where(largest > 0, largest, 1.0)).exponent
        ctx.scale.inverse = torch.ldexp(torch.ones_like(largest), exponent - LARGEST)
        factor = torch.ldexp(torch.ones_like(largest), LARGEST - exponent)
        return None, *(None if gradient is None else gradient * factor for gradient in gradients)
