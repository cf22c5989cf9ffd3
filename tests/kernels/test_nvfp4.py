"""Test the NVFP4 format: every byte against an independent fp64 table, rounding, round trips and extremes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qerl_kernels.nvfp4 import dequantize, pack, quantize, round_to_codes, unpack
from qerl_kernels.scale_search import quantize_mse


def value_of_code(code: int) -> float:
    """Decode E2M1 by its definition: a sign, two exponent bits of bias 1, one mantissa bit, subnormals below 1."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -magnitude if sign else magnitude


def value_of_scale(byte: int) -> float:
    """Decode E4M3FN by its definition: a sign, four exponent bits of bias 7, three mantissa bits, S.1111.111 is NaN."""
    sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if sign else magnitude


def test_promise_01_every_code_and_scale_byte_dequantizes_exactly():
    codes = pack(torch.arange(16, dtype=torch.uint8).repeat(256, 1))  # (256, 8): all codes in each row
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).unsqueeze(1)  # (256, 1): all scales
    expected = torch.tensor(
        [[value_of_code(c) * value_of_scale(s) for c in range(16)] for s in range(256)], dtype=torch.float64
    )
    actual = dequantize(codes, scales)
    assert actual.dtype == torch.bfloat16
    assert torch.equal(actual.double().nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(torch.signbit(actual)[1:127], torch.signbit(expected)[1:127])


@given(st.lists(st.integers(0, 255), min_size=8, max_size=64).filter(lambda b: len(b) % 8 == 0))
def test_unpack_then_pack_gives_the_same_bytes(data):
    codes = torch.tensor(data, dtype=torch.uint8).view(-1, 8)
    assert torch.equal(pack(unpack(codes)), codes)
    assert unpack(codes)[0, 0] == data[0] % 16 and unpack(codes)[0, 1] == data[0] // 16


@given(st.floats(-8, 8, width=32))
def test_rounding_finds_the_nearest_code_and_ties_go_to_the_even_one(x):
    code = int(round_to_codes(torch.tensor(x, dtype=torch.float32)))
    distances = [abs(value_of_code(c) - x) for c in range(16)]
    assert abs(value_of_code(code) - x) == min(distances)
    rivals = {c % 8 for c in range(16) if distances[c] == min(distances)}
    if len(rivals) > 1:  # a tie between neighbours
        assert code % 2 == 0
    assert (code >= 8) == (x < 0)


def test_every_bf16_number_is_rounded_to_the_nearest_code():
    x = torch.arange(65536).to(torch.uint16).view(torch.bfloat16)
    x = x[x.isfinite()]
    magnitudes = torch.tensor([value_of_code(c) for c in range(8)], dtype=torch.float64)
    distances = (x.double().abs().clamp(max=8).unsqueeze(1) - magnitudes).abs()  # (65280, 8)
    distances[:, 1::2] += 1e-12  # between two equally near codes, prefer the even one
    assert torch.equal(round_to_codes(x).long(), distances.argmin(dim=1) + 8 * (x < 0))


@settings(deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1e-30, 1e-6, 1.0, 1e6, 1e30]))
def test_the_error_is_at_most_half_a_step(seed, size):
    w = (torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)) * size).bfloat16()
    weight = quantize(w)
    scale = weight.block_scales.double() / weight.divisor.double()  # (8, 4)
    restored = dequantize(weight.codes, weight.block_scales).double() / weight.divisor.double()
    blocks = (restored - w.double()).view(8, 4, 16).abs() / scale.unsqueeze(-1)
    # E2M1's widest step is 2 (from 4 to 6). A scale that was rounded down clips its largest value by at most 1/16 of 6.
    assert blocks.max() <= 1 + 1e-6  # the step itself is rounded to fp32
    assert torch.isfinite(restored).all() and (weight.block_scales.float() > 0).all()


