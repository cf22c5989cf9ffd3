"""Set environment variables that vLLM and torch read when they are imported; a user's own settings always win."""

import contextlib
import gc
import importlib.metadata
import logging
import os
import re
import socket
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path

EVERYWHERE = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",  # it warns of tools' environments at each start, which are documented here
}
# One process and one thread make a run on a CPU repeatable bit for bit. Small models start ten times faster without
# torch.compile. The KV cache is in GiB; by default vLLM would take half of the memory. Torch's C++ part warns on a CPU
# that memory is taken from the nearest NUMA node.
ON_CPU = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
PYTHONS_OWN = warnings.formatwarning
# vLLM warns of each scheduler that is not its own; only that of a user's own is news
NOISE = {"vllm.config.scheduler": ("Using custom scheduler class qerl_vllm_plugin.",)}
# Warnings that vLLM gives on every CPU, by module. They say that it lacks what a GPU or a faster build has, or that it
# does what ON_CPU asks. Each is the beginning of a message in vLLM's source.
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
    "vllm.triton_utils.dispatcher": ("Kernel %s is already registered",),  # from the second engine of a process
    "vllm.triton_utils.importing": ("Triton is installed, but",),
    "vllm.v1.worker.cpu_worker": (
        "%s is not found in LD_PRELOAD",
        "CPU backend doesn't allow to use `torch.set_num_threads`",
    ),
}


def prepare() -> None:
    """Set defaults and silence what no user can act upon, before anything imports vllm or torch."""
    cuda = runs_on_cuda(os.environ)
    set_defaults(os.environ, cuda=cuda)
    if os.environ["VLLM_LOGGING_LEVEL"] == EVERYWHERE["VLLM_LOGGING_LEVEL"]:
        for module in NOISE if cuda else [*NOISE, *CPU_NOISE]:
            logging.getLogger(module).addFilter(is_worth_reading)
    warnings.formatwarning = one_line
    # vLLM reads every attribute of torch.distributed, deprecated ones too; a user cannot change that
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")
    # deprecated, but the only server entry point that every supported vLLM has
    warnings.filterwarnings("ignore", r".*`(python -m )?vllm\.entrypoints\.openai\.api_server`", DeprecationWarning)


def warm_compiler() -> None:
    """Start torch's compiling processes, which take seconds, unless engines of this process run on a CPU."""
    if runs_on_cuda(os.environ):
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage until the ``with`` block ends or an engine has started in it, whichever comes first.

    Importing torch, TRL and vLLM makes a million objects and hardly any garbage. To look through them again and again
    takes a quarter of the imports' time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format a warning; one of this project is for the user, who needs no line of Python."""
    if re.search(r"[/\\]qerl_(recipes|vllm_plugin|kernels)[/\\]", filename):
        return f"warning: {message}\n"
    return PYTHONS_OWN(message, category, filename, lineno, line)


def is_worth_reading(record: logging.LogRecord) -> bool:
    """Return False for vLLM's messages, errors aside, that only say what we have chosen, or that it runs on a CPU."""
    if record.levelno > logging.WARNING:
        return True
    own, noise = NOISE.get(record.name, ()), CPU_NOISE.get(record.name, ())
    return not record.getMessage().startswith(own) and not str(record.msg).startswith(noise)


def set_defaults(environment: MutableMapping[str, str], *, cuda: bool) -> None:
    """Set the variables that ``environment`` lacks, with those for a CPU unless ``cuda`` is True."""
    for name, value in (EVERYWHERE if cuda else {**EVERYWHERE, **ON_CPU}).items():
        environment.setdefault(name, value)
    triton = os.path.join(os.path.expanduser(environment.get("TRITON_HOME") or "~"), ".triton", "cache")
    if cuda and not triton.startswith("~"):
        # Triton's own default. Left open, torch's compiler sets it to a folder for one model under one configuration of
        # vLLM, and every other one compiles the same kernels again.
        environment.setdefault("TRITON_CACHE_DIR", triton)
    if "MASTER_PORT" not in environment:  # two runs on one machine need different ports
        environment["MASTER_PORT"] = str(free_port())


def has_cuda_device(environment: MutableMapping[str, str], root: Path = Path("/")) -> bool:
    """Return True if torch will see a CUDA device, judged from the driver's files, without importing torch.

    As in CUDA, an empty CUDA_VISIBLE_DEVICES hides every device, and so does one that starts with a negative number.
    Under WSL the driver appears as /dev/dxg. ``root`` is the root of the file system to look at.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and (not visible.strip() or visible.strip().startswith("-")):
        return False
    if any((root / "dev").glob("nvidia[0-9]*")):
        return True
    return (root / "dev/dxg").exists() and (root / "usr/lib/wsl/lib/libcuda.so.1").exists()


def runs_on_cuda(variables: MutableMapping[str, str]) -> bool:
    """Return True if engines and trainers of this process will be on a CUDA device."""
    return has_cuda_device(variables) and not is_cpu_build()


def is_cpu_build(version: Callable[[str], str] = importlib.metadata.version) -> bool:
    """Return True if the installed vLLM, by its ``version``, runs on the CPU even on a machine with a GPU."""
    for name in ("vllm-cpu", "vllm"):
        try:
            installed_version = version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name == "vllm-cpu" or "cpu" in installed_version
    return False


def free_port() -> int:
    """Return a TCP port of the local machine on which nobody listens at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
