"""Test the tasks in which the policy acts: what is played, judged, recorded and refused.

A regular expression makes the tiny model write the call that a test needs; what follows the call is its own.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from qerl_recipes.evaluate import report
from qerl_recipes.evaluate import run as evaluate
from qerl_recipes.evaluate.intervals import wilson
from qerl_recipes.evaluate.request import Evaluation
from qerl_recipes.evaluate.run import close, settle, start

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("light_engines")]
Make = Callable[..., Path]
DEMO = yaml.safe_load((Path(__file__).parents[3] / "recipes/demo/tools/higher_lower.yaml").read_text())
CALL_5 = {"structured_outputs": {"regex": "<answer>5</answer>"}}
RECIPE: dict[str, Any] = {
    "environments": "acting.Door",
    "reward_funcs": [],
    "response_template": DEMO["response_template"],
    "max_tool_calling_iterations": 1,
    "max_completion_length": 24,
}
# in floating point 0.7 + 0.2 + 0.1 is less than 1
PRAISED = {"environments": "acting.Unjudged", "reward_funcs": ["acting.praise", "acting.applause", "acting.cheers"],
           "reward_weights": [0.7, 0.2, 0.1]}  # fmt: skip
ROWS = [{"prompt": f"{i}+2", "answer": str(i + 2), "hint": str(i)} for i in range(3)]


@pytest.fixture
def run_of(tmp_path: Path, save_adapter: Make) -> Callable[..., Path]:
    """Return run_of(rows, **recipe), which makes the folder of a run, with held-out problems if ``rows`` are given."""

    def make(rows: list[dict[str, Any]] | None = None, **recipe: Any) -> Path:
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        save_adapter(folder / "adapter", seed=1, recipe={**RECIPE, **recipe})
        (folder / "adapter" / "chat_template.jinja").write_text(DEMO["chat_template"])
        if rows is not None:
            (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return make


@pytest.fixture(scope="module")
def engine(make_nvfp4: Make) -> Iterator[Any]:
    llm = start(evaluate.EngineSettings(make_nvfp4("qwen2"), "qerl_nvfp4", 8, "bfloat16", 64))
    yield llm
    close(llm)


@pytest.fixture
def play(engine: Any, make_nvfp4: Make, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Return play(run, **options), which returns what one policy has played on a task."""
    from qerl_recipes.evaluate import episodes

    def played(
        run: Path, task: str = "environment:acting.Door", adapter: bool = False, **options: Any
    ) -> list[episodes.Played]:
        options = {"max_model_length": 64, "generation_kwargs": CALL_5, "max_samples": 3, **options}
        asked = {"base": str(make_nvfp4("qwen2")), "adapter": run, "tasks": [task], "output_dir": run / "out"}
        settled = settle(Evaluation.of(**asked, **options))
        (prepared,) = episodes.prepare(settled.evaluation, settled.saved, settled.engine.folder)
        request = evaluate.install(engine, settled.saved if adapter else None)
        return episodes.play(engine, request, prepared, settled.evaluation, "base")

    return played


