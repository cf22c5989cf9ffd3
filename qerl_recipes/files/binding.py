"""Define which recipe keys a run is bound to.

A resumed run must train on as it began, or say which keys have changed.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from qerl_recipes.recipe.keys import HONOURED, TOPICS

SECRET = {"hub_token", "vllm_server_base_url", "vllm_server_host"}  # server addresses are private
LENGTH = ("max_steps", "num_train_epochs")
WITHOUT_END = ("constant", "constant_with_warmup")  # learning-rate schedules that do not depend on the last step
# keys that may change when a run is resumed; every other honoured key must stay
MAY_CHANGE = {
    *TOPICS["evaluation while training"],
    *TOPICS["checkpoints and hub"],
    *TOPICS["logging"],
    *TOPICS["processes"],
    "num_generations_eval",
    # These may change as long as their results do not, which are compared instead: the hashes of base, reference and
    # training data, the adapter's settings, and the completions per step.
    *("model_name_or_path", "model_revision", "adapter_name_or_path", "max_prompt_length", "system_prompt"),
    *(key for key in TOPICS["data"] if key.startswith("dataset_")),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"),
    # only where and how fast the same is computed
    *("share_weights", "attn_implementation", "pack_tokens", "pad_to_multiple_of", "use_cpu", "tf32"),
    *("gradient_checkpointing", "gradient_checkpointing_kwargs", "checkpointed_layers", "torch_empty_cache_steps"),
    *("vllm_mode", "vllm_server_port", "vllm_server_timeout", "vllm_gpu_memory_utilization"),
    *("vllm_kv_cache_memory_bytes", "vllm_enable_sleep_mode", "vllm_tensor_parallel_size"),
    *("full_determinism", "do_train"),
}


def recorded(*parts: Any) -> dict[str, Any]:
    """Return the honoured keys of a recipe as JSON values, without the secret ones.

    ``parts`` are the recipe's dataclasses (script, training, model).
    """
    keys = sorted(HONOURED - SECRET)
    values = {key: getattr(part, key) for part in parts for key in keys if hasattr(part, key)}
    return json.loads(json.dumps(values, default=lambda value: getattr(value, "value", str(value))))


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for each key that a run is bound to and whose value has changed.

    Both arguments are as ``recorded`` returns them. Keys that only one of them has are not compared. The length of a
    run may change if neither learning rate nor noise depends on it.
    """
    common = before.keys() & now.keys()
    for key in sorted(common - MAY_CHANGE - set(LENGTH)):
        if before[key] != now[key]:
            yield f"{key} was {_shown(before[key])} and is {_shown(now[key])}"
    sizes = ("generation_batch_size", "gradient_accumulation_steps", "steps_per_generation")
    if common.issuperset(sizes):
        rows = [recipe[sizes[0]] * recipe[sizes[1]] // recipe[sizes[2]] for recipe in (before, now)]
        if rows[0] != rows[1]:
            formula = f"{' x '.join(sizes[:2])} / {sizes[2]}"
            yield f"an optimizer step had {rows[0]} completions and has {rows[1]} ({formula})"
    if common.issuperset(LENGTH):
        key = LENGTH[0] if max(before[LENGTH[0]], now[LENGTH[0]]) > 0 else LENGTH[1]
        follows = list(_follows_the_length(now))
        if before[key] != now[key] and follows:
            yield f"{key} was {before[key]} and is {now[key]}, which {' and '.join(follows)} would follow"


def _follows_the_length(recipe: Mapping[str, Any]) -> Iterator[str]:
    warmup = recipe.get("warmup_steps") or 0
    schedule = recipe.get("lr_scheduler_type")
    if schedule not in WITHOUT_END or 0 < warmup < 1:
        yield f"the learning rate (lr_scheduler_type: {schedule})"
    if recipe.get("noise_mode", "none") != "none":
        yield f"the noise (noise_mode: {recipe['noise_mode']})"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
