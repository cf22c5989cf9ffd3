"""Test what is refused before loading because of machine, model, data or adapter.

recipe/test_checks.py tests refusals that depend on keys alone.
"""

import json
from pathlib import Path

import hub_stand_in
import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from qerl_recipes.recipe.configs import GRPOConfig, parse
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.train.preflight import check

RECIPE = Path(__file__).parents[3] / "recipes" / "demo" / "grpo" / "nvfp4_lora_aqn.yaml"
CPU = ["--use_cpu", "true", "--bf16", "false", "--vllm_enable_sleep_mode", "false"]
TOKEN = "an-admin-token-of-32-characters!"


@pytest.fixture
def demo(stand_ins):
    """Return demo(*flags), which parses the demo's recipe into its three parts.

    Its model is a folder with only a config.json.
    """
    return lambda *flags: parse(
        ["--config", str(RECIPE), *CPU, "--model_name_or_path", str(stand_ins["model"]), *flags]
    )


@pytest.fixture
def refusal(demo):
    """Return refusal(*flags), which returns the message of the ConfigError."""

    def of(*flags):
        with pytest.raises(ConfigError) as error:
            check(*demo(*flags))
        return str(error.value)

    return of


REFUSED = [
    # data and rewards
    ("--reward_funcs running_sum_corect running_sum_format", "'running_sum_corect' is not one of"),
    ("--reward_weights 1.0", "reward_weights has 1 numbers for 2 reward_funcs"),
    ("--reward_funcs accuracy format", "reward accuracy reads the column solution"),
    ("--reward_funcs accuracy format", """--dataset_kwargs '{"columns": {"OLD": "solution"}}'"""),
    ("--reward_funcs code", "e2b-code-interpreter; or use code_provider: local, which runs programs on this machine"),
    ("--reward_funcs code --code_provider local", "reward code reads the column verification_info, which the train"),
    ("--reward_funcs format format", "reward_funcs: format is the name of several, whose means would be"),
    (
        "--reward_funcs running_sum_format qerl_recipes.tasks.running_sum.running_sum_format",
        "mixed in rewards/running_sum_format/mean; list each once",
    ),
    (
        "--dynamic_sampling true --dynamic_sampling_metric accuracy",
        "dynamic_sampling_metric: 'accuracy' is not one of the rewards: running_sum_correct, running_sum_for",
    ),
    ("--dataset_name /no/such.jsonl", "dataset_name /no/such.jsonl: there is no such file"),
    ("--dataset_size 15", "a rollout takes 16 prompts and the data have 15"),
    # plugins
    ("--noise_schedule linear", "noise_schedule: 'linear' is not one of the noise schedules: exponential"),
    ("--rollout_engine sglang", "rollout_engine: 'sglang' is not one of the rollout engines: vllm"),
    # model and adapter
    ("--model_name_or_path /no/such/model", "there is no folder /no/such/model"),
    ("--adapter_name_or_path /no/such/adapter", "adapter_config.json"),
    ("--vllm_max_model_length 257", "vllm_max_model_length is 257, but MODEL has 256 positions"),
    (
        "--max_prompt_length 200 --vllm_max_model_length 300",
        "max_prompt_length + max_completion_length is 300, but MODEL has 256 positions",
    ),
    (
        "--share_weights true --vllm_mode server",
        "share_weights: vllm_mode: server: the engine's are in another process",
    ),
    # machine
    ("--attn_implementation flash", "attn_implementation cannot be 'flash'; it is one of sdpa, eager"),
    ("--optim galore_adamw", "optim: galore_adamw needs a package that is not installed; "),
    ("--report_to clearml", "report_to: clearml is not installed; pip install clearml, or use --report_to n"),
    ("--report_to wanbd", "report_to cannot be 'wanbd'; it is one of none, azure_ml"),
    ("--vllm_enable_sleep_mode true", "vllm_enable_sleep_mode needs a CUDA GPU"),
    ("--vllm_tensor_parallel_size 2", "must divide the number of trainer processes (1)"),
    # keys alone
    ("--lora_r 1024", "lora_r must be 1 to 512"),
    ("--vllm_server_port 9000", "vllm_server_port: 9000 cannot be honoured"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_what_cannot_run_is_refused(flags, message, refusal, stand_ins):
    text = refusal(*flags.split(" "))
    assert text.startswith("this recipe cannot run:\n  - ")
    assert message.replace("MODEL", str(stand_ins["model"])) in text


def test_a_process_that_sees_several_gpus_is_refused(refusal, monkeypatch):
    monkeypatch.setattr(GRPOConfig, "n_gpu", 2)
    assert "sees 2 GPUs and trains on one: set CUDA_VISIBLE_DEVICES=0, or start a process for each" in refusal()


def test_all_that_is_wrong_is_said_at_once(refusal):
    text = refusal("--loss_type", "x", "--noise_schedule", "y", "--reward_funcs", "z")
    assert all(f"'{name}'" in text for name in "xyz")


@pytest.mark.parametrize(
    "flags",
    [
        "--vllm_max_model_length 256",
        "--report_to all",  # means all that are installed
        "--dynamic_sampling true --dynamic_sampling_metric running_sum_correct",
        "--dynamic_sampling true --dynamic_sampling_metric total",
        "--eval_strategy epoch",
        "--dataset_size 16",
    ],
)
def test_what_is_just_within_a_limit_is_taken(flags, demo):
    check(*demo(*flags.split()))


def test_a_completion_as_long_as_the_model_is_refused(demo):
    """Check that without vllm_max_model_length the model's own length is the limit, as in the engine."""
    script, training, model = demo("--max_completion_length", "256")
    training.vllm_max_model_length = None
    with pytest.raises(ConfigError, match=r"max_completion_length \(256\) leaves no room for a prompt in the 256 posi"):
        check(script, training, model)
    training.max_completion_length = 255
    check(script, training, model)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_positions_that_the_model_stretches_are_left_to_the_engine(key, demo, tmp_path):
    scaling = {"rope_type": "linear", "factor": 4}
    config = {"model_type": "qwen2", "max_position_embeddings": 256, key: scaling}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(*demo("--model_name_or_path", str(tmp_path), "--vllm_max_model_length", "1000"))


@pytest.mark.parametrize(
    ("arm", "config", "message"),
    [
        ("qerl_nvfp4", {"num_experts": 8}, "mixture of experts"),
        ("bf16", {"quantization_config": {"quant_method": "compressed-tensors"}}, "starts from a BF16 checkpoint"),
        ("nf4", {"quantization_config": {"quant_method": "gptq"}}, "quantized already (gptq)"),
        ("qerl_nvfp4", {"quantization_config": {"quant_method": "awq"}}, "awq"),
        ("qerl_nvfp4", None, "no readable config.json"),
        ("qerl_nvfp4", {"vocab_size": 9}, "generation_kwargs: logit_bias has the token 9, and MODEL has 9; remove it"),
        ("qerl_nvfp4", {"vocab_size": 9}, "generation_kwargs: stop_token_ids has the token 10, and MODEL has 9"),
    ],
    ids=["experts", "bf16 of a quantized", "nf4 of a quantized", "awq", "no config", "tokens", "stops"],
)
def test_a_checkpoint_that_does_not_fit_the_arm_is_refused(arm, config, message, refusal, tmp_path):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = '{"logit_bias": {"9": 5.0, "8": 5.0}, "stop_token_ids": [10]}'
    flags = ["--quantization", arm, "--generation_kwargs", tokens]
    text = refusal("--model_name_or_path", str(tmp_path), *flags)
    assert message.replace("MODEL", str(tmp_path)) in text


@pytest.mark.parametrize(
    ("config", "name", "value", "message"),
    [
        ({}, "q_proj.lora_A.weight", 1.0, None),
        ({}, "q_proj.lora_A.weight", torch.inf, "q_proj.lora_A.weight holds NaN or infinite values; use an earlier ch"),
        ({}, "embed_tokens.lora_embedding_A", 1.0, "embed_tokens.lora_embedding_A is not of a linear layer of the bl"),
        ({"lora_dropout": 0.1}, "q_proj.lora_A.weight", 1.0, "adapter_config.json has lora_dropout: 0.1, which would"),
        ({"lora_alpha": 0}, "q_proj.lora_A.weight", 1.0, "adapter_config.json: lora_alpha: 0 multiplies the adapter"),
        ({"peft_type": "LOHA"}, "q_proj.lora_A.weight", 1.0, "LOHA"),
    ],
    ids=["plain", "infinite", "embedding", "dropout", "alpha", "type"],
)
def test_an_adapter_to_start_from_must_be_served_by_engines(config, name, value, message, demo, refusal, tmp_path):
    plain = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps({**plain, **config}))
    save_file({f"base_model.model.{name}": torch.full((4, 8), value)}, tmp_path / "adapter_model.safetensors")
    flags = ["--adapter_name_or_path", str(tmp_path)]
    if message is None:
        assert check(*demo(*flags)).start.path == tmp_path
    else:
        assert f"adapter_name_or_path: {tmp_path}" in refusal(*flags) and message in refusal(*flags)


def test_beta_needs_a_start_without_trained_norms(demo, refusal, tmp_path):
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file({"base_model.model.q_proj.lora_A.weight": torch.ones(4, 8)}, tmp_path / "adapter_model.safetensors")
    save_file({"model.norm.weight": torch.ones(8)}, tmp_path / "norms.safetensors")
    flags = ["--adapter_name_or_path", str(tmp_path)]
    assert f"beta needs a reference without trained norms, and {tmp_path} has some" in refusal(*flags, "--beta", "0.1")
    check(*demo(*flags))


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "under the server's admin token; export QERL_ADMIN_TOKEN_FILE=FILE or QERL_ADMIN_TOKEN, the same"),
        ({"QERL_ADMIN_TOKEN": "short"}, "vllm_mode: server: the token of QERL_ADMIN_TOKEN is too short"),
        ({"QERL_ADMIN_TOKEN_FILE": "/no/such/file"}, "QERL_ADMIN_TOKEN_FILE: /no/such/file cannot be read"),
        ({"QERL_ADMIN_TOKEN": TOKEN}, None),
    ],
    ids=["none", "short", "no file", "good"],
)
def test_rollouts_from_a_server_need_its_admin_token(variables, message, demo, refusal, monkeypatch):
    for name in ("QERL_ADMIN_TOKEN", "QERL_ADMIN_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    flags = ["--vllm_mode", "server"]
    if message is None:
        check(*demo(*flags))
    else:
        assert message in refusal(*flags)
    check(*demo())


def test_a_push_that_the_hub_would_not_take_is_refused(demo, refusal, monkeypatch, tmp_path):
    constants, push = huggingface_hub.constants, ["--push_to_hub", "true"]
    known = [*push, "--hub_token", hub_stand_in.TOKEN]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert "push_to_hub needs a token of the Hugging Face hub" in refusal(*push)
    assert refusal(*push).endswith("--push_to_hub false")
    table = ("--log_completions", "true", "--log_completions_hub_repo", "somebody/table")
    assert "log_completions_hub_repo needs a token of the Hugging Face hub" in refusal(*table)
    with hub_stand_in.Hub(tmp_path) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        assert f"{hub.endpoint} does not take this token" in refusal(*push, "--hub_token", "hf_other")
        with pytest.warns(UserWarning, match="what is pushed will name the base model, as its folder here"):
            check(*demo(*known))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "127.0.0.1:9 does not take this token" in refusal(*known)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refusal(*known)


@pytest.fixture
def write_data(tmp_path):
    """Return write_data(rows, name), which writes the rows and returns the flags of a recipe on them."""

    def write(rows, name="train.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return ["--dataset_name", str(tmp_path), "--dataset_size", "16"]

    return write


def test_empty_answers_are_refused_in_both_splits(demo, refusal, write_data):
    write_data([{"prompt": f"1+{i}=", "answer": "3"} for i in range(16)])
    flags = write_data([{"prompt": f"2+{i}=", "answer": None} for i in range(16)], "test.jsonl")
    flags += ["--reward_funcs", "exact_answer", "--reward_weights", "1.0"]
    check(*demo(*flags))  # held-out problems are not read
    assert "column answer, which is empty in 16 of the 16 rows of the held-out" in refusal(
        *flags, "--eval_strategy", "epoch"
    )


def test_columns_that_cannot_reach_a_reward_are_refused(demo, refusal, write_data):
    row = {"answer": "1", "prompts": "a", "completions": "b", "image": None}
    flags = write_data([{"prompt": f"{i}+1=", **row} for i in range(16)])
    text = refusal(*flags)
    for name in ("prompts", "completions"):
        assert f"the column {name} of the training data is what TRL calls its own; remove it, or" in text
    assert "the column image of the training data is read as pictures, and a policy here reads" in text
    assert json.dumps({"columns": {"image": "my_image"}}) in text
    renamed = {name: f"my_{name}" for name in ("prompts", "completions", "image")}
    check(*demo(*flags, "--dataset_kwargs", json.dumps({"columns": renamed})))


def test_evaluation_during_training_needs_held_out_problems(demo, refusal, write_data):
    flags = [*write_data([{"prompt": f"{i}+1=", "answer": "1"} for i in range(32)]), "--eval_strategy", "epoch"]
    text = refusal(*flags)
    assert "eval_strategy: epoch needs held-out problems" in text
    assert "a folder with train.jsonl and test.jsonl" in text
    cut = [part.partition(" ")[0].strip("'.") for part in text.split("_split: ")[1:]]
    assert cut == ["train[:90%]", "train[90%:]"]  # the advice must work
    check(*demo(*flags, "--dataset_train_split", cut[0], "--dataset_test_split", cut[1]))


def test_keys_without_effect_are_named_unless_refused(demo, refusal, recwarn):
    flags = ["--wandb_project", "p", "--report_to"]
    check(*demo(*flags, "none"))
    assert [w for w in recwarn if "wandb_project: without effect" in str(w.message)]
    recwarn.clear()
    assert "report_to: wandb is not installed" in refusal(*flags, "wandb")
    assert not [w for w in recwarn if "without effect" in str(w.message)]
