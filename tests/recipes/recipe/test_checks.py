"""Test checks that depend on keys alone.

Keys are refused by name, taken just within a limit, or reported to have no effect.
"""

from pathlib import Path

import pytest

from qerl_recipes.files.run_state import changes, recorded
from qerl_recipes.model import shared
from qerl_recipes.recipe import checks, server_keys
from qerl_recipes.recipe.configs import parse

RECIPE = Path(__file__).parents[3] / "recipes" / "demo" / "grpo" / "nvfp4_lora_aqn.yaml"
CPU = ["--use_cpu", "true", "--bf16", "false", "--vllm_enable_sleep_mode", "false"]
SERVER = ["--vllm_mode", "server"]


def demo(*flags):
    return parse(["--config", str(RECIPE), *CPU, *flags])


def problems(*flags):
    parts = demo(*flags)
    return [*checks.problems(*parts), *server_keys.server_problems(parts[1])]


REFUSED = [
    ("--loss_type grppo", "loss_type cannot be 'grppo'; it is one of grpo, bnpo"),
    ("--vllm_mode remote", "vllm_mode cannot be 'remote'; it is one of colocate, server"),
    ("--do_eval true", "do_eval: true evaluates nothing by itself; say when: eval_strategy: steps"),
    ("--eval_on_start true", "eval_on_start: true is the first of the evaluations of a run, and there are n"),
    (
        "--lr_scheduler_type reduce_lr_on_plateau --eval_strategy epoch",
        "lr_scheduler_type: reduce_lr_on_plateau goes by the loss of an evaluation",
    ),
    (
        '--lr_scheduler_type cosine --lr_scheduler_kwargs {"min_lr_rate":0.1}',
        "lr_scheduler_type: cosine cannot go with lr_scheduler_kwargs: {'min_lr_rate': 0.1}: ",
    ),
    ("--lr_scheduler_type cosine_with_min_lr", "lr_scheduler_type: cosine_with_min_lr cannot go with lr_scheduler_kw"),
    (
        "--loss_type vespo --vllm_importance_sampling_mode sequence_mask",
        "loss_type: vespo weighs tokens, not sequences: vllm_importance_sampling_mode cannot be sequence_mask",
    ),
    ("--skip_zero_advantage true --beta 0.5", "skip_zero_advantage: true cannot go with beta: 0.5, which needs every"),
    (
        '--mask_truncated_completions true --generation_kwargs {"stop":["</answer>"]}',
        "generation_kwargs: stop ends it so, which would mask them all",
    ),
    ("--dynamic_sampling true --scale_rewards batch", "dynamic_sampling replaces groups"),
    (
        "--dynamic_sampling true --multi_objective_aggregation normalize_then_sum",
        "multi_objective_aggregation: sum_then_normalize",
    ),
    ("--steps_per_generation 4 --save_steps 10", "save_steps: 10 does not fall between rollouts, each of which serves"),
    ("--gradient_accumulation_steps 4 --steps_per_generation 2", "whole optimizer steps"),
    ("--max_steps 0", "max_steps: 0 is no limit, and trains num_train_epochs: 3; leave it out"),
    ("--save_strategy best", "save_strategy: best"),
    ("--vllm_max_model_length 56", "leaves no room for a prompt"),
    (
        "--max_prompt_length 80 --max_completion_length 50 --vllm_max_model_length 128",
        "max_prompt_length (80) + max_completion_length (50) is 130, more than vllm_max_model_length (128)",
    ),
    # sampling
    ('--generation_kwargs {"seed":3}', "generation_kwargs cannot set seed: each completion has a seed of its own"),
    ('--generation_kwargs {"temperature":0.5}', "generation_kwargs cannot set temperature: the engine would"),
    ("--temperature 0", "temperature must be at least 0.01, not 0.0: the log-probabilities of the trainer"),
    ("--temperature 0.009", "temperature must be at least 0.01, not 0.009"),
    ("--temperature nan", "temperature must be at least 0.01, not nan"),
    ("--top_p 1.5", "vLLM takes no such SamplingParams: top_p must be in (0, 1]"),
    ("--min_p 2", "vLLM takes no such SamplingParams: min_p must be in [0, 1]"),
    ('--generation_kwargs {"truncate_prompt_tokens":3}', "Unexpected keyword argument 'truncate_prompt_tok"),
    (
        "--vllm_structured_outputs_regex [0-9",
        "vLLM takes no such SamplingParams: the regex '[0-9': Grammar error: at 1(8)",
    ),
    ('--generation_kwargs {"structured_outputs":{"regx":"a"}}', "vLLM takes no such SamplingParams: "),
    ('--generation_kwargs {"min_tokens":57}', "min_tokens must be less than or equal to max_tokens=56"),
    (
        '--generation_kwargs {"logit_bias":{"nine":5.0}}',
        "logit_bias has the key 'nine', which is no token id; write it",
    ),
    ('--generation_kwargs {"logit_bias":{"9":101}}', "logit_bias of token 9 is 101; write it as {TOKEN: BIAS}"),
    ('--generation_kwargs {"logit_bias":{"9":NaN}}', "logit_bias of token 9 is nan; write it as"),
    ('--generation_kwargs {"logit_bias":[9]}', "logit_bias is [9]; write it as"),
    (
        '--generation_kwargs {"structured_outputs":{"regex":"a"}} --vllm_structured_outputs_regex b',
        "structured_outputs beside vllm_structured_outputs_regex would be ignored; remove one",
    ),
    # dtypes
    ("--dtype float32 --bf16 true", "the engine would compute in float32 and the trainer in bfloat16; use bf16: false"),
    ("--dtype float16 --bf16 true", "in float16 and the trainer in bfloat16; use fp16: true and bf16: false, or dtype"),
    ("--dtype bfloat16 --fp16 true", "fp16: true with dtype: bfloat16: the engine would compute in bfloat16"),
    ("--dtype float16 --fp16 true --quantization nf4", "dtype: float16 with quantization: nf4 is not supported"),
    # the adapter
    ("--lora_target_modules q_proj lm_head", "lm_head takes no adapter"),
    ("--lora_r 1024", "lora_r must be 1 to 512"),
    ("--lora_r 0", "lora_r must be 1 to 512, which is what vLLM serves, not 0"),
    ("--lora_alpha 0", "lora_alpha: 0 multiplies the adapter by 0, so that nothing would be trained; use 32"),
    ("--lora_dropout 0.3", "lora_dropout: 0.3 cannot be honoured; it acts in the trainer only"),
    ("--train_norms true --beta 0.1", "use beta: 0"),
    ("--dataloader_drop_last true", "dataloader_drop_last: True cannot be honoured; evaluation while training is"),
    # the optimizer and the batches
    ("--optim_args momentum=0.9", "does not read momentum=0.9; remove it, or use the adam_ keys"),
    ("--optim sgd --optim_args nesterov=true,lr=1", "optim_args: optim: sgd does not read lr=1; it reads moment"),
    ("--optim sgd --optim_args momentum", "optim: sgd does not read momentum; it reads momentum, dampening, nest"),
    ('--accelerator_config {"split_batches":true}', "accelerator_config: split_batches would cut a rollout otherwise"),
    ('--gradient_checkpointing_kwargs {"every_n_layers":2}', "{'every_n_layers': 2} cannot be honoured; it takes use_"),
    ('--gradient_checkpointing_kwargs {"use_reentrant":"no"}', "{'use_reentrant': 'no'} cannot be honoured; it takes"),
    ("--do_train false", "do_train: 'false' cannot be honoured; qerl train always trains; remove the key"),
    ("--average_tokens_across_devices false", "average_tokens_across_devices: False cannot be honoured; the loss is"),
    # a server
    ("--vllm_server_port 9000", "vllm_server_port: 9000 cannot be honoured; the address of a server is one key; use v"),
    ("--vllm_mode server --vllm_server_host me@gpu1", "vllm_server_host: '***@gpu1' cannot be honoured; the address"),
    ("--vllm_server_timeout 9", "use vllm_mode: server, or remove the key"),
    ("--overlap 1", "overlap: 1 cannot be honoured; vllm_mode: colocate has an engine of its own; use vllm_mode: serv"),
    (
        '--vllm_speculative_config {"method":"eagle"}',
        "vllm_speculative_config: method is 'eagle'; a run takes ngram, ngram",
    ),
    (
        '--vllm_speculative_config {"method":"ngram","num_speculative_tokens":4}',
        "vllm_speculative_config: prompt_lookup_max is None; ngram needs a whole number of at least 1",
    ),
    (
        '--vllm_speculative_config {"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":4,"model":"x"}',
        "vllm_speculative_config: ngram has no model; it has num_speculative_tokens, prompt_lookup_max",
    ),
    (
        '--vllm_speculative_config {"method":"suffix","num_speculative_tokens":4}',
        "vllm_speculative_config: suffix needs the package arctic-inference, which is not installed; use ngram",
    ),
    (
        '--vllm_speculative_config {"method":"suffix","suffix_decoding_max_cached_requests":1}',
        "vllm_speculative_config: suffix_decoding_max_cached_requests must be 0; a resumed run would lack what is",
    ),
    (
        '--vllm_speculative_config {"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":4} --min_p 0.1',
        "vLLM does not apply min_p to drafts; remove it or vllm_speculative_config",
    ),
    ("--vllm_mode server --overlap 2", "overlap is the number of rollouts that the server computes ahead, 0 or 1, not"),
    ("--vllm_mode server --overlap 1 --dynamic_sampling true", "overlap: 1 cannot go with dynamic_sampling"),
    (
        "--vllm_mode server --overlap 1 --sigma_start 0.1 --noise_mode engine",
        "vllm_importance_sampling_correction: true, and noise_mode: engine_is in place of engine",
    ),
    ("--vllm_mode server --overlap 1 --tools calculator", "max_tool_seconds: 60 cannot stop a tool while the trainer"),
    (
        "--vllm_mode server --overlap 1 --environments higher_lower",
        "use max_tool_seconds: null, or for environments environment_python",
    ),
    (
        "--vllm_mode server --overlap 1 --num_iterations 2 --eval_strategy steps --eval_steps 3",
        "eval_steps: 3 does not fall between rollouts, as overlap: 1 needs, each of which serves 2 steps; use a",
    ),
    (
        "--vllm_mode server --quantization bf16",
        "which only qerl_nvfp4 has, not quantization: bf16; use vllm_mode: colo",
    ),
    ("--vllm_mode server --rollout_engine x", "vllm_mode: server is a mode of rollout_engine: vllm, not of x; remove"),
    ("--vllm_mode server --vllm_tensor_parallel_size 2", "start the server with --tensor-parallel-size 2, and remove"),
    (
        "--vllm_mode server --vllm_speculative_config "
        '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":2}',
        """start the server with --speculative-config '{"method": "ngram", "num_speculative_tokens": 4, "prompt_""",
    ),
    ("--vllm_mode server --vllm_server_timeout 0", "vllm_server_timeout must be above 0 seconds, not 0"),
    (
        "--vllm_mode server --vllm_server_base_url gpu1:80",
        "'gpu1:80' is no address; it looks like http://127.0.0.1:8000",
    ),
    ("--vllm_mode server --vllm_server_base_url http://gpu1:80000", "'http://gpu1:80000' is no address"),
    ("--vllm_mode server --vllm_server_base_url http://gpu1:8000\n", r"'http://gpu1:8000\n' is no address"),
    (
        '--vllm_mode server --generation_kwargs {"detokenize":true}',
        "request to a server cannot carry detokenize; it ca",
    ),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED, ids=[flags for flags, _ in REFUSED])
