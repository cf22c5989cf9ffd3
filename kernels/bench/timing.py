"""Time kernels as an engine runs them: inside a CUDA graph, with cold weights, variants taking turns."""

from collections.abc import Callable

import torch

COLD_BYTES = 300 * 2**20  # distinct weights that one replay walks over: several times the L2 cache
MOST_COPIES = 64  # of one weight; where they are smaller than the cache it is overwritten before each replay


def capture(
    calls: list[Callable[[], object]], at_least: int = 20, pool: object = None
) -> tuple[torch.cuda.CUDAGraph, int]:
    """Capture ``calls`` in turn, repeated until there are ``at_least``; return the graph and the number of calls."""
    repeats = -(-at_least // len(calls))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for _ in range(repeats):
            for call in calls:
                call()
    return graph, repeats * len(calls)


def interleaved(
    variants: dict[str, list[Callable[[], object]]], rounds: int = 7, at_least: int = 20
) -> dict[str, float]:
    """Return the median microseconds of one call of each variant; variants are replayed in turn ``rounds`` times.

    One replay makes at least ``at_least`` calls. All graphs share one pool of memory: nobody needs what they compute.
    """
    pool = torch.cuda.graph_pool_handle()
    graphs = {name: capture(calls, at_least, pool) for name, calls in variants.items()}
    cache = torch.empty(COLD_BYTES // 2, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for warm_up in (True, *[False] * rounds):
        for name, (graph, calls) in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            cache.zero_()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if not warm_up:
                times[name].append(1000 * start.elapsed_time(end) / calls)
    return {name: sorted(values)[len(values) // 2] for name, values in times.items()}


def copies(bytes_each: int) -> int:
    """Return how many distinct weights of this size keep one replay cold, the cache being overwritten before it."""
    return min(max(3, -(-COLD_BYTES // bytes_each)), MOST_COPIES)
