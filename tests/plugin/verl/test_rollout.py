"""Test ``rollout.name=qerl``: what the server honours of verl's configuration, and what it refuses before it starts."""

import asyncio
import types

import pytest

from qerl_vllm_plugin.adapter.check import AdapterError

pytestmark = pytest.mark.usefixtures("verl_on_a_cpu")


@pytest.fixture(scope="module")
def rollout(verl_on_a_cpu):
    from qerl_vllm_plugin.verl import rollout

    return rollout


def configs(rollout_keys=None, model_keys=None):
    from verl.workers.config import CheckpointEngineConfig, RolloutConfig

    keys = {"name": "qerl", "load_format": "safetensors", **(rollout_keys or {})}
    if "checkpoint_engine" in keys:
        keys["checkpoint_engine"] = CheckpointEngineConfig(**keys["checkpoint_engine"])
    model = {"lora_rank": 8, "lora": {}, **(model_keys or {})}
    return RolloutConfig(**keys), types.SimpleNamespace(**model)


def test_a_plain_configuration_of_either_lora_key_is_taken(rollout):
    assert rollout.refusals(*configs()) == []
    assert rollout.refusals(*configs(model_keys={"lora_rank": 0, "lora": {"rank": 4}})) == []
    kwargs = {"vllm": {"additional_config": {"qerl": {"kernel": "auto"}}, "max_num_seqs": 4, "quantization": None}}
    assert rollout.refusals(*configs({"engine_kwargs": kwargs})) == []


@pytest.mark.parametrize(
    ("rollout_keys", "model_keys", "reason"),
    [
        ({}, {"lora_rank": 0}, "model.lora_rank is 0"),
        ({}, {"lora": {"merge": True}}, "model.lora.merge"),
        ({"load_format": "dummy"}, {}, "rollout.load_format=dummy"),
        ({"checkpoint_engine": {"backend": "nccl"}}, {}, "checkpoint_engine.backend=nccl"),
        ({"quantization": "fp8"}, {}, "rollout.quantization"),
        ({"qat": {"enable": True}}, {}, "rollout.qat"),
        ({"data_parallel_size": 2}, {}, "data_parallel_size"),
        ({"custom": {"qerl": {"sigma_start": 0.01}}}, {}, "agent_loop_manager_class=qerl_vllm_plugin.verl.noise"),
        ({"engine_kwargs": {"vllm": {"quantization": "fp8"}}}, {}, "engine_kwargs.vllm.quantization"),
        ({"engine_kwargs": {"vllm": {"worker_extension_cls": "a.B"}}}, {}, "engine_kwargs.vllm.worker_extension_cls"),
    ],
)
def test_what_it_cannot_honour_is_refused_by_name(rollout, rollout_keys, model_keys, reason):
    (found,) = rollout.refusals(*configs(rollout_keys, model_keys))
    assert reason in found


def test_the_adapter_s_room_joins_the_user_s_own_options(rollout):
    given = {"other": 1, "qerl": {"kernel": "auto"}}
    assert rollout.with_policy(given, 8) == {"other": 1, "qerl": {"kernel": "auto", "policy_adapter": {"rank": 8}}}
    assert rollout.with_policy('{"other": 1}', 8)["other"] == 1 and "policy_adapter" not in given["qerl"]
    with pytest.raises(ValueError, match="policy_adapter follows from"):
        rollout.with_policy({"qerl": {"policy_adapter": {"rank": 4}}}, 8)


@pytest.mark.parametrize(
    ("vllm", "keys", "kwargs", "warned"),
    [
        ("0.26.0", {}, {}, True),
        ("0.31.0", {}, {}, False),
        ("0.26.0", {"enable_sleep_mode": False}, {}, False),
        ("0.26.0", {}, {"kv_cache_memory_bytes": 1 << 30}, False),
    ],
)
def test_a_kv_cache_that_outgrows_its_share_is_announced(rollout, monkeypatch, vllm, keys, kwargs, warned):
    counts = rollout.engine.counts_released_memory
    monkeypatch.setattr(rollout.engine, "counts_released_memory", lambda: counts(vllm))
    warning = rollout.memory_warning(configs({"gpu_memory_utilization": 0.4, **keys})[0], kwargs)
    assert ("gpu_memory_utilization=0.4" in (warning or "")) == warned


