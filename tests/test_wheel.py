"""Test what is installed from a wheel, in an environment and a folder without the checkout."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"
FOUND = """
import importlib.metadata, pathlib, sys
import qerl_kernels.conditions, qerl_kernels.gemm, qerl_kernels.rule, qerl_recipes
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.plugins import load_general_plugins

groups = ("vllm.general_plugins", "vllm.endpoint_plugins", "qerl")
points = [point for group in groups for point in importlib.metadata.entry_points(group=group, name="qerl")]
points += importlib.metadata.entry_points(group="qerl", name="builtin")
assert [point.dist.name for point in points] == ["qerl-vllm"] * 3
load_general_plugins()
get_quantization_config("qerl_nvfp4")
names = {point.load().__module__.split(".")[0] for point in points if point.group != "qerl"}
for name in {*names, "qerl_kernels", "qerl_recipes"}:
    assert pathlib.Path(sys.modules[name].__file__).is_relative_to(sys.prefix), name
for kernel in ("nvfp4_dequantize", "nvfp4_tiles"):
    assert "__global__" in qerl_kernels.gemm.source(kernel)
assert qerl_kernels.rule.FILE.is_file()
assert qerl_kernels.conditions.conditions(on_gpu=False)["commit"] is None
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an environment into which the wheel of the source archive was installed.

    It sees this environment's packages, except the project: a path that a file adds is not searched for further ones.
    """
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "results")
    for name in ("kernels", "qerl_recipes", "qerl_vllm_plugin", "recipes"):
        shutil.copytree(ROOT / name, folder / "tree" / name, ignore=ignored)
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / "tree")

    def build(what: str, source: Path) -> Path:
        line = [sys.executable, "-c", BUILD, what, str(folder)]
        return folder / subprocess.check_output(line, cwd=source, text=True).splitlines()[-1]

    with tarfile.open(build("sdist", folder / "tree")) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    wheel = build("wheel", *(folder / "unpacked").iterdir())
    environment = folder / "environment"
    venv.create(environment)
    packages = next(environment.glob("lib/python*/site-packages"))
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", environment / "bin/python"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", wheel], check=True)
    return environment


def run(installed: Path, name: str, *arguments: object, code: int = 0) -> str:
    """Run a program of the environment in a folder beside it; return what it prints."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "MASTER_PORT")}
    line = [installed / "bin" / name, *map(str, arguments)]
    done = subprocess.run(line, cwd=installed.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_wheel_has_the_command_the_plugin_the_kernels_and_the_recipes(installed: Path) -> None:
    assert "quantize" in run(installed, "qerl", "--help")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", installed.parent]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "another project"], check=True)
    run(installed, "python", "-c", FOUND)
    recipes = next(installed.glob("lib/python*/site-packages/qerl_recipes/recipes"))
    names = {file.relative_to(ROOT / "recipes") for file in (ROOT / "recipes").rglob("*.yaml")}
    assert {file.relative_to(recipes) for file in recipes.rglob("*.yaml")} == names
    templates = [file for kind in ("html", "jinja", "mplstyle") for file in (ROOT / "qerl_recipes").rglob(f"*.{kind}")]
    assert all((recipes.parent / file.relative_to(ROOT / "qerl_recipes")).is_file() for file in templates)
    named = "recipes/demo/grpo/nvfp4_lora.yaml"
    assert f"QeRL's own is {recipes.parent / named}" in run(installed, "qerl", "train", "--config", named, code=2)
    run(installed, "qerl", "doctor", "--recipe", recipes / "Qwen2.5-7B-Instruct/grpo/nvfp4_lora.yaml")


def test_the_whole_demo_runs_and_says_when_one_step_has_taught_nothing(installed: Path, tmp_path: Path) -> None:
    given = ("--output", tmp_path, "--steps", 1, "--problems", 300)
    assert "was expected" in run(installed, "qerl", "demo", *given, code=1)
    tasks = json.loads((tmp_path / "evaluation/evaluation.json").read_text())["tasks"]
    assert {policy: of["n"] for policy, of in tasks["running_sum"].items()} == {"base": 300, "adapter": 300}
    assert "<svg" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()
