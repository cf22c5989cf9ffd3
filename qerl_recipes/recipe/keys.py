"""Classify every key of a recipe: honoured, renamed, without effect, or refused with the way out.

``WITHOUT_EFFECT`` holds keys of Open-R1's recipes and of earlier TRLs. A key that QeRL's trainer cannot honour is
refused by name, never ignored. Every field of the three dataclasses is either in ``TOPICS`` or in ``REFUSED``; a test
fails when a new TRL (after 1.16) or transformers (after 5.17) adds one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from qerl_vllm_plugin.wire.address import shown

QUANTIZATIONS = ("qerl_nvfp4", "bf16", "nf4")  # the base-weight formats of a recipe
ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values that vLLM's --max-lora-rank accepts
WITHOUT_ADAPTER = {"lm_head", "embed_tokens"}
CANNOT_RUN = "this recipe cannot run"  # begins a refusal by `qerl train`; a study recognizes it


@dataclass(frozen=True)
class Refusal:
    """Hold the values of a key that a recipe may have, None for all, and what to do instead of any other value."""

    allowed: tuple[Any, ...] | None
    way_out: str


# Words that end a refusal -> keys whose numbers it is for. None is taken, and means what the key's help says.
RANGES = {
    "at least 1": """
    dataset_size max_prompt_length max_completion_length num_stages dynamic_sampling_max_rounds num_iterations
    num_generations num_generations_eval generation_batch_size steps_per_generation gradient_accumulation_steps
    per_device_train_batch_size per_device_eval_batch_size vllm_kv_cache_memory_bytes vllm_tensor_parallel_size
    """,
    "at least 0": """
    seed dataset_seed noise_seed learning_rate warmup_steps weight_decay adam_epsilon beta max_grad_norm epsilon
    epsilon_high off_policy_mask_threshold eval_steps eval_delay save_steps
    """,
    "at least 0 and below 1": "adam_beta1 adam_beta2",
    "at least 0 and at most 1": "top_entropy_quantile",
    "above 0 and at most 1": "vllm_gpu_memory_utilization",
    "above 0": """
    num_train_epochs delta sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg
    vespo_lambda_neg vllm_importance_sampling_clip_max max_tool_calling_iterations max_tool_tokens max_tool_seconds
    """,
}


# Keys and values of the release before this one. They work for one more release, with a warning.
FORMER_KEYS = {"checkpointed_layers": "recompute_layers", "skip_silent_rows": "skip_zero_advantage"}
FORMER_VALUES = {"noise_mode": {"rollout": "engine", "corrected": "engine_is", "shared": "both"}}
# keys of Open-R1 (TRL 0.18, transformers 4.52) that have another name now
RENAMED = {
    "torch_dtype": "dtype",
    "warmup_ratio": "warmup_steps",  # transformers 5 reads warmup_steps below 1 as a share of all steps
    "vllm_max_model_len": "vllm_max_model_length",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "dataset_configs": "dataset_config",
    "wandb_log_unique_prompts": "log_unique_prompts",
    "hub_model_revision": "hub_revision",
}

NO_DROPOUT = "neither engine nor trainer drops anything, whatever a checkpoint's config.json says; remove the key"
OF_OPEN_R1 = "it is of the rewards cf_code and ioi_code, which are not built in; remove the key"
# keys of Open-R1 and of earlier TRLs: allowed values ask for what happens anyway; others are refused
WITHOUT_EFFECT = {
    "vllm_device": Refusal(("auto",), "the engine shares the trainer's GPU; remove the key"),
    "overwrite_output_dir": Refusal(
        (True, False), "a folder with checkpoints is never overwritten: name another output_dir"
    ),
    "overwrite_hub_revision": Refusal((False,), "a push always adds a commit to hub_revision; remove the key"),
    "push_to_hub_revision": Refusal((False,), "use push_to_hub with hub_revision"),
    "use_liger_loss": Refusal((False,), "Liger's loss multiplies by a BF16 weight that a 4-bit policy does not have"),
    # these keys are TRL's too, so REFUSED also has them, for a GRPOConfig built in Python
    "do_train": Refusal((True,), "qerl train always trains; remove the key, and use qerl evaluate to judge an adapter"),
    "disable_dropout": Refusal((True,), NO_DROPOUT),
    "use_liger_kernel": Refusal((True, False), "QeRL's own kernels stand where Liger's would; remove the key"),
    "dataset_mixture": Refusal(
        (None,), "write the problems of all parts into one file, or a folder with train.jsonl and test.jsonl, and name "
        "it as dataset_name"
    ),
    "code_eval_scoring_mode": Refusal(("pass_fail", "partial", "weighted_sum"), OF_OPEN_R1),
    "code_eval_test_batch_size": Refusal(None, OF_OPEN_R1),
    **dict.fromkeys(
        ("e2b_router_url", "morph_router_url"),
        Refusal((None,), "e2b and Morph are asked by their own clients; remove the key, or use code_provider: piston"),
    ),
    "ioi_provider": Refusal(("piston", "morph"), OF_OPEN_R1),
    "callbacks": Refusal(([],), "push_to_hub: true with hub_strategy: every_save pushes each checkpoint to "
                         "hub_revision, without Open-R1's Slurm jobs; remove the key"),
    "benchmarks": Refusal(([],), "run qerl evaluate BASE --adapter DIR --tasks ... on the saved adapter; "
                          "remove the key"),
}  # fmt: skip
# A recipe with one of these keys was written for TRL 0.18. Its defaults below differ from those of TRL 1.16.
OF_TRL_0_18 = {"torch_dtype", "overwrite_output_dir"}
DEFAULTS_OF_TRL_0_18 = {"beta": "0.04", "loss_type": "bnpo", "max_completion_length": "256"}

# keys that are not a recipe's, and where to set them instead
BELONGS_ELSEWHERE = {
    "num_processes": "it is an option of accelerate: accelerate launch --num_processes N -m qerl_recipes.cli train ...",
    "vllm_dtype": "the engine runs in the dtype of the model; use dtype",
    "vllm_enable_prefix_caching": "the engine caches prefixes and resets the cache at every swap; remove the key",
    "activation_offloading": "TRL's trainer of GRPO has none; blocks recompute what does not fit: recompute_layers",
    "config": "a recipe names the one that it goes on from by extends",
}

# reason and way out -> the keys that it refuses, with the values that ask for what happens anyway
_REASONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "checkpoints are loaded by model_name_or_path, model_revision, dtype and attn_implementation alone, and without "
    "code of their own; remove the key": {"model_init_kwargs": (None,), "trust_remote_code": (False,)},
    "only an adapter of linear layers is trained, and norms with train_norms, while embeddings, head, experts and "
    "routers are frozen; use lora_target_modules, or TRL itself for full fine-tuning": {
        "use_peft": (True,),
        "lora_target_parameters optim_target_modules": (None,),
        "lora_task_type": ("CAUSAL_LM",),
        "lora_modules_to_save": (None, []),
        "router_aux_loss_coef": (None, 0.0),
    },
    "it acts in the trainer only, while the engine samples without it, so that every update would be off-policy; "
    "remove the key (noise_mode adds noise to both)": {
        "lora_dropout": (0.0,),
        "use_dora cast_lm_head_to_fp32": (False,),
        "neftune_noise_alpha": (None,),
    },
    "the base-weight format has a key of its own; use quantization: qerl_nvfp4, nf4 or bf16": {
        "load_in_8bit load_in_4bit use_bnb_nested_quant": (False,),
        "bnb_4bit_quant_type": ("nf4",),
        "bnb_4bit_quant_storage": (None,),
    },
    "frozen linears with a handwritten backward stand where it would act; remove the key": {
        "use_cache use_liger_kernel torch_compile": (False,),
        "liger_kernel_config torch_compile_backend torch_compile_mode": (None,),
        "debug": ("", [], None),
    },
    "rollouts always come from vLLM, with its own models and batching, and a server takes the policy over HTTP; remove "
    "the key": {
        "use_vllm": (True,),
        "vllm_model_impl": ("vllm",),
        "vllm_group_port": (51216,),
        "cache_implementation transformers_continuous_batching_config": (None,),
        "use_transformers_continuous_batching use_transformers_paged": (False,),
    },
    "the address of a server is one key; use vllm_server_base_url: http://HOST:PORT": {
        "vllm_server_host": ("0.0.0.0",),
        "vllm_server_port": (8000,),
    },
    "the policy reads text only; remove the key": {"log_multimodal": (True,)},
    "the loss is computed from rewards, which read all columns of the data, and not from labels; remove the key": {
        "remove_unused_columns": (False,),
        "label_names": (None,),
        "label_smoothing_factor": (0.0,),
        "average_tokens_across_devices": (True,),
    },
    "the reference policy of beta is the base, or adapter_name_or_path as it was; remove the key": {
        "sync_ref_model": (False,),
        "ref_model_mixup_alpha": (0.6,),
        "ref_model_sync_steps": (512,),
    },
    NO_DROPOUT: {"disable_dropout": (False, True)},
    "qerl train always trains; to judge an adapter use qerl evaluate": {"do_train": (False, True)},
    "groups must stay whole; lower per_device_train_batch_size instead": {"auto_find_batch_size": (False,)},
    "a resumed run must see the prompts that the unbroken run would have seen: seed alone orders them, in data of "
    "known length; use seed and dataset_size, and a new output_dir to start over": {
        "data_seed": (None,),
        "train_sampling_strategy": ("random",),
        "length_column_name": ("length",),
        "ignore_data_skip dataset_streaming": (False,),
    },
    "evaluation while training is the reward on every held-out prompt, on the weights and in the dtype of training; "
    "remove the key, and use qerl evaluate for other figures": {
        "dataloader_drop_last do_predict prediction_loss_only eval_use_gather_object batch_eval_metrics": (False,),
        "bf16_full_eval fp16_full_eval": (False,),
        "eval_do_concat_batches": (True,),
        "eval_accumulation_steps": (None,),
        "include_for_metrics": ([],),
    },
    "every checkpoint is written once, between rollouts, with all that a resume needs, and none is reloaded as best; "
    "remove the key, keep all of them and choose by qerl evaluate": {
        "save_only_model save_on_each_node enable_jit_checkpoint load_best_model_at_end": (False,),
        "metric_for_best_model greater_is_better": (None,),
    },
    "frozen NVFP4 weights are trained on one GPU or with plain data parallelism (accelerate launch); remove the key": {
        "ds3_gather_for_generation": (True,),
        "deepspeed parallelism_config": (None,),
        "ignore_bias_buffers": (False,),
        "fsdp": (None, "", False, [], {}),
        "fsdp_config": (None, {}),
    },
}
REFUSED = {
    key: Refusal(allowed, reason)
    for reason, kinds in _REASONS.items()
    for keys, allowed in kinds.items()
    for key in keys.split()
}

# topic -> its keys, in the order in which `qerl train --help` lists them
_HONOURED = {
    "weights and adapter": """
    quantization share_weights train_norms model_name_or_path model_revision adapter_name_or_path chat_template dtype
    attn_implementation lora_r lora_alpha lora_target_modules use_rslora
    """,
    "noise": "noise_mode sigma_start sigma_end num_stages noise_schedule noise_seed noise_targets",
    "dynamic sampling": "dynamic_sampling dynamic_sampling_metric dynamic_sampling_max_rounds",
    "data": """
    dataset_name dataset_config dataset_kwargs dataset_size dataset_seed dataset_train_split
    dataset_test_split dataset_prompt_column max_prompt_length system_prompt shuffle_dataset
    """,
    "rewards": """
    reward_funcs reward_weights scale_rewards multi_objective_aggregation cosine_min_value_wrong
    cosine_max_value_wrong cosine_min_value_correct cosine_max_value_correct cosine_max_len repetition_n_grams
    repetition_max_penalty code_language max_completion_len soft_punish_cache code_provider
    parallel_code_exec_per_proc
    """,
    "tools and environments": """
    tools environments environment_kwargs environment_python rollout_func response_template
    max_tool_calling_iterations max_tool_tokens max_tool_seconds
    """,
    "rollouts": """
    rollout_engine vllm_mode vllm_server_base_url vllm_server_timeout overlap
    vllm_speculative_config num_generations num_generations_eval max_completion_length generation_batch_size
    steps_per_generation temperature top_p top_k min_p repetition_penalty generation_kwargs chat_template_kwargs
    pad_to_multiple_of vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_gpu_memory_utilization
    vllm_kv_cache_memory_bytes
    vllm_max_model_length vllm_tensor_parallel_size vllm_importance_sampling_correction vllm_importance_sampling_mode
    vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min vllm_importance_sampling_cap
    """,
    "loss": """
    beta num_iterations epsilon epsilon_high delta sapo_temperature_neg sapo_temperature_pos vespo_k_pos
    vespo_lambda_pos vespo_k_neg vespo_lambda_neg importance_sampling_level loss_type mask_truncated_completions
    top_entropy_quantile entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta
    entropy_target off_policy_mask_threshold use_bias_correction_kl
    """,
    "optimization": """
    pack_tokens skip_zero_advantage per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps
    learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2
    adam_epsilon max_grad_norm bf16 fp16 tf32 gradient_checkpointing recompute_layers
    gradient_checkpointing_kwargs torch_empty_cache_steps seed full_determinism use_cpu
    """,
    "evaluation while training": "do_eval eval_strategy eval_steps eval_delay eval_on_start per_device_eval_batch_size",
    "checkpoints and hub": """
    output_dir save_strategy save_steps save_total_limit resume_from_checkpoint restore_callback_states_from_checkpoint
    push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
    """,
    "logging": """
    logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter log_level
    log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id
    trackio_static_space_id include_num_input_tokens_seen log_completions num_completions_to_print log_unique_prompts
    log_completions_hub_repo wandb_entity wandb_project wandb_run_group skip_memory_metrics
    """,
    "processes": """
    accelerator_config dataloader_num_workers dataloader_pin_memory
    dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
    ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout
    local_rank
    """,
}
TOPICS = {topic: tuple(keys.split()) for topic, keys in _HONOURED.items()}
HONOURED = frozenset(key for keys in TOPICS.values() for key in keys)


def means_of_a_micro_batch(recipe: Mapping[str, Any]) -> Iterator[str]:
    """Yield which keys make a loss that is no sum over the rows of its micro-batches, but a mean or a quantile."""
    if recipe.get("loss_type") == "bnpo":
        yield "loss_type: bnpo"
    for key, without in (("entropy_coef", 0), ("use_adaptive_entropy", False), ("top_entropy_quantile", 1)):
        if (value := recipe.get(key, without)) != without:
            yield f"{key}: {value}"


def with_current_names(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys and values of a recipe under today's names, as a run of the release before has recorded them."""
    return {FORMER_KEYS.get(key, key): current_value(key, value) for key, value in recipe.items()}


