"""``qerl bench rollout``: tokens per second of the engine, NVFP4 with an adapter on against stock vLLM in BF16.

Weights are random and of the real shapes, so nothing is downloaded, and every completion has its full length. As in
training, each token comes with the log-probability that it was sampled with. A case is a number of sequences with
their tokens in and out; it is timed as a whole and for one token out, so that decoding can be told from the prefill.
Every arm runs in a process of its own, one after the other, with several rounds A B A B; or with ``--interleave`` all
of them are there at once, and take turns repeat by repeat. With ``--profile`` nothing is timed but a decode step, and
its kernels.
"""

import re
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qerl_recipes.bench import decode_profile, rollout_memory
from qerl_recipes.bench.in_turn import pause, take_turns
from qerl_recipes.bench.process import ArmFailedError, check_gpus, check_shape, ended_cleanly, in_own_process
from qerl_recipes.bench.results import conditions, save
from qerl_recipes.bench.rollout_arm import ARMS
from qerl_recipes.bench.rollout_cases import Case, rows
from qerl_recipes.bench.train_table import around, spread
from qerl_recipes.recipe.shapes import full_name

ARM = "qerl_recipes.bench.rollout_arm"
OURS = {"model", "dtype", "quantization", "additional_config", "max_model_len", "max_num_seqs", "tensor_parallel_size"}
OURS |= {"kv_cache_dtype", "logprobs_mode", "load_format", "skip_tokenizer_init", "enable_lora", "max_lora_rank"}
CACHES = ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")


