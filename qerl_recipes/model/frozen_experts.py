"""The frozen experts of a mixture on packed NVFP4 weights, in the place of transformers' module of dense ones.

Rows are sorted by expert, so that one product does all of a layer; tensor scales go into the activation and into the
routing weights, which are fp32 numbers anyway. Kept for the backward are activations and the packed weights. The router
stays transformers' own, but for its last rounding.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from qerl_kernels.experts import grouped_linear
from qerl_kernels.silu_mul import scaled_silu_mul
from transformers import PreTrainedModel


class PackedExperts(NamedTuple):
    """One linear of every expert: ``codes: (E, N, K/2)``, ``block_scales: (E, N, K/16)``, ``divisors: (E, parts)``."""

    codes: torch.Tensor
    block_scales: torch.Tensor
    divisors: torch.Tensor


class FrozenNVFP4Experts(torch.nn.Module):
    """sum over the chosen experts e of weight_e * down_e(silu(gate_e(x)) * up_e(x)); only ``x`` and the weights receive
    a gradient. No PEFT adapter fits it, and none is looked for: it has no ``nn.Linear``."""

    def __init__(self, gate_up: PackedExperts, down: PackedExperts) -> None:
        """``gate_up``: gate above up, (E, 2 I, H) with a divisor for each of the two; ``down``: (E, H, I)."""
        super().__init__()
        self.num_experts = len(gate_up.codes)
        for name, packed in (("gate_up", gate_up), ("down", down)):
            self.register_buffer(f"{name}_packed", packed.codes)
            self.register_buffer(f"{name}_scale", packed.block_scales)
            self.register_buffer(f"{name}_tensor_scales", 1.0 / packed.divisors.float())

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """``x: (T, H)``, ``chosen: (T, k)`` numbers of experts, ``weights: (T, k)`` -> ``(T, H)``, in the autocast
        dtype where autocast is on."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        experts, order = chosen.reshape(-1).sort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        numbers = torch.arange(self.num_experts, device=experts.device)
        ends = torch.searchsorted(experts, numbers, right=True).to(torch.int32)
        rows = _Spread.apply(x, order, inverse, chosen.shape[1])
        joined = grouped_linear(rows, ends, self.gate_up_packed, self.gate_up_scale)
        inner = scaled_silu_mul(joined, self.gate_up_tensor_scales[experts])
        out = grouped_linear(inner, ends, self.down_packed, self.down_scale)
        factors = weights.float() * self.down_tensor_scales[chosen].squeeze(-1)
        return _Combine.apply(out, factors, inverse)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "FrozenNVFP4Experts":
        """Moves between devices; ``.to(dtype)`` leaves the packed weights and their scales alone."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if moved.dtype != tensor.dtype else moved

        super()._apply(move, recurse)
        return self

    def extra_repr(self) -> str:
        _, two_I, half = self.gate_up_packed.shape
        return f"{self.num_experts} experts, hidden_size={2 * half}, intermediate_size={two_I // 2}, NVFP4"


class UnroundedRouter(torch.nn.Module):
    """A router whose weights of the chosen experts are fp32 numbers, as in the engine; transformers rounds them to the
    dtype of the logits."""

    def __init__(self, name: str, router: torch.nn.Module) -> None:
        """Raises ValueError for one whose weights are neither a softmax's largest values nor those over their sum."""
        super().__init__()
        self.router = router
        weight = router.weight
        x = torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
        with torch.no_grad():
            # logits of size 1: sharper ones leave nothing to the experts that are not chosen, and the two kinds agree
            logits, rounded, chosen = router(x / router(x)[0].float().std().to(x))
        for is_normalized in (True, False):
            if torch.allclose(_weights(logits, chosen, is_normalized), rounded.float(), rtol=2**-7, atol=0):
                self.is_normalized = is_normalized
                return
        raise ValueError(
            f"{name} ({type(router).__name__}) is not the largest values of a softmax over all experts; such a mixture "
            "is served, not trained"
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``x: (..., H)`` -> logits (T, E), weights (T, k) fp32 and numbers (T, k) of the chosen experts."""
        logits, _, chosen = self.router(x)
        return logits, _weights(logits, chosen, self.is_normalized), chosen


def _weights(logits: torch.Tensor, chosen: torch.Tensor, is_normalized: bool) -> torch.Tensor:
    weights = torch.softmax(logits.float(), dim=-1).gather(-1, chosen)
    return weights / weights.sum(dim=-1, keepdim=True) if is_normalized else weights


class _Spread(torch.autograd.Function):
    """Each row for each of its experts, sorted by expert: (T, H) -> (T k, H)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, k: int) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x[order // k]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inverse,), (dy,) = ctx.saved_tensors, gradients
        places = inverse.view(-1, ctx.k)
        dx = torch.zeros(len(places), dy.shape[1], dtype=torch.float32, device=dy.device)
        for column in places.unbind(1):
            dx += dy[column]
        return dx.to(dy.dtype), None, None, None


class _Combine(torch.autograd.Function):
    """The weighted sum over each row's experts, in fp32 and rounded once: (T k, H) sorted by expert -> (T, H).

    Column by column of ``factors: (T, k)``, so that nothing of the sorted rows' size is held in fp32.
    """

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, factors: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y, factors, inverse)
        total = torch.zeros(len(factors), y.shape[1], dtype=torch.float32, device=y.device)
        for column, factor in zip(inverse.view(factors.shape).unbind(1), factors.unbind(1), strict=True):
            total += y[column] * factor[:, None]
        return total.to(y.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (y, factors, inverse), (dout,) = ctx.saved_tensors, gradients
        dy, dfactors = torch.empty_like(y), torch.empty_like(factors)
        wide = dout.float()
        for k, column in enumerate(inverse.view(factors.shape).unbind(1)):
            dy[column] = (wide * factors[:, k, None]).to(y.dtype)
            dfactors[:, k] = (wide * y[column]).sum(dim=1)
        return dy, dfactors, None


def dense_experts(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Name and module of each layer of experts as transformers holds it: ``gate_up_proj (E, 2 I, H)``, ``down_proj``.

    Raises ValueError for one that computes something else than ``FrozenNVFP4Experts``.
    """
    found = [
        (name, module)
        for name, module in model.named_modules()
        if all(getattr(getattr(module, part, None), "ndim", 0) == 3 for part in ("gate_up_proj", "down_proj"))
    ]
    for name, module in found:
        flags = [getattr(module, flag, None) for flag in ("is_concatenated", "is_transposed", "has_bias", "has_gate")]
        activation = type(getattr(module, "act_fn", None)).__name__
        if flags != [True, False, False, True] or activation not in ("SiLU", "SiLUActivation"):
            raise ValueError(
                f"{name} ({type(module).__name__}) is not down(silu(gate) * up) with gate above up and without biases; "
                "such experts are served, not trained"
            )
    return found


def replace_routers(model: PreTrainedModel) -> int:
    """Put an UnroundedRouter around the router of every layer of experts -> how many."""
    found = []
    for parent in [name for name, module in model.named_modules() if hasattr(module, "experts")]:
        for child, module in model.get_submodule(parent).named_children():
            weight = getattr(module, "weight", None)
            if hasattr(module, "top_k") and isinstance(weight, torch.Tensor) and weight.ndim == 2:
                found.append((f"{parent}.{child}", module))
    for name, router in found:
        model.set_submodule(name, UnroundedRouter(name, router))
    return len(found)
