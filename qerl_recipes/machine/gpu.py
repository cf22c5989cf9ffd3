"""The GPU of this machine, as torch sees it in this process or as the driver tells without one."""

import os
import subprocess
from dataclasses import dataclass

from qerl_recipes.machine.environment import runs_on_cuda

MIB = 2**20
GB = 1_000_000_000
VISIBLE = "CUDA_VISIBLE_DEVICES"
HOPPER = (9, 0)  # compute capability
# what multiplies by NVFP4 weights on a GPU, on a Hopper GPU, and on a CPU
MARLIN, TILED, REFERENCE = "Marlin FP4 of vLLM", "our own on tiles (kernels/)", "exact dequantization in fp32"


@dataclass(frozen=True)
class Gpu:
    """``memory`` in bytes; a Hopper GPU (H100, H200) keeps NVFP4 weights in tiles, others in Marlin's layout."""

    memory: int
    is_hopper: bool
    name: str = "GPU"
    driver: str | None = None


def visible_names() -> list[str]:
    """The GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them; takes memory on none."""
    if (given := os.environ.get(VISIBLE)) is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


def this_gpu() -> Gpu | None:
    """The GPU of this process, which takes some memory on it from then on; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Gpu(properties.total_memory, (properties.major, properties.minor) == HOPPER, properties.name)


def installed_gpu() -> Gpu | None:
    """The first GPU that torch will see, asked of the driver, so that this process takes no memory on it; or None."""
    if not runs_on_cuda(os.environ):
        return None
    name, driver, memory, capability = _ask_driver("name,driver_version,memory.total,compute_cap")
    return Gpu(int(memory) * MIB, capability == ".".join(map(str, HOPPER)), name, driver)


def used_bytes() -> int:
    """Memory in use on that GPU, by all processes."""
    return int(_ask_driver("memory.used")[0]) * MIB


def _ask_driver(what: str) -> list[str]:
    """Raises OSError or CalledProcessError where there is no nvidia-smi or it fails."""
    index = os.environ.get(VISIBLE, "0").split(",")[0]
    line = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits", "-i", index]
    answer = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    return [value.strip() for value in answer.splitlines()[0].split(",")]


def gigabytes(count: float) -> str:
    """Bytes as decimal GB, in which GPUs are sold."""
    return f"{count / GB:.1f} GB"
