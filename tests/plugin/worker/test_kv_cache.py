"""Test that the KV cache releases its memory and takes it again. Anything else that changed meanwhile is found and
named."""

import ctypes
import types

import pytest
import torch
from vllm import SamplingParams

from qerl_vllm_plugin.compat import kv_cache_memory
from qerl_vllm_plugin.compat import worker as vllm_worker
from qerl_vllm_plugin.policy import Policy
from qerl_vllm_plugin.weights.frozen_weights import frozen_weights
from qerl_vllm_plugin.worker import kv_cache
from qerl_vllm_plugin.worker.kv_cache import KVCacheError, remainders

PROMPT = {"prompt_token_ids": [(7 * i) % 60 + 2 for i in range(70)]}
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, logprobs=2, ignore_eos=True)
RELEASED = "call Policy.resume_kv_cache"
ENGINE = {"enable_prefix_caching": True, "block_size": 32}


class FakeMemory:
    """GPU memory whose pieces can be unmapped, played by memory of this process. Unmapping a piece loses its
    content."""

    def __init__(self, pieces, caches):
        self._pieces, self._caches, self.free, self.broken = dict(pieces), caches, 2**40, -1
        self.mapped, self.events = set(self._pieces), []

    def caches(self):
        return self._caches

    def allocations(self):
        return list(self._pieces.items())

    def unmap(self, address):
        self.mapped.remove(address)
        self.events.append("unmap")
        ctypes.memset(address, 0xFF, self._pieces[address])

    def map(self, address):
        assert address not in self.mapped
        if address == self.broken:
            raise RuntimeError("out of memory")
        self.mapped.add(address)
        self.events.append("map")

    def read(self, address, size):
        return torch.frombuffer(bytearray(ctypes.string_at(address, size)), dtype=torch.uint8)

    def write(self, address, copy):
        ctypes.memmove(address, copy.data_ptr(), len(copy))

    def clear_caches(self):
        assert self.mapped == set(self._pieces)
        for address, size in self._caches:
            ctypes.memset(address, 0, size)

    def free_bytes(self):
        return self.free


@pytest.fixture
def memory(engine, monkeypatch):
    """Let the engine release the memory of its real KV cache, as if it were of a GPU."""
    runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
    storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage() for cache in runner.kv_caches}
    spans = [(address, storage.nbytes()) for address, storage in storages.items()]
    memory = FakeMemory(spans, spans)
    monkeypatch.setattr(kv_cache_memory, "KVCacheMemory", lambda worker: memory)
    return memory


@pytest.fixture(scope="module")
def adapter(hf, make_adapter):
    return make_adapter(hf, target_modules="all-linear")[:2]


@pytest.fixture
def policy(engine, memory, adapter):
    """Set an adapter and noise, so that there is something to lose. Resume the KV cache after the test."""
    policy = Policy(engine)
    policy.swap(*adapter)
    policy.set_noise(0.05, seed=1, rollout=2)
    yield policy
    if policy._is_released:
        policy.resume_kv_cache()


def ask(policy):
    output = policy._llm.generate([PROMPT], GREEDY, use_tqdm=False, lora_request=policy.request)[0]
    steps = [{token: value.logprob for token, value in step.items()} for step in output.outputs[0].logprobs]
    return tuple(output.outputs[0].token_ids), steps, output.num_cached_tokens


def worker_of(policy):
    return policy._llm.llm_engine.model_executor.driver_worker.worker


def test_after_a_cycle_the_answers_are_the_same_bits(policy, memory):
    policy._llm.reset_prefix_cache()
    before, state = ask(policy), policy.state(digest=True)
    assert ask(policy)[2] == 64  # served from the cache
    released = policy.release_kv_cache()
    assert released == sum(size for _, size in memory.caches()) > 0
    assert not memory.mapped
    assert policy.state(digest=True) == state
    policy.resume_kv_cache()
    caches = worker_of(policy).model_runner.kv_caches
    assert all(not cache.any() for cache in caches), "a fake that is given back is all ones"
    assert ask(policy) == before
    assert policy.state(digest=True) == state


