"""``qerl doctor``: its table agrees with the recipes, its check finds a wrong weight, and it runs without vLLM."""

import re
from pathlib import Path

import pytest
import qerl_kernels.linear
import torch

from qerl_recipes import doctor

RECIPES = Path(__file__).parents[2] / "recipes"


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
    ("version", "remark"), [("0.26.0", "tested"), ("0.31.0+cpu", "tested"), ("0.30.1", "not tested; 0.26.0 and 0.31.0")]
)
def test_a_version_is_compared_with_those_that_were_tested(
    version: str, remark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "installed", lambda package: version)
    report = doctor.Report()
    doctor.add_version(report, "vllm")
    assert report.rows[0][2].startswith(remark)


def test_the_plugin_names_the_same_tested_versions() -> None:
    source = (Path(__file__).parents[2] / "qerl_vllm_plugin" / "compat.py").read_text()
    named = re.search(r"^TESTED = (\(.*\))$", source, re.MULTILINE)
    assert named is not None
    assert re.findall(r'"([^"]+)"', named.group(1)) == list(doctor.TESTED["vllm"])


def sized_for(model: str) -> int:
    """GB of the GPU that a model's recipe names in its header."""
    header = (RECIPES / model / "grpo" / "nvfp4_lora_aqn.yaml").read_text()
    found = re.search(r"meant for one of (\d+) GB", header)
    assert found is not None
    return int(found.group(1))


@pytest.mark.parametrize("row", doctor.GPU_TABLE, ids=lambda row: row.name)
def test_a_row_names_the_largest_recipe_that_is_sized_for_its_memory(row: doctor.GPU) -> None:
    assert sized_for(row.recipe) <= row.memory_gb
    assert doctor.largest_recipe(row.memory_gb) == row.recipe


@pytest.mark.parametrize(("size", "model"), doctor.RECIPES)
def test_recipes_of_a_size_are_sized_so_in_their_headers(size: int, model: str) -> None:
    assert sized_for(model) == size


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA H200", "H100 / H200"),
        ("NVIDIA H100 80GB HBM3", "H100 / H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 3090", None),
    ],
)
def test_a_device_finds_its_row(name: str, row: str | None) -> None:
    found = doctor.find_row(name)
    assert (found.name if found else None) == row


@pytest.mark.parametrize(
    ("memory_gb", "recipe"),
    [(150.1, "32B"), (84.9, "32B"), (47.7, "7B"), (42.4, "3B"), (25.3, "3B"), (16.9, None)],
)
def test_memory_as_the_driver_reports_it(memory_gb: float, recipe: str | None) -> None:
    found = doctor.largest_recipe(memory_gb)
    assert (recipe in found) if recipe else found is None  # type: ignore[operator]
