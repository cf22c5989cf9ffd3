"""Test promise 10: what changes every answer of an engine is refused where a request may name another policy."""

import pytest
import torch

from qerl_vllm_plugin.policy import Policy

TARGETS = ["input_layernorm", "post_attention_layernorm"]
NORMS = {"model.norm.weight": torch.linspace(0.5, 1.5, 64)}
# what a caller of vLLM's collective_rpc may ask for; some changes take effect at once, others at their commit
CHANGES = {
    "noise of sigma 0.1": ("qerl_set_noise", (0.1, 1, 1, TARGETS)),
    "trained norms": ("qerl_swap", (None, {}, NORMS)),
}
VOUCHED = {"every_request_names_the_policy": True}


@pytest.fixture(scope="module")
def engines(boot, make_nvfp4, carriers):
    """Start engines, keyed by where they keep the adapter. The engine "none" has no room for an adapter."""
    options = {**carriers, "none": {"dtype": "float32"}}
    return {name: boot(make_nvfp4("qwen2"), **options[name]) for name in options}


@pytest.fixture
def policy_of(engines):
    def at_rest(name):
        policy = Policy(engines[name])
        policy.swap(None)
        policy.clear_noise()
        return policy

    return at_rest


def call(policy, method, args, **keywords):
    (result,) = policy._llm.collective_rpc(method, args=args, kwargs=keywords)
    return result


@pytest.mark.parametrize(
    "word", [{}, {"every_request_names_the_policy": False}, {"every_request_names_the_policy": "no"}]
)
@pytest.mark.parametrize("change", CHANGES)
def test_promise_10_lora_slots_refuse_what_changes_every_answer(
    policy_of, make_nvfp4, reference, make_adapter, measure, change, word
):
    policy = policy_of("lora")
    policy.swap(*make_adapter(reference(make_nvfp4("qwen2")))[:2])
    before = policy.state(digest=True)
    answers = [measure.engine(policy._llm, request) for request in (None, policy.request)]
    error = call(policy, *CHANGES[change], **word)["error"]
    assert error.startswith(f"{change} would change every answer")
    for part in ("the base's own name", "another adapter", '{"qerl": {"policy_adapter": {"rank": R}}}', *VOUCHED):
        assert part in error
    assert policy.state(digest=True) == before
    for request, answer in zip((None, policy.request), answers, strict=True):
        assert torch.equal(measure.engine(policy._llm, request), answer)


@pytest.mark.parametrize("name", ["resident", "none"])
def test_promise_10_an_engine_of_one_name_needs_no_word(policy_of, name):
    policy = policy_of(name)
    clean = policy.state(digest=True).norms
    for method, args in CHANGES.values():
        assert "error" not in call(policy, method, args)
    assert policy.state().sigma == 0.1
    assert "error" not in call(policy, "qerl_set_noise", (0.0, 0, 0, []))
    assert policy.state(digest=True).norms != clean


def test_promise_10_anybody_may_clear_noise_and_norms(policy_of):
    policy = policy_of("lora")
    clean = policy.state(digest=True)
    policy.swap(None, norms=NORMS)
    policy.set_noise(0.1, seed=1, rollout=1)
    assert "error" not in call(policy, "qerl_set_noise", (0.0, 0, 0, []))
    assert policy.state().sigma == 0
    assert policy.state(digest=True).norms != clean.norms
    for norms in (None, {}):
        policy.swap(None, norms=NORMS)
        assert "error" not in call(policy, "qerl_swap", (None, {}, norms))
        assert policy.state(digest=True).norms == clean.norms


def test_promise_10_the_policy_vouches_for_its_program(policy_of, measure):
    """The second half shows why others are refused: requests under the base's own name are answered with noise and
    norms."""
    policy = policy_of("lora")
    clean = policy.state(digest=True).norms
    base = measure.engine(policy._llm, None)
    assert policy.set_noise(0.1, seed=1, rollout=1).noisy_norms == 4
    noisy = policy.state(digest=True).norms
    policy.swap(None, norms=NORMS)
    assert len({clean, noisy, policy.state(digest=True).norms}) == 3
    assert measure.difference(measure.engine(policy._llm, None), base) > 1e-2