def test_many_cycles_with_swaps_and_noise_between_them(policy, memory):
    policy._llm.reset_prefix_cache()
    before = ask(policy)
    for rollout in range(2):
        policy.release_kv_cache()
        policy.resume_kv_cache()
        policy.set_noise(0.05, seed=1, rollout=rollout)
    policy.set_noise(0.05, seed=1, rollout=2)
    assert ask(policy) == before
    assert memory.events == (["unmap"] * len(memory.caches()) + ["map"] * len(memory.caches())) * 2


def test_a_released_engine_neither_changes_nor_answers(policy):
    version = policy.version
    policy.release_kv_cache()
    changes = [
        lambda: policy.swap(None),
        lambda: policy.set_noise(0.1, seed=0, rollout=0),
        policy.clear_noise,
        lambda: policy.request,
    ]
    for change in changes:
        with pytest.raises(KVCacheError, match=RELEASED):
            change()
    assert policy.state().version == version and policy.state().sigma == 0.05
    assert Policy(policy._llm)._is_released, "a second policy on the engine must know"


def test_a_request_to_a_released_engine_is_refused(policy, monkeypatch):
    policy._llm.reset_prefix_cache()
    before, request = ask(policy), policy.request
    policy.release_kv_cache()
    with monkeypatch.context() as patched:
        # a replayed CUDA graph runs no Python of the model, so the step must be refused before it
        runner = worker_of(policy).model_runner
        patched.setattr(runner, "execute_model", lambda *_, **__: pytest.fail("a step has come as far as its model"))
        with pytest.raises(KVCacheError, match=RELEASED):
            policy._llm.generate([PROMPT], GREEDY, use_tqdm=False, lora_request=request)
        with pytest.raises(KVCacheError, match=RELEASED):
            worker_of(policy).execute_dummy_batch()
    engine = policy._llm.llm_engine
    if engine.has_unfinished_requests():
        with pytest.raises(KVCacheError, match="abort them first"):
            policy.resume_kv_cache()
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
    policy.resume_kv_cache()
    assert ask(policy) == before


def test_a_lost_engine_is_not_resumed():
    worker = types.SimpleNamespace(execute_model=lambda: "a step", execute_dummy_batch=lambda: None)
    allow = vllm_worker.refuse_to_run(worker, lambda: KVCacheError("released"))
    with pytest.raises(KVCacheError, match="released"):
        worker.execute_model()
    allow()
    assert worker.execute_model() == "a step"
    allow = vllm_worker.refuse_to_run(worker, lambda: KVCacheError("released"))
    vllm_worker.refuse_to_run(worker, lambda: RuntimeError("lost"))
    allow()
    with pytest.raises(RuntimeError, match="lost"):
        worker.execute_model()


def test_it_is_released_and_resumed_in_turn(policy, memory):
    with pytest.raises(KVCacheError, match="nothing to resume"):
        policy.resume_kv_cache()
    policy.release_kv_cache()
    with pytest.raises(KVCacheError, match=RELEASED):
        policy.release_kv_cache()
    with pytest.raises(KVCacheError, match="already"):
        kv_cache.release(worker_of(policy), memory)
    policy.resume_kv_cache()
    with pytest.raises(KVCacheError, match="nothing to resume"):
        policy.resume_kv_cache()
    ask(policy)


def guarded(policy):
    """Return one tensor of each kind with the name that the error must give."""
    tensors = kv_cache._tensors(worker_of(policy))
    kinds = {
        "packed weight": "model.layers.1.mlp.down_proj.weight_packed",
        "row scale": "model.layers.0.self_attn.qkv_proj.weight_row_scale",
        "embedding": "model.embed_tokens.weight",
        "norm": "model.layers.1.input_layernorm.weight",
        "norm without noise": "model.layers.1.input_layernorm.weight as loaded",
        "adapter": "model.layers.0.mlp.gate_up_proj.policy_b",
    }
    if policy.carrier == "lora":
        kinds = {kind: name.replace("_proj.", "_proj.base_layer.") for kind, name in kinds.items()}
        kinds["adapter"] = "buffer 2 of the adapter"
    return {kind: (name, tensors[name]) for kind, name in kinds.items()}


