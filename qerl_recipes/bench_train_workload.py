"""What ``qerl bench train`` has every arm do: the recipe, the same but for its arm, and a plugin with what it names.

Prompts are random characters and every completion has its full length, so that the work is the same in all arms.
Rewards are random numbers that depend on the completion alone.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qerl_recipes.hooks import DatasetLoader, RewardFactory, RolloutEngine, implementation
from qerl_recipes.shapes import config_json

NAME = "bench"  # of the data set, of the reward and of the engine that tells how long its parts took
PACK_TOKENS = 16384
LEARNING_RATE = 1e-5
ENGINE_PARTS = ("engine's weights", "engine's adapter", "engine's scratch", "CUDA graphs")
SPARE, SPARE_BYTES = 1.03, 2_000_000_000  # of the engine's memory, which is an estimate
BLOCK = 16  # tokens of a block of vLLM's KV cache
FIXED = {"quantization", "model_name_or_path", "output_dir", "dataset_name", "dataset_kwargs", "rollout_engine"}
FIXED |= {"max_steps", "num_generations", "gradient_accumulation_steps", "lora_r", "seed", "use_cpu"}
FIXED |= {"max_prompt_length", "max_completion_length"}


@dataclass(frozen=True)
class Workload:
    """Steps of ``groups`` prompts of ``prompt`` tokens with ``generations`` completions of ``completion`` tokens each.

    ``overrides`` are flags of ``qerl train`` that stand above the recipe of every arm, by their names.
    """

    shape: str
    groups: int
    generations: int
    prompt: int
    completion: int
    steps: int
    rank: int
    seed: int
    overrides: tuple[tuple[str, str], ...] = ()

    def check(self) -> None:
        """Raises ValueError for an unknown shape and for numbers that make no step."""
        least = {"groups": 1, "generations": 2, "prompt": 1, "completion": 1, "steps": 2, "rank": 1}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                why = "; the first step warms up and is not counted" if name == "steps" else ""
                raise ValueError(f"{name} is {getattr(self, name)}, and must be at least {smallest}{why}")
        self.config()
        if self.sequences % self.micro_batch():
            raise ValueError(
                f"per_device_train_batch_size is {self.micro_batch()}, which does not divide the {self.sequences} "
                "completions of a step"
            )

    @property
    def sequences(self) -> int:
        """Of a step."""
        return self.groups * self.generations

    @property
    def length(self) -> int:
        """Of a sequence, in tokens."""
        return self.prompt + self.completion

    def config(self) -> dict[str, Any]:
        """config.json of the model. Raises ValueError for an unknown shape."""
        return config_json(self.shape)

    def micro_batch(self) -> int:
        """Sequences of a micro-batch: as many whole groups as one packed row holds, at least one, if no flag says."""
        if given := dict(self.overrides).get("per_device_train_batch_size"):
            return int(given)
        room = (self.pack_tokens() or PACK_TOKENS) // (self.prompt + self.generations * self.completion)
        parts = [groups for groups in range(1, self.groups + 1) if self.groups % groups == 0]
        return self.generations * max(groups for groups in parts if groups <= max(room, 1))

    def pack_tokens(self) -> int:
        return int(dict(self.overrides).get("pack_tokens", PACK_TOKENS))

    def recipe(self, arm: str, *, cuda: bool, engine_share: float | None = None) -> dict[str, Any]:
        """The keys of ``qerl train`` for an arm, less its paths; ``engine_share`` is the engine's share of the GPU."""
        data = {"count": self.groups * self.steps, "length": self.prompt, "seed": self.seed}
        recipe: dict[str, Any] = {
            "quantization": arm,
            "learning_rate": LEARNING_RATE,
            "lora_r": self.rank,
            "lora_alpha": 2 * self.rank,
            "lora_target_modules": "all-linear",
            "dataset_name": NAME,
            "dataset_kwargs": json.dumps(data),
            "max_prompt_length": self.prompt,
            "reward_funcs": NAME,
            "rollout_engine": NAME,
            "loss_type": "dapo",
            "epsilon_high": 0.28,
            "beta": 0.0,
            "num_generations": self.generations,
            "max_completion_length": self.completion,
            # min_tokens would do the same, but takes the end out of the engine's probabilities alone
            "generation_kwargs": json.dumps({"ignore_eos": True}),
            "per_device_train_batch_size": self.micro_batch(),
            "gradient_accumulation_steps": self.sequences // self.micro_batch(),
            "max_steps": self.steps,
            "pack_tokens": self.pack_tokens(),
            "optim": "adamw_torch_fused",
            "lr_scheduler_type": "constant",
            "bf16": cuda,
            "use_cpu": not cuda,
            "gradient_checkpointing": True,
            "seed": self.seed,
            "logging_strategy": "no",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
        if engine_share is not None:
            recipe["vllm_gpu_memory_utilization"] = f"{engine_share:.4f}"
        return recipe | dict(self.overrides)


def flags(recipe: Mapping[str, Any]) -> list[str]:
    """A recipe as ``qerl train`` takes it from a command line."""
    return [part for key, value in recipe.items() for part in (f"--{key}", str(value))]


def parse_overrides(arguments: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """``--key value`` and ``--key=value`` as pairs. Raises ValueError for anything else, and for what is no choice."""
    rest: list[str] = list(arguments)
    pairs: list[tuple[str, str]] = []
    while rest:
        flag, has_value, value = rest.pop(0).partition("=")
        if not flag.startswith("--") or not (has_value or rest):
            raise ValueError(f"{flag!r} is neither an option of this command nor a flag of `qerl train` with a value")
        key = flag[2:].replace("-", "_")
        if key in FIXED:
            raise ValueError(f"{key} is not for a flag: the arms and the options of this command decide it")
        pairs.append((key, value if has_value else rest.pop(0)))
    return tuple(pairs)


def engine_share(plan: Any, size: Any, work: Workload) -> float:
    """The engine's share of a GPU at which its KV cache has room for all sequences of a step, with some to spare.

    ``plan`` is a memory plan of an arm, ``size`` the model's.
    """
    held = sum(part.rollout for part in plan.parts if part.name in ENGINE_PARTS)
    token = 2 * size.layers * size.kv_heads * size.head_dim * 2  # keys and values in BF16
    cache = work.sequences * -(-work.length // BLOCK) * BLOCK * token
    return min((SPARE * (held + cache) + SPARE_BYTES) / plan.gpu.memory, 0.95)


def random_reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """A number in [0, 1) for each completion, the same for the same tokens."""
    return [random.Random(str(ids)).random() for ids in completion_ids]


@implementation
def qerl_rewards() -> Mapping[str, RewardFactory]:
    return {NAME: lambda script: random_reward}


@implementation
def qerl_datasets() -> Mapping[str, DatasetLoader]:
    def prompts(script: Any) -> tuple[Any, None]:
        from datasets import Dataset

        from qerl_recipes.bench_checkpoint import CHARACTERS

        given = dict(script.dataset_kwargs)
        drawn = random.Random(given["seed"])
        texts = ["".join(drawn.choices(CHARACTERS, k=given["length"])) for _ in range(given["count"])]
        return Dataset.from_dict({"prompt": texts}), None

    return {NAME: prompts}


@implementation
def qerl_rollout_engines() -> Mapping[str, RolloutEngine]:
    def timed(base: str, training: Any, **options: Any) -> Any:
        from qerl_recipes.bench_train_arm import TimedRollouts

        return TimedRollouts(base, training, **options)

    return {NAME: timed}
