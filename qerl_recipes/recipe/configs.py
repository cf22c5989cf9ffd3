"""Define the keys of a recipe: Open-R1's and TRL's under their own names, and QeRL's additions.

    script, training, model = parse(["--config", "recipes/demo/grpo/nvfp4_lora_aqn.yaml", "--learning_rate", "3e-4"])

Some defaults differ from TRL 1.16, because only an adapter on frozen weights is trained. ``lora_dropout`` is 0: dropout
would make the trainer's log-probabilities differ from the engine's.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import trl
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from qerl_recipes.recipe import batches
from qerl_recipes.recipe.batches import FAST_TOKENS, PACK_TOKENS
from qerl_recipes.recipe.file import (
    ConfigError,
    RecipeParser,
    defaults_from_yaml,
    key,
    read_flags,
    read_yaml,
    up_to_date,
)
from qerl_recipes.recipe.generation import template_text
from qerl_recipes.recipe.keys import DEFAULTS_OF_TRL_0_18, OF_TRL_0_18, QUANTIZATIONS, refusals
from qerl_recipes.recipe.script import ScriptArguments as ScriptArguments
from qerl_recipes.recipe.script import mapping, refuse_out_of_range
from qerl_vllm_plugin.noise import MAX_SIGMA
from qerl_vllm_plugin.wire.address import shown

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SERVER = "server"  # the value of vllm_mode with which rollouts come from a running server
TRLS_SERVER = "http://0.0.0.0:8000"  # the server of a recipe that names none
NOISE_MODES = ("none", "engine", "engine_is", "both")
DEFAULT_NOISE_MODE = "both"  # if only sigmas are set; engine and trainer then differ as they do without noise
# Source: the paper (arXiv 2510.11696), table 4.
SIGMA_START, SIGMA_END, NUM_STAGES = 1e-2, 5e-4, 10
AS_FEW_AS_FIT = -1  # a value of recompute_layers
WANDB = ("wandb_entity", "wandb_project", "wandb_run_group")  # keys, and in capitals environment variables
HELP = {"-h", "--help"}
_CONSTRUCTION_ERRORS = (ValueError, TypeError, AttributeError, KeyError, OverflowError, OSError, ImportError)


@dataclass
class GRPOConfig(trl.GRPOConfig):
    """Extend TRL's configuration of GRPO and DAPO by the weight format, the noise, dynamic sampling and packed rows."""

    _VALID_DICT_FIELDS = (*trl.GRPOConfig._VALID_DICT_FIELDS, "response_template", "vllm_speculative_config")

    quantization: str = key("qerl_nvfp4", "Base-weight format: qerl_nvfp4, nf4 (QLoRA) or bf16.", choices=QUANTIZATIONS)
    share_weights: bool | None = key(
        None,
        "qerl_nvfp4: the trainer reads the engine's frozen weights in place: true refuses to run without, false keeps "
        "two copies, and the default is wherever it can be done (engines on one GPU each).",
    )
    train_norms: bool = key(False, "Train the RMSNorm weights too.")
    noise_mode: str | None = key(
        None,
        "Where the noise is: none; engine (the paper's: noise in the engine, no importance correction); engine_is (the "
        "same with importance correction); both (the same noise in engine and trainer), the default where sigmas are "
        "given.",
        choices=NOISE_MODES,
    )
    sigma_start: float | None = key(None, f"First sigma; {SIGMA_START} with noise.")
    sigma_end: float | None = key(None, f"Last sigma; {SIGMA_END} with noise.")
    num_stages: int | None = key(None, f"Stages of the schedule; {NUM_STAGES} with noise.")
    noise_schedule: str = key("exponential", "Schedule by name, from a plugin or built in.")
    noise_seed: int | None = key(None, "Seed of the noise; None is seed.")
    noise_targets: list[str] = key(
        ["input_layernorm", "post_attention_layernorm"], "Modules whose RMSNorm weights carry the noise."
    )
    dynamic_sampling: bool = key(False, "DAPO: replace groups in which all rewards are equal by fresh prompts.")
    dynamic_sampling_metric: str | None = key(
        None,
        "The reward by which dynamic_sampling tells groups that teach nothing, as in rewards/NAME/mean, or total, the "
        "weighted sum; by default accuracy where it is one of reward_funcs, else total.",
    )
    dynamic_sampling_max_rounds: int = key(3, "Rounds of fresh prompts a step, at most.")
    pack_tokens: int | None = key(
        None,
        "Training runs on rows of real tokens, of at most this many (a longer sequence has a row of its own): 0 is "
        f"TRL's padded batches; -1, the default, as many as the memory plan has room for, at most {PACK_TOKENS}; "
        f"{FAST_TOKENS} on a CPU, and {PACK_TOKENS} beside TRL's keys of micro-batches.",
    )
    # TRL's three keys of batch sizes are None until __post_init__ has filled them in
    per_device_train_batch_size: int = key(
        None,
        "Completions of a micro-batch, as in TRL; without it and gradient_accumulation_steps pack_tokens cuts a step.",
    )
    gradient_accumulation_steps: int = key(
        None, "Micro-batches of a step, as in TRL: 1 if only per_device_train_batch_size is set."
    )
    steps_per_generation: int = key(
        None, "Optimizer steps that a rollout serves, 1 by default; beside the two keys above its micro-batches."
    )
    splits_by_tokens: bool = field(default=False, init=False)  # is each packed row a micro-batch of its own?
    skip_zero_advantage: bool | None = key(
        None,
        "Leave completions whose advantage is 0 (all rewards of a group equal) out of the trainer's forward and "
        "backward, for they have no gradient; by default where nothing else depends on them (beta 0, no entropy term, "
        "packed rows).",
    )
    recompute_layers: int | None = key(
        None,
        "With gradient_checkpointing: in how many of the model's blocks, counted from the first, the backward computes "
        "the activations anew; -1, the default, in as few as the memory plan has room for, and on a CPU in all.",
    )
    vllm_kv_cache_memory_bytes: int | None = key(
        None,
        "Size of the engine's KV cache in bytes, for several runs on one GPU: nothing is measured, and "
        "vllm_gpu_memory_utilization has no effect.",
    )
    vllm_speculative_config: dict | str | None = key(
        None,
        "vLLM's speculative_config, drafts of several tokens that the policy checks in one step: `{method: ngram, "
        "num_speculative_tokens: 4, prompt_lookup_max: 4}`, or ngram_gpu, or suffix with arctic-inference.",
    )
    overlap: int = key(
        0, "vllm_mode: server: rollouts that the server computes ahead; 1 is the next one while the trainer trains."
    )
    rollout_engine: str = key("vllm", "Rollout engine by name, from a plugin or built in.")
    max_tool_tokens: int | None = key(
        None,
        "Most tokens of what one call of a tool returns, the rest is cut off; without, one that does not fit ends the "
        "episode.",
    )
    max_tool_seconds: float | None = key(
        60.0, "Seconds after which a tool is stopped; the policy reads that it was. None: no limit."
    )
    chat_template: str | None = key(None, "Chat template in place of the model's: Jinja text or a file.")
    response_template: dict | str | None = key(
        None,
        "transformers' response_template, which finds tool calls; default: TRL's for the chat template, or the "
        "tokenizer's own.",
    )
    wandb_entity: str | None = key(None, "Weights & Biases entity.")
    wandb_project: str | None = key(None, "Weights & Biases project.")
    wandb_run_group: str | None = key(None, "Weights & Biases group.")

    use_vllm: bool = key(True, "Rollouts always come from vLLM.")
    vllm_importance_sampling_correction: bool | None = key(
        None, "Importance correction; None is on, except in noise mode engine."
    )
    vllm_importance_sampling_mode: str = key(
        "token_truncate", "TRL's default is sequence_mask, which drops long answers."
    )
    vllm_importance_sampling_clip_max: float | None = key(2.0, "TRL's default is 3.")

    def __post_init__(self) -> None:
        if self.quantization not in QUANTIZATIONS:
            raise ConfigError(f"quantization cannot be {self.quantization!r}; it is one of {', '.join(QUANTIZATIONS)}")
        refuse_out_of_range(self)
        self._fill_in_noise()
        if self.dynamic_sampling_metric is not None and not self.dynamic_sampling:
            raise ConfigError(
                f"dynamic_sampling_metric: {self.dynamic_sampling_metric} has no effect without dynamic_sampling: true"
            )
        self._check_checkpointing()
        if self.chat_template is not None:
            try:
                self.chat_template = template_text(self.chat_template)
            except ValueError as error:
                raise ConfigError(str(error)) from error
        for name in ("generation", "chat_template", "lr_scheduler", "gradient_checkpointing"):
            setattr(self, f"{name}_kwargs", mapping(f"{name}_kwargs", getattr(self, f"{name}_kwargs")))
        named = batches.fill_in(self)
        try:
            super().__post_init__()
        except ValueError as error:
            raise ConfigError(batches.not_whole_groups(self) or str(error)) from error
        batches.settle(self, named)
        if self.fp16:
            self.mixed_precision = "no"  # accelerate's loss scaler would skip steps; the trainer has its own

    def to_dict(self) -> dict[str, Any]:
        """Return TRL's dictionary for experiment trackers; the server's address has no user or password in it."""
        content: dict[str, Any] = super().to_dict()
        url = self.vllm_server_base_url
        return {**content, "vllm_server_base_url": url if url is None else shown(url)}

    def __str__(self) -> str:
        """Return TRL's text, which omits tokens; the server's address in it has neither user nor password."""
        text, url = str(super().__str__()), self.vllm_server_base_url
        return text if url is None else text.replace(url, shown(url))

    __repr__ = __str__  # a dataclass's own would show tokens and passwords

    @property
    def server_address(self) -> str:
        """Return the server's address without /v1, perhaps with user and password: do not show it."""
        return str((self.vllm_server_base_url or TRLS_SERVER).rstrip("/").removesuffix("/v1"))

    def _check_checkpointing(self) -> None:
        if self.recompute_layers is None:
            self.recompute_layers = AS_FEW_AS_FIT if self.gradient_checkpointing else None
            return
        if self.recompute_layers < AS_FEW_AS_FIT:
            raise ConfigError(
                f"recompute_layers must be at least 0, or -1 for as few as fit, not {self.recompute_layers}"
            )
        if not self.gradient_checkpointing:
            raise ConfigError(
                f"recompute_layers: {self.recompute_layers} has no effect with gradient_checkpointing: false; "
                "remove one of the two"
            )

    def _fill_in_noise(self) -> None:
        """Fill in noise keys that are None; raise ConfigError for values out of range or in contradiction."""
        sigmas = {"sigma_start": self.sigma_start, "sigma_end": self.sigma_end}
        set_keys = [name for name, value in {**sigmas, "num_stages": self.num_stages}.items() if value]
        for name, value in sigmas.items():
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(
                    f"{name} must be a finite number >= 0, not {value}; for no noise use noise_mode: none"
                )
            if value is not None and value > MAX_SIGMA:
                raise ConfigError(f"{name} must be at most {MAX_SIGMA:g}, the most that the engine takes, not {value}")
        if self.noise_mode is None:
            self.noise_mode = DEFAULT_NOISE_MODE if set_keys else "none"
        self.noise_mode = up_to_date({"noise_mode": self.noise_mode}, type(self).__name__)["noise_mode"]
        if self.noise_mode not in NOISE_MODES:
            raise ConfigError(f"noise_mode cannot be {self.noise_mode!r}; it is one of {', '.join(NOISE_MODES)}")
        if self.noise_mode == "none":
            if set_keys:
                raise ConfigError(
                    f"{', '.join(set_keys)} would be ignored with noise_mode: none; remove one or the other"
                )
            self.sigma_start, self.sigma_end, self.num_stages = 0.0, 0.0, 0
        else:
            self.sigma_start = SIGMA_START if self.sigma_start is None else self.sigma_start
            self.sigma_end = min(SIGMA_END, self.sigma_start) if self.sigma_end is None else self.sigma_end
            self.num_stages = NUM_STAGES if self.num_stages is None else self.num_stages
            if not 0 < self.sigma_end <= self.sigma_start:
                raise ConfigError(
                    f"the noise is annealed from sigma_start to sigma_end: 0 < sigma_end <= sigma_start, "
                    f"not {self.sigma_end} and {self.sigma_start}; for no noise use noise_mode: none"
                )
        if self.noise_seed is None:
            self.noise_seed = self.seed
        uncorrected = self.noise_mode == "engine"
        if self.vllm_importance_sampling_correction is None:
            self.vllm_importance_sampling_correction = not uncorrected
        if self.vllm_importance_sampling_correction and uncorrected:
            raise ConfigError(
                "noise_mode: engine is the paper's, without importance correction; for the same with "
                "vllm_importance_sampling_correction use noise_mode: engine_is"
            )
        if not self.vllm_importance_sampling_correction and self.noise_mode == "engine_is":
            raise ConfigError("noise_mode: engine_is needs importance correction; without it use noise_mode: engine")


