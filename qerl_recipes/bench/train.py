"""``qerl bench train``: a whole GRPO step, rollout to optimizer, in each arm of an experiment.

Weights are random and of the real shapes, so nothing is downloaded. Prompts are random characters, every completion has
its full length, and rewards are random numbers that depend on the completion alone: the work is the same in all arms.

With ``--config`` the recipe is one of ``qerl train``: only checkpoint, data, reward and output are the benchmark's.
"""

import importlib.util
import json
import statistics
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console

from qerl_recipes.bench.arms import ArmFailedError, Figures, ask_once, ballast, ended_cleanly
from qerl_recipes.bench.results import around, conditions, save, show_remarks, spread, table
from qerl_recipes.files import base_model
from qerl_recipes.machine.gpu import GB, Gpu, gigabytes, installed_gpu
from qerl_recipes.recipe.checks import steps_per_rollout
from qerl_recipes.recipe.configs import parse
from qerl_recipes.recipe.file import flags, read_yaml, up_to_date
from qerl_recipes.recipe.keys import TOPICS
from qerl_recipes.recipe.shapes import ATTENTION, MIXTURES, config_json
from qerl_vllm_plugin.wire.address import hidden

OWN_ARMS = ("bf16", "nf4", "qerl_nvfp4")  # each a ``quantization`` of a recipe
TRL, FP8 = "trl_stock", "fp8_rollout"
ARMS = (*OWN_ARMS, TRL, FP8)
NAME = "bench"  # of the data set and of the reward
FP8_ENGINE = "bench_fp8"  # of arm fp8_rollout
# FlashRL's importance weights of tokens (https://github.com/yaof20/Flash-RL)
TRUNCATED = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0}
SHOWN_TRL_KEYS = ("vllm_enable_sleep_mode", "gradient_checkpointing", "use_liger_kernel")
MOST_TRL_TOKENS = 16384  # of a micro-batch of stock TRL, which recomputes all blocks: more are no faster
SHARE = "vllm_gpu_memory_utilization"
TRL_BYTES = 3_000_000_000  # of CUDA, adapter and allocator, which TRL holds beside its model when its engine starts
SPARE, SPARE_BYTES = 1.03, 2_000_000_000  # of the engine's memory, which is an estimate
BLOCK = 16  # tokens of a block of vLLM's KV cache
# what no flag may set, beside a recipe and without one
FIXED_BESIDE_A_RECIPE = {"model_name_or_path", "output_dir", "dataset_name", "dataset_kwargs", "rollout_engine"}
FIXED_BESIDE_A_RECIPE |= {"max_steps", "use_cpu", "model_revision"}
FIXED = {"quantization", "num_generations", "gradient_accumulation_steps", "lora_r", "seed", *FIXED_BESIDE_A_RECIPE}
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
PARTS = ("rollout", "scoring", "training", "swap", "sleep", "rest")  # of a step
PEAKS = ("allocated", "reserved", "process")
Flags = tuple[tuple[str, str], ...]  # of ``qerl train``: keys with their values


