"""Measure how far rounded weights move a model: sampled entropy, and KL divergence from its BF16 weights.

``python kernels/bench/distance.py bf16:MODEL qerl_nvfp4:MODEL nf4:MODEL qerl_nvfp4:MODEL-gptq --problems FILE.jsonl``

The BF16 weights answer each problem once at temperature 1. All weights give these answers' tokens a log-probability:
its mean difference per token estimates KL(BF16 || weights). The entropy is of each one's own answers.
Intervals are 95 %, over the problems.
"""

import argparse
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from qerl_recipes.machine.environment import runs_on_cuda
from qerl_recipes.rollout.arms import ENGINE_ON_CPU, engine_options

CACHE = 4_000_000_000  # bytes of vLLM's KV cache, so that several may share a GPU


def measure(weights: str, prompts: list[str], tokens: int, answers: list[list[int]] | None) -> dict[str, Any]:
    """Return one weights' own answers with their log-probabilities, and those of ``answers`` (None: of its own)."""
    from vllm import LLM, SamplingParams

    quantization, folder = weights.split(":", 1)
    llm = LLM(
        folder,
        dtype="bfloat16",
        max_model_len=1024,
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=CACHE,
        enable_prefix_caching=False,
        **engine_options(quantization, None, {}),
        **({} if runs_on_cuda(os.environ) else ENGINE_ON_CPU),
    )
    tokenizer: Any = llm.get_tokenizer()
    chats = [[{"role": "user", "content": text}] for text in prompts]
    ids = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    each = [SamplingParams(temperature=1.0, max_tokens=tokens, logprobs=0, seed=number) for number in range(len(ids))]
    own = [out.outputs[0] for out in llm.generate([{"prompt_token_ids": row} for row in ids], each, use_tqdm=False)]
    chosen = [
        [place[token].logprob for token, place in zip(answer.token_ids, answer.logprobs, strict=True)] for answer in own
    ]
    answers = answers or [list(answer.token_ids) for answer in own]
    whole = [{"prompt_token_ids": prompt + answer} for prompt, answer in zip(ids, answers, strict=True)]
    read = llm.generate(whole, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    scored = [
        [place[token].logprob for token, place in zip(answer, out.prompt_logprobs[-len(answer) :], strict=True)]
        for answer, out in zip(answers, read, strict=True)
    ]
    return {"answers": answers, "own": chosen, "scored": scored}


def per_token(sums: list[float], counts: list[int]) -> str:
    """Return the mean over all tokens with its 95 % interval over the problems."""
    total, n = np.array(sums), np.array(counts)
    mean = total.sum() / n.sum()
    error = np.sqrt(((total - mean * n) ** 2).sum()) / n.sum()
    return f"{mean:.4f} ({mean - 1.96 * error:.4f} to {mean + 1.96 * error:.4f})"


def main() -> None:
    """Print one line for each weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", nargs="+", help="QUANTIZATION:FOLDER, the BF16 weights first")
    parser.add_argument("--problems", required=True, nargs="+", help="JSON lines with a prompt each")
    parser.add_argument("--each", type=int, default=128, help="problems of each file")
    parser.add_argument("--tokens", type=int, default=256, help="longest answer")
    asked = parser.parse_args()
    lines = [line for file in asked.problems for line in Path(file).read_text().splitlines()[: asked.each]]
    prompts = [json.loads(line)["prompt"] for line in lines]
    answers: list[list[int]] | None = None
    reference: list[list[float]] = []
    context = multiprocessing.get_context("spawn")
    for weights in asked.weights:
        with ProcessPoolExecutor(1, context) as process:  # of its own, which gives the GPU back
            measured = process.submit(measure, weights, prompts, asked.tokens, answers).result()
        answers, reference = measured["answers"], reference or measured["scored"]
        entropy = per_token([-sum(row) for row in measured["own"]], [len(row) for row in measured["own"]])
        gaps = [sum(was) - sum(now) for was, now in zip(reference, measured["scored"], strict=True)]
        distance = per_token(gaps, [len(row) for row in answers])
        print(f"{weights}: entropy {entropy}, KL from BF16 {distance}", flush=True)


if __name__ == "__main__":
    main()
