import dataclasses
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl_recipes.recipe import configs
from qerl_recipes.recipe.configs import parse, tracker_environment
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.recipe.keys import FORMER_VALUES, HONOURED, REFUSED, WITHOUT_EFFECT, refusals
from qerl_vllm_plugin.noise import check_sigma

FIXTURES = Path(__file__).parents[2] / "fixtures" / "data" / "recipes"
CPU = ["--use_cpu", "true", "--bf16", "false"]


def recipe(folder: Path, text: str) -> list[str]:
    (folder / "recipe.yaml").write_text(text)
    return ["--config", str(folder / "recipe.yaml"), *CPU]


def test_the_tables_name_only_keys_that_exist_and_each_once():
    classes = (configs.ScriptArguments, configs.GRPOConfig, configs.ModelConfig)
    keys = {field.name for dataclass in classes for field in dataclasses.fields(dataclass) if field.init}
    assert HONOURED | set(REFUSED) == keys
    assert HONOURED & set(REFUSED) == set()


@pytest.mark.parametrize(
    "flags",
    [
        ["--use_vllm", "false"],
        ["--use_peft", "false"],
        ["--sync_ref_model", "true"],
        ["--lora_modules_to_save", "input_layernorm"],
        ["--load_in_4bit", "true"],
        ["--use_dora", "true"],
        ["--disable_dropout", "false"],
        ["--torch_compile", "true"],
        ["--save_only_model", "true"],
        ["--data_seed", "3"],
        ["--dataset_streaming", "true"],
        ["--callbacks", "push_to_hub_revision", "another"],
        ["--benchmarks", "math_500"],
        ["--push_to_hub_revision", "true"],
        ["--use_liger_loss"],
        ["--vllm_device", "cuda:3"],
        ["--vllm_group_port", "9000"],
        ["--trust_remote_code", "true"],
    ],
    ids=lambda flags: flags[0][2:],
)
def test_promise_09_refused_keys_are_named_with_the_way_out(flags):
    lines = refusals(*parse([*CPU, *flags]))
    key = flags[0][2:].partition("=")[0]
    refusal = (REFUSED | WITHOUT_EFFECT)[key]
    named = [line for line in lines if line.startswith(f"{key}: ")]
    assert len(named) == 1 and "cannot be honoured; " in named[0]
    assert named[0].endswith(refusal.way_out) and len(refusal.way_out) > 20


@pytest.mark.parametrize("where", ["yaml", "flag"])
@pytest.mark.parametrize(
    ("key", "closest"),
    [("sigma_begin", "sigma_end"), ("learning_rat", "learning_rate"), ("sigma_sta", "sigma_start"), ("aqn", None)],
)
def test_promise_09_unknown_keys_are_refused_with_the_closest(key, closest, where, tmp_path):
    argv = recipe(tmp_path, f"{key}: 1\n") if where == "yaml" else [*CPU, f"--{key}", "1"]
    with pytest.raises(ConfigError, match=f"unknown key {key}" + (rf"; did you mean {closest}\?" if closest else "")):
        parse(argv)


def test_open_r1_mathematical_recipe_parses_unchanged():
    with pytest.warns(UserWarning, match="no effect"):
        script, training, model = parse(["--config", str(FIXTURES / "open_r1_math.yaml"), "--use_cpu", "true"])
    assert model.dtype == "bfloat16"
    assert training.warmup_steps == 0.1  # in transformers 5 a value below 1 is a share
    assert script.max_prompt_length == 512 and training.vllm_max_model_length == 512 + 2048
    assert script.reward_funcs == ["accuracy", "format", "tag_count"]
    assert script.system_prompt == "Think first, then answer." and script.dataset_prompt_column == "problem"
    assert training.lr_scheduler_kwargs == {"min_lr_rate": 0.1}
    assert tracker_environment(training) == {"WANDB_ENTITY": "someone", "WANDB_PROJECT": "math"}
    assert refusals(script, training, model) == []


