"""``qerl bench train``: a whole GRPO step, rollout to optimizer, in each arm of an experiment.

Weights are random and of the real shapes, so nothing is downloaded. Prompts are random characters and every completion
has its full length, so that the work is the same in all arms; rewards are random numbers that depend on the completion
alone. Every arm runs in a process of its own, one after the other; with several rounds A B A B, so that what slows the
machine down for a while shows in the spread.
"""

import errno
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from qerl_recipes.bench import train_table
from qerl_recipes.bench.process import ArmFailedError, ballast, ended_cleanly, in_own_process
from qerl_recipes.bench.results import conditions, save
from qerl_recipes.machine.gpu import Gpu, installed_gpu
from qerl_recipes.recipe.configs import AS_FEW_AS_FIT, PACK_TOKENS, parse
from qerl_recipes.recipe.shapes import ATTENTION, MIXTURES, config_json
from qerl_vllm_plugin.wire.address import hidden

ARMS = ("bf16", "nf4", "qerl_nvfp4")
PARTS = ("all", "step", "training")  # whole steps, forward and backward alone, or both
ANSWERS = ("steps", "training_part", "profile")
NAME = "bench"  # of the data set, of the reward and of the engine that tells how long its parts took
LEARNING_RATE = 1e-5
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
            "lora_target_modules": list(ATTENTION) if self.shape in MIXTURES else "all-linear",
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
    values = {key: value if isinstance(value, list) else [str(value)] for key, value in recipe.items()}
    return [part for key, parts in values.items() for part in (f"--{key}", *parts)]


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


def run(
    work: Workload,
    *,
    arms: Sequence[str] = ARMS,
    part: str = "all",
    profile: bool = False,
    rounds: int = 1,
    memory: int | None = None,
    scratch: Path | None = None,
    output: Path | None = None,
) -> dict[str, Any]:
    """Measure every arm, print the table, and write it to ``output`` as JSON, with a picture beside it.

    ``profile`` adds where the time of forward and backward alone goes. ``rounds`` is how often all arms are run.
    ``memory`` (bytes) limits what all processes together may hold of the GPU. ``scratch`` is the folder for the random
    checkpoints, by default that of temporary files. An arm that fails is in the result with its reason, and the others
    go on. Raises ValueError for what cannot be measured, OSError where the checkpoints do not fit on the disk.
    """
    work.check()
    gpu = installed_gpu()
    _check(arms, part, rounds, memory, gpu, work)
    pieces = {"training_part": 0 if part == "step" else work.steps, "profile": int(profile)}
    steps = 1 if part == "training" else work.steps
    if part != "step" and "checkpointed_layers" not in dict(work.overrides):
        # forward and backward alone take a longer row than the plan knows of
        blocks = str(work.config()["num_hidden_layers"])
        work = replace(work, overrides=(*work.overrides, ("checkpointed_layers", blocks)))
    with ExitStack() as stack:
        stack.enter_context(ended_cleanly())
        if scratch is not None:
            scratch.mkdir(parents=True, exist_ok=True)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qerl-bench-", dir=scratch)))
        _check_disk(work, arms, folder)
        if memory is not None:
            stack.enter_context(ballast(memory))
        found = {arm: _recipe(replace(work, steps=steps), arm, gpu, memory) for arm in arms}
        result: dict[str, Any] = {
            **asdict(work),
            "overrides": {key: hidden(value) for key, value in work.overrides},
            "order": "one after the other",
            "rounds": rounds,
            "memory_limit": memory,
            **conditions(),
            "arms": found,
        }
        for number, arm in ((number, arm) for number in range(rounds) for arm in arms):
            if "failed" in found[arm]:
                continue
            request = _request(work, arm, found[arm]["recipe"], folder, number) | pieces | {"memory": memory}
            _measure(found[arm], request, number)
            result["summary"] = train_table.summarize(result)
            save(result, output)  # loading takes minutes, and a run may be cut short
    if output is not None:
        train_table.picture(result, output.with_suffix(".png"))
    train_table.show(result)
    return result


