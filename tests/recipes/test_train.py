import fcntl
import json
import os
import signal

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file

from qerl_recipes import model, train
from qerl_recipes.checkpoints import CheckpointMismatch


@pytest.fixture
def write_recipe(make_nvfp4, tmp_path):
    """write_recipe(**changes) -> path of a recipe of two steps on a tiny checkpoint."""

    def write(**changes):
        recipe = {
            "model_name_or_path": str(make_nvfp4("qwen2")),
            "output_dir": str(tmp_path / "run"),
            "lora_r": 4,
            "lora_target_modules": ["all-linear"],
            "dataset_name": "running_sum",
            "dataset_size": 16,
            "reward_funcs": ["running_sum_format"],
            "max_steps": 2,
            "num_generations": 4,
            "per_device_train_batch_size": 8,
            "max_completion_length": 12,
            "vllm_max_model_length": 64,
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            **changes,
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe))
        return str(path)

    return write


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


def test_a_folder_that_another_training_writes_is_refused_before_anything_loads(
    run, write_recipe, monkeypatch, tmp_path
):
    monkeypatch.setattr(train, "build", lambda *arguments: pytest.fail("loaded"))
    (tmp_path / "run").mkdir()
    other = os.open(tmp_path / "run", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match="another training writes there; name another one"):
        train.main(["--config", write_recipe()])
    os.close(other)
    assert not list((tmp_path / "run").iterdir())


def test_a_recipe_ends_in_an_adapter_and_another_run_continues_from_it(run, write_recipe, make_nvfp4, tmp_path):
    run("--config", write_recipe(), "--max_steps", "1")
    first = tmp_path / "run" / "adapter"
    state = json.loads((first / "qerl_state.json").read_text())
    assert (state["step"], state["quantization"]) == (1, "qerl_nvfp4")
    assert "vllm serve" in (first / "README.md").read_text()
    mode = (first / "README.md").stat().st_mode
    assert all(file.stat().st_mode == mode for file in first.iterdir()), "a server of another user could not read it"
    tensors = load_file(first / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    for name in list(tensors):
        tensors[name] += 1.0  # so that it can be told from a fresh adapter
    from safetensors.torch import save_file

    save_file(tensors, first / "adapter_model.safetensors", metadata={"format": "pt"})
    other = str(tmp_path / "other")
    run("--config", write_recipe(), "--output_dir", other, "--adapter_name_or_path", str(first))
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
