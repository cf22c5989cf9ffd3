"""Test ``qerl doctor``: its table agrees with the recipes, its check finds a wrong weight, and it runs without vLLM."""

import re
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import qerl_kernels.linear
import torch
from vllm.config import CompilationMode, CUDAGraphMode

from qerl_recipes.machine import doctor
from qerl_recipes.rollout.arms import ENGINE_ON_CPU

RECIPES = Path(__file__).parents[3] / "recipes"


def test_this_machine_is_examined_and_has_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run() == 0
    printed = capsys.readouterr().out
    for word in ("vllm", "torch", "trl", "device", "kernel", "exact on"):
        assert word in printed


def test_a_layer_is_exact_here() -> None:
    assert doctor.check_layer("cpu") == (0, 192 * 256)


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


@pytest.mark.parametrize(
    ("version", "remark"),
    [("0.26.0", "tested"), ("0.31.0+cpu", "tested"), ("0.30.1", "not tested; tested: 0.26.0, 0.27.1, ")],
)
def test_a_version_is_compared_with_those_that_were_tested(
    version: str, remark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "installed", lambda package: version)
    report = doctor.Report()
    doctor.add_version(report, "vllm")
    assert report.rows[0][2].startswith(remark)


def sized_for(model: str) -> int:
    """Return the GB of the GPU that a model's recipe names in its header."""
    header = (RECIPES / model / "grpo" / "nvfp4_lora_aqn.yaml").read_text()
    found = re.search(r"meant for one of (\d+) GB", header)
    assert found is not None
    return int(found.group(1))


@pytest.mark.parametrize(("size", "model"), doctor.RECIPES)
def test_recipes_of_a_size_are_sized_so_in_their_headers(size: int, model: str) -> None:
    assert sized_for(model) == size


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("NVIDIA H200", "H200: tested"),
        ("NVIDIA H100 80GB HBM3", "H100: the kernels were tested"),
        ("NVIDIA A100-SXM4-80GB", "A100: not tested"),
        ("NVIDIA L40S", "L40S: not tested"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090: not tested"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090: not tested"),
        ("NVIDIA B200", "B200: not tested"),
        ("NVIDIA L40", "an unknown GPU: not tested"),
        ("NVIDIA GeForce RTX 3090", "an unknown GPU: not tested"),
    ],
)
def test_a_device_is_told_what_was_tested(name: str, said: str) -> None:
    assert doctor.tested_as(name).startswith(said)


@pytest.mark.parametrize(
    ("memory_gb", "recipe"),
    [(150.1, "32B"), (84.9, "32B"), (47.7, "7B"), (42.4, "3B"), (25.3, "3B"), (16.9, None)],
)
def test_memory_as_the_driver_reports_it(memory_gb: float, recipe: str | None) -> None:
    found = doctor.largest_recipe(memory_gb)
    assert (recipe in found) if recipe else found is None  # type: ignore[operator]


def test_what_the_engine_s_speed_relies_on_is_read_from_vllm_and_its_end_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Read the configuration on a CPU, where vLLM has neither CUDA graphs nor the newer model runner."""
    config, report = doctor.engine_config(**ENGINE_ON_CPU), doctor.Report()
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    point = doctor.importlib.metadata.EntryPoint("thinking", "a:b", "vllm.logits_processors")
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda group: [point])
    doctor.add_engine(report, config)
    remarks = {name: remark for _, name, remark in report.rows}
    assert remarks["full CUDA graphs"] == "OFF, which is slower: TORCHDYNAMO_DISABLE=1"
    assert remarks["async scheduling"] == "OFF, which is slower: by vLLM itself"
    assert "logits processors (thinking) select vLLM's V1 runner" in remarks["V2 model runner"]
    fast = SimpleNamespace(
        use_v2_model_runner=True,
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE),
        scheduler_config=SimpleNamespace(async_scheduling=True),
    )
    report = doctor.Report()
    doctor.add_engine(report, fast)
    assert [remark for *_, remark in report.rows] == ["on", "OFF, which is slower: TORCHDYNAMO_DISABLE=1", "on"]
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    report = doctor.Report()
    doctor.add_engine(report, fast)
    assert [remark for *_, remark in report.rows] == ["on"] * 3


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
    ("name", "said"), [("NVIDIA H200", "fitted on this GPU"), ("NVIDIA H100 80GB HBM3", "carried over")]
)
def test_a_hopper_gpu_is_told_what_was_tested_and_whether_the_choice_of_kernels_was_fitted_on_it(
    name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replace torch's description of the GPU, since there is none here."""
    import torch
    from qerl_kernels import rule

    rule.machine_of.cache_clear()
    properties = types.SimpleNamespace(
        name=name, total_memory=141e9, multi_processor_count=132, memory_clock_rate=2619000, memory_bus_width=5120
    )
    stand_ins = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_name": lambda index: name,
        "get_device_capability": lambda index: (9, 0),
        "get_device_properties": lambda index: properties,
    }
    for function, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, function, stand_in)
    monkeypatch.setattr(doctor, "driver_version", lambda: "1")
    report = doctor.Report()
    doctor.add_device(report)
    rule.machine_of.cache_clear()
    *rows, (what, choice, remark), largest = report.rows
    assert (what, choice) == ("choice of kernels", said)
    assert ("was not measured" in remark) == (said == "carried over")
    assert largest == ("largest recipe", "Qwen2.5-32B-Instruct", "sized for, not measured")
    gpu = ("GPU 0", name, "compute capability 9.0, 141 GB"), ("", "", doctor.tested_as(name))
    assert rows[1:3] == [*gpu] and (rows[0][:2], rows[3][0], len(rows)) == (("driver", "1"), "kernel", 4)