def _measure(found: dict[str, Any], request: dict[str, Any], number: int) -> None:
    """Run an arm once; what it answers, or why it failed, goes into ``found``, each figure with its round."""
    try:
        answers = in_own_process("qerl_recipes.bench.train_arm", request)
    except ArmFailedError as error:
        answers = {**error.found, "failed": str(error)}
    for key in ANSWERS:
        found.setdefault(key, []).extend({**one, "round": number} for one in answers.pop(key, []))
    found.update(answers)


def _check(arms: Sequence[str], part: str, rounds: int, memory: int | None, gpu: Gpu | None, work: Workload) -> None:
    if unknown := sorted(set(arms) - set(ARMS)):
        raise ValueError(f"unknown arm {unknown[0]!r}; known: {', '.join(ARMS)}")
    if not arms or len(set(arms)) < len(arms):
        raise ValueError(f"arms are {', '.join(arms) or 'missing'}; name each of them once")
    if part not in PARTS:
        raise ValueError(f"part is {part!r}; it is one of {', '.join(PARTS)}")
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}, and must be at least 1")
    kept = dict(work.overrides).get("checkpointed_layers")
    if part != "step" and kept == str(AS_FEW_AS_FIT):
        raise ValueError(
            f"checkpointed_layers: {kept} keeps what leaves room for the rows of a step, and forward and backward "
            "alone take a longer one; measure --part step, or name a number of layers"
        )
    if "nf4" in arms and work.shape in MIXTURES:
        raise ValueError("arm nf4 (bitsandbytes) leaves experts in BF16; of a mixture measure bf16 and qerl_nvfp4")
    if gpu is None and "nf4" in arms:
        raise ValueError("arm nf4 (bitsandbytes) needs a CUDA GPU; on this machine measure bf16 and qerl_nvfp4")
    if memory is not None and gpu is None:
        raise ValueError("a limit of GPU memory needs a CUDA GPU; leave it out here")
    if memory is not None and gpu is not None and not 0 < memory <= gpu.memory:
        raise ValueError(f"the limit is {memory / 1e9:g} GB and the GPU has {gpu.memory / 1e9:.0f} GB")


def _check_disk(work: Workload, arms: Sequence[str], folder: Path) -> None:
    from qerl_recipes.bench.random_model import size

    needed = sum(size(work.config(), packed=packed) for packed in {arm == "qerl_nvfp4" for arm in arms})
    free = shutil.disk_usage(folder).free
    if needed > 0.95 * free:
        message = f"{folder.parent} has {free / 1e9:.1f} GB free and the checkpoints take {needed / 1e9:.1f} GB; "
        raise OSError(errno.ENOSPC, message + "name another folder with --scratch, or fewer arms")


def _recipe(work: Workload, arm: str, gpu: Gpu | None, memory: int | None) -> dict[str, Any]:
    """The recipe of an arm; on a GPU with the engine's share, and the bytes that the arm should take at most.

    Worked out without touching the GPU. ``memory`` is the limit, which decides what ``checkpointed_layers: -1`` means.
    """
    if gpu is None:
        return {"recipe": work.recipe(arm, cuda=False), "planned_bytes": None}
    from qerl_recipes.memory.plan import make

    share = None
    for _ in range(2):  # the second time with the share that the first one found
        settings = parse(flags(work.recipe(arm, cuda=False, engine_share=share)))
        plan = make(*settings, gpu=gpu, config=work.config(), limit=memory)
        tokens = work.sequences * -(-work.length // BLOCK) * BLOCK
        share = min(SPARE * plan.engine_share(tokens) + SPARE_BYTES / gpu.memory, 0.95)
    print(f"{arm}: planned {plan.line()}", flush=True)
    recipe = {**work.recipe(arm, cuda=True, engine_share=share), "checkpointed_layers": plan.checkpointed}
    return {"recipe": recipe, "planned_bytes": plan.peak}


def _request(work: Workload, arm: str, recipe: Mapping[str, Any], folder: Path, number: int) -> dict[str, Any]:
    """What the process of an arm is told of its model and its run, as ``train_arm.Request`` has it."""
    packed = arm == "qerl_nvfp4"
    base = str(folder / ("nvfp4" if packed else "bf16"))
    paths = {"model_name_or_path": base, "output_dir": str(folder / f"{arm}-{number}")}
    request = {"flags": flags({**recipe, **paths}), "config": work.config(), "base": base, "packed": packed}
    return {**request, "seed": work.seed}
