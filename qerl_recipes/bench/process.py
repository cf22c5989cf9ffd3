"""Every arm of a benchmark runs in a process of its own, so that none inherits another's memory.

``in_own_process`` asks once for all that there is to find, and ``answer`` is what the module that it runs does. An
``Arm`` stays and is told what to do, order by order, which the module that it runs hands to ``obey``.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import IO, Any

from qerl_recipes.machine.gpu import gigabytes, installed_gpu
from qerl_recipes.machine.processes import PATIENCE, end, inherited
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
    done = subprocess.run(
        _line(module, request), stdout=subprocess.PIPE, text=True, env=_environment(has_core=has_core)
    )
    return _understood(done.stdout, done.returncode)


def answer(work: Callable[[Found, Found], None]) -> None:
    """Let ``work`` fill its second argument, whose content is sent even if it fails; the first is the request.

    Whatever libraries print goes to the standard error.
    """
    found: Found = {}
    with _own_output() as messages:
        try:
            work(json.loads(sys.argv[1]), found)
        except Exception as error:
            found["failed"] = f"{type(error).__name__}: {error}"
            raise
        finally:
            messages.write(json.dumps(found))


class Arm:
    """An arm's process, started at once; it ends with the process that started it, whatever ends that.

    ``module`` is run with the request and hands what it does to ``obey``. The engine's core is in that very process.
    """

    def __init__(self, module: str, request: Found) -> None:
        self.process = subprocess.Popen(
            _line(module, request),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(has_core=True),
            start_new_session=True,  # with the workers of its engine, which end with it
        )

    def hear(self) -> Found:
        """What it says next, once it does. Raises ArmFailedError."""
        assert self.process.stdout is not None
        said = self.process.stdout.readline().decode()
        if not said:
            self.process.wait()
        return _understood(said, self.process.returncode)

    def ask(self, order: Found) -> Found:
        """What it answers to an order. Raises ArmFailedError."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: ``hear`` says how
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()
        return self.hear()

    def end(self) -> None:
        """End it, and wait until it and all that it has started have given their memory back."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        end(self.process)
        self.process.stdout.close()


def obey(begin: Callable[[Found], tuple[Found, Callable[[Found], Found]]]) -> None:
    """``begin`` turns the request into what is said at first and the work that answers orders, until there are no more.

    Waiting for an order takes no processor. The end of the input, which is also that of the process that asks, ends
    this one whatever it does, and so does SIGTERM. Whatever libraries print goes to the standard error.
    """
    orders: queue.SimpleQueue[Found] = queue.SimpleQueue()
    # not the standard input itself: processes forked off close that one, and would wait for the thread that reads it
    lines = os.fdopen(os.dup(0), encoding="utf-8")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)

    def listen() -> None:
        for line in lines:
            orders.put(json.loads(line))
        signal.alarm(int(PATIENCE))  # which ends it inside a library, too, that does not come back to Python
        os.kill(os.getpid(), signal.SIGTERM)

    # as ``ended_cleanly`` leaves it: a second one would cut the engine's own way out, on which it ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with ended_cleanly(), _own_output() as messages:
        threading.Thread(target=listen, daemon=True).start()
        try:
            said, work = begin(json.loads(sys.argv[1]))
            while True:
                print(json.dumps(said), file=messages, flush=True)
                said = work(orders.get())
        except Exception as error:
            print(json.dumps({"failed": f"{type(error).__name__}: {error}"}), file=messages, flush=True)
            raise


def _line(module: str, request: Found) -> list[str]:
    return [sys.executable, "-m", module, json.dumps(request)]


def _environment(*, has_core: bool) -> dict[str, str]:
    # each finds a port of its own; without another process weights can be measured, and adapters need no transport
    environment = inherited()
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(not has_core))
    if not has_core:  # a fork of a process that has used torch's threads may hang
        environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    return environment


def _understood(said: str, code: int | None) -> Found:
    """What an arm has said, "" if it ended without a word. Raises ArmFailedError."""
    if not said:
        raise ArmFailedError(f"its process ended with code {code}; its messages are above", {})
    found: Found = json.loads(said)
    if "failed" in found:
        raise ArmFailedError(found.pop("failed"), found)
    return found


@contextmanager
def _own_output() -> Iterator[IO[str]]:
    """The standard output for this program alone; what libraries print goes to the standard error."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as messages:
        os.dup2(2, 1)
        yield messages


@contextmanager
def ended_cleanly() -> Iterator[None]:
    """SIGTERM ends the arm, gives the GPU back and removes checkpoints: gigabytes, which nobody else would remove."""

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one would cut the cleaning short
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
