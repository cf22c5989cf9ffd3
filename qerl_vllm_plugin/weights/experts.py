"""Load the mixture-of-experts layers of a checkpoint, packed or left in BF16; they have no resident adapter."""

from typing import Any

import torch
from qerl_kernels import nvfp4
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4 import (  # noqa: E501
    CompressedTensorsW4A4Nvfp4MoEMethod,
)
from vllm.platforms import current_platform

from qerl_vllm_plugin.weights.formats import COMPRESSED, NVFP4, Nvfp4Scheme
from qerl_vllm_plugin.wire.safetensors_file import DOWNLOAD_AGAIN, CheckpointError


def part_names(prefix: str) -> list[str]:
    """Return the checkpoint's names of the linears of expert 0, which stands for all experts."""
    return [f"{prefix}.0.{part}" for part in ("gate_proj", "up_proj", "down_proj")]


def experts_method(layer: Any, prefix: str, scheme: Nvfp4Scheme | None, kinds: set[str | None]) -> Any:
    """Return the method for one layer of experts.

    ``kinds`` are the ways in which ``part_names`` are stored; {None} keeps the experts in BF16. ``scheme`` is None for
    a BF16 checkpoint.

    On CUDA, packed experts run in vLLM's own NVFP4 kernels with 16-bit activations. On CPU, they are dequantized to the
    engine's dtype when loaded, which rounds the product of code, block scale and tensor scale once.

    Raises ValueError for experts of a BF16 checkpoint that are not kept in BF16, as experts are not quantized while
    loading. Raises ValueError for ModelOpt's layout and FP8 experts, and CheckpointError if only some parts are packed.
    """
    if kinds == {None}:
        return _Bf16Experts(layer.moe_config, prefix)
    if scheme is None:
        raise ValueError(
            f"{prefix}: the experts of a BF16 checkpoint cannot be quantized on the way in; quantize the model first "
            "(`qerl quantize SOURCE DESTINATION` takes Qwen3-MoE), or keep them and the router in BF16: "
            """--additional-config '{"qerl": {"ignore": ["lm_head", "re:.*experts.*", "re:.*mlp.gate$"]}}'"""
        )
    if len(kinds) > 1:
        raise CheckpointError(f"{prefix}: some parts of the experts are quantized and some are not; quantize all")
    if scheme.format != COMPRESSED or kinds != {NVFP4}:
        raise ValueError(
            f"{prefix}: experts in FP8 or in ModelOpt's layout are not read; write them as compressed-tensors first: "
            "qerl quantize SOURCE DESTINATION"
        )
    kind = _CudaExperts if current_platform.is_cuda() else _DequantizedExperts
    return kind(layer.moe_config, prefix)


def _mark_missing(layer: torch.nn.Module) -> None:
    """Set every expert's tensor scales to NaN, which no checkpoint may hold, so that missing experts are noticed."""
    for which in ("w13", "w2"):
        getattr(layer, f"{which}_weight_global_scale").data.fill_(torch.nan)


def _check_scales(layer: torch.nn.Module, prefix: str) -> None:
    """Raise CheckpointError for an expert that never arrived or has an unusable tensor scale."""
    for which in ("w13", "w2"):
        divisors = getattr(layer, f"{which}_weight_global_scale").data.view(layer.num_experts, -1)
        bad = ~(torch.isfinite(divisors) & (divisors > 0) & torch.isfinite(1 / divisors)).all(1)
        if bad.any():
            raise CheckpointError(
                f"{prefix}: expert {int(bad.nonzero()[0, 0])} (and {int(bad.sum()) - 1} more on this rank) is missing "
                f"from the checkpoint, or has no usable tensor scale ({which}); quantize the model again"
            )


