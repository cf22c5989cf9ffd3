"""Describe the GPU of this machine, through torch in this process or through the driver."""

import os
from dataclasses import dataclass

from qerl_kernels.conditions import ask_driver

from qerl_recipes.machine.environment import runs_on_cuda

MIB = 2**20
GB = 1_000_000_000
VISIBLE = "CUDA_VISIBLE_DEVICES"
HOPPER = (9, 0)  # compute capability
# the kernels that multiply by NVFP4 weights on most GPUs, on a Hopper GPU, and on a CPU
MARLIN, TILED, REFERENCE = "Marlin FP4 of vLLM", "our own on tiles (kernels/)", "exact dequantization in fp32"


@dataclass(frozen=True)
class Gpu:
    """Describe a GPU of ``memory`` bytes; Hopper (H100, H200) stores NVFP4 in tiles, others in Marlin's layout."""

    memory: int
    is_hopper: bool
    name: str = "GPU"


def visible_names() -> list[str]:
    """Return the GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them; this takes no memory there."""
    if (visible := os.environ.get(VISIBLE)) is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


def this_gpu() -> Gpu | None:
    """Return the GPU of this process, which holds some of its memory from then on, or None."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Gpu(properties.total_memory, (properties.major, properties.minor) == HOPPER, properties.name)


def installed_gpu() -> Gpu | None:
    """Return the first GPU that torch will see, or None, by nvidia-smi, which takes no memory of it."""
    if not runs_on_cuda(os.environ):
        return None
    name, memory, capability = ask_driver("name,memory.total,compute_cap")
    return Gpu(int(memory) * MIB, capability == ".".join(map(str, HOPPER)), name)


def used_bytes() -> int:
    """Return the memory in use on the GPU of ``installed_gpu``, by all processes."""
    return int(ask_driver("memory.used")[0]) * MIB


def gigabytes(count: float) -> str:
    """Format bytes as decimal GB, the unit in which GPUs are sold."""
    return f"{count / GB:.1f} GB"