def test_open_r1_programming_recipe_parses_with_refusals():
    with pytest.warns(UserWarning, match="no effect"):
        script, training, model = parse(["--config", str(FIXTURES / "open_r1_code.yaml"), "--use_cpu", "true"])
    assert training.scale_rewards == "none" and training.hub_revision == "v01.00"
    refused = {line.split(":")[0] for line in refusals(script, training, model)}
    assert refused == {"callbacks", "benchmarks", "dataset_mixture"}
    assert (script.code_provider, script.code_language) == ("local", "cpp")


def test_recipes_of_an_earlier_trl_are_told_changed_defaults():
    given = ["--config", str(FIXTURES / "open_r1_math.yaml"), "--use_cpu", "true"]
    changed = r"beta was 0.04, is 0.0, loss_type was bnpo, is dapo$"  # the recipe sets max_completion_length
    with pytest.warns(UserWarning, match=changed):
        parse(given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parse([*given, "--beta", "0.04", "--loss_type=bnpo"])
    assert not [warning for warning in caught if "defaults have changed" in str(warning.message)]


def test_what_a_recipe_asks_for_in_vain_a_flag_can_take_back():
    path = str(FIXTURES / "open_r1_code.yaml")
    with pytest.warns(UserWarning, match="benchmarks has no effect: run qerl evaluate BASE --adapter DIR"):
        parsed = parse(["--config", path, "--use_cpu", "true", "--benchmarks"])
    assert {line.split(":")[0] for line in refusals(*parsed)} == {"callbacks", "dataset_mixture"}


@pytest.mark.parametrize("where", ["yaml", "flag"])
def test_liger_s_kernels_give_way_to_qerl_s(where, tmp_path):
    given = recipe(tmp_path, "use_liger_kernel: true\n") if where == "yaml" else [*CPU, "--use_liger_kernel", "true"]
    with pytest.warns(UserWarning, match="use_liger_kernel has no effect: QeRL's own kernels"):
        _, training, _ = parse(given)
    assert training.use_liger_kernel is False  # with true, transformers would patch the layers
    assert refusals(configs.GRPOConfig(use_liger_kernel=True, use_cpu=True, bf16=False))


def test_missing_flash_attention_becomes_sdpa_with_a_warning(monkeypatch):
    with pytest.warns(UserWarning, match=r"flash_attention_2 needs .* flash-attn, which are not here; sdpa is used"):
        _, _, model = parse([*CPU, "--attn_implementation", "flash_attention_2"])
    assert model.attn_implementation == "sdpa"
    monkeypatch.setattr(configs, "is_flash_attn_2_available", lambda: True)
    _, _, model = parse([*CPU, "--attn_implementation", "flash_attention_2"])
    assert model.attn_implementation == "flash_attention_2"


def test_the_adapter_is_on_all_linears_unless_some_are_named(tmp_path):
    for argv in (CPU, recipe(tmp_path, "lora_target_modules: null\n")):
        script, _, model = parse(argv)
        assert model.lora_target_modules == "all-linear"
    expected = "adapter: LoRA r 16, alpha 32, on all linear layers of the blocks;"
    assert configs.adapter_line(script, model).startswith(expected)
    assert "full fine-tuning" not in configs.adapter_line(script, model)  # the recipe has a lora_ key
    script, _, model = parse(CPU)
    assert "(a recipe without any lora_ key: full fine-tuning" in configs.adapter_line(script, model)
    script, _, model = parse([*CPU, "--lora_r", "8", "--lora_target_modules", "q_proj", "o_proj"])
    expected = "adapter: LoRA r 8, alpha 32, on layers ['q_proj', 'o_proj']; the base stays as it is"
    assert configs.adapter_line(script, model) == expected
    script, _, model = parse([*CPU, "--adapter_name_or_path", "runs/a"])
    assert configs.adapter_line(script, model) == "adapter: goes on from runs/a; the base stays as it is"


def test_one_module_named_by_itself_carries_the_adapter(tmp_path):
    """Check a list of one module, which TRL turns into a string.

    PEFT reads a string as a pattern for whole names, which would match none.
    """
    import peft
    from trl import get_peft_config

    base = torch.nn.ModuleDict(
        {"attention": torch.nn.ModuleDict({n: torch.nn.Linear(4, 4) for n in ("q_proj", "o_proj")})}
    )
    for argv in ([*CPU, "--lora_target_modules", "q_proj"], recipe(tmp_path, "lora_target_modules: [q_proj]\n")):
        config = get_peft_config(parse(argv)[2])
        config.task_type = None
        found = [name for name, _ in peft.inject_adapter_in_model(config, base).named_parameters() if "lora_A" in name]
        assert found and all("q_proj" in name for name in found)


def test_a_flag_stands_above_the_recipe(tmp_path):
    argv = recipe(tmp_path, "learning_rate: 1e-5\nnum_generations: 8\ntorch_dtype: float32\n")
    _, training, model = parse([*argv, "--learning_rate", "3e-5", "--dtype", "bfloat16"])
    assert (training.learning_rate, training.num_generations, model.dtype) == (3e-5, 8, "bfloat16")


def test_a_recipe_stands_above_the_one_that_it_extends(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "far.yaml").write_text("learning_rate: 1e-3\nseed: 1\nlora_r: 4\n")
    (tmp_path / "shared" / "near.yaml").write_text("extends: far.yaml\nseed: 2\nlora_r: 8\n")
    _, training, model = parse(recipe(tmp_path, "extends: shared/near.yaml\nlora_r: 16\n"))
    assert (training.learning_rate, training.seed, model.lora_r) == (1e-3, 2, 16)


CHECKPOINTED = "gradient_checkpointing: true\n"


@pytest.mark.parametrize(
    ("former", "key", "value"),
    [("checkpointed_layers", "recompute_layers", 3), ("skip_silent_rows", "skip_zero_advantage", False)],
)
def test_a_former_key_works_with_a_warning(former, key, value, tmp_path):
    warned = f"{former} is called {key} now"
    text = yaml.safe_dump({"gradient_checkpointing": True, former: value})
    with pytest.warns(FutureWarning, match=f"recipe .*{warned}"):
        assert getattr(parse(recipe(tmp_path, text))[1], key) == value
    for flags in ([f"--{former}", str(value)], [f"--{former}={value}"], [f"--{former.replace('_', '-')}={value}"]):
        with pytest.warns(FutureWarning, match=f"command line: {warned}"):
            assert getattr(parse([*recipe(tmp_path, CHECKPOINTED), *flags])[1], key) == value


@pytest.mark.parametrize(("former", "mode"), FORMER_VALUES["noise_mode"].items())
def test_a_former_noise_mode_works_with_a_warning(former, mode, tmp_path):
    warned = f"noise_mode: {former} is called noise_mode: {mode} now"
    ways = {
        "recipe .*": recipe(tmp_path, f"noise_mode: {former}\n"),
        "command line": [*CPU, "--noise_mode", former],
        "command line:": [*CPU, f"--noise_mode={former}"],
    }
    for where, argv in ways.items():
        with pytest.warns(FutureWarning, match=f"{where}.*{warned}"):
            assert parse(argv)[1].noise_mode == mode
    with pytest.warns(FutureWarning, match=f"GRPOConfig: {warned}"):
        assert configs.GRPOConfig(noise_mode=former, use_cpu=True, bf16=False).noise_mode == mode


def test_a_former_key_gives_way_to_a_recipe_above_it(tmp_path):
    (tmp_path / "below.yaml").write_text(f"{CHECKPOINTED}checkpointed_layers: 3\n")
    with pytest.warns(FutureWarning, match="below.yaml: checkpointed_layers is called"):
        assert parse(recipe(tmp_path, "extends: below.yaml\nrecompute_layers: 5\n"))[1].recompute_layers == 5


def test_yaml_numbers_without_a_point_and_a_bare_no_are_kept(tmp_path):
    _, training, _ = parse(recipe(tmp_path, "learning_rate: 1e-5\neval_strategy: no\nsave_strategy: no\n"))
    assert training.learning_rate == 1e-5
    assert training.eval_strategy == "no" and training.save_strategy == "no"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rate:\n", "learning_rate has no value"),
        ("warmup_ratio: much\n", "warmup_ratio is a share"),
        ("num_generations: eight\n", "num_generations: invalid int value: 'eight'"),
        ("lora_r: 16.5\n", "lora_r: invalid int value: '16.5'"),
        ("max_steps: [1]\n", "max_steps cannot be a list"),
        ("sigma_start: {a: 1}\n", "sigma_start cannot be a dict"),
        ("reward_funcs: {a: 1}\n", "reward_funcs cannot be a dict"),
        ("use_peft: perhaps\n", "use_peft: Truthy value expected: got perhaps"),
        ("dtype: bfloat61\n", "dtype: invalid choice: 'bfloat61' (choose from 'bfloat16'"),
        ("quantization: awq\n", "quantization: invalid choice: 'awq' (choose from 'qerl_nvfp4', 'bf16'"),
        ("noise_mode: loud\n", "noise_mode: invalid choice: 'loud' (choose from 'none'"),
        ("seed: 1\nseed: 2\n", "seed stands twice"),
        ("extends: [a, b]\n", "extends must be the path of one recipe"),
        ("extends: recipe.yaml\n", "extends itself"),
        ("extends: missing.yaml\n", "missing.yaml cannot be read"),
        ("dtype: float32\ntorch_dtype: float32\n", "the same key"),
        ("recompute_layers: 1\ncheckpointed_layers: 1\n", "the same key"),
        ("warmup_ratio: 3\n", "warmup_ratio is a share"),
        ("num_processes: 8\n", "accelerate launch"),
        ("activation_offloading: true\n", "recompute_layers"),
        ("- a\n- b\n", "must be a YAML mapping"),
        ("a: [\n", "not valid YAML"),
        ("dataset_kwargs: text\n", "dataset_kwargs must be a JSON mapping"),
        ("generation_kwargs: 3\n", "generation_kwargs must be a mapping, not 3"),
        ("max_prompt_length: 0\n", "max_prompt_length must be at least 1"),
        ("chat_template: /no/such.jinja\n", "chat_template: '/no/such.jinja' is neither Jinja text nor a file with"),
        ("dynamic_sampling_metric: accuracy\n", "accuracy has no effect without dynamic_sampling: true"),
        ("num_iterations: 0\n", "num_iterations must be at least 1, not 0; the default is 1"),
        ("beta: -0.1\n", "beta must be at least 0, not -0.1"),
        ("learning_rate: .nan\n", "learning_rate must be at least 0, not nan"),
        ("adam_beta1: 1\n", "adam_beta1 must be at least 0 and below 1, not 1"),
        ("adam_beta2: -0.1\n", "adam_beta2 must be at least 0 and below 1, not -0.1"),
        ("top_entropy_quantile: 1.5\n", "top_entropy_quantile must be at least 0 and at most 1, not 1.5"),
        ("vllm_gpu_memory_utilization: 1.1\n", "vllm_gpu_memory_utilization must be above 0 and at most 1, not 1.1"),
        ("vllm_importance_sampling_clip_max: 0\n", "vllm_importance_sampling_clip_max must be above 0, not 0.0"),
        ("pack_tokens: -2\n", "pack_tokens must be at least 1, 0 for padded batches or -1"),
        ("dynamic_sampling_max_rounds: 0\n", "dynamic_sampling_max_rounds must be at least 1"),
        (
            "deepspeed: zero3.json\nbenchmarks: [a]\nnoise_mode: none\nsigma_start: 1.0\n",
            "benchmarks: ['a'] cannot be honoured; ",
        ),
        ("deepspeed: zero3.json\nnoise_mode: none\nsigma_start: 1.0\n", "sigma_start would be ignored"),
    ],
    ids=lambda value: value.split(":")[0].replace("\n", "") if "\n" in value else "",
)
def test_a_wrong_value_is_an_error_that_names_the_key(text, message, tmp_path):
    with pytest.raises(ConfigError) as error:
        parse(recipe(tmp_path, text))
    assert message in str(error.value)


