"""Refuse what the keys of a recipe alone decide, whatever machine, model and data are.

`qerl train`, `qerl study` and `qerl calibration-texts` ask here. Each check yields a line for each thing that is wrong:
it names the key, the limit and the way out.
"""

import math
from collections.abc import Iterator

import torch
from transformers import SchedulerType, get_scheduler

from qerl_recipes.recipe import drafts
from qerl_recipes.recipe.configs import SERVER, WANDB, GRPOConfig, ModelConfig, ScriptArguments
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.recipe.generation import SMALLEST_TEMPERATURE, refused_by_vllm, sampling_parameters
from qerl_recipes.recipe.keys import ENGINE_RANKS, WITHOUT_ADAPTER, refusals
from qerl_recipes.recipe.server_keys import DEFAULTS

CHOICES = {
    "vllm_mode": ("colocate", SERVER),
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"),
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}
# generation_kwargs can set neither SET_BY_ENGINE, nor KEYS, recipe keys that the trainer reads too
SET_BY_ENGINE = {"n", "seed", "logprobs", "flat_logprobs", "max_tokens"}
KEYS = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
NARROWING = {"presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "allowed_token_ids", "min_tokens"}
WITHOUT_SCALE = "multiplies the adapter by 0, so that nothing would be trained"
BY_EVALUATION = ("reduce_lr_on_plateau", "greedy")  # schedulers of the learning rate

# keys of memory that an engine in the trainer's process takes -> what to set on a server instead
ENGINE_KEYS = {
    "vllm_gpu_memory_utilization": "--gpu-memory-utilization of the server",
    "vllm_kv_cache_memory_bytes": "--kv-cache-memory-bytes of the server",
    "vllm_enable_sleep_mode": "the server keeps its memory while the trainer works",
}
CLIPPING_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # they clip at 1 - epsilon and at 1 + epsilon_high
# keys -> the key and, unless any but 0, false and none will do, its values, without which they do nothing
NEEDS: dict[str, tuple[str, tuple[str, ...] | None]] = {
    "scale_rewards": ("multi_objective_aggregation", ("sum_then_normalize",)),
    "epsilon delta": ("loss_type", CLIPPING_LOSSES),
    "epsilon_high": ("loss_type", (*CLIPPING_LOSSES, "cispo")),
    "sapo_temperature_neg sapo_temperature_pos": ("loss_type", ("sapo",)),
    "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg": ("loss_type", ("vespo",)),
    "use_bias_correction_kl": ("beta", None),
    "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target": ("use_adaptive_entropy", None),
    "vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min": (
        *("vllm_importance_sampling_correction", None),
    ),
    "dynamic_sampling_max_rounds": ("dynamic_sampling", None),
    "noise_schedule": ("noise_mode", ("engine", "engine_is", "both")),
    "eval_steps": ("eval_strategy", ("steps",)),
    "eval_delay num_generations_eval per_device_eval_batch_size": ("eval_strategy", ("steps", "epoch")),
    "save_steps": ("save_strategy", ("steps", "no")),  # a flag that saves nothing stands above recipes that save
    "logging_steps": ("logging_strategy", ("steps", "no")),
    "gradient_checkpointing_kwargs": ("gradient_checkpointing", None),
    "lr_scheduler_kwargs warmup_steps": ("lr_scheduler_type", (*{*SchedulerType} - {SchedulerType.CONSTANT},)),
    "num_completions_to_print log_unique_prompts": ("log_completions", None),
}
# optimizers that read optim_args -> the names that they know; a weight_decay there would lose to the key
OPTIMIZER_ARGUMENTS = {
    "sgd": ("momentum", "dampening", "nesterov"),
    "adagrad": ("lr_decay", "eps"),
    "rmsprop": ("momentum", "alpha", "eps", "centered"),
}


def problems(script: ScriptArguments, training: GRPOConfig, model: ModelConfig) -> list[str]:
    """Return a line for each thing that is wrong with the keys themselves."""
    return [
        *refusals(script, training, model),
        *_choices(training),
        *_evaluation(training),
        *_loss(training),
        *_dynamic_sampling(training),
        *_boundaries(training),
        *_lengths(script, training),
        *_tools(script, training),
        *drafts.problems(training),
        *_overlap(script, training),
        *_generation(training),
        *_sampling(training),
        *_precision(training, model),
        *_adapter(training, model),
        *_optimization(training),
    ]


def steps_per_rollout(training: GRPOConfig) -> int:
    """Return the number of optimizer steps that one rollout serves; raise ConfigError if it is not whole."""
    micro_steps = training.steps_per_generation * training.num_iterations
    if micro_steps % training.gradient_accumulation_steps:
        raise ConfigError(
            f"a rollout must serve whole optimizer steps: steps_per_generation x num_iterations ({micro_steps}) must "
            f"be a multiple of gradient_accumulation_steps ({training.gradient_accumulation_steps})"
        )
    return micro_steps // training.gradient_accumulation_steps


def needs_every_completion(training: GRPOConfig) -> str | None:
    """Return the recipe key by which completions with an advantage of 0 matter; None if there is none."""
    reasons = {
        "pack_tokens: 0": not training.pack_tokens,
        f"beta: {training.beta:g}": training.beta != 0,
        f"entropy_coef: {training.entropy_coef}": bool(training.entropy_coef),
        "use_adaptive_entropy": training.use_adaptive_entropy,
        f"top_entropy_quantile: {training.top_entropy_quantile:g}": training.top_entropy_quantile != 1,
        "off_policy_mask_threshold": training.off_policy_mask_threshold is not None,
        "loss_type: vespo": training.loss_type == "vespo",  # its metric is a mean over all rows
    }
    return next((key for key, applies in reasons.items() if applies), None)


def narrowing(training: GRPOConfig) -> Iterator[str]:
    """Yield the keys, those of the recipe with values, that change which tokens are drawn, or how probably."""
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


def without_effect(training: GRPOConfig) -> Iterator[str]:
    """Yield a warning, with the way out, for keys that do nothing, or that make logp_diff less telling."""
    named = [key for key in WANDB if getattr(training, key) is not None]
    if named and "wandb" not in (training.report_to or ()):
        yield f"{', '.join(named)}: without effect, for report_to has no wandb; add it, or remove them"
    lacking: dict[str, str] = {}
    for keys, (other, values) in NEEDS.items():
        value = getattr(training, other)
        if not (value if values is None else value in values):
            lacking |= dict.fromkeys(keys.split(), f"{other}: {getattr(value, 'value', value)}")
    if training.vllm_mode == SERVER:
        lacking |= {key: f"vllm_mode: {SERVER} ({instead})" for key, instead in ENGINE_KEYS.items()}
    if unused := [
        f"{key}: {value} has no effect with {what}"
        for key, what in lacking.items()
        if (value := getattr(training, key)) != DEFAULTS[key]
    ]:
        yield "; ".join(unused)
    if narrows := list(narrowing(training)):
        weights = "correct for it" if training.vllm_importance_sampling_correction else "are off"
        yield (
            f"{', '.join(narrows)}: completions are drawn from a part of the policy's distribution, and the "
            "trainer's log-probabilities are of the whole. The share that is left out adds to logp_diff, which "
            f"then tells less of rounding, and importance weights, which fall below 1 by it, {weights}"
        )


def _choices(training: GRPOConfig) -> Iterator[str]:
    for key, allowed in CHOICES.items():
        if (value := getattr(training, key)) not in allowed:
            yield f"{key} cannot be {value!r}; it is one of {', '.join(allowed)}"
    if training.noise_mode != "none" and not training.noise_targets:
        yield "noise_targets is empty; for no noise use noise_mode: none"


def _evaluation(training: GRPOConfig) -> Iterator[str]:
    when = "say when: eval_strategy: steps (with eval_steps) or epoch, or"
    if training.do_eval and training.eval_strategy == "no":
        yield f"do_eval: true evaluates nothing by itself; {when} do_eval: false"
    if training.eval_on_start and training.eval_strategy == "no":
        yield (
            "eval_on_start: true is the first of the evaluations of a run, and there are none; "
            f"{when} eval_on_start: false"
        )
    if training.lr_scheduler_type in BY_EVALUATION:
        yield (
            f"lr_scheduler_type: {training.lr_scheduler_type.value} goes by the loss of an evaluation, which says "
            "nothing of a policy that learns from rewards; use linear, cosine or another that goes by the step"
        )


def _loss(training: GRPOConfig) -> Iterator[str]:
    weighs = training.vllm_importance_sampling_correction
    if training.loss_type == "vespo" and weighs and training.vllm_importance_sampling_mode.startswith("sequence"):
        yield (
            f"loss_type: vespo weighs tokens, not sequences: vllm_importance_sampling_mode cannot be "
            f"{training.vllm_importance_sampling_mode}; use token_truncate or token_mask"
        )
    if training.skip_zero_advantage and (reason := needs_every_completion(training)) is not None:
        yield (
            f"skip_zero_advantage: true cannot go with {reason}, which needs every completion; leave one of the two out"
        )
    ends = [key for key in ("stop", "stop_token_ids") if (training.generation_kwargs or {}).get(key)]
    if ends and training.mask_truncated_completions:
        yield (
            "mask_truncated_completions: TRL takes a completion without an end-of-sequence token for truncated, and "
            f"generation_kwargs: {ends[0]} ends it so, which would mask them all; leave one of the two out"
        )


def _dynamic_sampling(training: GRPOConfig) -> Iterator[str]:
    if not training.dynamic_sampling:
        return
    if training.scale_rewards == "batch" or training.multi_objective_aggregation != "sum_then_normalize":
        yield (
            "dynamic_sampling replaces groups, so advantages must come from the group alone; use scale_rewards: group "
            "(or none) and multi_objective_aggregation: sum_then_normalize"
        )
    local = training.per_device_train_batch_size * training.steps_per_generation
    if training.world_size > 1 and local % training.num_generations:
        by_trl = "per_device_train_batch_size x steps_per_generation"
        size = "generation_batch_size / processes" if training.splits_by_tokens else by_trl
        yield (
            f"dynamic_sampling with several processes needs whole groups on each: {size} ({local}) must be a multiple "
            f"of num_generations ({training.num_generations})"
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
    if training.overlap and steps > 1 and training.eval_strategy == "steps" and training.eval_steps % steps:
        yield (
            f"eval_steps: {training.eval_steps:g} does not fall between rollouts, as overlap: 1 needs, each of which "
            f"serves {steps} steps; use a multiple of {steps}"
        )
    if training.max_steps == 0:
        yield f"max_steps: 0 is no limit, and trains num_train_epochs: {training.num_train_epochs:g}; leave it out"
    if training.save_strategy == "best":
        yield "save_strategy: best needs a metric that reward is not; use steps or epoch"


def _lengths(script: ScriptArguments, training: GRPOConfig) -> Iterator[str]:
    """Yield a line if prompt and completion do not fit into ``vllm_max_model_length``."""
    longest, completion = training.vllm_max_model_length, training.max_completion_length
    prompt = script.max_prompt_length
    if longest is not None and longest <= completion:
        yield (
            f"vllm_max_model_length ({longest}) leaves no room for a prompt beside max_completion_length ({completion})"
        )
    elif longest is not None and prompt is not None and prompt + completion > longest:
        yield (
            f"max_prompt_length ({prompt}) + max_completion_length ({completion}) is {prompt + completion}, more than "
            f"vllm_max_model_length ({longest}), at which completions would be cut off; raise it or lower one of them"
        )


def _tools(script: ScriptArguments, training: GRPOConfig) -> Iterator[str]:
    for_environments = ("environment_kwargs", "environment_python")
    for_calls = ("max_tool_calling_iterations", "max_tool_tokens", "response_template")
    needs = {key: "environments" for key in for_environments if getattr(script, key) is not None}
    if not script.tools:
        needs |= {key: "tools or environments" for key in for_calls if getattr(training, key) is not None}
    if script.environments is None:
        yield from (f"{key} has no effect without {other}; remove it" for key, other in needs.items())
    if isinstance(script.environments, dict):
        if not script.environments:
            yield "environments names none; write {NAME: my_package.MyEnvironment}"
        elif others := sorted(set(script.environment_kwargs or ()) - set(script.environments)):
            yield (
                f"environment_kwargs: {', '.join(others)} is not one of the environments: "
                f"{', '.join(script.environments)}; with several, it is {{NAME: arguments}}"
            )


def _overlap(script: ScriptArguments, training: GRPOConfig) -> Iterator[str]:
    """Yield what cannot go on while the trainer trains; ``server_problems`` refuses ``overlap`` without a server."""
    if training.overlap not in (0, 1):
        yield f"overlap is the number of rollouts that the server computes ahead, 0 or 1, not {training.overlap}"
    if not training.overlap:
        return
    if training.dynamic_sampling:
        yield "overlap: 1 cannot go with dynamic_sampling, whose fresh prompts would wait for; leave one of the two out"
    if not training.vllm_importance_sampling_correction:
        yield (
            "overlap: 1 learns from completions of an earlier adapter, for which importance weights correct: set "
            "vllm_importance_sampling_correction: true, and noise_mode: engine_is in place of engine"
        )
    stops_tools = script.tools or (script.environments is not None and script.environment_python is None)
    if stops_tools and training.max_tool_seconds is not None:
        yield (
            f"max_tool_seconds: {training.max_tool_seconds:g} cannot stop a tool while the trainer trains (overlap: 1);"
            " use max_tool_seconds: null, or for environments environment_python, where it can"
        )


def _generation(training: GRPOConfig) -> Iterator[str]:
    """Yield what is wrong with ``generation_kwargs``."""
    generation_kwargs = training.generation_kwargs or {}
    if wrong := sorted(SET_BY_ENGINE & generation_kwargs.keys()):
        yield (
            f"generation_kwargs cannot set {', '.join(wrong)}: each completion has a seed of its own and its "
            "log-probabilities; max_completion_length and num_generations are keys"
        )
    if twice := sorted(KEYS & generation_kwargs.keys()):
        yield (
            f"generation_kwargs cannot set {', '.join(twice)}: the engine would sample with one value and the trainer "
            f"compute log-probabilities with another; use the key {twice[0]} itself"
        )
    if training.vllm_structured_outputs_regex is not None and "structured_outputs" in generation_kwargs:
        yield "generation_kwargs: structured_outputs beside vllm_structured_outputs_regex would be ignored; remove one"


def _sampling(training: GRPOConfig) -> Iterator[str]:
    """Yield what vLLM's SamplingParams would refuse at the first rollout, or change."""
    if not training.temperature >= SMALLEST_TEMPERATURE:
        yield (
            f"temperature must be at least {SMALLEST_TEMPERATURE}, not {training.temperature}: the log-probabilities "
            "of the trainer are divided by it, and vLLM samples with no smaller one"
        )
    elif training.rollout_engine == "vllm":
        others = {key: value for key, value in sampling_parameters(training).items() if key not in SET_BY_ENGINE}
        if (error := refused_by_vllm({**others, "max_tokens": training.max_completion_length})) is not None:
            keys = (*sorted(KEYS), "vllm_structured_outputs_regex", "generation_kwargs")
            yield f"{', '.join(keys)}: vLLM takes no such SamplingParams: {error}"


def _precision(training: GRPOConfig, model: ModelConfig) -> Iterator[str]:
    """Yield a line for each clash of dtypes: between engine and trainer, or of float16 with nf4."""
    engine = f"with dtype: {model.dtype}: the engine would compute in {model.dtype} and the trainer in"
    if training.fp16 and model.dtype != "float16":
        yield f"fp16: true {engine} float16; use dtype: float16, or fp16: false"
    if training.bf16 and model.dtype in ("float16", "float32"):
        other = "fp16: true and bf16: false" if model.dtype == "float16" else "bf16: false"
        yield f"bf16: true (the default without fp16) {engine} bfloat16; use {other}, or dtype: bfloat16"
    if training.quantization == "nf4" and model.dtype == "float16":
        yield "dtype: float16 with quantization: nf4 is not supported; use dtype: bfloat16, or another quantization"


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


def _optimization(training: GRPOConfig) -> Iterator[str]:
    """Yield what transformers' optimizer would not read, and what would cut a rollout otherwise than its keys say."""
    schedule, arguments = training.lr_scheduler_type, training.lr_scheduler_kwargs
    try:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=training.learning_rate)
        get_scheduler(schedule, optimizer, 1, 1000, scheduler_specific_kwargs=arguments)
    except (TypeError, ValueError) as error:
        yield f"lr_scheduler_type: {schedule.value} cannot go with lr_scheduler_kwargs: {arguments}: {error}"
    known = OPTIMIZER_ARGUMENTS.get(optim := str(getattr(training.optim, "value", training.optim)), ())
    instead = f"it reads {', '.join(known)}, as NAME=VALUE" if known else "remove it, or use the adam_ keys"
    for pair in filter(None, (training.optim_args or "").replace(" ", "").split(",")):
        name, _, value = pair.partition("=")
        try:
            is_value = value.lower() in ("true", "false") or math.isfinite(float(value))
        except ValueError:
            is_value = False
        if name not in known or not is_value:
            yield f"optim_args: optim: {optim} does not read {pair}; {instead}"
    recomputing = training.gradient_checkpointing_kwargs or {}
    if {*recomputing} - {"use_reentrant", "preserve_rng_state"} or {*map(type, recomputing.values())} - {bool}:
        yield (
            f"gradient_checkpointing_kwargs: {recomputing} cannot be honoured; it takes use_reentrant and "
            "preserve_rng_state, true or false; recompute_layers says in how many blocks"
        )
    given, default = (config.to_dict() for config in (training.accelerator_config, type(training.accelerator_config)()))
    if changed := sorted(name for name, value in given.items() if value != default[name] and name != "non_blocking"):
        yield (
            f"accelerator_config: {', '.join(changed)} would cut a rollout otherwise than generation_batch_size and "
            "gradient_accumulation_steps say; remove it, and use these keys"
        )
