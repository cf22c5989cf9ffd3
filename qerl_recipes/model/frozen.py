"""Compute frozen linears and experts on packed NVFP4 weights.

A linear is a module that PEFT treats as ``nn.Linear``. Its backward keeps the packed weight (4.5 bits a weight) and
nothing else; the dense weight never exists for longer than one call.

The experts of a mixture replace transformers' dense ones. Rows are sorted by expert, so that one grouped product
computes a linear of all experts. Tensor scales go into the activation and the routing weights, which are fp32 anyway.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from qerl_kernels import gemm, linear_marlin, linear_tiles, nvfp4, tiles
from qerl_kernels.experts import grouped_linear
from qerl_kernels.linear import expand, linear
from qerl_kernels.marlin_layout import MarlinWeight
from qerl_kernels.silu_mul import scaled_silu_mul
from qerl_kernels.tiles import TiledWeight
from transformers import PreTrainedModel

from qerl_recipes.model import families
from qerl_vllm_plugin.weights.checkpoint import check_tensors


def keeping_dtypes(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what moves a tensor to the device to which ``fn`` moves it, and leaves its dtype."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved = fn(tensor)
        return tensor.to(moved.device) if moved.dtype != tensor.dtype else moved

    return move


class FrozenNVFP4Linear(torch.nn.Linear):
    """Compute y = x W^T + bias with W = code * block scale / divisor; only ``x`` receives a gradient.

    It is a subclass of ``nn.Linear``, so that PEFT's LoRA finds and wraps it. ``weight`` is a placeholder of NaN, with
    which every attempt to merge an adapter fails instead of losing the adapter.
    """

    def __init__(
        self,
        codes: torch.Tensor,
        block_scales: torch.Tensor,
        divisor: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        """Take ``codes: (N, K/2)``, ``block_scales: (N, K/16)``, ``divisor: ()`` or ``(1,)``, and ``bias: (N,)``."""
        check_tensors(type(self).__name__, codes, block_scales, divisor)
        self._describe(codes.shape[0], 2 * codes.shape[1], bias, dtype)
        self.register_buffer("weight_packed", codes)
        self.register_buffer("weight_scale", block_scales)
        self.register_buffer("weight_global_scale", divisor.reshape(1))
        self.register_buffer("row_scale", (1.0 / divisor.float()).reshape(()), persistent=False)
        self._factor = float(self.row_scale)

    def _describe(self, N: int, K: int, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        torch.nn.Module.__init__(self)  # nn.Linear's own would allocate the dense weight
        self.out_features, self.in_features, self.dtype = N, K, dtype
        self.bias = None if bias is None else torch.nn.Parameter(bias.to(dtype), requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """Return NaN in the layer's shape ``(N, K)``, dtype and device, in the memory of one number."""
        placeholder = torch.full((1, 1), float("nan"), dtype=self.dtype, device=self.row_scale.device)
        return placeholder.expand(self.out_features, self.in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``x: (..., K)`` to (..., N), in the autocast dtype if autocast is on."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return self._multiply(x)

    @property
    def factor(self) -> float | None:
        """Return the tensor scale if all rows have the same one, else None."""
        return self._factor

    def operand(self, dtype: torch.dtype, room: int = 0) -> tuple[torch.Tensor, float]:
        """Return a dense (N, K) tensor in ``dtype``, and the factor that makes it exactly code * block scale.

        The caller multiplies its products by the factor. ``room`` is a multiple of 8: the tensor then has ``room`` more
        columns behind the others, (N, K + room), which the caller must write.
        """
        return expand(self.weight_packed, self.weight_scale, dtype, room)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight_packed, self.weight_scale, self.row_scale, self.bias, self._factor)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "FrozenNVFP4Linear":
        """Move to another device as any module does; ``.to(dtype)`` leaves the packed weight's own dtypes alone."""
        keep = keeping_dtypes(fn)
        super()._apply(lambda tensor: (fn if isinstance(tensor, torch.nn.Parameter) else keep)(tensor), recurse)
        if self.bias is not None:
            self.dtype = self.bias.dtype
        return self

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, NVFP4"


