"""Test ``qerl serve``: which models it refuses before the server starts, and the command that it makes."""

import json
import os
import shutil
import signal
import socket
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner
from waiting import PATIENCE, until

from qerl_recipes import cli
from qerl_recipes.machine import gpu, processes, serve
from qerl_vllm_plugin.adapter import AdapterError
from qerl_vllm_plugin.wire.safetensors_file import CheckpointError

TOKEN = "a-token-of-twenty-four-signs"


@pytest.fixture(autouse=True)
def without_token(monkeypatch):
    for name in ("QERL_ADMIN_TOKEN", "QERL_ADMIN_TOKEN_FILE", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("model", ["./nothing", "/nowhere/at/all", "~/nothing-here", "a/b/c", "runs/nothing"])
def test_a_folder_that_is_not_there_is_refused_before_the_hub_is_asked(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(CheckpointError, match="there is no such folder"):
        serve.check(model)


@pytest.fixture
def edited_config(make_bf16, tmp_path):
    """Return edited_config(**entries), which copies a checkpoint and changes its config.json."""

    def edited(**entries):
        folder = shutil.copytree(make_bf16("qwen2"), tmp_path / "copy")
        config = json.loads((folder / "config.json").read_text()) | entries
        given = {name: value for name, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(given))
        return folder

    return edited


def test_folders_and_model_ids_pass(make_nvfp4, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(make_nvfp4("qwen2"), tmp_path / "runs/base")
    for model in ("runs/base", str(tmp_path / "runs/base"), "Qwen/Qwen2.5-7B-Instruct", "gpt2"):
        serve.check(model)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("gpt_oss", [], "model_type 'gpt_oss': its experts"),
        (
            "gpt_oss",
            ["--additional-config", '{"qerl": {"untested_models": true}}'],
            "model_type 'gpt_oss': its experts",
        ),
        ("gemma4_text", [], "model_type 'gemma4_text': qerl_nvfp4 was never compared"),
        ("qwen3_5_moe_text", [], "model_type 'qwen3_5_moe_text': qerl_nvfp4 was never compared"),
        ("gemma4_text", ["--additional-config", '{"qerl": {"untested_models": true}}'], ""),
        ("gemma4_text", ["--quantization", "fp8"], ""),
    ],
)
def test_a_family_is_refused_before_the_server_starts(kind, options, said, edited_config):
    folder = edited_config(
        model_type=kind, quantization_config={"quant_method": "mxfp4"} if kind == "gpt_oss" else None
    )
    if said:
        with pytest.raises(ValueError, match=said):
            serve.check(str(folder), options)
    else:
        serve.check(str(folder), options)


@pytest.mark.parametrize("disabled", ["1", "0"])
def test_without_torch_compile_the_server_is_told_so_and_a_users_own_word_comes_last(disabled, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", disabled)  # set to 1 on a CPU
    line = serve.command("base", ["--no-enforce-eager"])
    assert [part for part in line if "eager" in part] == ["--enforce-eager"] * int(disabled) + ["--no-enforce-eager"]


def test_a_damaged_folder_is_refused_before_the_server_starts(make_nvfp4, monkeypatch, tmp_path):
    shutil.copytree(make_nvfp4("qwen2"), tmp_path / "base")
    shard = next((tmp_path / "base").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    monkeypatch.setattr(serve.os, "execv", lambda *a: pytest.fail("started"))
    with pytest.raises(CheckpointError, match=shard.name):
        serve.serve(str(tmp_path / "base"), [])


@pytest.mark.parametrize(
    ("arguments", "is_refused"),
    [
        ([], True),
        (["--additional-config", '{"qerl": {"policy_adapter": {"rank": 8}}}'], True),
        (["--additional-config", '{"qerl": {"weight_only": true}}'], False),
        (["--additional-config.qerl.weight_only=true"], False),
        (["--config", "serve.yaml"], False),
    ],
)
def test_what_has_more_than_weights_is_served_as_the_refusal_says(arguments, is_refused, monkeypatch):
    started, model = [], Path(__file__).parents[2] / "fixtures" / "modelopt" / "qwen2-nvfp4"
    arguments = [*arguments, "--port", "0"]  # whatever else runs on this machine
    monkeypatch.setattr(serve.os, "execv", lambda path, line: started.append(line))
    if is_refused:
        with pytest.raises(CheckpointError, match=r'additional-config \'{"qerl": {"weight_only": true}}'):
            serve.serve(str(model), arguments)
    else:
        serve.serve(str(model), arguments)
    assert [line[-len(arguments) - 2 :] for line in started] == (
        [] if is_refused else [[*arguments, "--quantization", "qerl_nvfp4"]]
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--additional-config", '{"qerl": {"polcy_adapter": {"rank": 8}}}'],
        ["--additional-config", '{"kernel": "marlin"}'],
        ["--additional-config", '{"qrel": {"policy_adapter": {"rank": 8}}}'],
        ["--port=81", '--additional_config={"qerl": {"policy_adapter": {"rank": 0}}}', "--seed", "1"],
        ["--hf-overrides", '{"quantization_config": "nvfp4"}'],
        ["--hf_overrides", '{"text_config": {"quantization_config": {}}}'],
        ["--weight-transfer-config", '{"backend": "qerl"}'],
        ["--weight_transfer_config.backend=nccl"],
        ["--additional-config", '{"qerl": {"policy_adapter": {"rank": 8}}}', "--enable_lora"],
    ],
)
def test_a_mistake_in_our_options_is_told_before_the_server_starts(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(serve.os, "execv", lambda *a: pytest.fail("started"))
    known = r"--additional-config: (unknown key 'polcy_adapter'|.*from 1 to 512|.kernel. stands beside .qerl.)"
    known += "|nothing reads the key 'qrel'"
    known += "|--hf-overrides: quantization_config|--weight-transfer-config has no place here"
    known += "|policy_adapter. and --enable-lora exclude each other"
    with pytest.raises(ValueError, match=known):
        serve.serve("gpt2", arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--additional-config", '{"qerl": {"policy_adapter": {"rank": 8}}, "other": 1}'],
        ["--additional-config", "{broken"],
        ["--additional-config"],
        ["--hf-overrides", '{"qerl": {"polcy_adapter": 1}}'],
        ["--hf-overrides", '["quantization_config"]'],
    ],
)
def test_the_options_of_others_and_what_is_no_json_are_left_to_vllm(arguments):
    serve.check("gpt2", arguments)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: shutil.rmtree(folder), "there is no such folder; name one that PEFT or"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "holds no adapter_config.json"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "holds no adapter_model.safetensors"),
        (lambda folder: (folder / "adapter_config.json").write_text('{"r": 9, "lora_alpha": 1}'), "rank 9.* most 8"),
        (lambda folder: (folder / "qerl_state.json").write_text('{"base_hash": "x"}'), "trained on another base"),
        (lambda folder: None, ""),
    ],
    ids=["folder", "config", "tensors", "rank", "base", "whole"],
)
def test_an_adapter_that_cannot_be_installed_is_refused_before_the_server_starts(change, said, make_nvfp4, tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 1}')
    (folder / "adapter_model.safetensors").touch()  # tensors are not read
    change(folder)
    options = json.dumps({"qerl": {"policy_adapter": {"rank": 8, "path": str(folder)}}})
    arguments = [str(make_nvfp4("qwen2")), ["--additional-config", options]]
    if said:
        with pytest.raises(AdapterError, match=f"{folder}.*{said}"):
            serve.check(*arguments)
    else:
        serve.check(*arguments)