def share_scales(w13: torch.Tensor, w2: torch.Tensor, prefix: str, *, has_slots: bool) -> None:
    """Give gate and up of every expert one tensor scale, as vLLM's kernel requires, in place.

    ``w13: (E, 2)`` and ``w2: (E,)`` are divisors, one over the scales. The product silu(gate) * up is linear in up. So
    the ratio of up's scale to gate's moves into the scale of down, which costs one rounding in fp32 (2^-24).

    Raises CheckpointError where the scales differ and ``has_slots`` is true, because an adapter on up would be scaled
    by the ratio, too. Raises it also where a scale would leave the range of fp32.
    """
    if bool((w13[:, 0] == w13[:, 1]).all()):
        return
    if has_slots:
        raise CheckpointError(
            f"{prefix}: gate_proj and up_proj of an expert have tensor scales of their own, which vLLM's kernel cannot "
            "serve beside --enable-lora; leave it out, or quantize the model from BF16 with `qerl quantize`"
        )
    moved = w2 * (w13[:, 1] / w13[:, 0])
    if not bool((torch.isfinite(moved) & (moved > 0) & torch.isfinite(1 / moved)).all()):
        raise CheckpointError(
            f"{prefix}: the tensor scales of gate_proj and up_proj of an expert differ by more than vLLM's kernel can "
            "serve; quantize the model from BF16 with `qerl quantize`"
        )
    w2.copy_(moved)
    w13[:, 1] = w13[:, 0]


class _Bf16Experts(UnquantizedFusedMoEMethod):
    """Compute BF16 experts by vLLM's method, which would serve uninitialized memory in place of a missing one."""

    def __init__(self, moe: Any, prefix: str) -> None:
        super().__init__(moe)
        self.prefix = prefix

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        for which in ("w13_weight", "w2_weight"):
            getattr(layer, which).data.fill_(torch.nan)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Raise CheckpointError for an expert with a part that never arrived or holds nothing but NaN."""
        w13, w2 = layer.w13_weight.data, layer.w2_weight.data  # (experts, 2 I, H) and (experts, H, I)
        for expert in range(len(w13)):
            parts = dict(zip(("gate_proj", "up_proj"), w13[expert].chunk(2), strict=True)) | {"down_proj": w2[expert]}
            for name, part in parts.items():
                if bool(part.isnan().all()):
                    raise CheckpointError(
                        f"{self.prefix}: {name} of expert {expert} (on this rank) is missing from the checkpoint; "
                        f"{DOWNLOAD_AGAIN}"
                    )
        super().process_weights_after_loading(layer)


class _CudaExperts(CompressedTensorsW4A4Nvfp4MoEMethod):
    def __init__(self, moe: Any, prefix: str) -> None:
        super().__init__(moe, prefix, use_a16=True)
        self.prefix = prefix
        self.has_slots = get_current_vllm_config().lora_config is not None

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        _mark_missing(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        _check_scales(layer, self.prefix)
        w13, w2 = layer.w13_weight_global_scale.data, layer.w2_weight_global_scale.data
        share_scales(w13, w2, self.prefix, has_slots=self.has_slots)
        super().process_weights_after_loading(layer)


class _DequantizedExperts(UnquantizedFusedMoEMethod):
    group_size = nvfp4.GROUP_SIZE

    def __init__(self, moe: Any, prefix: str) -> None:
        super().__init__(moe)
        self.prefix = prefix

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        CompressedTensorsW4A4Nvfp4MoEMethod.create_weights(self, layer, *args, **kwargs)
        _mark_missing(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        for name in ("w13_input_global_scale", "w2_input_global_scale"):  # used for 4-bit activations only
            delattr(layer, name)
        _check_scales(layer, self.prefix)
        for which in ("w13", "w2"):
            codes, scales, divisors = (getattr(layer, f"{which}_{part}").data for part in COMPRESSED.packed_names)
            experts, N = codes.shape[:2]
            divisors = divisors.float().view(experts, -1)
            row_scale = (1.0 / divisors).repeat_interleave(N // divisors.shape[1], dim=1)  # (experts, N)
            w = torch.stack(
                [
                    (nvfp4.dequantize(codes[e], scales[e]).float() * row_scale[e, :, None]).to(layer.params_dtype)
                    for e in range(experts)
                ]
            )
            for part in COMPRESSED.packed_names:
                delattr(layer, f"{which}_{part}")
            layer.register_parameter(f"{which}_weight", torch.nn.Parameter(w, requires_grad=False))
        super().process_weights_after_loading(layer)