def test_a_door_that_a_known_call_opens_scores_1_its_twin_0(
    make_nvfp4: Make, run_of: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tasks = ["environment:acting.Door", "environment:acting.Wall", "running_sum"]
    options = {"max_model_length": 64, "max_samples": 4, "generation_kwargs": CALL_5, "temperature": 1.0}
    run = run_of()
    result = evaluate.evaluate(str(make_nvfp4("qwen2")), run, tasks, output_dir=run / "evaluation", **options)
    for model in ("base", "adapter"):
        door, wall = (result["tasks"][task][model] for task in tasks[:2])
        assert (door["accuracy"], door["ci95"], door["n"]) == (1.0, list(wilson(4, 4)), 4)
        assert (wall["accuracy"], wall["ci95"]) == (0.0, list(wilson(0, 4)))
        assert door["reward"] == {"value": 1.0, "ci95": [1.0, 1.0], "interval": "bootstrap over problems"}
        assert wall["reward"]["value"] == 0.0 and (door["calls"], door["failures"], door["unscored"]) == (1, 0, 0)
        assert door["turns"] == 2.0
    lines = [json.loads(line) for line in (run / "evaluation" / "answers.jsonl").read_text().splitlines()]
    assert [(line["task"], line["model"]) for line in lines[:4]] == [("running_sum", "base")] * 4
    door = next(line for line in lines if line["task"] == tasks[0])
    assert [message["role"] for message in door["episodes"][0]] == ["assistant", "tool", "assistant"]
    assert door["rewards"] == [1.0] and door["right"] == [True] and len(door["turns"][0]) == 2
    assert result["acting"]["success_at"] == 1.0 and result["acting"]["environments"] == "acting.Door"
    printed, page = capfd.readouterr().out, report.write(run).read_text()
    for text in ("guess(number=", "tool guess", "reward 1.0"):
        assert text in page, text
    assert "reward >= 1" in " ".join(printed.split()) and "Episodes of environment:acting.Wall" in page
    assert "no tools in running_sum" in " ".join(printed.split())
    with pytest.raises(ValueError, match="another evaluation, which would be lost: its acting is"):
        evaluate.evaluate(
            str(make_nvfp4("qwen2")), run, tasks, output_dir=run / "evaluation", success_at=0.5, **options
        )


def test_the_base_alone_acts_in_an_environment(
    make_nvfp4: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, options = str(make_nvfp4("qwen2")), {"output_dir": tmp_path, "max_model_length": 64, "max_samples": 2}
    with pytest.raises(ValueError, match="task tools takes the tools of a run"):
        evaluate.evaluate(base, None, ["tools"], **options)
    templates = {name: DEMO[name] for name in ("chat_template", "response_template")}
    options |= {"generation_kwargs": CALL_5, "max_new_tokens": 20, "quiet": True, **templates}
    result = evaluate.evaluate(base, None, ["environment:acting.Door"], **options)
    assert result["tasks"]["environment:acting.Door"]["base"]["calls"] >= 1


def test_an_adapter_in_a_slot_plays_other_episodes(make_bf16: Make, run_of: Any) -> None:
    run = run_of()
    options = {"quantization": "bf16", "max_model_length": 64, "max_samples": 4, "quiet": True}
    evaluate.evaluate(str(make_bf16("qwen2")), run, ["environment:acting.Door"], output_dir=run / "out", **options)
    lines = [json.loads(line) for line in (run / "out" / "answers.jsonl").read_text().splitlines()]
    base, adapter = ([line for line in lines if line["model"] == model] for model in ("base", "adapter"))
    assert [line["prompt"] for line in base] == [line["prompt"] for line in adapter]
    assert [line["episodes"] for line in base] != [line["episodes"] for line in adapter]


def test_equal_seeds_give_equal_episodes(play: Any, run_of: Any) -> None:
    options = {"temperature": 1.0, "generation_kwargs": {}, "num_samples": 2}
    run = run_of(max_tool_calling_iterations=3)
    first, again, other = (play(run, seed=seed, **options) for seed in (3, 3, 4))
    trained = play(run, seed=3, adapter=True, **options)
    assert first == again
    assert [one.episodes for one in first] != [one.episodes for one in other]
    assert [one.prompt for one in first] == [one.prompt for one in trained], "environments start in another way"
    assert [one.episodes for one in first] != [one.episodes for one in trained], "the adapter is not served"
    assert [one.seed for one in first] != [one.seed for one in other]
    assert len({one.seed for one in first}) == 3 and {len(one.episodes) for one in first} == {2}
    assert any(one.episodes[0] != one.episodes[1] for one in first), "two samples are one"
    assert [one.prompt for one in play(run, seed=3)] == [one.prompt for one in first]  # greedy: starts alone


def test_batches_and_turns_keep_their_seeds(play: Any, run_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from qerl_recipes.evaluate import episodes

    whole = play(run_of(), temperature=1.0, generation_kwargs={})
    monkeypatch.setattr(episodes, "AT_ONCE", 2)
    assert [one.seed for one in play(run_of(), temperature=1.0, generation_kwargs={})] == [one.seed for one in whole]
    asked: list[Any] = []
    limits = episodes.Request
    monkeypatch.setattr(episodes, "Request", lambda *parts: (asked.append(parts), limits(*parts))[1])
    play(run_of(), temperature=1.0, max_samples=3)
    seeds = [seed for _, seed, _ in asked]
    assert len(seeds) == len(set(seeds)) == 6, "two turns share their seed"
    assert all(most <= 24 - 4 for tokens, _, most in asked if len(tokens) > 8), "a later turn may have all tokens"


@pytest.mark.parametrize(
    ("recipe", "options", "rewards", "right"),
    [
        ({}, {}, [1.0] * 3, True),
        ({"environments": "acting.Half"}, {"task": "environment:acting.Half"}, [0.5] * 3, False),
        ({"environments": "acting.Half"}, {"task": "environment:acting.Half", "success_at": 0.5}, [0.5] * 3, True),
        ({"reward_funcs": ["soft_format", "tag_count"], "reward_weights": [2.0, 3.0]}, {}, [1.0] * 3, True),
        (PRAISED, {"task": "environment:acting.Unjudged"}, [1.0] * 3, True),
        ({"environments": "acting.Lost"}, {"task": "environment:acting.Lost"}, [None] * 3, False),
    ],
    ids=str,
)
def test_what_counts_as_a_success(
    recipe: dict[str, Any], options: dict[str, Any], rewards: list[Any], right: bool, play: Any, run_of: Any
) -> None:
    played = play(run_of(**recipe), **options)
    assert [one.rewards[0] for one in played] == rewards
    assert [one.right for one in played] == [[right]] * 3


def test_the_rewards_of_the_run_are_weighed(play: Any, run_of: Any) -> None:
    rows = [{**row, "answer": "1"} for row in ROWS]
    run = run_of(rows, dataset_name="x", reward_funcs=["last_number"], reward_weights=[4.0])
    (mine, *_) = play(run)
    worth = mine.rewards[0] - 1.0
    assert worth in (0.0, 4.0)
    from qerl_recipes.tasks.answers import text_of
    from qerl_recipes.tasks.rewards import last_number

    assert worth == 4.0 * last_number([text_of(mine.episodes[0])], ["1"])[0]


def test_held_out_rows_reach_prompt_and_reset(play: Any, run_of: Any, tmp_path: Path) -> None:
    run = run_of(ROWS, dataset_name="somewhere", system_prompt="7")
    played = play(run, max_samples=None)
    assert [one.prompt[0] for one in played] == [{"role": "system", "content": "7"}] * 3
    assert [one.prompt[1]["content"] for one in played] == [f"{i}+2{one.seed % 9}{i}" for i, one in enumerate(played)]
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"question": "6-4", "answer": "2"}))
    (asked,) = play(run_of(dataset_name="x", dataset_prompt_column="question"), problems=file, max_samples=None)
    assert asked.prompt[0]["content"].startswith("6-4"), "as the training data have it"
    file.write_text("".join(json.dumps({"prompt": "9-1", "environment": name}) + "\n" for name in ("a", "b", "b")))
    several = run_of(environments={"a": "acting.Door", "b": "acting.Wall"}, dataset_name="x")
    for name, rows, right in (("a", 1, True), ("b", 2, False)):
        played = play(several, f"environment:{name}", problems=file, max_samples=None)
        assert [one.right for one in played] == [[right]] * rows
        assert all(one.prompt[0]["content"].startswith("9-1") for one in played)


