"""Time one arm of ``qerl bench train`` in a process of its own, by the steps of ``qerl train``.

This module is also the plugin that offers the recipe's data set, reward and FP8 engine.
"""

import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_recipes.machine.environment import prepare

if __name__ == "__main__":
    prepare()  # before anything imports torch or vllm

import torch
from transformers import TrainerCallback

from qerl_recipes.bench import random_model
from qerl_recipes.bench.arms import Figures, answer
from qerl_recipes.bench.engines import FP8
from qerl_recipes.bench.train import FP8_ENGINE, NAME
from qerl_recipes.hooks import DatasetLoader, RewardFactory, StartEngine, get_plugin_manager, implementation
from qerl_recipes.machine.gpu import Gpu, this_gpu, used_bytes
from qerl_recipes.memory import plan as memory_plan
from qerl_recipes.memory.table import explained
from qerl_recipes.recipe.configs import parse
from qerl_recipes.rollout.engine import VLLMRollouts
from qerl_recipes.rollout.sampling import Completion
from qerl_recipes.train import preflight
from qerl_recipes.train import run as train

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftModel

FROM_METRICS = ("logp_diff_mean", "logp_diff_max", "loss", "grad_norm", "reward", "packed_share")


def now() -> float:
    """Wait until the GPU has finished its work, and return the time in seconds."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Memory:
    """Measure the most bytes that this process has held on the GPU since ``begin``; zeros on a CPU.

    The driver counts, less what ``others`` held before, wherever ``look`` is called: where a step holds most.
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


