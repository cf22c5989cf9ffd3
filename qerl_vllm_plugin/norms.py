"""RMSNorm with an fp32 weight, in use only under ``--quantization qerl_nvfp4``; also the kind that is stored as w and
used as 1 + w (Gemma, Qwen3.5).

A BF16 weight near 1 moves in steps of 2^-7: noise of sigma 5e-4 would change none of them. In fp32 all of it arrives.
The arithmetic is the one definition that engine and trainer share, ``qerl_kernels.naive.rms_norm``: one rounding, at
the end. Stock vLLM and transformers round twice, so that about a quarter of the outputs differ from theirs in the last
bit. Norms of 1 + w round once everywhere. They keep w, as the checkpoint does, and so do the noise and trained norms:
1 + (w + Z) is the (1 + w) + Z of an ordinary norm, but for the rounding of fp32.
"""

from typing import TypeAlias

import torch
from qerl_kernels.naive import rms_norm
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from qerl_vllm_plugin import NAME

Output: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def _is_ours() -> bool:
    """Whether the layer that is being built is one of a model under qerl_nvfp4."""
    vllm_config = get_current_vllm_config_or_none()
    quantization = vllm_config.quant_config if vllm_config is not None else None
    return quantization is not None and quantization.get_name() == NAME


def _norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float) -> Output:
    """``x: (..., H)``; with a residual (norm of the sum, the sum rounded to the dtype of ``x``)."""
    if residual is None:
        return rms_norm(x, weight, epsilon)
    x = x + residual  # rounded first, as transformers does: the residual stream is kept in the activation dtype
    return rms_norm(x, weight, epsilon), x


class QerlRMSNorm(RMSNorm):
    """vLLM's RMSNorm; under qerl_nvfp4 with an fp32 weight, elsewhere unchanged."""

    weight: torch.nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        var_hidden_size: int | None = None,
        has_weight: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, var_hidden_size, has_weight, dtype)
        self.is_fp32 = has_weight and _is_ours()
        if self.is_fp32:
            if self.variance_size_override is not None:
                raise ValueError(
                    "qerl_nvfp4 does not support an RMSNorm over a part of its input "
                    f"({var_hidden_size} of {hidden_size} channels); serve this model without it"
                )
            self.weight = torch.nn.Parameter(self.weight.data.float(), requires_grad=False)

    def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Output:
        if not self.is_fp32:
            return super().forward_native(x, residual)
        return _norm(x, residual, self.weight.data, self.variance_epsilon)

    def forward_cuda(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Output:
        return self.forward_native(x, residual) if self.is_fp32 else super().forward_cuda(x, residual)

    def forward_xpu(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Output:
        return self.forward_native(x, residual) if self.is_fp32 else super().forward_xpu(x, residual)


class QerlGemmaRMSNorm(GemmaRMSNorm):
    """vLLM's norm that multiplies by 1 + w; under qerl_nvfp4 with an fp32 w, elsewhere unchanged."""

    weight: torch.nn.Parameter

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(hidden_size, eps)
        self.is_fp32 = _is_ours()
        if self.is_fp32:
            self.weight = torch.nn.Parameter(self.weight.data.float(), requires_grad=False)

    def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Output:
        if not self.is_fp32:
            return super().forward_native(x, residual)
        return _norm(x, residual, 1.0 + self.weight.data, self.variance_epsilon)

    def forward_cuda(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Output:
        return self.forward_native(x, residual) if self.is_fp32 else super().forward_cuda(x, residual)

    def forward_xpu(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Output:
        return self.forward_native(x, residual) if self.is_fp32 else super().forward_xpu(x, residual)


OURS: tuple[tuple[type[CustomOp], type[CustomOp]], ...] = ((RMSNorm, QerlRMSNorm), (GemmaRMSNorm, QerlGemmaRMSNorm))


def install() -> None:
    """Register the classes with vLLM, once in a process; they take effect for norms built afterwards.

    Raises RuntimeError if another plugin has registered a norm of its own in the place of one.
    """
    for stock, ours in OURS:
        taken = op_registry_oot.get(stock.__name__)
        if taken is not None and taken is not ours:
            raise RuntimeError(
                f"qerl_nvfp4 needs its own {stock.__name__}, but {taken.__module__}.{taken.__qualname__} is registered "
                "in its place; disable that plugin (VLLM_PLUGINS=qerl loads this one alone)"
            )
        if taken is None:
            CustomOp.register_oot(name=stock.__name__)(ours)
