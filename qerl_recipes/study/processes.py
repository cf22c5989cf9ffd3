"""The processes of a study, how they end, and how much of a GPU each has used."""

import functools
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from qerl_recipes.machine.processes import end_with
from qerl_vllm_plugin.wire.address import hidden

CLI, HOURS = "qerl_recipes.cli", "hours.jsonl"


class Shares:
    """How the time of each GPU is divided among the processes on it: equally, at every moment. Threads share it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.used: dict[str | None, dict[object, float]] = defaultdict(dict)  # GPU -> who is on it -> seconds so far
        self.since: dict[str | None, float] = {}

    def begin(self, gpu: str | None, who: object) -> None:
        """From now on ``who`` is on ``gpu``."""
        with self.lock:
            self._divide(gpu)
            self.used[gpu][who] = 0.0

    def end(self, gpu: str | None, who: object) -> float:
        """The seconds of ``gpu`` that were those of ``who``, who is on it no longer."""
        with self.lock:
            self._divide(gpu)
            return self.used[gpu].pop(who)

    def _divide(self, gpu: str | None) -> None:
        now = time.monotonic()
        passed, there = now - self.since.get(gpu, now), self.used[gpu]
        self.since[gpu] = now
        for who in there:
            there[who] += passed / len(there)


@dataclass
class Machine:
    """The processes of a study that run now, and whether it is to stop; threads share it.

    ``device`` is the name of its GPUs, or "CPU"; ``environment`` what its processes get.
    """

    deadline: float | None
    console: Console
    device: str
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    processes: set[subprocess.Popen[bytes]] = field(default_factory=set)
    lock: threading.RLock = field(default_factory=threading.RLock)  # a signal may come while one is answered
    stopping: threading.Event = field(default_factory=threading.Event)
    shares: Shares = field(default_factory=Shares)

    def stop(self) -> None:
        """Ask every process to end: a training saves its state at the end of the rollout, an evaluation is redone."""
        self.stopping.set()
        with self.lock:
            for process in self.processes:
                process.send_signal(signal.SIGTERM)

    def call(self, arguments: Sequence[str], log: Path, gpu: str | None, *, beside: Sequence[Path] = ()) -> int | None:
        """Run ``qerl ARGUMENTS`` with its output behind ``log`` -> its exit code, None where it was not started.

        ``gpu`` is the one that it may see, None for whatever this process sees. What it took of it is written behind
        ``hours.jsonl`` beside the log, whether it succeeds or not. ``beside`` are the logs of other runs that it works
        for: they say where its output is, and each has an equal part of what it took.
        """
        with self.lock:
            if self.stopping.is_set():
                return None
            stream = log.open("ab")
            stream.write(hidden(f"$ qerl {shlex.join(arguments)}\n").encode())
            stream.flush()
            for other in beside:
                with other.open("a", encoding="utf-8") as lines:
                    lines.write(f"$ qerl {arguments[0]} for this run and others: see {log}\n")
            environment = {**self.environment, **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})}
            command = [sys.executable, "-m", CLI, *arguments]
            with_us = functools.partial(end_with, os.getpid())
            process = subprocess.Popen(
                command, stdout=stream, stderr=subprocess.STDOUT, env=environment, preexec_fn=with_us
            )
            self.processes.add(process)
            self.shares.begin(gpu, process)
        try:
            return process.wait()
        finally:
            with self.lock:
                self.processes.discard(process)
            stream.close()
            seconds = self.shares.end(gpu, process) / (1 + len(beside))
            line = {"command": arguments[0], "device": self.device, "seconds": round(seconds, 3)}
            for one in (log, *beside):
                with (one.parent / HOURS).open("a", encoding="utf-8") as record:
                    record.write(json.dumps(line) + "\n")


def seconds_of(folder: Path) -> dict[str, float]:
    """Device -> what the processes of the run in ``folder`` took of it; empty where nothing is written down."""
    found: dict[str, float] = defaultdict(float)
    path = folder / HOURS
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        record = json.loads(line)
        found[record["device"]] += record["seconds"]
    return dict(found)
