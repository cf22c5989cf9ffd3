"""Test that a policy cannot change while vLLM's sleep mode has released the memory that holds it."""

from types import SimpleNamespace

import pytest
import torch

from qerl_vllm_plugin.adapter.check import AdapterError
from qerl_vllm_plugin.compat import engine as compat
from qerl_vllm_plugin.compat import worker as vllm_worker
from qerl_vllm_plugin.policy import Policy
from qerl_vllm_plugin.worker.change import PAGE, page_words


def entry(tag, is_asleep):
    return SimpleNamespace(tag=tag, is_asleep=is_asleep)


@pytest.mark.parametrize(
    ("entries", "are_away"),
    [
        ([entry("weights", True), entry("kv_cache", True)], True),
        ([entry("weights", False), entry("kv_cache", True)], False),  # woken with tags=["weights"]
        ([entry("weights", False), entry("weights", True)], True),
        ([], False),
    ],
)
def test_only_the_weights_have_to_be_awake(monkeypatch, entries, are_away):
    from vllm.device_allocator import cumem

    assert not vllm_worker.weights_are_away(), "there is no sleep mode here"
    monkeypatch.setattr(vllm_worker, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    assert not vllm_worker.weights_are_away(), "an engine without sleep mode has no such pool"
    pool = SimpleNamespace(pointer_to_data=dict(enumerate(entries)))
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", pool)
    assert vllm_worker.weights_are_away() is are_away


def test_a_sleeping_engine_refuses_every_change(boot, make_nvfp4, carriers, monkeypatch, measure):
    policy = Policy(boot(make_nvfp4("qwen2"), **carriers["resident"]))
    before = measure.engine(policy._llm)
    monkeypatch.setattr(vllm_worker, "weights_are_away", lambda: True)
    for change in (
        lambda: policy.swap(None),
        lambda: policy.set_noise(0.3, seed=1, rollout=1),
        policy.clear_noise,
    ):
        with pytest.raises(AdapterError, match=r"this engine sleeps.*wake_up\(tags=\[\"weights\"\]\)"):
            change()
    assert torch.equal(measure.engine(policy._llm), before)
    monkeypatch.setattr(vllm_worker, "weights_are_away", lambda: False)
    version = policy.swap(None)
    assert policy.swap(None) == version + 1
    assert policy.set_noise(0.3, seed=1, rollout=1).noisy_norms == 4
    assert not torch.equal(measure.engine(policy._llm), before)


def test_weights_lost_in_sleep_are_noticed(boot, make_nvfp4, make_adapter, reference, carriers, monkeypatch):
    folder = make_nvfp4("qwen2")
    monkeypatch.setattr(vllm_worker, "may_sleep", lambda worker: True)
    engine = boot(folder, **carriers["resident"])
    policy = Policy(engine)
    tensors, config, _ = make_adapter(reference(folder), seed=1)
    policy.swap(tensors, config)  # the policy's own tensors may change
    policy.set_noise(0.3, seed=1, rollout=1)
    version = policy.swap(None)
    model = compat.model_in_this_process(engine)
    for name in ("embed_tokens", "down_proj", "qkv_proj"):
        weight = next(parameter for key, parameter in model.named_parameters() if name in key and "weight" in key)
        kept = weight.data.clone()
        weight.data.zero_()
        for change in (lambda: policy.swap(None), lambda: policy.set_noise(0.3, seed=1, rollout=1)):
            with pytest.raises(AdapterError, match="restart it, and sleep at level 1"):
                change()
        with pytest.raises(AdapterError, match="sleep at level 1"):
            Policy(engine)
        weight.data.copy_(kept)
    assert policy.swap(None) == version + 1


def test_a_word_of_every_page_is_looked_at():
    weight, norm = torch.zeros(3 * PAGE // 8 + 5, dtype=torch.int64), torch.zeros(8)
    before = page_words([weight, weight[10:], norm], [norm])
    assert len(before) == 4, "each storage once, and no norm"
    for page in range(4):
        weight[page * PAGE // 8] = 1
        assert not torch.equal(page_words([weight, norm], [norm]), before)
        weight.zero_()
    norm += 1
    assert torch.equal(page_words([weight, norm], [norm]), before)