class FakeEngine:
    """Play the part of AsyncLLM that the server calls."""

    def __init__(self):
        self.calls, self.answers, self.is_emptied, self.is_busy = [], [{"version": 1}], True, False
        self.output_processor = types.SimpleNamespace(has_unfinished_requests=lambda: self.is_busy)
        self.vllm_config = types.SimpleNamespace(kv_transfer_config=None)

    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        self.calls.append((method, args, kwargs))
        return self.answers

    async def reset_prefix_cache(self, reset_connector=False):
        self.calls.append(("reset_prefix_cache", reset_connector))
        return self.is_emptied

    async def reset_mm_cache(self):
        pass

    async def reset_encoder_cache(self):
        pass


@pytest.fixture
def server(rollout):
    """Return a replica's server with a fake engine, which records what the workers are told and when."""
    made = rollout.Server.__new__(rollout.Server)
    made.policy_version, made._noise, made._change, made.node_rank = 0, (0.0, 0, 0, ()), asyncio.Lock(), 0
    made.engine = FakeEngine()
    return made


def test_an_answer_that_is_a_refusal_stops_verl(server):
    send = {"peft_config": {"target_modules": {"b", "a"}}, "base_sync_done": True}
    asyncio.run(server.collective_rpc("update_weights_from_ipc", kwargs=send))
    assert server.policy_version == 1
    assert server.engine.calls[0] == ("receive_adapter", (), {**send, "peft_config": {"target_modules": ["a", "b"]}})
    assert ("reset_prefix_cache", False) in server.engine.calls
    server.engine.answers = [{"version": 2}, {"error": "rank 1 holds NaN"}]
    with pytest.raises(AdapterError, match="holds NaN"):
        asyncio.run(server.collective_rpc("update_weights_from_ipc", kwargs=send))
    server.engine.is_busy, server.engine.answers = True, [{"error": "requests are running"}]
    with pytest.raises(AdapterError, match="are running"):
        asyncio.run(server.collective_rpc("update_weights_from_ipc", kwargs=send))
    assert "requests are running" in server.engine.calls[-1][2]["refusal"]
    server.engine.is_busy, server.engine.answers, server.engine.is_emptied = False, [{"version": 2}], False
    with pytest.raises(RuntimeError, match="could not empty its prefix cache"):
        asyncio.run(server.collective_rpc("update_weights_from_ipc", kwargs=send))


def test_noise_changes_at_rest_once_and_behind_an_empty_cache(server):
    def told():
        return [call for call in server.engine.calls if call[0] == "qerl_set_noise"]

    asyncio.run(server.set_noise(0.0, 7, 3, ["input_layernorm"]))
    assert not told()  # there is nothing to clear
    for _ in range(2):
        asyncio.run(server.set_noise(0.05, 7, 3, ["input_layernorm"]))
    assert [call[1] for call in told()] == [(0.05, 7, 3, ["input_layernorm"])]
    assert server.engine.calls[-2][0] == "reset_prefix_cache"
    server.engine.is_busy = True
    asyncio.run(server.set_noise(0.05, 7, 3, ["input_layernorm"]))  # as for a second batch of the same rollout
    with pytest.raises(RuntimeError, match="requests are running"):
        asyncio.run(server.set_noise(0.0, 7, -1, ["input_layernorm"]))
    server.engine.is_busy = False
    asyncio.run(server.set_noise(0.0, 7, -1, ["input_layernorm"]))
    assert told()[-1][1] == (0.0, 0, 0, [])
