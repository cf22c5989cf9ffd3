"""Check everything about a recipe that can be refused before a model loads, and report all of it in one error."""

import json
import warnings
from collections.abc import Iterator

from datasets import Dataset

from qerl_recipes.files.adapter import CONFIG, open_adapter
from qerl_recipes.hooks import unknown_names
from qerl_recipes.model import shared_weights
from qerl_recipes.recipe import checks
from qerl_recipes.recipe.checks import WITHOUT_SCALE
from qerl_recipes.recipe.configs import SERVER, GRPOConfig, ModelConfig, ScriptArguments
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.recipe.keys import CANNOT_RUN
from qerl_recipes.tasks import answer_columns, rewards
from qerl_recipes.tasks import prompts as data
from qerl_recipes.train.base_fits import misfits
from qerl_recipes.train.dynamic_sampling import TOTAL
from qerl_recipes.train.requirements import lacking
from qerl_vllm_plugin.server.token import TOKEN, TOKEN_FILE, configured_token

IMAGES = {"image", "images"}  # columns from which TRL takes pictures


def validate(script: ScriptArguments, training: GRPOConfig, model: ModelConfig) -> None:
    """Refuse a recipe that cannot run as it is written; nothing has been loaded or written when this raises.

    Raises ConfigError (a ValueError) with one line for each thing that is wrong. Such things are a key that cannot be
    honoured, an unknown reward, data set, schedule or engine, a missing column, or a checkpoint that does not fit the
    arm. Reading the data set may download it.
    """
    problems = [
        *checks.problems(script, training, model),
        *unknown_names(training),
        *lacking(training, model),
        *_engine(training),
        *_start(script, training),
        *checks.server_problems(training),
        *_token(training),
        *_sharing(training),
        *misfits(script, training, model),
        *_data_and_rewards(script, training),
    ]
    if problems:
        raise ConfigError(f"{CANNOT_RUN}:\n" + "\n".join(f"  - {problem}" for problem in problems))
    for line in checks.without_effect(training):
        warnings.warn(line, stacklevel=2)


def uneven_evaluation(training: GRPOConfig, problems: int) -> str | None:
    """Say why the means of an evaluation on ``problems`` held-out problems would be wrong, with the way out; or None.

    TRL takes the mean over its batches, each as large as all processes compute at a time. The last one counts as much
    as any other, however small it is.
    """
    group, processes = training.num_generations_eval or training.num_generations, training.world_size
    size, completions = training.per_device_eval_batch_size, problems * group
    if completions % (size * processes) == 0:
        return None
    whole = [n for n in range(size, 0, -1) if completions % (n * processes) == 0 == n * processes % group]
    more = ", and is filled up with problems that were counted already" if processes > 1 else ""
    change = f"per_device_eval_batch_size: {whole[0]}" if whole else f"a multiple of {processes} held-out problems"
    return (
        f"an evaluation takes {problems} held-out problems x {group} completions, {size * processes} at a time: the "
        f"last batch is smaller and counts as much as any other{more}; use {change}"
    )


def _engine(training: GRPOConfig) -> Iterator[str]:
    if training.vllm_mode == SERVER:
        return
    if training.vllm_enable_sleep_mode and training.device.type != "cuda":
        yield "vllm_enable_sleep_mode needs a CUDA GPU; on a CPU leave it out"
    if training.world_size % training.vllm_tensor_parallel_size:
        yield (
            f"vllm_tensor_parallel_size ({training.vllm_tensor_parallel_size}) must divide the number of trainer "
            f"processes ({training.world_size}); start that many with accelerate launch"
        )


def _token(training: GRPOConfig) -> Iterator[str]:
    """Yield what is wrong with the admin token under which the policy is pushed to a server."""
    if training.vllm_mode != SERVER:
        return
    try:
        if configured_token() is None:
            yield (
                f"vllm_mode: {SERVER} pushes the policy under the server's admin token; export {TOKEN_FILE}=FILE or "
                f"{TOKEN}, the same for server and trainer"
            )
    except ValueError as error:
        yield f"vllm_mode: {SERVER}: {error}"


def _sharing(training: GRPOConfig) -> Iterator[str]:
    if training.share_weights and (reason := shared_weights.obstacle(training)):
        yield f"share_weights: {reason}; use share_weights: false"


