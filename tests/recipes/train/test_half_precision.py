"""Test a trainer in float16.

It must stay closer to its engine, lose no gradients, and name the layer that overflows.
"""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from qerl_recipes.train import half_precision
from qerl_recipes.train.divergence import Diverged
from qerl_recipes.train.half_precision import GradientScale
from qerl_vllm_plugin.weights.overflow import ActivationOverflow, watched


@pytest.mark.parametrize("mixed", [True, False], ids=["autocast", "adapter in fp32"])
def test_trainer_and_engine_agree_more_closely_than_in_bfloat16(make_nvfp4, make_trainer, read_metrics, mixed):
    mismatch, moved = {}, {}
    for dtype in (torch.bfloat16, torch.float16):
        is_half = dtype == torch.float16
        trainer = make_trainer(make_nvfp4("qwen2"), dtype=dtype, max_steps=2, fp16=is_half and mixed)
        before = {name: weight.detach().clone() for name, weight in trainer.snapshot().tensors.items()}
        trainer.train()
        rows = read_metrics(trainer)
        mismatch[dtype] = sum(row["logp_diff_mean"] for row in rows) / len(rows)
        assert all(weight.dtype == torch.float32 for weight in trainer.snapshot().tensors.values())
        moved[dtype] = sum(not torch.equal(before[n], w) for n, w in trainer.snapshot().tensors.items())
        assert rows[-1]["grad_norm"] > 0
    assert 0 < mismatch[torch.float16] < mismatch[torch.bfloat16] / 3
    assert moved[torch.float16] == moved[torch.bfloat16] > 0


def test_promise_08_a_run_in_float16_resumes_to_the_same_bits(make_nvfp4, make_trainer, tmp_path, resume):
    """Check that a resume is exact despite the gradient scale and work done only in the first micro-batch."""
    settings = {"dtype": torch.float16, "fp16": True, "max_steps": 3, "save_strategy": "steps", "save_steps": 1}
    make_trainer(make_nvfp4("qwen2"), output_dir=str(tmp_path / "whole"), **settings).train()
    shutil.copytree(tmp_path / "whole/checkpoint-1", tmp_path / "broken/checkpoint-1")
    resume(make_trainer(make_nvfp4("qwen2"), output_dir=str(tmp_path / "broken"), **settings))
    file = "checkpoint-3/adapter_model.safetensors"
    whole, broken = (load_file(tmp_path / folder / file) for folder in ("whole", "broken"))
    assert all(torch.equal(whole[name], broken[name]) for name in whole)
    assert not all(torch.equal(w, load_file(tmp_path / "whole" / file.replace("3", "1"))[n]) for n, w in whole.items())


def layers() -> list[torch.nn.Linear]:
    torch.manual_seed(0)
    return [torch.nn.Linear(32, 32, bias=False) for _ in range(4)]


def gradients(each: float, scale: bool, half: bool) -> list[torch.Tensor]:
    """Return the gradients of four layers under a loss whose gradient is ``each`` for every output."""
    model = layers()
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.float16, enabled=half):
        for layer in model:
            x = torch.tanh(layer(x))
    out = x.float().sum(dim=1)
    if scale:
        (out,) = GradientScale(layer.weight for layer in model).scaled(out)
    (out * each).sum().backward()
    return [layer.weight.grad for layer in model]


@pytest.mark.parametrize("each", [3e-6, 1e-9, 700.0])
def test_gradients_of_any_size_are_those_of_fp32(each):
    exact, scaled = gradients(each, False, False), gradients(each, True, True)
    for ours, reference in zip(scaled, exact, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - reference).norm() < 5e-3 * reference.norm()
    unscaled = gradients(each, False, True)  # control: unscaled float16 loses gradients
    assert each == 700.0 or (unscaled[0] - exact[0]).norm() > 0.05 * exact[0].norm()


def test_both_results_share_one_scale_and_zeros_stay_zero():
    weight = torch.nn.Parameter(torch.ones(3))
    scale = GradientScale([weight])
    a, b = scale.scaled(weight * 2, weight * 5)
    (a.sum() * 1e-6 + b.sum() * 1e-9).backward()
    torch.testing.assert_close(weight.grad, torch.full((3,), 2e-6 + 5e-9))
    assert scale.inverse == 2.0 ** (-20 + 1 - 3) or scale.inverse == 2.0 ** (-19 - 3)
    weight.grad = None
    (scale.scaled(weight * 2)[0] * 0.0).sum().backward()
    assert not weight.grad.any()


def test_an_activation_beyond_float16_is_refused_by_name(make_nvfp4, make_trainer):
    def enlarge(model):
        model.model.layers[1].mlp.down_proj.row_scale.mul_(1e6)
        model.model.layers[1].mlp.down_proj._factor *= 1e6

    named = r"layers\.1\.mlp\.down_proj(\.base_layer)?: the trainer computes an activation of [0-9]{6}"
    # Found before generation, in a padded first micro-batch, and where one function computes base and adapter.
    for settings in ({}, {"pack_tokens": 0}, {"fp16": True}):
        with pytest.raises(ActivationOverflow, match=named):
            make_trainer(make_nvfp4("qwen2"), dtype=torch.float16, max_steps=1, change=enlarge, **settings).train()


def test_a_gradient_that_is_no_number_is_refused_before_the_step(make_nvfp4, make_trainer, monkeypatch):
    trainer = make_trainer(make_nvfp4("qwen2"), dtype=torch.float16, max_steps=1)
    before = {name: weight.detach().clone() for name, weight in trainer.snapshot().tensors.items()}
    scaled = half_precision.HalfPrecision.scaled

    def overflowing(self, logps, entropies):
        logps, entropies = scaled(self, logps, entropies)
        return logps * torch.inf, entropies

    monkeypatch.setattr(half_precision.HalfPrecision, "scaled", overflowing)
    with pytest.raises(Diverged, match=r"the gradient norm is nan.* beyond the end of float16, 65504"):
        trainer.train()
    assert all(torch.equal(before[name], weight) for name, weight in trainer.snapshot().tensors.items())


def test_what_is_looked_at_is_named_in_the_order_of_computation():
    class Late(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.shared, self.first = torch.nn.Identity(), torch.nn.Linear(2, 2, bias=False)

        def forward(self, x):
            x = self.first(self.shared(x))
            return self.shared(x)

    model = Late().half()
    model.first.weight.data.fill_(1e4)
    with pytest.raises(ActivationOverflow, match=r"^first: it computes an activation of 80000;"), watched(model, "it"):
        model(torch.full((1, 2), 4.0).half())
    with watched(model, "it") as calls:
        model(torch.ones(1, 2).half())
    assert calls.largest()[1] == 20000 and not model.first._forward_hooks


@pytest.mark.parametrize("on_several_ranks", [False, True])
def test_a_linear_is_computed_again_where_it_overflows(on_several_ranks, monkeypatch):
    """Check that one rank computes a linear again only after an overflow.

    A second product of an output layer would take gigabytes.
    """
    model, asked = torch.nn.Linear(2, 2, bias=False).half(), []
    model.weight.data.fill_(1e4)
    forward = torch.nn.Linear.forward
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: asked.append(float(x.max())) or forward(self, x))
    with watched(model, "it", on_several_ranks=on_several_ranks):
        model(torch.ones(1, 2).half())
    assert asked == [1.0, 2.0**-10] if on_several_ranks else asked == [1.0]
    with pytest.raises(ActivationOverflow, match="of 80000"), watched(model, "it", on_several_ranks=on_several_ranks):
        model(torch.full((1, 2), 4.0).half())