def run(
    shape: str,
    cases: Sequence[Case],
    *,
    arms: Sequence[str] = ("bf16_merged", "bf16", "qerl_nvfp4"),
    rank: int = 32,
    repeats: int | None = None,
    rounds: int = 1,
    tensor_parallel_size: int = 1,
    kv_cache_dtype: Sequence[str] = ("auto",),
    profile: bool = False,
    interleave: bool = False,
    engine: Mapping[str, Any] | None = None,
    variants: Mapping[str, Mapping[str, Any]] | None = None,
    scratch: Path | None = None,
    output: Path | None = None,
) -> dict[str, Any]:
    """Measure every arm, print the table, and write it to ``output`` as JSON, after each case what there is.

    ``profile``: instead of rates, where the time of a decode step goes (``bench.decode_profile``); the profiler's
    traces lie beside ``output``.

    ``interleave``: the engines of all arms are there at once, if they fit on the GPU together, and take turns.

    With several of ``kv_cache_dtype`` each arm is measured with each of these caches; "auto" is the activations' dtype.
    ``engine``: more arguments of ``vllm.LLM``, of every arm; what the benchmark sets itself (OURS) it must not name.
    ``variants``: name -> such arguments; each arm is measured without any and with those of each variant, which stand
    above ``engine``.
    ``scratch`` is the folder for the one checkpoint that is written, of a mixture in NVFP4.

    An arm that fails is in the result with its reason and what was measured of it, and the others go on. Raises
    ValueError for an unknown shape or arm and for what this machine cannot measure.
    """
    check_shape(shape)
    check_gpus(tensor_parallel_size)
    if unknown := sorted(set(arms) - set(ARMS)):
        raise ValueError(f"unknown arm {unknown[0]!r}; known: {', '.join(ARMS)}")
    if unknown := sorted(set(kv_cache_dtype) - set(CACHES)):
        raise ValueError(f"unknown kv_cache_dtype {unknown[0]!r}; known: {', '.join(CACHES)}")
    more = dict(engine or {})
    _check_engine("engine", more, interleave=interleave)
    for name, own in (variants or {}).items():
        if not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(f"variant {name!r}: a name is of letters, digits, '_', '.' and '-'")
        _check_engine(f"variant {name}", own, interleave=interleave)
    if profile:
        if repeats is not None:
            raise ValueError(f"repeats is {repeats}, and --profile times no case as a whole; leave one of them out")
        if interleave:
            raise ValueError(
                "--interleave has several engines at once, and --profile looks at one; leave one of them out"
            )
        if tensor_parallel_size > 1:
            raise ValueError("--profile looks into the engine's process, and tensor parallelism has more; use one GPU")
        decode_profile.check(min(case.output for case in cases))
    if interleave and rounds != 1:
        raise ValueError(f"rounds is {rounds}, and with --interleave every repeat is a round; raise repeats instead")
    repeats = 3 if repeats is None else repeats
    if min(repeats, rounds) < 1:
        raise ValueError(f"repeats is {repeats} and rounds is {rounds}; each is at least 1")
    requests: dict[str, dict[str, Any]] = {}
    for arm in arms:
        for variant, own in [([], {}), *(([name], own) for name, own in (variants or {}).items())]:
            for cache in kv_cache_dtype:
                parts = [arm, *variant, *([f"{cache} cache"] if cache != "auto" else [])]
                requests[", ".join(parts)] = {
                    "shape": shape,
                    "cases": cases,
                    "rank": rank,
                    "tensor_parallel": tensor_parallel_size,
                    "arm": arm,
                    "variant": variant,
                    "kv_cache_dtype": cache,
                    "engine": _joined(more, own),
                    "memory": {},
                    "traces": None,
                }
    if interleave:
        for name, memory in rollout_memory.plan(shape, requests, cases).items():
            requests[name]["memory"] = memory
    rest = pause(len(requests), tensor_parallel_size) if interleave else 0.0
    measured: dict[str, dict[str, Any]] = {name: {} for name in requests}
    result = {
        "shape": shape,
        "rank": rank,
        "tensor_parallel_size": tensor_parallel_size,
        "repeats": repeats,
        "rounds": rounds,
        "interleaved": interleave,
        "rest_seconds": rest,
        "engine": more,
        "variants": {name: dict(own) for name, own in (variants or {}).items()},
        **conditions(),
        "cached_tokens": max(batch * tokens for batch, tokens in rows(cases)),
        "arms": measured,
    }

    def note(name: str, found: dict[str, Any]) -> None:
        _add(measured[name], found, cases)
        for row in found.get("cases", []):
            rate = row["batch"] * row["output"] / statistics.median(row["seconds"])
            case = Case(row["batch"], row["input"], row["output"])
            print(f"{name}, {case}: {rate:,.0f} tokens/s", file=sys.stderr, flush=True)
        save(result, output)  # an arm takes minutes, and a run may be cut short

    with ended_cleanly(), tempfile.TemporaryDirectory(prefix="qerl-bench-", dir=scratch) as folder:
        for group in [list(requests)] if interleave else [[name] for _ in range(rounds) for name in requests]:
            asked = {name: {**requests[name], "scratch": folder} for name in group if "failed" not in measured[name]}
            if not profile:
                take_turns(ARM, asked, cases, repeats, note, rest)
                continue
            for name, request in asked.items():
                traces = (output or Path(folder, "profile")).with_suffix("").resolve()
                suffix = "_".join([request["arm"], *request["variant"], request["kv_cache_dtype"]])
                try:
                    note(name, in_own_process(ARM, {**request, "traces": f"{traces}_{suffix}"}))
                except ArmFailedError as error:
                    note(name, {"failed": str(error)})
    _print(result)
    return result


def _check_engine(name: str, options: Mapping[str, Any], *, interleave: bool) -> None:
    if taken := sorted(set(options) & OURS):
        raise ValueError(f"{name} names {taken[0]!r}, which this benchmark sets itself; leave it out")
    if interleave and (taken := sorted(set(options) & set(rollout_memory.SET_HERE))):
        raise ValueError(f"{name} names {taken[0]!r}, which --interleave sets for each engine; leave one of them out")


