"""Compute frozen linear layers on packed NVFP4 weights, as modules that PEFT treats as ``nn.Linear``.

The backward keeps the packed weight (4.5 bits a weight) and nothing else. The dense weight never exists for longer than
one call.
"""

from collections.abc import Callable

import torch
from qerl_kernels import gemm, linear_marlin, linear_tiles, nvfp4, tiles
from qerl_kernels.linear import expand, linear
from qerl_kernels.marlin_layout import MarlinWeight
from qerl_kernels.tiles import TiledWeight

from qerl_vllm_plugin.weights.checkpoint import check_tensors


class FrozenNVFP4Linear(torch.nn.Linear):
    """Compute y = x W^T + bias with W = code * block scale / divisor; only ``x`` receives a gradient.

    It is a subclass of ``nn.Linear``, so that PEFT's LoRA finds and wraps it. ``weight`` is a placeholder of NaN that
    takes no memory. It gives PEFT shape, dtype and device, and makes every attempt to merge an adapter fail instead of
    losing the adapter.
    """

    def __init__(
        self,
        codes: torch.Tensor,
        block_scales: torch.Tensor,
        divisor: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        """Take ``codes: (N, K/2)``, ``block_scales: (N, K/16)``, ``divisor: ()`` or ``(1,)``, and ``bias: (N,)``.

        ``dtype`` is that of the activations. Raises CheckpointError if the first three do not fit together or hold
        unusable values.
        """
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

        def move(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            is_buffer = not isinstance(tensor, torch.nn.Parameter)
            return tensor.to(moved.device) if is_buffer and moved.dtype != tensor.dtype else moved

        super()._apply(move, recurse)
        if self.bias is not None:
            self.dtype = self.bias.dtype
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, NVFP4"


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
        """Return the tensor scale, or None if rows differ in it or the order of summation is fixed.

        A fixed order rules out a product by a library.
        """
        return None if self.scale is None or self._fixed_order else float(self.scale)

    def operand(self, dtype: torch.dtype, room: int = 0) -> tuple[torch.Tensor, float]:
        """Return the weight as ``FrozenNVFP4Linear.operand`` does."""
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
        """Return the weight as ``FrozenNVFP4Linear.operand`` does."""
        return expand(*self._weight().canonical(), dtype, room)

    def _weight(self) -> MarlinWeight:
        N, K = self.out_features, self.in_features
        return MarlinWeight(self.words, self.scales, self.row_scale, self.exponent, N, K)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        return linear_marlin.linear(x, self._weight(), self.bias, self._factor)
