"""What a profiled decode step consists of, read from a trace in Chrome's format, as torch's profiler writes it.

On the GPU a step is what lies between the first kernels of two CUDA graphs (of as many as a step launches), on the CPU
what lies between two such launches. Times in microseconds.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

FILLING = 3  # steps after a stop until scheduling is ahead of the GPU again
LAST = 1  # a step ends where the next begins
ON_GPU, CALLS = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")
WAITS = "Synchronize$"  # calls in which the CPU waits for the GPU
COLUMNS = ("calls", "us", "added_us", "idle_us")

# The first that fits. For reading only: in the result every kernel stands by its own name.
FAMILIES = {
    "adapter": "adapter_shrink|lora",
    "NVFP4 product": "nvfp4_gemm|Marlin|marlin",
    "KV write": "reshape_and_cache",
    "attention": "flash|fmha|attention|prepare_varlen",
    "cuBLAS": "nvjet|gemm|gemv|cutlass|splitK",
    "sampling": "gumbel|topk|log_softmax|_ranks_|temperature|[aA]rg[mM]ax|gather",
    "norm, silu, rotation": "^triton_|rotary|rms_norm|act_and_mul",
    "copies": "^Memcpy|^Memset|copy",
    "other": "",
}


class Kernel(NamedTuple):
    """One launch on the GPU, or a copy. ``launch``: the call that launched it; all kernels of a graph have the same."""

    name: str
    start: float
    end: float
    launch: int


def read(events: Iterable[Mapping[str, Any]]) -> list[Kernel]:
    """What the GPU did, by start."""
    found = [
        Kernel(
            event["name"], float(event["ts"]), float(event["ts"]) + float(event["dur"]), event["args"]["correlation"]
        )
        for event in events
        if event.get("cat") in ON_GPU
    ]
    return sorted(found, key=lambda kernel: kernel.start)


def of_a_step(kernels: Sequence[Kernel], steps: int) -> dict[str, Any]:
    """The mean step of ``kernels`` (``read``), the first FILLING and the last of ``steps`` left out.

    A kernel may start before the one ahead has ended. ``us``: how long it was there; ``added_us``: how much later the
    GPU was done by it; ``idle_us``: how long nothing ran before it. All added and idle time makes the step.

    Raises RuntimeError unless every step launched as many CUDA graphs.
    """
    members = Counter(kernel.launch for kernel in kernels)
    first: dict[int, float] = {}
    for kernel in kernels:
        if members[kernel.launch] > 1:
            first.setdefault(kernel.launch, kernel.start)
    each, left = divmod(len(first), steps)
    if left or not each:
        raise RuntimeError(
            f"{steps} steps launched {len(first)} CUDA graphs, and steps can be told apart by these alone"
        )
    borders = list(first.values())[FILLING * each :: each][: steps - FILLING - LAST + 1]
    rows: dict[tuple[str, bool], dict[str, float]] = defaultdict(_zeros)
    idle_in_graph, reached = 0.0, -math.inf
    for kernel in kernels:
        row, in_graph = rows[kernel.name, kernel.launch in first], kernel.launch in first
        if borders[0] <= kernel.start < borders[-1]:
            added = max(0.0, kernel.end - max(reached, kernel.start))
            row["calls"] += 1
            row["us"] += kernel.end - kernel.start
            row["added_us"] += added
        if borders[0] < kernel.start <= borders[-1]:
            idle = max(0.0, kernel.start - reached)
            row["idle_us"] += idle
            idle_in_graph += idle if in_graph and kernel.start != first[kernel.launch] else 0.0
        reached = max(reached, kernel.end)
    count = len(borders) - 1
    listed: list[dict[str, Any]] = [
        {"name": name, "family": family(name), "in_graph": in_graph, **{key: row[key] / count for key in COLUMNS}}
        for (name, in_graph), row in rows.items()
        if row["calls"]
    ]
    listed.sort(key=lambda row: -row["added_us"])
    return {
        "graphs": each,
        "profiled_step_us": (borders[-1] - borders[0]) / count,
        "busy_us": sum(row["added_us"] for row in listed),
        "idle_in_graph_us": idle_in_graph / count,
        "idle_between_us": sum(row["idle_us"] for row in listed) - idle_in_graph / count,
        "kernels": listed,
    }


def of_the_cpu(events: Iterable[Mapping[str, Any]], graphs: int) -> list[float]:
    """How long the engine's process was at work between the launches of two steps, waits for the GPU left out: one
    number for each step but the first FILLING and the last. ``graphs``: launches of CUDA graphs in a step."""
    calls = sorted((event for event in events if event.get("cat") in CALLS), key=lambda event: event["ts"])
    launches = [event["ts"] for event in calls if "GraphLaunch" in event["name"]][FILLING * graphs :: graphs]
    waits = [(event["ts"], event["dur"]) for event in calls if re.search(WAITS, event["name"])]
    return [end - start - sum(took for at, took in waits if start <= at < end) for start, end in pairwise(launches)]


def family(name: str) -> str:
    """The first of FAMILIES that a kernel's name fits."""
    return next(title for title, pattern in FAMILIES.items() if re.search(pattern, name))


def by_family(kernels: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Sums of COLUMNS over the ``kernels`` of a result; those outside of the graph in rows of their own."""
    sums: dict[str, dict[str, float]] = defaultdict(_zeros)
    for row in kernels:
        of_title = sums[row["family"] + ("" if row["in_graph"] else ", outside of the graph")]
        for key in COLUMNS:
            of_title[key] += row[key]
    return dict(sums)


def _zeros() -> dict[str, float]:
    return dict.fromkeys(COLUMNS, 0.0)