class FrozenTiledLinear(FrozenNVFP4Linear):
    """Compute the same layer on tiles, the layout in which the engine holds its weights on a Hopper GPU."""

    def __init__(self, weight: TiledWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        """Take a tiled ``weight`` and ``bias: (N,)``; ``dtype`` is that of the activations."""
        self._describe(weight.N, weight.K, bias, dtype)
        if linear_tiles.supported(weight.tiles.device):
            linear_tiles.prepare(weight.N, weight.K, weight.tiles.device, weight.operand)
        self.scale = weight.scale  # not a buffer: it stays on the CPU
        self._operand_type, self._fixed_order = weight.operand, weight.fixed_order
        self.register_buffer("tiles", weight.tiles)
        self.register_buffer("row_scale", weight.row_scale)
        self.register_buffer("counters", weight.counters, persistent=False)

    @property
    def factor(self) -> float | None:
        """Return the tensor scale, or None if rows differ in it or a fixed order of summation rules out a library."""
        return None if self.scale is None or self._fixed_order else float(self.scale)

    def operand(self, dtype: torch.dtype, room: int = 0) -> tuple[torch.Tensor, float]:
        weight, by = self._weight(), nvfp4.expanded_factor(self._operand_type)
        if self.tiles.is_cuda:
            return gemm.dequantize(weight, room=room).to(dtype), 1 / by
        w = tiles.dequantize(self.tiles, weight.N, weight.K, weight.operand) * by
        return torch.nn.functional.pad(w, (0, room)).to(dtype), 1 / by

    def _weight(self) -> TiledWeight:
        N, K = self.out_features, self.in_features
        tensors, kind = (self.tiles, self.row_scale, self.counters), (self._operand_type, self._fixed_order)
        return TiledWeight(*tensors, N, K, self.scale, *kind)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        return linear_tiles.linear(x, self._weight(), None if self.bias is None else self.bias.float())


class FrozenMarlinLinear(FrozenNVFP4Linear):
    """Compute the same layer on Marlin's tensors, the layout in which the engine holds its weights on other GPUs."""

    def __init__(self, weight: MarlinWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        """Take Marlin's ``weight`` and ``bias: (N,)`` in the rows' order; ``dtype`` is that of the activations."""
        self._describe(weight.N, weight.K, bias, dtype)
        self.exponent = weight.exponent
        self.register_buffer("words", weight.words)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("row_scale", weight.scale)
        self._factor = float(weight.scale)

    def operand(self, dtype: torch.dtype, room: int = 0) -> tuple[torch.Tensor, float]:
        return expand(*self._weight().canonical(), dtype, room)

    def _weight(self) -> MarlinWeight:
        N, K = self.out_features, self.in_features
        return MarlinWeight(self.words, self.scales, self.row_scale, self.exponent, N, K)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        return linear_marlin.linear(x, self._weight(), self.bias, self._factor)


class PackedExperts(NamedTuple):
    """Hold one linear of all experts: codes (E, N, K/2), block_scales (E, N, K/16) and divisors (E, parts)."""

    codes: torch.Tensor
    block_scales: torch.Tensor
    divisors: torch.Tensor


class FrozenNVFP4Experts(torch.nn.Module):
    """Sum weight_e * down_e(silu(gate_e(x)) * up_e(x)) over the chosen experts e of each row.

    Only ``x`` and the routing weights receive a gradient. It has no ``nn.Linear``, so PEFT finds nothing to adapt.
    """

    def __init__(self, gate_up: PackedExperts, down: PackedExperts) -> None:
        """Take ``gate_up``: (E, 2 I, H), gate above up, with a divisor for each of the two, and ``down``: (E, H, I)."""
        super().__init__()
        self.num_experts = len(gate_up.codes)
        for name, packed in (("gate_up", gate_up), ("down", down)):
            self.register_buffer(f"{name}_packed", packed.codes)
            self.register_buffer(f"{name}_scale", packed.block_scales)
            self.register_buffer(f"{name}_tensor_scales", 1.0 / packed.divisors.float())

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Map ``x: (T, H)`` to (T, H), in autocast's dtype if it is on; ``chosen`` experts and ``weights``: (T, k)."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        experts, order = chosen.reshape(-1).sort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        expert_ids = torch.arange(self.num_experts, device=experts.device)
        ends = torch.searchsorted(experts, expert_ids, right=True).to(torch.int32)
        rows = _Dispatch.apply(x, order, inverse, chosen.shape[1])
        gate_up_out = grouped_linear(rows, ends, self.gate_up_packed, self.gate_up_scale)
        activation = scaled_silu_mul(gate_up_out, self.gate_up_tensor_scales[experts])
        out = grouped_linear(activation, ends, self.down_packed, self.down_scale)
        factors = weights.float() * self.down_tensor_scales[chosen].squeeze(-1)
        return _Combine.apply(out, factors, inverse)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "FrozenNVFP4Experts":
        """Move between devices; ``.to(dtype)`` leaves the packed weights and their scales alone."""
        super()._apply(keeping_dtypes(fn), recurse)
        return self


class UnroundedRouter(torch.nn.Module):
    """Keep the weights of a router's chosen experts in fp32, as the engine does and transformers does not."""

    def __init__(self, name: str, router: torch.nn.Module) -> None:
        """Raise ValueError if its weights are neither softmax values of the chosen experts nor those over their sum."""
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
            f"{name} ({type(router).__name__}) cannot be trained: of MoE routers only a softmax with the largest "
            "values (top-k) can, as in Qwen3-MoE; serving works"
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Map ``x: (..., H)`` to logits (T, E), and fp32 weights and indices, (T, k) each, of the chosen experts."""
        logits, _, chosen = self.router(x)
        return logits, _weights(logits, chosen, self.is_normalized), chosen


def _weights(logits: torch.Tensor, chosen: torch.Tensor, is_normalized: bool) -> torch.Tensor:
    weights = torch.softmax(logits.float(), dim=-1).gather(-1, chosen)
    return weights / weights.sum(dim=-1, keepdim=True) if is_normalized else weights


class _Dispatch(torch.autograd.Function):
    """Copy each row for each of its k experts, sorted by expert: (T, H) -> (T k, H)."""

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
    """Compute the weighted sum over each row's experts, in fp32 and rounded once: (T k, H) sorted by expert -> (T, H).

    It goes through the k columns of ``factors: (T, k)``, so that no fp32 tensor has the size of all sorted rows.
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
        dout_fp32 = dout.float()
        for k, column in enumerate(inverse.view(factors.shape).unbind(1)):
            dy[column] = (dout_fp32 * factors[:, k, None]).to(y.dtype)
            dfactors[:, k] = (dout_fp32 * y[column]).sum(dim=1)
        return dy, dfactors, None


def dense_experts(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return name and module of each of transformers' expert layers; raise ValueError for others than are trained."""
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if all(getattr(getattr(module, part, None), "ndim", 0) == 3 for part in ("gate_up_proj", "down_proj"))
    ]
    for name, module in layers:
        flags = [getattr(module, flag, None) for flag in ("is_concatenated", "is_transposed", "has_bias", "has_gate")]
        activation = type(getattr(module, "act_fn", None)).__name__
        if flags != [True, False, False, True] or activation not in ("SiLU", "SiLUActivation"):
            raise ValueError(
                f"{name} ({type(module).__name__}) is not down(silu(gate) * up) with gate above up and without biases; "
                "such experts are served, not trained"
            )
    return layers


def replace_routers(model: PreTrainedModel) -> int:
    """Wrap the router of every expert layer in an UnroundedRouter, and return the number of routers."""
    routers = {name: router for name, router in families.routers(model).items() if hasattr(router, "top_k")}
    for name, router in routers.items():
        model.set_submodule(name, UnroundedRouter(name, router))
    return len(routers)
