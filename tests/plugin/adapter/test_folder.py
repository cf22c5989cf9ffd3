"""Test how a saved adapter is read from its folder while others may write to that folder."""

import hashlib
import json
import os

import pytest
import torch
from safetensors.torch import save_file

from qerl_vllm_plugin.adapter import folder as adapter_folder
from qerl_vllm_plugin.adapter.check import AdapterError

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
    """Save another adapter in place. Its modification time differs by more than the file system's clock can miss."""
    save_file(tensors(2), folder / "adapter_model.safetensors")
    os.utime(folder / "adapter_model.safetensors", ns=(1, 1))


def test_tensors_stay_when_their_files_are_rewritten(folder):
    saved = adapter_folder.read(folder)
    changed(folder)
    for name in adapter_folder.FILES:
        (folder / name).open("wb").close()  # if the file were mapped, the next access would end the process (SIGBUS)
    assert saved.config == CONFIG
    assert all(torch.equal(saved.tensors[name], tensor) for name, tensor in tensors(1).items())
    assert {tensor.dtype for tensor in saved.tensors.values()} == {torch.bfloat16}
    assert torch.equal(saved.norms["model.norm.weight"], torch.ones(64))


def test_the_digest_is_of_what_was_read(folder):
    saved = adapter_folder.read(folder)
    first = saved.digest()
    assert adapter_folder.read(folder).digest() == first
    changed(folder)
    second = adapter_folder.read(folder).digest()
    (folder / "norms.safetensors").unlink()
    third = adapter_folder.read(folder).digest()
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, "lora_alpha": 1}))
    assert len({first, second, third, adapter_folder.read(folder).digest()}) == 4
    assert saved.digest() == first


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


def test_norms_may_be_missing_and_no_other_file(folder):
    (folder / "norms.safetensors").unlink()
    assert adapter_folder.read(folder).norms is None
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).unlink()
        with pytest.raises(AdapterError, match=f"holds no {name}; name a folder that PEFT"):
            adapter_folder.read(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [("[1, 2]", "holds no JSON object"), ("{", "is damaged: .*save the adapter again"), ("\udc80", "is damaged")],
)
def test_a_config_that_is_no_json_object_is_refused(folder, content, message):
    (folder / "adapter_config.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(AdapterError, match=f"adapter_config.json {message}"):
        adapter_folder.read(folder)


@pytest.fixture
def base(tmp_path):
    """Write three shards: one larger than the bytes that are hashed and two smaller. They are not written in the order
    of their names."""
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "b.safetensors").write_bytes(bytes(range(256)) * 4000)
    (folder / "a.safetensors").write_bytes(b"short")
    (folder / "c.safetensors").write_bytes(b"")
    write_config(folder, model_type="qwen2", hidden_size=64)
    return folder


def write_config(folder, **config):
    (folder / "config.json").write_text(json.dumps(config))


def expected_hash(folder, config):
    """Compute the hash from its definition: 64 blocks of 4 KiB of each file, spaced from first to last as evenly as
    whole bytes allow."""
    sha = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name in ("a.safetensors", "b.safetensors", "c.safetensors"):
        content = (folder / name).read_bytes()
        last = len(content) - 4096
        starts = [last * i // 63 for i in range(64)] if last > 0 else [0] * 64
        sha.update(f"{name}:{len(content)}".encode() + b"".join(content[start : start + 4096] for start in starts))
    return sha.hexdigest()


def test_the_hash_of_a_base_covers_config_and_files(base, tmp_path):
    found = adapter_folder.base_hash(base)
    assert found == expected_hash(base, {"model_type": "qwen2", "hidden_size": 64})
    # run states and model cards store this hash: another definition would refuse every adapter saved so far
    assert found == "ecce3282a3d51b3613c19cad26275973804c1087acaf2b842f4df7cf0d261218"
    write_config(base, transformers_version="5.0", hidden_size=64, _name_or_path="/elsewhere", model_type="qwen2")
    assert adapter_folder.base_hash(base.rename(tmp_path / "moved")) == found


@pytest.mark.parametrize("place", [0, 5000, -1])
def test_a_base_of_other_bytes_names_or_config_is_another(base, place):
    found = {adapter_folder.base_hash(base)}
    content = bytearray((base / "b.safetensors").read_bytes())
    content[place] ^= 1
    (base / "b.safetensors").write_bytes(content)
    seen = [adapter_folder.base_hash(base)]
    (base / "b.safetensors").write_bytes(content + b"x")
    seen.append(adapter_folder.base_hash(base))
    (base / "b.safetensors").rename(base / "d.safetensors")
    seen.append(adapter_folder.base_hash(base))
    write_config(base, model_type="qwen2", hidden_size=65)
    seen.append(adapter_folder.base_hash(base))
    assert len(found.union(seen)) == (5 if place != 5000 else 4), "5000 lies between two blocks"


def test_an_adapter_of_another_base_is_refused(folder, base):
    assert adapter_folder.trained_on(folder) is None
    adapter_folder.check_base(folder, base)
    state = folder / "qerl_state.json"
    state.write_text(json.dumps({"base": "theirs", "base_hash": adapter_folder.base_hash(base)}))
    assert adapter_folder.trained_on(folder) == adapter_folder.base_hash(base)
    adapter_folder.check_base(folder, base)
    write_config(base, model_type="qwen3")
    with pytest.raises(AdapterError, match=r"was trained on another base \(theirs\) than the one served here"):
        adapter_folder.check_base(folder, base)
    state.write_text("{}")  # a run that did not hash its base
    adapter_folder.check_base(folder, base)
