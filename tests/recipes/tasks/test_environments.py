"""Test what a recipe's tools and environments become, and what is refused before anything loads."""

import asyncio
import inspect
import json
import time
from pathlib import Path

import acting
import pytest
import trl
from datasets import Dataset

from qerl_recipes.files.run_state import changes, recorded
from qerl_recipes.recipe.configs import parse
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.tasks import environments, prompts
from qerl_recipes.train import preflight
from qerl_recipes.train import run as train

RECIPE = Path(__file__).parents[3] / "recipes" / "demo" / "grpo" / "nvfp4_lora_aqn.yaml"
CPU = ["--use_cpu", "true", "--bf16", "false", "--vllm_enable_sleep_mode", "false"]
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
COUNTER = "--environments acting.Counter"
OWNED = {"dataset_name": None, "dataset_size": None, "environments": "acting.Counter", "reward_funcs": []}
TWO = '--environments {"a":"acting.Counter","b":"acting:Silent"}'


@pytest.fixture
def checked(stand_ins):
    """Return checked(*flags), which checks the demo's recipe with these flags."""
    return lambda *flags: preflight.check(
        *parse(["--config", str(RECIPE), *CPU, "--model_name_or_path", str(stand_ins["model"]), *flags])
    )


@pytest.fixture
def routed(tmp_path):
    """Return routed(*names), which writes data without prompts, with these names of environments, and their flags."""

    def write(*names):
        rows = [json.dumps({"environment": names[i % len(names)]}) for i in range(16)]
        (tmp_path / "routed.jsonl").write_text("\n".join(rows))
        return ["--dataset_name", str(tmp_path / "routed.jsonl"), "--dataset_size", "16"]

    return write


