"""Time one arm of ``qerl bench rollout`` in a process of its own: start its engine and run its cases."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from qerl_recipes.bench import linear_kernels
from qerl_recipes.bench.arms import Figures, answer
from qerl_recipes.bench.engines import is_stock, options
from qerl_recipes.recipe.shapes import config_json

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

    from qerl_vllm_plugin.policy import Policy

PREFILLED = 64  # prompts of the prefill, each as long as the engine allows
WARM_UP_TOKENS = 16
FEW = (16, 64)  # of unequal lengths: the share of the time is noted in which fewer sequences are left


class Case(NamedTuple):
    """Describe ``batch`` sequences of ``input`` tokens, of which each samples ``output``, or its own of ``lengths``."""

    batch: int
    input: int
    output: int
    lengths: Sequence[int] | None = None

    def __str__(self) -> str:
        return f"{self.batch} x {self.input} in, {'up to ' if self.lengths else ''}{self.output} out"

    @property
    def outputs(self) -> Sequence[int]:
        return self.lengths or [self.output] * self.batch


def make_cases(batch: Sequence[int], input_len: Sequence[int], output_len: Sequence[int]) -> list[Case]:
    """Combine the lists element by element; one of a single number counts for all. Raises ValueError for others."""
    lists = {"batch": batch, "input_len": input_len, "output_len": output_len}
    longest = max(map(len, lists.values()))
    for name, numbers in lists.items():
        if not numbers or min(numbers) < 1 or len(numbers) not in (1, longest):
            raise ValueError(f"{name} is {list(numbers)}; give one number, or {longest} of them, each at least 1")
    if min(output_len) < 2:
        raise ValueError("output_len is at least 2: the first token comes with the prefill")
    return [Case(*numbers) for numbers in zip(*(list(n) * (longest // len(n)) for n in lists.values()), strict=True)]


def longest(cases: Sequence[Case]) -> int:
    return max(case.input + case.output for case in cases)


def most_sequences(cases: Sequence[Case]) -> int:
    return max(*(case.batch for case in cases), PREFILLED)


def prefill(cases: Sequence[Case]) -> Case:
    """Return the case that times the prefill alone, on prompts as long as the longest sequence of equal lengths."""
    return Case(PREFILLED, longest([case for case in cases if not case.lengths]) - 1, 1)


def begin(request: Figures, figures: Figures) -> Callable[[Figures, Figures], None]:
    """Start the engine, note its memory and start time, and return the function that times one repeat of a case."""
    began = time.perf_counter()
    from qerl_recipes.rollout import sampling as completions

    llm, policy = start(request, figures)
    cache = llm.llm_engine.vllm_config.cache_config
    figures["kv_cache_tokens"] = (cache.num_gpu_blocks or 0) * cache.block_size
    figures["weights_gib"] = _weights_gib(llm) if request["tensor_parallel"] == 1 else None
    figures["start_seconds"] = round(time.perf_counter() - began, 1)
    vocabulary = config_json(request["shape"])["vocab_size"]

    def carry_out(fields: Figures, figures: Figures) -> None:
        case = Case(*fields["case"])
        ids = prompts(case, fields["number"], fields["repeat"], vocabulary)
        each = [sampling(length) for length in case.outputs]
        inputs: list[Any] = [{"prompt_token_ids": row} for row in ids]
        with contextlib.ExitStack() as noting:
            ended = noting.enter_context(ends(llm)) if case.lengths else []
            began = time.perf_counter()
            if is_stock(request["arm"]):
                outputs = llm.generate(inputs, each, lora_request=policy.request, use_tqdm=False)
                lengths = [len(output.outputs[0].token_ids) for output in outputs]
            else:
                lengths = [len(answer.ids) for answer in completions.generate(llm, ids, each, policy.request)]
            seconds = time.perf_counter() - began
        if lengths != list(case.outputs):
            wanted = "the given number of" if case.lengths else case.output
            raise RuntimeError(f"the engine did not generate {wanted} tokens for each prompt")
        figures["seconds"] = seconds
        if case.lengths:
            figures["below"] = {str(few): share_below(few, began, ended) for few in FEW}

    return carry_out


@contextlib.contextmanager
def ends(llm: "LLM") -> Iterator[list[float]]:
    """Yield a list to which the time is added at which each sequence ends, as ``time.perf_counter`` tells it."""
    core: Any = llm.llm_engine.engine_core
    get_output, ended = core.get_output, list[float]()

    def note() -> Any:
        step = get_output()
        now = time.perf_counter()
        ended.extend(now for output in step.outputs if output.finish_reason is not None)
        return step

    core.get_output = note
    try:
        yield ended
    finally:
        core.get_output = get_output


def share_below(few: int, began: float, ended: Sequence[float]) -> float:
    """Return the share of the time until the last of ``ended`` in which fewer than ``few`` sequences had not ended."""
    since = ended[-few] if len(ended) >= few else began
    return (ended[-1] - since) / (ended[-1] - began)


def start(request: Figures, figures: Figures) -> "tuple[LLM, Policy]":
    """Start the arm's engine and install its adapter; raise RuntimeError for other kernels than the arm's name says."""
    from qerl_recipes.bench import random_model
    from qerl_vllm_plugin.compat import scheduler
    from qerl_vllm_plugin.policy import Policy

    arm, rank, cases = request["arm"], request["rank"], [Case(*numbers) for numbers in request["cases"]]
    config = config_json(request["shape"])
    if arm.startswith("stock_nvfp4"):
        from qerl_recipes.convert.quantize import quantization_config

        config["quantization_config"] = quantization_config(random_model.in_bf16(config))
    # the batch of unequal lengths shrinks, and vLLM pads it to the next size that it has captured
    is_uneven = any(case.lengths for case in cases)
    sizes = {} if is_uneven else {"cudagraph_capture_sizes": sorted({case.batch for case in cases})}
    more: Figures = {} if is_stock(arm) else {"scheduler_cls": scheduler.NAME}  # as the trainer's engine has it
    more |= request["engine"]
    more["compilation_config"] = sizes | more.get("compilation_config", {})
    llm = random_model.start(
        config,
        length=longest(cases),
        sequences=most_sequences(cases),
        scratch=request["scratch"],
        tensor_parallel_size=request["tensor_parallel"],
        logprobs_mode="processed_logprobs",
        kv_cache_dtype=request["kv_cache_dtype"],
        **options(arm, rank, config),
        **request["memory"],
        **more,
    )
    figures["linears"] = linear_kernels.chosen(llm)
    linear_kernels.check(arm, figures["linears"])
    policy = Policy(llm)
    if policy.carrier is not None:
        policy.swap(*random_model.adapter(config, rank))
    return llm, policy


def prompts(case: Case, number: int, repeat: int, vocabulary: int) -> list[list[int]]:
    """Draw token ids, the same on every call and in every arm, for a ``repeat`` of the case of that ``number``."""
    import torch

    generator = torch.Generator().manual_seed(number * 1_000_003 + repeat)
    return torch.randint(vocabulary, (case.batch, case.input), generator=generator).tolist()  # type: ignore[no-any-return]


def sampling(tokens: int) -> "SamplingParams":
    """Ask for so many tokens, each with the log-probability that it was sampled with, as in training."""
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=tokens, ignore_eos=True, temperature=1.0, logprobs=0, flat_logprobs=True, detokenize=False
    )


def _weights_gib(llm: "LLM") -> float:
    executor: Any = llm.llm_engine.model_executor
    runner = executor.driver_worker.worker.model_runner
    sizes = {t.data_ptr(): t.nbytes for t in (*runner.get_model().parameters(), *runner.get_model().buffers())}
    return round(sum(sizes.values()) / 2**30, 2)


if __name__ == "__main__":
    from qerl_recipes.machine.environment import prepare

    prepare()
    answer(begin)
