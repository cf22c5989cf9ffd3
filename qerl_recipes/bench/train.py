"""``qerl bench train``: a whole GRPO step, rollout to optimizer, in each arm of an experiment.

Weights are random and of the real shapes, so nothing is downloaded. Prompts are random characters and every completion
has its full length, so that the work is the same in all arms; rewards are random numbers that depend on the completion
alone. Every arm runs in a process of its own, one after the other; with several rounds A B A B, so that what slows the
machine down for a while shows in the spread.

With ``--config`` the recipe is the one that ``qerl train`` takes, with its own batches, noise, memory and optimizer.
Only checkpoint, data, reward and output are the benchmark's.
"""

import errno
import json
import shutil
import statistics
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from qerl_recipes.bench.arms import ArmFailedError, Figures, ask_once, ballast, ended_cleanly
from qerl_recipes.bench.results import around, conditions, save, show_remarks, spread, table
from qerl_recipes.files import base_model
from qerl_recipes.machine.gpu import GB, Gpu, installed_gpu
from qerl_recipes.recipe.checks import steps_per_rollout
from qerl_recipes.recipe.configs import AS_FEW_AS_FIT, parse
from qerl_recipes.recipe.file import read_yaml, up_to_date
from qerl_recipes.recipe.keys import TOPICS
from qerl_recipes.recipe.shapes import ATTENTION, MIXTURES, config_json
from qerl_vllm_plugin.wire.address import hidden

ARMS = ("bf16", "nf4", "qerl_nvfp4")
PARTS_TO_RUN = ("all", "step", "training")  # whole steps, forward and backward alone, or both
ANSWERS = ("steps", "training_part", "profile")
NAME = "bench"  # of the data set, of the reward and of the engine that tells how long its parts took
LEARNING_RATE = 1e-5
SPARE, SPARE_BYTES = 1.03, 2_000_000_000  # of the engine's memory, which is an estimate
BLOCK = 16  # tokens of a block of vLLM's KV cache
# what no flag may set, beside a recipe and without one
FIXED_BESIDE_A_RECIPE = {"model_name_or_path", "output_dir", "dataset_name", "dataset_kwargs", "rollout_engine"}
FIXED_BESIDE_A_RECIPE |= {"max_steps", "use_cpu", "model_revision"}
FIXED = FIXED_BESIDE_A_RECIPE | {"quantization", "num_generations", "gradient_accumulation_steps", "lora_r", "seed"}
FIXED |= {"max_prompt_length", "max_completion_length"}
# keys of a recipe in whose place the benchmark has its own, or none
REPLACED = {"model_name_or_path", "model_revision", "adapter_name_or_path", "chat_template", "rollout_engine"}
REPLACED |= {
    key
    for topic in ("data", "rewards", "evaluation while training", "checkpoints and hub", "logging")
    for key in TOPICS[topic]
    if key != "max_prompt_length"
}
LEAST = {"groups": 1, "generations": 2, "prompt": 1, "completion": 1, "steps": 2, "rank": 1}
SHOWN_KERNELS = 12
COLORS = {
    "rollout": "tab:blue",
    "scoring": "tab:cyan",
    "training": "tab:orange",
    "swap": "tab:red",
    "sleep": "tab:purple",
    "rest": "tab:gray",
}
PARTS = tuple(COLORS)  # of a step