@dataclass(frozen=True)
class Workload:
    """Describe steps of ``groups`` prompts of ``prompt`` tokens, each with ``generations`` of ``completion`` tokens.

    ``overrides`` are flags of ``qerl train`` that override every arm's recipe; ``recipe_file`` is "" for our own.
    """

    shape: str
    groups: int
    generations: int
    prompt: int
    completion: int
    steps: int
    rank: int
    seed: int
    overrides: Flags = ()
    recipe_file: str = ""

    @staticmethod
    def of(recipe_file: Path, prompt: int, steps: int, overrides: Flags) -> "tuple[Workload, str]":
        """Return the steps of a recipe, and the arm that it is; raise ValueError for one that cannot be timed."""
        script, training, model = parse(["--config", str(recipe_file), *flags(dict(overrides))])
        if (served := steps_per_rollout(training)) > 1:
            raise ValueError(f"{recipe_file}: a rollout serves {served} steps, and a step with a rollout is timed")
        if (most := script.max_prompt_length) is not None and prompt > most:
            raise ValueError(f"--prompt is {prompt}, and max_prompt_length of {recipe_file} is {most}")
        sizes = (training.generation_batch_size // training.num_generations, training.num_generations, prompt)
        name, completion = str(model.model_name_or_path), training.max_completion_length
        work = Workload(name, *sizes, completion, steps, model.lora_r, training.seed, overrides, str(recipe_file))
        return work, training.quantization

    def check(self) -> None:
        """Raise ValueError for an unknown shape and for numbers that make no step."""
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                why = "; the first step warms up and is not counted" if name == "steps" else ""
                raise ValueError(f"{name} is {getattr(self, name)}, and must be at least {least}{why}")
        self.config()
        if self.micro_batch is not None and self.sequences % self.micro_batch:
            size = f"per_device_train_batch_size: {self.micro_batch}"
            raise ValueError(f"{size} does not divide the {self.sequences} completions of a step")

    @property
    def sequences(self) -> int:
        return self.groups * self.generations

    @property
    def length(self) -> int:
        return self.prompt + self.completion

    def config(self) -> dict[str, Any]:
        """Return the model's config.json. Raises ValueError for an unknown shape."""
        if not self.recipe_file:
            return config_json(self.shape)
        if (known := base_model.known_config(self.shape)) is None:
            raise ValueError(f"{self.recipe_file}: the sizes of {self.shape} are unknown here; name a folder with them")
        return {key: value for key, value in known.items() if key != "quantization_config"}

    @property
    def micro_batch(self) -> int | None:
        """Return the sequences of a micro-batch; None if the memory plan decides, as in ``qerl train``."""
        chosen = dict(self.overrides).get("per_device_train_batch_size")
        return None if chosen is None else int(chosen)

    def data(self) -> dict[str, int]:
        """Return the arguments of ``train_arm.random_prompts``."""
        return {"count": self.groups * self.steps, "length": self.prompt, "seed": self.seed}

    def recipe(self, arm: str, *, cuda: bool, engine_share: float | None = None) -> dict[str, Any]:
        """Return an arm's keys of ``qerl train``, without its paths, with the engine's share of the GPU's memory."""
        own: dict[str, Any] = {
            "dataset_name": NAME,
            "dataset_kwargs": json.dumps(self.data()),
            "reward_funcs": NAME,
            "rollout_engine": FP8_ENGINE if arm == FP8 else "vllm",
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
            **(TRUNCATED if arm == FP8 else {}),
            "quantization": arm if arm in OWN_ARMS else "bf16",
            "learning_rate": 1e-5,
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
            **({} if engine_share is None else {SHARE: f"{engine_share:.4f}"}),
        }
        return recipe | dict(self.overrides)


def parse_overrides(arguments: Sequence[str], fixed: Collection[str] = FIXED) -> Flags:
    """Return ``--key value`` and ``--key=value`` as pairs; raise ValueError for others and for ``fixed`` keys."""
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
    arms: Sequence[str] = OWN_ARMS,
    memory: int | None = None,
    scratch: Path | None = None,
    output: Path | None = None,
) -> dict[str, Any]:
    """Measure every arm, print the table, and write it to ``output`` as JSON.

    ``memory`` (bytes) limits what all processes together may hold of the GPU. An arm that fails is in the result with
    its reason. Raises ValueError for what cannot be measured, OSError where the checkpoints do not fit on the disk.
    """
    from qerl_recipes.bench.random_model import check_disk

    work.check()
    gpu = installed_gpu()
    _check(arms, memory, gpu, work)
    with ended_cleanly(), ExitStack() as stack:
        if scratch is not None:
            scratch.mkdir(parents=True, exist_ok=True)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qerl-bench-", dir=scratch)))
        check_disk(work.config(), folder, {arm == "qerl_nvfp4" for arm in arms})
        if memory is not None:
            stack.enter_context(ballast(memory))
        measured = {arm: _recipe(work, arm, gpu, memory) for arm in arms}
        about = asdict(work) | {"overrides": {key: hidden(value) for key, value in work.overrides}}
        result: dict[str, Any] = {**about, "memory_limit": memory, **conditions(), "arms": measured}
        for arm in arms:
            packed = arm == "qerl_nvfp4"
            base = str(folder / ("nvfp4" if packed else "bf16"))
            own_flags = flags({**measured[arm]["recipe"], "model_name_or_path": base, "output_dir": str(folder / arm)})
            # the checkpoint is written if it is missing; ``data`` describes the prompts to stock TRL alone
            request = {"flags": own_flags, "config": work.config(), "base": base, "packed": packed, "seed": work.seed}
            request |= {"memory": memory, "data": work.data() if arm == TRL else None}
            try:
                measured[arm] |= ask_once(f"qerl_recipes.bench.{'trl_arm' if arm == TRL else 'train_arm'}", request)
            except ArmFailedError as error:
                measured[arm] |= {**error.figures, "failed": str(error)}
            result["summary"] = summarize(result)
            save(result, output)  # loading takes minutes, and a run may be cut short
    show(result)
    return result


