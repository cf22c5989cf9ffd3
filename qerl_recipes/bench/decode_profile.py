"""``qerl bench rollout --profile``: where the time of a decode step goes.

Steps are made one by one in the engine's own process, as a rollout makes them (``rollout.sampling``; those of stock
vLLM as ``LLM.generate`` does). They are first timed by themselves, then under torch's profiler, which slows them down,
and the CPU more than the GPU.

The profiler's trace is in Chrome's format. On the GPU a step lies between the first kernels of two CUDA graphs (of as
many as a step launches), on the CPU between two such launches. Times are in microseconds.
"""

import functools
import gzip
import json
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_recipes.bench.results import table
from qerl_recipes.machine.gpu import installed_gpu

if TYPE_CHECKING:
    import pandas as pd
    from vllm import LLM, SamplingParams

STEPS = 20  # so many are timed, and as many again profiled
LEAST_OUTPUT = 4 * STEPS
FILLING = 3  # steps after a stop until scheduling is ahead of the GPU again
LAST = 1  # a step ends where the next begins
ON_GPU, CALLS = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")
WAITS = "Synchronize$"  # calls in which the CPU waits for the GPU
COLUMNS = ["calls", "us", "added_us", "idle_us"]

# The first pattern that fits counts. Families are for reading only: in the result every kernel has its own name.
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


def check(output: int) -> None:
    """Raise ValueError for completions too short to look into, and without a GPU."""
    if output < LEAST_OUTPUT:
        raise ValueError(f"output_len is {output}; --profile needs at least {LEAST_OUTPUT}")
    if installed_gpu() is None:
        raise ValueError("--profile looks at the kernels of a GPU, and there is no CUDA GPU; leave it out")


def steps_ahead(batch: int, prompt: int, output: int, budget: int) -> int:
    """Return how many steps come before those that are timed, which end halfway through the completions.

    ``budget`` is the number of tokens of a step (vLLM's max_num_batched_tokens). Raises ValueError if the prompts take
    longer.
    """
    of_prompts = math.ceil(batch * prompt / (budget - batch)) if batch < budget else math.inf
    ahead = output // 2 - STEPS
    if of_prompts + FILLING > ahead:
        raise ValueError(
            f"{batch} prompts of {prompt} tokens take {of_prompts} steps of {budget} tokens, which leaves too few "
            f"decode steps of {output} tokens out; ask for a larger output_len"
        )
    return ahead


def profile(
    llm: "LLM",
    prompts: list[list[int]],
    sampling: "SamplingParams",
    lora_request: Any,
    trace: Path,
    *,
    is_stock: bool = False,
) -> dict[str, Any]:
    """Profile a decode step of all ``prompts`` (token ids, equally many), halfway to ``sampling.max_tokens``.

    ``step_us`` and ``worked_us`` are without the profiler. The second says how long this thread was on a CPU: it sleeps
    while it waits for the GPU. The profiler's own ``trace`` is written too: .json.gz, as Perfetto reads it. Raises
    ValueError as ``steps_ahead``.
    """
    from qerl_recipes.rollout import sampling as completions

    engine, batch, length = llm.llm_engine, len(prompts), len(prompts[0])
    budget = engine.vllm_config.scheduler_config.max_num_batched_tokens
    assert sampling.max_tokens is not None
    ahead = steps_ahead(batch, length, sampling.max_tokens, budget)
    requests: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
    names = llm.enqueue(requests, sampling, lora_request=lora_request, use_tqdm=False)
    step = engine.step if is_stock else functools.partial(completions.step, engine, completions.expected(names))
    for _ in range(ahead):
        step()
    began, worked = time.perf_counter(), time.thread_time()
    for _ in range(STEPS):
        step()
    seconds, worked = (time.perf_counter() - began) / STEPS, (time.thread_time() - worked) / STEPS
    steps = FILLING + STEPS + LAST
    _trace(step, steps, trace)
    if engine.get_num_unfinished_requests() != batch:
        raise RuntimeError("sequences ended while they were profiled; these were not the steps that were asked for")
    engine.abort_request(names, internal=True)
    while engine.has_unfinished_requests():
        engine.step()
    case = {"batch": batch, "context": length + ahead + STEPS, "step_us": 1e6 * seconds, "worked_us": 1e6 * worked}
    return {**case, **read(trace, steps)}


def _trace(step: Callable[[], Any], steps: int, file: Path) -> None:
    import torch

    activity = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]):  # the first use of the GPU's tracing takes a second
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[activity]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    file.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(file))


def read(trace: Path, steps: int = FILLING + STEPS + LAST) -> dict[str, Any]:
    """Return the mean step of a trace; ``cpu_us`` is the least, median and largest of the CPU's work."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    on_gpu = mean_step(kernels_of(events), steps)
    cpu = cpu_work(events, on_gpu["graphs"])
    return {**on_gpu, "cpu_us": {"least": min(cpu), "median": statistics.median(cpu), "most": max(cpu)}}


def kernels_of(events: Iterable[Mapping[str, Any]]) -> "pd.DataFrame":
    """Return the GPU's kernels and copies by ``start``; those of a graph have one ``launch``."""
    import pandas as pd

    rows = [
        (event["name"], float(event["ts"]), float(event["ts"]) + float(event["dur"]), event["args"]["correlation"])
        for event in events
        if event.get("cat") in ON_GPU
    ]
    return pd.DataFrame(rows, columns=["name", "start", "end", "launch"]).sort_values("start", kind="stable")


