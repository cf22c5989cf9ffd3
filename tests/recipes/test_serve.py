import pytest

from qerl_recipes import serve
from qerl_vllm_plugin.checkpoint import CheckpointError


@pytest.mark.parametrize("model", ["./nothing", "/nowhere/at/all", "~/nothing-here", "a/b/c", "runs/nothing"])
def test_a_folder_that_is_not_there_is_refused_before_the_hub_is_asked(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(CheckpointError, match="there is no such folder"):
        serve.check(model)


def test_folders_and_model_ids_pass(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/base").mkdir(parents=True)
    for model in ("runs/base", str(tmp_path), "Qwen/Qwen2.5-7B-Instruct", "gpt2"):
        serve.check(model)


@pytest.mark.parametrize("disabled", ["1", "0"])
def test_without_torch_compile_the_server_is_told_so_and_a_users_own_word_comes_last(disabled, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", disabled)  # as on a CPU
    line = serve.command("base", ["--no-enforce-eager"])
    assert [part for part in line if "eager" in part] == ["--enforce-eager"] * int(disabled) + ["--no-enforce-eager"]
