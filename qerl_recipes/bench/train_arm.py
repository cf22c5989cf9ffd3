"""Time one arm of ``qerl bench train`` in a process of its own: GRPO steps, then forward and backward alone.

The steps are those of ``qerl train``: nothing here generates, scores, differentiates or swaps. This module is also the
plugin that offers the recipe's data set, reward and engine under the name ``bench``.
"""

import json
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qerl_recipes.machine.environment import prepare

if __name__ == "__main__":
    prepare()  # before anything imports torch or vllm

import torch
from transformers import TrainerCallback

from qerl_recipes.bench import random_model
from qerl_recipes.bench.arms import answer
from qerl_recipes.bench.train import NAME, Request
from qerl_recipes.hooks import DatasetLoader, RewardFactory, StartEngine, get_plugin_manager, implementation
from qerl_recipes.machine.gpu import Gpu, this_gpu, used_bytes
from qerl_recipes.memory import plan as memory_plan
from qerl_recipes.memory.table import explained
from qerl_recipes.recipe.configs import PACK_TOKENS, parse
from qerl_recipes.rollout.engine import VLLMRollouts
from qerl_recipes.train import preflight
from qerl_recipes.train import run as train

MOST_KERNELS = 20
FROM_METRICS = ("logp_diff_mean", "logp_diff_max", "loss", "grad_norm", "reward", "packed_share")


def now() -> float:
    """Wait until the GPU has finished its work, and return the time in seconds."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Memory:
    """Measure the most bytes that this process has held on the GPU since ``begin``; zeros on a CPU.

    Memory that torch does not know of is counted by the driver, without what was in use before this process came
    (``others``). ``look`` is called where a step holds most; between two calls only memory that torch or vLLM gave back
    at once can have been missed.
    """

    others = 0

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.peak = 0
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.look()

    def look(self) -> None:
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            self.peak = max(self.peak, total - free - Memory.others)

    def report(self) -> dict[str, int]:
        """Return torch's own peaks, and that of the whole process."""
        has_gpu = torch.cuda.is_available()
        self.look()
        return {
            "allocated": torch.cuda.max_memory_allocated() if has_gpu else 0,
            "reserved": torch.cuda.max_memory_reserved() if has_gpu else 0,
            "process": self.peak,
        }


