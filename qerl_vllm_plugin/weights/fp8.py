"""Expand the FP8 layers of a checkpoint that mixes them with NVFP4 ones; the layers run in the engine's dtype."""

from typing import Any

import torch
from torch.nn import Parameter
from vllm.model_executor.layers.linear import UnquantizedLinearMethod, register_weight_loader_v2_supported_method
from vllm.model_executor.parameter import ChannelQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter

from qerl_vllm_plugin.weights.formats import expand_fp8
from qerl_vllm_plugin.weights.linear import Loader, loads_dummy_weights, register


@register_weight_loader_v2_supported_method
class Fp8LinearMethod(UnquantizedLinearMethod):
    """Compute one FP8 layer, which is expanded when it has been loaded.

    Its scales are one for each row, for each part or for the whole layer. The weight is rounded to BF16 and then cast
    to the engine's dtype.
    """

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

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
        N, K = sum(output_partition_sizes), input_size_per_partition
        layer.logical_widths = list(output_partition_sizes)
        load: Loader = extra["weight_loader"]
        self.params_dtype, self.is_dummy = params_dtype, loads_dummy_weights()

        def load_scale(param: Parameter, loaded: torch.Tensor, *shard: Any) -> None:
            if loaded.numel() > 1:
                load(param, loaded, *shard)
            else:  # one scale for all rows of this part
                _rows_of(param.data, layer.logical_widths, *shard).fill_(float(loaded))

        weight = {"data": torch.zeros(N, K, dtype=torch.float8_e4m3fn), "input_dim": 1, "output_dim": 0}
        scale = {"data": torch.zeros(N, 1, dtype=torch.float32), "output_dim": 0}
        self.arrivals = [
            register(layer, self.prefix, "weight", ModelWeightParameter, load, **weight),
            register(layer, self.prefix, "weight_scale", ChannelQuantScaleParameter, load_scale, **scale),
        ]
        unused = torch.zeros(len(output_partition_sizes), dtype=torch.float32)
        layer.register_parameter("input_scale", PerTensorScaleParameter(data=unused, weight_loader=load))

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Expand the layer from FP8. Raises CheckpointError if a tensor never arrived or is not finite."""
        if not isinstance(getattr(layer, "weight_scale", None), Parameter):
            return super().process_weights_after_loading(layer)  # it has been expanded already
        for arrivals in () if self.is_dummy else self.arrivals:
            arrivals.check()
        weight = expand_fp8(self.prefix, layer.weight.data, layer.weight_scale.data).to(self.params_dtype)
        del layer.weight, layer.weight_scale, layer.input_scale
        layer.weight = Parameter(weight, requires_grad=False)
        return super().process_weights_after_loading(layer)


def _rows_of(rows: torch.Tensor, widths: list[int], shard: Any = None) -> torch.Tensor:
    """Return the rows of one part of a fused layer, by vLLM's shard id: "q", "k", "v" or a number; None for all."""
    if shard is None:
        return rows
    part = "qkv".index(shard) if isinstance(shard, str) else shard
    first = sum(widths[:part])
    return rows[first : first + widths[part]]
