"""Wrap what our kernel is compared with: cuBLAS on BF16 weights, and vLLM's Marlin and Humming on the same codes."""

import copy
from collections.abc import Callable

import torch

Product = Callable[[torch.Tensor], torch.Tensor]


def bf16(w: torch.Tensor) -> Product:
    """Return cuBLAS's product by ``w: (N, K)`` bfloat16."""
    return lambda x: torch.nn.functional.linear(x, w)


def _layer(codes: torch.Tensor, block_scales: torch.Tensor, tensor_scale: torch.Tensor) -> torch.nn.Module:
    """Return a layer as vLLM's kernels expect it after loading; ``tensor_scale: ()`` is a factor, not a divisor."""
    N, K = codes.shape[0], 2 * codes.shape[1]
    layer = torch.nn.Module()
    layer.output_size_per_partition, layer.input_size_per_partition = N, K
    layer.output_partition_sizes, layer.has_bias, layer.params_dtype = [N], False, torch.bfloat16
    tensors = {"weight": codes, "weight_scale": block_scales, "weight_global_scale": tensor_scale.reshape(1)}
    for name, tensor in tensors.items():
        setattr(layer, name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    return layer


class Marlin:
    """Multiply as vLLM does by default for 4-bit weights and 16-bit activations."""

    def __init__(self, codes: torch.Tensor, block_scales: torch.Tensor, tensor_scale: torch.Tensor):
        from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4

        self.utils = marlin_utils_fp4
        self.layer = _layer(codes, block_scales, tensor_scale.reshape(()))
        self.layer.weight_global_scale = torch.nn.Parameter(tensor_scale.reshape(()).clone(), requires_grad=False)
        self.utils.prepare_fp4_layer_for_marlin(self.layer)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        return self.utils.apply_fp4_marlin_linear(
            input=x,
            weight=layer.weight,
            weight_scale=layer.weight_scale,
            weight_global_scale=layer.weight_global_scale,
            workspace=layer.workspace,
            size_n=layer.output_size_per_partition,
            size_k=layer.input_size_per_partition,
        )


class Humming:
    """Multiply as vLLM's ``--linear-backend humming``, which compiles at the first call of each shape."""

    def __init__(self, codes: torch.Tensor, block_scales: torch.Tensor, tensor_scale: torch.Tensor):
        from vllm.model_executor.kernels.linear.nvfp4.humming import HummingNvFp4LinearKernel

        self.layer = _layer(codes, block_scales, tensor_scale)
        self.kernel = HummingNvFp4LinearKernel.__new__(HummingNvFp4LinearKernel)
        self.kernel.process_weights_after_loading(self.layer)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernel.apply_weights(self.layer, x)


marlin, humming = Marlin, Humming


def again(product: Marlin | Humming) -> Marlin | Humming:
    """Return the same product on a copy of its tensors, so that its weights are cold."""
    other = copy.copy(product)
    other.layer = copy.deepcopy(product.layer)
    return other
