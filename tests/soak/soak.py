"""``python tests/soak``: a real server under load, its policy changed every second, and each of its answers checked.

Streams ask without a pause; meanwhile the adapter is swapped every second, the noise changes at every fifth swap, and
some requests are given up half-way. Afterwards the server is ended, and a reference engine in this process is given
every answer's tokens under the policy that the answer names: a log-probability that does not come back was computed by
something else. Weights and adapters are random, unless ``model`` names a checkpoint.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer
from qerl_kernels.conditions import conditions
from soak_load import Observed, load
from soak_replay import LENGTH, RANK, Verdict, config_of, dtype, judge, make_adapter, references

from qerl_recipes.bench import random_model
from qerl_recipes.bench.arms import check_gpus, check_shape, ended_cleanly, serving
from qerl_recipes.bench.results import save
from qerl_recipes.machine.environment import runs_on_cuda
from qerl_recipes.machine.gpu import MIB, installed_gpu
from qerl_recipes.machine.serve import ServerProcess
from qerl_recipes.recipe.shapes import config_json

NAME = "policy"  # the model's, in requests
QUIET = 0.2  # share of the time without swaps
# of a log-probability; in bfloat16 other batches round otherwise: engine and trainer of 7B's random weights differ by
# 0.25 at most on 65536 tokens, and a soak has millions
TOLERANCE = {"float32": 3e-4, "bfloat16": 0.6}
LEAST_TOLD_APART = 0.99  # of answers judged under another policy; below, "right" would prove nothing
REPORT_EVERY = 20.0  # seconds
MOST_GROWTH = 64 * MIB  # of a process, after each kind of swap has come once: what the first ones take is kept


def main(
    model: Annotated[
        str | None, typer.Option(help="folder of a checkpoint to serve; default: random weights of --shape")
    ] = None,
    shape: Annotated[str, typer.Option(help="as for `qerl bench rollout`")] = "tiny",
    streams: Annotated[int, typer.Option(help="requests under way at a time")] = 64,
    minutes: Annotated[
        float, typer.Option(help="minutes of load, a fifth of them without swaps; judging comes after")
    ] = 10,
    api_server_count: Annotated[int, typer.Option(help="processes that take requests")] = 1,
    tensor_parallel_size: Annotated[int, typer.Option(help="GPUs of the server")] = 1,
    gpu_memory_utilization: Annotated[float | None, typer.Option(help="the server's share of each GPU")] = None,
    seed: Annotated[int, typer.Option(help="seed of weights, prompts, adapters and noise")] = 0,
    output: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Swap the policy of a server under load every second, and check every answer against the policy it names.

    Exits with 1 where something was not as it must be. Options that this machine cannot honour are refused.
    """
    if model is None:
        check_shape(shape)
    check_gpus(tensor_parallel_size)
    if streams < 1 or minutes <= 0 or api_server_count < 1:
        values = f"streams is {streams}, minutes {minutes:g} and api-server-count {api_server_count}"
        raise ValueError(f"{values}; all must be above 0")
    with ended_cleanly(), tempfile.TemporaryDirectory() as scratch:
        folder = model or write_model(shape, seed, Path(scratch, "model"))
        options = server_options(streams, api_server_count, tensor_parallel_size)
        if gpu_memory_utilization is not None:
            options += ["--gpu-memory-utilization", str(gpu_memory_utilization)]
        with serving(folder, options, RANK, Path(scratch, "log")) as (server, token):
            observed, speed, memory = measure(server, token, folder, streams, 60 * minutes, seed)
        result = {
            "model": model or f"random weights, shape {shape}",
            "streams": streams,
            "api_servers": api_server_count,
            "tensor_parallel_size": tensor_parallel_size,
            "seed": seed,
            "rank": RANK,
            "dtype": dtype(),
            **conditions(on_gpu=runs_on_cuda(os.environ)),
        }
        report = seldom(lambda verdict: save(result | summary(observed, speed, memory, verdict), output))
        report(Verdict(waiting=len(observed.answers)))
        with references(folder, seed) as replays:
            verdict = judge(observed.answers, observed.changes, replays, TOLERANCE[dtype()], report)
    result |= summary(observed, speed, memory, verdict)
    save(result, output)
    print("\n".join(lines(result)))
    raise typer.Exit(int(bool(result["failed"])))


def seldom(write: Callable[[Verdict], None], every: float = REPORT_EVERY) -> Callable[[Verdict], None]:
    """Return a function that writes a verdict at once, then every so many seconds: judging may be cut short."""
    due = 0.0

    def report(verdict: Verdict) -> None:
        nonlocal due
        if time.monotonic() < due:
            return
        write(verdict)
        judged = verdict.one + verdict.several
        print(f"{judged} answers judged, {verdict.waiting} not yet, {len(verdict.wrong)} wrong", file=sys.stderr)
        due = time.monotonic() + every

    return report


def write_model(shape: str, seed: int, folder: Path) -> str:
    """Write a packed checkpoint of random weights, and return its folder."""
    device = "cpu" if installed_gpu() is None else "cuda"
    random_model.write(folder, config_json(shape), packed=True, seed=seed, device=device)
    return str(folder)


def server_options(streams: int, api_servers: int = 1, tensor_parallel_size: int = 1) -> list[str]:
    """Return the server's options for that many requests at a time."""
    options = ["--served-model-name", NAME, "--dtype", dtype(), "--max-model-len", str(LENGTH)]
    options += ["--max-num-seqs", str(streams), "--api-server-count", str(api_servers)]
    options += ["--tensor-parallel-size", str(tensor_parallel_size)]
    return [*options, "--disable-uvicorn-access-log"]


