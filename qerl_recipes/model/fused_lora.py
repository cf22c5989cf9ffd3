"""The adapter in the trainer's model: its parameters, and its arithmetic under autocast.

PEFT writes y = W x + scaling * (x A^T) B^T as a cast of x to the fp32 of A (which autocast takes back), three products,
a multiplication and two sums, and its gradient of x as two products and a sum. On a frozen weight of ours or of torch's
``AdaptedLinear`` lets the large product add itself to the small one, forward and backward: the sums are a part of
cuBLAS's own epilogue, and no product is written to be read again. With s = scaling * x A^T and ds = scaling * dy B,

    y = (s B^T + bias) + x W^T        dx = ds A + dy W        dA = ds^T x        dB = dy^T s,

the last two in fp32. Elsewhere (bitsandbytes, unequal tensor scales) ``FusedLora`` saves two of the sums.
"""

from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import layer as peft_layer
from peft.tuners.lora.layer import LoraLayer, LoraVariant
from peft.utils import get_peft_model_state_dict

from qerl_recipes.model.frozen_linear import FrozenNVFP4Linear

ADAPTER = "default"  # PEFT's name of the adapter that is trained


class AdaptedLinear(peft_layer.Linear):
    """PEFT's linear layer on a frozen weight: under autocast, with the trained adapter alone, one function."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``x: (..., K)`` -> ``(..., N)``; PEFT's own wherever more is asked for than the trained adapter."""
        is_plain = not (args or kwargs or self.disable_adapters or self.merged) and self.active_adapters == [ADAPTER]
        if not (is_plain and torch.is_autocast_enabled(x.device.type)):
            return super().forward(x, *args, **kwargs)
        A, B = self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight
        return _Adapted.apply(x, A, B, self.scaling[ADAPTER], self.get_base_layer())


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, A: torch.Tensor, B: torch.Tensor, scaling: float, base: torch.nn.Linear
    ) -> torch.Tensor:
        dtype = torch.get_autocast_dtype(x.device.type)
        with torch.autocast(x.device.type, enabled=False):
            rows, a, b = x.reshape(-1, x.shape[-1]).to(dtype), A.to(dtype), B.to(dtype)  # (T, K), (r, K), (N, r)
            s = _product(rows, a.t(), scaling)  # (T, r)
            bias = base.bias
            y = s @ b.t() if bias is None else torch.addmm(bias.to(dtype), s, b.t())
            w, factor = _operand(base, dtype)
            y.addmm_(rows, w.t(), alpha=factor)  # (T, N)
        ctx.save_for_backward(rows, s, a, b)
        ctx.scaling, ctx.base, ctx.x = scaling, base, (x.shape, x.dtype)
        return y.view(*x.shape[:-1], y.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, s, a, b = ctx.saved_tensors
        dy = gradients[0].reshape(-1, b.shape[0]).to(s.dtype)  # (T, N)
        ds = _product(dy, b, ctx.scaling)  # (T, r)
        of_x, of_a, of_b, *_ = ctx.needs_input_grad
        dx = None
        if of_x:
            w, factor = _operand(ctx.base, s.dtype)
            dx = (ds @ a).addmm_(dy, w, alpha=factor).view(ctx.x[0]).to(ctx.x[1])  # (..., K)
        return dx, _sum(ds, rows) if of_a else None, _sum(dy, s) if of_b else None, None, None


def _product(a: torch.Tensor, b: torch.Tensor, factor: float) -> torch.Tensor:
    """``factor * (a @ b)``, rounded once: (M, K), (K, N) -> (M, N)."""
    out = a.new_empty(a.shape[0], b.shape[1])
    return torch.addmm(out, a, b, beta=0, alpha=factor, out=out)


def _sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a^T b`` over all tokens, in fp32: (T, N), (T, K) -> (N, K)."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a.t(), b, out_dtype=torch.float32)
    return a.t().float() @ b.float()


def _operand(base: torch.nn.Module, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    """The frozen weight (N, K), and the factor of its products."""
    if isinstance(base, FrozenNVFP4Linear):
        assert base.factor is not None
        return base.operand().to(dtype), base.factor
    weight: torch.Tensor = base.weight  # type: ignore[assignment]
    return weight.to(dtype), 1.0


def _has_operand(base: torch.nn.Module) -> bool:
    if isinstance(base, FrozenNVFP4Linear):
        return base.factor is not None
    return type(base) is torch.nn.Linear and not base.weight.requires_grad


class FusedLora(LoraVariant):
    """How PEFT's linear layers apply a plain LoRA adapter, where activations are what autocast makes them."""

    @staticmethod
    def init(module: LoraLayer, adapter_name: str) -> None:
        """Nothing to add to a plain adapter."""

    @staticmethod
    def merge_safe(module: LoraLayer, active_adapter: str, orig_weight: torch.Tensor) -> torch.Tensor:
        """As PEFT merges a plain adapter."""
        return orig_weight.clone().add_(module.get_delta_weight(active_adapter))

    @staticmethod
    def merge_unsafe(module: LoraLayer, active_adapter: str, orig_weight: torch.Tensor) -> None:
        """As PEFT merges a plain adapter, in place."""
        orig_weight.data += module.get_delta_weight(active_adapter)

    @staticmethod
    def unmerge(module: LoraLayer, active_adapter: str, orig_weight: torch.Tensor) -> torch.Tensor:
        """What is left without the adapter."""
        return orig_weight.clone().sub_(module.get_delta_weight(active_adapter))

    @staticmethod
    def forward(
        module: LoraLayer, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **kwargs: object
    ) -> torch.Tensor:
        """``x: (..., K)``, ``result: (..., N)`` of the frozen layer -> ``result`` + scaling * (x A^T) B^T."""
        lora_A, lora_B = module.lora_A[active_adapter], module.lora_B[active_adapter]
        if not torch.is_autocast_enabled(x.device.type):
            x = x.to(lora_A.weight.dtype)
        hidden = lora_A(module.lora_dropout[active_adapter](x))
        flat = result.reshape(-1, result.shape[-1]).to(hidden.dtype)
        rows = hidden.reshape(-1, hidden.shape[-1])
        total = torch.addmm(flat, rows, lora_B.weight.t(), alpha=module.scaling[active_adapter])
        return total.to(result.dtype).view_as(result)


def install(model: torch.nn.Module, adapter: str) -> int:
    """Let every plain LoRA layer of ``model`` compute ``adapter`` this way from now on -> how many layers.

    Without autocast the activations are cast to the dtype of the adapter, as by PEFT. Layers with DoRA, a bias or any
    other variant of PEFT's stay as they are.
    """
    found = 0
    for module in model.modules():
        if not isinstance(module, LoraLayer) or adapter not in module.lora_A:
            continue
        if adapter in module.lora_variant or module.lora_bias[adapter]:
            continue
        module.lora_variant[adapter] = FusedLora()
        module.cast_input_dtype_enabled = False
        is_plain = type(module) is peft_layer.Linear and isinstance(module.lora_dropout[adapter], torch.nn.Identity)
        if is_plain and adapter == ADAPTER and _has_operand(module.get_base_layer()):
            module.__class__ = AdaptedLinear  # PEFT asks for a class of ours only where it builds, which TRL does
        found += 1
    return found


def parameters(model: PeftModel) -> dict[str, torch.nn.Parameter]:
    """The trained adapter's parameters, by PEFT's names of them in a state dict.

    They are the same objects for the whole training: to ask PEFT anew for each swap takes it several walks through the
    model, 50 ms for one of 28 layers.
    """
    named = dict(model.named_parameters())
    names = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    return {name: named[f"{name.removesuffix('weight')}{ADAPTER}.weight"] for name in names}
