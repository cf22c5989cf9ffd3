"""Every recipe of the repository, and what is refused before a model loads."""

import json
from pathlib import Path

import pytest
import yaml

from qerl_recipes.config_file import ConfigError
from qerl_recipes.configs import parse
from qerl_recipes.validate import steps_per_rollout, validate

RECIPES = Path(__file__).parents[2] / "recipes"
ALL = sorted(RECIPES.glob("*/grpo/*.yaml"))
MODELS = [
    *(f"Qwen2.5-{size}-Instruct" for size in ("0.5B", "1.5B", "3B", "7B", "14B", "32B")),
    *(f"Qwen3-{size}" for size in ("4B", "8B")),
]
ARMS = {"bf16_lora", "bf16_lora_equal_rate", "nf4_lora", "nvfp4_lora", "nvfp4_lora_aqn"}
ARM_KEYS = {"quantization", "noise_mode", "sigma_start", "sigma_end", "num_stages", "output_dir"}
CPU = ["--use_cpu", "true", "--bf16", "false"]
SOURCE = "arXiv 2510.11696, Table 4"


def content(path):
    return yaml.safe_load(path.read_text())


def shared(path, *also_ignored):
    return {key: value for key, value in content(path).items() if key not in ARM_KEYS | set(also_ignored)}


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory):
    """Flags that point a recipe's data and the demo's model at local files of the same schema."""
    folder = tmp_path_factory.mktemp("stand_ins")
    gsm8k, big_math = folder / "gsm8k.jsonl", folder / "big_math.jsonl"
    gsm8k.write_text("".join(json.dumps({"question": f"{i}?", "answer": f"so\n#### {i}"}) + "\n" for i in range(80)))
    big_math.write_text("".join(json.dumps({"prompt": f"{i}?", "solution": f"{i}"}) + "\n" for i in range(80)))
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    return {"gsm8k": gsm8k, "bigmath": big_math, "model": model}


@pytest.mark.parametrize("path", ALL, ids=[f"{path.parts[-3]}/{path.stem}" for path in ALL])
def test_every_recipe_parses_and_can_run(path, stand_ins):
    data = content(path)["dataset_name"]
    local = ["--dataset_kwargs", json.dumps({"path": str(stand_ins[data])})] if data in stand_ins else []
    model = ["--model_name_or_path", str(stand_ins["model"])] if path.parts[-3] == "demo" else []
    script, training, policy = parse(["--config", str(path), *CPU, *local, *model])
    validate(script, training, policy)
    assert (training.noise_mode != "none") == path.stem.endswith("_aqn")
    assert (
        training.quantization
        == {"bf16": "bf16", "nf4": "nf4", "nvfp4": "qerl_nvfp4"}[
            next(part for part in path.stem.split("_") if part in ("bf16", "nf4", "nvfp4"))
        ]
    )


@pytest.mark.parametrize("model", MODELS)
def test_arms_of_a_model_differ_only_in_quantization_and_noise(model):
    folder = RECIPES / model / "grpo"
    assert {path.stem for path in folder.glob("*.yaml") if not path.stem.startswith("paper_")} == ARMS
    reference = shared(folder / "nvfp4_lora.yaml")
    for arm in ARMS - {"bf16_lora"}:
        assert shared(folder / f"{arm}.yaml") == reference, arm
    assert shared(folder / "bf16_lora.yaml", "learning_rate") == {
        key: value for key, value in reference.items() if key != "learning_rate"
    }


@pytest.mark.parametrize("model", ["Qwen2.5-7B-Instruct", "Qwen2.5-14B-Instruct", "Qwen2.5-32B-Instruct"])
@pytest.mark.parametrize("kind", ["grpo", "dapo"])
def test_the_paper_s_arms_differ_only_in_quantization_noise_and_learning_rate(model, kind):
    folder = RECIPES / model / "grpo"
    paths = {path.stem.removeprefix(f"paper_{kind}_"): path for path in folder.glob(f"paper_{kind}_*.yaml")}
    assert set(paths) == ARMS - {"bf16_lora_equal_rate"}
    reference = shared(paths["nvfp4_lora"], "learning_rate")
    assert all(shared(path, "learning_rate") == reference for path in paths.values())
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


@pytest.mark.parametrize("path", ALL, ids=[f"{path.parts[-3]}/{path.stem}" for path in ALL])
def test_every_recipe_says_what_it_was_run_on_and_where_its_learning_rate_is_from(path):
    text = path.read_text()
    head = text.partition("\n\n")[0]
    assert "# GPU: " in head
    if path.parts[-3] == "demo":
        return
    assert "# never run at this size" in head or ("peak GB: not" not in head and "commit: none" not in head)
    (rate,) = [line for line in text.splitlines() if line.startswith("learning_rate:")]
    assert SOURCE in rate or path.stem == "bf16_lora_equal_rate"
    assert "TRL 0.18" in text or path.stem.startswith("paper_")


