"""One arm of ``qerl bench train``, in a process of its own: it loads, then works whenever it is told to.

It says that its imports are done, and then reads a line for each piece of work, first ``load``, then ``step`` (one GRPO
step), then ``training`` (forward and backward alone) or ``profile`` (the same by kernel), and answers with one JSON
object in a line. The steps are those of ``qerl train``: nothing here generates, scores, differentiates or swaps.
"""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from qerl_recipes.environment import prepare

if __name__ == "__main__":
    prepare()  # before anything imports torch or vllm

import torch
from transformers import TrainerCallback

from qerl_recipes import bench_checkpoint, bench_train_workload, memory_plan, train
from qerl_recipes.configs import parse
from qerl_recipes.hooks import get_plugin_manager
from qerl_recipes.memory_parts import Gpu, this_gpu
from qerl_recipes.out_of_memory import explained
from qerl_recipes.rollout import VLLMRollouts
from qerl_recipes.validate import validate

LOAD, STEP, TRAINING, PROFILE = "load", "step", "training", "profile"
MOST_KERNELS = 20
FROM_METRICS = ("logp_mismatch_mean", "logp_mismatch_max", "loss", "grad_norm", "reward", "packed_share")


@dataclass(frozen=True)
class Request:
    """``flags`` of ``qerl train``; ``base`` is written if it is not there, ``packed`` or in BF16. ``memory``: the bytes
    that the arms may use, None for all of the GPU."""

    flags: list[str]
    config: dict[str, Any]
    base: str
    packed: bool
    seed: int
    memory: int | None = None


def now() -> float:
    """Seconds, when all that the GPU was given is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Memory:
    """Bytes in use on the GPU as the driver counts them, whoever holds them; zeros on a CPU.

    ``look`` is called where a step holds most: between two calls it may have been more only for memory that torch or
    vLLM gave back at once.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.before = self.peak = self.used()

    def look(self) -> None:
        self.peak = max(self.peak, self.used())

    @staticmethod
    def used() -> int:
        if not torch.cuda.is_available():
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free

    def report(self) -> dict[str, int]:
        """Torch's own peaks, and the driver's figures before, at the most, and now."""
        has_gpu = torch.cuda.is_available()
        self.look()
        return {
            "allocated": torch.cuda.max_memory_allocated() if has_gpu else 0,
            "reserved": torch.cuda.max_memory_reserved() if has_gpu else 0,
            "used_before": self.before,
            "used_peak": self.peak,
            "used_after": self.used(),
        }


class TimedRollouts(VLLMRollouts):
    """The rollout engine of ``qerl train``, which also tells how long swaps, sleeping and waking took."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.swap_seconds = self.sleep_seconds = 0.0
        self.memory = Memory()
        super().__init__(*arguments, **options)

    def sync_weights(self) -> None:
        began, slept = now(), self.sleep_seconds
        super().sync_weights()
        self.swap_seconds += now() - began - (self.sleep_seconds - slept)

    def _sleep(self) -> None:
        self.memory.look()  # the engine at work is the one half of a step
        began = now()
        super()._sleep()
        self.sleep_seconds += now() - began

    def _wake(self) -> None:
        began = now()
        super()._wake()
        self.sleep_seconds += now() - began


class StepByStep(TrainerCallback):
    """Waits before each step until it is told to make it, and answers with how long its parts took."""

    def __init__(self, trainer: Any, messages: TextIO, expected_tokens: int) -> None:
        self.trainer, self.messages, self.expected_tokens = trainer, messages, expected_tokens
        self.engine: TimedRollouts = trainer.vllm_generation
        self.training_began: float | None = None
        trainer.model.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, *_: Any) -> None:
        if self.training_began is None and torch.is_grad_enabled():
            self.engine.memory.look()
            self.training_began = now()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wait_for(STEP)
        self.engine.memory.begin()
        self.training_began = None
        self.engine.swap_seconds = self.engine.sleep_seconds = 0.0
        self.generation_before = self.trainer.generation_seconds
        self.began = now()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.engine.memory.look()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.training_began is not None
        self.training_seconds = now() - self.training_began

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the trainer's own recorder has written this step into its metrics."""
        step = now() - self.began
        engine, generation = self.engine, self.trainer.generation_seconds - self.generation_before
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
        send(self.messages, {"seconds": seconds, "memory": engine.memory.report(), "metrics": metrics})