def test_the_tools_of_a_run_are_called(play: Any, run_of: Any) -> None:
    demo = yaml.safe_load((Path(__file__).parents[3] / "recipes/demo/tools/calculator.yaml").read_text())
    recipe = {key: demo[key] for key in ("tools", "reward_funcs", "reward_weights", "response_template")}
    run = run_of(ROWS, **recipe, environments=None, dataset_name="x")
    (run / "adapter" / "chat_template.jinja").write_text(demo["chat_template"])
    (first, *_) = play(run, "tools", generation_kwargs={"structured_outputs": {"regex": "<think>3\\+4="}})
    call, answer, *_ = first.episodes[0]
    assert call["tool_calls"][0]["function"] == {"name": "calculator", "arguments": {"expression": "3+4"}}
    assert answer == {"role": "tool", "name": "calculator", "content": "7"} and first.calls == [1]


def test_the_limits_of_the_run_are_kept(play: Any, run_of: Any) -> None:
    (first, *_) = play(run_of(max_tool_calling_iterations=3))
    assert [len(turns) for turns in first.turns] == [4]
    (first, *_) = play(run_of(), generation_kwargs={**CALL_5, "stop": ["5"]})
    assert first.turns[0][0] == 2, "a stop string ends a turn"
    (first, *_) = play(run_of(max_completion_length=5))
    assert first.cut == [True] and first.turns == [[4]] and first.room > 5
    with pytest.warns(UserWarning, match=r"tool guess failed \(ToolTimeout: took longer than 0\.1 s"):
        (first, *_) = play(
            run_of(environments="acting.Slow", max_tool_seconds=0.1), "environment:acting.Slow", max_samples=1
        )
    assert first.failures == [1]
    run = run_of(environments="acting.Talker", max_tool_tokens=2)
    (first, *_) = play(run, "environment:acting.Talker")
    assert first.episodes[0][1]["content"] == "12"


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ({}, {"tasks": ["environment:acting.Nobody"]}, r"acting\.Nobody cannot be imported"),
        ({}, {"tasks": ["environment:nobody"]}, "'nobody' is not one of the environments: .*higher_lower"),
        ({}, {"tasks": ["environment:"]}, "there is no task 'environment:'"),
        ({}, {"tasks": ["environment:acting.Unpaid"]}, "the environment has no get_reward"),
        ({}, {"tasks": ["tools"]}, "the adapter's run has environments"),
        ({"environments": None}, {"tasks": ["tools"]}, "the adapter's run names no tools"),
        ({"environments": None, "tools": ["calculator"]}, {"tasks": ["tools"]}, "has no get_reward|names no data"),
        ({"rollout_func": "acting.rollout"}, {}, "takes its turns in rollout_func"),
        ({"reward_funcs": ["exact_answer"]}, {}, "reward exact_answer reads the column answer"),
        ({"dataset_name": "x"}, {}, r"holds no held_out\.jsonl, .* with --problems"),
        ({"environments": "acting.Strict"}, {"tasks": ["environment:acting.Strict"]}, "no get_reward"),
        ({}, {"system_prompt": "1" * 64}, "there is no room for an answer; raise max_model_length"),
        ({}, {"response_template": {"fields": {}}}, "response_template"),
        ({}, {"chat_template": "{{ messages[-1].content }}"}, "does not render calls of tools"),
        ({}, {"use_chat_template": False}, "needs a chat template, which renders calls"),
        ({}, {"problems": "nowhere.jsonl"}, r"there is no file nowhere\.jsonl"),
        ({}, {"success_at": float("nan")}, "success_at is nan"),
        ({"environments": "acting.Seedless", "reward_funcs": ["tag_count"]}, {"tasks": ["environment:acting.Seedless"],
          "seed": 3, "problems": "seedless.jsonl"}, "starts by none, and temperature 0 draws nothing"),
        ({}, {"tasks": ["running_sum"], "success_at": 0.5}, "success_at would be ignored"),
        ({}, {"tasks": ["running_sum"], "problems": "seedless.jsonl"}, "problems would be ignored"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_refused_before_the_engine_starts(
    recipe: dict[str, Any], options: dict[str, Any], message: str,
    make_nvfp4: Make, run_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(evaluate, "start", lambda *_: pytest.fail("the engine was started"))
    monkeypatch.chdir(tmp_path)
    Path("seedless.jsonl").write_text(json.dumps({"prompt": "1+2", "answer": "3"}))
    asked = {"tasks": ["environment:acting.Door"], "max_model_length": 64, "output_dir": tmp_path / "o", **options}
    with pytest.raises(ValueError, match=message):
        evaluate.evaluate(str(make_nvfp4("qwen2")), run_of(**recipe), **asked)
    assert not (tmp_path / "o").exists()


def test_a_reset_that_fails_is_told(play: Any, run_of: Any) -> None:
    with pytest.raises(ValueError, match=r"environment acting\.Jammed: reset failed \(OSError: the door is stuck"):
        play(run_of(environments="acting.Jammed"), "environment:acting.Jammed")


def test_episodes_without_a_reward_are_counted() -> None:
    from qerl_recipes.evaluate.episodes import Played
    from qerl_recipes.evaluate.figures import episode_rows, of_episodes, unscored

    def played(*rewards: float | None) -> Played:
        size = len(rewards)
        right = [reward is not None and reward >= 1 for reward in rewards]
        return Played("0", None, [], [[]] * size, list(rewards), right, [False] * size, [[3, 2]] * size, [2] * size,
                      [1] * size, 9)  # fmt: skip

    figures = of_episodes([played(1.0, None), played(0.5, 0.0), played(None, None)], 2)
    assert figures["unscored"] == 3 and figures["reward"]["value"] == (1.0 + 0.25) / 2
    assert (figures["accuracy"], figures["turns"], figures["calls"], figures["failures"]) == (1 / 6, 2, 2, 1)
    assert "maj_at" not in figures and figures["pass_at"]["2"]["value"] == pytest.approx(1 / 3)
    assert unscored({"tasks": {"environment:x": {"base": figures}}})[0].startswith("environment:x: 3 (base) episodes")
    none = of_episodes([played(None)], 1)
    assert "reward" not in none and episode_rows({"base": none})[0] == ("mean reward", ["none"])
    assert episode_rows({"base": {"accuracy": 1.0}}) == []
