"""Compute the adapter in the trainer's model with fewer operations under autocast, and list its parameters.

PEFT computes y = W x + scaling * (x A^T) B^T by three products, a multiplication and two sums. Before, it casts x to
the fp32 of A, which autocast undoes. Its gradient of x takes two products and a sum. On a FrozenNVFP4Linear or a plain
``nn.Linear``, ``AdaptedLinear`` needs fewer, with s = scaling * x A^T and ds = scaling * dy B:

    y = [x s] [W B]^T + bias        dx = ds A + dy W        dA = ds^T x        dB = dy^T s

* For a 4-bit weight y is one product, rounded once as in the engine. The weight is expanded anyhow, with room for B and
  the bias behind each row.
* A dense weight stays where it is. Its y is rounded before the adapter's part is added, as in vLLM's LoRA slots.
* cuBLAS adds dy W to ds A in its epilogue, which rounds once more. A gradient tolerates that, but log-probabilities do
  not (a third more error variance on 8 layers of a 7B model). dA and dB are fp32.
* Layers that share x are computed ``together``: one product for all A, and one dx.
* Behind a gate, silu(gate) * up is written where the product of a 4-bit down_proj reads it (``gated``).
* On other layers (bitsandbytes, unequal tensor scales) ``FusedLora`` saves two of the sums.
"""

from collections.abc import Sequence
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import layer as peft_layer
from peft.tuners.lora.layer import LoraLayer, LoraVariant
from peft.utils import get_peft_model_state_dict
from qerl_kernels import wide
from qerl_kernels.silu_mul import silu_mul, silu_mul_backward_

from qerl_recipes.model.frozen import FrozenNVFP4Linear

ADAPTER = "default"  # PEFT's name of the adapter that is trained


class AdaptedLinear(peft_layer.Linear):
    """Replace PEFT's linear layer: under autocast, frozen weight and trained adapter are one autograd function."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Map ``x: (..., K)`` to (..., N). PEFT's own ``forward`` runs unless the layer ``is_plain``."""
        if args or kwargs or not self.is_plain(x):
            return super().forward(x, *args, **kwargs)
        return _adapted(x, [self])[0]

    def is_plain(self, x: torch.Tensor) -> bool:
        """Return True under autocast if the trained adapter is the only active one, and not merged."""
        alone = not (self.disable_adapters or self.merged) and self.active_adapters == [ADAPTER]
        return alone and torch.is_autocast_enabled(x.device.type)


