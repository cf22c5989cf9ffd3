"""A saved adapter as it is read from its folder, which others may write to meanwhile."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from qerl_vllm_plugin import adapter_folder
from qerl_vllm_plugin.adapter import AdapterError

CONFIG = {"r": 2, "peft_type": "LORA"}


def tensors(value):
    shapes = {"a.lora_A.weight": (2, 64), "a.lora_B.weight": (32, 2)}
    return {name: torch.full(shape, float(value), dtype=torch.bfloat16) for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path):
    save_file(tensors(1), tmp_path / "adapter_model.safetensors")
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "norms.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def changed(folder):
    """As if the next adapter were saved in place, later than the file system's clock can miss."""
    save_file(tensors(2), folder / "adapter_model.safetensors")
    os.utime(folder / "adapter_model.safetensors", ns=(1, 1))


def test_what_was_read_stays_though_the_files_are_written_anew_and_cut(folder):
    saved = adapter_folder.read(folder)
    changed(folder)
    for name in adapter_folder.FILES:
        (folder / name).open("wb").close()  # of a mapped file this would end the process at the next look
    assert saved.config == CONFIG
    assert all(torch.equal(saved.tensors[name], tensor) for name, tensor in tensors(1).items())
    assert {tensor.dtype for tensor in saved.tensors.values()} == {torch.bfloat16}
    assert torch.equal(saved.norms["model.norm.weight"], torch.ones(64))


def test_the_digest_is_of_what_was_read_or_of_nothing(folder):
    saved = adapter_folder.read(folder)
    first = adapter_folder.digest(folder, saved)
    assert adapter_folder.digest(folder, adapter_folder.read(folder)) == first
    changed(folder)
    with pytest.raises(AdapterError, match="is being written to; name it again when it is whole"):
        adapter_folder.digest(folder, saved)
    assert adapter_folder.digest(folder, adapter_folder.read(folder)) != first
    saved = adapter_folder.read(folder)
    (folder / "norms.safetensors").unlink()
    with pytest.raises(AdapterError, match="is being written to"):
        adapter_folder.digest(folder, saved)


def test_an_adapter_that_is_saved_while_it_is_read_is_refused(folder, monkeypatch):
    read = adapter_folder.read_tensor
    calls = []

    def slow(header):
        if not calls:
            changed(folder)
        calls.append(header.name)
        return read(header)

    monkeypatch.setattr(adapter_folder, "read_tensor", slow)
    with pytest.raises(AdapterError, match="is being written to"):
        adapter_folder.read(folder)
    assert len(calls) == 3
    assert torch.equal(adapter_folder.read(folder).tensors["a.lora_A.weight"], tensors(2)["a.lora_A.weight"])


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "norms.safetensors"])
@pytest.mark.parametrize("size", [0, 5, 40, -1])
def test_a_file_that_is_cut_says_what_to_do(folder, name, size):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:size])
    with pytest.raises(AdapterError, match=r"is damaged: .*save the adapter again") as error:
        adapter_folder.read(folder)
    assert "checkpoint" not in str(error.value)
