"""Create, load and apply NVFP4 linear layers, from packed checkpoints or from BF16 ones quantized while loading."""

from collections.abc import Callable
from typing import Any

import torch
from qerl_kernels import nvfp4
from torch.nn import Parameter
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.parameter import GroupQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter
from vllm.model_executor.utils import set_weight_attrs

from qerl_vllm_plugin.adapter import resident
from qerl_vllm_plugin.compat import worker as vllm_worker
from qerl_vllm_plugin.weights import layouts
from qerl_vllm_plugin.weights.checkpoint import check_tensors
from qerl_vllm_plugin.weights.formats import COMPRESSED, WAY_OUT, Format
from qerl_vllm_plugin.wire.safetensors_file import CheckpointError

Loader = Callable[..., None]


@register_weight_loader_v2_supported_method
class QerlLinearMethod(LinearMethodBase):
    """Compute one NVFP4 layer of a packed checkpoint, in any format."""

    layout: layouts.Layout

    def __init__(
        self,
        prefix: str,
        parts: list[str] | None = None,
        adapter_rank: int = 0,
        kernel: str = "auto",
        format: Format = COMPRESSED,
        drops_inputs: bool = False,
    ) -> None:
        """Take the checkpoint's names of the linears that a fused layer joins: ``parts``, by default ``prefix`` alone.

        An ``adapter_rank`` of 0 means no resident adapter. With ``drops_inputs``, the checkpoint has activation scales,
        which are loaded and dropped, because activations stay in 16 bits.
        """
        self.prefix, self.parts, self.adapter_rank, self.kernel = prefix, parts or [prefix], adapter_rank, kernel
        self.format, self.drops_inputs = format, drops_inputs

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        N, K, widths = sum(output_partition_sizes), input_size_per_partition, list(output_partition_sizes)
        if K % nvfp4.GROUP_SIZE:
            raise ValueError(
                f"{self.prefix}: {K} input columns on this rank; NVFP4 needs a multiple of {nvfp4.GROUP_SIZE}. "
                'Use a smaller --tensor-parallel-size, or keep the layer in BF16 ("ignore")'
            )
        layer.qerl_prefix, layer.logical_widths, layer.params_dtype = self.prefix, widths, params_dtype
        layer.output_size_per_partition, layer.input_size_per_partition = N, K
        self.layout = layouts.choose(params_dtype, self.kernel)
        if self.adapter_rank:
            resident.create(layer, widths, K, self.parts, self.adapter_rank, params_dtype)
        self.is_dummy = loads_dummy_weights()
        self._register_empty(layer, N, K, extra["weight_loader"])

    def _register_empty(self, layer: torch.nn.Module, N: int, K: int, load: Loader) -> None:
        """Register the parameters that the checkpoint fills; ``load`` is vLLM's loader of one part."""
        dimensions = {"input_dim": 1, "output_dim": 0}
        self.arrivals: dict[str, Arrivals] = {}
        makers = (ModelWeightParameter, GroupQuantScaleParameter, PerTensorScaleParameter)
        tensors = _empty(N, K, len(layer.logical_widths))
        for name, make, data in zip(self.format.packed_names, makers, tensors, strict=True):
            kwargs = {} if make is PerTensorScaleParameter else dimensions
            self.arrivals[name] = register(layer, self.prefix, name, make, load, data=data, **kwargs)
        if self.drops_inputs:
            unused = PerTensorScaleParameter(data=torch.zeros_like(tensors[2]), weight_loader=load)
            layer.register_parameter(self.format.input_scale, unused)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Move the layer to its layout; raise CheckpointError if a tensor has not arrived or holds illegal values."""
        if not self.is_dummy:
            for arrivals in self.arrivals.values():
                arrivals.check("; quantize the model again (qerl quantize)")
            self._note_groups(layer, self.arrivals[self.format.codes])
        self._take_canonical_names(layer)
        if self.is_dummy:
            _fill_dummy(layer)
        else:
            packed = (layer.weight_packed.data, layer.weight_scale.data)
            codes, scales = (tensor.split(layer.logical_widths) for tensor in packed)
            for part in zip(codes, scales, layer.weight_global_scale.data, strict=True):
                check_tensors(self.prefix, *part)
        self.layout = self.layout.prepare(layer)

    def _note_groups(self, layer: torch.nn.Module, arrivals: "Arrivals") -> None:
        """Note which of vLLM's parts belong to which linear, where the checkpoint has fewer, as an in_proj_qkv."""
        if len(self.parts) < len(layer.logical_widths) and len(arrivals.groups) == len(self.parts):
            layer.qerl_groups = sorted(arrivals.groups)

    def _take_canonical_names(self, layer: torch.nn.Module) -> None:
        """Leave the layer with the tensors of compressed-tensors alone: codes, block scales and divisors."""
        if self.drops_inputs:
            delattr(layer, self.format.input_scale)
        if self.format == COMPRESSED:
            return
        codes, block_scales, scale = (getattr(layer, name).data for name in self.format.packed_names)
        for name in self.format.packed_names:
            delattr(layer, name)
        divisors = scale if self.is_dummy else self.format.divisor(self.prefix, scale)
        for name, data in zip(COMPRESSED.packed_names, (codes, block_scales, divisors), strict=True):
            layer.register_parameter(name, Parameter(data, requires_grad=False))

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply ``x: (..., K)`` -> ``(..., N)``."""
        return self.layout.apply(layer, x, bias)


@register_weight_loader_v2_supported_method
class QerlOnlineLinearMethod(QerlLinearMethod):
    """Compute one layer of a BF16 checkpoint, quantized as soon as its last part has arrived.

    A layer is held in BF16 only while its parts arrive. One tensor scale covers all parts of a fused layer and all
    tensor-parallel ranks, so the weights equal those that `qerl quantize` writes.
    """

    def _register_empty(self, layer: torch.nn.Module, N: int, K: int, load: Loader) -> None:
        self.device, self.load = torch.get_default_device(), load
        self.arrived = Arrivals(len(layer.logical_widths), f"{self.prefix}.weight")

        def load_part(param: Parameter, loaded: torch.Tensor, *shard: Any) -> None:
            self._load_part(layer, loaded, *shard)

        if self.is_dummy:
            self._register(layer, *_empty(N, K, len(layer.logical_widths)))
            return
        # on the meta device it takes no memory; the real tensor exists only while its parts arrive
        data = torch.empty(N, K, dtype=layer.params_dtype, device="meta")
        weight = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=load_part)
        layer.register_parameter("weight", weight)
        self.staging: ModelWeightParameter | None = None

    def _load_part(self, layer: torch.nn.Module, loaded: torch.Tensor, *shard: Any) -> None:
        if self.staging is None:
            if self.arrived.complete:
                raise CheckpointError(f"{self.prefix}.weight appears twice in the checkpoint")
            # BF16 whatever the engine's dtype: `qerl quantize` also rounds the source and its amax to BF16
            data = torch.empty(layer.weight.shape, dtype=torch.bfloat16, device=self.device)
            self.staging = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=self.load)
        self.load(self.staging, loaded, *shard)
        self.arrived.add(*shard)
        if self.arrived.complete:
            w = self.staging.data  # (N, K)
            self.staging = None
            if not bool(torch.isfinite(w).all()):
                raise CheckpointError(f"{self.prefix}.weight holds NaN or infinite values; the checkpoint is damaged")
            amax = vllm_worker.max_over_tensor_parallel_ranks(w.abs().amax())
            packed = nvfp4.quantize(w, nvfp4.divisor_from_amax(amax))
            del layer.weight
            divisors = packed.divisor.repeat(len(layer.logical_widths))
            self._register(layer, packed.codes, packed.block_scales, divisors)

    def _register(
        self, layer: torch.nn.Module, codes: torch.Tensor, scales: torch.Tensor, divisors: torch.Tensor
    ) -> None:
        layer.weight_packed = Parameter(codes, requires_grad=False)
        layer.weight_scale = Parameter(scales, requires_grad=False)
        layer.weight_global_scale = Parameter(divisors, requires_grad=False)
        for parameter in (layer.weight_packed, layer.weight_scale, layer.weight_global_scale):
            set_weight_attrs(parameter, {"weight_loader": self.load})

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Move the layer to its layout. Raises CheckpointError if a part of the weight never arrived."""
        if self.is_dummy:
            _fill_dummy(layer)
        else:
            self.arrived.check()
        self._note_groups(layer, self.arrived)
        self.layout = self.layout.prepare(layer)


