"""Test a change of the policy: anything may fail before the commit, and the commit itself allocates nothing."""

from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qerl_vllm_plugin.adapter.check import AdapterError
from qerl_vllm_plugin.compat import engine as compat
from qerl_vllm_plugin.compat import worker as vllm_worker
from qerl_vllm_plugin.policy import Policy, PolicyLostError
from qerl_vllm_plugin.worker.policy import policy_of, prepare_noise, prepare_swap

TOLERANCE = 1e-4
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NORMS = {"model.norm.weight": torch.linspace(0.5, 1.5, 64)}


def worker_policy(policy):
    return policy_of(policy._llm.llm_engine.model_executor.driver_worker.worker)


def served(policy, measure):
    return measure.engine(policy._llm, policy.request)


@pytest.mark.parametrize("ranks", [(8, 1), (4, 3)])
def test_a_smaller_rank_leaves_nothing_of_a_larger_one(policy, hf, make_adapter, measure, ranks):
    larger, smaller = (make_adapter(hf, seed=rank, r=rank, target_modules=MODULES) for rank in ranks)
    policy.swap(*larger[:2])
    policy.swap(*smaller[:2])
    assert measure.difference(served(policy, measure), measure.hf(smaller[2])) < TOLERANCE


def test_the_next_adapter_may_name_other_linears(policy, hf, make_adapter, measure):
    for modules in (["q_proj", "down_proj"], ["k_proj", "down_proj"], ["k_proj", "v_proj", "up_proj"], ["q_proj"]):
        tensors, config, model = make_adapter(hf, r=3, target_modules=modules)
        policy.swap(tensors, config)
        assert measure.difference(served(policy, measure), measure.hf(model)) < TOLERANCE


class Recorder(TorchDispatchMode):
    """Record every operation that allocates memory."""

    def __init__(self):
        super().__init__()
        self.allocating: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        is_in_place = function._schema.name.endswith("_")
        is_view = function.is_view or function._schema.name in ("aten::detach", "aten::_reshape_alias")
        if not is_in_place and not is_view:
            self.allocating.add(function._schema.name)
        return function(*args, **(kwargs or {}))


def test_a_commit_only_copies(policy, hf, make_adapter):
    tensors, config, _ = make_adapter(hf, r=3, target_modules=[*MODULES[:3], "down_proj"])
    config = {**config, "target_modules": sorted(config["target_modules"])}
    inside = worker_policy(policy)
    with torch.no_grad():
        changes = [
            prepare_swap(inside, tensors, config, NORMS, None, ""),
            prepare_swap(inside, None, {}, None, None, ""),
            prepare_noise(inside, 0.1, 1, 1, ["input_layernorm"]),
        ]
        for change in changes:
            with Recorder() as recorder:
                change.commit()
            assert recorder.allocating == set()
        with Recorder() as control:
            prepare_swap(inside, tensors, config, None, None, "")
    assert "aten::cat" in control.allocating


def test_promise_04_a_failure_before_commit_changes_nothing(policy, hf, make_adapter, measure, monkeypatch):
    policy.swap(*make_adapter(hf, seed=1)[:2], norms=NORMS)
    policy.set_noise(0.05, seed=1, rollout=1)
    before, answers = policy.state(digest=True), served(policy, measure)

    another = make_adapter(hf, seed=2)[:2]
    failures = {"out of GPU memory": torch.OutOfMemoryError("2 GiB"), "no kernel": RuntimeError("no kernel")}
    for said, failure in {**failures, "full": OSError(28, "full")}.items():
        with monkeypatch.context() as patched, pytest.raises(AdapterError, match=said):
            patched.setattr(worker_policy(policy).carrier, "stage", Mock(side_effect=failure))
            policy.swap(*another)
    assert policy.state(digest=True) == before
    assert torch.equal(served(policy, measure), answers)


def test_promise_04_no_rank_commits_what_another_refused(policy, hf, make_adapter, measure, monkeypatch):
    before = policy.state(digest=True)
    monkeypatch.setattr(vllm_worker, "highest", lambda here: 2)  # as if another rank of this model had refused
    with pytest.raises(AdapterError, match="another rank"):
        policy.swap(*make_adapter(hf)[:2])
    with pytest.raises(AdapterError, match="another rank"):
        policy.set_noise(0.1, seed=1, rollout=1)
    assert policy.state(digest=True) == before


def scaled(adapter, size):
    """Return the adapter with A and B ``size`` times as large, and its config."""
    tensors, config, _ = adapter
    return {name: tensor * size for name, tensor in tensors.items()}, config


@pytest.mark.parametrize(
    ("size", "norms", "named"),
    [
        (1e15, None, r"^model\.layers\.0\.\S+: the engine computes an activation of [0-9.e+]{7}; beyond 1e\+17"),
        (1e19, None, "that is infinite or no number"),
        (1.0, {"model.layers.0.post_attention_layernorm.weight": torch.full((64,), 1e12)}, r"^model\.layers\.0\.mlp"),
    ],
)
def test_promise_04_numbers_too_large_to_compute_with(policy, hf, make_adapter, measure, size, norms, named):
    adapter = make_adapter(hf, seed=1)
    policy.swap(*adapter[:2], norms=NORMS)
    policy.set_noise(0.05, seed=1, rollout=1)
    before, answers = policy.state(digest=True), served(policy, measure)
    for _ in range(2):  # a refusal also leaves no trace in the cache of checked adapters
        with pytest.raises(AdapterError, match=named) as refused:
            policy.swap(*scaled(adapter, size), norms=norms)
        assert "nothing has changed. Was the learning rate too high?" in str(refused.value)
    assert policy.state(digest=True) == before
    assert torch.equal(served(policy, measure), answers)


