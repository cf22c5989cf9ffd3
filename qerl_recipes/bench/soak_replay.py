"""Reference engines, which are given the answers of a soak under the policies that they name.

Most of replaying is Python's work for each request, so on a GPU several engines share the policies, each in a process
of its own.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from qerl_recipes.bench import random_model
from qerl_recipes.bench.children import child, kill
from qerl_recipes.bench.rollout_memory import LEAST_SHARE
from qerl_recipes.bench.soak_judge import Replay
from qerl_recipes.bench.soak_load import Adapter, Change, ahead
from qerl_recipes.bench.soak_streams import LONGEST_ANSWER, LONGEST_PROMPT, Answer
from qerl_recipes.machine.gpu import installed_gpu
from qerl_recipes.rollout.arms import ENGINE_ON_CPU, engine_options

RANK = 8
ADAPTER_STD = 0.05  # what an adapter writes is then of the size of what the random weights do
AHEAD = 4  # adapters that are drawn at one time
LENGTH = LONGEST_PROMPT + LONGEST_ANSWER + 16  # --max-model-len
MOST_ENGINES = 4
CACHE = 4 << 30  # bytes of an engine's keys and values, on a GPU
AT_WORK = 6 << 30  # of GPU memory beside weights and cache: mostly the logits of a prompt


def dtype() -> str:
    """What server and reference compute in: float32 where that costs nothing."""
    return "float32" if installed_gpu() is None else "bfloat16"


def config_of(folder: str) -> dict[str, Any]:
    return json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))


def make_adapter(config: Mapping[str, Any], seed: int, number: int) -> Adapter:
    """The adapter of that number, the same on every call."""
    return random_model.adapter(config, RANK, std=ADAPTER_STD, seed=seed * 1_000_003 + number)


def reference(folder: str, seed: int) -> Replay:
    """An engine, and how answers are replayed on it."""
    from vllm import LLM, SamplingParams

    from qerl_vllm_plugin.policy import Policy

    on_device: dict[str, Any] = {
        "enforce_eager": True,
        "kv_cache_memory_bytes": CACHE,
        "gpu_memory_utilization": LEAST_SHARE,
    }
    if installed_gpu() is None:
        on_device = ENGINE_ON_CPU
    llm = LLM(
        model=folder,
        dtype=dtype(),
        max_model_len=LENGTH,
        max_num_seqs=256,
        enable_prefix_caching=True,  # the prompts are few, each asked again and again
        skip_tokenizer_init=True,
        disable_log_stats=True,
        **{**engine_options("qerl_nvfp4", RANK, {}), **on_device},
    )
    policy, config = Policy(llm), config_of(folder)
    adapter_of = ahead(lambda number: make_adapter(config, seed, number), AHEAD)  # policies are judged in their order

    # of a prompt that is found in the cache there are no log-probabilities; nobody looks at them
    cached, fresh = (
        SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, skip_reading_prefix_cache=skip)
        for skip in (False, True)
    )

    def outputs_of(answers: Sequence[Answer]) -> list[Any]:
        inputs = [{"prompt_token_ids": [*answer.prompt, *answer.tokens]} for answer in answers]
        outputs = llm.generate(inputs, cached, use_tqdm=False)
        again = [i for i, (answer, output) in enumerate(zip(answers, outputs, strict=True)) if hides(answer, output)]
        for i, output in zip(again, llm.generate([inputs[i] for i in again], fresh, use_tqdm=False), strict=True):
            outputs[i] = output
        return outputs

    def replay(change: Change, answers: Sequence[Answer]) -> list[list[float]]:
        policy.swap(*(adapter_of(change.adapter) if change.adapter is not None else (None, None)))
        sigma, noise_seed, rollout = change.noise
        policy.set_noise(sigma, seed=noise_seed, rollout=rollout)
        if not llm.reset_prefix_cache():  # vLLM's own way: what a change of policy empties is what is on trial here
            raise RuntimeError("the reference engine keeps its prefix cache, so its answers would be of another policy")
        outputs = outputs_of(answers)
        return [
            of_tokens(answer.tokens, output.prompt_logprobs) for answer, output in zip(answers, outputs, strict=True)
        ]

    return replay


def hides(answer: Answer, output: Any) -> bool:
    """Whether the prefix cache reached the last token of the prompt, which computes the answer's first one: a prompt
    of whole blocks that was asked before, or two answers that begin alike."""
    return output.num_cached_tokens >= len(answer.prompt)


def of_tokens(tokens: Sequence[int], prompt_logprobs: Sequence[Any]) -> list[float]:
    """The log-probabilities of the last tokens of a prompt. Counted from the end: of what was in the prefix cache one
    of vLLM's runners returns whatever there was in memory, and the other (0.26 on CUDA) nothing."""
    last = prompt_logprobs[len(prompt_logprobs) - len(tokens) :]
    return [position[token].logprob for token, position in zip(tokens, last, strict=True)]


@contextmanager
def references(folder: str, seed: int) -> Iterator[list[Replay]]:
    """As many engines as are of use, which may be asked at one time, until the end of the block."""
    count = engines(folder)
    if count == 1:
        yield [reference(folder, seed)]
        return
    children = [child(_work, folder, seed) for _ in range(count)]
    try:
        yield [partial(_asked, connection) for _, connection in children]
    finally:
        kill(process for process, _ in children)


def engines(folder: str) -> int:
    """One where there is no GPU; else as many as fit into its free memory, of at most ``MOST_ENGINES``."""
    if installed_gpu() is None:
        return 1
    import torch

    weights = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    return max(1, min(MOST_ENGINES, torch.cuda.mem_get_info()[0] // (weights + CACHE + AT_WORK)))


def _work(folder: str, seed: int, connection: Connection) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the core in this process, which may have no child
    replay = reference(folder, seed)
    while True:
        connection.send(replay(*connection.recv()))


def _asked(connection: Connection, change: Change, answers: Sequence[Answer]) -> list[list[float]]:
    try:
        connection.send((change, answers))
        return connection.recv()
    except (EOFError, OSError) as error:
        raise RuntimeError("a reference engine has died; what it said stands above") from error