@pytest.mark.parametrize(
    "argv",
    [["--config"], ["--config", "a", "--config", "b"], ["--config", "missing.yaml"], [*CPU, "stray"]],
    ids=["no path", "two recipes", "missing file", "stray word"],
)
def test_a_malformed_command_line_is_refused(argv):
    with pytest.raises(ConfigError):
        parse(argv)


@pytest.mark.parametrize("flags", [["--system_prompt", "null"], ["--output_dir=None"], ["--hub-token", "None"]])
def test_a_word_for_nothing_does_not_become_a_text(flags):
    word = rf"^command line: {flags[0].partition('=')[0]} (None|null) would be that word"
    with pytest.raises(ConfigError, match=word):
        parse([*CPU, *flags])


def test_words_that_only_look_like_nothing_stay():
    script, training, _ = parse([*CPU, "--system_prompt", "none", "--noise_mode", "none", "--report_to", "none"])
    assert (script.system_prompt, training.noise_mode, training.report_to) == ("none", "none", [])
    assert parse([*CPU, "--code_language", "None"])[0].code_language == "None"  # the key refuses null
    with pytest.raises(ConfigError, match="invalid choice: 'None'"):
        parse([*CPU, "--noise_mode", "None"])


def test_an_empty_system_prompt_takes_a_recipes_back(tmp_path):
    argv = recipe(tmp_path, "system_prompt: Think first.\n")
    assert parse(argv)[0].system_prompt == "Think first."
    assert parse([*argv, "--system_prompt", ""])[0].system_prompt is None


