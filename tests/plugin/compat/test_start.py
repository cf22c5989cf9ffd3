import gc
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from vllm import SamplingParams
from vllm.model_executor.models import registry
from vllm.v1.engine import utils
from vllm.v1.worker import worker_base

from qerl_vllm_plugin.compat import engine
from qerl_vllm_plugin.quantization import QerlConfig


def test_a_models_class_is_looked_at_in_this_process(monkeypatch):
    monkeypatch.setattr(registry._LazyRegisteredModel, "_load_modelinfo_from_cache", lambda *_: None)
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: pytest.fail("another process"))
    with engine.start_in_this_process():
        info = registry.ModelRegistry.models["Qwen2ForCausalLM"].inspect_model_cls()
    assert (info.architecture, info.is_text_generation_model) == ("Qwen2ForCausalLM", True)
    with pytest.raises(pytest.fail.Exception):  # afterwards as before
        registry.ModelRegistry.models["Qwen2ForCausalLM"].inspect_model_cls()


def test_phases_are_told_apart(monkeypatch):
    """Check a worker that compiles for 3 s of its profile, and captures graphs for 2 of the last phase's 6 s."""
    clock = [0.0]
    monkeypatch.setattr(engine.time, "perf_counter", lambda: clock[0])

    def wait(seconds):
        clock[0] += seconds

    class Worker:
        vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(compilation_time=3.0))
        model_runner = SimpleNamespace(capture_model=lambda: wait(2))

        def load_model(self):
            wait(1)

        def determine_available_memory(self):
            wait(5)

        def compile_or_warm_up_model(self):
            wait(4)
            self.model_runner.capture_model()

    def init_worker(wrapper):
        wrapper.worker = Worker()

    monkeypatch.setattr(worker_base.WorkerWrapperBase, "init_worker", init_worker)
    with engine.start_in_this_process() as seconds:
        wrapper = SimpleNamespace()
        worker_base.WorkerWrapperBase.init_worker(wrapper)
        for phase in engine.START_PHASES:
            getattr(wrapper.worker, phase)()
    assert seconds == {"weights": 1, "memory profile": 2, "graphs": 2, "warm-up": 4, "compile": 3}
    assert not vars(wrapper.worker) and worker_base.WorkerWrapperBase.init_worker is init_worker


def test_a_start_samples_as_it_is_told():
    own = SamplingParams.for_sampler_warmup()
    with engine.start_in_this_process(SamplingParams(temperature=0.5)):
        assert SamplingParams.for_sampler_warmup() == SamplingParams(temperature=0.5)
    with engine.start_in_this_process():
        assert SamplingParams.for_sampler_warmup() == own
    assert SamplingParams.for_sampler_warmup() == own


def test_garbage_is_collected_again_after_a_start():
    with pytest.raises(ValueError, match="failed"), engine.start_in_this_process():
        assert not gc.isenabled()
        raise ValueError("failed")
    assert gc.isenabled()


@pytest.mark.parametrize("kind", [AssertionError, RuntimeError])
def test_memory_that_others_give_back_meanwhile_is_told_with_the_way_out(kind):
    vllms = "Error in memory profiling. Initial free memory 9.5 GiB, current free memory 20.1 GiB. This happens when"
    with pytest.raises(ValueError, match=r"^another process gave memory .* 20\.1 GiB\); .* --kv_cache_memory_bytes, "):
        with engine.start_in_this_process():
            raise kind(vllms)
    with pytest.raises(kind, match="another"), engine.start_in_this_process():
        raise kind("another")


def test_what_was_imported_is_left_out_once_and_until_the_end(monkeypatch):
    calls = []
    monkeypatch.setattr(engine.gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr(engine.atexit, "register", calls.append)
    engine._leave_out_imports.cache_clear()
    for _ in range(2):
        with engine.start_in_this_process():
            pass
    assert calls == ["freeze", gc.unfreeze]


def test_a_sigterm_ends_a_start_that_waits_for_its_engine(monkeypatch):
    """Check vLLM's own start, without processes; it swallows what its handler of SIGTERM raises."""
    parallel = SimpleNamespace(
        data_parallel_size=1,
        data_parallel_size_local=1,
        data_parallel_rank=0,
        data_parallel_rank_local=None,
        data_parallel_master_ip="127.0.0.1",
        data_parallel_rpc_port=0,
        data_parallel_backend="mp",
        local_engines_only=True,
        enable_elastic_ep=False,
    )
    model = SimpleNamespace(multimodal_config=None)
    config = Mock(parallel_config=parallel, model_config=model, needs_dp_coordinator=False)
    monkeypatch.setattr(utils, "CoreEngineProcManager", Mock())
    told = Mock(side_effect=[KeyboardInterrupt("terminated"), KeyboardInterrupt()])
    monkeypatch.setattr(utils, "wait_for_engine_startup", told)
    monkeypatch.setattr(utils, "zmq_socket_ctx", utils.zmq_socket_ctx)
    engine.end_start_on_sigterm.cache_clear()
    QerlConfig()
    with pytest.raises(SystemExit) as ended, utils.launch_core_engines(config, None, False, Mock()):
        pass
    assert ended.value.code == 143
    with utils.launch_core_engines(config, None, False, Mock()):  # a Ctrl-C is vLLM's own affair
        pass
    assert told.call_count == 2
