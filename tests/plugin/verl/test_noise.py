"""Test the noise of verl's rollouts: it is read from the configuration, set before the first request, and cleared for
validation."""

import types

import pytest

pytestmark = pytest.mark.usefixtures("verl_on_a_cpu")

KEYS = {"sigma_start": 0.05, "sigma_end": 0.01, "num_stages": 2}


def config_of(custom, mode="sync", steps=6):
    from omegaconf import OmegaConf

    return OmegaConf.create(
        {
            "actor_rollout_ref": {
                "rollout": {"custom": custom, "agent": {"num_workers": 1}},
                "model": {},
                "actor": {"optim": {"total_training_steps": steps}},
            },
            "trainer": {"v1": {"trainer_mode": mode}},
        }
    )


@pytest.mark.parametrize(
    ("custom", "mode", "reason"),
    [
        ({**KEYS, "sigma": 1}, "sync", "knows .*num_stages"),
        ({"sigma_start": 0.05}, "sync", "it needs sigma_start, sigma_end and"),
        ({**KEYS, "sigma_start": 2e6}, "sync", r"qerl\.sigma_start is 2000000\.0; .* at most 1e\+06, the most"),
        ({**KEYS, "sigma_start": 0.0}, "sync", r"qerl\.sigma_start is 0\.0; .* above 0"),
        ({**KEYS, "sigma_start": float("nan")}, "sync", r"qerl\.sigma_start is nan"),
        ({**KEYS, "sigma_start": "much"}, "sync", r"qerl\.sigma_start is 'much'; it must be a number"),
        ({**KEYS, "sigma_end": 0.5}, "sync", r"qerl\.sigma_end is 0\.5; .* at most sigma_start, which is 0\.05"),
        ({**KEYS, "sigma_end": -0.01}, "sync", r"qerl\.sigma_end is -0\.01"),
        ({**KEYS, "sigma_end": None}, "sync", r"qerl\.sigma_end is None"),
        ({**KEYS, "num_stages": 2.5}, "sync", r"qerl\.num_stages is 2\.5; it must be a whole number of at least 1"),
        ({**KEYS, "num_stages": 0}, "sync", r"qerl\.num_stages is 0"),
        ({**KEYS, "seed": "x", "targets": "norm"}, "sync", r"qerl\.seed is 'x'; .*qerl\.targets is 'norm'; .* a list"),
        ({**KEYS, "targets": None}, "sync", r"qerl\.targets is None"),
        ({**KEYS, "targets": []}, "sync", r"qerl\.targets is \[\]"),
        (KEYS, "separate_async", "trainer_mode=separate_async"),
    ],
)
def test_a_schedule_that_cannot_be_followed_is_refused(custom, mode, reason):
    from qerl_vllm_plugin.verl.noise import Noise

    with pytest.raises(ValueError, match=reason):
        Noise.parse(config_of({"qerl": custom}, mode))
    assert Noise.parse(config_of(None, "separate_async")) is None
    assert Noise.parse(config_of({"qerl": KEYS})).targets == ("input_layernorm", "post_attention_layernorm")
    most = Noise.parse(config_of({"qerl": {**KEYS, "sigma_start": 1e6, "sigma_end": 1e6, "targets": ["norm"]}}))
    assert (most.sigma_start, most.sigma_end, most.targets) == (1e6, 1e6, ("norm",))


def test_each_rollout_has_its_noise_and_a_validation_none(monkeypatch):
    from verl.utils import tensordict_utils as tu

    from qerl_vllm_plugin.noise import exponential_sigma as sigma
    from qerl_vllm_plugin.verl import noise

    events = []

    def remote(*arguments):
        events.append(("noise", *arguments[:3]))

    server = types.SimpleNamespace(set_noise=types.SimpleNamespace(remote=remote))
    servers = {"qerl_server_0_0": server, "qerl_server_1_0": server}
    monkeypatch.setattr(noise, "ray", types.SimpleNamespace(get=lambda value: value, get_actor=servers.__getitem__))
    monkeypatch.setattr(noise.AgentLoopManagerTQ, "generate_sequences", lambda self, prompts: events.append("requests"))
    balancer = types.SimpleNamespace(get_all_servers=types.SimpleNamespace(remote=lambda: ["a:1", "b:2"]))
    manager = noise.NoisyAgentLoopManager(
        config_of({"qerl": {**KEYS, "seed": 7}}), types.SimpleNamespace(_load_balancer=balancer)
    )

    def generate(step, validate):
        events.clear()
        batch = tu.get_tensordict({"uid": ["p", "q"]})
        tu.assign_non_tensor_data(batch, "global_steps", step)
        if validate:
            tu.assign_non_tensor_data(batch, "validate", True)
        manager.generate_sequences(batch)
        return list(events)

    assert generate(0, True) == [("noise", 0.0, 7, -1)] * 2 + ["requests"]
    for step in range(1, 7):
        size = sigma(step - 1, 6, 0.05, 0.01, 2)
        assert (size > 0) == (step > 2)
        assert generate(step, False) == [("noise", size, 7, step - 1)] * 2 + ["requests"]
        assert generate(step, True) == [("noise", 0.0, 7, step - 1)] * 2 + ["requests"]
