"""What is refused before a model loads, and what is just within a limit: shown on the recipe of the demo."""

import http.server
import json
import threading
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from qerl_recipes.recipe.configs import parse
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.train.preflight import check

RECIPES = Path(__file__).parents[3] / "recipes"
CPU = ["--use_cpu", "true", "--bf16", "false", "--vllm_enable_sleep_mode", "false"]


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
        (
            ["--chat_template", "/no/such.jinja"],
            "chat_template: '/no/such.jinja' is neither Jinja text nor a file with",
        ),
        (["--dataset_name", "/no/such.jsonl"], "dataset_name /no/such.jsonl: there is no such file"),
        (["--noise_schedule", "linear"], "noise_schedule: 'linear' is not one of the noise schedules: exponential"),
        (["--rollout_engine", "sglang"], "rollout_engine: 'sglang' is not one of the rollout engines: vllm"),
        (["--loss_type", "grppo"], "loss_type cannot be 'grppo'"),
        (["--model_name_or_path", "/no/such/model"], "there is no folder /no/such/model"),
        (["--adapter_name_or_path", "/no/such/adapter"], "adapter_config.json"),
        (["--lora_target_modules", "q_proj", "lm_head"], "lm_head takes no adapter"),
        (["--lora_r", "1024"], "lora_r must be 1 to 512"),
        (["--lora_alpha", "0"], "lora_alpha: 0 multiplies the adapter by 0, so that nothing would be trained; use 32"),
        (["--lora_dropout", "0.3"], "lora_dropout: 0.3 cannot be honoured; it drops activations in the trainer only"),
        (["--train_norms", "true", "--beta", "0.1"], "use beta: 0"),
        (["--steps_per_generation", "4", "--save_steps", "10"], "use a multiple of 4"),
        (["--gradient_accumulation_steps", "4", "--steps_per_generation", "2"], "whole optimizer steps"),
        (["--vllm_max_model_length", "56"], "leaves no room for a prompt"),
        (
            ["--max_prompt_length", "80", "--max_completion_length", "50", "--vllm_max_model_length", "128"],
            "max_prompt_length (80) + max_completion_length (50) is 130, more than vllm_max_model_length (128)",
        ),
        (["--vllm_max_model_length", "257"], "vllm_max_model_length is 257, but MODEL has 256 positions"),
        (
            ["--max_prompt_length", "200", "--vllm_max_model_length", "300"],
            "max_prompt_length + max_completion_length is 300, but MODEL has 256 positions",
        ),
        (["--do_eval", "true"], "do_eval: true evaluates nothing by itself; say when: eval_strategy: steps"),
        (
            ["--loss_type", "vespo", "--vllm_importance_sampling_mode", "sequence_mask"],
            "loss_type: vespo weighs tokens, not sequences: vllm_importance_sampling_mode cannot be sequence_mask",
        ),
        (["--reward_funcs", "cf_code"], "cf_code is Open-R1's and runs programs in a sandbox; rewards that execute"),
        (["--attn_implementation", "flash"], "attn_implementation cannot be 'flash'; it is one of sdpa, eager"),
        (["--optim", "galore_adamw"], "optim: galore_adamw needs a package that is not installed; "),
        (["--report_to", "clearml"], "report_to: clearml is not installed; pip install clearml, or use --report_to n"),
        (["--report_to", "wanbd"], "report_to cannot be 'wanbd'; it is one of none, azure_ml"),
        (["--dataset_size", "15"], "a rollout takes 16 prompts and the data have 15"),
        (["--save_strategy", "best"], "save_strategy: best"),
        (["--dynamic_sampling", "true", "--scale_rewards", "batch"], "dynamic_sampling replaces groups"),
        (
            ["--dynamic_sampling", "true", "--dynamic_sampling_metric", "accuracy"],
            "dynamic_sampling_metric: 'accuracy' is not one of the rewards: running_sum_correct, running_sum_for",
        ),
        (["--vllm_mode", "remote"], "vllm_mode cannot be 'remote'; it is one of colocate, server"),
        (
            ["--vllm_server_port", "9000"],
            "vllm_server_port: 9000 cannot be honoured; vllm_mode: colocate has an engine",
        ),
        (["--vllm_server_timeout", "9"], "use vllm_mode: server, or remove the key"),
        (["--generation_kwargs", '{"seed": 3}'], "generation_kwargs cannot set seed: each completion has a seed of"),
        (["--generation_kwargs", '{"temperature": 0.5}'], "generation_kwargs cannot set temperature: the engine would"),
        (["--temperature", "0"], "temperature must be at least 0.01, not 0.0: the log-probabilities of the trainer"),
        (["--temperature", "0.009"], "temperature must be at least 0.01, not 0.009"),
        (["--temperature", "nan"], "temperature must be at least 0.01, not nan"),
        (["--top_p", "1.5"], "vLLM takes no such SamplingParams: top_p must be in (0, 1]"),
        (["--min_p", "2"], "vLLM takes no such SamplingParams: min_p must be in [0, 1]"),
        (["--generation_kwargs", '{"truncate_prompt_tokens": 3}'], "Unexpected keyword argument 'truncate_prompt_tok"),
        (["--generation_kwargs", '{"min_tokens": 57}'], "min_tokens must be less than or equal to max_tokens=56"),
        (
            ["--generation_kwargs", '{"logit_bias": {"nine": 5.0}}'],
            "logit_bias has the key 'nine', which is no token id; write it as {TOKEN: BIAS}",
        ),
        (["--generation_kwargs", '{"logit_bias": {"9": 101}}'], "logit_bias of token 9 is 101; write it as"),
        (["--generation_kwargs", '{"logit_bias": {"9": NaN}}'], "logit_bias of token 9 is nan; write it as"),
        (["--generation_kwargs", '{"logit_bias": [9]}'], "logit_bias is [9]; write it as"),
        (
            ["--generation_kwargs", '{"structured_outputs": {"regex": "a"}}', "--vllm_structured_outputs_regex", "b"],
            "structured_outputs beside vllm_structured_outputs_regex would be ignored; remove one",
        ),
        (["--eval_on_start", "true"], "eval_on_start: true is the first of the evaluations of a run, and there are n"),
        (
            ["--lr_scheduler_type", "reduce_lr_on_plateau", "--eval_strategy", "epoch"],
            "lr_scheduler_type: reduce_lr_on_plateau goes by the loss of an evaluation",
        ),
        (["--dataloader_drop_last", "true"], "an evaluation would leave problems out that it counts; remove the key"),
        (["--dtype", "float32", "--bf16", "true"], "the engine would compute in float32 and the trainer in bfloat16"),
        (["--reward_funcs", "format", "format"], "reward_funcs: format is the name of several, whose means would be"),
        (
            ["--reward_funcs", "running_sum_format", "qerl_recipes.tasks.running_sum.running_sum_format"],
            "mixed in rewards/running_sum_format/mean; list each once",
        ),
        (["--vllm_enable_sleep_mode", "true"], "vllm_enable_sleep_mode needs a CUDA GPU"),
        (["--vllm_tensor_parallel_size", "2"], "must divide the number of trainer processes (1)"),
    ],
    ids=lambda value: value[0][2:] + "=" + value[-1] if isinstance(value, list) else "",
)
def test_what_cannot_run_is_refused_before_a_model_loads(flags, message, stand_ins):
    with pytest.raises(ConfigError) as error:
        check(*demo(stand_ins, *flags))
    assert message.replace("MODEL", str(stand_ins["model"])) in str(error.value)


