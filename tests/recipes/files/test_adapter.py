"""Test the one reader of adapter folders: which folder is meant, which run and base it belongs to, and damage."""

import contextlib
import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qerl_recipes.files.adapter import open_adapter
from qerl_recipes.files.run_state import CheckpointMismatch


def save(folder: Path, **state: object) -> Path:
    folder.mkdir(parents=True)
    save_file({"x.lora_A.weight": torch.ones(4, 8)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "base_model_name_or_path": "by/peft"}))
    if state:
        (folder / "qerl_state.json").write_text(json.dumps(state))
    return folder


def test_the_folder_of_a_run_stands_for_its_last_adapter(tmp_path: Path) -> None:
    inner = save(tmp_path / "run" / "adapter", base="org/base", quantization="bf16", recipe={"learning_rate": 1.0})
    found = open_adapter(tmp_path / "run")
    assert (found.path, found.rank, found.base, found.quantization) == (inner, 4, "org/base", "bf16")
    assert found.recipe == {"learning_rate": 1.0}
    assert open_adapter(inner) == found


def test_a_folder_of_peft_alone_says_what_its_config_says(tmp_path: Path) -> None:
    found = open_adapter(save(tmp_path / "adapter"))
    assert (found.base, found.quantization, found.recipe) == ("by/peft", None, {})
    found.check_base("any hash")


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    found = open_adapter(save(tmp_path / "adapter", base="org/base", base_hash="0" * 64))
    with pytest.raises(CheckpointMismatch, match=r"adapter was trained on another base \(org/base\); name that one"):
        found.check_base("1" * 64)
    found.check_base("0" * 64)


def test_the_hash_covers_the_norms(tmp_path: Path) -> None:
    folder = save(tmp_path / "adapter")
    before = open_adapter(folder).sha256()
    content = (folder / "adapter_model.safetensors").read_bytes()
    assert before == hashlib.sha256(b"adapter_model.safetensors" + content).hexdigest()  # old runs recorded this hash
    save_file({"model.norm.weight": torch.ones(64)}, folder / "norms.safetensors")
    assert open_adapter(folder).sha256() != before and open_adapter(folder).read()[1].keys() == {"model.norm.weight"}


def test_a_run_that_goes_on_names_its_last_whole_checkpoint(tmp_path: Path) -> None:
    counts = ("train_norms", "seed", "noise_seed", "dataset", "step", "rollout", "stream", "adapter_version")
    for step in (2, 10):
        state = dict.fromkeys(counts, 0) | {"files": {}, "versions": {}, "base_hash": ""}
        save(tmp_path / "run" / f"checkpoint-{step}", base="b", quantization="bf16", **state)
    with pytest.raises(ValueError, match=r"run is no adapter: .* its run has not ended; name .*run/checkpoint-10$"):
        open_adapter(tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("layers.0.q_proj.lora_B.weight", 1.0, None),
        ("layers.0.q_proj.lora_B.weight", torch.nan, "q_proj.lora_B.weight holds NaN or infinite values"),
        ("layers.0.q_proj.lora_B.weight", -torch.inf, "q_proj.lora_B.weight holds NaN or infinite values"),
        (
            "embed_tokens.lora_embedding_A",
            1.0,
            r"embed_tokens\.lora_embedding_A is not of a linear layer of the blocks",
        ),
        ("lm_head.lora_A.weight", 1.0, r"lm_head\.lora_A\.weight is not of a linear layer of the blocks"),
    ],
)
def test_tensors_that_nothing_serves_are_refused_by_name(
    name: str, value: float, message: str | None, tmp_path: Path
) -> None:
    folder = save(tmp_path / "adapter")
    save_file({f"base_model.model.{name}": torch.full((4, 8), value)}, folder / "adapter_model.safetensors")
    with contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message):
        open_adapter(folder).check_tensors()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("adapter_config.json", b"{", r"adapter_config\.json is damaged"),
        ("adapter_config.json", b"[]", r"adapter_config\.json holds no JSON object"),
        ("adapter_config.json", b'{"r": true}', None),
        ("qerl_state.json", b"\xff", r"qerl_state\.json is damaged"),
        ("adapter_model.safetensors", b"x", r"adapter is damaged"),
        ("norms.safetensors", b"x", r"adapter is damaged"),
    ],
)
def test_a_damaged_file_is_named(file: str, content: bytes, message: str | None, tmp_path: Path) -> None:
    folder = save(tmp_path / "adapter")
    (folder / file).write_bytes(content)
    with pytest.raises(ValueError, match=message or "whole number of at least 1"):
        found = open_adapter(folder)
        if message is None:
            found.rank  # noqa: B018
        found.read()
