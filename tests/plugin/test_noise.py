"""Test the noise as a pure function: which bits, which norms, and which values are refused."""

import math

import pytest
import torch

from qerl_vllm_plugin import noise

NAME = "model.layers.0.input_layernorm.weight"
GOLDEN = [0.4553893506526947, 0.683228075504303, -0.985525906085968, 0.31237897276878357]


def test_promise_03_first_values_are_pinned():
    """A resumed run or another rank must draw these numbers, with any torch. The bits hold on any x86-64 with AVX2,
    which vLLM needs.

    Without AVX2 torch uses another sine, which is off by a few units in the last place.
    """
    values = noise.draw(42, 3, NAME, 64)
    assert values.dtype == torch.float32
    exactly = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    assert values[:4].tolist() == (GOLDEN if exactly else pytest.approx(GOLDEN, abs=1e-6))


def test_every_key_matters_and_nothing_else():
    base = noise.draw(1, 2, NAME, 32)
    assert torch.equal(base, noise.draw(1, 2, NAME, 32))
    for other in (
        noise.draw(2, 2, NAME, 32),
        noise.draw(1, 3, NAME, 32),
        noise.draw(12, 2, NAME, 32),
        noise.draw(1, 2, NAME.replace(".0.", ".1."), 32),
    ):
        assert not torch.equal(base, other)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    noise.draw(1, 2, NAME, 32)
    assert torch.equal(before, torch.get_rng_state()), "the global generator has moved"


def test_norms_drawn_together_have_the_bits_of_each_alone():
    """Compare with one generator for each norm. Sizes below 16 leave half of torch's pair unused, and others are no
    multiple of 16."""
    sizes = {f"norm.{i}.weight": size for i, size in enumerate([1, 64, 3, 17, 128, 15, 5120, 5, 16])}
    alone = []
    for name, size in sizes.items():
        generator = torch.Generator("cpu").manual_seed(noise.seed_of(4, 5, name))
        alone.append(torch.randn(size, generator=generator))
        assert torch.equal(noise.draw(4, 5, name, size), alone[-1])
    assert torch.equal(noise.draw_all(4, 5, sizes), torch.cat(alone))


def test_the_bits_do_not_depend_on_the_default_dtype():
    """vLLM sets torch's default dtype to the model's while it builds and loads a model."""
    expected = noise.draw(42, 3, NAME, 64)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        found, noisy = noise.draw(42, 3, NAME, 64), noise.all_noisy({NAME: torch.ones(64)}, 0.5, 42, 3)[NAME]
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(found, expected) and found.dtype == noisy.dtype == torch.float32
    assert torch.equal(noisy, 1 + 0.5 * expected)


def test_noisy_is_base_plus_sigma_z_in_fp32():
    base = (1 + 0.3 * torch.randn(64)).to(torch.bfloat16)
    got = noise.all_noisy({NAME: base}, 1e-4, 5, 6)[NAME]
    expected = base.double() + 1e-4 * noise.draw(5, 6, NAME, 64).double()
    assert got.dtype == torch.float32
    assert float((got.double() - expected).abs().max()) < 2**-23


@pytest.mark.parametrize(
    ("name", "is_target"),
    [
        ("model.layers.0.input_layernorm.weight", True),
        ("model.layers.27.post_attention_layernorm.weight", True),
        ("model.norm.weight", False),
        ("model.layers.0.self_attn.q_norm.weight", False),
        ("model.layers.0.my_input_layernorm.weight", False),
        ("model.layers.0.input_layernorm.bias", False),
        ("weight", False),
    ],
)
def test_default_targets(name, is_target):
    assert noise.is_target(name) is is_target


@pytest.mark.parametrize(
    "sigma", [-1e-9, math.nan, math.inf, -math.inf, 1e308, 10**400, -(10**400), True, "0.1", None, [0.1]]
)
def test_impossible_sigma_is_refused(sigma):
    with pytest.raises(ValueError, match="must be a number from 0 to 1e\\+06"):
        noise.check_sigma(sigma)


@pytest.mark.parametrize("sigma", [0, 0.0, 1e-9, 0.01, 1, 1e6])
def test_a_sigma_is_a_number_from_0_to_a_million(sigma):
    assert noise.check_sigma(sigma) == sigma and isinstance(noise.check_sigma(sigma), float)