def demo(stand_ins, *flags):
    path = RECIPES / "demo" / "grpo" / "nvfp4_lora_aqn.yaml"
    return parse(["--config", str(path), *CPU, "--model_name_or_path", str(stand_ins["model"]), *flags])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--reward_funcs", "running_sum_corect", "running_sum_format"], "'running_sum_corect' is not one of"),
        (["--reward_weights", "1.0"], "reward_weights has 1 numbers for 2 reward_funcs"),
        (["--reward_funcs", "accuracy", "format"], "reward accuracy reads the column solution"),
        (["--reward_funcs", "accuracy", "format"], """--dataset_kwargs '{"columns": {"OLD": "solution"}}'"""),
        (
            ["--mask_truncated_completions", "true", "--generation_kwargs", '{"stop": ["</answer>"]}'],
            "generation_kwargs: stop ends it so, which would mask them all",
        ),
        (["--dataset_name", "/no/such.jsonl"], "dataset_name /no/such.jsonl: there is no such file"),
        (["--noise_schedule", "linear"], "noise_schedule: 'linear' is not one of the noise schedules: exponential"),
        (["--rollout_engine", "sglang"], "rollout_engine: 'sglang' is not one of the rollout engines: vllm"),
        (["--loss_type", "grppo"], "loss_type cannot be 'grppo'"),
        (["--model_name_or_path", "/no/such/model"], "there is no folder /no/such/model"),
        (["--adapter_name_or_path", "/no/such/adapter"], "adapter_config.json"),
        (["--lora_target_modules", "q_proj", "lm_head"], "lm_head takes no adapter"),
        (["--lora_r", "1024"], "lora_r must be 1 to 512"),
        (["--train_norms", "true", "--beta", "0.1"], "use beta: 0"),
        (["--save_steps", "0.5"], "save_steps: 0.5 does not fall between rollouts"),
        (["--steps_per_generation", "4", "--save_steps", "10"], "use a multiple of 4"),
        (["--gradient_accumulation_steps", "4", "--steps_per_generation", "2"], "whole optimizer steps"),
        (["--vllm_max_model_length", "56"], "leaves no room for a prompt"),
        (["--dataset_size", "15"], "a rollout takes 16 prompts and the data have 15"),
        (["--save_strategy", "best"], "save_strategy: best"),
        (["--dynamic_sampling", "true", "--scale_rewards", "batch"], "dynamic_sampling replaces groups"),
        (["--vllm_mode", "server"], "vllm_mode: 'server' cannot be honoured"),
    ],
    ids=lambda value: value[0][2:] + "=" + value[-1] if isinstance(value, list) else "",
)
def test_what_cannot_run_is_refused_before_a_model_loads(flags, message, stand_ins):
    with pytest.raises(ConfigError) as error:
        validate(*demo(stand_ins, *flags))
    assert message in str(error.value)


def test_all_that_is_wrong_is_said_at_once(stand_ins):
    with pytest.raises(ConfigError) as error:
        validate(*demo(stand_ins, "--loss_type", "x", "--noise_schedule", "y", "--reward_funcs", "z"))
    assert all(f"'{name}'" in str(error.value) for name in "xyz")


def test_evaluation_during_training_needs_held_out_problems(stand_ins, tmp_path):
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(16)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="needs held-out problems"):
        validate(*demo(stand_ins, "--dataset_name", str(tmp_path / "sums.jsonl"), "--eval_strategy", "epoch",
                       "--dataset_size", "16"))  # fmt: skip
    validate(*demo(stand_ins, "--eval_strategy", "epoch"))


@pytest.mark.parametrize(
    ("arm", "config", "message"),
    [
        ("qerl_nvfp4", {"num_experts": 8}, "mixture of experts"),
        ("bf16", {"quantization_config": {"quant_method": "compressed-tensors"}}, "starts from a BF16 checkpoint"),
        ("nf4", {"quantization_config": {"quant_method": "gptq"}}, "quantized already (gptq)"),
        ("qerl_nvfp4", {"quantization_config": {"quant_method": "awq"}}, "awq"),
        ("qerl_nvfp4", None, "no readable config.json"),
    ],
    ids=["experts", "bf16 of a quantized", "nf4 of a quantized", "awq", "no config"],
)
def test_a_checkpoint_that_does_not_fit_the_arm_is_refused(arm, config, message, stand_ins, tmp_path):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as error:
        validate(*demo(stand_ins, "--model_name_or_path", str(tmp_path), "--quantization", arm))
    assert message in str(error.value)
