"""Compute a step's time on 1 to 512 GPUs, and an adapter's way to as many engines: ``qerl bench scale``.

Nothing is run. Every GPU has a trainer and an engine, as under ``accelerate launch`` or ``torchrun``, and the
completions of a step are dealt out evenly. A step is, of the slowest engine, the rollout; of the slowest trainer, the
passes over its tokens; the all-reduce of the adapter's gradient; and what every step takes whatever its size. Lengths
are drawn independently, so completions of one prompt are no more alike than others.
"""

import heapq
import itertools
import json
import math
import operator
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qerl_recipes.bench import lengths as uneven
from qerl_recipes.bench.results import conditions, save, table
from qerl_recipes.recipe.shapes import config_json

RESULTS = Path(__file__).parents[1] / "results"
ARM = "qerl_nvfp4"
# shape -> files with the engine's rates, a step's parts, and swaps
FILES = {
    "7B": ("rollout_7B_interleaved_NVIDIA_H200", "train_7B_80GB_NVIDIA_H200", "swap_7B_NVIDIA_H200"),
    "32B": ("rollout_32B_interleaved_NVIDIA_H200", "train_32B_NVIDIA_H200", "swap_32B_tp2_NVIDIA_H200"),
}
SCALED = {"72B": "32B"}  # shape -> the one whose times are multiplied by the ratio of parameters
GPUS = tuple(2**power for power in range(10))
# tokens of a prompt, sequences that an engine decodes at a time, and seconds of each hop of the all-reduce
PROMPT, AT_A_TIME, LATENCY = 256, 64, 10e-6
ROLLOUTS = 16  # drawn, of whose slowest engines the mean is taken
POOR = 1.2  # twice the GPUs that make a step less than this much faster are not worth it


@dataclass(frozen=True)
class Parts:
    """Hold what one GPU takes, in seconds: of a decode step by its number of sequences, and of a token in and trained.

    ``overhead`` is what a rollout inside a step takes beyond the engine alone, ``rest`` what remains of a step, with
    the swap of the engine on the same GPU. ``push`` is a swap of a server's adapter by the body of a request, and
    ``adapter`` the bytes of the adapter and of its gradient, in fp32.
    """

    decode: Mapping[int, float]
    prefill: float
    training: float
    overhead: float
    rest: float
    push: float
    adapter: int

    def step_seconds(self, sequences: int) -> float:
        """Return the seconds of a decode step, on the line between measured numbers and level beyond them."""
        import numpy

        return float(numpy.interp(sequences, list(self.decode), list(self.decode.values())))


def measured(shape: str) -> Parts:
    """Return the parts of a shape from the committed files.

    Those of 72B are 32B's times, multiplied by the ratio of the linears' parameters. Raises ValueError for a shape of
    which there are no files.
    """
    if shape in SCALED:
        from qerl_recipes.memory import sizes

        smaller = SCALED[shape]
        parts = measured(smaller)
        of_both = [sizes.measure(config_json(one)).linears for one in (shape, smaller)]
        weights, adapters = (
            operator.truediv(*(sum(count(linear.N, linear.K) for linear in linears) for linears in of_both))
            for count in (operator.mul, operator.add)
        )
        times = {name: weights * getattr(parts, name) for name in ("prefill", "training", "overhead", "rest")}
        decode = {sequences: weights * seconds for sequences, seconds in parts.decode.items()}
        return Parts(decode=decode, push=adapters * parts.push, adapter=round(adapters * parts.adapter), **times)
    if shape not in FILES:
        raise ValueError(f"shape {shape!r} has no measured parts; known: {', '.join([*FILES, *SCALED])}")
    rollout, train, swap = (json.loads((RESULTS / f"{name}.json").read_text()) for name in FILES[shape])
    engine, seconds = rollout["arms"][ARM], train["summary"][ARM]["seconds"]
    sequences = train["groups"] * train["generations"]
    alone = Parts(
        decode={int(size): int(size) / case["decode"]["tokens_per_s"] for size, case in engine["batch"].items()},
        prefill=1 / engine["prefill"]["tokens_per_s"],
        training=(seconds["training"] + seconds["scoring"]) / (sequences * (train["prompt"] + train["completion"])),
        overhead=0.0,
        rest=seconds["swap"] + seconds["sleep"] + seconds["rest"],
        push=swap["ways"]["http"]["swap"]["median"],
        adapter=swap["ways"]["http"]["bytes"],
    )
    own = rollout_seconds(alone, [train["completion"]] * sequences, train["prompt"], sequences)
    return replace(alone, overhead=seconds["rollout"] - own)


def rollout_seconds(parts: Parts, lengths: Sequence[int], prompt: int, at_a_time: int) -> float:
    """Return the seconds until an engine has ended its last completion.

    It decodes ``at_a_time`` sequences, and the next begins where one has ended.
    """
    waiting = list(reversed(lengths))
    running: list[int] = []  # the decode step in which each ends
    now, seconds = 0, parts.overhead + len(lengths) * prompt * parts.prefill
    while waiting or running:
        while waiting and len(running) < at_a_time:
            heapq.heappush(running, now + waiting.pop())
        seconds += (running[0] - now) * parts.step_seconds(len(running))
        now = heapq.heappop(running)
    return seconds


