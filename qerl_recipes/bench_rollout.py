"""``qerl bench rollout``: decode throughput of the engine with a LoRA adapter on, NVFP4 against stock vLLM in BF16.

Weights are random and of the real shapes, so nothing is downloaded: 128 tokens in, 128 out, whatever the tokens are;
and, for the prefill alone, 64 prompts of 255 tokens and one token out.
Every arm runs in a process of its own, so that neither inherits the other's memory.
"""

import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qerl_recipes.arms import ENGINE_QUANTIZATION, engine_options
from qerl_recipes.bench_conditions import conditions, save
from qerl_recipes.bench_engine import check_shape, in_own_process, random_adapter, start
from qerl_recipes.shapes import config_json

PROMPT_TOKENS, NEW_TOKENS, REPEATS = 128, 128, 3
PREFILLED = 64  # prompts, each as long as the engine allows
WARM_UP_TOKENS = 16

# The arms of a recipe, and what tells their parts apart: NVFP4 without an adapter, with one in vLLM's LoRA slots, the
# same on Marlin, and that again without this plugin: what is left between the last two are the fp32 norms.
ARMS = (*ENGINE_QUANTIZATION, "qerl_nvfp4_base", "qerl_nvfp4_slots", "qerl_nvfp4_slots_marlin", "stock_nvfp4")


def run(
    shape: str,
    batch_sizes: Sequence[int],
    *,
    arms: Sequence[str] = ("bf16", "qerl_nvfp4"),
    rank: int = 32,
    output: Path | None = None,
) -> dict[str, Any]:
    """Measure every arm, print the table, and write it to ``output`` as JSON, after each arm what there is.

    Raises ValueError for an unknown shape or arm, a large shape without a GPU and a batch size below 1, RuntimeError if
    an arm's process fails.
    """
    check_shape(shape)
    if not batch_sizes or min(batch_sizes) < 1:
        raise ValueError(f"batch sizes are {list(batch_sizes)}; name some, each at least 1")
    if unknown := sorted(set(arms) - set(ARMS)):
        raise ValueError(f"unknown arm {unknown[0]!r}; known: {', '.join(ARMS)}")
    sizes = ",".join(map(str, batch_sizes))
    measured: dict[str, dict[str, Any]] = {}
    result = {
        "shape": shape,
        "rank": rank,
        "prompt": PROMPT_TOKENS,
        "new": NEW_TOKENS,
        **conditions(),
        "arms": measured,
    }
    for arm in arms:
        measured[arm] = in_own_process(__name__, arm, shape, sizes, str(rank))
        save(result, output)  # an arm takes minutes, and a run may be cut short
    _print(result, batch_sizes)
    return result


def measure(arm: str, shape: str, batch_sizes: Sequence[int], rank: int) -> dict[str, Any]:
    """One arm, in this process -> tokens per second by batch size and of the prefill, and the weights' GiB."""
    import torch
    from vllm import SamplingParams

    from qerl_vllm_plugin.policy import Policy

    config = config_json(shape)
    if arm == "stock_nvfp4":
        from qerl_recipes.quantize import quantization_config

        config["quantization_config"] = quantization_config(["lm_head"])
    llm = start(
        config,
        length=PROMPT_TOKENS + NEW_TOKENS,
        sequences=max(*batch_sizes, PREFILLED),
        compilation_config={"cudagraph_capture_sizes": sorted(batch_sizes)},
        **_options(arm, rank),
    )
    policy = Policy(llm)
    if policy.carrier is not None:
        policy.swap(*random_adapter(config, rank))
    generator = torch.Generator().manual_seed(0)

    def seconds(batch: int, prompt: int, new: int) -> list[float]:
        """Of each repeat."""
        found: list[float] = []
        for repeat in range(REPEATS + 1):
            length = new if repeat else min(new, WARM_UP_TOKENS)
            sampling = SamplingParams(max_tokens=length, ignore_eos=True, temperature=1.0, detokenize=False)
            ids = torch.randint(config["vocab_size"], (batch, prompt), generator=generator).tolist()
            prompts = [{"prompt_token_ids": row} for row in ids]
            began = time.perf_counter()
            llm.generate(prompts, sampling, lora_request=policy.request, use_tqdm=False)
            if repeat:  # the first one warms up
                found.append(time.perf_counter() - began)
        return found

    rows = {}
    for batch in batch_sizes:
        rate = rows[str(batch)] = _rate(batch * NEW_TOKENS, seconds(batch, PROMPT_TOKENS, NEW_TOKENS))
        print(f"{arm}, batch {batch}: {rate['tokens_per_s']:,.0f} tokens/s", file=sys.stderr, flush=True)
    longest = PROMPT_TOKENS + NEW_TOKENS - 1
    prefill = _rate(PREFILLED * longest, seconds(PREFILLED, longest, 1))
    return {"batch": rows, "prefill": prefill, "weights_gib": _weights_gib(llm)}


def _rate(tokens: int, seconds: Sequence[float]) -> dict[str, float]:
    """Tokens per second of the median repeat, and how far the repeats lie apart, relative to it."""
    median = statistics.median(seconds)
    return {"tokens_per_s": tokens / median, "spread": (max(seconds) - min(seconds)) / median}


def _options(arm: str, rank: int) -> dict[str, Any]:
    slots = engine_options("bf16", rank)
    if arm == "qerl_nvfp4_base":
        return {"quantization": "qerl_nvfp4"}
    if arm == "qerl_nvfp4_slots":
        return {**slots, "quantization": "qerl_nvfp4"}
    if arm == "qerl_nvfp4_slots_marlin":
        return {**slots, "quantization": "qerl_nvfp4", "additional_config": {"qerl": {"kernel": "marlin"}}}
    return slots if arm == "stock_nvfp4" else engine_options(arm, rank)


def _weights_gib(llm: Any) -> float:
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    seen = {t.data_ptr(): t.nbytes for t in (*runner.get_model().parameters(), *runner.get_model().buffers())}
    return round(sum(seen.values()) / 2**30, 2)


def _print(result: dict[str, Any], batch_sizes: Sequence[int]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"Qwen2.5-{result['shape']} shapes, LoRA rank {result['rank']}, {result['gpu']}, {result['date']}"
    )
    for column in ("tokens/s", *map(str, batch_sizes), "prefill", "weights GiB"):
        table.add_column(column, justify="right")
    first = next(iter(result["arms"].values()))
    for arm, row in result["arms"].items():
        pairs = [(row["batch"][batch], first["batch"][batch]) for batch in map(str, batch_sizes)]
        pairs.append((row["prefill"], first["prefill"]))
        rates = [(ours["tokens_per_s"], theirs["tokens_per_s"]) for ours, theirs in pairs]
        cells = [f"{rate:,.0f} ({rate / of_first:.2f}x)" for rate, of_first in rates]
        table.add_row(arm, *cells, f"{row['weights_gib']:.1f}")
    Console(width=140).print(table)


if __name__ == "__main__":
    from qerl_recipes.environment import prepare

    prepare()
    _arm, _shape, _batch_sizes, _rank = sys.argv[1:]
    print(json.dumps(measure(_arm, _shape, [int(batch) for batch in _batch_sizes.split(",")], int(_rank))))
