"""``qerl bench rollout``: decode throughput of the engine with a LoRA adapter on, NVFP4 against stock vLLM in BF16.

Weights are random and of the real shapes, so nothing is downloaded: 128 tokens in, 128 out, whatever the tokens are;
and, for the prefill alone, 64 prompts of 255 tokens and one token out.
Every arm runs in a process of its own, so that neither inherits the other's memory.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qerl_recipes.arms import ENGINE_QUANTIZATION, engine_options
from qerl_recipes.bench_conditions import conditions
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
    """Measure every arm, print the table, and write it to ``output`` as JSON.

    Raises ValueError for an unknown shape or arm, RuntimeError if an arm's process fails.
    """
    config_json(shape)
    if unknown := sorted(set(arms) - set(ARMS)):
        raise ValueError(f"unknown arm {unknown[0]!r}; known: {', '.join(ARMS)}")
    measured = {arm: _in_own_process(arm, shape, batch_sizes, rank) for arm in arms}
    result = {
        "shape": shape,
        "rank": rank,
        "prompt": PROMPT_TOKENS,
        "new": NEW_TOKENS,
        **conditions(),
        "arms": measured,
    }
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1))
    _print(result, batch_sizes)
    return result


def measure(arm: str, shape: str, batch_sizes: Sequence[int], rank: int) -> dict[str, Any]:
    """One arm, in this process -> tokens per second by batch size and of the prefill, and the weights' GiB."""
    import torch
    from vllm import LLM, SamplingParams

    from qerl_vllm_plugin.policy import Policy

    config = config_json(shape)
    if arm == "stock_nvfp4":
        from qerl_recipes.quantize import quantization_config

        config["quantization_config"] = quantization_config(["lm_head"])
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        llm = LLM(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=PROMPT_TOKENS + NEW_TOKENS,
            max_num_seqs=max(*batch_sizes, PREFILLED),
            enable_prefix_caching=False,
            disable_log_stats=True,
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
            ids = torch.randint(1000, 100000, (batch, prompt), generator=generator).tolist()
            prompts = [{"prompt_token_ids": row} for row in ids]
            start = time.perf_counter()
            llm.generate(prompts, sampling, lora_request=policy.request, use_tqdm=False)
            if repeat:  # the first one warms up
                found.append(time.perf_counter() - start)
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


def random_adapter(config: dict[str, Any], rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A PEFT adapter of all linears with small random values, as (tensors, config)."""
    import torch

    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, intermediate),
        "mlp.up_proj": (hidden, intermediate),
        "mlp.down_proj": (intermediate, hidden),
    }
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs, dtype=torch.bfloat16) * 0.01
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, dtype=torch.bfloat16) * 0.01
    modules = [name.rsplit(".", 1)[-1] for name in sizes]
    return tensors, {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": modules}


def _weights_gib(llm: Any) -> float:
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    seen = {t.data_ptr(): t.nbytes for t in (*runner.get_model().parameters(), *runner.get_model().buffers())}
    return round(sum(seen.values()) / 2**30, 2)


def _in_own_process(arm: str, shape: str, batch_sizes: Sequence[int], rank: int) -> dict[str, Any]:
    line = [sys.executable, "-m", "qerl_recipes.bench_rollout", arm, shape, ",".join(map(str, batch_sizes)), str(rank)]
    # in one process, where the weights can be measured and an adapter needs no transport
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(
            f"arm {arm} ended with code {done.returncode}; its messages are above. Command: {' '.join(line)}"
        )
    return json.loads(done.stdout.strip().splitlines()[-1])


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