def measure(
    server: ServerProcess, token: str, folder: str, streams: int, seconds: float, seed: int
) -> tuple[Observed, dict[str, float], dict[str, list[int]]]:
    """Load the server; return what was observed, tokens/s, and each process's ``own_bytes`` as swaps go on."""
    memory: dict[str, list[int]] = {}

    def look_at_memory() -> None:
        root = psutil.Process(server.process.pid)
        for process in (root, *root.children(recursive=True)):
            memory.setdefault(f"{process.name()} {process.pid}", []).append(own_bytes(process))

    config = config_of(folder)
    observed, speed = load(
        server.url,
        token,
        NAME,
        vocabulary=config["vocab_size"],
        streams=streams,
        quiet=QUIET * seconds,
        busy=(1 - QUIET) * seconds,
        seed=seed,
        adapter=lambda number: make_adapter(config, seed, number),
        between=look_at_memory,
    )
    left = running(server.url)
    if left:
        observed.lost.append(f"{left:.0f} requests still run though none waits for them")
    return observed, speed, memory


def own_bytes(process: psutil.Process) -> int:
    """Return the memory that a process has by itself; the file of the last swap, which all share, is no growth."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


def running(url: str) -> float:
    """Return how many requests the server still computes; those given up end a moment later."""
    import httpx

    deadline = time.monotonic() + 10
    while True:
        text = httpx.get(f"{url}/metrics").text
        count = sum(
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{"))
        )
        if not count or time.monotonic() > deadline:
            return count
        time.sleep(0.2)


def summary(
    observed: Observed, speed: Mapping[str, float], memory: Mapping[str, list[int]], verdict: Verdict
) -> dict[str, Any]:
    """Return the figures, and under ``failed`` what is not as it must be."""
    wrong = [verdict.wrong[i] for i in sorted(verdict.wrong)]
    swaps = [value for kind, values in observed.seconds.items() if kind != "noise" for value in values]
    return {
        "tolerance": TOLERANCE[dtype()],
        "answers": len(observed.answers),
        "cancelled": observed.cancelled,
        "aborted": sum(answer.reason == "abort" for answer in observed.answers),
        "judged": {
            "one policy": verdict.one,
            "several policies": verdict.several,
            "left out": verdict.left_out,
            "not yet": verdict.waiting,
        },
        "worst_difference": verdict.worst,
        "controls": {"judged": verdict.controls, "told apart": verdict.told_apart},
        "changes": len(observed.changes) - 1,
        "change_seconds": {
            kind: percentiles(values) for kind, values in {"all": swaps, **observed.seconds}.items() if values
        },
        "tokens_per_s": {name: round(value, 1) for name, value in speed.items()},
        "resident_mib": {name: [round(value / MIB, 1) for value in values] for name, values in memory.items()},
        "failed": _failures(observed, memory, verdict, wrong),
        "wrong": wrong[:20],
        "lost": observed.lost[:20],
    }


def _failures(observed: Observed, memory: Mapping[str, list[int]], verdict: Verdict, wrong: Sequence[str]) -> list[str]:
    share = verdict.told_apart / verdict.controls if verdict.controls else 0.0
    grown = {name: values[-1] - values[min(1, len(values) - 2)] for name, values in memory.items() if len(values) > 1}
    failed = [f"{len(observed.lost)} requests lost, such as: {observed.lost[0]}"] if observed.lost else []
    failed += [f"{len(wrong)} wrong answers, such as: {wrong[0]}"] if wrong else []
    failed += [f"{verdict.waiting} answers have not been judged"] if verdict.waiting else []
    failed += [f"{name} has grown by {size / MIB:.0f} MiB" for name, size in grown.items() if size > MOST_GROWTH]
    if not verdict.one and not verdict.waiting:
        failed.append("no answer has one policy alone; none was judged sharply")
    if share < LEAST_TOLD_APART and (verdict.controls or not verdict.waiting):
        failed.append(f"only {share:.1%} of answers are told from those of another policy: this proves nothing")
    return failed


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return p50, p99 and the number of values."""
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": round(float(p50), 4), "p99": round(float(p99), 4), "number": len(values)}


def lines(result: Mapping[str, Any]) -> list[str]:
    """Return what is printed."""
    judged, controls = result["judged"], result["controls"]
    tokens = ", ".join(f"{value:.0f} {name}" for name, value in result["tokens_per_s"].items())
    return [
        f"{result['answers']} answers ({result['aborted']} aborted by a swap), {result['cancelled']} given up, "
        f"{len(result['lost'])} lost; {result['changes']} changes of the policy",
        f"judged under one policy: {judged['one policy']}, under several in turn: {judged['several policies']}, left "
        f"out: {judged['left out']}; worst difference of a log-probability {result['worst_difference']:.1e} of "
        f"{result['tolerance']:g} allowed",
        f"control: {controls['told apart']} of {controls['judged']} answers are wrong under another policy",
        *(
            f"{kind}: p50 {1e3 * each['p50']:.0f} ms, p99 {1e3 * each['p99']:.0f} ms ({each['number']})"
            for kind, each in result["change_seconds"].items()
        ),
        f"tokens/s: {tokens}",
        *(
            f"resident MiB of {name}: {' -> '.join(f'{value:.0f}' for value in values)}"
            for name, values in result["resident_mib"].items()
        ),
        *(f"FAILED: {text}" for text in result["failed"]),
    ]
