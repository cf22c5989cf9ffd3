import fcntl
import json
import os
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from qerl_recipes.evaluate.request import Evaluation
from qerl_recipes.evaluate.run import settle
from qerl_recipes.files import base_model, run_state
from qerl_recipes.files.adapter import open_adapter
from qerl_recipes.files.run_state import CheckpointMismatch, read_state, starting_point
from qerl_recipes.model import loading as model
from qerl_recipes.recipe import configs
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.tasks.held_out import lines
from qerl_recipes.train import mismatch, preflight
from qerl_recipes.train import run as train


@pytest.fixture
def no_build(monkeypatch):
    monkeypatch.setattr(train, "build", lambda *arguments: pytest.fail("loaded"))


def test_a_folder_that_another_training_writes_is_refused(write_recipe, no_build, tmp_path):
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
def test_nothing_to_resume_from_is_refused(resume, message, write_recipe, no_build, tmp_path):
    with pytest.raises(CheckpointMismatch, match=message):
        train.main(["--config", write_recipe(), "--resume_from_checkpoint", resume])
    assert not (tmp_path / "run").exists()


def test_layers_that_the_model_lacks_are_refused_before_loading(write_recipe, no_build, tmp_path):
    recipe = write_recipe(lora_target_modules=["q_proj", "down_prj"])
    with pytest.raises(ConfigError, match="lora_target_modules: target_modules names 'down_prj', which is no linear"):
        train.main(["--config", recipe])
    LoraConfig(target_modules=["q_prj"]).save_pretrained(tmp_path)
    save_file({"model.q_prj.lora_A.weight": torch.ones(8, 8)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=f"adapter_name_or_path {tmp_path}: target_modules names 'q_prj', which is"):
        train.main(["--config", write_recipe(), "--adapter_name_or_path", str(tmp_path)])
    with pytest.raises(ConfigError, match="lora_target_modules: target_modules names 'down_prj', which is no linear"):
        train.main(["--config", recipe, "--lora_target_modules", "down_prj", "--adapter_name_or_path", str(tmp_path)])


def test_a_run_that_ended_in_mid_rollout_is_not_made_longer(write_recipe, no_build, tmp_path):
    checkpoint = tmp_path / "run" / "checkpoint-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": 1, "epoch": 0.5}))
    run_state.write_state(checkpoint, run_state.State("", "", "", False, 0, 0, "", 1, 0, 0, 1))
    recipe = write_recipe(max_steps=4, resume_from_checkpoint="true", steps_per_generation=2)
    with pytest.raises(
        CheckpointMismatch, match=r"checkpoint-1 is of a run that ended .*, each of which serves 2 steps"
    ):
        train.main(["--config", recipe])


def test_an_adapter_without_checkpoints_is_not_overwritten(train_main, write_recipe, no_build, tmp_path):
    adapter = tmp_path / "run" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")  # of another program, or cut off: no run of ours ended
    assert starting_point(tmp_path / "run", None) is None
    (adapter / "qerl_state.json").write_text("{}")
    with pytest.raises(CheckpointMismatch, match="run holds the adapter of an earlier run, which left no checkpoint"):
        train.main(["--config", write_recipe(save_strategy="no")])
    assert (adapter / "adapter_config.json").read_text() == "{}"