class AdaptedLinearMethod(UnquantizedLinearMethod):
    """Compute a layer that stays unquantized and still carries the policy's resident adapter."""

    def __init__(self, prefix: str, parts: list[str], adapter_rank: int) -> None:
        super().__init__()
        self.prefix, self.parts, self.adapter_rank = prefix, parts, adapter_rank

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        *sizes: Any,
        **extra: Any,
    ) -> None:
        super().create_weights(layer, input_size_per_partition, output_partition_sizes, *sizes, **extra)
        layer.qerl_prefix = self.prefix
        place = output_partition_sizes, input_size_per_partition, self.parts, self.adapter_rank
        resident.create(layer, *place, layer.weight.dtype)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply ``x: (..., K)`` -> ``(..., N)``."""
        return resident.add(layer, x, super().apply(layer, x, bias))


class Arrivals:
    """Note which parts of the parameter ``name`` have been loaded, and in ``groups`` those that came as one tensor."""

    def __init__(self, parts: int, name: str) -> None:
        self.parts, self.name = parts, name
        self.seen: set[Any] = set()
        self.groups: set[tuple[int, ...]] = set()

    def add(self, *shard: Any) -> None:
        self.groups.update(item if isinstance(item, tuple) else (item,) for item in shard)
        # without a shard id, the checkpoint holds the fused tensor
        self.seen.update([part for item in shard for part in (item if isinstance(item, tuple) else (item,))] or ["all"])

    @property
    def complete(self) -> bool:
        return "all" in self.seen or None in self.seen or len(self.seen) >= self.parts

    def check(self, way_out: str = "") -> None:
        """Raise CheckpointError, which ends with ``way_out``, if a part has not been loaded."""
        if not self.complete:
            raise CheckpointError(f"{self.name} is missing from the checkpoint, or only a part of it is there{way_out}")

    def counting(self, load: Loader) -> Loader:
        def load_and_count(param: Parameter, loaded: torch.Tensor, *shard: Any) -> None:
            if param.dtype != loaded.dtype and 1 in (param.dtype.itemsize, loaded.dtype.itemsize):
                raise CheckpointError(
                    f"{self.name}: the checkpoint holds {loaded.dtype} where its quantization_config promises"
                    f" {param.dtype}: this layer is stored otherwise than that says; {WAY_OUT}"
                )
            load(param, loaded, *shard)
            self.add(*shard)

        return load_and_count


def loads_dummy_weights() -> bool:
    """Return True if the engine that is being built fills its layers with random weights."""
    return get_current_vllm_config().load_config.load_format == "dummy"


def register(
    layer: torch.nn.Module, prefix: str, name: str, make: Callable[..., Parameter], load: Loader, **arguments: Any
) -> Arrivals:
    """Register ``make(**arguments)`` as the parameter ``name`` of a layer -> the record of its parts as they load."""
    arrivals = Arrivals(len(layer.logical_widths), f"{prefix}.{name}")
    layer.register_parameter(name, make(weight_loader=arrivals.counting(load), **arguments))
    return arrivals


def _empty(N: int, K: int, parts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scales = torch.zeros(N, K // nvfp4.GROUP_SIZE, dtype=torch.float8_e4m3fn)
    # fp32 whatever the engine's dtype: a divisor of a 7B model's down_proj, 1e5, is beyond float16
    # a divisor that no loader fills stays 0, which check_tensors refuses
    return torch.zeros(N, K // 2, dtype=torch.uint8), scales, torch.zeros(parts, dtype=torch.float32)


def _fill_dummy(layer: torch.nn.Module) -> None:
    """Fill a layer with random legal weights of a realistic size, for ``--load-format dummy``."""
    codes, scales = layer.weight_packed.data, layer.weight_scale.data
    generator = torch.Generator(codes.device).manual_seed(1234)
    codes.copy_(torch.randint(0, 256, codes.shape, generator=generator, device=codes.device, dtype=torch.uint8))
    scales.copy_((64 + 256 * torch.rand(scales.shape, generator=generator, device=codes.device)).to(scales.dtype))
    # a random code is about 3 in size and a block scale about 190; trained weights are about 1 / sqrt(K)
    layer.weight_global_scale.data.fill_(3 * 190 * (2 * codes.shape[1]) ** 0.5)