@dataclass
class ModelConfig(trl.ModelConfig):
    """Describe the policy: a frozen base checkpoint and the LoRA adapter on it."""

    dtype: str | None = key(
        "bfloat16", "dtype of embeddings, head and activations; float16 ends at 65504.", choices=list(DTYPES)
    )
    attn_implementation: str | None = key(
        None, "The trainer's attention: sdpa, eager, flex_attention or flash_attention_2."
    )
    use_peft: bool = key(True, "Only an adapter is trained.")
    lora_target_modules: list[str] | None = key(
        ["all-linear"],
        "Linear layers that carry the adapter; all-linear is all in the blocks (PEFT's own default "
        "is q_proj and v_proj alone).",
    )
    lora_dropout: float = key(0.0, "0: the engine has no dropout.")
    names_adapter: bool = field(default=True, init=False)  # set by parse: is there a key about the adapter?

    def __post_init__(self) -> None:
        if self.lora_target_modules is None:
            self.lora_target_modules = ["all-linear"]
        super().__post_init__()
        if isinstance(self.lora_target_modules, str) and self.lora_target_modules != "all-linear":
            # TRL turns a list of one into a text, which PEFT would read as a pattern for whole names: no match
            self.lora_target_modules = [self.lora_target_modules]
        flash = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}
        if self.attn_implementation in flash and not flash[self.attn_implementation]():
            warnings.warn(
                f"attn_implementation: {self.attn_implementation} needs a GPU and the package flash-attn, which are "
                "not here; sdpa is used, which runs in PyTorch's own flash attention on a GPU",
                stacklevel=2,
            )
            self.attn_implementation = "sdpa"