def test_keys_that_cannot_run_are_refused_by_name(flags, message):
    lines = problems(*flags.split(" "))
    assert any(message in line for line in lines), lines


@pytest.mark.parametrize(
    "flags",
    [
        "--max_prompt_length 78 --max_completion_length 50 --vllm_max_model_length 128",
        "--loss_type vespo",
        '--temperature 0.01 --generation_kwargs {"stop":["</answer>"]}',
        '--generation_kwargs {"logit_bias":{"9":100,"10":-100.0}}',
        "--vllm_structured_outputs_regex [[0-9]",  # only the first of vLLM's two parsers takes it
        r"--vllm_structured_outputs_regex \p{L}+",  # only the second
        "--adam_beta1 0 --top_entropy_quantile 1",
        "--dtype float32",
        "--dtype float16",  # on a CPU; elsewhere bf16 is TRL's default
        "--dtype float16 --fp16 true",
        "--lora_r 512",
        "--skip_zero_advantage true",
        "--save_steps 0.5",
        "--optim sgd --optim_args momentum=0.9,nesterov=true",
        '--accelerator_config {"non_blocking":true}',
        '--gradient_checkpointing_kwargs {"use_reentrant":true}',
        "--eval_on_start true --eval_strategy epoch",
        "--do_eval true --eval_strategy steps --eval_steps 2",
        "--vllm_mode server --vllm_server_timeout 0.1",
        "--vllm_mode server --overlap 1 --eval_strategy steps --eval_steps 3",
        "--vllm_mode server --overlap 1 --environments higher_lower --environment_python /bin/python3",
    ],
)
def test_keys_just_within_a_limit_are_taken(flags):
    assert problems(*flags.split(" ")) == []