@pytest.mark.parametrize(
    ("config", "name", "value", "message"),
    [
        ({}, "q_proj.lora_A.weight", 1.0, None),
        ({}, "q_proj.lora_A.weight", torch.inf, "q_proj.lora_A.weight holds NaN or infinite values; use an earlier ch"),
        ({}, "embed_tokens.lora_embedding_A", 1.0, "embed_tokens.lora_embedding_A is not of a linear layer of the bl"),
        (
            {"lora_dropout": 0.1},
            "q_proj.lora_A.weight",
            1.0,
            "adapter_config.json has lora_dropout: 0.1, which would d",
        ),
        ({"lora_alpha": 0}, "q_proj.lora_A.weight", 1.0, "adapter_config.json: lora_alpha: 0 multiplies the adapter"),
    ],
    ids=["plain", "infinite", "embedding", "dropout", "alpha"],
)
def test_an_adapter_to_begin_from_is_refused_before_a_model_loads(config, name, value, message, stand_ins, tmp_path):
    plain = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps({**plain, **config}))
    save_file({f"base_model.model.{name}": torch.full((4, 8), value)}, tmp_path / "adapter_model.safetensors")
    settings = demo(stand_ins, "--adapter_name_or_path", str(tmp_path))
    if message is None:
        return check(*settings)
    with pytest.raises(ConfigError, match="adapter_name_or_path: ") as error:
        check(*settings)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "flags",
    [
        ["--max_prompt_length", "78", "--max_completion_length", "50", "--vllm_max_model_length", "128"],
        ["--vllm_max_model_length", "256"],
        ["--loss_type", "vespo"],
        ["--temperature", "0.01", "--generation_kwargs", '{"stop": ["</answer>"]}'],
        ["--generation_kwargs", '{"logit_bias": {"9": 100, "10": -100.0}}'],
        ["--dtype", "float32"],
        ["--eval_on_start", "true", "--eval_strategy", "epoch"],
        ["--report_to", "all"],  # that are installed
        ["--dynamic_sampling", "true", "--dynamic_sampling_metric", "running_sum_correct"],
        ["--dynamic_sampling", "true", "--dynamic_sampling_metric", "total"],
        ["--save_steps", "0.5"],
        ["--do_eval", "true", "--eval_strategy", "steps", "--eval_steps", "2"],
    ],
    ids=lambda flags: " ".join(flags),
)
def test_what_is_just_within_a_limit_is_not_refused(flags, stand_ins):
    check(*demo(stand_ins, *flags))


