"""Check everything about a recipe that can be refused before a model loads, and report all of it in one error."""

import json
import warnings
from collections.abc import Callable, Iterator

from datasets import Dataset

from qerl_recipes.files.adapter import CONFIG, ENGINE_RANKS, WITHOUT_ADAPTER, open_adapter
from qerl_recipes.hooks import find
from qerl_recipes.model import shared_weights
from qerl_recipes.recipe import server_keys
from qerl_recipes.recipe.configs import GRPOConfig, ModelConfig
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.recipe.keys import CANNOT_RUN, refusals
from qerl_recipes.recipe.script_arguments import ScriptArguments
from qerl_recipes.rollout.sampling import SMALLEST_TEMPERATURE, sampling_parameters, wrong_bias
from qerl_recipes.tasks import answer_columns, rewards
from qerl_recipes.tasks import prompts as data
from qerl_recipes.train.base_fits import misfits
from qerl_recipes.train.dynamic_sampling import TOTAL
from qerl_recipes.train.requirements import lacking
from qerl_recipes.train.silent_rows import reason_to_keep

CHOICES = {
    "vllm_mode": ("colocate", server_keys.SERVER),
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"),
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}
# generation_kwargs can set neither OURS, which the engine sets, nor KEYS, recipe keys that the trainer reads too
OURS = {"n", "seed", "logprobs", "flat_logprobs", "max_tokens"}
KEYS = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
NARROWING = {"presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "allowed_token_ids", "min_tokens"}
WITHOUT_SCALE = "multiplies the adapter by 0, so that nothing would be trained"
BY_EVALUATION = ("reduce_lr_on_plateau", "greedy")  # schedulers of the learning rate
IMAGES = {"image", "images"}  # columns from which TRL takes pictures


def validate(script: ScriptArguments, training: GRPOConfig, model: ModelConfig) -> None:
    """Refuse a recipe that cannot run as it is written; nothing has been loaded or written when this raises.

    Raises ConfigError (a ValueError) with one line for each thing that is wrong. Such things are a key that cannot be
    honoured, an unknown reward, data set, schedule or engine, a missing column, or a checkpoint that does not fit the
    arm. Reading the data set may download it.
    """
    problems = [
        *problems_of_keys(script, training, model),
        *lacking(training, model),
        *_engine(training),
        *_start(script, training),
        *server_keys.problems(training),
        *_sharing(training),
        *misfits(script, training, model),
        *_data_and_rewards(script, training),
    ]
    if problems:
        raise ConfigError(f"{CANNOT_RUN}:\n" + "\n".join(f"  - {problem}" for problem in problems))
    if "wandb" not in (training.report_to or ()):
        keys = ("wandb_entity", "wandb_project", "wandb_run_group")
        if without_effect := [key for key in keys if getattr(training, key) is not None]:
            warnings.warn(
                f"{', '.join(without_effect)}: without effect, for report_to has no wandb; add it, or remove them",
                stacklevel=2,
            )
    if without_effect := list(server_keys.without_effect(training)):
        warnings.warn("; ".join(without_effect), stacklevel=2)
    if narrows := list(narrowing(training)):
        weights = "correct for it" if training.vllm_importance_sampling_correction else "are off"
        warnings.warn(
            f"{', '.join(narrows)}: completions are drawn from a part of the policy's distribution, and the "
            "trainer's log-probabilities are of the whole. The share that is left out adds to logp_mismatch, which "
            f"then tells less of rounding, and importance weights, which fall below 1 by it, {weights}",
            stacklevel=2,
        )


def problems_of_keys(script: ScriptArguments, training: GRPOConfig, model: ModelConfig) -> list[str]:
    """Return a line for each thing that is wrong with the keys themselves, whatever machine, model and data are."""
    return [
        *refusals(script, training, model),
        *_choices(training),
        *_names(training),
        *_boundaries(training),
        *_lengths(script, training),
        *_generation(training),
        *_sampling(training),
        *_precision(training, model),
        *_adapter(training, model),
    ]


def narrowing(training: GRPOConfig) -> Iterator[str]:
    """Yield the keys that take tokens out of the sampling distribution or change the probabilities of the rest.

    Keys of the recipe come with their values, those of ``generation_kwargs`` by name.
    """
    narrows = {
        "top_p": training.top_p < 1,
        "top_k": training.top_k > 0,
        "min_p": bool(training.min_p),
        "repetition_penalty": training.repetition_penalty != 1,
        "vllm_structured_outputs_regex": training.vllm_structured_outputs_regex is not None,
    }
    yield from (f"{key}: {getattr(training, key)}" for key, narrow in narrows.items() if narrow)
    generation_kwargs = training.generation_kwargs or {}
    yield from (
        f"generation_kwargs: {key}" for key in sorted(generation_kwargs) if key in {*NARROWING, "structured_outputs"}
    )


def _choices(training: GRPOConfig) -> Iterator[str]:
    for key, allowed in CHOICES.items():
        if (value := getattr(training, key)) not in allowed:
            yield f"{key} cannot be {value!r}; it is one of {', '.join(allowed)}"
    if training.do_eval and training.eval_strategy == "no":
        yield (
            "do_eval: true evaluates nothing by itself; say when: eval_strategy: steps (with eval_steps) or epoch, or "
            "do_eval: false"
        )
    if training.eval_on_start and training.eval_strategy == "no":
        yield (
            "eval_on_start: true is the first of the evaluations of a run, and there are none; say when: "
            "eval_strategy: steps (with eval_steps) or epoch, or eval_on_start: false"
        )
    if training.lr_scheduler_type in BY_EVALUATION:
        yield (
            f"lr_scheduler_type: {training.lr_scheduler_type.value} goes by the loss of an evaluation, which says "
            "nothing of a policy that learns from rewards; use linear, cosine or another that goes by the step"
        )
    weighs = training.vllm_importance_sampling_correction
    if training.loss_type == "vespo" and weighs and training.vllm_importance_sampling_mode.startswith("sequence"):
        yield (
            f"loss_type: vespo weighs tokens, not sequences: vllm_importance_sampling_mode cannot be "
            f"{training.vllm_importance_sampling_mode}; use token_truncate or token_mask"
        )
    grouped = training.scale_rewards != "batch" and training.multi_objective_aggregation == "sum_then_normalize"
    if training.dynamic_sampling and not grouped:
        yield (
            "dynamic_sampling replaces groups, so advantages must come from the group alone; use scale_rewards: group "
            "(or none) and multi_objective_aggregation: sum_then_normalize"
        )
    local = training.per_device_train_batch_size * training.steps_per_generation
    if training.dynamic_sampling and training.world_size > 1 and local % training.num_generations:
        yield (
            "dynamic_sampling with several processes needs whole groups on each: per_device_train_batch_size x "
            f"steps_per_generation ({local}) must be a multiple of num_generations ({training.num_generations})"
        )
    if training.skip_silent_rows and (reason := reason_to_keep(training)) is not None:
        yield f"skip_silent_rows: true cannot go with {reason}, which needs every completion; leave one of the two out"
    ends = [key for key in ("stop", "stop_token_ids") if (training.generation_kwargs or {}).get(key)]
    if ends and training.mask_truncated_completions:
        yield (
            "mask_truncated_completions: TRL takes a completion without an end-of-sequence token for truncated, and "
            f"generation_kwargs: {ends[0]} ends it so, which would mask them all; leave one of the two out"
        )


def _names(training: GRPOConfig) -> Iterator[str]:
    if training.noise_mode != "none":
        yield from _failure(lambda: find("qerl_noise_schedules", training.noise_schedule), "noise_schedule")
        if not training.noise_targets:
            yield "noise_targets is empty; for no noise use noise_mode: none"
    yield from _failure(lambda: find("qerl_rollout_engines", training.rollout_engine), "rollout_engine")


def _failure(check: Callable[[], object], key: str) -> Iterator[str]:
    try:
        check()
    except ValueError as error:
        yield f"{key}: {error}"


def steps_per_rollout(training: GRPOConfig) -> int:
    """Return the number of optimizer steps that one rollout serves; raise ConfigError if it is not whole."""
    micro_steps = training.steps_per_generation * training.num_iterations
    if micro_steps % training.gradient_accumulation_steps:
        raise ConfigError(
            f"a rollout must serve whole optimizer steps: steps_per_generation x num_iterations ({micro_steps}) must "
            f"be a multiple of gradient_accumulation_steps ({training.gradient_accumulation_steps})"
        )
    return micro_steps // training.gradient_accumulation_steps


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


def _boundaries(training: GRPOConfig) -> Iterator[str]:
    """Yield what is wrong with the saving keys; checkpoints fall between rollouts, so that a resume repeats none."""
    try:
        steps = steps_per_rollout(training)
    except ConfigError as error:
        yield str(error)
        return
    if training.save_strategy == "steps" and training.save_steps >= 1 and training.save_steps % steps:
        yield (
            f"save_steps: {training.save_steps:g} does not fall between rollouts, each of which serves {steps} steps; "
            f"use a multiple of {steps}, or save_strategy: epoch"
        )
    if training.save_strategy == "best":
        yield "save_strategy: best needs a metric that reward is not; use steps or epoch"


def _lengths(script: ScriptArguments, training: GRPOConfig) -> Iterator[str]:
    """Yield a line if prompt and completion do not fit into ``vllm_max_model_length``."""
    longest, completion, prompt = (
        training.vllm_max_model_length, training.max_completion_length, script.max_prompt_length
    )  # fmt: skip
    if longest is not None and longest <= completion:
        yield (
            f"vllm_max_model_length ({longest}) leaves no room for a prompt beside max_completion_length ({completion})"
        )
    elif longest is not None and prompt is not None and prompt + completion > longest:
        yield (
            f"max_prompt_length ({prompt}) + max_completion_length ({completion}) is {prompt + completion}, more than "
            f"vllm_max_model_length ({longest}), at which completions would be cut off; raise it or lower one of them"
        )


def _generation(training: GRPOConfig) -> Iterator[str]:
    if wrong := sorted(OURS & (training.generation_kwargs or {}).keys()):
        yield (
            f"generation_kwargs cannot set {', '.join(wrong)}: each completion has a seed of its own and its "
            "log-probabilities; max_completion_length and num_generations are keys"
        )
    if twice := sorted(KEYS & (training.generation_kwargs or {}).keys()):
        yield (
            f"generation_kwargs cannot set {', '.join(twice)}: the engine would sample with one value and the trainer "
            f"compute log-probabilities with another; use the key {twice[0]} itself"
        )
    if (wrong_one := wrong_bias(training.generation_kwargs or {})) is not None:
        yield f"generation_kwargs: {wrong_one}"
    if training.vllm_structured_outputs_regex is not None and "structured_outputs" in (
        training.generation_kwargs or {}
    ):
        yield "generation_kwargs: structured_outputs beside vllm_structured_outputs_regex would be ignored; remove one"


def _engine(training: GRPOConfig) -> Iterator[str]:
    if server_keys.is_wanted(training):
        return
    if training.vllm_enable_sleep_mode and training.device.type != "cuda":
        yield "vllm_enable_sleep_mode needs a CUDA GPU; on a CPU leave it out"
    if training.world_size % training.vllm_tensor_parallel_size:
        yield (
            f"vllm_tensor_parallel_size ({training.vllm_tensor_parallel_size}) must divide the number of trainer "
            f"processes ({training.world_size}); start that many with accelerate launch"
        )


def _sampling(training: GRPOConfig) -> Iterator[str]:
    """Yield what vLLM's SamplingParams would refuse at the first rollout, or change."""
    if not training.temperature >= SMALLEST_TEMPERATURE:
        yield (
            f"temperature must be at least {SMALLEST_TEMPERATURE}, not {training.temperature}: the log-probabilities "
            "of the trainer are divided by it, and vLLM samples with no smaller one"
        )
    elif training.rollout_engine == "vllm":
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError

        parameters = sampling_parameters(training).items()
        own_parameters = {name: value for name, value in parameters if name not in {*OURS, "structured_outputs"}}
        try:
            SamplingParams(**own_parameters, max_tokens=training.max_completion_length)
        except (TypeError, ValueError, VLLMValidationError) as error:
            yield f"{', '.join(sorted(KEYS))}, generation_kwargs: vLLM takes no such SamplingParams: {error}"


def _sharing(training: GRPOConfig) -> Iterator[str]:
    if training.share_weights and (reason := shared_weights.obstacle(training)):
        yield f"share_weights: {reason}; use share_weights: false"


def _precision(training: GRPOConfig, model: ModelConfig) -> Iterator[str]:
    """Yield a line for each clash of dtypes: between engine and trainer, or of float16 with nf4."""
    if training.fp16 and model.dtype != "float16":
        yield (
            f"fp16: true with dtype: {model.dtype}: the engine would compute in {model.dtype} and the trainer in "
            "float16; use dtype: float16, or fp16: false"
        )
    if training.bf16 and model.dtype == "float16":
        yield (
            "bf16: true (the default without fp16) with dtype: float16: the engine would compute in float16 and the "
            "trainer in bfloat16; use fp16: true and bf16: false, or dtype: bfloat16"
        )
    if training.bf16 and model.dtype == "float32":
        yield (
            "bf16: true (the default without fp16) with dtype: float32: the engine would compute in float32 and the "
            "trainer in bfloat16; use bf16: false, or dtype: bfloat16"
        )
    if training.quantization == "nf4" and model.dtype == "float16":
        yield "dtype: float16 with quantization: nf4 is not supported; use dtype: bfloat16, or another arm"


def _adapter(training: GRPOConfig, model: ModelConfig) -> Iterator[str]:
    if not 1 <= model.lora_r <= ENGINE_RANKS[-1]:
        yield f"lora_r must be 1 to {ENGINE_RANKS[-1]}, which is what vLLM serves, not {model.lora_r}"
    if model.lora_alpha == 0:
        yield f"lora_alpha: 0 {WITHOUT_SCALE}; use {2 * model.lora_r}, twice lora_r, for a start"
    targets = model.lora_target_modules or []
    if wrong := WITHOUT_ADAPTER & set([targets] if isinstance(targets, str) else targets):
        yield f"lora_target_modules: {', '.join(sorted(wrong))} takes no adapter; name linear layers of the blocks"
    if model.lora_target_modules == []:
        yield "lora_target_modules is empty; name linear layers of the blocks, or all-linear"
    if training.train_norms and training.beta:
        yield "beta needs a reference without trained norms; with train_norms use beta: 0"


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