def parser() -> RecipeParser:
    """Return the parser of ``qerl train``, which has a flag for every key of the three dataclasses."""
    return RecipeParser((ScriptArguments, GRPOConfig, ModelConfig))


def parse(argv: Sequence[str]) -> tuple[ScriptArguments, GRPOConfig, ModelConfig]:
    """Read a recipe and flags -> (script, training, model); a flag overrides the recipe.

    Raises ConfigError (a ValueError) for an unknown key, naming the closest one, and for a value of the wrong type.
    Values that can be parsed but not honoured are left to ``train.preflight``. On a machine without a CUDA GPU,
    ``use_cpu`` becomes true, ``bf16`` and ``tf32`` false, unless the recipe or a flag sets ``use_cpu``.
    """
    recipe, content, dropped = parser(), {}, {}
    flags = read_flags(recipe, [word for word in argv if word not in HELP])
    path = flags.pop("config", None)
    if path is not None:
        content = read_yaml(path)
        dropped = defaults_from_yaml(recipe, content, path)
    if not HELP.isdisjoint(argv):
        recipe.parse_args(["--help"])
    set_keys = {*content, *flags}
    is_without_gpu = "use_cpu" not in set_keys and not torch.cuda.is_available()
    if is_without_gpu:
        flags |= {"use_cpu": True, "bf16": False, **({"tf32": False} if "tf32" in set_keys else {})}
    dropped |= defaults_from_yaml(recipe, flags, "command line")
    refused = [line for line in dropped.values() if line is not None]
    try:
        script, training, model = recipe.parse_args_into_dataclasses([], look_for_args_file=False)
    except _CONSTRUCTION_ERRORS as error:  # TRL and transformers check how their keys combine
        lines = [*refused, *refusals(recipe.parse_args([]))]
        if isinstance(error, ConfigError) or not lines:  # otherwise the refused keys are the cause
            lines.append(str(error))
        raise ConfigError("\n".join(lines)) from error
    script.refused, script.is_without_gpu = refused, is_without_gpu
    changed = {key: old for key, old in DEFAULTS_OF_TRL_0_18.items() if key not in set_keys}
    if changed and OF_TRL_0_18 & set(content):
        listed = ", ".join(f"{key} was {old}, is {getattr(training, key)}" for key, old in changed.items())
        warnings.warn(f"{path} is of an earlier TRL, and defaults have changed since: {listed}", stacklevel=2)
    model.names_adapter = any(key.startswith(("lora_", "use_peft", "use_rslora")) for key in set_keys)
    if script.environments is not None and "reward_funcs" not in set_keys:
        script.reward_funcs = []  # an environment scores by itself; the default rewards are for mathematics
    if training.vllm_max_model_length is None and script.max_prompt_length is not None:
        training.vllm_max_model_length = script.max_prompt_length + training.max_completion_length
    return script, training, model


def adapter_line(script: ScriptArguments, model: ModelConfig) -> str:
    """Say in one line what is trained, lest the run be mistaken for full fine-tuning."""
    if script.adapter_name_or_path is not None:
        return f"adapter: goes on from {script.adapter_name_or_path}; the base stays as it is"
    targets = model.lora_target_modules
    layers = "all linear layers of the blocks" if targets == "all-linear" else f"layers {targets}"
    line = f"adapter: LoRA r {model.lora_r}, alpha {model.lora_alpha}, on {layers}; the base stays as it is"
    if not model.names_adapter:
        line += " (a recipe without any lora_ key: full fine-tuning, if that was meant, cannot be had)"
    return line


def tracker_environment(training: GRPOConfig) -> dict[str, str]:
    """Return the variables by which Weights & Biases takes the wandb_* keys; set them before the trainer starts."""
    return {key.upper(): value for key in WANDB if (value := getattr(training, key)) is not None}
