"""``qerl bench rollout``: tokens per second of the engine, NVFP4 with an adapter on against stock vLLM in BF16.

Weights are random and of the real shapes, so nothing is downloaded, and every completion has its full length. As in
training, each token comes with the log-probability that it was sampled with. A case is a number of sequences with
their tokens in and out; it is timed as a whole and for one token out, so that decoding can be told from the prefill.
Every arm runs in a process of its own, one after the other; with several rounds A B A B. With ``--profile`` nothing is
timed but a decode step, and its kernels.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from qerl_recipes.bench import decode_profile
from qerl_recipes.bench.process import ArmFailedError, answer, check_gpus, check_shape, in_own_process
from qerl_recipes.bench.train_table import around, spread
from qerl_recipes.machine.conditions import conditions, save
from qerl_recipes.recipe.shapes import config_json, full_name
from qerl_recipes.rollout.arms import ENGINE_QUANTIZATION, engine_options

if TYPE_CHECKING:
    from vllm import SamplingParams

PREFILLED = 64  # prompts of the prefill, each as long as the engine allows
WARM_UP_TOKENS = 16

# The arms of a recipe, and BF16 without an adapter, which is what a merged one runs as. Then what tells their parts
# apart: NVFP4 without an adapter, with one in vLLM's LoRA slots, the same on Marlin, and that again without this
# plugin: what is left between the last two are the fp32 norms.
ARMS = ("bf16_merged", *ENGINE_QUANTIZATION, "qerl_nvfp4_base", "qerl_nvfp4_slots", "qerl_nvfp4_slots_marlin")
ARMS += ("qerl_nvfp4_float16", "stock_nvfp4")
OURS = {"model", "dtype", "quantization", "additional_config", "max_model_len", "max_num_seqs", "tensor_parallel_size"}
OURS |= {"kv_cache_dtype", "logprobs_mode", "load_format", "skip_tokenizer_init", "enable_lora", "max_lora_rank"}
CACHES = ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")


class Case(NamedTuple):
    """``batch`` sequences of ``input`` tokens, with ``output`` tokens sampled for each."""

    batch: int
    input: int
    output: int


def make_cases(batch: Sequence[int], input_len: Sequence[int], output_len: Sequence[int]) -> list[Case]:
    """The lists side by side; one of a single number counts for all. Raises ValueError for anything else."""
    lists = {"batch": batch, "input_len": input_len, "output_len": output_len}
    longest = max(map(len, lists.values()))
    for name, numbers in lists.items():
        if not numbers or min(numbers) < 1 or len(numbers) not in (1, longest):
            raise ValueError(f"{name} is {list(numbers)}; give one number, or {longest} of them, each at least 1")
    if min(output_len) < 2:
        raise ValueError("output_len is at least 2: the first token comes with the prefill")
    return [Case(*numbers) for numbers in zip(*(list(n) * (longest // len(n)) for n in lists.values()), strict=True)]


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
    engine: Mapping[str, Any] | None = None,
    scratch: Path | None = None,
    output: Path | None = None,
) -> dict[str, Any]:
    """Measure every arm, print the table, and write it to ``output`` as JSON, after each arm what there is.

    ``profile``: instead of rates, where the time of a decode step goes (``bench.decode_profile``); the profiler's
    traces lie beside ``output``.

    With several of ``kv_cache_dtype`` each arm is measured with each of these caches; "auto" is the activations' dtype.
    ``engine``: more arguments of ``vllm.LLM``, of every arm; what the benchmark sets itself (OURS) it must not name.
    ``scratch`` is the folder for the one checkpoint that is written, of a mixture in NVFP4.

    An arm that fails is in the result with its reason, and the others go on. Raises ValueError for an unknown shape or
    arm and for what this machine cannot measure.
    """
    check_shape(shape)
    check_gpus(tensor_parallel_size)
    if unknown := sorted(set(arms) - set(ARMS)):
        raise ValueError(f"unknown arm {unknown[0]!r}; known: {', '.join(ARMS)}")
    if unknown := sorted(set(kv_cache_dtype) - set(CACHES)):
        raise ValueError(f"unknown kv_cache_dtype {unknown[0]!r}; known: {', '.join(CACHES)}")
    more = dict(engine or {})
    if taken := sorted(set(more) & OURS):
        raise ValueError(f"engine names {taken[0]!r}, which this benchmark sets itself; leave it out")
    if profile:
        if repeats is not None:
            raise ValueError(f"repeats is {repeats}, and --profile times no case as a whole; leave one of them out")
        if tensor_parallel_size > 1:
            raise ValueError("--profile looks into the engine's process, and tensor parallelism has more; use one GPU")
        decode_profile.check(min(case.output for case in cases))
    repeats = 3 if repeats is None else repeats
    if min(repeats, rounds) < 1:
        raise ValueError(f"repeats is {repeats} and rounds is {rounds}; each is at least 1")
    request = {
        "shape": shape,
        "cases": cases,
        "rank": rank,
        "repeats": repeats,
        "tensor_parallel": tensor_parallel_size,
        "traces": None,
        "engine": more,
    }
    variants = {
        arm if cache == "auto" else f"{arm}, {cache} cache": (arm, cache) for arm in arms for cache in kv_cache_dtype
    }
    measured: dict[str, dict[str, Any]] = {variant: {} for variant in variants}
    result = {
        "shape": shape,
        "rank": rank,
        "tensor_parallel_size": tensor_parallel_size,
        "repeats": repeats,
        "rounds": rounds,
        "engine": more,
        **conditions(),
        "arms": measured,
    }
    with tempfile.TemporaryDirectory(prefix="qerl-bench-", dir=scratch) as folder:
        for variant, (arm, cache) in [pair for _ in range(rounds) for pair in variants.items()]:
            if "failed" in measured[variant]:
                continue
            asked = {**request, "arm": arm, "kv_cache_dtype": cache, "scratch": folder}
            if profile:
                asked["traces"] = f"{(output or Path(folder, 'profile')).with_suffix('').resolve()}_{arm}_{cache}"
            try:
                _add(measured[variant], in_own_process(__name__, asked))
            except ArmFailedError as error:
                measured[variant]["failed"] = str(error)
            save(result, output)  # an arm takes minutes, and a run may be cut short
    _print(result)
    return result


def _add(measured: dict[str, Any], found: dict[str, Any]) -> None:
    """Join what one round has found to what is there, and work out the rates anew."""
    if "profile" in found:
        measured.setdefault("profile", []).extend(found["profile"])
        return
    measured["weights_gib"] = found["weights_gib"]
    rows = measured.setdefault("batch", {})
    alone = len({row["batch"] for row in found["cases"]}) == len(found["cases"])
    for row in found["cases"]:
        key = str(row["batch"]) if alone else f"{row['batch']} x {row['input']} + {row['output']}"
        joined = rows.setdefault(key, {**row, "seconds": [], "prefill_seconds": []})
        whole, first = (joined[name] + row[name] for name in ("seconds", "prefill_seconds"))
        batch, first_token = row["batch"], statistics.median(first)
        joined |= {"seconds": whole, "prefill_seconds": first, **_rate(batch * row["output"], whole)}
        decoding = [seconds - first_token for seconds in whole]
        joined["decode"] = _rate(batch * (row["output"] - 1), decoding)
        joined["prefill"] = _rate(batch * row["input"], first)
    prefill = found["prefill"]
    seconds = measured.get("prefill", {}).get("seconds", []) + prefill["seconds"]
    measured["prefill"] = {**prefill, "seconds": seconds, **_rate(prefill["tokens"], seconds)}


def _rate(tokens: int, seconds: Sequence[float]) -> dict[str, float | None]:
    """Tokens per second of the median repeat, and how far the repeats lie apart, relative to it."""
    return {"tokens_per_s": tokens / statistics.median(seconds), "spread": spread(seconds)}


def measure(request: dict[str, Any], found: dict[str, Any]) -> None:
    """One arm, in this process: seconds of each case, with one token out and with all of them."""
    import torch

    from qerl_recipes.bench import random_model
    from qerl_recipes.rollout import answers
    from qerl_vllm_plugin.policy import Policy

    arm, rank, repeats = request["arm"], request["rank"], request["repeats"]
    cases = [Case(*numbers) for numbers in request["cases"]]
    config = config_json(request["shape"])
    if arm == "stock_nvfp4":
        from qerl_recipes.convert.quantize import quantization_config

        config["quantization_config"] = quantization_config(random_model.in_bf16(config))
    length = max(case.input + case.output for case in cases)
    sizes = {"cudagraph_capture_sizes": sorted({case.batch for case in cases})}
    more = {**request["engine"], "compilation_config": sizes | request["engine"].get("compilation_config", {})}
    llm = random_model.start(
        config,
        length=length,
        sequences=max(*(case.batch for case in cases), PREFILLED),
        scratch=request["scratch"],
        tensor_parallel_size=request["tensor_parallel"],
        logprobs_mode="processed_logprobs",
        kv_cache_dtype=request["kv_cache_dtype"],
        **_options(arm, rank, config),
        **more,
    )
    policy = Policy(llm)
    if policy.carrier is not None:
        policy.swap(*random_model.adapter(config, rank))
    generator = torch.Generator().manual_seed(0)

    def draw(batch: int, prompt: int) -> list[list[int]]:
        ids: list[list[int]] = torch.randint(config["vocab_size"], (batch, prompt), generator=generator).tolist()
        return ids

    if traces := request["traces"]:
        found["profile"] = []
        for case in cases:
            file = Path(f"{traces}_{case.batch}.trace.json.gz")
            prompts = draw(case.batch, case.input)
            profiled = decode_profile.profile(llm, prompts, _sampling(case.output), policy.request, file)
            found["profile"].append(profiled)
        return

    def seconds(batch: int, prompt: int, new: int) -> list[float]:
        """Of each repeat; one before them, of few tokens, warms up."""
        taken: list[float] = []
        for tokens in (min(new, WARM_UP_TOKENS), *[new] * repeats):
            prompts, sampling = draw(batch, prompt), [_sampling(tokens) for _ in range(batch)]
            began = time.perf_counter()
            completions = answers.generate(llm, prompts, sampling, policy.request)
            taken.append(time.perf_counter() - began)
            if any(len(completion.ids) != tokens for completion in completions):
                raise RuntimeError(f"the engine did not generate {tokens} tokens for each prompt")
        return taken[1:]

    found["cases"] = []
    for case in cases:
        first, whole = seconds(case.batch, case.input, 1), seconds(*case)
        found["cases"].append({**case._asdict(), "seconds": whole, "prefill_seconds": first})
        rate = case.batch * case.output / statistics.median(whole)
        print(f"{arm}, {_name(case)}: {rate:,.0f} tokens/s", file=sys.stderr, flush=True)
    found["prefill"] = {"tokens": PREFILLED * (length - 1), "seconds": seconds(PREFILLED, length - 1, 1)}
    found["weights_gib"] = _weights_gib(llm) if request["tensor_parallel"] == 1 else None


def _sampling(tokens: int) -> "SamplingParams":
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=tokens, ignore_eos=True, temperature=1.0, logprobs=0, flat_logprobs=True, detokenize=False
    )


def _options(arm: str, rank: int, config: dict[str, Any]) -> dict[str, Any]:
    if arm == "bf16_merged":
        return {}
    if arm == "qerl_nvfp4_base":
        return {"quantization": "qerl_nvfp4"}
    if arm == "qerl_nvfp4_float16":
        return {**engine_options("qerl_nvfp4", rank, config), "dtype": "float16"}
    if arm in ENGINE_QUANTIZATION:
        return engine_options(arm, rank, config)
    slots = engine_options("bf16", rank, config)
    if arm == "stock_nvfp4":
        return slots
    marlin = {"additional_config": {"qerl": {"kernel": "marlin"}}} if arm == "qerl_nvfp4_slots_marlin" else {}
    return {**slots, "quantization": "qerl_nvfp4", **marlin}


def _weights_gib(llm: Any) -> float:
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    seen = {t.data_ptr(): t.nbytes for t in (*runner.get_model().parameters(), *runner.get_model().buffers())}
    return round(sum(seen.values()) / 2**30, 2)


def _name(case: Case) -> str:
    return f"{case.batch} x {case.input} in, {case.output} out"


def _print(result: dict[str, Any]) -> None:
    """A row for each arm; ratios are to the faster BF16 arm of the table, without one to its first arm."""
    from rich.console import Console
    from rich.table import Table

    console, arms = Console(width=160), {arm: row for arm, row in result["arms"].items() if "batch" in row}
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
        f"{result['date']}; ratios to the faster of {', '.join(others)}",
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
    best = [max(_at(arms[arm], path)["tokens_per_s"] for arm in others) for path in paths]
    for arm, found in arms.items():
        cells = [_cell(_at(found, path), of) for path, of in zip(paths, best, strict=True)]
        weights = found["weights_gib"]
        table.add_row(arm, *cells, "" if weights is None else f"{weights:.1f}")
    console.print(table)


def _at(found: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    for key in path:
        found = found[key]
    return found


def _cell(row: dict[str, Any], best: float) -> str:
    rate = row["tokens_per_s"]
    return f"{rate:,.0f} {around(row['spread'])}\n({rate / best:.2f}x)"


if __name__ == "__main__":
    from qerl_recipes.machine.environment import prepare

    prepare()
    answer(measure)