def ways(parts: Parts, engines: int) -> tuple[float, float]:
    """Return the seconds of an adapter to so many servers: one after the other, and as a tree of who has it already."""
    return engines * parts.push, math.ceil(math.log2(engines + 1)) * parts.push


def step(
    parts: Parts,
    rollouts: Sequence[Sequence[int]],
    gpus: int,
    *,
    prompt: int,
    at_a_time: int,
    bandwidth: float,
    latency: float,
) -> dict[str, float]:
    """Return the seconds of a step's parts on so many GPUs, of the slowest GPU each, as a mean over ``rollouts``."""
    engines, trainers, waits = [], [], []
    for lengths in rollouts:
        dealt = [lengths[gpu::gpus] for gpu in range(gpus)]
        times = [rollout_seconds(parts, own, prompt, at_a_time) for own in dealt]
        engines.append(max(times))
        waits.append(1 - statistics.mean(times) / max(times))
        trainers.append(max(sum(own) + len(own) * prompt for own in dealt) * parts.training)
    found = {"rollout": statistics.mean(engines), "training": statistics.mean(trainers)}
    found["all_reduce"] = 2 * (gpus - 1) * (parts.adapter / gpus / bandwidth + latency)  # by ring
    found["step"] = sum(found.values()) + parts.rest
    one_by_one, tree = ways(parts, gpus)
    return {**found, "waiting": statistics.mean(waits), "one_by_one": one_by_one, "tree": tree}


def run(
    shape: str,
    *,
    completions: int = 1024,
    lengths: str = uneven.DEFAULT,
    bandwidth_gb: float = 50.0,
    output: Path | None = None,
) -> dict[str, Any]:
    """Compute a step on each number of GPUs, print the table with its assumptions, and write it to ``output``.

    Raises ValueError for numbers that make no step, and as ``measured`` and ``lengths.draw`` do.
    """
    for name, value in {"completions": completions, "bandwidth_gb": bandwidth_gb}.items():
        if value <= 0:
            raise ValueError(f"{name} is {value}, and must be above 0")
    parts = measured(shape)
    drawn = uneven.draw(lengths, ROLLOUTS * completions)
    rollouts = [drawn[first : first + completions] for first in range(0, len(drawn), completions)]
    setting: dict[str, Any] = {"prompt": PROMPT, "at_a_time": AT_A_TIME}
    setting |= {"bandwidth": bandwidth_gb * 1e9, "latency": LATENCY}
    rows = {gpus: step(parts, rollouts, gpus, **setting) for gpus in GPUS if gpus <= completions}
    result = {"shape": shape, "completions": completions, "lengths": lengths, **setting, **conditions(), "gpus": rows}
    save(result, output)
    _print(result, parts)
    return result


def last_that_pays(rows: Mapping[int, Mapping[str, float]]) -> int:
    """Return the largest number of GPUs up to which each doubling has made the step at least POOR times as fast."""
    for few, many in itertools.pairwise(rows):
        if rows[few]["step"] < POOR * rows[many]["step"]:
            return few
    return max(rows)


def _print(result: Mapping[str, Any], parts: Parts) -> None:
    from rich.console import Console

    rows, shape = result["gpus"], result["shape"]
    alone = rows[1]["step"]
    form = "{rollout:.2f}|{waiting:.0%}|{training:.2f}|{ms:.1f}|{step:.2f}|{speed:.2f}x|{one_by_one:.2f}|{tree:.2f}"
    derived = {gpus: {"ms": 1e3 * row["all_reduce"], "speed": alone / row["step"]} for gpus, row in rows.items()}
    cells = [[str(gpus), *form.format(**row, **derived[gpus]).split("|")] for gpus, row in rows.items()]
    columns = ["GPUs", "rollout, s", "engines\nwait", "training, s", "all-reduce\nms", "step, s"]
    columns += ["to one\nGPU", "N servers:\none by one, s", "as a\ntree, s"]
    title = f"{shape}, {result['completions']} completions a step, lengths {result['lengths']}: computed, not run"
    console = Console(width=160)
    console.print(table(title, columns, cells))
    smaller = SCALED.get(shape, shape)
    times = f", all times by the parameters of {shape}" if smaller != shape else ""
    for line in (
        f"Twice the GPUs pay up to {last_that_pays(rows)}: beyond, they make the step less than {POOR}x as fast.",
        f"Measured on one H200: {', '.join(f'{name}.json' for name in FILES[smaller])} in kernels/results{times}.",
        f"Chosen: {result['bandwidth'] / 1e9:g} GB/s and {1e6 * result['latency']:g} us a hop for the all-reduce of "
        f"{parts.adapter / 1e6:,.0f} MB (400 Gb/s a GPU, as InfiniBand NDR has); {result['at_a_time']} sequences at a "
        "time in an engine; training in proportion to its tokens; a network as fast for a swap as one machine.",
        f"Each is the mean of {ROLLOUTS} rollouts, of their slowest engine. No server passes an adapter on today: the "
        "tree is what that would give.",
    ):
        console.print(line, soft_wrap=True, markup=False)