def test_folders_and_checkpoints_of_other_runs_are_refused(train_main, write_recipe, monkeypatch, capfd, tmp_path):
    recipe = write_recipe(save_strategy="steps", save_steps=1, lr_scheduler_type="constant", max_steps=1)
    train_main("--config", recipe)
    with monkeypatch.context() as patch:
        patch.setattr(train, "build", lambda *arguments: pytest.fail("loaded"))
        with pytest.raises(CheckpointMismatch, match="run holds checkpoint-1 of an earlier run; continue it with"):
            train.main(["--config", recipe])
    resume = ["--config", recipe, "--resume_from_checkpoint", "true"]
    changed = {"learning_rate": "0.02", "lora_alpha": "16", "noise_mode": "both", "num_generations": "2"}
    changed |= {"temperature": "0.9", "reward_weights": "2.0", "per_device_train_batch_size": "4", "lora_r": "8"}
    with monkeypatch.context() as patch:
        patch.setattr(train, "build", lambda *arguments: pytest.fail("loaded"))
        with pytest.raises(CheckpointMismatch, match=r"learning_rate was 0\.01 and is 0\.02; lora_alpha") as error:
            train.main([*resume, *(part for key, value in changed.items() for part in (f"--{key}", value))])
        text = str(error.value)
        assert all(f"{key} was " in text for key in changed if key != "per_device_train_batch_size")
        assert "an optimizer step had 8 completions and has 4 (generation_batch_size x" in text
        assert text.endswith("To start a new run from its adapter instead, use adapter_name_or_path")
        with pytest.raises(CheckpointMismatch, match=r"max_steps was 1 and is 2, which the learning rate \(lr_sched"):
            train.main([*resume, "--max_steps", "2", "--lr_scheduler_type", "linear"])
        before = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
        capfd.readouterr()
        train.main([*resume, "--logging_steps", "7", "--save_steps", "3"])
        assert f"nothing is left to do: {tmp_path}/run/checkpoint-1 is of the last step" in capfd.readouterr().out
        assert {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()} == before
    shutil.rmtree(tmp_path / "run" / "adapter")  # as if killed while writing it
    train_main(*resume)
    assert not (tmp_path / "run" / "checkpoint-2").exists()
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "run" / "adapter" / name).read_bytes() == before[tmp_path / "run" / "adapter" / name]
    with monkeypatch.context() as patch:
        patch.setattr(train, "build", lambda *arguments: pytest.fail("loaded"))
        for change, message in (("--seed 1", "; seed was 0 and is 1"), ("--dataset_size 17", "other training data")):
            with pytest.raises(CheckpointMismatch, match=message):
                train.main([*resume, "--max_steps", "2", *change.split()])
    train_main(*resume, "--max_steps", "2")
    assert (tmp_path / "run" / "checkpoint-2").is_dir()


@pytest.mark.parametrize("data", ["pick_number", "reasoning_gym"])
def test_the_printed_evaluation_has_the_held_out_problems(data, train_main, write_recipe, capfd, tmp_path):
    longer = {"max_steps": 1, "vllm_max_model_length": 160, "max_completion_length": 4}
    recipe = write_recipe(dataset_name=data, reward_funcs=["last_number"], **longer)
    train_main("--config", recipe)
    (printed,) = (line for line in capfd.readouterr().out.splitlines() if line.startswith("  qerl evaluate "))
    _, _, base, *words = shlex.split(printed)
    options = {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    evaluation = settle(Evaluation.of(base=base, **options)).evaluation
    file = tmp_path / "run" / "held_out.jsonl"
    assert evaluation.tasks == [f"jsonl-number:{file}"] and file.read_text() == lines(recipe)


def test_another_run_continues_from_a_runs_adapter(train_main, write_recipe, make_nvfp4, monkeypatch, tmp_path):
    base = make_nvfp4("qwen2")
    monkeypatch.chdir(base.parent)
    template = "{% for message in messages %}{{ '1+' + message['content'] }}{% endfor %}"
    train_main("--config", write_recipe(model_name_or_path=base.name, chat_template=template), "--max_steps", "1")
    first = tmp_path / "run" / "adapter"
    assert (first / "chat_template.jinja").read_text() == template
    state = json.loads((first / "qerl_state.json").read_text())
    assert (state["step"], state["quantization"]) == (1, "qerl_nvfp4")
    kept = {"dataset_name": "running_sum", "learning_rate": 1e-2, "system_prompt": None, "max_completion_length": 12}
    assert kept.items() <= state["recipe"].items() and state["recipe"]["reward_funcs"] == ["running_sum_format"]
    assert state["seconds"] > 0 and state["date"].startswith("20")
    card = (first / "README.md").read_text()  # its commands must work from any folder
    commands = [line for line in card.splitlines() if line.startswith("vllm serve")]
    assert len(commands) == 2
    assert all(line.startswith(f"vllm serve {base} ") and f" policy={first}" in line for line in commands)
    mode = (first / "README.md").stat().st_mode
    assert all(file.stat().st_mode == mode for file in first.iterdir()), "a server of another user could not read it"
    tensors = load_file(first / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    for name in list(tensors):
        tensors[name] += 1.0  # makes it differ from a fresh adapter
    save_file(tensors, first / "adapter_model.safetensors", metadata={"format": "pt"})
    other = str(tmp_path / "other")
    with monkeypatch.context() as patch:
        patch.setattr(train, "build", lambda *arguments: pytest.fail("loaded"))
        wrong = "--lora_r 8 --lora_alpha 64 --use_rslora true --lora_target_modules q_proj v_proj"
        message = (
            r"lora_r is 8 and the adapter's 4; lora_alpha is 64 and the adapter's 8; "
            r"use_rslora is True and the adapter's False; lora_target_modules has 4 layers and the "
            r"adapter 14 \(down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj\)\. Give these keys"
        )
        with pytest.raises(ConfigError, match=message):
            settings = ["--config", write_recipe(), "--output_dir", other, "--adapter_name_or_path", str(first)]
            train.main([*settings, *wrong.split()])
    train_main("--config", write_recipe(max_steps=2), "--output_dir", other, "--adapter_name_or_path", str(first))
    wrapped = PeftModel.from_pretrained(model.load(make_nvfp4("qwen2")), tmp_path / "other" / "adapter")
    after = {name.replace(".default", ""): tensor for name, tensor in wrapped.state_dict().items()}
    assert all((after[name] - tensor).abs().max() < 0.1 for name, tensor in tensors.items())


def test_a_resume_keeps_the_starting_adapter_of_its_run(train_main, write_recipe, make_nvfp4, monkeypatch, tmp_path):
    """Check that the starting adapter's path may change on a resume but its content may not.

    Other content would be another policy, or another reference for beta.
    """
    for name in ("first", "other"):
        lora = LoraConfig(
            r=16, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
        )
        get_peft_model(model.load(make_nvfp4("qwen2"), torch.float32), lora).save_pretrained(tmp_path / name)
    recipe = yaml.safe_load(Path(write_recipe(max_steps=1, save_strategy="steps", save_steps=1, beta=0.5)).read_text())
    recipe = {key: value for key, value in recipe.items() if not key.startswith("lora_")}  # lora_alpha becomes 32
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "lr_scheduler_type": "constant"}))
    settings = ["--config", str(tmp_path / "recipe.yaml")]
    train_main(*settings, "--adapter_name_or_path", str(tmp_path / "first"))
    shutil.move(tmp_path / "first", tmp_path / "moved")
    resume, checkpoint = (
        [*settings, "--max_steps", "2", "--resume_from_checkpoint", "true"],
        tmp_path / "run/checkpoint-1",
    )
    began = open_adapter(tmp_path / "moved").sha256()
    assert read_state(checkpoint).reference == began

    def assembled(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "assemble", assembled)
    compared = f"beta compared its policy with the adapter of SHA-256 {began[:12]}, and would with the "
    with pytest.raises(CheckpointMismatch, match=f"{compared}base; name that one as adapter_name_or_path"):
        train.main(resume)
    with pytest.raises(CheckpointMismatch, match=f"{compared}adapter of SHA-256"):
        train.main([*resume, "--adapter_name_or_path", str(tmp_path / "other")])
    with pytest.raises(SystemExit):
        train.main([*resume, "--adapter_name_or_path", str(tmp_path / "moved")])
    state = json.loads((checkpoint / "qerl_state.json").read_text())
    (checkpoint / "qerl_state.json").write_text(json.dumps({**state, "reference": None}))  # as in a run without beta
    with pytest.raises(ConfigError, match=r"resume from .*checkpoint-1: lora_alpha is 32 and the adapter's 64\. Give"):
        train.main(resume)


