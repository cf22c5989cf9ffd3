"""Train a recipe by TRL's own trainer, to compare ours with it: LoRA on BF16 weights, or all weights.

Prompts, rewards and every setting that TRL has are those that `qerl train` would use.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_recipes.recipe.configs import (
    DTYPES,
    GRPOConfig,
    ModelConfig,
    ScriptArguments,
    parse,
    tracker_environment,
)
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.recipe.keys import CANNOT_RUN
from qerl_vllm_plugin.adapter.folder import STATE_FILE

if TYPE_CHECKING:  # what imports vLLM comes after ``main`` has put its plugins off
    import trl

    from qerl_recipes.train.preflight import Preflight

# keys that stock TRL has not, or that this command leaves to `qerl train`, with the value that they must have. By hand:
# each is the gate of others (without noise_mode there is no sigma), and keys that change speed alone may have any value
NEEDED: dict[str, Any] = {
    "quantization": "bf16",
    "noise_mode": "none",
    "train_norms": False,
    "dynamic_sampling": False,
    "adapter_name_or_path": None,
    "tools": [],
    "environments": None,
    "rollout_func": None,
    "rollout_engine": "vllm",
    "vllm_mode": "colocate",
    "vllm_speculative_config": None,
    "chat_template": None,
    "eval_strategy": "no",
    "fp16": False,
    "resume_from_checkpoint": None,
    "push_to_hub": False,
}


def problems(script: ScriptArguments, training: GRPOConfig) -> list[str]:
    """Return a line for each key of a recipe that stock TRL would not honour."""
    values = {**vars(script), **vars(training)}
    return [
        f"{key}: {values[key]} is not for stock TRL, which trains here with {key}: {needed}"
        for key, needed in NEEDED.items()
        if values[key] != needed
    ]


def main(argv: Sequence[str], *, all_weights: bool = False) -> None:
    """Train as recipe and flags in ``argv`` say; save the adapter, or with ``all_weights`` the model in its dtype."""
    os.environ["VLLM_PLUGINS"] = ""  # vLLM as it is without this project
    script, training, model = parse(argv)
    if found := problems(script, training):
        raise ConfigError(f"{CANNOT_RUN}:\n" + "\n".join(f"  - {problem}" for problem in found))
    import torch

    from qerl_recipes.files import run_state
    from qerl_recipes.files.whole_folder import whole_folder
    from qerl_recipes.train import preflight

    folder = Path(training.output_dir) / (run_state.MODEL if all_weights else run_state.LAST)
    if folder.exists():
        raise ConfigError(f"output_dir: {folder} is there; name another one")
    os.environ.update(tracker_environment(training))
    began, run = time.monotonic(), preflight.make(script, training, model)
    trainer = _trainer(run, all_weights)
    if training.tf32:  # which vLLM's worker has switched off in this process
        torch.set_float32_matmul_precision("high")
    trainer.train()
    state, policy = trainer.state, trainer.accelerator.unwrap_model(trainer.model)
    if all_weights:
        policy.to("cpu", DTYPES[run.model.dtype or "bfloat16"])
    else:
        policy.peft_config["default"].base_model_name_or_path = run.run.base
    with whole_folder(folder, overwrite=False, proof=STATE_FILE) as unfinished:
        policy.save_pretrained(unfinished)
        run.tokenizer.save_pretrained(unfinished)
        reached = run_state.State(
            **asdict(run.run),
            step=state.global_step,
            rollout=state.global_step,
            stream=0,
            adapter_version=state.global_step,
            recipe=run.recorded,
            seconds=round(time.monotonic() - began, 1),
        )
        run_state.write_state(unfinished, reached)


def config(training: GRPOConfig, model: ModelConfig) -> "trl.GRPOConfig":
    """Return TRL's configuration with every value that it shares with ``training``."""
    import trl

    values = {field.name: getattr(training, field.name) for field in fields(trl.GRPOConfig) if field.init}
    own = {"save_strategy": "no", "logging_strategy": "steps", "logging_steps": 1, "steps_per_generation": None}
    own["model_init_kwargs"] = {"dtype": model.dtype, "attn_implementation": model.attn_implementation}
    return trl.GRPOConfig(**{**values, **own})


def _trainer(run: "Preflight", all_weights: bool) -> "trl.GRPOTrainer":
    import torch
    import trl
    from transformers import TrainerCallback
    from trl.generation import vllm_generation
    from vllm import LLM

    from qerl_recipes.train.metrics import MetricsFile, named

    file = MetricsFile(run.training.output_dir)
    file.restart()

    class Record(TrainerCallback):
        """Write a line of metrics.jsonl for each step."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self.began

        def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float], **_: Any) -> None:
            if "train_runtime" not in logs:  # of the whole training, at its end
                step = {name: logs[name] for name in ("loss", "grad_norm", "learning_rate") if name in logs}
                figures = named({name: [value] for name, value in logs.items() if isinstance(value, float)})
                file.append({"step": state.global_step, **step, "step_seconds": self.seconds, **figures})

    # TRL leaves the dtype to vLLM, which rounds float32 to bfloat16 at each sync and loses much of small steps
    options: dict[str, Any] = {"dtype": run.model.dtype or "bfloat16"}
    if not torch.cuda.is_available():
        options |= help_on_a_cpu()
    elif (cache := run.training.vllm_kv_cache_memory_bytes) is not None:  # for several runs on one GPU
        options["kv_cache_memory_bytes"] = cache
    vllm_generation.LLM = partial(LLM, **options)
    return trl.GRPOTrainer(
        model=str(run.base),
        reward_funcs=run.rewards,
        args=config(run.training, run.model),
        train_dataset=run.train,
        processing_class=run.tokenizer,
        peft_config=None if all_weights else run.adapter,
        callbacks=[Record()],
    )


def help_on_a_cpu() -> dict[str, Any]:
    """Let vLLM keep each weight, into which TRL loads; return options that start its engine uncompiled on a CPU."""
    import torch
    from vllm.model_executor.layers import utils

    from qerl_recipes.rollout.arms import ENGINE_ON_CPU

    def keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = keep
    return ENGINE_ON_CPU
