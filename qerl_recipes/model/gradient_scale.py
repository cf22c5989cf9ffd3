"""Gradients of activations in FP16: what the loss sends back is scaled, and the gradients of parameters are not.

The loss is a mean over all tokens of a batch, so that d loss / d log p of one is 1e-5 and less, and what it leaves on
the activations of a layer thousands of times smaller: FP16, whose steps end at 2^-24, would lose it. The backward is
linear in what it gets. So where it leaves the log-probabilities, the power of two that brings the largest gradient of
the micro-batch to 4 or more, and below 8, multiplies all of them, and divides the gradient of each parameter, in fp32,
as it arrives. Both are exact. There is no state: nothing is tuned from step to step, and no step is skipped.

Measured with SmolLM2-135M and an adapter on all linears, where the largest gradient of a log-probability is 1: the
largest of an activation is 190, the median of a layer 1e-3 to 5e-2, that of what an adapter's B sends back 1e-5.
"""

from collections.abc import Iterable
from typing import Any

import torch

LARGEST = 3  # the exponent of two below which the largest gradient of a log-probability is brought


class GradientScale:
    """Of the parameters of one model."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.inverse: torch.Tensor | None = None  # of the factor of the backward in progress, () fp32
        for parameter in parameters:
            parameter.register_hook(self._as_they_are)

    def __call__(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The fp32 ``values`` of one micro-batch, of any shape, whose gradients are scaled on their way back."""
        return _Scaled.apply(self, *values)

    def _as_they_are(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient if self.inverse is None else gradient * self.inverse.to(gradient.dtype)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: GradientScale, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        there = [gradient for gradient in gradients if gradient is not None and gradient.numel()]
        if not there:
            return None, *gradients
        largest = torch.stack([gradient.abs().amax().float() for gradient in there]).amax()
        exponent = torch.frexp(torch.where(largest > 0, largest, 1.0)).exponent
        ctx.scale.inverse = torch.ldexp(torch.ones_like(largest), exponent - LARGEST)
        factor = torch.ldexp(torch.ones_like(largest), LARGEST - exponent)
        return None, *(None if gradient is None else gradient * factor for gradient in gradients)