def test_a_large_adapter_is_tried_and_served(policy, hf, make_adapter, measure, monkeypatch):
    from qerl_vllm_plugin.weights import overflow

    tried, check = [], overflow.check_engine
    monkeypatch.setattr(overflow, "check_engine", lambda *args: tried.append(check(*args)))
    adapter = make_adapter(hf, seed=1)
    policy.swap(*adapter[:2])
    assert not tried, "an adapter of usual size waits for nothing"
    model = adapter[2]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(30)
    policy.swap(*scaled(adapter, 30))
    assert len(tried) == 1 and tried[0].largest()[1] > 100, "the adapter itself is in what was tried"
    assert measure.difference(served(policy, measure), measure.hf(model)) < 0.01
    monkeypatch.setattr(overflow, "check_engine", lambda *args: tried.append(float(policy_norms(policy).max())))
    policy.set_noise(1000, seed=1, rollout=1)
    assert len(tried) == 2 and tried[1] > 500, "noise is tried where it lies"


def policy_norms(policy):
    return worker_policy(policy).layers["model.layers.0.input_layernorm.weight"].weight.data


GOOD = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
SEVEN = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 64)}
HOSTILE = {
    "damaged_bytes": ("qerl_swap", (b"\xff" * 100, GOOD, None)),
    "no_such_file": ("qerl_swap", ("/dev/shm/qerl-not-there", GOOD, None)),
    "alpha_beyond_floats": ("qerl_swap", (SEVEN, {**GOOD, "lora_alpha": 10**400}, None)),
    "half_a_layer": ("qerl_swap", (SEVEN, {**GOOD, "layers_to_transform": 5.5}, None)),
    "rank_beyond_floats": ("qerl_swap", (SEVEN, {**GOOD, "r": 10**400}, None)),
    "a_config_that_is_a_list": ("qerl_swap", (SEVEN, ["q_proj"], None)),
    "no_config": ("qerl_swap", (SEVEN, None, None)),
    "tensors_that_are_a_list": ("qerl_swap", ([1], GOOD, None)),
    "too_few_arguments": ("qerl_swap", ()),
    "sigma_null": ("qerl_set_noise", (None, 1, 1, ["input_layernorm"])),
    "seed_a_word": ("qerl_set_noise", (0.1, "one", 1, ["input_layernorm"])),
    "targets_a_number": ("qerl_set_noise", (0.1, 1, 1, 7)),
    "targets_a_word": ("qerl_set_noise", (0.1, 1, 1, "input_layernorm")),
    "another_method": ("qerl_state", (1, 2, 3, 4)),
}


def test_no_exception_leaves_a_worker(policy):
    before = policy.state(digest=True)
    for case, (method, args) in HOSTILE.items():
        (answer,) = policy._llm.collective_rpc(method, args=args)
        assert len(answer["error"]) > 10, case
        assert policy.state(digest=True) == before, case


def test_a_cache_outside_the_engine_is_emptied_too(policy, monkeypatch):
    asked = []
    monkeypatch.setattr(policy._llm, "reset_prefix_cache", lambda **options: asked.append(options) or True)
    policy.swap(None)
    monkeypatch.setattr(policy._llm.llm_engine.vllm_config, "kv_transfer_config", object())
    policy.swap(None)
    assert asked == [{"reset_connector": False}, {"reset_connector": True}]


def test_a_cache_outside_that_nobody_can_empty_is_refused(policy, monkeypatch):
    from vllm.config import KVTransferConfig

    config = policy._llm.llm_engine.vllm_config
    for name, is_refused in (("ExampleConnector", True), ("OffloadingConnector", False)):
        monkeypatch.setattr(config, "kv_transfer_config", KVTransferConfig(kv_connector=name, kv_role="kv_both"))
        if is_refused:
            with pytest.raises(ValueError, match="ExampleConnector keeps keys and values outside"):
                Policy(policy._llm)
        else:
            compat.check_kv_connector(config)


def test_promise_04_half_a_policy_serves_nothing(boot, make_nvfp4, hf, make_adapter, carrier_options, measure):
    policy = Policy(boot(make_nvfp4("qwen2"), **carrier_options))
    policy.swap(*make_adapter(hf, seed=1)[:2])
    carrier = worker_policy(policy).carrier
    commit = carrier.commit

    def half_way(staged):
        commit(staged)
        raise RuntimeError("the device is gone")

    carrier.commit = half_way
    # a replayed CUDA graph runs no Python of the model, so the step must be refused before it
    runner = policy._llm.llm_engine.model_executor.driver_worker.worker.model_runner
    runner.execute_model = lambda *_, **__: pytest.fail("a lost engine has come as far as its model")
    with pytest.raises(PolicyLostError, match=r"serves nothing any more; restart it.*the device is gone"):
        policy.swap(*make_adapter(hf, seed=2)[:2])
    for use in (
        lambda: policy.swap(None),
        lambda: policy.set_noise(0.1, seed=1, rollout=1),
        policy.state,
        lambda: Policy(policy._llm),
        lambda: policy.request,
    ):
        with pytest.raises(PolicyLostError, match="the device is gone"):
            use()
    with pytest.raises(RuntimeError, match="the device is gone"):
        measure.engine(policy._llm, policy._request)


@pytest.mark.parametrize("key", ["version", "hash", "sigma", "norms"])
def test_ranks_that_hold_different_policies_are_reported(policy, key, monkeypatch):
    (state,) = policy._call("qerl_state", True)
    monkeypatch.setattr(policy, "_call", lambda *_: [state, {**state, key: "another"}])
    with pytest.raises(RuntimeError, match="the workers of this engine hold different policies"):
        policy.state(digest=True)
