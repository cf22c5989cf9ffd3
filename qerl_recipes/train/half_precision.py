"""A trainer whose model computes in float16: what it does beside what any trainer does.

Autocast is to float16 (``fp16: true``), without accelerate, whose loss scale would skip steps. Gradients of activations
are scaled (``model/gradient_scale.py``), the masters of adapter and norms stay fp32. The first micro-batch is looked at
for activations that float16 cannot hold; later ones show in the gradient norm (``train/divergence.py``).
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
from qerl_vllm_plugin import overflow


class HalfPrecision:
    """Of one policy, whose trained parameters have been settled."""

    def __init__(self, policy: PeftModel, args: GRPOConfig) -> None:
        self._policy, self._is_autocast, self._is_checked = policy, args.fp16, False
        self._scale = GradientScale(parameter for parameter in policy.parameters() if parameter.requires_grad)

    def autocast(self) -> AbstractContextManager[Any]:
        """Around the forward of the model; nothing where ``fp16`` is off."""
        if not self._is_autocast:
            return nullcontext()
        return torch.autocast(self._policy.device.type, dtype=torch.float16)

    def watched(self) -> AbstractContextManager[Any]:
        """Around a forward that is looked at: raises ActivationOverflow naming the module."""
        return overflow.watched(self._policy, "the trainer", lambda module: isinstance(module, Linear | LoraLayer))

    @contextmanager
    def first_watched(self) -> Iterator[None]:
        """Around the forward of a micro-batch that is learned from: the first one is looked at."""
        with nullcontext() if self._is_checked else self.watched():
            yield
        self._is_checked = True

    def scaled(self, logps: torch.Tensor, entropies: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same numbers, whose gradients reach the model's activations scaled."""
        if entropies is None:
            return self._scale(logps)[0], None
        logps, entropies = self._scale(logps, entropies)
        return logps, entropies
