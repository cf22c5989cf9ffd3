"""``qerl bench rollout --profile``: where the time of a decode step goes.

Steps are made one by one in the engine's own process, as a rollout makes them (``rollout.answers``; those of stock
vLLM as ``LLM.generate`` does): first timed by themselves, then under torch's profiler, which slows them down, and the
CPU more than the GPU.
"""

import functools
import gzip
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_recipes.bench.decode_trace import FILLING, LAST, by_family, of_a_step, of_the_cpu, read
from qerl_recipes.machine.gpu import installed_gpu

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

STEPS = 20  # so many are timed, and as many again profiled
LEAST_OUTPUT = 4 * STEPS


def check(output: int) -> None:
    """Raises ValueError for completions too short to look into, and without a GPU."""
    if output < LEAST_OUTPUT:
        raise ValueError(f"output_len is {output}; --profile needs at least {LEAST_OUTPUT}")
    if installed_gpu() is None:
        raise ValueError("--profile looks at the kernels of a GPU, and there is no CUDA GPU; leave it out")


def steps_ahead(batch: int, prompt: int, output: int, budget: int) -> int:
    """How many steps come before those that are timed, which end halfway through the completions.

    ``budget``: tokens of a step (vLLM's max_num_batched_tokens). Raises ValueError where the prompts take longer.
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
    """A decode step of all ``prompts`` (token ids, equally many), halfway to ``sampling.max_tokens``.

    ``step_us`` and ``worked_us`` are without the profiler, the second how long this thread was on a CPU: it sleeps
    while it waits for the GPU. The profiler's own ``trace`` is written too: .json.gz, as Perfetto reads it. Raises
    ValueError as ``steps_ahead``.
    """
    from qerl_recipes.rollout import answers  # imports vLLM

    engine, batch, length = llm.llm_engine, len(prompts), len(prompts[0])
    budget = engine.vllm_config.scheduler_config.max_num_batched_tokens
    assert sampling.max_tokens is not None
    ahead = steps_ahead(batch, length, sampling.max_tokens, budget)
    requests: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
    names = llm.enqueue(requests, sampling, lora_request=lora_request, use_tqdm=False)
    step = engine.step if is_stock else functools.partial(answers.step, engine, answers.expected(names))
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
    return {**case, **what_it_shows(trace, steps)}


def what_it_shows(trace: Path, steps: int = FILLING + STEPS + LAST) -> dict[str, Any]:
    """The mean step of a trace of so many steps; ``cpu_us`` is the least, median and largest of the CPU's work."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    found = of_a_step(read(events), steps)
    cpu = of_the_cpu(events, found["graphs"])
    return {**found, "cpu_us": {"least": min(cpu), "median": statistics.median(cpu), "most": max(cpu)}}


def _trace(step: Callable[[], Any], steps: int, file: Path) -> None:
    import torch

    activity = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]):  # the first use of the GPU's tracing takes a second
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[activity]) as seen:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    file.parent.mkdir(parents=True, exist_ok=True)
    seen.export_chrome_trace(str(file))


def show(arm: str, found: Mapping[str, Any]) -> None:
    """A table of one arm, a column for each case: microseconds that a family adds to a step, and its calls."""
    from rich.console import Console
    from rich.table import Table

    cases = found["profile"]
    table = Table(title=f"{arm}: microseconds of a decode step, and kernels", title_justify="left")
    table.add_column("")
    for case in cases:
        table.add_column(f"{case['batch']} x\n{case['context']} tokens", justify="right", overflow="fold")
    sums = [by_family(case["kernels"]) for case in cases]
    titles = {title: max(of.get(title, {}).get("added_us", 0.0) for of in sums) for of in sums for title in of}
    for title in sorted(titles, key=lambda title: -titles[title]):
        cells = [(f"{of[title]['added_us']:,.0f} ({of[title]['calls']:.0f})" if title in of else "") for of in sums]
        table.add_row(title, *cells)
    rows = {
        "idle within the graph": "idle_in_graph_us",
        "idle between graphs": "idle_between_us",
        "the step": "profiled_step_us",
        "the step, without the profiler": "step_us",
        "the CPU's work, without the profiler": "worked_us",
    }
    for title, key in rows.items():
        table.add_row(title, *(f"{case[key]:,.0f}" for case in cases), end_section=title == "idle between graphs")
    cpu = [case["cpu_us"] for case in cases]
    spans = [f"{of['median']:,.0f} ({of['least']:,.0f} to {of['most']:,.0f})" for of in cpu]
    table.add_row("the CPU's work, with the profiler", *spans)
    Console(width=160).print(table)