def mean_step(kernels: "pd.DataFrame", steps: int) -> dict[str, Any]:
    """Return the mean step of ``kernels`` (``kernels_of``), the first FILLING and the last of ``steps`` left out.

    A kernel may start before the one ahead has ended. ``us`` is how long it ran; ``added_us`` how much later the GPU
    was done because of it; ``idle_us`` how long nothing ran before it. All added and idle time makes the step.

    Raises RuntimeError unless every step launched equally many CUDA graphs.
    """
    launches = kernels.groupby("launch")["start"].agg(["size", "min"])
    graphs = launches.loc[launches["size"] > 1, "min"].sort_values()  # launch -> start of its first kernel
    each, left = divmod(len(graphs), steps)
    if left or not each:
        raise RuntimeError(
            f"{steps} steps launched {len(graphs)} CUDA graphs, and steps can be told apart by these alone"
        )
    borders = graphs.tolist()[FILLING * each :: each][: steps - FILLING - LAST + 1]
    first, last, count = borders[0], borders[-1], len(borders) - 1
    start, end = kernels["start"], kernels["end"]
    reached = end.cummax().shift(fill_value=-math.inf)  # when the GPU was done with all kernels before
    begins_graph = start == kernels["launch"].map(graphs)
    starts_in, idles_in = start.between(first, last, "left"), start.between(first, last, "right")
    rows = kernels.assign(
        in_graph=kernels["launch"].isin(graphs.index),
        calls=1.0 * starts_in,
        us=(end - start).where(starts_in, 0.0),
        added_us=(end - reached.clip(lower=start)).clip(lower=0.0).where(starts_in, 0.0),
        idle_us=(start - reached).clip(lower=0.0).where(idles_in, 0.0),
    )
    idle_in_graph = rows.loc[rows["in_graph"] & ~begins_graph, "idle_us"].sum() / count
    sums = rows.groupby(["name", "in_graph"], sort=False)[COLUMNS].sum() / count
    sums = sums[sums["calls"] > 0].sort_values("added_us", ascending=False, kind="stable")
    listed = sums.reset_index()
    listed.insert(1, "family", listed["name"].map(family))
    return {
        "graphs": each,
        "profiled_step_us": (last - first) / count,
        "busy_us": float(sums["added_us"].sum()),
        "idle_in_graph_us": float(idle_in_graph),
        "idle_between_us": float(sums["idle_us"].sum() - idle_in_graph),
        "kernels": listed.to_dict("records"),
    }


def cpu_work(events: Iterable[Mapping[str, Any]], graphs: int) -> list[float]:
    """Return how long the CPU worked between the launches of two steps of ``graphs`` CUDA graphs, without its waits."""
    calls = sorted((event for event in events if event.get("cat") in CALLS), key=lambda event: event["ts"])
    launches = [event["ts"] for event in calls if "GraphLaunch" in event["name"]][FILLING * graphs :: graphs]
    waits = [(event["ts"], event["dur"]) for event in calls if re.search(WAITS, event["name"])]
    return [end - start - sum(took for at, took in waits if start <= at < end) for start, end in pairwise(launches)]


def family(name: str) -> str:
    """Return the first of FAMILIES that a kernel's name fits."""
    return next(title for title, pattern in FAMILIES.items() if re.search(pattern, name))


def by_family(kernels: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Sum COLUMNS over the ``kernels`` of a result by family; those outside of the graph have rows of their own."""
    import pandas as pd

    rows = pd.DataFrame(kernels)
    titles = rows["family"] + rows["in_graph"].map({True: "", False: ", outside of the graph"})
    return rows.groupby(titles)[COLUMNS].sum().to_dict("index")


def show(arm: str, figures: Mapping[str, Any]) -> None:
    """Print a table of one arm, a column for each case: microseconds that a family adds to a step, and its calls."""
    from rich.console import Console

    cases = figures["profile"]
    sums = [by_family(case["kernels"]) for case in cases]
    largest = {title: max(case.get(title, {}).get("added_us", 0.0) for case in sums) for case in sums for title in case}
    rows = []
    for title in sorted(largest, key=lambda title: -largest[title]):
        each = [case.get(title) for case in sums]
        rows.append([title, *(f"{row['added_us']:,.0f} ({row['calls']:.0f})" if row else "" for row in each)])
    keys = {
        "idle within the graph": "idle_in_graph_us",
        "idle between graphs": "idle_between_us",
        "the step": "profiled_step_us",
        "the step, without the profiler": "step_us",
        "the CPU's work, without the profiler": "worked_us",
    }
    rows += [[title, *(f"{case[key]:,.0f}" for case in cases)] for title, key in keys.items()]
    spans = [case["cpu_us"] for case in cases]
    shown = [f"{span['median']:,.0f} ({span['least']:,.0f} to {span['most']:,.0f})" for span in spans]
    rows.append(["the CPU's work, with the profiler", *shown])
    columns = ["", *(f"{case['batch']} x\n{case['context']} tokens" for case in cases)]
    Console(width=160).print(table(f"{arm}: microseconds of a decode step, and kernels", columns, rows))
