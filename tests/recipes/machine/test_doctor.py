"""Test ``qerl doctor``: its table agrees with the recipes, its check finds a wrong weight, and it runs without vLLM."""

import types

import pytest
import qerl_kernels.linear
import torch
from vllm.config import CompilationMode

from qerl_recipes.machine import doctor


def test_this_machine_is_examined_and_has_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run() == 0
    printed = capsys.readouterr().out
    for word in ("vllm", "torch", "trl", "device", "kernel", "exact on"):
        assert word in printed


def test_one_wrong_weight_is_found_and_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    right = qerl_kernels.linear.linear

    def wrong(x: torch.Tensor, *weight: torch.Tensor) -> torch.Tensor:
        y = right(x, *weight)
        y[17, 5] = y[17, 5] * 1.01 + 0.1
        return y

    monkeypatch.setattr(qerl_kernels.linear, "linear", wrong)
    assert doctor.check_layer("cpu") == (1, 192 * 256)
    report = doctor.Report()
    doctor.add_exactness(report)
    assert "1 of 49152 differ" in report.problems[0]
    assert doctor.run() == 1


def test_a_missing_vllm_is_said_and_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    version = doctor.importlib.metadata.version

    def without_vllm(name: str) -> str:
        if name.startswith("vllm"):
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", without_vllm)
    report = doctor.examine()
    assert ("vllm", "not installed", "needed for serving, training and evaluation") in report.rows
    assert not report.problems


def test_the_variable_by_which_vllm_has_no_graphs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name the variable, which vLLM reads itself: without torch.compile it has no graphs."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    config, report = doctor.engine_config(enable_chunked_prefill=False), doctor.Report()
    assert config.compilation_config.mode == CompilationMode.NONE and not config.model_config.enforce_eager
    doctor.add_engine(report, config)
    remarks = {name: remark for _, name, remark in report.rows}
    assert remarks["full CUDA graphs"] == "OFF, which is slower: TORCH_COMPILE_DISABLE=1"


@pytest.mark.parametrize(
    ("name", "capability", "remark"),
    [
        ("NVIDIA A100-SXM4-80GB", (8, 0), doctor.SAME_PATH),
        ("NVIDIA GB10", (12, 1), doctor.SAME_PATH),
        ("Tesla T4", (7, 5), doctor.UNTESTED),
        ("NVIDIA GH200 480GB", (9, 0), doctor.UNTESTED),
        ("NVIDIA H100 80GB HBM3", (9, 0), "tested with vLLM 0.26.0"),
        ("NVIDIA H200", (9, 0), "tested with vLLM 0.26.0 and 0.31.0"),
    ],
)
def test_what_was_tested_on_a_gpu_of_this_kind(
    name: str, capability: tuple[int, int], remark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"is_available": True, "device_count": 1, "get_device_name": name, "get_device_capability": capability}
    told["get_device_properties"] = types.SimpleNamespace(total_memory=80e9)
    for function, answer in told.items():
        monkeypatch.setattr(torch.cuda, function, lambda *_, answer=answer: answer)
    monkeypatch.setattr(doctor, "driver_version", lambda: "unknown")
    monkeypatch.setattr("qerl_kernels.rule.untuned", lambda index: None)
    report = doctor.Report()
    doctor.add_device(report)
    assert ("", "", remark) in report.rows
    kernels = [value for row, value, _ in report.rows if row == "kernel"]
    assert [doctor.MARLIN in value for value in kernels] == [capability != (9, 0)]
