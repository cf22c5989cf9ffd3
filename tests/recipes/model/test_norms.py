"""Test the trainer's norms by themselves: their result with noise, and which modules of a model they replace."""

import pytest
import torch

from qerl_recipes.model import norms
from qerl_recipes.model.norms import TrainerRMSNorm
from qerl_vllm_plugin import noise


class Norm(torch.nn.Module):
    """Compute a norm as transformers writes them: times w, or times 1 + w."""

    def __init__(self, size: int, plus: float = 0.0, power: float = 1.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(size)
        self.weight = torch.nn.Parameter((1 - plus + 0.3 * torch.randn(size, generator=generator)).bfloat16())
        self.eps, self.plus, self.power = 1e-5, plus, power

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rms = (x.float().square().mean(-1, keepdim=True) + self.eps).sqrt()
        return (x.float() / rms**self.power * (self.plus + self.weight.float())).to(x.dtype)


class Gated(Norm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x) if gate is None else super().forward(x) * gate


def model(**modules: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.ModuleDict(modules)])})


def x_of(size: int) -> torch.Tensor:
    return torch.randn(3, 5, size, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_promise_03_the_noise_is_added_to_the_weight_that_the_input_is_multiplied_by(rounded, offset):
    generator = torch.Generator().manual_seed(0)
    weight, added = 0.5 + torch.rand(64, generator=generator), 0.2 * torch.randn(64, generator=generator)
    norm, x = TrainerRMSNorm(weight, 1e-5, rounded=rounded, offset=offset), x_of(64)
    unit = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    tolerance = 2**-8 * (3 if rounded else 1)  # roundings to 8 bits: three (weight, normalized input, product) or one
    for now in (None, added, None):
        norm.noise = now
        exact = unit * (offset + weight.double() + (0 if now is None else now.double()))
        assert ((norm(x).double() - exact).abs() <= 1.02 * tolerance * exact.abs() + 1e-6).all()
        assert torch.equal(norm.weight, weight)


def test_norms_are_found_by_what_they_compute():
    found = model(plain=Norm(32), plus_one=Norm(48, plus=1.0), gated=Gated(32), layer=torch.nn.LayerNorm(32))
    before = {name: found["layers"][0][name] for name in ("plain", "plus_one", "gated", "layer")}
    assert norms.replace(found, rounded=True) == 2
    after = found["layers"][0]
    assert after["gated"] is before["gated"] and after["layer"] is before["layer"]
    assert (after["plain"].offset, after["plain"].rounded) == (0.0, True)
    assert (after["plus_one"].offset, after["plus_one"].rounded) == (1.0, False)  # transformers rounds it once
    for name, size in (("plain", 32), ("plus_one", 48)):
        assert after[name].weight.dtype == torch.float32 and after[name].epsilon == 1e-5
        torch.testing.assert_close(after[name](x_of(size)), before[name](x_of(size)), rtol=2**-6, atol=1e-2)


def test_what_looks_like_a_norm_and_is_none_is_refused_by_name():
    with pytest.raises(
        ValueError, match=r"layers\.0\.odd \(Norm\) is not x / rms\(x\) \* weight, nor \* \(1 \+ weight\)"
    ):
        norms.replace(model(plain=Norm(32), odd=Norm(32, power=2.0)), rounded=False)


def test_weight_and_noise_stay_in_fp32_and_move_with_the_model():
    found = model(input_layernorm=Norm(32), post_attention_layernorm=Norm(32))
    norms.replace(found, rounded=False)
    assert norms.set_noise(found, 1e-3, 5, 6) == 2
    norm = found["layers"][0]["input_layernorm"]
    drawn = 1e-3 * noise.draw(5, 6, "layers.0.input_layernorm.weight", 32)
    for _ in range(2):
        assert norm.weight.dtype == norm.noise.dtype == torch.float32 and torch.equal(norm.noise, drawn)
        found.to(torch.bfloat16)
    found.to("meta")
    assert norm.weight.device.type == norm.noise.device.type == "meta" and norm.weight.dtype == torch.float32


def test_a_sigma_of_zero_is_no_noise():
    found = model(input_layernorm=Norm(32), post_attention_layernorm=Norm(32))
    norms.replace(found, rounded=False)
    norms.set_noise(found, 0.1, 5, 6)
    assert norms.set_noise(found, 0, 5, 7) == 2
    assert all(norm.noise is None for _, norm in norms.named_norms(found))


def test_saved_norms_are_set_whole_or_not_at_all(tmp_path):
    found = model(input_layernorm=Norm(32), post_attention_layernorm=Norm(32))
    norms.replace(found, rounded=False)
    before = {name: norm.weight.clone() for name, norm in norms.named_norms(found)}
    assert norms.load_norms(found, tmp_path) == 0
    first, second = before
    for name, bad, message in (
        ("layers.1.input_layernorm.weight", torch.ones(32), "is no norm of this model; was it trained on another base"),
        (second, torch.ones(33), r"has shape \(33,\), not \(32,\)"),
        (second, torch.tensor([1.0] * 31 + [torch.inf]), "holds NaN or infinite values"),
    ):
        norms.save_norms({first: torch.zeros(32), name: bad}, tmp_path)
        with pytest.raises(ValueError, match=message):
            norms.load_norms(found, tmp_path)
        assert all(torch.equal(norm.weight, before[name]) for name, norm in norms.named_norms(found))
    norms.save_norms({second: torch.full((32,), 2.0)}, tmp_path)
    assert norms.load_norms(found, tmp_path) == 1
    assert norms.trained_norms(norms.named_norms(found)).keys() == {second}
    assert torch.equal(found["layers"][0]["post_attention_layernorm"].weight, torch.full((32,), 2.0))