def _start(script: ScriptArguments, training: GRPOConfig) -> Iterator[str]:
    """Yield what is wrong with the adapter that training starts from."""
    start = script.adapter_name_or_path
    if start is not None:
        try:
            (saved := open_adapter(start)).check_plain()
            saved.check_tensors()
        except ValueError as error:
            yield f"adapter_name_or_path: {error}"
            return
        file = saved.path / CONFIG
        if saved.config.get("lora_dropout"):
            yield (
                f"adapter_name_or_path: {file} has lora_dropout: {saved.config['lora_dropout']}, which would drop "
                "activations in the trainer only; set it to 0 there, which leaves the weights as they are"
            )
        if saved.config["lora_alpha"] == 0:
            yield f"adapter_name_or_path: {file}: lora_alpha: 0 {WITHOUT_SCALE}; begin from another adapter"
        if training.beta and saved.has_norms:
            yield f"beta needs a reference without trained norms, and {start} has some; use beta: 0"


def _data_and_rewards(script: ScriptArguments, training: GRPOConfig) -> Iterator[str]:
    if not script.reward_funcs:
        yield "reward_funcs is empty"
        return
    weights = training.reward_weights
    if weights is not None and len(weights) != len(script.reward_funcs):
        yield (
            f"reward_weights has {len(weights)} numbers for {len(script.reward_funcs)} reward_funcs; give "
            f"one each, as --reward_weights {' '.join(['1.0'] * len(script.reward_funcs))}"
        )
    resolved = {}
    for name in script.reward_funcs:
        try:
            resolved[name] = rewards.resolve([name], script)[0]
        except ValueError as error:
            yield str(error)
    names = [getattr(resolved[name], "__name__", "") for name in script.reward_funcs if name in resolved]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield (
            f"reward_funcs: {', '.join(twice)} is the name of several, whose means would be mixed in "
            f"rewards/{twice[0]}/mean; list each once, and give functions of your own names (__name__) that differ"
        )
    if (metric := training.dynamic_sampling_metric) not in (None, TOTAL, *names) and len(names) == len(
        script.reward_funcs
    ):
        yield f"dynamic_sampling_metric: {metric!r} is not one of the rewards: {', '.join([*names, TOTAL])}"
    try:
        train, held_out = data.read(script)
    except ConfigError as error:
        yield str(error)
        return
    splits = {"training": train}
    if held_out is not None and training.eval_strategy != "no":
        splits["held-out"] = held_out
    for split, rows in splits.items():
        yield from _unusable_columns(split, rows)
    for name, reward in resolved.items():
        for split, rows in splits.items():
            if missing := sorted(rewards.required_columns(reward) - set(rows.column_names)):
                rename = json.dumps({"columns": {"OLD": missing[0]}})
                yield (
                    f"reward {name} reads the column {', '.join(missing)}, which the {split} data lack; they have "
                    f"{', '.join(sorted(rows.column_names))}. To rename one: --dataset_kwargs '{rename}'"
                )
            yield from answer_columns.misfits(name, rows, split)
    prompts = training.generation_batch_size // training.num_generations
    if len(train) < prompts:
        yield (
            f"a rollout takes {prompts} prompts and the data have {len(train)}; lower per_device_train_batch_size, or "
            f"gradient_accumulation_steps, to at most {len(train) * training.num_generations} completions a rollout "
            f"(now {training.generation_batch_size})"
        )
    if training.eval_strategy != "no" and held_out is None:
        yield (
            f"eval_strategy: {training.eval_strategy.value} needs held-out problems, and there is no split "
            f"{script.dataset_test_split!r}; give a folder with train.jsonl and test.jsonl as dataset_name, name "
            "another dataset_test_split, or cut one split in two: dataset_train_split: 'train[:90%]' and "
            "dataset_test_split: 'train[90%:]'. Without evaluation: eval_strategy: 'no'"
        )


def _unusable_columns(split: str, rows: Dataset) -> Iterator[str]:
    """Yield a line for each column that TRL cannot pass to a reward, or that it takes for pictures."""
    for name in sorted(set(rows.column_names) & (rewards.PASSED_BY_TRL | IMAGES)):
        why = "is read as pictures, and a policy here reads text" if name in IMAGES else "is what TRL calls its own"
        rename = json.dumps({"columns": {name: f"my_{name}"}})
        yield (
            f"the column {name} of the {split} data {why}; remove it, or rename it (a file of your own: "
            f"--dataset_kwargs '{rename}')"
        )
