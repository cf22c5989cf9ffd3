"""Test the entry point, which is idempotent, light and found by vLLM, and which versions of vLLM are accepted."""

import ast
import sys

import pytest

from qerl_vllm_plugin import register
from qerl_vllm_plugin.compat import engine
from qerl_vllm_plugin.worker import methods

# The first attempts run in forked copies of this process, since vLLM has to find the plugin itself afterwards. The
# fastest attempt counts: a busy machine or a cold disk is not the plugin's fault.
FRESH_PROCESS = """
import os, sys, time
import vllm.engine.arg_utils
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

for attempt in range(3):
    child = os.fork()
    if child == 0:
        before = set(sys.modules)
        start = time.process_time()
        from qerl_vllm_plugin import register
        register()
        milliseconds = 1e3 * (time.process_time() - start)
        register()
        assert QUANTIZATION_METHODS.count("qerl_nvfp4") == 1
        new = {name.split(".")[0] for name in set(sys.modules) - before}
        assert attempt or get_quantization_config("qerl_nvfp4").__name__ == "QerlConfig"
        print("registered", milliseconds, sorted(new), flush=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child failed"

assert "qerl_vllm_plugin" not in sys.modules and "qerl_nvfp4" not in QUANTIZATION_METHODS
from vllm.plugins import load_general_plugins
import vllm.v1.worker.worker_base
load_general_plugins()
load_general_plugins()
assert QUANTIZATION_METHODS.count("qerl_nvfp4") == 1
assert callable(vllm.v1.worker.worker_base.WorkerBase.qerl_swap)
print("loaded")
"""


@pytest.mark.integration
def test_register_takes_under_50_ms_and_vllm_finds_it(run_process, tmp_path):
    run_process([sys.executable, "-c", FRESH_PROCESS], tmp_path / "log")
    lines = (tmp_path / "log").read_text().strip().splitlines()
    registered = [line.split(" ", 2)[1:] for line in lines if line.startswith("registered ")]
    assert len(registered) == 3
    assert min(float(milliseconds) for milliseconds, _ in registered) < 50
    for _, packages in registered:
        assert set(ast.literal_eval(packages)) <= {"qerl_vllm_plugin", "qerl_kernels"}
    assert lines[-1] == "loaded"


def test_register_is_idempotent_beside_a_worker():
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.v1.worker.worker_base import WorkerBase

    for _ in range(2):
        register()
    assert QUANTIZATION_METHODS.count("qerl_nvfp4") == 1
    assert [name for name, method in methods.METHODS.items() if getattr(WorkerBase, name) is not method] == []
    assert {"qerl_open", "qerl_swap", "qerl_set_noise", "qerl_state", "qerl_release_kv_cache"} < set(methods.METHODS)


def test_a_method_of_another_plugin_is_not_overwritten(monkeypatch):
    from vllm.v1.worker.worker_base import WorkerBase

    def theirs(self): ...

    methods.add_worker_methods()
    monkeypatch.setattr(WorkerBase, "qerl_swap", theirs)
    with pytest.raises(RuntimeError, match="already has a method qerl_swap"):
        methods.add_worker_methods()
    assert WorkerBase.qerl_swap is theirs


@pytest.mark.parametrize("version", ["0.25.9", "0.33.0", "0.33.0rc1", "1.0", "0.1.dev1+g123"])
def test_versions_outside_the_range_are_refused(version):
    with pytest.raises(RuntimeError, match=r">= 0.26, < 0.33; this is "):
        engine.check_vllm_version(version)


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [
        *((version, True) for version in ("0.26.0", "0.28.0", "0.31.0", "0.31.0+cpu", "0.32.0")),
        *((version, False) for version in ("0.27.0", "0.32.9.dev3+gabc", "unknown")),
    ],
)
def test_untested_versions_in_the_range_are_warned_of(version, is_tested, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(engine.logger, "warning_once", lambda text, *arguments: said.append(text % arguments))
    engine.check_vllm_version(version)
    assert len(said) == (not is_tested) and all(version in text for text in said)


@pytest.mark.parametrize(
    ("version", "counts"), [("0.26.0", False), ("0.31.0rc1", True), ("0.32.1", True), ("dev", True)]
)
def test_which_versions_count_released_memory_once(version, counts):
    assert engine.counts_released_memory(version) is counts
