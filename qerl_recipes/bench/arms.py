"""Run the arms of a benchmark, each in a process of its own, so that none inherits another's memory.

``ask_once`` runs a module until it has answered; an ``Arm`` stays and carries out one order after the other. The module
that they run calls ``answer``. Requests, orders and answers are JSON, a line each.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from qerl_recipes.machine import processes
from qerl_recipes.machine.environment import free_port
from qerl_recipes.machine.gpu import gigabytes, installed_gpu
from qerl_recipes.recipe.shapes import config_json

if TYPE_CHECKING:
    from qerl_recipes.machine.serve import ServerProcess

Figures = dict[str, Any]


class ArmFailedError(RuntimeError):
    """Say why an arm's process failed; ``figures`` is what it had measured before."""

    def __init__(self, why: str, figures: Figures) -> None:
        super().__init__(why)
        self.figures = figures


def check_shape(shape: str) -> None:
    """Raise ValueError for an unknown shape, and for one that only a GPU can measure where there is none."""
    config_json(shape)
    if not shape.startswith("tiny") and installed_gpu() is None:
        raise ValueError(f"shape {shape} needs a CUDA GPU; on this machine use shape tiny or tiny-moe")


def check_gpus(count: int) -> None:
    """Raise ValueError for an engine on more GPUs than there are."""
    import torch

    available = torch.cuda.device_count()
    if count < 1 or (count > 1 and count > available):
        raise ValueError(f"tensor_parallel_size is {count}, and this machine has {available} CUDA GPUs")


class Arm:
    """Run ``module`` with ``request`` in a process that starts at once and ends with this one, whatever ends that.

    The engine's core is in the arm's own process unless ``has_core`` is False: weights can then be measured, and
    adapters need no transport.
    """

    def __init__(self, module: str, request: Figures, *, has_core: bool = True) -> None:
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not has_core))}
        if not has_core:  # a fork of a process that has used torch's threads may hang
            environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        line = [sys.executable, "-m", module, json.dumps(request)]
        self.process = processes.start(line, environment=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def hear(self) -> Figures:
        """Wait for the arm's next answer and return it. Raises ArmFailedError."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            raise ArmFailedError(f"its process ended with code {code}; its messages are above", {})
        figures: Figures = json.loads(line)
        if "failed" in figures:
            raise ArmFailedError(figures.pop("failed"), figures)
        return figures

    def ask(self, order: Figures) -> Figures:
        """Send an order and return the answer. Raises ArmFailedError."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: ``hear`` says how
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()
        return self.hear()

    def end(self) -> None:
        """End the process, and wait until it and all that it has started have given their memory back."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        processes.end(self.process)
        self.process.stdout.close()


def ask_once(module: str, request: Figures, *, has_core: bool = True) -> Figures:
    """Run ``module`` as an ``Arm`` until it has answered; return the answer, or raise ArmFailedError."""
    arm = Arm(module, request, has_core=has_core)
    try:
        figures = arm.hear()
        with contextlib.suppress(subprocess.TimeoutExpired):
            arm.process.wait(processes.PATIENCE)  # it ends its engine by itself
        return figures
    finally:
        arm.end()


def answer(begin: Callable[[Figures, Figures], Callable[[Figures, Figures], None] | None]) -> None:
    """Answer the request of an ``Arm``, then carry out its orders until there are no more.

    ``begin`` gets the request and a dict to fill with the first answer. It returns the function that carries out an
    order, with the same arguments, or None. If work fails, the reason is sent with what was filled in.
    """
    # not the standard input itself, which processes forked off may read or close
    orders = os.fdopen(os.dup(0), encoding="utf-8")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    # as ``ended_cleanly`` leaves it: a second one would cut the engine's own way out, on which it ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with ended_cleanly(), os.fdopen(os.dup(1), "w", encoding="utf-8") as messages:
        os.dup2(2, 1)  # what libraries print goes to the standard error
        figures: Figures = {}
        try:
            carry_out = begin(json.loads(sys.argv[1]), figures)
            print(json.dumps(figures), file=messages, flush=True)
            if carry_out is None:
                return
            for order in orders:
                figures = {}
                carry_out(json.loads(order), figures)
                print(json.dumps(figures), file=messages, flush=True)
        except Exception as error:
            figures["failed"] = f"{type(error).__name__}: {error}"
            print(json.dumps(figures), file=messages, flush=True)
            raise


@contextmanager
def ended_cleanly() -> Iterator[None]:
    """Leave the block by an exception on SIGTERM, so that arms end and gigabytes of checkpoints are removed."""

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one would cut the cleaning short
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def serving(
    model: str, options: Sequence[str], rank: int, log: Path, *, environment: Mapping[str, str] | None = None
) -> Iterator[tuple["ServerProcess", str]]:
    """Start a server of ``model`` with a resident adapter, and yield it with its token."""
    from qerl_recipes.machine.serve import command, started
    from qerl_recipes.rollout.arms import engine_options

    port, token = free_port(), secrets.token_hex(16)
    additional = json.dumps(engine_options("qerl_nvfp4", rank, {})["additional_config"])
    own = ["--host", "127.0.0.1", "--port", str(port), "--additional-config", additional]
    variables = {"VLLM_PLUGINS": "qerl", "QERL_ADMIN_TOKEN": token, **(environment or {})}
    with started(command(model, [*own, *options]), port, log, variables) as server:
        yield server, token


@contextmanager
def ballast(left: int) -> Iterator[int]:
    """Make a GPU smaller: hold all of its memory but ``left`` bytes during the block; yield the bytes held.

    This takes another process: a limit inside torch would count memory that the engine has handed back as still in use.
    Raises ValueError if fewer bytes are free.
    """
    holder = Arm(__name__, {"left": left})
    try:
        held = holder.hear()["held"]
        if held < 0:
            raise ValueError(f"{gigabytes(left)} were asked for and {gigabytes(left + held)} are free; ask for less")
        yield held
    finally:
        holder.end()


def _hold(request: Figures, figures: Figures) -> Callable[[Figures, Figures], None]:
    """Allocate what ``ballast`` asks for; answer with the bytes held, or as a negative number with those missing."""
    import torch

    left = request["left"]
    free, _ = torch.cuda.mem_get_info()
    block = torch.empty(max(free - left, 0), dtype=torch.uint8, device="cuda")
    figures["held"] = block.numel() if free >= left else free - left
    return lambda order, figures: figures.update(held=block.numel())  # keeps the block, and waits


if __name__ == "__main__":
    answer(_hold)
