"""One arm of ``qerl bench rollout``, in a process of its own: its engine, and the seconds of what it is told to do."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_recipes.bench import decode_profile, rollout_cases
from qerl_recipes.bench.process import answer, obey
from qerl_recipes.bench.rollout_cases import Case, Order
from qerl_recipes.recipe.shapes import config_json
from qerl_recipes.rollout.arms import ENGINE_QUANTIZATION, engine_options

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

    from qerl_vllm_plugin.policy import Policy

# The arms of a recipe, and BF16 without an adapter, which is what a merged one runs as. Then what tells their parts
# apart: NVFP4 without an adapter, with one in vLLM's LoRA slots, the same on Marlin, and that again without this
# plugin: what is left between the last two are the fp32 norms.
ARMS = ("bf16_merged", *ENGINE_QUANTIZATION, "qerl_nvfp4_base", "qerl_nvfp4_slots", "qerl_nvfp4_slots_marlin")
ARMS += ("qerl_nvfp4_float16", "stock_nvfp4")
Found = dict[str, Any]


def begin(request: Found) -> tuple[Found, Callable[[Found], Found]]:
    """Start the engine -> what there is to say of it, and the work that an order (``Order``) is."""
    began = time.perf_counter()
    from qerl_recipes.rollout import answers  # imports vLLM, which is part of a start

    llm, policy = start(request)
    said = {
        "kv_cache_tokens": _cache_tokens(llm),
        "weights_gib": _weights_gib(llm) if request["tensor_parallel"] == 1 else None,
        "start_seconds": round(time.perf_counter() - began, 1),
    }
    vocabulary = config_json(request["shape"])["vocab_size"]

    def work(told: Found) -> Found:
        order = Order(**told)
        ids, each = prompts(order, vocabulary), [sampling(order.output) for _ in range(order.batch)]
        inputs: list[Any] = [{"prompt_token_ids": row} for row in ids]
        began = time.perf_counter()
        if is_stock(request["arm"]):
            outputs = llm.generate(inputs, each, lora_request=policy.request, use_tqdm=False)
            lengths = [len(output.outputs[0].token_ids) for output in outputs]
        else:
            lengths = [len(found.ids) for found in answers.generate(llm, ids, each, policy.request)]
        seconds = time.perf_counter() - began
        if any(length != order.output for length in lengths):
            raise RuntimeError(f"the engine did not generate {order.output} tokens for each prompt")
        return {"seconds": seconds}

    return said, work


def profile(request: Found, found: Found) -> None:
    """Instead: where the time of a decode step goes, of every case (``decode_profile``)."""
    llm, policy = start(request)
    vocabulary = config_json(request["shape"])["vocab_size"]
    found["profile"] = []
    for number, case in enumerate(_cases(request)):
        file = Path(f"{request['traces']}_{case.batch}.trace.json.gz")
        rows = prompts(Order(number, 1, *case), vocabulary)
        profiled = decode_profile.profile(
            llm, rows, sampling(case.output), policy.request, file, is_stock=is_stock(request["arm"])
        )
        found["profile"].append(profiled)


def start(request: Found) -> "tuple[LLM, Policy]":
    """The arm's engine, with its adapter installed."""
    from qerl_recipes.bench import random_model
    from qerl_vllm_plugin.compat import scheduler
    from qerl_vllm_plugin.policy import Policy

    arm, rank, cases = request["arm"], request["rank"], _cases(request)
    config = config_json(request["shape"])
    if arm == "stock_nvfp4":
        from qerl_recipes.convert.quantize import quantization_config

        config["quantization_config"] = quantization_config(random_model.in_bf16(config))
    sizes = {"cudagraph_capture_sizes": sorted({case.batch for case in cases})}
    more: Found = {} if is_stock(arm) else {"scheduler_cls": scheduler.NAME}  # as the trainer's engine has it
    more |= request["engine"]
    more["compilation_config"] = sizes | more.get("compilation_config", {})
    llm = random_model.start(
        config,
        length=rollout_cases.length(cases),
        sequences=rollout_cases.sequences(cases),
        scratch=request["scratch"],
        tensor_parallel_size=request["tensor_parallel"],
        logprobs_mode="processed_logprobs",
        kv_cache_dtype=request["kv_cache_dtype"],
        **options(arm, rank, config),
        **request["memory"],
        **more,
    )
    policy = Policy(llm)
    if policy.carrier is not None:
        policy.swap(*random_model.adapter(config, rank))
    return llm, policy


def prompts(order: Order, vocabulary: int) -> list[list[int]]:
    """Random token ids, the same on every call and in every arm."""
    import torch

    generator = torch.Generator().manual_seed(order.number * 1_000_003 + order.repeat)
    ids: list[list[int]] = torch.randint(vocabulary, (order.batch, order.input), generator=generator).tolist()
    return ids


def sampling(tokens: int) -> "SamplingParams":
    """So many tokens, each with the log-probability that it was sampled with, as in training."""
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=tokens, ignore_eos=True, temperature=1.0, logprobs=0, flat_logprobs=True, detokenize=False
    )


def is_stock(arm: str) -> bool:
    """Whether an arm is what one would run without this project: then all of it is vLLM's, the way of asking, too."""
    return not arm.startswith("qerl_")


def options(arm: str, rank: int, config: dict[str, Any]) -> dict[str, Any]:
    """What makes an engine that arm: arguments of ``vllm.LLM``."""
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


def _cases(request: Found) -> list[Case]:
    return [Case(*numbers) for numbers in request["cases"]]


def _cache_tokens(llm: "LLM") -> int:
    cache = llm.llm_engine.vllm_config.cache_config
    return (cache.num_gpu_blocks or 0) * cache.block_size


def _weights_gib(llm: "LLM") -> float:
    executor: Any = llm.llm_engine.model_executor
    runner = executor.driver_worker.worker.model_runner
    seen = {t.data_ptr(): t.nbytes for t in (*runner.get_model().parameters(), *runner.get_model().buffers())}
    return round(sum(seen.values()) / 2**30, 2)


def _main() -> None:
    import json
    import sys

    from qerl_recipes.machine.environment import prepare

    prepare()
    if json.loads(sys.argv[1])["traces"] is None:
        obey(begin)
    else:
        answer(profile)


if __name__ == "__main__":
    _main()