def test_a_single_flipped_bit_is_found_and_named(policy):
    policy.release_kv_cache()
    for name, tensor in guarded(policy).values():
        raw = tensor.data.view(torch.uint8).view(-1)
        raw[len(raw) // 2] ^= 0x10
        with pytest.raises(KVCacheError, match=rf"^{name} has changed while the KV cache was released.*last checkpoin"):
            policy.resume_kv_cache()
        with pytest.raises(KVCacheError, match=f"^{name} has changed"):
            policy.check_unchanged()
        with pytest.raises(KVCacheError, match=RELEASED):  # the run cannot go on
            policy.swap(None)
        raw[len(raw) // 2] ^= 0x10
        policy.check_unchanged()
    policy.resume_kv_cache()
    policy.check_unchanged()  # the engine runs, so there is nothing to compare


def test_a_weight_that_was_replaced_by_its_equal_is_found(policy):
    name, weight = guarded(policy)["packed weight"]
    before = weight.data
    policy.release_kv_cache()
    weight.data = before.clone()
    with pytest.raises(KVCacheError, match=f"^{name} was replaced"):
        policy.resume_kv_cache()
    weight.data = before
    policy.resume_kv_cache()


def test_a_trainer_may_read_the_weights_meanwhile(policy):
    lent = frozen_weights(policy._llm)
    total = sum(int(weight.weight.codes.sum()) for weight in lent.linears.values())
    policy.release_kv_cache()
    assert sum(int(weight.weight.codes.sum()) for weight in lent.linears.values()) == total
    policy.resume_kv_cache()


@pytest.mark.parametrize("case", ["too little is free", "the last piece cannot be had"])
def test_too_little_memory_leaves_nothing_half_done(policy, memory, case):
    policy.release_kv_cache()
    if case == "too little is free":
        memory.free = sum(size for _, size in memory.caches()) - 1
    else:
        memory.broken = memory.allocations()[-1][0]
    with pytest.raises(KVCacheError, match=r"needs its .* GiB again: .*Lower gpu_memory_utilization"):
        policy.resume_kv_cache()
    assert not memory.mapped
    memory.free, memory.broken = 2**40, -1
    policy.resume_kv_cache()
    ask(policy)


def test_what_lies_beside_the_cache_is_kept(policy):
    """Use pieces of 100, 50 and 200 bytes. The cache fills bytes 20 to 80 of the first piece and all of the last except
    10 bytes."""
    arena = torch.arange(350, dtype=torch.int32).to(torch.uint8)
    before, start, worker = arena.clone(), arena.data_ptr(), worker_of(policy)
    pieces = [(start, 100), (start + 100, 50), (start + 150, 200)]
    memory = FakeMemory(pieces, [(start + 160, 190), (start + 20, 60)])
    assert kv_cache.release(worker, memory) == 300
    assert memory.mapped == {start + 100}
    assert bool((arena[:100] == 255).all()) and bool((arena[150:] == 255).all())
    kv_cache.resume(worker)
    expected = before.clone()
    expected[20:80] = expected[160:] = 0
    assert torch.equal(arena, expected)


REMAINDERS = {
    "no cache": ([], [(100, 50)]),
    "all of it": ([(100, 50)], []),
    "more than it": ([(90, 100)], []),
    "elsewhere": ([(50, 50), (150, 10)], [(100, 50)]),
    "the middle": ([(110, 10)], [(100, 10), (120, 30)]),
    "both ends": ([(140, 20), (90, 15)], [(105, 35)]),
    "neighbours": ([(110, 10), (120, 10)], [(100, 10), (130, 20)]),
}


@pytest.mark.parametrize("case", REMAINDERS)
def test_what_of_a_piece_is_no_cache(case):
    caches, expected = REMAINDERS[case]
    assert remainders((100, 50), caches) == expected


def test_an_engine_without_such_memory_says_so(engine):
    with pytest.raises(KVCacheError, match="only an NVIDIA GPU"):
        Policy(engine).release_kv_cache()
    assert Policy(engine).request == Policy(engine).request  # the engine is not marked as released


def test_an_engine_on_several_gpus_says_so(policy):
    config = types.SimpleNamespace(parallel_config=types.SimpleNamespace(world_size=2))
    policy._llm, llm = types.SimpleNamespace(llm_engine=types.SimpleNamespace(vllm_config=config)), policy._llm
    with pytest.raises(KVCacheError, match="cut over 2 GPUs"):
        policy.release_kv_cache()
    policy._llm = llm