QWEN = [f"model.layers.{i}.{name}_layernorm.weight" for i in (0, 1) for name in ("input", "post_attention")]
QWEN += ["model.layers.0.self_attn.q_norm.weight", "model.norm.weight"]
GEMMA = [*QWEN, "model.layers.0.pre_feedforward_layernorm.weight"]


def test_targets_are_all_norms_of_those_names():
    assert noise.targeted(QWEN, noise.DEFAULT_TARGETS) == set(QWEN[:4])
    assert noise.targeted(QWEN, ["q_norm", "norm"]) == set(QWEN[4:])
    assert noise.targeted(GEMMA, ["input_layernorm", "pre_feedforward_layernorm"]) == {QWEN[0], QWEN[2], GEMMA[-1]}
    # both norms are targeted if asked for
    assert len(noise.targeted(GEMMA, [*noise.DEFAULT_TARGETS, "pre_feedforward_layernorm"])) == 5


def test_targets_that_feed_no_linear_are_refused():
    known = r"it has \['input_layernorm', 'norm', 'post_attention_layernorm', 'q_norm'\]"
    with pytest.raises(ValueError, match=r"noise targets \['k_norm'\] match none of this model's 6 norms; " + known):
        noise.targeted(QWEN, ["input_layernorm", "k_norm"])
    with pytest.raises(ValueError, match=r"train targets \[\] match none.* " + known):
        noise.targeted(QWEN, [], "train")
    better = r"use \['input_layernorm', 'pre_feedforward_layernorm'\]"
    with pytest.raises(ValueError, match="post_attention_layernorm feeds no linear.*" + better):
        noise.targeted(GEMMA, noise.DEFAULT_TARGETS)


def test_the_papers_schedule_by_hand():
    # 110 rollouts in 10 stages: 11 intervals of 10 rollouts, the first without noise
    values = [noise.exponential_sigma(r, 110, 1e-2, 5e-4, 10) for r in range(110)]
    assert values[:10] == [0.0] * 10
    assert values[10] == values[19] == 1e-2
    assert math.isclose(values[20], 1e-2 * 0.05 ** (1 / 9))
    assert math.isclose(values[-1], 5e-4)
    assert len(set(values)) == 11


def test_sigma_starts_at_zero_and_then_only_falls():
    for rollouts in (1, 3, 7, 10, 11, 12, 199):
        values = [noise.exponential_sigma(r, rollouts, 1e-2, 5e-4, 10) for r in range(rollouts)]
        noisy = [value for value in values if value]
        assert values == [0.0] * (rollouts - len(noisy)) + sorted(noisy, reverse=True)
        assert set(noisy) <= {1e-2 * 0.05 ** (k / 9) for k in range(10)} and values[0] == 0


@pytest.mark.parametrize(
    ("end", "stages", "values"), [(0.001, 1, [0.0, 0.0, 0.1, 0.1]), (0.1, 3, [0.0, 0.1, 0.1, 0.1])]
)
def test_one_stage_or_equal_ends_have_one_sigma(end, stages, values):
    assert [noise.exponential_sigma(r, 4, 0.1, end, stages) for r in range(4)] == values


POSITIVE = "must be positive"


@pytest.mark.parametrize(
    ("rollout", "ends", "stages", "message"),
    [
        (5, (0.0, 0.0), 4, POSITIVE),
        (5, (1e-3, 1e-2), 4, POSITIVE),
        (5, (math.nan, 1e-3), 4, POSITIVE),
        (5, (1e-2, math.nan), 4, POSITIVE),
        (5, (-1e-2, -1e-3), 4, POSITIVE),
        (5, (math.inf, 1), 4, POSITIVE),
        (10, (1e-2, 1e-3), 4, "rollout 10"),
        (-1, (1e-2, 1e-3), 4, "rollout -1"),
        (0, (1e-2, 1e-3), 0, "num_stages"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(rollout, ends, stages, message):
    with pytest.raises(ValueError, match=message):
        noise.exponential_sigma(rollout, 10, *ends, stages)