class TimedRollouts(VLLMRollouts):
    """Run the rollout engine of ``qerl train``, and time swaps, sleeping and waking."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.swap_seconds = self.sleep_seconds = 0.0
        self.memory = Memory()
        super().__init__(*arguments, **options)

    def sync_weights(self) -> None:
        began, slept = now(), self.sleep_seconds
        super().sync_weights()
        self.swap_seconds += now() - began - (self.sleep_seconds - slept)

    def _sleep(self) -> None:
        self.memory.look()  # the engine at work is one half of a step
        began = now()
        super()._sleep()
        self.sleep_seconds += now() - began

    def _wake(self) -> None:
        began = now()
        super()._wake()
        self.sleep_seconds += now() - began


class TimedSteps(TrainerCallback):
    """Add to ``answers``, for each step, how long its parts took and how much memory it held."""

    def __init__(self, trainer: Any, expected_tokens: int, answers: list[dict[str, Any]]) -> None:
        self.trainer, self.expected_tokens, self.answers = trainer, expected_tokens, answers
        self.engine: TimedRollouts = trainer.vllm_generation
        self.training_began: float | None = None
        trainer.model.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, *_: Any) -> None:
        if self.training_began is None and torch.is_grad_enabled():
            self.engine.memory.look()
            self.training_began = now()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.engine.memory.begin()
        self.training_began = None
        self.engine.swap_seconds = self.engine.sleep_seconds = 0.0
        self.began = now()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.engine.memory.look()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.training_began is not None
        self.training_seconds = now() - self.training_began

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the step; the trainer's own recorder has written its metrics before."""
        step = now() - self.began
        engine, generation = self.engine, self.trainer.rollout_seconds
        if engine.tokens != self.expected_tokens:
            raise RuntimeError(
                f"the engine generated {engine.tokens} tokens and not {self.expected_tokens}: the arms would not do "
                "the same work; leave out flags that let completions end early"
            )
        parts = {
            "rollout": engine.seconds,
            "scoring": generation - engine.seconds - engine.swap_seconds - engine.sleep_seconds,
            "training": self.training_seconds,
            "swap": engine.swap_seconds,
            "sleep": engine.sleep_seconds,
        }
        seconds = {"step": step, **parts, "rest": step - sum(parts.values())}
        lines = Path(args.output_dir, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        record = json.loads(lines[-1])
        metrics = {name: record[name] for name in FROM_METRICS if name in record}
        self.answers.append({"seconds": seconds, "memory": engine.memory.report(), "metrics": metrics})


class TrainingPart:
    """Let the trainer compute forward and backward of one packed row of random sequences, all of different prompts."""

    def __init__(self, trainer: Any) -> None:
        args, model = trainer.args, trainer.model
        completion, length = args.max_completion_length, args.vllm_max_model_length
        # no more than a step computes at a time: the memory plan has kept as many activations as those leave room for
        rows = max(1, min((args.pack_tokens or PACK_TOKENS) // length, args.per_device_train_batch_size))
        prompt = length - completion
        generator = torch.Generator().manual_seed(args.seed)
        vocabulary = model.config.vocab_size
        ids = torch.randint(2, vocabulary, (rows, prompt + completion), generator=generator).to(model.device)
        everything = torch.ones_like(ids)
        self.trainer, self.tokens = trainer, ids.numel()
        self.inputs = {
            "prompt_ids": ids[:, :prompt],
            "prompt_mask": everything[:, :prompt],
            "completion_ids": ids[:, prompt:],
            "completion_mask": everything[:, prompt:],
            "advantages": torch.randn(rows, generator=generator).to(model.device),
            "importance_sampling_ratio": torch.ones(rows, completion, device=model.device),
            "sampling_per_token_logps": torch.zeros(rows, completion, device=model.device),
            "num_items_in_batch": everything[:, prompt:].sum(),
        }

    def measure(self) -> dict[str, Any]:
        """Compute the row once; return seconds, tokens and torch's peak of memory."""
        trainer, memory = self.trainer, Memory()
        trainer.model.train()
        began = now()
        loss = trainer.compute_loss(trainer.model_wrapped, self.inputs)
        trainer.accelerator.backward(loss)
        seconds = now() - began
        report = memory.report()
        trainer.model.zero_grad(set_to_none=True)
        return {"seconds": seconds, "tokens": self.tokens, "memory": report}

    def profile(self) -> dict[str, Any]:
        """Compute the row once under the profiler, which slows it down.

        Return the kernels that took longest (on a CPU: operators), and the milliseconds of all kernels.
        """
        on_gpu = torch.cuda.is_available()
        activity = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as profiler:
            measured = self.measure()
        kind = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        kernels = [
            {"name": event.key, "ms": getattr(event, kind) / 1e3, "calls": event.count}
            for event in profiler.key_averages()
        ]
        kernels.sort(key=lambda kernel: -kernel["ms"])
        total = sum(kernel["ms"] for kernel in kernels)
        return {"kernels": kernels[:MOST_KERNELS], "kernels_ms": total, "memory": measured["memory"]}


def measure(fields: Mapping[str, Any], figures: dict[str, Any]) -> None:
    """Load, make the steps, then measure forward and backward alone; fill ``figures`` as they come."""
    request = Request(**fields)
    if torch.cuda.is_available():
        Memory.others = used_bytes()
    began = time.perf_counter()
    get_plugin_manager().register(sys.modules[__name__])
    settings = parse(request.flags)
    training = settings[1]
    if not Path(request.base, "config.json").is_file():
        device = "cuda" if torch.cuda.is_available() else "cpu"
        random_model.write(request.base, request.config, packed=request.packed, seed=request.seed, device=device)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    written = time.perf_counter()
    checked = preflight.make(*settings)
    gpu = this_gpu()
    if gpu is not None:
        gpu = Gpu(request.memory or gpu.memory, gpu.is_hopper)
    plan = None if gpu is None else memory_plan.make(*settings, gpu=gpu)
    with explained(plan, training.output_dir):
        trainer = train.build(checked)
    figures |= {"steps": [], "training_part": [], "profile": []}
    expected = training.generation_batch_size * training.max_completion_length
    trainer.add_callback(TimedSteps(trainer, expected, figures["steps"]))
    assert isinstance(trainer.vllm_generation, TimedRollouts)
    cache = trainer.vllm_generation.llm.llm_engine.vllm_config.cache_config
    figures["load_seconds"] = {"checkpoint": written - began, "engine and trainer": time.perf_counter() - written}
    figures["kv_cache_tokens"] = (cache.num_gpu_blocks or 0) * cache.block_size
    with explained(plan, training.output_dir, trainer):
        trainer.train()
        part = TrainingPart(trainer)
        for _ in range(request.training_part):
            figures["training_part"].append(part.measure())
        for _ in range(request.profile):
            figures["profile"].append(part.profile())


def random_reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Return a number in [0, 1) for each completion, the same for the same tokens."""
    return [random.Random(str(ids)).random() for ids in completion_ids]


@implementation
def qerl_rewards() -> Mapping[str, RewardFactory]:
    return {NAME: lambda script: random_reward}


@implementation
def qerl_datasets() -> Mapping[str, DatasetLoader]:
    def prompts(script: Any) -> tuple[Any, None]:
        from datasets import Dataset

        options = dict(script.dataset_kwargs)
        draw = random.Random(options["seed"])
        texts = ["".join(draw.choices(random_model.CHARACTERS, k=options["length"])) for _ in range(options["count"])]
        return Dataset.from_dict({"prompt": texts}), None

    return {NAME: prompts}


@implementation
def qerl_rollout_engines() -> Mapping[str, StartEngine]:
    return {NAME: TimedRollouts}


if __name__ == "__main__":
    answer(measure)