def test_chat_template_kwargs_reach_rollout_and_length_filter(train_main, write_recipe, monkeypatch):
    """Check with prompts of 8 to 12 characters, one token each, and a template that adds four on request."""
    from qerl_recipes.rollout.engine import VLLMRollouts
    from qerl_recipes.tasks.running_sum import tokenizer

    asked, generate = [], VLLMRollouts.generate

    def watch(self, prompts, *arguments, **options):
        asked.extend(tokenizer().batch_decode(prompts))
        return generate(self, prompts, *arguments, **options)

    monkeypatch.setattr(VLLMRollouts, "generate", watch)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if pad %}0000{% endif %}"
    options = {"chat_template": template, "chat_template_kwargs": {"pad": True}, "max_prompt_length": 12}
    train_main("--config", write_recipe(**options, dataset_size=32), "--max_steps", "1")
    assert len(asked) == 8 and all(text.endswith("=0000") and len(text) == 12 for text in asked)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"vllm_max_model_length": 23},
            r"of 16 training prompts have more than 11 tokens, the longest 12: beside them ",
        ),
        (
            {"vllm_max_model_length": None, "max_completion_length": 249},
            r"more than 7 .* max_position_embeddings of th",
        ),
        ({"vllm_max_model_length": 22, "max_prompt_length": 10}, None),
        ({"vllm_max_model_length": 24}, None),
    ],
    ids=str,
)
def test_prompts_that_leave_no_room_for_completions_are_refused(changes, message, write_recipe, monkeypatch):
    def started(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "assemble", started)  # assemble is called after the prompts were checked
    with pytest.raises(SystemExit if message is None else ConfigError, match=message):
        train.main(["--config", write_recipe(**changes)])