def test_accelerate_scales_no_loss_in_float16():
    for flags, precision in ((["--fp16", "true"], "no"), (["--bf16", "true"], "bf16")):
        assert demo("--dtype", "float16", *flags)[1].mixed_precision == precision, "its loss scale skips steps"


def test_noise_needs_targets():
    script, training, model = demo()
    training.noise_targets = []  # only a recipe can set this, no flag
    assert checks.problems(script, training, model) == ["noise_targets is empty; for no noise use noise_mode: none"]


def test_several_processes_need_whole_groups_to_replace(monkeypatch):
    script, training, model = demo("--dynamic_sampling", "true")
    training.per_device_train_batch_size = training.num_generations // 2
    training.steps_per_generation = training.gradient_accumulation_steps = 1
    monkeypatch.setattr(type(training), "world_size", 2)
    (line,) = checks.problems(script, training, model)
    assert "needs whole groups on each: " in line and "must be a multiple of num_generations" in line


@pytest.mark.parametrize(
    ("flags", "address"),
    [
        ("", "http://0.0.0.0:8000"),
        ("--vllm_server_base_url https://gpu1/rollouts/", "https://gpu1/rollouts"),
        ("--vllm_server_base_url http://gpu1:9000/v1", "http://gpu1:9000"),
        ("--vllm_server_base_url http://[::1]:9000", "http://[::1]:9000"),
    ],
)
def test_a_server_is_found_under_trls_key(flags, address):
    assert problems(*SERVER, *flags.split()) == []
    assert demo(*SERVER, *flags.split())[1].server_address == address


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        ("", []),
        ("--top_p 0.9 --top_k 20", ["top_p: 0.9, top_k: 20: completions are drawn from a part of", "1 by it, correct"]),
        ("--min_p 0.1 --noise_mode engine", ["min_p: 0.1: completions are drawn from", "below 1 by it, are off"]),
        ('--generation_kwargs {"min_tokens":2}', ["generation_kwargs: min_tokens: completions are drawn from"]),
        (
            "--vllm_mode server --vllm_enable_sleep_mode true --vllm_gpu_memory_utilization 0.5",
            [
                "vllm_gpu_memory_utilization: 0.5 has no effect with vllm_mode: server (--gpu-memory-utilization of",
                "vllm_enable_sleep_mode: True has no effect",
            ],
        ),
        ("--vllm_mode server --vllm_gpu_memory_utilization 0.3", []),  # TRL's default
        (
            "--wandb_project p --wandb_run_group g",
            ["wandb_project, wandb_run_group: without effect, for report_to has no wandb; add it, or remove them"],
        ),
        (
            "--multi_objective_aggregation normalize_then_sum --scale_rewards none --delta 2 --loss_type cispo "
            "--eval_steps 5 --eval_delay 3 --num_generations_eval 4 --entropy_target 0.5",
            [
                "scale_rewards: none has no effect with multi_objective_aggregation: normalize_then_sum",
                "delta: 2.0 has no effect with loss_type: cispo",
                "eval_steps: 5.0 has no effect with eval_strategy: no",
                "eval_delay: 3.0 has no effect with eval_strategy: no",
                "num_generations_eval: 4 has no effect with eval_strategy: no",
                "entropy_target: 0.5 has no effect with use_adaptive_entropy: False",
            ],
        ),
        (
            "--noise_mode engine --vllm_importance_sampling_clip_max 3",
            ["vllm_importance_sampling_clip_max: 3.0 has no effect with vllm_importance_sampling_correction: False"],
        ),
        ("--loss_type cispo --epsilon_high 5", []),
        (
            "--save_strategy epoch --save_steps 8 --logging_strategy epoch --logging_steps 3",
            ["save_steps: 8.0 has no effect with save_strategy: epoch", "logging_steps: 3.0 has no effect with logg"],
        ),
        ("--save_strategy no --save_steps 8", []),
        (
            '--gradient_checkpointing false --gradient_checkpointing_kwargs {"use_reentrant":true} '
            "--lr_scheduler_type constant --warmup_steps 5",
            [
                "gradient_checkpointing_kwargs: {'use_reentrant': True} has no effect with gradient_checkpointing: ",
                "warmup_steps: 5.0 has no effect with lr_scheduler_type: constant",
            ],
        ),
    ],
)
def test_keys_without_effect_are_named(flags, lines):
    said = list(checks.without_effect(demo(*flags.split())[1]))
    assert len(said) == bool(lines) and all(line in said[0] for line in lines)