def test_a_completion_as_long_as_the_model_is_refused_where_the_engine_has_the_model_s_length(stand_ins):
    script, training, model = demo(stand_ins, "--max_completion_length", "256")
    training.vllm_max_model_length = None
    with pytest.raises(ConfigError, match=r"max_completion_length \(256\) leaves no room for a prompt in the 256 posi"):
        check(script, training, model)
    training.max_completion_length = 255
    check(script, training, model)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_positions_that_the_model_stretches_are_left_to_the_engine(key, stand_ins, tmp_path):
    config = {
        "model_type": "qwen2",
        "max_position_embeddings": 256,
        key: {"rope_type": "linear", "factor": 4},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(*demo(stand_ins, "--model_name_or_path", str(tmp_path), "--vllm_max_model_length", "1000"))


class Hub(http.server.BaseHTTPRequestHandler):
    """Knows the token hf_known and no other."""

    def do_GET(self):
        known = self.headers.get("Authorization") == "Bearer hf_known"
        self.send_response(200 if known and self.path == "/api/whoami-v2" else 401)
        self.end_headers()
        self.wfile.write(b'{"name": "somebody"}')

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def hub():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_push_that_the_hub_would_not_take_is_refused(stand_ins, hub, monkeypatch):
    constants, push = huggingface_hub.constants, ["--push_to_hub", "true"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)

    def refused(*flags):
        with pytest.raises(ConfigError) as error:
            check(*demo(stand_ins, *push, *flags))
        assert str(error.value).endswith("--push_to_hub false")
        return str(error.value)

    assert "push_to_hub needs a token of the Hugging Face hub" in refused()
    with pytest.raises(ConfigError, match="log_completions_hub_repo needs a token of the Hugging Face hub"):
        check(*demo(stand_ins, "--log_completions", "true", "--log_completions_hub_repo", "somebody/table"))
    monkeypatch.setattr(constants, "ENDPOINT", hub)
    assert f"{hub} does not take this token" in refused("--hub_token", "hf_other")
    check(*demo(stand_ins, *push, "--hub_token", "hf_known"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "127.0.0.1:9 does not take this token" in refused("--hub_token", "hf_known")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refused("--hub_token", "hf_known")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--top_p", "0.9", "--top_k", "20"], r"^top_p: 0\.9, top_k: 20: completions .* 1 by it, correct for it$"),
        (["--min_p", "0.1", "--noise_mode", "rollout"], r"^min_p: 0\.1: completions are drawn from .* by it, are off$"),
        (["--generation_kwargs", '{"min_tokens": 2}'], r"^generation_kwargs: min_tokens: completions are drawn from"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_sampling_from_a_part_of_the_distribution_is_said(flags, named, stand_ins):
    with pytest.warns(UserWarning, match=named):
        check(*demo(stand_ins, *flags))


def test_several_processes_must_have_whole_groups_to_replace(stand_ins, monkeypatch):
    script, training, model = demo(stand_ins, "--dynamic_sampling", "true")
    training.per_device_train_batch_size = training.num_generations // 2
    training.steps_per_generation = training.gradient_accumulation_steps = 1
    monkeypatch.setattr(type(training), "world_size", 2)
    with pytest.raises(ConfigError, match=r"needs whole groups on each: .* must be a multiple of num_generations"):
        check(script, training, model)


def test_all_that_is_wrong_is_said_at_once(stand_ins):
    with pytest.raises(ConfigError) as error:
        check(*demo(stand_ins, "--loss_type", "x", "--noise_schedule", "y", "--reward_funcs", "z"))
    assert all(f"'{name}'" in str(error.value) for name in "xyz")


def test_answers_that_are_not_there_are_refused_in_training_and_held_out_data(stand_ins, tmp_path):
    for name, answer in (("train", '"3"'), ("test", "null")):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"prompt": "1+2={name}", "answer": {answer}}}\n' * 8)
    flags = ["--dataset_name", str(tmp_path), "--dataset_size", "8", "--reward_funcs", "exact_answer"]
    flags += ["--reward_weights", "1.0", "--per_device_train_batch_size", "8", "--num_generations", "2"]
    check(*demo(stand_ins, *flags))  # the held-out ones are not read
    with pytest.raises(ConfigError, match="column answer, which is empty in 8 of the 8 rows of the held-out"):
        check(*demo(stand_ins, *flags, "--eval_strategy", "epoch"))


def test_columns_that_cannot_reach_a_reward_are_refused(stand_ins, tmp_path):
    rows = [{"prompt": f"{i}+1=", "answer": "1", "prompts": "a", "completions": "b", "image": None} for i in range(16)]
    mine = tmp_path / "mine.jsonl"
    mine.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--dataset_name", str(mine), "--dataset_size", "16")
    with pytest.raises(ConfigError) as error:
        check(*demo(stand_ins, *flags))
    for name in ("prompts", "completions"):
        assert f"the column {name} of the training data is what TRL calls its own; remove it, or" in str(error.value)
    assert "the column image of the training data is read as pictures, and a policy here reads" in str(error.value)
    renamed = {name: f"my_{name}" for name in ("prompts", "completions", "image")}
    assert json.dumps({"columns": {"image": "my_image"}}) in str(error.value)
    check(*demo(stand_ins, *flags, "--dataset_kwargs", json.dumps({"columns": renamed})))


def test_evaluation_during_training_needs_held_out_problems(stand_ins, tmp_path):
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(32)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--dataset_name", str(tmp_path / "sums.jsonl"), "--eval_strategy", "epoch", "--dataset_size", "16"]
    with pytest.raises(ConfigError, match="eval_strategy: epoch needs held-out problems") as error:
        check(*demo(stand_ins, *flags))
    assert "a folder with train.jsonl and test.jsonl" in str(error.value)
    cut = [part.partition(" ")[0].strip("'.") for part in str(error.value).split("_split: ")[1:]]
    assert cut == ["train[:90%]", "train[90%:]"]  # what it advises works
    check(*demo(stand_ins, *flags, "--dataset_train_split", cut[0], "--dataset_test_split", cut[1]))
    check(*demo(stand_ins, "--eval_strategy", "epoch"))


@pytest.mark.parametrize(
    ("arm", "config", "message"),
    [
        ("qerl_nvfp4", {"num_experts": 8}, "mixture of experts"),
        ("bf16", {"quantization_config": {"quant_method": "compressed-tensors"}}, "starts from a BF16 checkpoint"),
        ("nf4", {"quantization_config": {"quant_method": "gptq"}}, "quantized already (gptq)"),
        ("qerl_nvfp4", {"quantization_config": {"quant_method": "awq"}}, "awq"),
        ("qerl_nvfp4", None, "no readable config.json"),
        ("qerl_nvfp4", {"vocab_size": 9}, "generation_kwargs: logit_bias has the token 9, and MODEL has 9 (0 to 8)"),
    ],
    ids=["experts", "bf16 of a quantized", "nf4 of a quantized", "awq", "no config", "tokens"],
)
def test_a_checkpoint_that_does_not_fit_the_arm_is_refused(arm, config, message, stand_ins, tmp_path):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as error:
        flags = ["--quantization", arm, "--generation_kwargs", '{"logit_bias": {"9": 5.0, "8": 5.0}}']
        check(*demo(stand_ins, "--model_name_or_path", str(tmp_path), *flags))
    assert message.replace("MODEL", str(tmp_path)) in str(error.value)


def test_keys_of_a_tracker_that_is_not_asked_for_are_said_to_be_without_effect(stand_ins, recwarn):
    flags = ["--wandb_project", "p", "--wandb_run_group", "g", "--report_to"]
    check(*demo(stand_ins, *flags, "none"))
    said = [str(w.message) for w in recwarn if "without effect" in str(w.message)]
    assert said == [
        "wandb_project, wandb_run_group: without effect, for report_to has no wandb; add it, or remove them"
    ]
    script, training, model = demo(stand_ins, *flags, "none")
    training.report_to = ["wandb"]  # installed nowhere here, so that validate refuses it: but not for its keys
    recwarn.clear()
    with pytest.raises(ConfigError, match="report_to: wandb is not installed"):
        check(script, training, model)
    assert not [w for w in recwarn if "without effect" in str(w.message)]
