"""Test that Open-R1's five recipes for GRPO run here: with the flags that this machine and their refusals ask for."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from qerl_recipes.recipe.configs import parse
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.tasks import running_sum
from qerl_recipes.train import preflight

FILE = Path(__file__).parents[2] / "fixtures" / "data" / "recipes" / "open_r1_grpo.yaml"
RECIPES = yaml.safe_load(FILE.read_text())["recipes"]
CODE = "Qwen2.5-1.5B-Instruct/grpo/config_demo_code.yaml"
# of this machine: it has no GPU, and logs in nowhere
HERE = "--use_cpu true --bf16 false --push_to_hub false --report_to none"
GROUPS = ("per_device_train_batch_size: 14, or a multiple of 7 processes", "--per_device_train_batch_size 14")
# what the refusals of a recipe name, one after another -> what each says to do
REFUSED = {
    CODE: [GROUPS],
    "Qwen2.5-1.5B-Instruct/grpo/config_demo_code_ioi.yaml": [
        GROUPS,
        ("ioi_code is not built in, for it needs Piston servers", "--reward_funcs code code_format format"),
    ],
    "Qwen2.5-Coder-7B-Instruct/grpo/config_codeforces.yaml": [
        (
            "callbacks: ['push_to_hub_revision'] cannot be honoured; push_to_hub: true with hub_strategy: every_save",
            "--callbacks --benchmarks",
        ),
        ("cf_code is not built in, for it needs Piston servers", "--reward_funcs code code_format"),
    ],
}
RIGHT, WRONG = (f"```python\nprint({text})\n```" for text in ("sum(map(int,input().split()))", "1"))


def row(recipe, number):
    """Return a problem with the columns of the recipe's data set."""
    tests = [{"input": f"{number} {i}", "output": str(number + i)} for i in range(2)]
    columns = {"solution": str(number), "verification_info": {"language": "python", "test_cases": tests}}
    return {recipe["dataset_prompt_column"]: f"{number}+1=", **columns}


@pytest.fixture(scope="module")
def model(make_nvfp4, tmp_path_factory):
    """Return a tiny model for long sequences, which writes whole programs as single tokens."""
    folder = tmp_path_factory.mktemp("programs") / "model"
    shutil.copytree(make_nvfp4("qwen2", max_position_embeddings=10_240), folder)
    tokenizer = running_sum.tokenizer()
    tokenizer.add_tokens([RIGHT, WRONG])
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def flags(model, tmp_path):
    """Return flags(name), which writes a recipe and its data and returns the flags that it needs on this machine."""

    def write(name):
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPES[name]))
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row(RECIPES[name], i)) + "\n" for i in range(64)))
        own = ["--model_name_or_path", str(model), "--dataset_name", str(tmp_path / "train.jsonl")]
        own += ["--output_dir", str(tmp_path / "run"), "--code_provider", "local"]
        return ["--config", str(tmp_path / "recipe.yaml"), *HERE.split(), *own]

    return write


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_of_open_r1_can_run(name, flags):
    given = flags(name)
    for message, way_out in REFUSED.get(name, ()):
        with pytest.raises(ConfigError) as error:
            preflight.make(*parse(given))
        assert message in str(error.value)
        given += way_out.split()
    described = preflight.make(*parse(given))
    names = ["code" if reward in ("cf_code", "ioi_code") else reward for reward in RECIPES[name]["reward_funcs"]]
    assert [reward.__name__ for reward in described.rewards] == names
    assert len(described.train) == 64 and described.train[0]["prompt"][0]["role"] == "system"
    assert described.training.max_completion_length == RECIPES[name]["max_completion_length"]
    assert described.training.num_generations == RECIPES[name]["num_generations"]


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
def test_a_recipe_with_the_reward_code_trains(flags, light_engines, read_metrics, train_main, tmp_path):
    """Train with the real engine. Some of its completions hold a program, by chance, and some programs are right."""
    small = "--per_device_train_batch_size 8 --num_generations 8 --gradient_accumulation_steps 1 --max_steps 2"
    small += " --max_completion_length 24 --vllm_max_model_length 256 --max_prompt_length 200 --save_strategy no"
    train_main(*flags(CODE), *small.split(), "--gradient_checkpointing", "false", "--lora_r", "4")
    first, second = read_metrics(tmp_path / "run")
    for line in (first, second):
        assert line["rewards/code/unjudged"] == 0
        assert line["rewards/code/mean"] * 8 == round(line["rewards/code/mean"] * 8)
    assert 0 < first["rewards/code/mean"] < 1 and first["rewards/code/std"] > 0
    assert first["grad_norm"] > 0 and first["reward"] == pytest.approx(first["rewards/code/mean"])
