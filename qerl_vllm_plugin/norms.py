"""Give vLLM's RMSNorms an fp32 weight under ``--quantization qerl_nvfp4``, so that small noise is not rounded away.

A BF16 weight near 1 moves in steps of 2^-7: noise of sigma 5e-4 would change none of them. An fp32 weight takes all of
it. Engine and trainer share one definition of the arithmetic, ``qerl_kernels.naive.rms_norm``, which rounds once, at
the end. Stock vLLM and transformers round twice, so about a quarter of the outputs differ from theirs in the last bit.

Gemma and Qwen3.5 store w and multiply by 1 + w. These norms round once everywhere. Their weight stays w, as in the
checkpoint, also under noise and for trained norms. 1 + (w + Z) equals the (1 + w) + Z of an ordinary norm, but for
fp32 rounding.
"""

from typing import Any, TypeAlias

import torch
from qerl_kernels.naive import rms_norm
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from qerl_vllm_plugin import NAME

Output: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def _is_ours() -> bool:
    """Return True if the layer that is being built belongs to a model under qerl_nvfp4."""
    vllm_config = get_current_vllm_config_or_none()
    quantization = vllm_config.quant_config if vllm_config is not None else None
    return quantization is not None and quantization.get_name() == NAME


class _Fp32Weight:
    """Give one of vLLM's norms an fp32 weight and one rounding under qerl_nvfp4; it stands first among the bases."""

    weight: torch.nn.Parameter
    variance_epsilon: float

    def __init__(self, hidden_size: int, *given: Any, **named: Any) -> None:
        super().__init__(hidden_size, *given, **named)  # type: ignore[call-arg]
        self.is_fp32 = getattr(self, "has_weight", True) and _is_ours()
        if self.is_fp32:
            if (part := getattr(self, "variance_size_override", None)) is not None:
                raise ValueError(
                    f"qerl_nvfp4 does not support an RMSNorm over a part of its input ({part} of {hidden_size} "
                    "channels); serve this model without it"
                )
            self.weight = torch.nn.Parameter(self.weight.data.float(), requires_grad=False)

    def factor(self) -> torch.Tensor:
        """Return what the normalized input is multiplied by: (H,) fp32."""
        return self.weight.data

    def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Output:
        """Return the norm of ``x: (..., H)``; with a residual, the norm of the rounded sum and the sum itself."""
        if not self.is_fp32:
            return super().forward_native(x, residual)  # type: ignore[misc]
        if residual is None:
            return rms_norm(x, self.factor(), self.variance_epsilon)
        x = x + residual  # rounded before the norm, as in transformers: the residual stream has the activation dtype
        return rms_norm(x, self.factor(), self.variance_epsilon), x

    def forward_cuda(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Output:
        return self.forward_native(x, residual) if self.is_fp32 else super().forward_cuda(x, residual)  # type: ignore[misc]

    def forward_xpu(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Output:
        return self.forward_native(x, residual) if self.is_fp32 else super().forward_xpu(x, residual)  # type: ignore[misc]


class QerlRMSNorm(_Fp32Weight, RMSNorm):
    """Replace vLLM's RMSNorm; nothing changes outside of qerl_nvfp4."""


class QerlGemmaRMSNorm(_Fp32Weight, GemmaRMSNorm):
    """Replace vLLM's norm that multiplies by 1 + w, whose stored w is the fp32 weight."""

    def factor(self) -> torch.Tensor:
        return 1.0 + self.weight.data


OURS: tuple[tuple[type[CustomOp], type[CustomOp]], ...] = ((RMSNorm, QerlRMSNorm), (GemmaRMSNorm, QerlGemmaRMSNorm))


def install() -> None:
    """Register the norm classes with vLLM, for norms built later; raise RuntimeError if another plugin has done so."""
    for stock, ours in OURS:
        taken = op_registry_oot.get(stock.__name__)
        if taken is not None and taken is not ours:
            raise RuntimeError(
                f"qerl_nvfp4 needs its own {stock.__name__}, but {taken.__module__}.{taken.__qualname__} is registered "
                "in its place; disable that plugin (VLLM_PLUGINS=qerl loads this one alone)"
            )
        if taken is None:
            CustomOp.register_oot(name=stock.__name__)(ours)