def together(x: torch.Tensor, *layers: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    """Return the outputs of ``layers`` for one ``x: (..., K)``, computed by one function if all are alike."""
    adapted = [layer for layer in layers if isinstance(layer, AdaptedLinear) and layer.is_plain(x)]
    alike = {(layer.scaling[ADAPTER], isinstance(layer.get_base_layer(), FrozenNVFP4Linear)) for layer in adapted}
    if len(adapted) == len(layers) and len(alike) == 1:
        return _adapted(x, adapted)
    return tuple(layer(x) for layer in layers)


def gated(gate: torch.Tensor, up: torch.Tensor, down: torch.nn.Module) -> torch.Tensor:
    """Return down(silu(gate) * up), (..., N), for ``gate`` and ``up``: (..., K); silu(gate) * up is rounded once."""
    dtype = torch.get_autocast_dtype(gate.device.type)
    if isinstance(down, AdaptedLinear) and down.is_plain(gate) and gate.dtype == up.dtype == dtype:
        base, A, B = down.get_base_layer(), down.lora_A[ADAPTER].weight, down.lora_B[ADAPTER].weight
        if isinstance(base, FrozenNVFP4Linear):
            output: torch.Tensor = _Gated.apply(gate, up, down.scaling[ADAPTER], base, A, B)
            return output
    return down(silu_mul(gate, up))


def _adapted(x: torch.Tensor, layers: Sequence[AdaptedLinear]) -> tuple[torch.Tensor, ...]:
    As, Bs = ([getattr(layer, name)[ADAPTER].weight for layer in layers] for name in ("lora_A", "lora_B"))
    bases = [layer.get_base_layer() for layer in layers]
    outputs: tuple[torch.Tensor, ...] = _Adapted.apply(x, layers[0].scaling[ADAPTER], bases, *As, *Bs)
    return outputs


class _Adapted(torch.autograd.Function):
    """Compute layers i with frozen weights (N_i, K), all 4-bit or all dense, for one x.

    A_i is (r_i, K) and B_i is (N_i, r_i). R is the sum of r_i, and T the number of tokens.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, scaling: float, bases: Sequence[torch.nn.Linear], *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        dtype, As, Bs = torch.get_autocast_dtype(x.device.type), weights[: len(bases)], weights[len(bases) :]
        ranks = [len(A) for A in As]
        with torch.autocast(x.device.type, enabled=False):
            rows = x.reshape(-1, x.shape[-1]).to(dtype)  # (T, K)
            a = torch.cat(As).to(dtype)  # (R, K)
            s = _product(rows, a.t(), scaling)  # (T, R)
            ys = _outputs(rows, s, bases, Bs)
        ctx.save_for_backward(rows, s, a, *(B.to(dtype) for B in Bs))
        ctx.scaling, ctx.bases, ctx.ranks, ctx.x = scaling, bases, ranks, (x.shape, x.dtype)
        return tuple(y.view(*x.shape[:-1], y.shape[1]) for y in ys)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        rows, s, a, *bs = ctx.saved_tensors
        dys = [dy.reshape(-1, dy.shape[-1]).to(s.dtype) for dy in gradients]  # (T, N_i)
        ds = torch.cat([_product(dy, b, ctx.scaling) for dy, b in zip(dys, bs, strict=True)], dim=1)  # (T, R)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = _input_gradient(dys, ds, a, ctx.bases).view(ctx.x[0]).to(ctx.x[1])
        of_a = _sum(ds, rows).split(ctx.ranks)
        of_b = [_sum(dy, part) for dy, part in zip(dys, s.split(ctx.ranks, dim=1), strict=True)]
        return dx, None, None, *of_a, *of_b


class _Gated(torch.autograd.Function):
    """Compute y = W z + scaling * B A z with z = silu(gate) * up, written where it is read, for a 4-bit W (N, K)."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: torch.Tensor,
        up: torch.Tensor,
        scaling: float,
        base: FrozenNVFP4Linear,
        A: torch.Tensor,
        B: torch.Tensor,
    ) -> torch.Tensor:
        K, R = gate.shape[-1], len(A)
        with torch.autocast(gate.device.type, enabled=False):
            a = A.to(gate.dtype)
            whole = wide.widen_silu_mul(gate.reshape(-1, K), up.reshape(-1, K), R)  # (T, K + used)
            _product(whole[:, :K], a.t(), scaling, out=whole[:, K : K + R])
            (y,) = _wide_outputs(whole, K, R, [base], [B])
        ctx.save_for_backward(gate, up, whole, a, B.to(gate.dtype))
        ctx.scaling, ctx.base = scaling, base
        return y.view(*gate.shape[:-1], y.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        gate, up, whole, a, b = ctx.saved_tensors
        K, R = gate.shape[-1], len(a)
        dy = gradient.reshape(-1, gradient.shape[-1]).to(a.dtype)
        ds = _product(dy, b, ctx.scaling)
        of_gate = of_up = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            dz = _input_gradient([dy], ds, a, [ctx.base]).view(gate.shape)
            of_gate, of_up = silu_mul_backward_(dz, gate, up)
        of_a, of_b = _sum(ds, whole[:, :K]), _sum(dy, whole[:, K : K + R])
        return of_gate, of_up, None, None, of_a, of_b


def _outputs(
    x: torch.Tensor, s: torch.Tensor, bases: Sequence[torch.nn.Linear], Bs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the outputs, (T, N_i) each, of ``x: (T, K)`` and ``s: (T, R)``."""
    parts = s.split([B.shape[1] for B in Bs], dim=1)
    if not isinstance(bases[0], FrozenNVFP4Linear):  # two roundings, as in vLLM's LoRA slots
        biases = [None if base.bias is None else base.bias.to(x.dtype) for base in bases]
        pairs = zip(bases, biases, strict=True)
        dense = [torch.nn.functional.linear(x, base.weight.to(x.dtype), bias) for base, bias in pairs]
        return [y.addmm_(part, B.to(x.dtype).t()) for y, part, B in zip(dense, parts, Bs, strict=True)]
    K, R = x.shape[1], s.shape[1]
    whole = wide.widen(x, R)
    whole[:, K : K + R] = s
    return _wide_outputs(whole, K, R, bases, Bs)


def _wide_outputs(
    x: torch.Tensor, K: int, R: int, bases: Sequence[torch.nn.Linear], Bs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the outputs of 4-bit ``bases``, (T, N_i) each, rounded once; wide.py describes ``x: (T, K + used)``."""
    ys, first, (used, room) = [], 0, wide.columns(R)
    for base, B in zip(bases, Bs, strict=True):
        w, factor = _operand(base, x.dtype, room)  # (N_i, K + room)
        w = w[:, : K + used]
        wide.fill(w, K, R, first, B, base.bias, factor)
        ys.append(_product(x, w.t(), factor))
        first += B.shape[1]
    return ys


def _input_gradient(
    dys: Sequence[torch.Tensor], ds: torch.Tensor, a: torch.Tensor, bases: Sequence[torch.nn.Linear]
) -> torch.Tensor:
    """Return ds A plus all dy_i W_i, (T, K), for ``dys: (T, N_i)``, ``ds: (T, R)`` and ``a: (R, K)``."""
    dx = ds @ a
    for base, dy in zip(bases, dys, strict=True):
        w, factor = _operand(base, dx.dtype)
        dx.addmm_(dy, w, alpha=factor)
    return dx


def _product(a: torch.Tensor, b: torch.Tensor, factor: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``factor * (a @ b)``, rounded once, written to ``out`` if given: (M, K), (K, N) -> (M, N)."""
    out = a.new_empty(a.shape[0], b.shape[1]) if out is None else out
    if not a.is_cuda:
        return out.copy_(factor * (a.float() @ b.float()))
    return torch.addmm(out, a, b, beta=0, alpha=factor, out=out)


def _sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a^T b``, summed over all tokens in fp32: (T, N), (T, K) -> (N, K)."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a.t(), b, out_dtype=torch.float32)
    return a.t().float() @ b.float()


def _operand(base: torch.nn.Module, dtype: torch.dtype, room: int = 0) -> tuple[torch.Tensor, float]:
    """Return the frozen weight (N, K) and the factor of its products; a 4-bit one has ``room`` more columns."""
    if isinstance(base, FrozenNVFP4Linear):
        assert base.factor is not None
        w, by = base.operand(dtype, room)
        return w, by * base.factor
    weight: torch.Tensor = base.weight  # type: ignore[assignment]
    return weight.to(dtype), 1.0


def _has_operand(base: torch.nn.Module) -> bool:
    if isinstance(base, FrozenNVFP4Linear):
        return base.factor is not None
    return type(base) is torch.nn.Linear and not base.weight.requires_grad


class FusedLora(LoraVariant):
    """Apply a plain LoRA adapter in PEFT's linear layers, with activations in the dtype that autocast gives them."""

    @staticmethod
    def init(module: LoraLayer, adapter_name: str) -> None:
        """Do nothing: a plain adapter needs no setup."""

    @staticmethod
    def merge_safe(module: LoraLayer, active_adapter: str, orig_weight: torch.Tensor) -> torch.Tensor:
        return orig_weight.clone().add_(module.get_delta_weight(active_adapter))

    @staticmethod
    def merge_unsafe(module: LoraLayer, active_adapter: str, orig_weight: torch.Tensor) -> None:
        orig_weight.data += module.get_delta_weight(active_adapter)

    @staticmethod
    def unmerge(module: LoraLayer, active_adapter: str, orig_weight: torch.Tensor) -> torch.Tensor:
        return orig_weight.clone().sub_(module.get_delta_weight(active_adapter))

    @staticmethod
    def forward(
        module: LoraLayer, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **kwargs: object
    ) -> torch.Tensor:
        """Return ``result: (..., N)`` of the frozen layer plus scaling * (x A^T) B^T, for ``x: (..., K)``."""
        lora_A, lora_B = module.lora_A[active_adapter], module.lora_B[active_adapter]
        if not torch.is_autocast_enabled(x.device.type):
            x = x.to(lora_A.weight.dtype)
        hidden = lora_A(module.lora_dropout[active_adapter](x))
        flat = result.reshape(-1, result.shape[-1]).to(hidden.dtype)
        rows = hidden.reshape(-1, hidden.shape[-1])
        total = torch.addmm(flat, rows, lora_B.weight.t(), alpha=module.scaling[active_adapter])
        return total.to(result.dtype).view_as(result)


def install(model: torch.nn.Module, adapter: str) -> int:
    """Make every plain LoRA layer (no DoRA, no bias) compute ``adapter`` by this module; return their number."""
    count = 0
    for module in model.modules():
        if not isinstance(module, LoraLayer) or adapter not in module.lora_A:
            continue
        if adapter in module.lora_variant or module.lora_bias[adapter]:
            continue
        module.lora_variant[adapter] = FusedLora()
        module.cast_input_dtype_enabled = False
        is_plain = type(module) is peft_layer.Linear and isinstance(module.lora_dropout[adapter], torch.nn.Identity)
        if is_plain and adapter == ADAPTER and _has_operand(module.get_base_layer()):
            module.__class__ = AdaptedLinear  # PEFT takes a custom class only while it builds, and TRL builds
        count += 1
    return count


def parameters(model: PeftModel) -> dict[str, torch.nn.Parameter]:
    """Return the trained adapter's parameters by PEFT's names; call it once: it takes 50 ms for 28 layers."""
    named = dict(model.named_parameters())
    names = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    return {name: named[f"{name.removesuffix('weight')}{ADAPTER}.weight"] for name in names}