def test_keys_of_a_tracker_in_use_have_an_effect():
    training = demo("--wandb_project", "p")[1]
    training.report_to = ["wandb"]
    assert not list(checks.without_effect(training))


def test_a_run_may_change_its_server_and_records_no_address():
    before = recorded(*demo(*SERVER, "--vllm_server_base_url", "http://gpu1.internal:9000"))
    assert "internal" not in str(before) and before["vllm_mode"] == "server"
    assert list(changes(before, recorded(*demo("--vllm_mode", "colocate")))) == []
    assert list(changes(before, recorded(*demo(*SERVER, "--temperature", "0.5")))) == ["temperature was 1.0 and is 0.5"]


@pytest.mark.parametrize(
    ("key", "value", "is_bound"),
    [
        *(("loss_type", "bnpo", True), ("entropy_coef", "0.1", True), ("top_entropy_quantile", "0.5", True)),
        *(("use_adaptive_entropy", "true", True), ("loss_type", "grpo", False), ("loss_type", "dapo", False)),
    ],
)
def test_a_run_keeps_its_micro_batches_where_the_loss_is_a_mean_over_one(key, value, is_bound):
    key, sizes = f"--{key}", (("8", "1"), ("4", "2"))
    before, now = (
        recorded(*demo(key, value, "--per_device_train_batch_size", rows, "--gradient_accumulation_steps", steps))
        for rows, steps in sizes
    )
    said = [line for line in changes(before, now) if line.startswith("per_device")]
    assert not list(changes(before, before)) and len(said) == is_bound
    assert not is_bound or "per_device_train_batch_size was 8 and is 4, with which " + key[2:] in said[0]


def test_a_trainer_beside_a_server_has_its_own_weights(recwarn):
    assert not shared.is_wanted(demo(*SERVER)[1])
    assert not [warning for warning in recwarn if "own copy" in str(warning.message)]