@dataclass(frozen=True)
class Workload:
    """Describe steps of ``groups`` prompts of ``prompt`` tokens, each with ``generations`` completions.

    A completion has ``completion`` tokens. ``overrides`` are flags of ``qerl train`` by name; they override the recipe
    of every arm. ``recipe_file`` is the recipe that is timed, "" for the benchmark's own.
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
    recipe_file: str = ""

    @staticmethod
    def of(
        recipe_file: Path, prompt: int, steps: int, overrides: tuple[tuple[str, str], ...]
    ) -> "tuple[Workload, str]":
        """Return the steps of a recipe with prompts of ``prompt`` tokens, and the arm that the recipe is.

        Raises ValueError for a recipe that cannot be timed.
        """
        script, training, model = parse(["--config", str(recipe_file), *flags(dict(overrides))])
        if (served := steps_per_rollout(training)) > 1:
            raise ValueError(f"{recipe_file}: a rollout serves {served} steps, and a step with a rollout is timed")
        if (most := script.max_prompt_length) is not None and prompt > most:
            raise ValueError(f"--prompt is {prompt}, and max_prompt_length of {recipe_file} is {most}")
        sizes = (training.generation_batch_size // training.num_generations, training.num_generations, prompt)
        name, completion = str(model.model_name_or_path), training.max_completion_length
        work = Workload(
            name, *sizes, completion, steps, model.lora_r, training.seed, overrides, recipe_file=str(recipe_file)
        )
        return work, training.quantization

    def check(self) -> None:
        """Raise ValueError for an unknown shape and for numbers that make no step."""
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                why = "; the first step warms up and is not counted" if name == "steps" else ""
                raise ValueError(f"{name} is {getattr(self, name)}, and must be at least {least}{why}")
        self.config()
        if self.micro_batch is not None and self.sequences % self.micro_batch:
            raise ValueError(
                f"per_device_train_batch_size is {self.micro_batch}, which does not divide the {self.sequences} "
                "completions of a step"
            )

    @property
    def sequences(self) -> int:
        """Return the number of sequences of a step."""
        return self.groups * self.generations

    @property
    def length(self) -> int:
        """Return the tokens of a sequence."""
        return self.prompt + self.completion

    def config(self) -> dict[str, Any]:
        """Return the model's config.json. Raises ValueError for an unknown shape."""
        if not self.recipe_file:
            return config_json(self.shape)
        known = base_model.known_config(self.shape)
        if known is None:
            raise ValueError(
                f"{self.recipe_file}: the sizes of {self.shape} are not known here; name a folder with them"
            )
        return {key: value for key, value in known.items() if key != "quantization_config"}

    @property
    def micro_batch(self) -> int | None:
        """Return the sequences of a micro-batch; None if the memory plan decides, as in ``qerl train``."""
        chosen = dict(self.overrides).get("per_device_train_batch_size")
        return None if chosen is None else int(chosen)

    def recipe(self, arm: str, *, cuda: bool, engine_share: float | None = None) -> dict[str, Any]:
        """Return an arm's keys of ``qerl train``, without its paths.

        ``engine_share`` is the engine's share of the GPU's memory.
        """
        data = {"count": self.groups * self.steps, "length": self.prompt, "seed": self.seed}
        own: dict[str, Any] = {
            "dataset_name": NAME,
            "dataset_kwargs": json.dumps(data),
            "reward_funcs": NAME,
            "rollout_engine": NAME,
            # min_tokens would do the same, but takes the end out of the engine's probabilities alone
            "generation_kwargs": json.dumps({"ignore_eos": True}),
            "max_steps": self.steps,
            "bf16": cuda,
            "use_cpu": not cuda,
            "logging_strategy": "no",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
        if self.recipe_file:
            content = {key: value for key, value in read_yaml(self.recipe_file).items() if key not in REPLACED}
            if cuda:
                del own["bf16"]  # the recipe says in which numbers it computes
            return {**content, **own, **dict(self.overrides)}
        batches = {"generation_batch_size": self.sequences}
        if self.micro_batch is not None:
            batches = {"gradient_accumulation_steps": self.sequences // self.micro_batch}
        recipe: dict[str, Any] = {
            "quantization": arm,
            "learning_rate": LEARNING_RATE,
            "lora_r": self.rank,
            "lora_alpha": 2 * self.rank,
            "lora_target_modules": list(ATTENTION) if self.shape in MIXTURES else "all-linear",
            "max_prompt_length": self.prompt,
            "loss_type": "dapo",
            "epsilon_high": 0.28,
            "beta": 0.0,
            "num_generations": self.generations,
            "max_completion_length": self.completion,
            **batches,
            "optim": "adamw_torch_fused",
            "lr_scheduler_type": "constant",
            "gradient_checkpointing": True,
            "seed": self.seed,
            **own,
        }
        if engine_share is not None:
            recipe["vllm_gpu_memory_utilization"] = f"{engine_share:.4f}"
        return recipe | dict(self.overrides)


@dataclass(frozen=True)
class Request:
    """Hold what an arm's process is asked.

    ``flags`` are those of ``qerl train``. The checkpoint ``base`` is written if it is missing, ``packed`` or in BF16.
    ``training_part`` and ``profile`` say how often each is measured. ``memory`` is the number of bytes that may be
    used, None for all of the GPU.
    """

    flags: list[str]
    config: dict[str, Any]
    base: str
    packed: bool
    seed: int
    training_part: int
    profile: int
    memory: int | None


def flags(recipe: Mapping[str, Any]) -> list[str]:
    """Return a recipe as ``qerl train`` takes it from a command line."""
    texts = {key: json.dumps(value) if isinstance(value, dict) else value for key, value in recipe.items()}
    values = {key: value if isinstance(value, list) else [str(value)] for key, value in texts.items()}
    return [str(part) for key, parts in values.items() for part in (f"--{key}", *parts)]


def parse_overrides(arguments: Sequence[str], fixed: Collection[str] = FIXED) -> tuple[tuple[str, str], ...]:
    """Return ``--key value`` and ``--key=value`` as pairs.

    Raises ValueError for anything else, and for the keys ``fixed``, which the benchmark sets itself.
    """
    words = list(arguments)
    pairs: list[tuple[str, str]] = []
    while words:
        flag, has_value, value = words.pop(0).partition("=")
        if not flag.startswith("--") or not (has_value or words):
            raise ValueError(f"{flag!r} is neither an option of this command nor a flag of `qerl train` with a value")
        key = flag[2:].replace("-", "_")
        if key in fixed:
            raise ValueError(f"{key} is not for a flag: the arms and the options of this command decide it")
        pairs += up_to_date({key: value if has_value else words.pop(0)}, "command line").items()
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
    pieces: Figures = {"training_part": 0 if part == "step" else work.steps, "profile": int(profile), "memory": memory}
    steps = 1 if part == "training" else work.steps
    if part != "step" and work.micro_batch is not None and "recompute_layers" not in dict(work.overrides):
        # forward and backward alone take a longer row than the plan of such micro-batches knows of
        blocks = str(work.config()["num_hidden_layers"])
        work = replace(work, overrides=(*work.overrides, ("recompute_layers", blocks)))
    with ExitStack() as stack:
        stack.enter_context(ended_cleanly())
        if scratch is not None:
            scratch.mkdir(parents=True, exist_ok=True)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qerl-bench-", dir=scratch)))
        _check_disk(work, arms, folder)
        if memory is not None:
            stack.enter_context(ballast(memory))
        measured = {arm: _recipe(replace(work, steps=steps), arm, gpu, memory) for arm in arms}
        result: dict[str, Any] = {
            **asdict(work),
            "overrides": {key: hidden(value) for key, value in work.overrides},
            "order": "one after the other",
            "rounds": rounds,
            "memory_limit": memory,
            **conditions(),
            "arms": measured,
        }
        for number, arm in ((number, arm) for number in range(rounds) for arm in arms):
            if "failed" in measured[arm]:
                continue
            packed = arm == "qerl_nvfp4"
            base = str(folder / ("nvfp4" if packed else "bf16"))
            paths = {"model_name_or_path": base, "output_dir": str(folder / f"{arm}-{number}")}
            own_flags = flags({**measured[arm]["recipe"], **paths})
            _measure(measured[arm], Request(own_flags, work.config(), base, packed, work.seed, **pieces), number)
            result["summary"] = summarize(result)
            save(result, output)  # loading takes minutes, and a run may be cut short
    if output is not None:
        picture(result, output.with_suffix(".png"))
    show(result)
    return result


def _measure(measured: Figures, request: Request, number: int) -> None:
    """Run an arm once; put its figures, each with its round, or why it failed, into ``measured``."""
    try:
        answers = ask_once("qerl_recipes.bench.train_arm", asdict(request))
    except ArmFailedError as error:
        answers = {**error.figures, "failed": str(error)}
    for key in ANSWERS:
        measured.setdefault(key, []).extend({**answer, "round": number} for answer in answers.pop(key, []))
    measured.update(answers)


def _check(arms: Sequence[str], part: str, rounds: int, memory: int | None, gpu: Gpu | None, work: Workload) -> None:
    if unknown := sorted(set(arms) - set(ARMS)):
        raise ValueError(f"unknown arm {unknown[0]!r}; known: {', '.join(ARMS)}")
    if not arms or len(set(arms)) < len(arms):
        raise ValueError(f"arms are {', '.join(arms) or 'missing'}; name each of them once")
    if part not in PARTS_TO_RUN:
        raise ValueError(f"part is {part!r}; it is one of {', '.join(PARTS_TO_RUN)}")
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}, and must be at least 1")
    checkpointed = dict(work.overrides).get("recompute_layers")
    if part != "step" and work.micro_batch is not None and checkpointed == str(AS_FEW_AS_FIT):
        raise ValueError(
            f"recompute_layers: {checkpointed} keeps what leaves room for the rows of a step, and forward and "
            "backward alone take a longer one; measure --part step, or name a number of layers"
        )
    if "nf4" in arms and work.shape in MIXTURES:
        raise ValueError("arm nf4 (bitsandbytes) leaves experts in BF16; of a mixture measure bf16 and qerl_nvfp4")
    if gpu is None and "nf4" in arms:
        raise ValueError("arm nf4 (bitsandbytes) needs a CUDA GPU; on this machine measure bf16 and qerl_nvfp4")
    if memory is not None and gpu is None:
        raise ValueError("a limit of GPU memory needs a CUDA GPU; leave it out here")
    if memory is not None and gpu is not None and not 0 < memory <= gpu.memory:
        raise ValueError(f"the limit is {memory / GB:g} GB and the GPU has {gpu.memory / GB:.0f} GB")


def _check_disk(work: Workload, arms: Sequence[str], folder: Path) -> None:
    from qerl_recipes.bench.random_model import size

    needed = sum(size(work.config(), packed=packed) for packed in {arm == "qerl_nvfp4" for arm in arms})
    free = shutil.disk_usage(folder).free
    if needed > 0.95 * free:
        message = f"{folder.parent} has {free / GB:.1f} GB free and the checkpoints take {needed / GB:.1f} GB; "
        raise OSError(errno.ENOSPC, message + "name another folder with --scratch, or fewer arms")


def _recipe(work: Workload, arm: str, gpu: Gpu | None, memory: int | None) -> Figures:
    """Return an arm's recipe and, on a GPU with the engine's share in it, the bytes that the arm should take at most.

    Nothing is allocated on the GPU. ``memory`` is the limit, which decides what ``recompute_layers: -1`` and
    ``pack_tokens: -1`` mean. A recipe's own share of the engine stays.
    """
    if gpu is None:
        return {"recipe": work.recipe(arm, cuda=False), "planned_bytes": None}
    from qerl_recipes.memory.plan import make

    share = None
    for _ in range(1 if work.recipe_file else 2):  # the second time with the share that the first one found
        settings = parse(flags(work.recipe(arm, cuda=False, engine_share=share)))
        plan = make(*settings, gpu=gpu, config=work.config(), limit=memory)
        tokens = work.sequences * -(-work.length // BLOCK) * BLOCK
        share = min(SPARE * plan.engine_share(tokens) + SPARE_BYTES / gpu.memory, 0.95)
    print(f"{arm}: planned {plan.line()}{', ' if plan.choice() else ''}{plan.choice()}", flush=True)
    chosen = {"recompute_layers": plan.checkpointed, "pack_tokens": plan.pack_tokens}
    if not settings[1].gradient_checkpointing:
        del chosen["recompute_layers"]
    return {"recipe": {**work.recipe(arm, cuda=True, engine_share=share), **chosen}, "planned_bytes": plan.peak}


def summarize(result: Mapping[str, Any]) -> dict[str, Figures]:
    """Return medians and peaks for each arm that did not fail; the first step of a round only warms up."""
    arms = result["arms"].items()
    return {arm: _summary(result, figures) for arm, figures in arms if figures.get("steps") and "failed" not in figures}


def _summary(result: Mapping[str, Any], figures: Mapping[str, Any]) -> Figures:
    summary: Figures = {}
    steps, pieces = figures["steps"], figures["training_part"]
    if counted := _counted(steps):
        sequences = result["groups"] * result["generations"]
        seconds = {name: statistics.median(step["seconds"][name] for step in counted) for name in ("step", *PARTS)}
        differences = [step["metrics"]["logp_diff_mean"] for step in counted]
        summary |= {
            "seconds": seconds,
            "repeats": len(counted),
            "spread": spread([step["seconds"]["step"] for step in counted]),
            "rollout_tokens_per_s": sequences * result["completion"] / seconds["rollout"],
            "training_tokens_per_s": sequences * (result["prompt"] + result["completion"]) / seconds["training"],
            "swap_ms": 1e3 * seconds["swap"],
            "logp_diff_mean": statistics.fmean(differences) if None not in differences else None,
        }
    if counted := _counted(pieces):
        tokens, each = counted[0]["tokens"], [piece["seconds"] for piece in counted]
        summary["training_part"] = {
            "tokens": tokens,
            "seconds": statistics.median(each),
            "repeats": len(counted),
            "spread": spread(each),
            "tokens_per_s": tokens / statistics.median(each),
            "peak_gb": max(piece["memory"]["allocated"] for piece in pieces) / GB,
        }
    peaks = ("allocated", "reserved", "process")
    summary["peak_gb"] = {name: max(step["memory"][name] for step in steps) / GB for name in peaks}
    return summary


def _counted(answers: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return all answers but the first of each round."""
    rounds = groupby(answers, key=lambda answer: answer["round"])
    return [answer for _, of_round in rounds for answer in list(of_round)[1:]]


def show(result: Mapping[str, Any]) -> None:
    """Print the step, forward and backward alone, and what failed."""
    from rich.console import Console
    from rich.markup import escape

    console, summary = Console(width=150), result["summary"]
    if steps := {arm: figures for arm, figures in summary.items() if "seconds" in figures}:
        columns = ["seconds\nof a step", "step", "speed", *PARTS, "rollout\ntokens/s", "training\ntokens/s"]
        columns += ["swap\nms", "log p\ndifference", "peak GB,\ntorch", "peak GB,\nprocess"]
        first = next(iter(steps.values()))["seconds"]["step"]
        rows = [_step_row(arm, figures, first) for arm, figures in steps.items()]
        console.print(table(f"GRPO step: {title(result)}; arms {result['order']}", columns, rows))
    if parts := {arm: figures["training_part"] for arm, figures in summary.items() if "training_part" in figures}:
        columns = ["arm", "tokens", "seconds", "tokens/s", "speed", "peak GB, torch"]
        first = next(iter(parts.values()))["tokens_per_s"]
        rows = [
            [
                arm,
                f"{part['tokens']:,}",
                f"{part['seconds']:.3f} {around(part['spread'])}",
                f"{part['tokens_per_s']:,.0f}",
                f"{part['tokens_per_s'] / first:.2f}x",
                f"{part['peak_gb']:.1f}",
            ]
            for arm, part in parts.items()
        ]
        console.print(table("Forward and backward alone, one packed row", columns, rows))
    for arm, figures in result["arms"].items():
        if figures.get("profile"):
            profile = figures["profile"][0]
            heading = f"{arm}: {profile['kernels_ms']:.1f} ms of kernels in forward and backward"
            kernels = profile["kernels"][:SHOWN_KERNELS]
            rows = [[escape(kernel["name"]), f"{kernel['ms']:.1f}", f"{kernel['calls']:,}"] for kernel in kernels]
            console.print(table(heading, ["kernel", "ms", "calls"], rows))
    cached_tokens = result["groups"] * result["generations"] * (result["prompt"] + result["completion"])
    show_remarks(console, result["arms"], cached_tokens)


def _step_row(arm: str, figures: Mapping[str, Any], first: float) -> list[str]:
    seconds, difference, peak = figures["seconds"], figures["logp_diff_mean"], figures["peak_gb"]
    return [
        arm,
        f"{seconds['step']:.2f} {around(figures['spread'])}",
        f"{first / seconds['step']:.2f}x",
        *(f"{seconds[part]:.2f}" for part in PARTS),
        f"{figures['rollout_tokens_per_s']:,.0f}",
        f"{figures['training_tokens_per_s']:,.0f}",
        f"{figures['swap_ms']:.1f}",
        "" if difference is None else f"{difference:.4f}",
        f"{peak['allocated']:.1f}",
        f"{peak['process']:.1f}",
    ]


def title(result: Mapping[str, Any]) -> str:
    """Say what was measured, in one line."""
    return (
        f"{result['shape']} shapes, {result['groups']} groups of {result['generations']}, {result['prompt']} tokens in "
        f"and {result['completion']} out, LoRA rank {result['rank']}, {result['gpu']}, {result['date']}"
    )


def picture(result: Mapping[str, Any], file: Path) -> bool:
    """Draw a bar for each arm, made of the parts of a step; return False if there is nothing to draw."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import pandas as pd

    seconds = pd.DataFrame({arm: s["seconds"] for arm, s in result["summary"].items() if "seconds" in s}).T
    if seconds.empty:
        return False
    figure, axis = plt.subplots(figsize=(9, 1.2 + 0.7 * len(seconds)))
    seconds[list(PARTS)].plot.barh(stacked=True, color=COLORS, width=0.8, ax=axis)
    ends = seconds[list(PARTS)].sum(axis=1)
    for row, (end, step) in enumerate(zip(ends, seconds["step"], strict=True)):
        axis.text(end, row, f" {step:.3g} s, {seconds['step'].iloc[0] / step:.2f}x", va="center", fontsize=9)
    axis.set_xlim(0, 1.18 * max(ends))
    axis.invert_yaxis()
    axis.set_xlabel("seconds of a GRPO step")
    axis.set_title(title(result), fontsize=9)
    axis.legend(ncols=len(PARTS), fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.35), frameon=False)
    figure.savefig(file, dpi=110, bbox_inches="tight")
    plt.close(figure)
    return True
