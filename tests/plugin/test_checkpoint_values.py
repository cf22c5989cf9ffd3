"""Values of packed tensors that would poison a layer are refused by name, whatever file they came from."""

import pytest
import torch
from qerl_kernels.nvfp4 import quantize

from qerl_vllm_plugin.weights.checkpoint import check_tensors
from qerl_vllm_plugin.wire.safetensors_file import CheckpointError


def packed() -> dict[str, torch.Tensor]:
    weight = quantize(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16())
    return {"codes": weight.codes, "block_scales": weight.block_scales, "divisor": weight.divisor.reshape(1)}


def with_scale_byte(byte: int) -> torch.Tensor:
    scales = packed()["block_scales"].view(torch.uint8).clone()
    scales[7, 2] = byte
    return scales.view(torch.float8_e4m3fn)


BAD_VALUES = {
    "scale is NaN": (
        {"block_scales": with_scale_byte(0x7F)},
        r"weight_scale: 1 .*NaN or.* row 7, block 2.*0 to 448",
    ),
    "scale is negative NaN": ({"block_scales": with_scale_byte(0xFF)}, "NaN or negative, the first at row 7, block 2"),
    "scale is negative": ({"block_scales": with_scale_byte(0x81)}, "NaN or negative, the first at row 7, block 2"),
    "scales are infinite": (
        {"block_scales": torch.full((32, 4), float("inf"))},
        r"torch\.float32.*not uint8",
    ),
    "divisor is zero": ({"divisor": torch.zeros(1)}, r"weight_global_scale: 0\.0 is not a usable tensor scale"),
    "divisor is infinite": ({"divisor": torch.tensor([float("inf")])}, "weight_global_scale: inf is not a usable"),
    "divisor is NaN": ({"divisor": torch.tensor([float("nan")])}, "weight_global_scale: nan is not a usable"),
    "divisor is negative": ({"divisor": torch.tensor([-1.0])}, r"weight_global_scale: -1\.0 is not a usable"),
    "tensor scale overflows": ({"divisor": torch.tensor([1e-45])}, "it and its reciprocal must be positive"),
    "divisor for each row": ({"divisor": torch.ones(32)}, r"must be \(N, K/2\), \(N, K/16\) and \(1,\)"),
    "groups of 32": ({"block_scales": packed()["block_scales"][:, ::2].contiguous()}, r"do not fit"),
    "codes are signed": ({"codes": packed()["codes"].view(torch.int8)}, r"are torch\.int8.*not uint8"),
    "columns not a multiple of 16": ({"codes": packed()["codes"][:, :30].contiguous()}, "do not fit"),
}


@pytest.mark.parametrize(("change", "message"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_values_that_would_poison_a_layer_are_refused_by_name(change, message):
    check_tensors("a.layer", **packed())
    with pytest.raises(CheckpointError, match=r"^a\.layer.*" + message + ".*qerl quantize"):
        check_tensors("a.layer", **(packed() | change))