REFUSED = [
    ("--tools multiply", "tools: 'multiply' is not one of the tools: calculator"),
    ("--tools acting.divide", "tools: acting.divide cannot be imported (AttributeError"),
    ("--tools acting.Game.nothing", "tools: acting.Game.nothing cannot be imported"),
    ("--tools acting:Game.nothing", "tools: acting:Game.nothing is not a function but 5"),
    ("--tools python", "the tool python runs programs on this machine, not with code_provider: e2b; use code_provider"),
    ("--tools acting.Counter", "tools: acting.Counter is not a function but <class"),
    ("--tools acting.untyped", "tools: untyped: Argument a is missing a type hint in function untyped; give it types"),
    ("--tools acting.undescribed", "no description for the argument 'a'; give it types, and a docstring with a line"),
    ("--tools acting.multiply acting.multiply", "tools: multiply is the name of several; each needs a name of its own"),
    (
        "--environments acting.multiplied --tools acting.multiply",
        "tools: multiply is the name of several with environment multiplied; each needs",
    ),
    ("--environments wordle", "environments: 'wordle' is not one of the environments: higher_lower"),
    ("--environments acting.Wordle", "environments: acting.Wordle cannot be imported"),
    ("--environments acting:Game.nothing", "environments: acting:Game.nothing is not a class but 5"),
    ("--environments acting.WithoutReset", "environments: acting.WithoutReset cannot be made (AttributeError"),
    ("--environments acting.Moody", "environments: acting.Moody cannot be made (OSError: the game is closed)"),
    ("--environments acting.Waiting", "reset of acting.Waiting is no plain method, which TRL calls before each"),
    ("--environments acting.Untold", "Untold.look: Argument where is missing a type hint"),
    ("--environments acting.Strict", "reset of Strict gets the columns prompt, answer, and takes answer; write"),
    (f'{COUNTER} --environment_kwargs {{"begin":1}}', "cannot be made (TypeError: Counter.__init__() got an unexp"),
    ('--environments {"a":1}', "environments: a has 1; write {NAME: my_package.MyEnvironment}"),
    ("--environments {}", "environments names none; write"),
    (f'{TWO} --environment_kwargs {{"c":{{}}}}', "environment_kwargs: c is not one of the environments: a, b; with"),
    (f'{TWO} --environment_kwargs {{"a":5}}', "environment_kwargs: a has 5; write"),
    (TWO, "environments: the training data have no column environment, which names one of a, b in each row"),
    (
        '--environments {"a":"acting.Counter","b":"acting:Game.Counter"}',
        "environments: Counter is the name of 2 classes, whose rewards would be mixed",
    ),
    (f"{COUNTER} --reward_funcs acting.Counter", "reward_funcs: Counter is the name of several, whose means"),
    ("--rollout_func rollout", "rollout_func: 'rollout' is not a path; one of your own goes by its path"),
    ("--rollout_func acting.rollout_without_trainer", "does not take (prompts, trainer), which TRL gives it"),
    ("--rollout_func acting.async_rollout", "rollout_func: acting.async_rollout is async"),
    ('--environment_kwargs {"a":1}', "environment_kwargs has no effect without environments; remove it"),
    ("--environment_python python", "environment_python has no effect without environments; remove it"),
    ("--max_tool_calling_iterations 3", "max_tool_calling_iterations has no effect without tools or environments"),
    ("--max_tool_tokens 3", "max_tool_tokens has no effect without tools or environments"),
    ('--response_template {"a":1}', "response_template has no effect without tools or environments"),
    ("--tools calculator --max_tool_calling_iterations 0", "max_tool_calling_iterations must be above 0, not 0"),
    ("--tools calculator --max_tool_tokens 0", "max_tool_tokens must be above 0, not 0"),
    ("--tools calculator --max_tool_seconds 0", "max_tool_seconds must be above 0, not 0"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_what_trl_could_not_use_is_refused(flags, message, checked):
    with pytest.raises(ConfigError) as error:
        checked(*flags.split(" "))
    assert message in str(error.value)


def test_two_environments_of_unlike_resets_are_refused(checked, routed):
    flags = ["--environments", '{"a":"acting.Counter","b":"acting:Seedless"}', *routed("a", "c")]
    with pytest.raises(ConfigError) as error:
        checked(*flags, "--reward_funcs", "format", "--reward_weights", "1.0")
    assert "the column environment of the training data names c, not one of a, b" in str(error.value)
    assert "reset of b gets the columns prompt, and takes prompt, answer; write reset(self, **row)" in str(error.value)


def test_resets_of_which_one_takes_a_seed_are_refused(checked):
    kinds = {"a": acting.Counter, "b": acting.Seedless}
    both = {name: environments.Instances(kind) for name, kind in kinds.items()}
    interaction = environments.Interaction(environments=both)
    (line,) = environments.row_problems(interaction, "training", ["prompt", "answer", "environment"], ["a"])
    assert line.startswith("environments: reset of b takes no seed, and that of another environment does")
    columns = ["prompt", "answer", "environment", "seed"]  # data with seeds of their own, which b does not take
    (line,) = environments.row_problems(interaction, "training", columns, ["a"])
    assert line.endswith("gets the columns prompt, answer, seed, and takes prompt, answer; write reset(self, **row)")


def test_a_reset_may_need_the_seed_that_it_is_given(checked):
    assert checked("--environments", "acting.Seeded", "--reward_funcs", "format", "--reward_weights", "1.0")


def test_tools_and_an_environment_reach_the_trainer(checked):
    arguments = checked(
        *("--tools", "acting.multiply", "python", "--environments", "acting:Counter", "--rollout_func"),
        *("acting.rollout", "--environment_kwargs", '{"start": 7}', "--reward_weights", "1.0", "0.1"),
        *("--code_provider", "local"),
    ).interaction.arguments()
    assert [tool.__name__ for tool in arguments["tools"]] == ["multiply", "python"]
    assert arguments["rollout_func"] is acting.rollout
    first, second = (arguments["environment_factory"]() for _ in range(2))
    assert (first.start, second.start, type(first)) == (7, 7, acting.Counter) and first is not second


def test_plugins_offer_tools_and_environments_with_a_recipes_settings():
    script = parse(["--use_cpu", "true", "--bf16", "false", "--tools", "both", "--environments", "mine"])[0]
    given, problems = [], []
    tools = {"both": lambda settings: given.append(settings) or [acting.multiply, acting.guess]}
    interaction = environments.resolve(script, None, tools, {"mine": lambda settings: acting.Counter}, problems)
    assert not problems and given == [script]
    assert interaction.tools == [acting.multiply, acting.guess] and interaction.rewards() == ["Counter"]


def test_several_environments_are_a_mapping(checked, routed):
    flags = ["--environment_kwargs", '{"a": {"start": 5}}', *routed("a", "b"), "--reward_weights"]
    of = checked(*TWO.split(" "), *flags, "1.0", "--reward_funcs", "format")
    factories = of.interaction.arguments()["environment_factory"]
    assert list(factories) == ["a", "b"] and factories["a"]().start == 5
    assert of.rows[0][0] == {"environment": "a", "prompt": [{"role": "user", "content": ""}]}
    assert [len(of.interaction.schemas("a")), of.interaction.schemas("b")] == [2, None]


def test_a_module_of_the_working_directory_is_found(checked, monkeypatch, tmp_path):
    (tmp_path / "mine_alone.py").write_text("from acting import multiply\nfrom acting import Silent as reward\n")
    monkeypatch.chdir(tmp_path)
    of = checked("--tools", "mine_alone.multiply", "--reward_funcs", "mine_alone.reward", "--reward_weights", "1.0")
    assert of.interaction.tools == [acting.multiply]
    assert [reward.__wrapped__ for reward in of.rewards] == [acting.Silent]


def test_an_environment_with_data_and_reward_needs_max_steps(write_recipe):
    def of(**changed):
        return preflight.check(*parse(["--config", write_recipe(**{**OWNED, **changed})]))

    rows, held_out = of().rows
    assert rows[:] == {"prompt": [[{"role": "user", "content": ""}]] * 2} and held_out is None
    assert of().rewards == [] and of().interaction.rewards() == ["Counter"]
    of(dynamic_sampling=True, dynamic_sampling_metric="Counter")
    for changed, message in (
        ({"max_steps": -1}, "an environment without dataset_name has no epochs; say how long to train with max_st"),
        ({"dataset_config": "x"}, "an environment without dataset_name does not read dataset_config; remove the key"),
        ({"environments": "acting.Silent"}, "reward_funcs is empty, and no environment has a get_reward"),
        ({"eval_strategy": "epoch"}, "eval_strategy: epoch needs held-out problems"),
    ):
        with pytest.raises(ConfigError, match=message):
            of(**changed)


def test_an_environment_that_cannot_be_made_is_the_only_thing_said(write_recipe, routed):
    for changed in (
        {"environments": "acting.Wordle"},
        {"environments": "acting.Wordle", "dataset_name": routed("a", "b")[1]},
        {"environments": {"a": "acting.Counter", "b": "acting.Wordle"}, "dataset_name": routed("a", "b")[1]},
    ):
        with pytest.raises(ConfigError) as error:
            preflight.check(*parse(["--config", write_recipe(**{**OWNED, **changed})]))
        (_, line) = str(error.value).splitlines()
        assert line.startswith("  - environments: acting.Wordle cannot be imported (AttributeError")
        assert line.endswith("has no attribute 'Wordle')"), "it names no module that is to be found elsewhere"


def test_default_rewards_are_not_those_of_environments():
    flags = ["--use_cpu", "true", "--bf16", "false"]
    assert parse([*flags, *COUNTER.split()])[0].reward_funcs == []
    assert parse(flags)[0].reward_funcs == ["accuracy", "format", "tag_count"]
    assert parse([*flags, *COUNTER.split(), "--reward_funcs", "format"])[0].reward_funcs == ["format"]


CHANGED = {
    "tools": ["acting.multiply"],
    "environments": {"a": "acting.Counter"},
    "environment_kwargs": {"start": 1},
    "rollout_func": "acting.rollout",
    "response_template": {"a": 1},
    "max_tool_calling_iterations": 2,
    "max_tool_tokens": 5,
}


@pytest.mark.parametrize("key", CHANGED)
def test_a_resume_with_another_of_these_is_refused(key):
    parts = parse(["--config", str(RECIPE), *CPU])
    before = recorded(*parts)
    owner = next(part for part in parts if hasattr(part, key))
    setattr(owner, key, CHANGED[key])
    assert [line.partition(" ")[0] for line in changes(before, recorded(*parts))] == [key]


def test_the_interpreter_of_environments_may_change():
    parts = parse(["--config", str(RECIPE), *CPU])
    before = recorded(*parts)
    parts[0].environment_python = "elsewhere/python"
    assert not list(changes(before, recorded(*parts)))


# templates


@pytest.fixture
def long_recipe(write_recipe, make_nvfp4):
    """Return write_recipe for a model with room for the schemas of tools."""
    model = str(make_nvfp4("qwen2", max_position_embeddings=4096))
    return lambda **changes: write_recipe(**{"model_name_or_path": model, "vllm_max_model_length": 3000, **changes})


def settled(recipe):
    return preflight.make(*parse(["--config", recipe]))


CALLS = "{% for c in m.tool_calls or [] %}<{{ c.function | tojson }}>{% endfor %}"
PLAIN = f"{{% for m in messages %}}{{{{ m.content }}}}{CALLS}{{% endfor %}}"
FORGETFUL = "{{ messages | length }}" + PLAIN
CALL = {"open": "<", "close": ">", "content": "json", "repeats": True}
CALL["transform"] = {"type": "function", "function": "{content}"}
CALLED = {"start_anchor_pattern": "$", "fields": {"tool_calls": CALL, "content": {"content": "text"}}}
LOST = {"start_anchor_pattern": "$", "fields": {"content": {"content": "text"}}}


@pytest.mark.parametrize(
    ("template", "changes", "message"),
    [
        (None, {}, "the model's chat template does not render calls of tools and their answers; give one"),
        ("phi3", {}, "the model's chat template does not render calls"),
        (PLAIN, {}, "TRL does not know how calls are written in this chat template; give a response_template"),
        (FORGETFUL, {"response_template": CALLED}, "renders earlier turns in another way when a tool has answered"),
        (
            PLAIN,
            {"response_template": LOST},
            r"response_template finds None in '<\{.*\}>', with which .*; it should find \{'name': 'multiply'",
        ),
        (PLAIN, {"response_template": CALLED}, None),
        ("qwen2_5", {}, None),
        ("qwen3", {}, None),
    ],
    ids=["none", "phi3", "unknown", "forgetful", "blind", "own", "qwen2.5", "qwen3"],
)
def test_a_template_that_cannot_call_tools_is_refused(template, changes, message, long_recipe):
    text = template and (template if "{" in template else str(TEMPLATES / f"{template}.jinja"))
    recipe = long_recipe(tools=["acting.multiply"], chat_template=text, **changes)
    if message is None:
        run = settled(recipe)
        assert run.tokenizer.response_template == changes.get("response_template", run.tokenizer.response_template)
        assert run.tokenizer.response_template is not None
    else:
        with pytest.raises(ConfigError, match=message):
            settled(recipe)


def test_prompts_are_counted_with_the_schemas_of_tools(long_recipe, routed):
    told = {"chat_template": "{% for t in tools or [] %}{{ '1' * 300 }}{% endfor %}" + PLAIN}
    plain = settled(long_recipe(**told))
    told |= {"response_template": CALLED, "tools": ["acting.multiply"]}
    with_tools = settled(long_recipe(**told))

    def counts(run):
        options = environments.rendering(run.tokenizer, run.training, run.interaction)
        return prompts.counts(run.train, run.tokenizer, options, run.interaction)

    assert counts(with_tools) == [count + 300 for count in counts(plain)]
    with pytest.raises(ConfigError, match="no prompt has at most max_prompt_length = 200 tokens"):
        settled(long_recipe(**told, max_prompt_length=200))
    with pytest.raises(ConfigError, match="16 of 16 training prompts have more than 288 tokens, the longest 312"):
        settled(long_recipe(**told, vllm_max_model_length=300))
    several = {"environments": {"a": "acting.Counter", "b": "acting.Silent"}, "dataset_name": routed("a", "b")[1]}
    first, second, *_ = counts(settled(long_recipe(**{**told, **several})))
    assert first == 900 and second == 300, "each row has the tools of its own environment"


def test_what_is_resolved_reaches_the_trainer(long_recipe, monkeypatch):
    made = []
    monkeypatch.setattr(train, "assemble", lambda *arguments, **options: made.append(options))
    qwen = {"chat_template": str(TEMPLATES / "qwen2_5.jinja")}
    train.build(settled(long_recipe(**qwen, **OWNED, tools=["calculator"], rollout_func="acting.rollout")))
    assert [tool.__name__ for tool in made[0]["tools"]] == ["calculator"]
    assert isinstance(made[0]["environment_factory"](), acting.Counter) and made[0]["rollout_func"] is acting.rollout
    assert len(made[0]["train_dataset"]) == 2 and made[0]["reward_funcs"] == []
    train.build(settled(long_recipe()))
    assert not {"tools", "environment_factory", "rollout_func"} & made[1].keys()


# seeds


def test_rows_keep_their_own_seeds_and_get_none_that_reset_does_not_take():
    starts, rows = environments.Starts(0), [{"prompt": "p", "answer": "a"}] * 4
    counter, seedless, silent = ({None: kind().reset} for kind in (acting.Counter, acting.Seedless, acting.Silent))
    (first, *_, last) = starts.seeded(rows, counter, 0, 2)
    assert first["seed"] != last["seed"] and "seed" not in rows[0]
    assert "seed" in starts.seeded(rows, silent, 0, 2)[0], "**row takes it"
    assert starts.seeded(rows, seedless, 0, 2) is rows
    own = [{**row, "seed": 7} for row in rows]
    assert starts.seeded(own, counter, 0, 2) is own


def test_one_environment_gets_the_column_of_this_name():
    """Check what TRL does: the column names an environment only where there are several."""

    class Placed(acting.Silent):
        def reset(self, environment, seed, prompt=None) -> None:
            return None

    rows = [{"prompt": "p", "environment": "hall"}] * 2
    starts, reset = environments.Starts(0), Placed().reset
    assert "seed" in starts.seeded(rows, {None: reset}, 0, 2)[0]
    assert starts.seeded(rows, {"hall": reset}, 0, 2) is rows, "it would get no environment"
    alone = environments.Interaction(environments={None: environments.Instances(acting.Counter)})
    assert alone.names(Dataset.from_list(rows)) == [None, None], "each prompt has the tools of the only one"


def test_ranks_meet_the_environments_of_one_process():
    rows, reset = [{"prompt": "p"}] * 8, {None: acting.Counter().reset}

    def drawn(first, count, run=0, rollout=3):
        starts = environments.Starts(run)
        starts.open(rollout)
        return [row["seed"] for row in starts.seeded(rows[:count], reset, first, 4)]

    assert drawn(0, 4) + drawn(4, 4) == drawn(0, 8)
    assert len({*drawn(0, 4), *drawn(0, 4, run=1), *drawn(0, 4, rollout=4), *drawn(0, 4, rollout="evaluation")}) == 4
    assert all(0 <= seed < 2**31 for seed in drawn(0, 8))


# failures


@pytest.mark.parametrize(
    ("kind", "method", "message"),
    [
        ("Jammed", "reset", r"reset failed \(OSError: the door is stuck\); catch in it what may happen in a run"),
        ("Broken", "get_reward", r"get_reward failed \(KeyError: 'side'\)"),
        ("Judged", "get_reward", r"get_reward failed \(SystemExit: no judge\)"),
        ("Stuck", "reset", r"reset took longer than 0\.2 s \(max_tool_seconds\) and was stopped; raise"),
        ("Stuck", "get_reward", r"get_reward took longer than 0\.2 s .*, or set environment_python, with which"),
        ("SlowJudge", "get_reward", r"get_reward took longer than 0\.2 s"),
    ],
)
def test_a_failure_of_reset_or_reward_names_the_environment(kind, method, message, checked):
    flags = f"--environments acting.{kind} --max_tool_seconds 0.2 --reward_weights 1.0 1.0".split()
    one = checked(*flags).interaction.arguments()["environment_factory"]()
    began = time.monotonic()
    with pytest.raises(ValueError, match=rf"^environment acting\.{kind}: {message}"):
        result = getattr(one, method)()
        if inspect.iscoroutinefunction(getattr(one, method)):
            asyncio.run(result)
    assert time.monotonic() - began < 30
