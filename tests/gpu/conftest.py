"""Fixtures of the GPU tests, and the table that they print at the end."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROWS: list[dict[str, Any]] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" not in item.keywords:
            continue
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU: run tests/gpu/run.sh there"))


@pytest.fixture(scope="session")
def record() -> Callable[[str, Any], None]:
    """record(what, figure): one row of the table."""

    def add(what: str, figure: Any) -> None:
        ROWS.append({"what": what, "figure": figure})

    return add


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not ROWS:
        return
    terminalreporter.section("measured on this GPU")
    for row in ROWS:
        terminalreporter.write_line(f"{row['what']:<86} {row['figure']}")
    if path := os.environ.get("QERL_GPU_RESULTS"):
        Path(path).write_text(json.dumps(ROWS, indent=1))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(BF16, NVFP4) folders of a random Qwen2 with Qwen2.5-0.5B's layer sizes, 4 layers and random norms."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from qerl_recipes.quantize import quantize_checkpoint
    from qerl_recipes.running_sum import tokenizer

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=4,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.1 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    folder = tmp_path_factory.mktemp("gpu")
    model.save_pretrained(folder / "bf16")
    tokenizer().save_pretrained(folder / "bf16")
    quantize_checkpoint(folder / "bf16", folder / "nvfp4", device="cuda")
    return folder / "bf16", folder / "nvfp4"
