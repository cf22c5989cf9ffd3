"""Train a model that computes in float16.

Autocast to float16 (``fp16: true``) does not go through accelerate, whose loss scale would skip steps. Instead the
gradients of activations are scaled (``model/gradient_scale.py``); the masters of adapter and norms stay fp32. The first
micro-batch is checked for activations that float16 cannot hold. Later overflows show in the gradient norm
(``train/divergence.py``).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch.nn import Linear

from qerl_recipes.model.gradient_scale import GradientScale
from qerl_recipes.recipe.configs import GRPOConfig
from qerl_vllm_plugin.weights import overflow


class HalfPrecision:
    """The float16 handling of one policy; create it once the trainable parameters are final."""

    def __init__(self, policy: PeftModel, args: GRPOConfig) -> None:
        self._policy, self._is_autocast, self._is_checked = policy, args.fp16, False
        self._scale = GradientScale(parameter for parameter in policy.parameters() if parameter.requires_grad)

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

    def scaled(self, logps: torch.Tensor, entropies: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the same numbers; their gradients reach the model's activations scaled."""
        if entropies is None:
            return self._scale(logps)[0], None
        logps, entropies = self._scale(logps, entropies)
        return logps, entropies
