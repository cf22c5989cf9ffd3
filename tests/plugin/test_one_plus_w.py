"""Test norms that are stored as w and used as 1 + w. Their noise must equal that of an ordinary norm with weight 1 +
w."""

import pytest
import torch
from qerl_kernels.naive import rms_norm
from vllm.model_executor.layers.layernorm import GemmaRMSNorm

from qerl_recipes.model import loading, norms
from qerl_vllm_plugin import noise
from qerl_vllm_plugin.policy import Policy

TARGETS = ("input_layernorm", "pre_feedforward_layernorm")
SIGMA, SEED, ROLLOUT = 5e-4, 7, 2
ONE_ROUNDING = 2**-23  # one rounding in fp32


@pytest.fixture(scope="module")
def folder(make_nvfp4):
    return make_nvfp4("gemma3_text")


@pytest.fixture(scope="module")
def engine(boot, folder):
    return boot(folder)  # in BF16 a weight near 1 moves in steps of 2^-7


@pytest.fixture
def policy(engine):
    policy = Policy(engine)
    policy.clear_noise()
    return policy


def norms_of(engine, measure) -> dict[str, torch.Tensor]:
    named = measure.model(engine).named_modules()
    return {f"{name}.weight": m.weight.data.clone() for name, m in named if isinstance(m, GemmaRMSNorm)}


def test_promise_03_a_norm_of_1_plus_w_gets_the_same_noise(policy, engine, checkpoint_norms, measure):
    clean = norms_of(engine, measure)
    assert clean.keys() == checkpoint_norms.keys() and len(clean) == 2 * 6 + 1
    assert all(torch.equal(clean[name], w) and clean[name].dtype == torch.float32 for name, w in clean.items())
    report = policy.set_noise(SIGMA, seed=SEED, rollout=ROLLOUT, targets=TARGETS)
    assert (report.noisy_norms, report.swallowed) == (4, 0.0)
    for name, w in norms_of(engine, measure).items():
        ordinary = 1 + checkpoint_norms[name]
        if noise.is_target(name, TARGETS):
            ordinary = noise.all_noisy({name: ordinary}, SIGMA, SEED, ROLLOUT)[name]
            assert float((w - checkpoint_norms[name]).abs().max()) > SIGMA
        assert float(((1 + w) / ordinary - 1).abs().max()) < 2 * ONE_ROUNDING, name


def test_promise_03_trainer_and_engine_have_the_same_bits(policy, engine, folder, measure):
    policy.set_noise(SIGMA, seed=SEED, rollout=ROLLOUT, targets=TARGETS)
    model = loading.load(folder)
    assert norms.set_noise(model, SIGMA, SEED, ROLLOUT, TARGETS) == 4
    ours, theirs = dict(norms.named_norms(model)), norms_of(engine, measure)
    assert ours.keys() == theirs.keys()
    generator = torch.Generator().manual_seed(1)
    for name, norm in ours.items():
        x = torch.randn(64, norm.weight.numel(), generator=generator).bfloat16()
        layer = measure.model(engine).get_submodule(name.removesuffix(".weight"))
        assert torch.equal(norm(x), layer(x)) and torch.equal(layer(x), rms_norm(x, 1 + theirs[name], 1e-6)), name
    norms.clear_noise(model)
    assert any(not torch.equal(norm.weight, theirs[name]) for name, norm in ours.items())


def test_a_norm_that_feeds_no_linear_is_refused(policy, folder):
    policy.set_noise(0.1, seed=1, rollout=1, targets=TARGETS)
    before = policy.state(digest=True)
    message = r"post_attention_layernorm feeds no linear .* use \['input_layernorm', 'pre_feedforward_layernorm'\]"
    with pytest.raises(ValueError, match=f"noise target {message}"):
        policy.set_noise(0.2, seed=2, rollout=2)  # uses the default targets
    assert policy.state(digest=True) == before
    model = loading.load(folder)
    with pytest.raises(ValueError, match=f"train_norms target {message}"):
        norms.make_trainable(model)
    both = (*noise.DEFAULT_TARGETS, "pre_feedforward_layernorm")
    assert policy.set_noise(0.1, seed=1, rollout=1, targets=both).noisy_norms == 6


@torch.no_grad()
def test_the_bf16_arm_rounds_norms_once(make_bf16):
    model = loading.load(make_bf16("gemma3_text"))
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    norm = model.model.norm
    assert (norm.rounded, norm.offset) == (False, 1.0)
    assert torch.equal(norm(x), rms_norm(x, 1 + norm.weight, norm.epsilon))
