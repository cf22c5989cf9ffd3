"""Check that a recipe fits the checkpoint that it names: its arm, its layers and its lengths.

The checks read config.json, not the weights; the lengths of prompts are counted with the tokenizer.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import PreTrainedTokenizerBase

from qerl_recipes.model import families
from qerl_recipes.recipe.configs import GRPOConfig, ModelConfig, ScriptArguments
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.recipe.generation import wrong_bias
from qerl_recipes.recipe.shapes import BY_MODEL_ID, as_config
from qerl_recipes.tasks import prompts
from qerl_vllm_plugin.weights.checkpoint import read_quantization
from qerl_vllm_plugin.weights.families import FAMILIES, WITHOUT_SLOTS, of_images


def misfits(script: ScriptArguments, training: GRPOConfig, model: ModelConfig) -> Iterator[str]:
    """Yield a line for each thing that does not fit.

    Nothing is known of a model that is not downloaded yet, unless its shapes are on record because recipes/ names it.
    """
    name = model.model_name_or_path
    if name is None:
        yield "model_name_or_path is missing"
        return
    folder, file = Path(name).expanduser(), None
    if folder.is_dir():
        file = folder / "config.json"
    elif name.startswith(("/", ".", "~")):
        yield f"model_name_or_path: there is no folder {name}"
    else:
        file = _cached_config(name, model.model_revision)
    if file is None:
        if name in BY_MODEL_ID and model.model_revision in (None, "main"):
            yield from _config_misfits(script, training, model, name, as_config(BY_MODEL_ID[name]))
        return
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        yield f"model_name_or_path: {name} has no readable config.json ({error})"
        return
    yield from _config_misfits(script, training, model, name, config)


def refuse_misfit(script: ScriptArguments, training: GRPOConfig, model: ModelConfig, folder: Path) -> None:
    """Raise ConfigError if the checkpoint in ``folder``, which may just have been downloaded, does not fit."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if lines := list(_config_misfits(script, training, model, str(model.model_name_or_path), config)):
        raise ConfigError("\n".join(lines))


def refuse_long_prompts(
    data: Mapping[str, Dataset | None],
    tokenizer: PreTrainedTokenizerBase,
    script: ScriptArguments,
    training: GRPOConfig,
    folder: Path,
) -> None:
    """Raise ConfigError if prompts leave less than ``max_completion_length`` tokens of a sequence.

    vLLM would cut their completions off earlier. A prompt that leaves no room at all it would refuse in mid-run.
    ``data`` maps "training" and "held-out" to their problems. With ``max_prompt_length`` nothing is checked, since
    longer prompts are left out.
    """
    key, limit = "vllm_max_model_length", training.vllm_max_model_length
    if limit is None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        key, limit = "max_position_embeddings of the model", _max_positions(config)
    if limit is None or script.max_prompt_length is not None:
        return
    room = limit - training.max_completion_length
    for name, problems in data.items():
        options = training.chat_template_kwargs or {}
        counts = [] if problems is None else [prompts.tokens(one, tokenizer, options) for one in problems["prompt"]]
        if too_long := [count for count in counts if count > room]:
            raise ConfigError(
                f"{len(too_long)} of {len(counts)} {name} prompts have more than {room} tokens, the longest "
                f"{max(too_long)}: beside them max_completion_length ({training.max_completion_length}) does not fit "
                f"into {key} ({limit}), and completions would be cut off earlier. max_prompt_length: {room} leaves "
                f"them out; or lower max_completion_length, or raise {key}"
            )


def _cached_config(model_id: str, revision: str | None) -> Path | None:
    try:
        cached = try_to_load_from_cache(model_id, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None


def _config_misfits(
    script: ScriptArguments, training: GRPOConfig, model: ModelConfig, name: str, config: Mapping[str, Any]
) -> Iterator[str]:
    yield from _family_misfits(training, model, name, config)
    quantized = config.get("quantization_config")
    if isinstance(quantized, dict) and training.quantization == "qerl_nvfp4":
        try:
            read_quantization(quantized)
        except ValueError as error:
            yield f"model_name_or_path: {name}: {error}"
    elif quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        yield (
            f"quantization: {training.quantization} starts from a BF16 checkpoint, but {name} is quantized already "
            f"({method}); name the BF16 checkpoint, or use quantization: qerl_nvfp4"
        )
    if (positions := _max_positions(config)) is not None:
        yield from _length_misfits(script, training, name, positions)
    if isinstance(tokens := config.get("vocab_size"), int) and wrong_bias(training.generation_kwargs or {}) is None:
        biased = map(int, (training.generation_kwargs or {}).get("logit_bias") or ())
        if (largest := max(biased, default=0)) >= tokens:
            yield (
                f"generation_kwargs: logit_bias has the token {largest}, and {name} has {tokens} (0 to {tokens - 1}); "
                "remove it"
            )


def _max_positions(config: Mapping[str, Any]) -> int | None:
    """Return the model's longest sequence; None if the config has none or scales RoPE, where the engine decides."""
    positions = config.get("max_position_embeddings")
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return positions if isinstance(positions, int) and not scaling.get("factor") else None


def _family_misfits(training: GRPOConfig, model: ModelConfig, name: str, config: Mapping[str, Any]) -> Iterator[str]:
    kind = config.get("model_type")
    if reason := of_images(config):
        yield f"model_name_or_path: {name}: {reason}"
    elif training.quantization == "qerl_nvfp4" and kind not in FAMILIES:
        yield (
            f"model_name_or_path: {name} is a {kind}, a family that was never compared with transformers under "
            f"qerl_nvfp4; compared are {', '.join(FAMILIES)}"
        )
    if training.quantization != "qerl_nvfp4" and kind in WITHOUT_SLOTS:
        yield (
            f"quantization: {training.quantization} serves the adapter from vLLM's LoRA slots, into which no adapter "
            f"of {kind} fits; use quantization: qerl_nvfp4"
        )
    yield from (f"model_name_or_path: {name}: {line}" for line in families.obstacles(config, model.attn_implementation))
    adapted = model.lora_target_modules or ()
    adapted = [adapted] if isinstance(adapted, str) else adapted
    has_noise = training.noise_mode != "none" or training.train_norms
    noisy = training.noise_targets if has_noise else ()
    yield from families.misfits(config, adapted, noisy, training.quantization)


def _length_misfits(script: ScriptArguments, training: GRPOConfig, name: str, positions: int) -> Iterator[str]:
    longest, completion = training.vllm_max_model_length, training.max_completion_length
    if longest is not None and longest > positions:
        key = "max_prompt_length + max_completion_length" if script.max_prompt_length else "vllm_max_model_length"
        yield (
            f"{key} is {longest}, but {name} has {positions} positions (max_position_embeddings); lower it to that, "
            "or name a model with more"
        )
    elif longest is None and completion >= positions:
        yield (
            f"max_completion_length ({completion}) leaves no room for a prompt in the {positions} positions "
            f"(max_position_embeddings) of {name}; lower it"
        )