HOSTILE = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 2), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=1),
)  # fmt: skip


@settings(max_examples=60, deadline=None, derandomize=True)
@given(key=st.sampled_from(sorted(configs.parser().keys() - {"use_cpu", "bf16"})), value=HOSTILE)
def test_any_value_of_any_key_parses_or_is_a_config_error(key, value, tmp_path_factory):
    path = tmp_path_factory.mktemp("hostile") / "recipe.yaml"
    path.write_text(yaml.safe_dump({key: value}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            refusals(*parse(["--config", str(path), *CPU]))
        except ConfigError as error:
            assert str(error)


def test_a_sigma_beyond_the_engines_limit_is_refused():
    for key, flags in (("sigma_start", ["--sigma_start", "2e6"]), ("sigma_end", ["--sigma_end", "1000001"])):
        with pytest.raises(ConfigError, match=rf"{key} must be at most 1e\+06, the most that the engine takes"):
            parse([*CPU, *flags])
    _, training, _ = parse([*CPU, "--sigma_start", "1e6", "--sigma_end", "1e6"])
    assert check_sigma(training.sigma_start) == 1e6, "the engine takes the limit itself"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--noise_mode", "none", "--sigma_start", "0.1"], "sigma_start would be ignored"),
        *((["--sigma_start", value], "must be a finite number >= 0") for value in ("nan", "inf", "-0.1")),
        (["--noise_mode", "both", "--sigma_start", "0"], "0 < sigma_end <= sigma_start"),
        (["--sigma_start", "1e-3", "--sigma_end", "1e-2"], "0 < sigma_end <= sigma_start"),
        (["--noise_mode", "both", "--num_stages", "0"], "num_stages must be at least 1"),
        (["--noise_mode", "engine", "--vllm_importance_sampling_correction", "true"], "use noise_mode: engine_is"),
        (["--noise_mode", "engine_is", "--vllm_importance_sampling_correction", "false"], "use noise_mode: engine"),
    ],
)
def test_noise_keys_that_contradict_each_other_are_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        parse([*CPU, *flags])


def test_noise_keys_are_settled_after_parsing():
    _, quiet, _ = parse(CPU)
    assert (quiet.noise_mode, quiet.sigma_start, quiet.noise_seed) == ("none", 0.0, quiet.seed)
    assert quiet.vllm_importance_sampling_correction is True
    _, article, _ = parse([*CPU, "--sigma_start", "0.05", "--sigma_end", "0.001", "--num_stages", "5"])
    assert (article.noise_mode, article.sigma_start, article.sigma_end, article.num_stages) == ("both", 0.05, 1e-3, 5)
    _, paper, _ = parse([*CPU, "--noise_mode", "engine"])
    assert (paper.sigma_start, paper.sigma_end, paper.num_stages) == (1e-2, 5e-4, 10)
    assert paper.vllm_importance_sampling_correction is False


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_recipe_runs_on_the_cpu(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("output_dir: unused\nbf16: true\ntf32: true\n")
    _, training, _ = parse(["--config", str(recipe)])
    assert training.use_cpu and not training.bf16 and not training.tf32
    _, training, _ = parse(["--config", str(recipe), "--use_cpu", "false", "--bf16", "false", "--tf32", "false"])
    assert not training.use_cpu
