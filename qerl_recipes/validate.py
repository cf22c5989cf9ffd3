"""Everything about a recipe that can be refused before a model loads, refused in one go."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from qerl_recipes import data, rewards, shared_weights
from qerl_recipes.config_file import ConfigError
from qerl_recipes.config_keys import refusals
from qerl_recipes.configs import GRPOConfig, ModelConfig, ScriptArguments
from qerl_recipes.hooks import find
from qerl_vllm_plugin.checkpoint import read_quantization

CHOICES = {
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"),
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}
LARGEST_RANK = 512  # vLLM's largest max_lora_rank
WITHOUT_ADAPTER = {"lm_head", "embed_tokens"}
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def validate(script: ScriptArguments, training: GRPOConfig, model: ModelConfig) -> None:
    """Refuse a recipe that cannot run as it is written; nothing has been loaded or written when this raises.

    Raises ConfigError (a ValueError) with one line for each thing that is wrong: a key that cannot be honoured, an
    unknown reward, data set, schedule or engine, a column that a reward reads and the data lack, a checkpoint that does
    not fit the arm. Reading the data set may download it.
    """
    problems = [
        *refusals(script, training, model),
        *_choices(training),
        *_names(training),
        *_boundaries(training),
        *_sharing(training),
        *_adapter(script, training, model),
        *_checkpoint(model, training),
        *_data_and_rewards(script, training),
    ]
    if problems:
        raise ConfigError("this recipe cannot run:\n" + "\n".join(f"  - {problem}" for problem in problems))


def _choices(training: GRPOConfig) -> Iterator[str]:
    for key, allowed in CHOICES.items():
        if (value := getattr(training, key)) not in allowed:
            yield f"{key} cannot be {value!r}; it is one of {', '.join(allowed)}"
    grouped = training.scale_rewards != "batch" and training.multi_objective_aggregation == "sum_then_normalize"
    if training.dynamic_sampling and not grouped:
        yield (
            "dynamic_sampling replaces groups, so advantages must come from the group alone; use scale_rewards: group "
            "(or none) and multi_objective_aggregation: sum_then_normalize"
        )
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


def _failure(check: Callable[[], Any], key: str) -> Iterator[str]:
    try:
        check()
    except ValueError as error:
        yield f"{key}: {error}"


def steps_per_rollout(training: GRPOConfig) -> int:
    """Optimizer steps that one rollout serves; raises ConfigError where that is not a whole number."""
    micro_steps = training.steps_per_generation * training.num_iterations
    if micro_steps % training.gradient_accumulation_steps:
        raise ConfigError(
            f"a rollout must serve whole optimizer steps: steps_per_generation x num_iterations ({micro_steps}) must "
            f"be a multiple of gradient_accumulation_steps ({training.gradient_accumulation_steps})"
        )
    return micro_steps // training.gradient_accumulation_steps


def _boundaries(training: GRPOConfig) -> Iterator[str]:
    """Checkpoints are taken between rollouts, so that a resumed run repeats none."""
    try:
        steps = steps_per_rollout(training)
    except ConfigError as error:
        yield str(error)
        return
    if training.save_strategy == "steps" and (training.save_steps < 1 or training.save_steps % steps):
        yield (
            f"save_steps: {training.save_steps:g} does not fall between rollouts, each of which serves {steps} steps; "
            f"use a multiple of {steps}, or save_strategy: epoch"
        )
    if training.save_strategy == "best":
        yield "save_strategy: best needs a metric that reward is not; use steps or epoch"
    longest = training.vllm_max_model_length
    if longest is not None and longest <= training.max_completion_length:
        yield (
            f"vllm_max_model_length ({longest}) leaves no room for a prompt beside max_completion_length "
            f"({training.max_completion_length})"
        )


def _sharing(training: GRPOConfig) -> Iterator[str]:
    if training.share_weights and (reason := shared_weights.obstacle(training)):
        yield f"share_weights: {reason}; use share_weights: false"


def _adapter(script: ScriptArguments, training: GRPOConfig, model: ModelConfig) -> Iterator[str]:
    if not 1 <= model.lora_r <= LARGEST_RANK:
        yield f"lora_r must be 1 to {LARGEST_RANK}, which is what vLLM serves, not {model.lora_r}"
    targets = model.lora_target_modules or []
    if wrong := WITHOUT_ADAPTER & set([targets] if isinstance(targets, str) else targets):
        yield f"lora_target_modules: {', '.join(sorted(wrong))} takes no adapter; name linear layers of the blocks"
    if training.train_norms and training.beta:
        yield "beta needs a reference without trained norms; with train_norms use beta: 0"
    start = script.adapter_name_or_path
    if start is not None and not (Path(start) / "adapter_config.json").is_file():
        yield f"adapter_name_or_path: {start} is not a folder with an adapter_config.json"


def _checkpoint(model: ModelConfig, training: GRPOConfig) -> Iterator[str]:
    name = model.model_name_or_path
    if name is None:
        yield "model_name_or_path is missing"
        return
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if name.startswith(("/", ".", "~")):
            yield f"model_name_or_path: there is no folder {name}"
        return  # a hub id, which the loader looks up
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        yield f"model_name_or_path: {name} has no readable config.json ({error})"
        return
    if any(config.get(key) for key in EXPERT_KEYS):
        yield f"model_name_or_path: {name} is a mixture of experts, which is served but not trained; use a dense model"
    quantized = config.get("quantization_config")
    if isinstance(quantized, dict) and training.quantization == "qerl_nvfp4":
        yield from _failure(lambda: read_quantization(quantized), f"model_name_or_path: {name}")
    elif quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        yield (
            f"quantization: {training.quantization} starts from a BF16 checkpoint, but {name} is quantized already "
            f"({method}); name the BF16 checkpoint, or use quantization: qerl_nvfp4"
        )


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
    found = {}
    for name in script.reward_funcs:
        try:
            found[name] = rewards.resolve([name], script)[0]
        except ValueError as error:
            yield str(error)
    try:
        train, held_out = data.read(script)
    except ConfigError as error:
        yield str(error)
        return
    for name, reward in found.items():
        for split, rows in (("training", train), ("held-out", held_out)):
            if rows is None or (split == "held-out" and training.eval_strategy == "no"):
                continue
            if missing := sorted(rewards.required_columns(reward) - set(rows.column_names)):
                rename = json.dumps({"columns": {"OLD": missing[0]}})
                yield (
                    f"reward {name} reads the column {', '.join(missing)}, which the {split} data lack; they have "
                    f"{', '.join(sorted(rows.column_names))}. To rename one: --dataset_kwargs '{rename}'"
                )
    prompts = training.generation_batch_size // training.num_generations
    if len(train) < prompts:
        yield f"a rollout takes {prompts} prompts and the data have {len(train)}; lower generation_batch_size"
    if training.eval_strategy != "no" and held_out is None:
        yield (
            f"eval_strategy: {training.eval_strategy} needs held-out problems, and there is no split "
            f"{script.dataset_test_split!r}; set dataset_test_split, or use eval_strategy: 'no'"
        )
