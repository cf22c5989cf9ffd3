"""``qerl bench rollout``: tokens per second of the engine, NVFP4 with an adapter on against stock vLLM in BF16.

As in training, each token comes with the log-probability that it was sampled with. A case is a number of sequences with
their tokens in and out; it is timed as a whole and for one token out, so that decoding can be told from the prefill.

With ``--interleave`` what changes about the GPU meanwhile changes for all arms. One works at a time, and the others
wait without a processor; workers of an engine on several GPUs do so from a second after their last work on (vLLM's
``SpinCondition``).
"""

import functools
import itertools
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from qerl_recipes.bench import lengths as uneven
from qerl_recipes.bench import rollout_memory
from qerl_recipes.bench.arms import Arm, ArmFailedError, Figures, check_gpus, check_shape, ended_cleanly
from qerl_recipes.bench.engines import ADAPTERLESS, ARMS
from qerl_recipes.bench.results import around, conditions, save, show_remarks, spread, table
from qerl_recipes.bench.rollout_arm import FEW, WARM_UP_TOKENS, Case, prefill
from qerl_recipes.recipe.keys import ENGINE_RANKS
from qerl_recipes.recipe.shapes import full_name

ARM = "qerl_recipes.bench.rollout_arm"
OURS = {  # arguments of vllm.LLM that the benchmark sets itself
    *("model", "dtype", "quantization", "additional_config", "max_model_len", "max_num_seqs", "tensor_parallel_size"),
    *("linear_backend", "moe_backend", "kv_cache_dtype", "logprobs_mode", "load_format", "skip_tokenizer_init"),
    *("enable_lora", "max_lora_rank"),
}
CACHES = ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")


def run(
    shape: str,
    cases: Sequence[Case],
    *,
    arms: Sequence[str] = ("bf16_merged", "bf16", "qerl_nvfp4"),
    rank: Sequence[int] = (32,),
    lengths: str | None = None,
    repeats: int = 3,
    tensor_parallel_size: int = 1,
    kv_cache_dtype: Sequence[str] = ("auto",),
    interleave: bool = False,
    engine: Mapping[str, Any] | None = None,
    variants: Mapping[str, Mapping[str, Any]] | None = None,
    scratch: Path | None = None,
    output: Path | None = None,
) -> dict[str, Any]:
    """Measure every arm, print the table, and write it to ``output`` as JSON, anew after each case.

    The command's help says what the options are. Each ``rank`` takes an engine of its own: a smaller adapter in the
    same engine would be filled up with zeros and take as long. An arm that fails is in the result with its reason, and
    the others go on. Raises ValueError for an unknown shape or arm and for what this machine cannot measure.
    """
    check_shape(shape)
    check_gpus(tensor_parallel_size)
    engine, variants = dict(engine or {}), dict(variants or {})
    for name in variants:
        if not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(f"variant {name!r}: a name is of letters, digits, '_', '.' and '-'")
    options: dict[str, Any] = {"engine": engine, **{f"variant {name}": own for name, own in variants.items()}}
    _check_names(arms, rank, kv_cache_dtype, options, interleave)
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; it is at least 1")
    about: dict[str, Any] = {}
    if lengths is not None:
        drawn = {case.batch: uneven.draw(lengths, case.batch) for case in cases}
        about = {"chosen": uneven.DEFAULT if lengths == "lognormal" else lengths, "seed": uneven.SEED}
        about["batch"] = {str(batch): uneven.summary(own) for batch, own in drawn.items()}
        of_a_batch = {case.batch: case for case in cases}
        cases = [*cases, *(of_a_batch[n]._replace(output=max(own), lengths=own) for n, own in drawn.items())]
    requests: dict[str, Figures] = {}
    for arm, one, variant, cache in itertools.product(arms, rank, (None, *variants), kv_cache_dtype):
        chosen = [] if variant is None else [variant]
        named = [f"rank {one}"] if len(rank) > 1 and arm not in ADAPTERLESS else []
        requests[", ".join([arm, *named, *chosen, *([f"{cache} cache"] if cache != "auto" else [])])] = {
            "shape": shape,
            "cases": cases,
            "rank": one,
            "tensor_parallel": tensor_parallel_size,
            "arm": arm,
            "variant": chosen,
            "kv_cache_dtype": cache,
            "engine": _joined(engine, {} if variant is None else variants[variant]),
            "memory": {},
        }
    if interleave:
        for name, memory in rollout_memory.plan(shape, requests, cases).items():
            requests[name]["memory"] = memory
    measured: dict[str, Figures] = {name: {} for name in requests}
    result = {
        "shape": shape,
        "rank": list(rank),
        "tensor_parallel_size": tensor_parallel_size,
        "repeats": repeats,
        **({"lengths": about} if about else {}),
        "interleaved": interleave,
        "engine": engine,
        "variants": {name: dict(own) for name, own in variants.items()},
        **conditions(),
        "cached_tokens": max(case.batch * case.input + sum(case.outputs) for case in (*cases, prefill(cases))),
        "arms": measured,
    }

    def note(name: str, figures: Figures) -> None:
        _add(measured[name], figures, cases)
        if row := figures.get("case"):
            rate = row["batch"] * row["output"] / statistics.median(row["seconds"])
            case = Case(row["batch"], row["input"], row["output"])
            print(f"{name}, {case}: {rate:,.0f} tokens/s", file=sys.stderr, flush=True)
        if row := figures.get("uneven"):
            last = statistics.median(row["seconds"])
            rate = f"{row['tokens'] / last:,.0f} tokens/s, {last:.1f} s until the last token"
            print(f"{name}, {row['batch']} of unequal lengths: {rate}", file=sys.stderr, flush=True)
        save(result, output)  # an arm takes minutes, and a run may be cut short

    with ended_cleanly(), tempfile.TemporaryDirectory(prefix="qerl-bench-", dir=scratch) as folder:
        for group in [list(requests)] if interleave else [[name] for name in requests]:
            left = {name: {**requests[name], "scratch": folder} for name in group}
            take_turns(ARM, left, cases, repeats, note)
    _print(result)
    return result