class Watch:
    """Add up the seconds of each part of a rollout; what a method spends inside another one counts for that alone."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.reset()
        self._inside = 0.0  # seconds in the timed methods that the current one has called

    def reset(self) -> None:
        self.tokens, self.seconds = 0, dict.fromkeys(("rollout", "swap", "sleep", "scoring"), 0.0)

    def time(self, owner: Any, name: str, part: str) -> None:
        """Count the time of the method ``name`` of ``owner`` as ``part``, and the tokens that ``generate`` returns."""
        method = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            self.memory.look()
            before, self._inside, began = self._inside, 0.0, now()
            try:
                result = method(*arguments, **options)
            finally:
                took = now() - began
                self.seconds[part] += took - self._inside
                self._inside = before + took
                self.memory.look()
            if name == "generate":
                self.tokens += sum(map(len, result[1]))
            return result

        setattr(owner, name, timed)


class FP8Rollouts(VLLMRollouts):
    """Sample from FP8 weights that vLLM makes anew, at every sync, of the trainer's BF16 weights with the adapter.

    Weights and activations are FP8, with a scale per output channel and per token, as FlashRL rolls out
    (https://github.com/yaof20/Flash-RL); vLLM's own ``reload_weights`` quantizes layer by layer, in place.
    """

    model: "PeftModel"  # the trainer's; ``begin`` sets it once it is built
    sleep_level = 2  # discards the weights, since a sync brings all of them

    def sync_weights(self) -> None:
        """Give the engine all weights of the policy; raise RuntimeError if the prefix cache of the one before stays."""
        self._wake()
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": merged_weights(self.model)})
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the engine kept its prefix cache, whose keys and values are of the policy before")

    def _complete(self, *arguments: Any) -> list[Completion]:
        if self._is_asleep:  # asked again within a rollout, after the weights were discarded
            self.sync_weights()
        return super()._complete(*arguments)

    def _options(self, *arguments: Any) -> dict[str, Any]:
        """Return the options of the bf16 arm, with FP8 in place of LoRA slots."""
        options = {key: value for key, value in super()._options(*arguments).items() if "lora" not in key}
        return {**options, "quantization": FP8}


@torch.no_grad()
def merged_weights(model: "PeftModel") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each weight of the base by its checkpoint's name, adapter added; one merged weight exists at a time."""
    base = model.get_base_model()
    for name, parameter in base.named_parameters():
        layer, is_adapted, leaf = name.partition(".base_layer.")
        if is_adapted and leaf == "weight":
            delta = base.get_submodule(layer).get_delta_weight(model.active_adapter)
            yield f"{layer}.weight", (parameter + delta).to(parameter.dtype)
        elif ".lora_" not in name:
            yield name.replace(".base_layer", ""), parameter


class TimedSteps(TrainerCallback):
    """Add to ``answers``, for each step, how long its parts took and how much memory it held."""

    def __init__(self, trainer: Any, expected_tokens: int, answers: list[Figures]) -> None:
        self.expected_tokens, self.answers, self.watch = expected_tokens, answers, Watch()
        self.training_began: float | None = None
        trainer.model.register_forward_pre_hook(self._before_forward)
        self.watch.time(trainer, "_generate_and_score_completions", "scoring")
        self.watch.time(trainer.vllm_generation, "generate", "rollout")
        self.watch.time(trainer.vllm_generation, "sync_weights", "swap")
        for owner, name in self.sleeping(trainer.vllm_generation):
            self.watch.time(owner, name, "sleep")

    def sleeping(self, engine: Any) -> list[tuple[Any, str]]:
        """Return the methods by which the engine falls asleep and wakes up, each with its owner."""
        return [(engine, "_sleep"), (engine, "_wake")]

    def _before_forward(self, *_: Any) -> None:
        if self.training_began is None and torch.is_grad_enabled():
            self.watch.memory.look()
            self.training_began = now()

    def metrics(self, output_dir: str) -> dict[str, float | None]:
        """Return what the trainer's own recorder has written of this step before."""
        record = json.loads(Path(output_dir, "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
        return {name: record[name] for name in FROM_METRICS if name in record}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.watch.memory.begin()
        self.training_began = None
        self.watch.reset()
        self.began = now()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.watch.memory.look()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.training_began is not None
        self.training_seconds = now() - self.training_began

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the step. Raises RuntimeError if the engine did not generate the expected number of tokens."""
        step, watch = now() - self.began, self.watch
        if watch.tokens != self.expected_tokens:
            raise RuntimeError(
                f"the engine generated {watch.tokens} tokens and not {self.expected_tokens}: the arms would not do "
                "the same work; leave out flags that let completions end early"
            )
        parts = {**watch.seconds, "training": self.training_seconds}
        seconds = {"step": step, **parts, "rest": step - sum(parts.values())}
        metrics = self.metrics(args.output_dir)
        self.answers.append({"seconds": seconds, "memory": watch.memory.report(), "metrics": metrics})


# builds the trainer of a request, and returns it with its timer and the context in which it trains
Begin = Callable[[Figures], tuple[Any, type[TimedSteps], AbstractContextManager[None]]]


def begin(request: Figures) -> tuple[Any, type[TimedSteps], AbstractContextManager[None]]:
    """Build the trainer of ``qerl train``."""
    get_plugin_manager().register(sys.modules[__name__])
    settings = parse(request["flags"])
    output_dir = settings[1].output_dir
    checked = preflight.make(*settings)
    gpu = this_gpu()
    if gpu is not None:
        gpu = Gpu(request["memory"] or gpu.memory, gpu.is_hopper)
    plan = None if gpu is None else memory_plan.make(*settings, gpu=gpu)
    with explained(plan, output_dir):
        trainer = train.build(checked)
    if isinstance(trainer.vllm_generation, FP8Rollouts):
        trainer.vllm_generation.model = trainer.accelerator.unwrap_model(trainer.model)
    return trainer, TimedSteps, explained(plan, output_dir, trainer)


def measure(request: Figures, figures: Figures, begin: Begin = begin) -> None:
    """Load and make the steps; fill ``figures`` as they come."""
    if torch.cuda.is_available():
        Memory.others = used_bytes()
    began = time.perf_counter()
    if not Path(request["base"], "config.json").is_file():
        device = "cuda" if torch.cuda.is_available() else "cpu"
        of_base = {"packed": request["packed"], "seed": request["seed"], "device": device}
        random_model.write(request["base"], request["config"], **of_base)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    written = time.perf_counter()
    trainer, timer, context = begin(request)
    figures["steps"] = []
    args = trainer.args
    trainer.add_callback(timer(trainer, args.generation_batch_size * args.max_completion_length, figures["steps"]))
    cache = trainer.vllm_generation.llm.llm_engine.vllm_config.cache_config
    figures["load_seconds"] = {"checkpoint": written - began, "engine and trainer": time.perf_counter() - written}
    figures["kv_cache_tokens"] = (cache.num_gpu_blocks or 0) * cache.block_size
    with context:
        trainer.train()


def random_reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Return a number in [0, 1) for each completion, the same for the same tokens."""
    return [random.Random(str(ids)).random() for ids in completion_ids]


@implementation
def qerl_rewards() -> Mapping[str, RewardFactory]:
    return {NAME: lambda script: random_reward}


def random_prompts(count: int, length: int, seed: int) -> "Dataset":
    """Return ``count`` prompts of ``length`` random characters, each of which is a token."""
    from datasets import Dataset

    draw = random.Random(seed)
    texts = ["".join(draw.choices(random_model.CHARACTERS, k=length)) for _ in range(count)]
    return Dataset.from_dict({"prompt": texts})


@implementation
def qerl_datasets() -> Mapping[str, DatasetLoader]:
    return {NAME: lambda script: (random_prompts(**script.dataset_kwargs), None)}


@implementation
def qerl_rollout_engines() -> Mapping[str, StartEngine]:
    return {FP8_ENGINE: FP8Rollouts}


if __name__ == "__main__":
    answer(measure)
