"""Every arm of a benchmark runs in a process of its own, one after the other, so that none inherits another's memory.

``in_own_process`` is the side that asks, ``answer`` what the module that it runs does.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from qerl_recipes.machine.gpu import gigabytes, installed_gpu
from qerl_recipes.recipe.shapes import config_json

Found = dict[str, Any]


class ArmFailedError(RuntimeError):
    """An arm's process failed; ``found`` is what it had measured before."""

    def __init__(self, why: str, found: Found) -> None:
        super().__init__(why)
        self.found = found


def check_shape(shape: str) -> None:
    """Raises ValueError for an unknown shape, and for one that only a GPU can measure where there is none."""
    config_json(shape)
    if not shape.startswith("tiny") and installed_gpu() is None:
        raise ValueError(f"shape {shape} needs a CUDA GPU; on this machine use shape tiny or tiny-moe")


def check_gpus(count: int) -> None:
    """Raises ValueError for an engine on more GPUs than there are."""
    import torch

    there = torch.cuda.device_count()
    if count < 1 or (count > 1 and count > there):
        raise ValueError(f"tensor_parallel_size is {count}, and this machine has {there} CUDA GPUs")


def in_own_process(module: str, request: Found, *, has_core: bool = True) -> Found:
    """What the module's work has found; the engine's core is in that very process unless told otherwise. Raises
    ArmFailedError."""
    # each finds a port of its own; without another process weights can be measured, and adapters need no transport
    environment = {name: value for name, value in os.environ.items() if name != "MASTER_PORT"}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(not has_core))
    if not has_core:  # a fork of a process that has used torch's threads may hang
        environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    line = [sys.executable, "-m", module, json.dumps(request)]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, env=environment)
    if not done.stdout:
        raise ArmFailedError(f"its process ended with code {done.returncode}; its messages are above", {})
    found = json.loads(done.stdout)
    if "failed" in found:
        raise ArmFailedError(found.pop("failed"), found)
    return found


def answer(work: Callable[[Found, Found], None]) -> None:
    """Let ``work`` fill its second argument, whose content is sent even if it fails; the first is the request.

    Whatever libraries print goes to the standard error.
    """
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    found: Found = {}
    try:
        work(json.loads(sys.argv[1]), found)
    except Exception as error:
        found["failed"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        with messages:
            messages.write(json.dumps(found))


@contextmanager
def ended_cleanly() -> Iterator[None]:
    """SIGTERM ends the arm, gives the GPU back and removes checkpoints: gigabytes, which nobody else would remove."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def ballast(left: int) -> Iterator[int]:
    """A large GPU as a smaller one: hold all of its memory but ``left`` bytes while this lasts -> bytes held.

    It takes another process: a limit inside torch would count memory that the engine has handed back as still in use.
    Raises ValueError if less than that is free.
    """
    line = [sys.executable, "-c", f"from {__name__} import hold; hold({left})"]
    holder = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdin is not None and holder.stdout is not None
    try:
        said = holder.stdout.readline()
        if not said:
            raise RuntimeError(f"the process that holds memory ended; its message is above. Command: {' '.join(line)}")
        held = int(said)
        if held < 0:
            raise ValueError(
                f"{gigabytes(left)} were asked for and {gigabytes(left + held)} of this GPU are free; ask for less, or "
                "end what runs there"
            )
        yield held
    finally:
        with contextlib.suppress(BrokenPipeError):  # it has ended
            holder.stdin.close()  # it waits for this, and for nothing else, so that it never outlives its user
        holder.wait()
        holder.stdout.close()


def hold(left: int) -> None:
    """What the other process does: allocate, say how much (or how much is missing), wait for the end of its input."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    block = torch.empty(max(free - left, 0), dtype=torch.uint8, device="cuda")
    print(block.numel() if free >= left else free - left, flush=True)
    sys.stdin.read()