def _joined(options: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both, and where both are objects, those joined; what stands ``above`` wins."""
    return {
        **options,
        **{
            name: _joined(options[name], value)
            if isinstance(value, dict) and isinstance(options.get(name), dict)
            else value
            for name, value in above.items()
        },
    }


def _add(measured: dict[str, Any], found: dict[str, Any], cases: Sequence[Case]) -> None:
    """Join a piece of what was found to what is there, and work out the rates anew."""
    alone = ("failed", "weights_gib", "kv_cache_tokens", "start_seconds")
    measured |= {name: found[name] for name in alone if name in found}
    if "profile" in found:
        measured.setdefault("profile", []).extend(found["profile"])
    differ = len({case.batch for case in cases}) == len(cases)
    for row in found.get("cases", []):
        rows = measured.setdefault("batch", {})
        key = str(row["batch"]) if differ else f"{row['batch']} x {row['input']} + {row['output']}"
        joined = rows.setdefault(key, {**row, "seconds": [], "prefill_seconds": []})
        whole, first = (joined[name] + row[name] for name in ("seconds", "prefill_seconds"))
        batch, first_token = row["batch"], statistics.median(first)
        joined |= {"seconds": whole, "prefill_seconds": first, **_rate(batch * row["output"], whole)}
        decoding = [seconds - first_token for seconds in whole]
        joined["decode"] = _rate(batch * (row["output"] - 1), decoding)
        joined["prefill"] = _rate(batch * row["input"], first)
    if "prefill" in found:
        prefill = found["prefill"]
        seconds = measured.get("prefill", {}).get("seconds", []) + prefill["seconds"]
        measured["prefill"] = {**prefill, "seconds": seconds, **_rate(prefill["tokens"], seconds)}


def _rate(tokens: int, seconds: Sequence[float]) -> dict[str, float | None]:
    """Tokens per second of the median repeat, and how far the repeats lie apart, relative to it; None for a decoding of
    which nothing is left once the prefill is taken off, as where a machine at work on something else prefilled slowly.
    """
    if statistics.median(seconds) <= 0:
        return {"tokens_per_s": None, "spread": None}
    return {"tokens_per_s": tokens / statistics.median(seconds), "spread": spread(seconds)}


def _print(result: dict[str, Any]) -> None:
    """A row for each arm of which all was measured; ratios are to the faster BF16 arm of the table, without one to its
    first arm."""
    from rich.console import Console
    from rich.table import Table

    console, arms = Console(width=160), {arm: row for arm, row in result["arms"].items() if "prefill" in row}
    for arm, row in result["arms"].items():
        if "failed" in row:
            console.print(f"{arm} failed: {row['failed']}", style="bold red", markup=False, soft_wrap=True)
    for arm, row in result["arms"].items():
        if row.get("profile"):
            decode_profile.show(arm, row)
    if not arms:
        return
    others = [arm for arm in arms if arm.startswith("bf16")] or [next(iter(arms))]
    parallel = f", tensor parallel {result['tensor_parallel_size']}" if result["tensor_parallel_size"] > 1 else ""
    table = Table(
        title=f"{full_name(result['shape'])} shapes{parallel}, LoRA rank {result['rank']}, {result['gpu']}, "
        f"{result['date']}; ratios to the faster of {' and '.join(others)}",
        title_justify="left",
    )
    rows = next(iter(arms.values()))["batch"]
    table.add_column("tokens/s")
    for row in rows.values():
        table.add_column(f"{row['batch']} x\n{row['input']} in, {row['output']} out", justify="right", overflow="fold")
        table.add_column("decode\nalone", justify="right", overflow="fold")
    for column in ("prefill", "weights\nGiB"):
        table.add_column(column, justify="right", overflow="fold")
    paths = [path for key in rows for path in (("batch", key), ("batch", key, "decode"))] + [("prefill",)]
    best = [max(_at(arms[arm], path)["tokens_per_s"] or 0.0 for arm in others) for path in paths]
    for arm, found in arms.items():
        cells = [_cell(_at(found, path), of) for path, of in zip(paths, best, strict=True)]
        weights = found["weights_gib"]
        table.add_row(arm, *cells, "" if weights is None else f"{weights:.1f}")
    console.print(table)
    for arm, found in arms.items():
        if found["kv_cache_tokens"] < (needed := result["cached_tokens"]):
            console.print(f"{arm}: its KV cache holds {found['kv_cache_tokens']:,} of {needed:,} tokens, so some wait")


def _at(found: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    for key in path:
        found = found[key]
    return found


def _cell(row: dict[str, Any], best: float) -> str:
    rate = row["tokens_per_s"]
    if rate is None:
        return "lost in\nthe prefill"
    return f"{rate:,.0f} {around(row['spread'])}" + (f"\n({rate / best:.2f}x)" if best else "")
