"""Test edge cases of writing to and reading from a run's folder; test_resume.py tests whole runs."""

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import hub_stand_in
import huggingface_hub
import peft
import pytest
import torch
import transformers
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers.trainer_utils import HubStrategy

from qerl_recipes.files.run_state import CheckpointMismatch, read_state
from qerl_recipes.model import loading, norms
from qerl_recipes.train import checkpoints
from qerl_recipes.train.checkpoints import SavingTrainer, load_adapter
from qerl_recipes.train.divergence import Diverged
from qerl_recipes.train.preflight import resume_point
from qerl_recipes.train.run import finish


def test_the_last_step_is_saved_even_in_the_middle_of_a_rollout(make_trainer, make_nvfp4):
    settings = {"steps_per_generation": 2, "per_device_train_batch_size": 4, "max_steps": 3}
    trainer = make_trainer(make_nvfp4("qwen2"), save_strategy="steps", save_steps=2, **settings)
    trainer._run = dataclasses.replace(trainer._run, base="somebody/model")  # as a hub's model is named
    trainer.train()
    run = Path(trainer.args.output_dir)
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-2", "checkpoint-3", "metrics.jsonl"]
    config = json.loads((run / "checkpoint-3" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "somebody/model", "PEFT finds the base on other machines too"
    card = (run / "checkpoint-3" / "README.md").read_text()
    assert f"policy={run}/checkpoint-3" in card and ".partial" not in card, "its commands name where it lies"
    assert trainer._get_output_dir(None) == str(run), "what is saved next does not go into that checkpoint"
    trainer.args.resume_from_checkpoint = True
    point = resume_point(trainer.args, {})
    assert point.folder == run / "checkpoint-3" and point.is_finished
    trainer.args.max_steps = 6
    with pytest.raises(CheckpointMismatch, match="checkpoint-3 is of a run that ended in the middle of a rollout"):
        resume_point(trainer.args, {})
    trainer.args.resume_from_checkpoint = run / "checkpoint-2"
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 4, "rew')
    point = resume_point(trainer.args, {})
    assert point.folder == run / "checkpoint-2" and [line["step"] for line in point.metrics] == [1, 2]
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write("\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 4 is no JSON"):
        resume_point(trainer.args, {})


def test_the_card_of_a_push_names_what_a_reader_of_the_hub_can_serve(make_trainer, make_nvfp4):
    trainer = make_trainer(make_nvfp4("qwen2"))
    trainer.args.push_to_hub, trainer.hub_model_id = True, "me/policy"
    base, named = Path(trainer._run.base), []

    def commands():
        trainer._save()
        text = (Path(trainer.args.output_dir) / "README.md").read_text()
        assert f"{base}" not in text and f"{trainer.args.output_dir}" not in text
        pushed = json.loads((Path(trainer.args.output_dir) / "adapter_config.json").read_text())
        named.append((pushed["base_model_name_or_path"], pushed["revision"]))
        lines = [line for line in text.splitlines() if line.startswith("vllm serve")]
        assert len(lines) == 2 and all(line.endswith(" policy=me/policy") for line in lines)
        return text, {line.partition(" --enable-lora")[0].removesuffix(" --quantization qerl_nvfp4") for line in lines}

    trainer._recipe = {"model_name_or_path": str(base), "model_revision": "main"}
    text, served = commands()
    assert served == {f"vllm serve {base.name}"} and "stands for a folder that is not on the hub" in text
    (base / "quantize_report.json").write_text('{"hub": "somebody/model"}')
    text, served = commands()
    assert served == {"vllm serve somebody/model"} and "stands for a folder" not in text
    assert "base_model: somebody/model\n" in text and "made the folder with this hash" in text
    trainer._recipe = {"model_name_or_path": "a/b", "model_revision": "v2"}
    text, served = commands()
    assert served == {"vllm serve a/b --revision v2"} and "made the folder with this hash" not in text
    assert named == [(base.name, None), ("somebody/model", None), ("a/b", "v2")], "PEFT loads the base by these"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Let this process push to the stand-in."""
    for name, value in {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    with hub_stand_in.Hub(tmp_path / "hub") as served:
        api = huggingface_hub.HfApi(endpoint=served.endpoint, token=hub_stand_in.TOKEN)
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", api)
        yield served


def test_a_push_brings_what_others_load_and_no_path_of_this_machine(
    make_trainer, make_nvfp4, hub, monkeypatch, tmp_path
):
    saves = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1, "train_norms": True}
    pushes = {"push_to_hub": True, "hub_model_id": "me/policy", "hub_strategy": "every_save"}
    trainer = make_trainer(make_nvfp4("qwen2"), **saves, **pushes)
    data, run = tmp_path / "data.jsonl", Path(trainer.args.output_dir)
    data.touch()
    recipe = {
        "model_name_or_path": trainer._run.base,
        "dataset_name": os.path.relpath(data),
        "reward_funcs": [str(data)],
    }
    trainer._recipe = {**recipe, "output_dir": str(run), "learning_rate": 0.5}
    trainer.train()
    finish(trainer)
    for strategy in (HubStrategy.END, HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
        trainer.args.hub_strategy = strategy
        trainer._push_saved(run / "checkpoint-1")
        trainer._finish_current_push()
    titles, brought = zip(*hub.commits, strict=True)
    saved = "Training in progress, step 1"
    assert titles == (saved, "End of training", saved, saved), "nothing is pushed at a save with END"
    to_load = {"README.md", "adapter_config.json", "adapter_model.safetensors", "norms.safetensors"}
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    assert brought[0].keys() - tokenizer == brought[1].keys() - tokenizer == to_load
    resumable = {"optimizer.pt", "trainer_state.json", "qerl_state.json"}
    for files, name in ((brought[2], "last-checkpoint"), (brought[3], "checkpoint-1")):
        inside = {file.removeprefix(f"{name}/") for file in files if file.startswith(f"{name}/")}
        assert inside >= resumable | to_load and {file for file in files if "/" not in file} == brought[0].keys()
        assert read_state(hub.root / "models" / "me" / "policy" / name).recipe == {"learning_rate": 0.5}
    for files in brought:
        assert not [name for name, content in files.items() if os.fsencode(tmp_path) in content]
    assert read_state(run / "checkpoint-1").recipe == trainer._recipe, "evaluations and reports here read it"
    downloaded = hub.root / "models" / "me" / "policy" / "last-checkpoint"
    trainer.args.output_dir, trainer.args.resume_from_checkpoint = str(tmp_path / "elsewhere"), str(downloaded)
    assert resume_point(trainer.args, trainer._recipe).folder == downloaded
    trainer.args.hub_revision, asked = "ours", []  # the stand-in has one branch
    api = SimpleNamespace(upload_folder=lambda **options: asked.append(options["revision"]))
    monkeypatch.setattr(checkpoints, "hf_api", lambda: api)
    trainer.push_to_hub()
    assert asked == ["ours"]


@pytest.mark.parametrize("always", [True, False])
def test_an_upload_in_progress_holds_the_next_one_up_or_replaces_it(always):
    pushed, args = [], SimpleNamespace(hub_strategy=HubStrategy.EVERY_SAVE, hub_always_push=always)
    run = SimpleNamespace(args=args, push_in_progress=SimpleNamespace(is_done=lambda: False))
    run.is_world_process_zero, run.state = (lambda: True), SimpleNamespace(global_step=3)
    run.push_to_hub = lambda title, **options: pushed.append(title)
    SavingTrainer._push_saved(run, Path("checkpoint-3"))
    assert pushed == ["Training in progress, step 3"] * always


def test_a_resumed_run_goes_on_counting(make_trainer, make_nvfp4, resume):
    trainer = make_trainer(make_nvfp4("qwen2"), max_steps=2, save_strategy="steps", save_steps=1)
    trainer.train()
    first, second = (Path(trainer.args.output_dir) / f"checkpoint-{step}" for step in (1, 2))
    shutil.rmtree(second)

    def change(**entries):
        state = json.loads((first / "qerl_state.json").read_text())
        (first / "qerl_state.json").write_text(json.dumps({**state, **entries}))

    change(seconds=1000.0)
    resume(trainer)  # the engine has had two adapters already
    state = read_state(second)
    assert state.adapter_version == 2 and 1000 < state.seconds < 2000


def trained_to_nothing(trainer, read_metrics, message):
    """Train until the run is refused, and return the names in its folder; everything saved must be finite."""
    with pytest.raises(Diverged, match=message):
        trainer.train()
    run = Path(trainer.args.output_dir)
    with pytest.raises(Diverged) if "nothing is saved" in message else contextlib.nullcontext():
        trainer.save_adapter(run / "adapter")
    for file in run.glob("*/adapter_model.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(file).values()), file
    assert all(math.isfinite(record[key]) for record in read_metrics(run) for key in ("loss", "grad_norm"))
    return sorted(path.name for path in run.iterdir())


EACH_STEP = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "lr_scheduler_type": "constant"}


def nan_loss(loss, weight):
    return loss + torch.nan


def nan_in_both(loss, weight):
    return loss * torch.nan


def infinite_gradient(loss, weight):
    weight.register_hook(lambda gradient: gradient + torch.inf)
    return loss


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (nan_loss, r"loss is nan and the gradient norm is \d\.\d+"),
        (nan_in_both, "loss is nan and the gradient norm is nan"),
        (infinite_gradient, r"loss is -?\d\.\S+ and the gradient norm is inf"),
    ],
)
def test_a_run_stops_before_a_step_that_is_not_finite(spoil, said, make_trainer, make_nvfp4, read_metrics):
    trainer = make_trainer(make_nvfp4("qwen2"), max_steps=6, **EACH_STEP)
    compute = trainer._compute_loss
    trained = next(iter(trainer.snapshot().tensors.values()))

    def spoilt(model, inputs):
        loss = compute(model, inputs)
        return spoil(loss, trained) if trainer.state.global_step == 1 else loss

    trainer._compute_loss = spoilt
    message = rf"step 2 is not taken: its {said}\. The last .*checkpoint-1\) with a smaller learning_rate \(now 0\.01\)"
    assert trained_to_nothing(trainer, read_metrics, message) == ["adapter", "checkpoint-1", "metrics.jsonl"]
    before, now = (
        load_file(Path(trainer.args.output_dir) / of / "adapter_model.safetensors")
        for of in ("adapter", "checkpoint-1")
    )
    assert all(torch.equal(now[name], tensor) for name, tensor in before.items()), "the step was taken"


@pytest.mark.parametrize("kept", [True, False])
def test_an_adapter_that_is_not_finite_is_not_saved(kept, make_trainer, make_nvfp4, read_metrics):
    """Check a step whose weights overflow fp32 although its gradient is finite."""
    trainer = make_trainer(make_nvfp4("qwen2"), max_steps=3, train_norms=True, **EACH_STEP)
    step = trainer._save_checkpoint

    def broken_in_the_second(*args):
        if not kept or trainer.state.global_step == 2:
            with torch.no_grad():
                next(norm.weight for _, norm in norms.named_norms(trainer.model) if norm.weight.requires_grad)[
                    3
                ] = -torch.inf
        step(*args)

    trainer._save_checkpoint = broken_in_the_second
    steps = 2 if kept else 1
    ending = "adapter_name_or_path .*checkpoint-1" if kept else "There is no checkpoint to go on from; start again"
    message = (
        rf"nothing is saved of step {steps}: 1 of \d+ trained tensors .* first of them .*norm.*weight\. .*{ending}"
    )
    names = trained_to_nothing(trainer, read_metrics, message)
    assert names == (["checkpoint-1", "metrics.jsonl"] if kept else ["metrics.jsonl"])


@pytest.fixture
def make_policy(make_nvfp4):
    def make(**settings):
        lora = peft.LoraConfig(**{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **settings})
        return peft.get_peft_model(loading.load(make_nvfp4("qwen2"), torch.float32), lora)

    return make


def test_an_adapter_is_loaded_with_its_norms_or_not_at_all(make_policy, tmp_path):
    policy, fresh, file = make_policy(), make_policy(), tmp_path / "adapter_model.safetensors"
    norms.make_trainable(policy)
    with torch.no_grad():
        for weight in policy.parameters():
            if weight.requires_grad:
                weight += 0.5
    saved = {name: tensor.clone() for name, tensor in get_peft_model_state_dict(policy).items()}
    save_file(saved, file)
    norms.save_norms(norms.trained_norms(norms.named_norms(policy)), tmp_path)
    load_adapter(fresh, tmp_path)
    loaded = get_peft_model_state_dict(fresh)
    assert loaded.keys() == saved.keys() and all(torch.equal(loaded[name], saved[name]) for name in saved)
    weights = dict(norms.named_norms(fresh))
    trained = load_file(tmp_path / "norms.safetensors")
    assert len(trained) == 4 and all(torch.equal(weights[name].weight, trained[name]) for name in trained)

    name = next(iter(saved))
    others = {
        "of a smaller rank": (make_policy(r=2), saved),
        "of fewer modules": (make_policy(target_modules=["q_proj"]), saved),
        "without a tensor": (make_policy(), {key: tensor for key, tensor in saved.items() if key != name}),
    }
    for what, (model, tensors) in others.items():
        save_file(tensors, file)
        before = {name: tensor.clone() for name, tensor in get_peft_model_state_dict(model).items()}
        with pytest.raises(CheckpointMismatch, match=re.escape(f"{tmp_path}: its adapter does not fit this run (")):
            load_adapter(model, tmp_path)
        after = get_peft_model_state_dict(model)
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items()), what