@pytest.mark.parametrize(
    ("variables", "folders", "said"),
    [
        ({}, "there", "policy_folders. is given, but neither QERL_ADMIN_TOKEN nor"),
        ({"QERL_ADMIN_TOKEN": TOKEN, "VLLM_PLUGINS": "qerl"}, "nowhere", "nowhere is no directory"),
        ({"QERL_ADMIN_TOKEN": TOKEN}, None, "VLLM_PLUGINS does not name qerl"),
        ({"QERL_ADMIN_TOKEN": TOKEN, "VLLM_PLUGINS": "qerls"}, None, "VLLM_PLUGINS does not name qerl"),
        ({"QERL_ADMIN_TOKEN": "short", "VLLM_PLUGINS": "qerl"}, None, "too short"),
        ({"QERL_ADMIN_TOKEN": TOKEN, "VLLM_PLUGINS": "other,qerl"}, "there", ""),
    ],
)
def test_a_server_whose_policy_could_not_be_changed_as_asked_does_not_start(
    variables, folders, said, tmp_path, monkeypatch
):
    (tmp_path / "there").mkdir()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    options = {"policy_folders": str(tmp_path / folders)} if folders else {}
    arguments = ["gpt2", ["--additional-config", json.dumps({"qerl": options})]]
    if said:
        with pytest.raises(ValueError, match=said):
            serve.check(*arguments)
    else:
        serve.check(*arguments)


