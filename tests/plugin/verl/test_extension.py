"""Test a vLLM worker under verl. Adapters arrive by verl's own transport and become the policy's versions."""

import asyncio
import threading

import pytest
import torch
from waiting import PATIENCE

from qerl_vllm_plugin.adapter.check import plain_config
from qerl_vllm_plugin.policy import Policy

pytestmark = pytest.mark.usefixtures("verl_on_a_cpu")

EXTENSION = "qerl_vllm_plugin.verl.extension.Extension"
RESIDENT = {"additional_config": {"qerl": {"policy_adapter": {"rank": 8}}}, "dtype": "float32"}
ADAPTERS = [{"seed": 1}, {"seed": 2, "r": 8, "target_modules": "all-linear", "use_rslora": True}]


@pytest.fixture(scope="module")
def folder(make_bf16, write_packed):
    return write_packed(make_bf16("qwen2"))


@pytest.fixture(scope="module")
def engine(verl_on_a_cpu, boot, folder):
    """Start an engine whose worker has verl's extension."""
    return boot(folder, worker_extension_cls=EXTENSION, **RESIDENT)


@pytest.fixture(scope="module")
def adapters(folder, reference, make_adapter):
    """Return (tensors, config) of two real PEFT models."""
    return [make_adapter(reference(folder), **changes)[:2] for changes in ADAPTERS]


@pytest.fixture
def push(engine, monkeypatch):
    """push(tensors, method=..., **kwargs) sends them as verl's trainer does, with verl's own sender."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    monkeypatch.setenv("VERL_RAY_JOB_ID", f"test-{threading.get_native_id()}")
    handle = engine.collective_rpc("_get_zmq_handle")[0]

    def send(tensors, method="receive_adapter", **kwargs):
        sender = BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True)
        sending = sender.async_send_weights(iter(tensors.items()))
        # a daemon, since it may wait for ever
        trainer = threading.Thread(target=asyncio.run, args=(sending,), daemon=True)
        trainer.start()
        try:
            return engine.collective_rpc(method, kwargs={"use_shm": True, **kwargs})
        finally:
            trainer.join(PATIENCE)
            assert not trainer.is_alive(), "verl's sender still waits"

    return send


def test_an_adapter_from_verl_equals_an_ordinary_swap(engine, adapters, push, measure):
    policy = Policy(engine)
    base = measure.engine(engine)
    for tensors, config in adapters:
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        answers = push(tensors, peft_config=plain_config(config), base_sync_done=True)
        received = measure.engine(engine)
        state = policy.state(digest=True)
        assert answers[0]["version"] == state.version
        policy.swap(None)
        assert policy.swap(tensors, config) == state.version + 2
        assert torch.equal(received, measure.engine(engine))
        assert policy.state(digest=True).adapter == state.adapter
        assert measure.difference(received, base) > 0.01
        assert all(torch.equal(tensors[name], before[name]) for name in tensors)


def test_an_adapter_in_several_buckets_arrives_whole(engine, adapters, push, monkeypatch):
    from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer as transport

    tensors, config = adapters[1]
    original = transport.BucketedWeightSender.__init__

    def small(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.bucket_size = 4096

    policy = Policy(engine)
    policy.swap(tensors, config)
    whole = policy.state(digest=True).adapter
    policy.swap(None)
    monkeypatch.setattr(transport.BucketedWeightSender, "__init__", small)
    assert sum(tensor.nbytes for tensor in tensors.values()) > 5 * 4096
    push(tensors, peft_config=plain_config(config), base_sync_done=True)
    assert policy.state(digest=True).adapter == whole


def test_all_but_a_whole_adapter_is_refused(engine, adapters, push, measure):
    tensors, config = adapters[0]
    plain = plain_config(config)
    policy = Policy(engine)
    policy.swap(tensors, config)
    before, answers = policy.state(digest=True), measure.engine(engine)
    full = {"model.embed_tokens.weight": torch.zeros(64, 64), "model.norm.weight": torch.zeros(64)}
    broken = {name: tensor * float("nan") for name, tensor in tensors.items()}
    for pushed, keywords, reason in (
        (full, {"peft_config": plain, "base_sync_done": False}, "2 tensors that are no LoRA adapter"),
        (full, {"peft_config": None, "base_sync_done": True}, "model.lora.merge"),
        (broken, {"peft_config": plain, "base_sync_done": True}, "NaN"),
        (tensors, {"peft_config": {**plain, "r": 64}, "base_sync_done": True}, "rank"),
        (tensors, {"peft_config": plain, "base_sync_done": True, "refusal": "requests are running"}, "are running"),
    ):
        refused = push(pushed, **keywords)
        assert reason in refused[0]["error"], refused
        assert policy.state(digest=True) == before
    assert torch.equal(measure.engine(engine), answers)
    # the engine takes an adapter afterwards
    push(tensors, peft_config=plain, base_sync_done=True)
    assert policy.state().version == before.version + 1


def test_verl_patches_nothing_of_a_packed_model(engine):
    """verl looks for the ``quant_format`` of compressed-tensors, and would then load weights in its own way."""
    worker = engine.llm_engine.model_executor.driver_worker.worker
    assert not worker._is_qat_model and not worker._is_modelopt_qat
    assert not hasattr(worker.vllm_config.quant_config, "quant_format")