def test_quantizing_what_was_dequantized_changes_nothing():
    w = torch.randn(16, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    first = quantize(w)
    second = quantize(dequantize(first.codes, first.block_scales), torch.ones(()))
    assert torch.equal(dequantize(first.codes, first.block_scales), dequantize(second.codes, second.block_scales))


@pytest.mark.parametrize("amax", [0.0, 1e-38, 1e-36, 2.0**-126, 1.0, 3.3e38], ids=str)
def test_extreme_magnitudes_give_finite_numbers(amax):
    w = torch.zeros(2, 32, dtype=torch.bfloat16)
    w[0, 3] = amax
    weight = quantize(w)
    assert torch.isfinite(weight.divisor) and weight.divisor > 0
    restored = dequantize(weight.codes, weight.block_scales).double() / weight.divisor.double()
    assert torch.isfinite(restored).all()
    if amax >= 1.0:
        assert restored[0, 3] == pytest.approx(amax, rel=0.05)
    assert (restored[1] == 0).all() and (weight.block_scales.float()[1] == 0.125).all()


def test_columns_that_are_no_multiple_of_16_are_refused():
    with pytest.raises(ValueError, match="has 24 columns; NVFP4 needs a multiple of 16"):
        quantize(torch.zeros(2, 24))


def test_a_divisor_of_other_weights_that_is_too_large_cuts_off_at_the_largest_scale():
    w = torch.tensor([[6.0] * 16 + [0.5] * 16]).bfloat16()
    # 448 would fit; with this divisor the first block needs a scale of 1792
    weight = quantize(w, torch.tensor(4 * 448.0))
    assert weight.block_scales.float().tolist() == [[448.0, 144.0]]  # 0.5 / 6 in BF16, times 1792, is 149.6
    restored = dequantize(weight.codes, weight.block_scales).float() / weight.divisor
    assert restored[0, :16].tolist() == [1.5] * 16


@pytest.mark.gpu
@pytest.mark.parametrize("pack_weight", [quantize, quantize_mse])
def test_a_gpu_packs_the_same_bytes(pack_weight):
    w = torch.randn(256, 512, generator=torch.Generator().manual_seed(3)).bfloat16()
    here, there = pack_weight(w), pack_weight(w.cuda())
    assert there.divisor.cpu() == here.divisor
    restored = [dequantize(x.codes, x.block_scales).cpu() for x in (here, there)]
    if pack_weight is quantize:
        assert torch.equal(there.codes.cpu(), here.codes)
        assert torch.equal(there.block_scales.cpu().view(torch.uint8), here.block_scales.view(torch.uint8))
        assert torch.equal(*restored)
    else:  # the search sums in another order, so two equally good scales may swap
        errors = [(r.double() / here.divisor.double() - w.double()).norm() for r in restored]
        torch.testing.assert_close(errors[1], errors[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("tails", [0.0, 1.5], ids=["normal", "heavy tails"])
def test_searched_scales_lower_the_error_of_every_block(tails):
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(32, 256, generator=generator) * torch.exp(tails * torch.randn(32, 256, generator=generator))
    w[0, :16] = 0
    w = w.bfloat16()

    def block_errors(weight):
        restored = dequantize(weight.codes, weight.block_scales).double() / weight.divisor.double()
        return (restored - w.double()).square().view(32, 16, 16).sum(-1)

    plain, searched = block_errors(quantize(w)), block_errors(quantize_mse(w))
    assert (searched <= plain * (1 + 1e-5)).all()
    assert searched.sum() < 0.95 * plain.sum()


def test_a_searched_scale_is_the_best_of_nine_neighbours():
    """Search each block alone with the decoders above, over three E4M3 numbers below amax / 6 and five above it."""
    seen = set()
    values = torch.tensor([value_of_code(code) for code in range(16)], dtype=torch.float64)
    scales = torch.tensor([value_of_scale(byte) for byte in range(127)], dtype=torch.float64)
    for draw in (torch.rand, torch.randn):
        w = draw(256, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
        plain, searched = quantize(w), quantize_mse(w)
        blocks, divisor = w.double().view(-1, 16, 1), plain.divisor.double()
        first, chosen = (x.block_scales.view(torch.uint8).flatten().long() for x in (plain, searched))
        errors = torch.full((len(blocks), 9), torch.inf, dtype=torch.float64)  # from three below to five above
        for i, neighbour in enumerate(range(-3, 6)):
            there = (first + neighbour >= 1) & (first + neighbour <= 126)
            steps = scales[(first + neighbour)[there]].view(-1, 1, 1) / divisor
            errors[there, i] = (blocks[there] - values * steps).square().amin(dim=2).sum(dim=1)
        of_chosen = errors.gather(1, (chosen - first + 3)[:, None])[:, 0]
        assert (of_chosen <= errors.amin(dim=1) * (1 + 1e-5)).all()
        restored = dequantize(searched.codes, searched.block_scales).double() / divisor
        found = (restored.view(-1, 16, 1) - blocks).square().sum(dim=(1, 2))
        torch.testing.assert_close(found, of_chosen, rtol=1e-5, atol=0)
        assert torch.equal(searched.divisor, plain.divisor)
        seen |= set((chosen - first).tolist())
    assert seen == set(range(-3, 6)), "a neighbour that no block takes proves nothing"


def test_a_searched_scale_changes_only_for_a_smaller_error():
    w = torch.zeros(1, 48).bfloat16()  # the first block is zero, so any scale fits
    w[0, 16:32] = 2688.0  # this block has the largest scale
    w[0, 32:] = torch.tensor([6.0, 0.5]).repeat(8) / 512  # this block needs exactly the smallest scale
    plain, searched = quantize(w), quantize_mse(w)
    assert plain.block_scales.view(torch.uint8).tolist() == [[0x20, 0x7E, 0x01]]
    assert torch.equal(searched.block_scales.view(torch.uint8), plain.block_scales.view(torch.uint8))
    assert torch.equal(searched.codes, plain.codes)
    assert torch.equal(dequantize(searched.codes, searched.block_scales), w)
