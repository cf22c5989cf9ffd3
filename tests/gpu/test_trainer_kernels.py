"""Test the trainer's kernels on a Hopper GPU, against the CPU's bits or against fp64 within a tolerance."""

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


def test_silu_mul_and_its_gradient_are_those_of_the_cpu():
    from qerl_kernels.silu_mul import silu_mul

    gate, up, dy = (4 * torch.randn(33, 1001) for _ in range(3))
    results = []
    for device in ("cpu", "cuda"):
        g, u = (t.to(device, torch.bfloat16).requires_grad_() for t in (gate, up))
        y = silu_mul(g, u)
        y.backward(dy.to(device, torch.bfloat16))
        results.append([t.detach().cpu().float() for t in (y, g.grad, u.grad)])
    for ours, reference in zip(results[1], results[0], strict=True):
        assert (ours - reference).norm() < 1e-3 * reference.norm()  # a few values differ in the last bit


@pytest.mark.parametrize(("T", "K", "R"), [(1000, 18944, 32), (3, 1040, 96), (1, 48, 6)], ids=str)
def test_wide_operands_are_those_of_the_cpu(T, K, R):
    """Compare widened operands with the CPU's.

    silu(gate) * up may differ in the last bit of a few values; the columns behind a weight agree bit for bit, and
    nothing is written beyond them.
    """
    from qerl_kernels import wide

    gate, up = 4 * torch.randn(2, T, K).bfloat16()
    ours, reference = (wide.widen_silu_mul(gate.to(d), up.to(d), R) for d in ("cuda", "cpu"))
    assert ours.stride() == reference.stride()
    ours = ours.cpu()
    assert torch.equal(ours[:, K + R :], reference[:, K + R :])
    assert (ours[:, :K].float() - reference[:, :K].float()).norm() < 1e-3 * reference[:, :K].float().norm()
    used, room = wide.columns(R)
    B, bias = torch.randn(T, R // 2), 100 * torch.randn(T).bfloat16()
    for given in (bias, None):
        found = []
        for device in ("cuda", "cpu"):
            w = torch.full((T, K + room), 7, dtype=torch.bfloat16, device=device)
            there = None if given is None else given.to(device)
            wide.fill(w[:, : K + used], K, R, R // 2, B.to(device), there, 0.0371)
            found.append(w.cpu())
        assert torch.equal(*found) and (found[0][:, K + used :] == 7).all() and (found[0][:, :K] == 7).all()


def test_behind_a_gate_the_product_is_that_of_the_layer():
    """Compare the fused function with silu_mul and the layer, on a tiled weight of 7B's down_proj: output and
    gradients.
    """
    from peft import LoraConfig, get_peft_model
    from qerl_kernels import nvfp4_triton, tiles
    from qerl_kernels.silu_mul import silu_mul

    from qerl_recipes.model import lora
    from qerl_recipes.model.frozen import FrozenTiledLinear

    packed = nvfp4_triton.quantize(0.02 * torch.randn(3584, 18944, device="cuda").bfloat16())
    row_scale = (1 / packed.divisor.float()).expand(3584).contiguous()
    tiled = tiles.tile_weight(packed.codes, packed.block_scales, row_scale)
    # The layer has a bias because PEFT takes the device from a model's first parameter.
    layers = torch.nn.ModuleDict({"part": FrozenTiledLinear(tiled, torch.randn(3584, device="cuda"), torch.bfloat16)})
    holder = get_peft_model(layers, LoraConfig(r=32, target_modules=["part"])).cuda()
    lora.install(holder, "default")
    layer = holder.base_model.model["part"]
    assert type(layer) is lora.AdaptedLinear
    layer.lora_B.default.weight.data.normal_(std=0.05)
    gate, up = torch.randn(2, 777, 18944, device="cuda").bfloat16()
    dy, results = torch.randn(777, 3584, device="cuda").bfloat16(), []
    for function in (lora.gated, lambda g, u, down: down(silu_mul(g, u))):
        holder.zero_grad()
        leaves = [t.clone().requires_grad_() for t in (gate, up)]
        with torch.autocast("cuda", torch.bfloat16):
            y = function(*leaves, layer)
        y.backward(dy)
        trained = [layer.lora_A.default.weight.grad, layer.lora_B.default.weight.grad]
        results.append([t.detach().double() for t in (y, *(leaf.grad for leaf in leaves), *trained)])
    for mine, theirs in zip(*results, strict=True):
        assert (mine - theirs).norm() < 1e-3 * theirs.norm()


@pytest.mark.parametrize("shape", [(1, 700, 28, 128), (2, 33, 4, 64), (1, 9, 3, 80)], ids=str)
def test_rotation_and_its_gradient_are_those_of_the_cpu(shape):
    from qerl_kernels.rotate import rotate

    x, dy = torch.randn(2, *shape)
    angles = torch.rand(*shape[:2], shape[3]) * 6
    results = []
    for device in ("cpu", "cuda"):
        there = x.to(device, torch.bfloat16).requires_grad_()
        y = rotate(there, angles.cos().to(device), angles.sin().to(device))
        y.backward(dy.to(device, torch.bfloat16))
        results.append([t.detach().cpu().float() for t in (y, there.grad)])
    for ours, reference in zip(results[1], results[0], strict=True):
        assert (ours - reference).norm() < 1e-3 * reference.norm()  # a few values differ in the last bit


@pytest.mark.parametrize("rounded", [False, True], ids=["one rounding", "rounded"])
@pytest.mark.parametrize("shape", [(700, 3584), (9000, 128), (3, 5120)], ids=str)
def test_rms_norm_and_its_gradients_are_those_of_the_cpu(shape, rounded):
    from qerl_kernels.rms_norm import rms_norm

    x, dy, w = 3 * torch.randn(shape), torch.randn(shape), 1 + 0.1 * torch.randn(shape[-1])
    results = []
    for device in ("cpu", "cuda"):
        x_there = x.to(device, torch.bfloat16).requires_grad_()
        w_there = w.to(device, copy=True).requires_grad_()
        y = rms_norm(x_there, w_there, 1e-6, rounded=rounded)
        y.backward(dy.to(device, torch.bfloat16))
        results.append([t.detach().cpu().double() for t in (y, x_there.grad, w_there.grad)])
    for ours, reference in zip(results[1], results[0], strict=True):
        assert (ours - reference).norm() < 2e-3 * reference.norm()  # a few values differ in the last bit


def test_linear_logprob_agrees_with_fp64():
    from qerl_kernels.linear_logprob import linear_logprob, reference

    hidden = torch.randn(37, 256, device="cuda").bfloat16().requires_grad_()
    w = torch.randn(15013, 256, device="cuda").bfloat16() * 0.2
    targets = torch.randint(0, 15013, (37,), device="cuda")
    exact = hidden.detach().double().requires_grad_()
    ours, expected = linear_logprob(hidden, w, targets, 0.9), reference(exact, w.double(), targets, 0.9)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)
    (ours[0].sum() + 0.1 * ours[2].sum()).backward()
    (expected[0].sum() + 0.1 * expected[2].sum()).backward()
    assert (hidden.grad.double() - exact.grad).norm() < 1e-2 * exact.grad.norm()
