"""What ours is compared with: cuBLAS on BF16 weights, and vLLM's Marlin and Humming kernels on the same codes."""

from collections.abc import Callable

import torch

Product = Callable[[torch.Tensor], torch.Tensor]


def bf16(w: torch.Tensor) -> Product:
    """cuBLAS, ``w: (N, K)`` bfloat16."""
    return lambda x: torch.nn.functional.linear(x, w)


def _layer(codes: torch.Tensor, block_scales: torch.Tensor, tensor_scale: torch.Tensor) -> torch.nn.Module:
    """A layer as vLLM's kernels expect it after loading; ``tensor_scale: ()`` is a factor, not a divisor."""
    N, K = codes.shape[0], 2 * codes.shape[1]
    layer = torch.nn.Module()
    layer.output_size_per_partition, layer.input_size_per_partition = N, K
    layer.output_partition_sizes, layer.has_bias, layer.params_dtype = [N], False, torch.bfloat16
    tensors = {"weight": codes, "weight_scale": block_scales, "weight_global_scale": tensor_scale.reshape(1)}
    for name, tensor in tensors.items():
        setattr(layer, name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    return layer


def marlin(codes: torch.Tensor, block_scales: torch.Tensor, tensor_scale: torch.Tensor) -> Product:
    """vLLM's default for 4-bit weights and 16-bit activations."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4

    layer = _layer(codes, block_scales, tensor_scale.reshape(()))
    layer.weight_global_scale = torch.nn.Parameter(tensor_scale.reshape(()).clone(), requires_grad=False)
    marlin_utils_fp4.prepare_fp4_layer_for_marlin(layer)
    return lambda x: marlin_utils_fp4.apply_fp4_marlin_linear(
        input=x,
        weight=layer.weight,
        weight_scale=layer.weight_scale,
        weight_global_scale=layer.weight_global_scale,
        workspace=layer.workspace,
        size_n=layer.output_size_per_partition,
        size_k=layer.input_size_per_partition,
    )


def humming(codes: torch.Tensor, block_scales: torch.Tensor, tensor_scale: torch.Tensor) -> Product:
    """vLLM's ``--linear-backend humming``; compiles at the first call of each shape."""
    from vllm.model_executor.kernels.linear.nvfp4.humming import HummingNvFp4LinearKernel

    layer = _layer(codes, block_scales, tensor_scale)
    kernel = HummingNvFp4LinearKernel.__new__(HummingNvFp4LinearKernel)
    kernel.process_weights_after_loading(layer)
    return lambda x: kernel.apply_weights(layer, x)
