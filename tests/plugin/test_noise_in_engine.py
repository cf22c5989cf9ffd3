"""Test noise on the norms of a real engine. It is set, never added; it is cleared bit for bit; and it follows the
trainer's arithmetic."""

import math
import warnings

import pytest
import torch
from qerl_kernels.naive import rms_norm
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.layernorm import RMSNorm

from qerl_vllm_plugin import noise
from qerl_vllm_plugin.norms import QerlRMSNorm, install
from qerl_vllm_plugin.policy import Policy

QK = ("q_norm", "k_norm")
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(make_nvfp4):
    return make_nvfp4("qwen3")


@pytest.fixture(scope="module")
def engine(boot, folder):
    return boot(folder, dtype="float32")


def norms(engine, measure) -> dict[str, torch.Tensor]:
    return {
        f"{name}.weight": layer.weight.data.clone()
        for name, layer in measure.model(engine).named_modules()
        if isinstance(layer, RMSNorm)
    }


def assert_same_bits(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_promise_03_weights_are_the_checkpoints_norms_in_fp32(engine, checkpoint_norms, measure):
    assert len(checkpoint_norms) == 2 * 4 + 1
    assert_same_bits(norms(engine, measure), checkpoint_norms)


def test_promise_03_noise_is_set_not_added(policy, engine, checkpoint_norms, measure):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is swallowed
        policy.set_noise(0.3, seed=1, rollout=1)
        report = policy.set_noise(5e-4, seed=7, rollout=2)
    once = norms(engine, measure)
    policy.set_noise(5e-4, seed=7, rollout=2)
    assert_same_bits(norms(engine, measure), once)
    assert (report.noisy_norms, report.swallowed, report.sigma) == (4, 0.0, 5e-4)
    with pytest.warns(FutureWarning, match="touched is called noisy_norms now"):
        assert report.touched == 4
    expected = {
        name: noise.all_noisy({name: w}, 5e-4, 7, 2)[name] if name.endswith("layernorm.weight") else w
        for name, w in checkpoint_norms.items()
    }
    assert_same_bits(once, expected)  # final norm and q/k norms have no noise
    for name in expected:
        if name.endswith("layernorm.weight"):
            assert float((once[name] != checkpoint_norms[name]).float().mean()) > 0.99


def test_promise_03_clearing_gives_back_the_bits(policy, engine, checkpoint_norms, measure):
    clean, answers = policy.state(digest=True), measure.engine(engine)
    policy.set_noise(0.2, seed=1, rollout=1)
    noisy = policy.state(digest=True)
    assert noisy.norms != clean.norms
    assert (noisy.sigma, noisy.seed, noisy.rollout) == (0.2, 1, 1)
    assert measure.difference(measure.engine(engine), answers) > 100 * TOLERANCE
    policy.clear_noise()
    assert policy.state(digest=True).norms == clean.norms
    assert torch.equal(measure.engine(engine), answers)
    assert_same_bits(norms(engine, measure), checkpoint_norms)


def test_promise_03_sigma_zero_is_clean_whatever_came_before(policy, engine, checkpoint_norms, measure):
    policy.set_noise(0.2, seed=1, rollout=1, targets=["norm", *QK])
    report = policy.set_noise(0.0, seed=1, rollout=1)
    assert report.noisy_norms == 0
    assert_same_bits(norms(engine, measure), checkpoint_norms)


def test_promise_03_noise_equals_hugging_face_with_noise(policy, engine, folder, reference, measure, checkpoint_norms):
    model = reference(folder)
    clean = measure.hf(model)
    for targets in (noise.DEFAULT_TARGETS, ("norm", "q_norm"), ("k_norm",)):
        report = policy.set_noise(0.05, seed=3, rollout=4, targets=targets)
        chosen = {name: w for name, w in checkpoint_norms.items() if noise.is_target(name, targets)}
        assert report.noisy_norms == len(chosen)
        changed = reference(folder)
        noisy = {name: noise.all_noisy({name: w}, 0.05, 3, 4)[name] for name, w in chosen.items()}
        changed.load_state_dict(noisy, strict=False)
        expected = measure.hf(changed)
        assert measure.difference(expected, clean) > 10 * TOLERANCE
        assert measure.difference(measure.engine(engine), expected) < TOLERANCE


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sigma": -0.1}, "a number from 0 to"),
        ({"sigma": math.nan}, "a number from 0 to"),
        ({"seed": 1.5}, r"the noise's seed is 1\.5; it must be a whole number"),
        ({"rollout": "7"}, "the noise's rollout is '7'; it must be a whole number"),
        ({"targets": "input_layernorm"}, "the noise's targets are 'input_layernorm'; they must be a list"),
    ],
)
def test_impossible_noise_changes_nothing(policy, values, message):
    policy.set_noise(0.1, seed=1, rollout=1)
    before = policy.state(digest=True)
    with pytest.raises(ValueError, match=message):
        policy.set_noise(**{"sigma": 0.2, "seed": 2, "rollout": 2, **values})
    assert policy.state(digest=True) == before