def test_an_address_where_no_server_can_listen_is_refused(monkeypatch):
    monkeypatch.setattr(serve.os, "execv", lambda *a: pytest.fail("started"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for arguments in (["--host", "127.0.0.1", f"--port={port}"], ["--port", str(port)]):
            with pytest.raises(ValueError, match=rf"cannot listen at .*:{port}: .*in use; choose another .* --port"):
                serve.serve("gpt2", arguments)
        for arguments in (["--uds", "/a", "--port", str(port)], ["--config", "c.yaml"], ["--host", "127.0.0.2"]):
            serve.check_address(["--port", "0", *arguments] if arguments[0] == "--host" else arguments)
    with pytest.raises(ValueError, match="70000: a port is a whole number from 0 to 65535"):
        serve.serve("gpt2", ["--port", "70000"])
    with pytest.raises(ValueError, match="80a: a port is a whole number from 0 to 65535"):
        serve.serve("gpt2", ["--port", "80a"])


@pytest.mark.parametrize(
    ("arguments", "found", "said"),
    [
        ([], None, "m (quantization qerl_nvfp4, kernel: exact dequantization in fp32) at http://0.0.0.0:8000/v1 (all"),
        ([], gpu.Gpu(1, True), "(quantization qerl_nvfp4, kernel: our own on tiles (kernels/)) at"),
        ([], gpu.Gpu(1, False), "(quantization qerl_nvfp4, kernel: Marlin FP4 of vLLM) at"),
        (["--host", "127.0.0.1", "--port=81"], None, "at http://127.0.0.1:81/v1"),
        (["--quantization=fp8", "--served-model-name", "n"], None, "serving n (quantization fp8) at"),
    ],
    ids=["defaults", "Hopper", "other GPU", "address", "other quantization"],
)
def test_it_is_said_what_is_served_how_and_where(arguments, found, said, monkeypatch):
    monkeypatch.setattr(serve, "installed_gpu", lambda: found)
    text = serve.announcement(serve.command("m", arguments))
    assert said in text and ("all addresses" in text) == ("--host" not in arguments)


@pytest.mark.slow
@pytest.mark.integration
def test_a_server_that_is_told_to_end_while_its_engine_starts_ends_at_once(make_nvfp4, hold_port, tmp_path):
    line = serve.command(str(make_nvfp4("qwen2")), ["--host", "127.0.0.1", "--port", str(hold_port())])
    process = processes.start(line, tmp_path / "log")
    try:
        children = psutil.Process(process.pid).children
        assert until(lambda: any("spawn_main" in " ".join(child.cmdline()) for child in children()), 200)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(PATIENCE) == 143, (tmp_path / "log").read_text()
    finally:
        processes.end(process)


def test_the_version_is_shown():
    done = CliRunner().invoke(cli.app, ["--version"])
    assert done.exit_code == 0 and done.output.startswith("qerl")
