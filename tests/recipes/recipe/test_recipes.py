"""Test every recipe of the repository: that it can run, what it says of itself, and how recipes differ."""

import json
import re
from pathlib import Path

import pytest
import yaml
from transformers.utils import is_bitsandbytes_available

from qerl_recipes.recipe.checks import steps_per_rollout
from qerl_recipes.recipe.configs import GRPOConfig, parse
from qerl_recipes.recipe.file import ConfigError, read_yaml
from qerl_recipes.train.preflight import check

RECIPES = Path(__file__).parents[3] / "recipes"
ALL = sorted(RECIPES.glob("*/grpo/*.yaml"))
MODELS = [
    *(f"Qwen2.5-{size}-Instruct" for size in ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B")),
    *(f"Qwen3-{size}" for size in ("4B", "8B", "30B-A3B")),
    "SmolLM2-135M-Instruct",
    "demo",
]
ONE_ARM = {"Qwen2.5-72B-Instruct"}
MADE_HERE = {"SmolLM2-135M-Instruct", "demo"}  # stand-ins replace these folders; arms have no own recipes
MIXTURES = {"Qwen3-30B-A3B"}  # NF4 leaves their experts, NVFP4 needs them quantized before
ARMS = {"bf16_lora", "bf16_lora_equal_rate", "nf4_lora", "nvfp4_lora", "nvfp4_lora_aqn"}
CPU = ["--use_cpu", "true", "--bf16", "false", "--vllm_enable_sleep_mode", "false"]
PAPER = [("3B", "grpo"), ("7B", "grpo"), ("7B", "dapo"), ("14B", "dapo"), ("32B", "dapo")]  # Tables 1 and 2


content = read_yaml


def own(path):
    """Return the keys that stand in the file itself, not in the one that it extends."""
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("model", MODELS)
def test_every_recipe_of_a_model_parses_and_can_run(model, stand_ins):
    for path in (path for path in ALL if path.parts[-3] == model):
        data = content(path)["dataset_name"]
        local = ["--dataset_kwargs", json.dumps({"path": str(stand_ins[data])})] if data in stand_ins else []
        is_packed = model in MIXTURES and "nvfp4" in path.stem
        stand_in = stand_ins["packed"] if is_packed else stand_ins["model"] if model in MADE_HERE else None
        own_model = ["--model_name_or_path", str(stand_in)] if stand_in else []
        script, training, policy = parse(["--config", str(path), *CPU, *local, *own_model])
        refused = []
        try:
            check(script, training, policy)
        except ConfigError as error:
            refused = str(error).splitlines()[1:]
        # Only what the machine of this test lacks may be refused.
        asked = ("quantization: nf4" if training.quantization == "nf4" else "", "optim: adamw_8bit")
        wanted = [key for key in asked if key.endswith(("nf4", training.optim.value))]
        assert [line[4:].partition(" ")[0] for line in refused] == [
            key.partition(" ")[0] for key in wanted if not is_bitsandbytes_available()
        ], path
        assert all("pip install 'bitsandbytes>=0.46.1'" in line for line in refused)
        assert (training.noise_mode != "none") == path.stem.endswith("_aqn"), path
        arm = next(part for part in path.stem.split("_") if part in ("bf16", "nf4", "nvfp4"))
        assert training.quantization == {"bf16": "bf16", "nf4": "nf4", "nvfp4": "qerl_nvfp4"}[arm], path


def test_arms_of_a_model_differ_only_in_quantization_noise_and_learning_rate():
    for folder in (RECIPES / model / "grpo" for model in MODELS if model not in MADE_HERE | ONE_ARM):
        arms = ARMS - {"nf4_lora"} if folder.parts[-2] in MIXTURES else ARMS
        paths = {path.stem: path for path in folder.glob("*.yaml") if not path.stem.startswith("paper_")}
        assert set(paths) == arms
        assert {content(path)["learning_rate"] for arm, path in paths.items() if arm != "bf16_lora"} == {1e-5}, folder


def test_a_mixture_is_refused_before_its_download(stand_ins):
    recipe = str(RECIPES / "Qwen3-30B-A3B" / "grpo" / "nvfp4_lora.yaml")
    local = ["--dataset_kwargs", json.dumps({"path": str(stand_ins["bigmath"])})]
    with pytest.raises(ConfigError, match=r"experts in BF16 .* qerl quantize SOURCE DESTINATION"):
        check(*parse(["--config", recipe, *CPU, *local]))
    check(*parse(["--config", recipe, *CPU, *local, "--model_name_or_path", str(stand_ins["packed"])]))


def test_the_paper_s_arms_differ_only_in_quantization_noise_and_learning_rate():
    for size, kind in PAPER:
        folder = RECIPES / f"Qwen2.5-{size}-Instruct" / "grpo"
        paths = {path.stem.removeprefix(f"paper_{kind}_"): path for path in folder.glob(f"paper_{kind}_*.yaml")}
        assert set(paths) == ARMS - {"bf16_lora_equal_rate"}, (size, kind)
        rates = {arm: content(path)["learning_rate"] for arm, path in paths.items()}
        assert rates == {"bf16_lora": 5e-6, "nf4_lora": 1e-5, "nvfp4_lora": 1e-5, "nvfp4_lora_aqn": 1e-5}


@pytest.mark.parametrize("kind", ["grpo", "dapo"])
def test_the_paper_s_settings_are_its_table_4(kind):
    path = RECIPES / "Qwen2.5-7B-Instruct" / "grpo" / f"paper_{kind}_nvfp4_lora_aqn.yaml"
    _, training, model = parse(["--config", str(path), *CPU])
    per_step = training.per_device_train_batch_size * training.gradient_accumulation_steps
    assert (per_step, model.lora_r, training.optim, training.temperature) == (128, 32, "adamw_8bit", 1.0)
    assert (training.epsilon, training.epsilon_high, training.beta) == (0.2, 0.28, 0.0)
    assert (training.sigma_start, training.sigma_end, training.num_stages) == (1e-2, 5e-4, 10)
    samples_updates_length = (training.num_generations, steps_per_rollout(training), training.max_completion_length)
    assert samples_updates_length == {"grpo": (8, 4, 4096), "dapo": (16, 1, 8192)}[kind]


def test_a_paper_recipe_on_eight_gpus_as_its_header_says_makes_the_paper_s_batches(monkeypatch):
    """Check 128 completions a step and the paper's updates a rollout, from the command that the header prints."""
    monkeypatch.setattr(GRPOConfig, "world_size", 8)
    for path in RECIPES.glob("*/paper_*.yaml"):
        (command,) = re.findall(r"accelerate launch --num_processes 8 -m qerl_recipes.cli train (.*)", path.read_text())
        flags = command.split()
        recipe = RECIPES.parent / flags[1]
        assert flags[0] == "--config" and own(recipe)["extends"] == f"../{path.name}"
        _, training, _ = parse(["--config", str(recipe), *flags[2:], *CPU])
        updates = {"grpo": 4, "dapo": 1}[path.stem.split("_")[1]]
        assert training.per_device_train_batch_size * 8 == 128 and steps_per_rollout(training) == updates
        assert training.splits_by_tokens and training.per_device_train_batch_size % training.num_generations == 0
