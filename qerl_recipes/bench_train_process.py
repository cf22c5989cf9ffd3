"""The process of one arm as ``qerl bench train`` sees it: it is asked for a piece of work and answers with figures."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

MODULE = "qerl_recipes.bench_train_arm"
PATIENCE = 30  # seconds for an engine to shut down


class ArmFailedError(RuntimeError):
    """An arm's process ended, and why."""


class ArmProcess:
    """A running arm. Its memory is what the GPU's has grown by while it alone was at work.

    It begins with its imports, at once, and then does what it is asked. The process ends with the ``with`` block, and
    with this process, whose questions it reads.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._held = 0
        # each finds a port of its own, and the engine runs in the trainer's process, as in `qerl train`
        environment = {name: value for name, value in os.environ.items() if name != "MASTER_PORT"}
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE, json.dumps(request)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def wait_for_imports(self) -> None:
        """Raises ArmFailedError."""
        self._read()

    def load(self, used: Callable[[], int], already: int) -> dict[str, Any]:
        """Engine and trainer -> the answer and the memory that the process holds. Raises ArmFailedError.

        ``used`` gives the bytes in use on the GPU, by all processes; ``already`` are those of this one.
        """
        before = used()
        answer = self._exchange("load")
        self._held = already + used() - before
        return {**answer, "held_bytes": self._held}

    def ask(self, command: str) -> dict[str, Any]:
        """One piece of work -> the answer, with the most memory that the process had. Raises ArmFailedError."""
        answer = self._exchange(command)
        memory = answer["memory"]
        answer["process_bytes"] = self._held + memory["used_peak"] - memory["used_before"]
        self._held += memory["used_after"] - memory["used_before"]
        return answer

    def _exchange(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and the answer says why
            self._process.stdin.write(f"{command}\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ArmFailedError(f"its process ended with code {self._end()}; its messages are above")
        answer = json.loads(line)
        if "failed" in answer:
            self._end()  # its memory must be free before another arm is measured
            raise ArmFailedError(answer["failed"])
        return answer

    def __enter__(self) -> "ArmProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.terminate()  # it has answered everything, and has nothing to save
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            self._process.stdin.close()
        self._end()
        self._process.stdout.close()

    def _end(self) -> int:
        """Wait for its end -> exit code; one that does not come is not waited for."""
        try:
            return self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