def current_value(key: str, value: Any) -> Any:
    """Return today's name of a key's value; a value that is not a former one is returned as it is."""
    return FORMER_VALUES[key].get(value, value) if key in FORMER_VALUES and isinstance(value, str) else value


def with_former_names(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys and values of a recipe under their former names, over which older hashes were taken."""
    keys = {current: key for key, current in FORMER_KEYS.items()}
    values = {(key, now): was for key, names in FORMER_VALUES.items() for was, now in names.items()}
    return {
        keys.get(key, key): values.get((key, value), value) if isinstance(value, str) else value
        for key, value in recipe.items()
    }


def refused(key: str, refusal: Refusal, value: Any) -> str:
    """Return the line that refuses a value of a key; an address shows neither user nor password."""
    value = shown(value) if isinstance(value, str) else value
    return f"{key}: {value!r} cannot be honoured; {refusal.way_out}"


def refusals(*configs: Any) -> list[str]:
    """Return a line for each key of the dataclasses that cannot be honoured, those that ``parse`` refused included."""
    lines: list[str] = []
    for config in configs:
        lines += getattr(config, "refused", [])
        for key, refusal in REFUSED.items():
            if hasattr(config, key) and (value := getattr(config, key)) not in (refusal.allowed or ()):
                lines.append(refused(key, refusal, value))
    return lines