def _check_names(
    arms: Sequence[str], ranks: Sequence[int], caches: Sequence[str], named: Mapping[str, Figures], interleave: bool
) -> None:
    for kind, names, known in (("arm", arms, ARMS), ("kv_cache_dtype", caches, CACHES)):
        if unknown := sorted(set(names) - set(known)):
            raise ValueError(f"unknown {kind} {unknown[0]!r}; known: {', '.join(known)}")
    for name, options in named.items():
        if ours := sorted(set(options) & OURS):
            raise ValueError(f"{name} names {ours[0]!r}, which this benchmark sets itself; leave it out")
        if interleave and (ours := sorted(set(options) & set(rollout_memory.SET_HERE))):
            raise ValueError(f"{name} names {ours[0]!r}, which --interleave sets for each engine; leave one out")
    if not ranks or len(set(ranks)) < len(ranks) or min(ranks) < 1:
        raise ValueError(f"rank is {list(ranks)}; name each rank once, each at least 1")
    if max(ranks) > ENGINE_RANKS[-1]:
        raise ValueError(f"rank is {list(ranks)}; vLLM holds at most rank {ENGINE_RANKS[-1]}")


def _joined(options: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options`` with ``overrides`` in them; two objects under one name are joined in the same way."""
    joined = dict(options)
    for name, value in overrides.items():
        both_are_objects = isinstance(value, dict) and isinstance(options.get(name), dict)
        joined[name] = _joined(options[name], value) if both_are_objects else value
    return joined


def take_turns(
    module: str,
    requests: Mapping[str, Figures],
    cases: Sequence[Case],
    repeats: int,
    note: Callable[[str, Figures], None],
) -> None:
    """Start the arms, all at once, and measure every case with each of them, ``repeats`` times in turn.

    ``note`` is called with an arm's name and a piece of its figures: what it answers when it is ready, a ``case``,
    ``prefill``, or why it ``failed``.
    """
    with ExitStack() as stack:
        arms: dict[str, Arm] = {}
        pool = stack.enter_context(ThreadPoolExecutor(len(requests) or 1))
        stack.callback(lambda: list(pool.map(Arm.end, arms.values())))  # all at once: each may take its time
        for name, request in requests.items():
            arms[name] = Arm(module, request)

        def each(act: Callable[[Arm], Figures]) -> dict[str, Figures]:
            """Return what each arm answers; one that fails is ended, and left out from then on."""
            answers: dict[str, Figures] = {}
            for name, arm in list(arms.items()):
                try:
                    answers[name] = act(arm)
                except ArmFailedError as error:
                    arms.pop(name).end()  # its memory may be what the others need
                    note(name, {**error.figures, "failed": str(error)})
            return answers

        def timed(number: int, case: Case) -> dict[str, list[Figures]]:
            """Return the answers to each repeat, for every arm that is left; a few tokens warm up before."""
            given: dict[str, list[Figures]] = {name: [] for name in arms}
            warm_up = case._replace(output=min(case.output, WARM_UP_TOKENS), lengths=None)
            for repeat in range(repeats + 1):
                order = {"number": number, "repeat": repeat, "case": case if repeat else warm_up}
                for name, answer in each(functools.partial(Arm.ask, order=order)).items():
                    if repeat:
                        given[name].append(answer)
            return {name: given[name] for name in arms}

        for name, figures in each(Arm.hear).items():
            note(name, figures)
        for number, case in enumerate(cases):
            first = {} if case.lengths else timed(number, case._replace(output=1))
            for name, given in timed(number, case).items():
                row: Figures = {"batch": case.batch, "input": case.input, "seconds": _seconds(given)}
                if case.lengths:
                    row |= {f"below_{few}": [one["below"][str(few)] for one in given] for few in FEW}
                    note(name, {"uneven": {**row, "tokens": sum(case.lengths)}})
                else:
                    note(name, {"case": {**row, "output": case.output, "prefill_seconds": _seconds(first[name])}})
        prompts = prefill(cases)
        for name, given in timed(len(cases), prompts).items():
            note(name, {"prefill": {"tokens": prompts.batch * prompts.input, "seconds": _seconds(given)}})


def _seconds(given: Sequence[Figures]) -> list[float]:
    return [one["seconds"] for one in given]


def _add(measured: Figures, figures: Figures, cases: Sequence[Case]) -> None:
    """Add a piece of an arm's figures to those before, with its rates."""
    alone = ("failed", "linears", "weights_gib", "kv_cache_tokens", "start_seconds")
    measured |= {name: figures[name] for name in alone if name in figures}
    if row := figures.get("case"):
        batch, tokens_in, tokens_out = row["batch"], row["input"], row["output"]
        equal = [case for case in cases if not case.lengths]
        has_own_batch = len({case.batch for case in equal}) == len(equal)
        key = str(batch) if has_own_batch else f"{batch} x {tokens_in} + {tokens_out}"
        whole, first = row["seconds"], row["prefill_seconds"]
        decoding = [seconds - statistics.median(first) for seconds in whole]
        parts = {"decode": _rate(batch * (tokens_out - 1), decoding), "prefill": _rate(batch * tokens_in, first)}
        measured.setdefault("batch", {})[key] = {**row, **_rate(batch * tokens_out, whole), **parts}
    if row := figures.get("uneven"):
        measured.setdefault("uneven", {})[str(row["batch"])] = {**row, **_rate(row["tokens"], row["seconds"])}
    if prompts := figures.get("prefill"):
        measured["prefill"] = {**prompts, **_rate(prompts["tokens"], prompts["seconds"])}


def _rate(tokens: int, seconds: Sequence[float]) -> dict[str, float | None]:
    """Return the tokens per second of the median repeat, and the spread; None if the prefill took longer than all."""
    if statistics.median(seconds) <= 0:
        return {"tokens_per_s": None, "spread": None}
    return {"tokens_per_s": tokens / statistics.median(seconds), "spread": spread(seconds)}


def _print(result: dict[str, Any]) -> None:
    """Print a row for each whole arm, with ratios to the faster BF16 arm, without one to the first."""
    console = Console(width=160)
    show_remarks(console, result["arms"], result["cached_tokens"])
    arms = {arm: figures for arm, figures in result["arms"].items() if "prefill" in figures}
    if not arms:
        return
    others = [arm for arm in arms if arm.startswith("bf16")] or [next(iter(arms))]
    parallel = f", tensor parallel {result['tensor_parallel_size']}" if result["tensor_parallel_size"] > 1 else ""
    ranks = " and ".join(map(str, result["rank"]))
    title = (
        f"{full_name(result['shape'])} shapes{parallel}, LoRA rank {ranks}, {result['gpu']}, "
        f"{result['date']}; ratios to the faster of {' and '.join(others)}"
    )
    columns = ["tokens/s"]
    for row in next(iter(arms.values()))["batch"].values():
        columns += [f"{row['batch']} x\n{row['input']} in, {row['output']} out", "decode\nalone"]
    timed = {
        arm: [*(part for row in of["batch"].values() for part in (row, row["decode"])), of["prefill"]]
        for arm, of in arms.items()
    }
    best = [max(row["tokens_per_s"] or 0.0 for row in of) for of in zip(*(timed[arm] for arm in others), strict=True)]
    rows = []
    for arm, figures in arms.items():
        cells = [_cell(row, reference) for row, reference in zip(timed[arm], best, strict=True)]
        weights = figures["weights_gib"]
        rows.append([arm, *cells, "" if weights is None else f"{weights:.1f}"])
    console.print(table(title, [*columns, "prefill", "weights\nGiB"], rows))
    for arm, figures in arms.items():
        runs = (f"{row['layers']} layers {row['method']}, {row['kernel']}" for row in figures.get("linears", ()))
        console.print(f"{arm}: {'; '.join(runs)}", markup=False, soft_wrap=True)


def _cell(row: Figures, best: float) -> str:
    rate = row["tokens_per_s"]
    if rate is None:
        return "lost in\nthe prefill"
    return f"{rate:,.0f} {around(row['spread'])}" + (f"\n({rate / best:.2f}x)" if best else "")