def _check(arms: Sequence[str], memory: int | None, gpu: Gpu | None, work: Workload) -> None:
    if unknown := sorted(set(arms) - set(ARMS)):
        raise ValueError(f"unknown arm {unknown[0]!r}; known: {', '.join(ARMS)}")
    if not arms or len(set(arms)) < len(arms):
        raise ValueError(f"arms are {', '.join(arms) or 'missing'}; name each of them once")
    if "nf4" in arms and work.shape in MIXTURES:
        raise ValueError("arm nf4 (bitsandbytes) leaves experts in BF16; of a mixture measure bf16 and qerl_nvfp4")
    if work.shape in MIXTURES and (merged := {TRL, FP8} & set(arms)):
        raise ValueError(f"arm {min(merged)} merges no adapter of a mixture; measure bf16 and qerl_nvfp4")
    if gpu is None and "nf4" in arms:
        raise ValueError("arm nf4 (bitsandbytes) needs a CUDA GPU; on this machine measure bf16 and qerl_nvfp4")
    if memory is not None and gpu is None:
        raise ValueError("a limit of GPU memory needs a CUDA GPU; leave it out here")
    if memory is not None and gpu is not None and not 0 < memory <= gpu.memory:
        raise ValueError(f"the limit is {memory / GB:g} GB and the GPU has {gpu.memory / GB:.0f} GB")