def test_a_template_is_read_from_its_file_and_checked(write_recipe, monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(train, "assemble", lambda *arguments, **options: made.append(options))
    file = tmp_path / "7+1="
    file.write_text("{{ messages[-1].content }}8")
    train.build(preflight.make(*configs.parse(["--config", write_recipe(), "--chat_template", str(file)])))
    text = made[0]["processing_class"].apply_chat_template(made[0]["train_dataset"][0]["prompt"], tokenize=False)
    assert text == f"{made[0]['train_dataset'][0]['prompt'][0]['content']}8"
    assert made[0]["recipe"]["chat_template"] == file.read_text()  # a resume compares the text, not the name
    file.write_text("7+1={# {{ #}")
    with pytest.raises(ConfigError, match="chat_template: what it makes of messages of user does not contain the prob"):
        train.main(["--config", write_recipe(), "--chat_template", str(file)])


def test_an_adapter_of_another_base_is_refused(train_main, write_recipe, monkeypatch, tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}')
    save_file({"q_proj.lora_A.weight": torch.ones(4, 64)}, folder / "adapter_model.safetensors")
    (folder / "qerl_state.json").write_text(json.dumps({"base": "/models/other", "base_hash": "0" * 64}))
    monkeypatch.setattr(model, "load", lambda *a, **k: pytest.fail("the model was loaded"))
    with pytest.raises(CheckpointMismatch, match="trained on another base \\(/models/other\\)"):
        train_main("--config", write_recipe(), "--adapter_name_or_path", str(folder))


def test_what_a_mixture_of_experts_cannot_have_is_refused(train_main, write_recipe, make_bf16, monkeypatch):
    monkeypatch.setattr(model, "load", lambda *a, **k: pytest.fail("the model was loaded"))
    flags = ("--config", write_recipe(model_name_or_path=str(make_bf16("qwen3_moe"))))
    attention = ("--lora_target_modules", "q_proj", "k_proj", "v_proj", "o_proj")
    with pytest.raises(ValueError, match=r"lora_target_modules: all-linear means the experts .*use .q_proj, k_proj"):
        train_main(*flags)
    with pytest.raises(ValueError, match=r"qerl_nvfp4: experts in BF16 .*qerl quantize"):
        train_main(*flags, *attention)
    with pytest.raises(ValueError, match="nf4 leaves experts in BF16"):
        train_main(*flags, *attention, "--quantization", "nf4")
    with pytest.raises(ValueError, match=r"router_aux_loss_coef.*routers are frozen"):
        train_main(*flags, *attention, "--router_aux_loss_coef", "0.001")


def test_a_downloaded_model_that_does_not_fit_is_refused(train_main, write_recipe, make_bf16, monkeypatch):
    """Check a model that is unknown while the recipe is checked; it comes from a folder instead of the hub."""
    monkeypatch.setattr(base_model, "local_folder", lambda *arguments: make_bf16("qwen2"))
    monkeypatch.setattr(model, "load", lambda *a, **k: pytest.fail("the model was loaded"))
    with pytest.raises(ValueError, match="vllm_max_model_length is 999, but somebody/model has 256 positions"):
        train_main("--config", write_recipe(model_name_or_path="somebody/model", vllm_max_model_length=999))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_run_without_a_gpu_says_that_it_is_on_the_cpu(write_recipe, monkeypatch, capsys):
    monkeypatch.setattr(train, "build", lambda *arguments: pytest.fail("told"))
    recipe = Path(write_recipe())
    recipe.write_text(recipe.read_text().replace("use_cpu: true\n", "").replace("bf16: false\n", ""))
    with pytest.raises(pytest.fail.Exception, match="told"):
        train.main(["--config", str(recipe)])
    assert "torch sees no CUDA GPU: this runs on the CPU" in capsys.readouterr().err


def test_a_recipe_in_float16_ends_in_an_adapter_that_says_so(write_recipe, train_main, tmp_path):
    train_main("--config", write_recipe(dtype="float16", fp16=True, max_steps=1))
    (row,) = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert 0 < row["logp_diff_mean"] < 4e-3  # it is 0.01 to 0.02 in bfloat16
    state = json.loads((tmp_path / "run/adapter/qerl_state.json").read_text())
    assert state["recipe"]["dtype"] == "float16"
    _, training, model_config = mismatch._recipe(open_adapter(tmp_path / "run"), [], tmp_path)
    assert training.fp16 and not training.bf16 and model_config.dtype == "float16", "measured as it was trained"
    tensors = load_file(tmp_path / "run/adapter/adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
