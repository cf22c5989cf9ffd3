import fcntl
import json
import os
import signal

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from qerl_recipes import configs, hooks, model, train
from qerl_recipes.checkpoints import CheckpointMismatch


@pytest.fixture
def run(monkeypatch):
    """train.main, with its engine shut down afterwards."""
    built, build = [], train.build
    monkeypatch.setattr(train, "build", lambda *arguments: built.append(build(*arguments)) or built[-1])

    def call(*argv):
        try:
            train.main(argv)
        finally:
            while built:
                built.pop().vllm_generation.close()

    return call


@pytest.fixture
def no_build(monkeypatch):
    monkeypatch.setattr(train, "build", lambda *arguments: pytest.fail("loaded"))


def test_a_folder_that_another_training_writes_is_refused_before_anything_loads(write_recipe, no_build, tmp_path):
    (tmp_path / "run").mkdir()
    other = os.open(tmp_path / "run", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match="another training writes there; name another one"):
        train.main(["--config", write_recipe()])
    os.close(other)
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize(
    ("resume", "message"),
    [
        ("true", "run holds no whole checkpoint; leave the key out to start"),
        ("nowhere", r"nowhere is not a whole checkpoint: it has no qerl_state\.json; resume from another one"),
    ],
)
def test_nothing_to_resume_from_is_said_before_anything_loads(resume, message, write_recipe, no_build, tmp_path):
    with pytest.raises(CheckpointMismatch, match=message):
        train.main(["--config", write_recipe(), "--resume_from_checkpoint", resume])
    assert not (tmp_path / "run").exists()


def test_a_folder_with_another_run_and_a_checkpoint_of_another_one_are_refused_before_anything_loads(
    run, write_recipe, monkeypatch, tmp_path
):
    recipe = write_recipe(save_strategy="steps", save_steps=1)
    run("--config", recipe, "--max_steps", "1")
    with monkeypatch.context() as patch:
        patch.setattr(train, "build", lambda *arguments: pytest.fail("loaded"))
        with pytest.raises(CheckpointMismatch, match="run holds checkpoint-1 of an earlier run; continue it with"):
            train.main(["--config", recipe])
    with monkeypatch.context() as patch:
        patch.setattr(hooks, "find", lambda *arguments: pytest.fail("an engine was started"))
        patch.setattr(model, "load", lambda *a, **k: pytest.fail("the model was loaded"))
        for change, message in ((["--seed", "1"], "had seed: 0"), (["--dataset_size", "17"], "other training data")):
            with pytest.raises(CheckpointMismatch, match=message):
                train.main(["--config", recipe, "--resume_from_checkpoint", "true", *change])
    run("--config", recipe, "--max_steps", "2", "--resume_from_checkpoint", "true")
    assert (tmp_path / "run" / "checkpoint-2").is_dir()


def test_ctrl_c_before_the_first_checkpoint_says_that_there_is_none(write_recipe, monkeypatch, capsys, tmp_path):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "build", interrupted)
    with pytest.raises(SystemExit) as end:
        train.main(["--config", write_recipe()])
    assert end.value.code == 130
    assert capsys.readouterr().err == f"\nstopped by Ctrl-C; {tmp_path}/run holds no checkpoint yet: start again\n"


def test_ctrl_c_before_the_recipe_is_read_leaves_no_traceback(monkeypatch, capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(configs, "parse", interrupted)
    with pytest.raises(SystemExit) as end:
        train.main([])
    assert (end.value.code, capsys.readouterr().err) == (130, "\nstopped by Ctrl-C; nothing has begun\n")


def test_a_recipe_ends_in_an_adapter_and_another_run_continues_from_it(
    run, write_recipe, make_nvfp4, monkeypatch, tmp_path
):
    base = make_nvfp4("qwen2")
    monkeypatch.chdir(base.parent)
    run("--config", write_recipe(model_name_or_path=base.name), "--max_steps", "1")
    first = tmp_path / "run" / "adapter"
    state = json.loads((first / "qerl_state.json").read_text())
    assert (state["step"], state["quantization"]) == (1, "qerl_nvfp4")
    card = (first / "README.md").read_text()  # its commands are to work from any folder
    commands = [line for line in card.splitlines() if line.startswith("vllm serve")]
    assert len(commands) == 2
    assert all(line.startswith(f"vllm serve {base} ") and f" policy={first}" in line for line in commands)
    mode = (first / "README.md").stat().st_mode
    assert all(file.stat().st_mode == mode for file in first.iterdir()), "a server of another user could not read it"
    tensors = load_file(first / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    for name in list(tensors):
        tensors[name] += 1.0  # so that it can be told from a fresh adapter
    from safetensors.torch import save_file

    save_file(tensors, first / "adapter_model.safetensors", metadata={"format": "pt"})
    other = str(tmp_path / "other")
    run("--config", write_recipe(max_steps=2), "--output_dir", other, "--adapter_name_or_path", str(first))
    wrapped = PeftModel.from_pretrained(model.load(make_nvfp4("qwen2")), tmp_path / "other" / "adapter")
    after = {name.replace(".default", ""): tensor for name, tensor in wrapped.state_dict().items()}
    assert all((after[name] - tensor).abs().max() < 0.1 for name, tensor in tensors.items())


def test_an_adapter_of_another_base_is_refused_before_the_model_loads(run, write_recipe, monkeypatch, tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "qerl_state.json").write_text(json.dumps({"base": "/models/other", "base_hash": "0" * 64}))
    monkeypatch.setattr(model, "load", lambda *a, **k: pytest.fail("the model was loaded"))
    with pytest.raises(CheckpointMismatch, match="trained on another base \\(/models/other\\)"):
        run("--config", write_recipe(), "--adapter_name_or_path", str(folder))


def test_a_mixture_of_experts_is_refused_by_name_before_the_model_loads(run, write_recipe, make_bf16, monkeypatch):
    monkeypatch.setattr(model, "load", lambda *a, **k: pytest.fail("the model was loaded"))
    with pytest.raises(ValueError, match="mixture of experts"):
        run("--config", write_recipe(model_name_or_path=str(make_bf16("qwen3_moe"))))


def test_an_unknown_key_is_refused_by_name(run, write_recipe):
    with pytest.raises(ValueError, match="learnign_rate"):
        run("--config", write_recipe(learnign_rate=1e-3))


def test_the_signal_handler_is_put_back(run, write_recipe):
    before = signal.getsignal(signal.SIGTERM)
    run("--config", write_recipe(), "--max_steps", "1")
    assert signal.getsignal(signal.SIGTERM) == before
