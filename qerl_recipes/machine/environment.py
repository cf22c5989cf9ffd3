"""Environment variables that vLLM and torch read when they are imported; a user's own settings always win."""

import importlib.metadata
import logging
import os
import socket
import warnings
from collections.abc import Callable, Iterable, MutableMapping
from pathlib import Path

EVERYWHERE = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# One process and one thread keep a run on a CPU repeatable bit for bit, and small models start ten times sooner without
# torch.compile. The key/value cache is in GiB; vLLM would take half of the memory. Torch's C++ part warns on a CPU that
# memory is taken from the nearest NUMA node.
ON_CPU = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
# What vLLM warns of on every CPU, by module: that it does without what a GPU or a faster build has, and that it does
# what ON_CPU asks. These are the beginnings of its messages as they stand in its source.
CPU_NOISE = {
    "vllm.config.vllm": (
        "Enforce eager set",
        "Inductor compilation was disabled by user settings",
        "Model Runner V2 requires Triton",
    ),
    "vllm.engine.arg_utils": (
        "The global random seed is set to %d. Since VLLM_ENABLE_V1_MULTIPROCESSING",
        "This model does not officially support disabling chunked prefill",
    ),
    "vllm.model_executor.layers.indexer_topk": ("Failed to import the DeepSelect extension",),
    "vllm.model_executor.layers.utils": ("Failed to create oneDNN linear, fallback to torch linear",),
    "vllm.platforms.cpu": ("Triton is not installed", "Reset SSM cache type to float32"),
    "vllm.triton_utils.dispatcher": ("Kernel %s is already registered",),  # the second engine of a process
    "vllm.triton_utils.importing": ("Triton is installed, but",),
    "vllm.v1.worker.cpu_worker": (
        "%s is not found in LD_PRELOAD",
        "CPU backend doesn't allow to use `torch.set_num_threads`",
    ),
}


def prepare() -> None:
    """Sets the defaults; call it before anything imports vllm or torch, which read some of them only once."""
    cuda = runs_on_cuda(os.environ)
    set_defaults(os.environ, cuda=cuda)
    if not cuda and os.environ["VLLM_LOGGING_LEVEL"] == EVERYWHERE["VLLM_LOGGING_LEVEL"]:
        for module in CPU_NOISE:
            logging.getLogger(module).addFilter(is_worth_reading)
    # vLLM looks at every attribute of torch.distributed, deprecated ones too: nothing that a user could act upon
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")
    # the one entry point of the server that every supported vLLM has
    warnings.filterwarnings("ignore", r".*`(python -m )?vllm\.entrypoints\.openai\.api_server`", DeprecationWarning)


def is_worth_reading(record: logging.LogRecord) -> bool:
    """Whether a message of vLLM tells more than that it runs on a CPU; errors always do."""
    noise = CPU_NOISE.get(record.name, ())
    return record.levelno > logging.WARNING or not str(record.msg).startswith(noise)


def set_defaults(environment: MutableMapping[str, str], *, cuda: bool) -> None:
    """Adds what ``environment`` does not set, with the extra settings of a CPU unless ``cuda``."""
    for name, value in (EVERYWHERE if cuda else {**EVERYWHERE, **ON_CPU}).items():
        environment.setdefault(name, value)
    if "MASTER_PORT" not in environment:  # two runs on one machine must not meet
        environment["MASTER_PORT"] = str(free_port())


def has_cuda_device(environment: MutableMapping[str, str], root: Path = Path("/")) -> bool:
    """Whether torch will see a CUDA device, told from the driver's files, without importing torch.

    As CUDA reads it, an empty CUDA_VISIBLE_DEVICES hides every device, and so does one that starts with a negative
    number. Under WSL the driver shows as /dev/dxg. ``root`` is the file system to look at.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and (not visible.strip() or visible.strip().startswith("-")):
        return False
    if any((root / "dev").glob("nvidia[0-9]*")):
        return True
    return (root / "dev/dxg").exists() and (root / "usr/lib/wsl/lib/libcuda.so.1").exists()


def runs_on_cuda(variables: MutableMapping[str, str]) -> bool:
    """Whether engines and trainers of this process will be on a CUDA device."""
    return has_cuda_device(variables) and not is_cpu_build()


def is_cpu_build(version: Callable[[str], str] = importlib.metadata.version) -> bool:
    """Whether the installed vLLM runs on the CPU even where there is a GPU (``version``: distribution -> version)."""
    for name in ("vllm-cpu", "vllm"):
        try:
            found = version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name == "vllm-cpu" or "cpu" in found
    return False


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those of ``packages`` that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def free_port() -> int:
    """A TCP port of the local machine that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
