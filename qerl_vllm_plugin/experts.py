"""Mixture-of-experts layers of packed checkpoints, served without an adapter."""

from typing import Any

import torch
from qerl_kernels import nvfp4
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4 import (  # noqa: E501
    CompressedTensorsW4A4Nvfp4MoEMethod,
)
from vllm.platforms import current_platform

_PARTS = ("weight_packed", "weight_scale", "weight_global_scale")


def experts_method(layer: Any, prefix: str, *, online: bool) -> Any:
    """The method for one layer of experts.

    CUDA: vLLM's own NVFP4 experts with 16-bit activations. CPU: the experts are dequantized to BF16 when loaded, which
    rounds the product of code, block scale and tensor scale once.

    Raises ValueError for a BF16 checkpoint: its experts are not quantized on the way in.
    """
    if online:
        raise ValueError(
            f"{prefix}: the experts of a BF16 checkpoint cannot be quantized on the way in; quantize the model first: "
            "qerl quantize SOURCE DESTINATION"
        )
    if current_platform.is_cuda():
        return CompressedTensorsW4A4Nvfp4MoEMethod(layer.moe_config, prefix, use_a16=True)
    return _DequantizedExperts(layer.moe_config)


class _DequantizedExperts(UnquantizedFusedMoEMethod):
    group_size = nvfp4.GROUP_SIZE

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        CompressedTensorsW4A4Nvfp4MoEMethod.create_weights(self, layer, *args, **kwargs)
        for name in ("w13_input_global_scale", "w2_input_global_scale"):  # for 4-bit activations
            delattr(layer, name)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        for which in ("w13", "w2"):
            codes, scales, divisors = (getattr(layer, f"{which}_{part}").data for part in _PARTS)
            experts, N = codes.shape[:2]
            divisors = divisors.float().view(experts, -1)
            row_scale = (1.0 / divisors).repeat_interleave(N // divisors.shape[1], dim=1)  # (experts, N)
            w = torch.stack(
                [
                    (nvfp4.dequantize(codes[e], scales[e]).float() * row_scale[e, :, None]).to(layer.params_dtype)
                    for e in range(experts)
                ]
            )
            for part in _PARTS:
                delattr(layer, f"{which}_{part}")
            layer.register_parameter(f"{which}_weight", torch.nn.Parameter(w, requires_grad=False))
        super().process_weights_after_loading(layer)