@pytest.mark.parametrize("targets", [["layernorm"], ["input_layernorm", "inputlayernorm"], []])
def test_unknown_targets_change_nothing(policy, targets):
    policy.set_noise(0.1, seed=1, rollout=1)
    before = policy.state(digest=True)
    with pytest.raises(ValueError, match="match none") as refused:
        policy.set_noise(0.2, seed=2, rollout=2, targets=targets)
    assert "it has ['input_layernorm', " in str(refused.value)
    assert policy.state(digest=True) == before


def test_norms_compute_the_shared_definition(engine, measure):
    layer = measure.model(engine).model.layers[0].input_layernorm
    assert type(layer) is QerlRMSNorm
    x, residual = torch.randn(50, 64).to(torch.bfloat16), torch.randn(50, 64).to(torch.bfloat16)
    w, epsilon = layer.weight.data, layer.variance_epsilon
    assert torch.equal(layer(x), rms_norm(x, w, epsilon))
    y, total = layer(x.clone(), residual.clone())
    assert torch.equal(total, x + residual)
    assert torch.equal(y, rms_norm(x + residual, w, epsilon))
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + epsilon).sqrt() * w.double()
    once = layer(x) == exact.to(torch.bfloat16)
    twice = (exact / w.double()).to(torch.bfloat16) * w.to(torch.bfloat16) == exact.to(torch.bfloat16)
    assert float(once.float().mean()) > 0.999
    assert float(twice.float().mean()) < 0.9, "two roundings would pass this test"


def test_stock_engine_swallows_the_noise_and_says_so(boot, make_bf16, measure):
    engine = boot(make_bf16("qwen3"), quantization=None, dtype="bfloat16")
    policy = Policy(engine)
    clean = policy.state(digest=True).norms
    with pytest.warns(UserWarning, match="rounding swallowed"):
        report = policy.set_noise(5e-4, seed=1, rollout=1)
    assert report.noisy_norms == 4
    assert report.swallowed > 0.9
    policy.clear_noise()
    assert policy.state(digest=True).norms == clean


def test_stock_engine_in_the_same_process_is_untouched(boot, make_bf16, measure, monkeypatch):
    folder, options = make_bf16("qwen2"), {"quantization": None, "dtype": "bfloat16"}
    monkeypatch.delitem(op_registry_oot, "RMSNorm", raising=False)
    without = boot(folder, **options)
    assert type(measure.model(without).model.norm) is RMSNorm
    install()
    within = boot(folder, **options)
    assert type(measure.model(within).model.norm) is QerlRMSNorm
    assert measure.model(within).model.norm.weight.dtype == torch.bfloat16
    assert torch.equal(measure.engine(within), measure.engine(without))


def test_norm_of_another_plugin_in_the_place_is_named(boot, folder, monkeypatch):
    class TheirRMSNorm(RMSNorm):
        pass

    monkeypatch.setitem(op_registry_oot, "RMSNorm", TheirRMSNorm)
    with pytest.raises(RuntimeError, match="TheirRMSNorm is registered"):
        boot(folder)
