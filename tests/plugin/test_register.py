"""Test that the entry point is idempotent, and which versions of vLLM are accepted."""

import pytest

from qerl_vllm_plugin import register
from qerl_vllm_plugin.compat import engine
from qerl_vllm_plugin.worker import methods


def test_register_is_idempotent_beside_a_worker():
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.v1.worker.worker_base import WorkerBase

    for _ in range(2):
        register()
    assert QUANTIZATION_METHODS.count("qerl_nvfp4") == 1
    assert [name for name, method in methods.METHODS.items() if getattr(WorkerBase, name) is not method] == []
    assert {"qerl_open", "qerl_swap", "qerl_set_noise", "qerl_state", "qerl_release_kv_cache"} < set(methods.METHODS)


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