class TrainingPart:
    """Forward and backward of one packed row of random sequences, each with a prompt of its own, by the trainer."""

    def __init__(self, trainer: Any) -> None:
        args, model = trainer.args, trainer.model
        completion = args.max_completion_length
        budget = args.pack_tokens or bench_train_workload.PACK_TOKENS
        rows = max(1, budget // args.vllm_max_model_length)
        prompt = max(budget // rows, args.vllm_max_model_length) - completion
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
            "num_items_in_batch": everything[:, prompt:].sum(),
        }

    def measure(self) -> dict[str, Any]:
        """Once -> seconds, tokens and torch's peak of memory."""
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
        """Once, slowed down -> the kernels that took longest (on a CPU: operators), and milliseconds of them all."""
        on_gpu = torch.cuda.is_available()
        activity = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as seen:
            answer = self.measure()
        kind = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        kernels = [
            {"name": event.key, "ms": getattr(event, kind) / 1e3, "calls": event.count} for event in seen.key_averages()
        ]
        kernels.sort(key=lambda kernel: -kernel["ms"])
        total = sum(kernel["ms"] for kernel in kernels)
        return {"kernels": kernels[:MOST_KERNELS], "kernels_ms": total, "memory": answer["memory"]}


def wait_for(command: str) -> None:
    """Raises SystemExit if anything else comes, such as the end."""
    if sys.stdin.readline().strip() != command:
        raise SystemExit(f"ended before the last {command}")


def send(messages: TextIO, answer: dict[str, Any]) -> None:
    """One JSON object in a line."""
    messages.write(json.dumps(answer) + "\n")
    messages.flush()


def work(request: Request, messages: TextIO) -> None:
    """Load, answer, and do what the lines of the standard input say, until there are no more of them."""
    began = time.perf_counter()
    get_plugin_manager().register(bench_train_workload)
    settings = parse(request.flags)
    training = settings[1]
    if not Path(request.base, "config.json").is_file():
        device = "cuda" if torch.cuda.is_available() else "cpu"
        bench_checkpoint.write(request.base, request.config, packed=request.packed, seed=request.seed, device=device)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    written = time.perf_counter()
    validate(*settings)
    gpu = this_gpu()
    if gpu is not None:
        gpu = Gpu(request.memory or gpu.memory, gpu.is_hopper)
    plan = None if gpu is None else memory_plan.make(*settings, gpu=gpu)
    with explained(plan, training.output_dir):
        trainer = train.build(*settings)
    expected = training.generation_batch_size * training.max_completion_length
    trainer.add_callback(StepByStep(trainer, messages, expected))
    cache = trainer.vllm_generation.llm.llm_engine.vllm_config.cache_config
    seconds = {"checkpoint": written - began, "engine and trainer": time.perf_counter() - written}
    send(messages, {"load_seconds": seconds, "kv_cache_tokens": (cache.num_gpu_blocks or 0) * cache.block_size})
    with explained(plan, training.output_dir, trainer):
        trainer.train()
        part = TrainingPart(trainer)
        while (command := sys.stdin.readline().strip()) in (TRAINING, PROFILE):
            send(messages, part.measure() if command == TRAINING else part.profile())


def main() -> None:
    """The request is the one argument. Whatever libraries print goes to the standard error."""
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    send(messages, {"imported": True})
    try:
        wait_for(LOAD)
        work(Request(**json.loads(sys.argv[1])), messages)
    except Exception as error:
        send(messages, {"failed": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    main()