def _recipe(work: Workload, arm: str, gpu: Gpu | None, memory: int | None) -> Figures:
    """Return an arm's recipe, on a GPU with the engine's share, and the bytes that it should take within ``memory``."""
    if arm == TRL:
        return _trl_recipe(work, gpu, memory)
    if gpu is None:
        return {"recipe": work.recipe(arm, cuda=False), "planned_bytes": None}
    from qerl_recipes.memory.plan import make
    from qerl_recipes.memory.sizes import measure

    # an engine in FP8 is smaller than one in BF16 by a byte for each weight of a block
    saved = sum(linear.N * linear.K for linear in measure(work.config()).linears) if arm == FP8 else 0
    share = None
    for _ in range(1 if work.recipe_file else 2):  # the second time with the share that the first one found
        settings = parse(flags(work.recipe(arm, cuda=False, engine_share=share)))
        # The plan has a BF16 engine. While that sleeps, a smaller one leaves the trainer no more room, and its cache
        # is planned from the share of a BF16 one.
        room = 0 if settings[1].vllm_enable_sleep_mode else saved
        plan = make(*settings, gpu=gpu, config=work.config(), limit=(memory or gpu.memory) + room)
        tokens = work.sequences * -(-work.length // BLOCK) * BLOCK
        share = min(SPARE * (plan.engine_share(tokens) - room / gpu.memory) + SPARE_BYTES / gpu.memory, 0.95)
    smaller = f", {room / GB:.1f} GB of them not taken by an FP8 engine" if room else ""
    planned, choice = plan.at_full_length - room, f", {plan.choice()}" if plan.choice() else ""
    print(f"{arm}: planned {gigabytes(planned)}, for any lengths {plan.line()}{smaller}{choice}", flush=True)
    recomputed = {"recompute_layers": plan.checkpointed} if settings[1].gradient_checkpointing else {}
    recipe = {**work.recipe(arm, cuda=True, engine_share=share), **recomputed, "pack_tokens": plan.pack_tokens}
    return {"recipe": recipe, "planned_bytes": planned}


def _trl_recipe(work: Workload, gpu: Gpu | None, memory: int | None) -> Figures:
    """Return the keys of stock TRL for this work, with remarks on what they are; the rest is TRL's default.

    The engine's share is the bf16 arm's, or what TRL's model leaves of the memory, since TRL loads that first. The
    engine sleeps if the bf16 arm would not fit otherwise. Liger's kernels are on if they are installed.
    """
    import trl

    from qerl_recipes.memory.plan import SPARE as SPARE_OF_A_PLAN
    from qerl_recipes.memory.sizes import measure, trainer_weights

    known = {field.name for kind in (trl.GRPOConfig, trl.ModelConfig) for field in fields(kind)}
    asked, as_bf16, needs_sleep = dict(work.overrides), _recipe(work, "bf16", gpu, memory), False
    if gpu is not None:
        needs_sleep = as_bf16["planned_bytes"] > (1 - SPARE_OF_A_PLAN) * (memory or gpu.memory)
        loaded = trainer_weights(measure(work.config()), "bf16", shared=False) + TRL_BYTES
        keys, room = as_bf16["recipe"], ((memory or gpu.memory) - loaded) / gpu.memory
        if SHARE not in asked:
            keys[SHARE] = f"{min(float(keys[SHARE]), room):.4f}"
    sizes = (size for size in range(work.sequences, 0, -1) if work.sequences % size == 0)
    batch = work.micro_batch or next(size for size in sizes if size == 1 or size * work.length <= MOST_TRL_TOKENS)
    recipe = {
        "dtype": "bfloat16",
        "lora_dropout": 0.0,
        "vllm_enable_sleep_mode": needs_sleep,
        "use_liger_kernel": importlib.util.find_spec("liger_kernel") is not None,
        **{key: value for key, value in as_bf16["recipe"].items() if key in known - {"generation_batch_size"}},
        "use_vllm": True,
        "use_peft": True,
        "vllm_max_model_length": work.length,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": work.sequences // batch,
        "logging_strategy": "steps",
        "logging_steps": 1,
    }
    remarks = [
        f"TRL {trl.__version__} as released, its check of vLLM's version included; vLLM without plugins; micro-batches "
        f"of {batch}; " + ", ".join(f"{key}: {str(recipe[key]).lower()}" for key in SHOWN_TRL_KEYS)
    ]
    if gpu is None:
        remarks.append("on a CPU: vLLM without compilation, and with weights left unpacked, into which TRL loads")
    if left_out := sorted(asked.keys() - known):
        remarks.append(f"TRL has no {', '.join(left_out)}: left out")
    return {"recipe": recipe, "planned_bytes": None, "remarks": remarks}


def summarize(result: Mapping[str, Any]) -> dict[str, Figures]:
    """Return medians and peaks for each arm that did not fail; its first step only warms up."""
    whole = {arm: figures for arm, figures in result["arms"].items() if "steps" in figures and "failed" not in figures}
    sequences, summaries = result["groups"] * result["generations"], {}
    for arm, figures in whole.items():
        counted = figures["steps"][1:]
        seconds = {name: statistics.median(step["seconds"][name] for step in counted) for name in ("step", *PARTS)}
        differences = [step["metrics"]["logp_diff_mean"] for step in counted]
        summaries[arm] = {
            "seconds": seconds,
            "repeats": len(counted),
            "spread": spread([step["seconds"]["step"] for step in counted]),
            "rollout_tokens_per_s": sequences * result["completion"] / seconds["rollout"],
            "training_tokens_per_s": sequences * (result["prompt"] + result["completion"]) / seconds["training"],
            "logp_diff_mean": statistics.fmean(differences) if None not in differences else None,
            "peak_gb": {name: max(step["memory"][name] for step in figures["steps"]) / GB for name in PEAKS},
        }
    return summaries


def show(result: Mapping[str, Any]) -> None:
    """Print a row for each arm, and what failed."""
    console, summary = Console(width=160), result["summary"]
    if summary:
        columns = ["seconds\nof a step", "step", "speed", *PARTS, "rollout\ntokens/s", "training\ntokens/s"]
        columns += ["log p\ndifference", "peak GB,\ntorch", "peak GB,\nprocess"]
        first = next(iter(summary.values()))["seconds"]["step"]
        rows = []
        for arm, of in summary.items():
            seconds, difference = of["seconds"], of["logp_diff_mean"]
            cells = [arm, f"{seconds['step']:.2f} {around(of['spread'])}", f"{first / seconds['step']:.2f}x"]
            cells += [f"{seconds[part]:.3f}" for part in PARTS]
            cells += [f"{of[part]:,.0f}" for part in ("rollout_tokens_per_s", "training_tokens_per_s")]
            cells += ["" if difference is None else f"{difference:.4f}"]
            rows.append([*cells, *(f"{of['peak_gb'][kind]:.1f}" for kind in ("allocated", "process"))])
        work = (
            f"{result['shape']} shapes, {result['groups']} groups of {result['generations']}, {result['prompt']} "
            f"tokens in and {result['completion']} out, LoRA rank {result['rank']}, {result['gpu']}, {result['date']}"
        )
        console.print(table(f"GRPO step: {work}; arms one after the other", columns, rows))
    cached_tokens = result["groups"] * result["generations"] * (result["prompt"] + result["completion"])
    show_remarks(console, result["arms"], cached_tokens)
