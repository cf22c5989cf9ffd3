"""The engine that ``qerl bench rollout`` and ``qerl bench swap`` measure: random weights, of the real shapes."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_recipes.arms import ENGINE_ON_CPU
from qerl_recipes.bench_conditions import this_device
from qerl_recipes.environment import runs_on_cuda
from qerl_recipes.shapes import config_json

if TYPE_CHECKING:
    from vllm import LLM


def check_shape(shape: str) -> None:
    """Raises ValueError for an unknown shape, and for one that only a GPU can measure where there is none."""
    config_json(shape)
    if shape != "tiny" and this_device() is None:
        raise ValueError(f"shape {shape} needs a CUDA GPU; on this machine use shape tiny")


def start(config: dict[str, Any], *, length: int, sequences: int, **options: Any) -> "LLM":
    """An engine with the model of ``config`` (a config.json), for prompts of token ids."""
    from vllm import LLM

    defaults: dict[str, Any] = {"enable_prefix_caching": False, "disable_log_stats": True}
    if not runs_on_cuda(os.environ):
        defaults |= {**ENGINE_ON_CPU, "gpu_memory_utilization": 0.1}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        return LLM(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=length,
            max_num_seqs=sequences,
            **{**defaults, **options},
        )


def random_adapter(config: dict[str, Any], rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A PEFT adapter of all linears with small random values, as (tensors, config)."""
    import torch

    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, intermediate),
        "mlp.up_proj": (hidden, intermediate),
        "mlp.down_proj": (intermediate, hidden),
    }
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs, dtype=torch.bfloat16) * 0.01
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, dtype=torch.bfloat16) * 0.01
    modules = [name.rsplit(".", 1)[-1] for name in sizes]
    return tensors, {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": modules}


def in_own_process(module: str, *arguments: str) -> dict[str, Any]:
    """What ``python -m module arguments`` prints last, a JSON object.

    Its engine runs in that very process, where its weights can be measured and an adapter needs no transport. Raises
    RuntimeError if it fails.
    """
    line = [sys.executable, "-m", module, *arguments]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(line)}` ended with code {done.returncode}; its messages are above")
    return json.loads(done.stdout.strip().splitlines()[-1])
