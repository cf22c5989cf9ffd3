"""Let the policy act on held-out problems: the tasks ``environment:NAME`` and ``tools`` of ``qerl evaluate``.

Tools, environment, templates, limits and rewards are those of the run that trained the adapter. The episodes are
played by the loop of training, ``rollout.episodes``. Base and adapter get the same problems, environments that start
by the same seeds, and the same sampling seeds.
"""

import asyncio
import contextlib
import hashlib
import inspect
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, TrainerState
from trl.trainer.utils import shutdown_event_loop_in_daemon, start_event_loop_in_daemon

from qerl_recipes.evaluate.as_trained import HELD_OUT, acts_as_in
from qerl_recipes.evaluate.request import TOOLS, Evaluation
from qerl_recipes.files.adapter import AdapterFolder
from qerl_recipes.files.base_model import read_config
from qerl_recipes.files.json_files import read_lines
from qerl_recipes.hooks import collect
from qerl_recipes.model.families import most_positions
from qerl_recipes.recipe.configs import GRPOConfig, ScriptArguments
from qerl_recipes.recipe.generation import for_sampling_params
from qerl_recipes.rollout import sampling
from qerl_recipes.rollout.calls import Message, named
from qerl_recipes.rollout.episodes import Episode, Player, begun
from qerl_recipes.rollout.interface import GoOn, Profiler, Taken, Turn
from qerl_recipes.rollout.sampling import Ended, Request
from qerl_recipes.tasks import environments, prompts, rewards
from qerl_recipes.tasks.environments import COLUMN, Interaction, Starts
from qerl_recipes.tasks.interface import Environment, Reward
from qerl_vllm_plugin.noise import seed_of

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

EPISODES = 128  # problems of an environment that has data of its own, without max_samples
AT_ONCE = 64  # episodes that are played together: each has an instance of the environment, perhaps a process


@dataclass(frozen=True)
class Played:
    """Hold one problem and the episodes that were played on it, one entry for each in every list.

    ``prompt`` holds the messages before the first turn, ``episodes`` those of the turns. ``rewards`` are None where no
    reward applied. ``turns`` are the sampled tokens of each turn; ``cut`` says which ended because tokens ran out,
    and ``room`` how many tokens of ``max_model_length`` the longest prompt leaves.
    """

    problem: str
    seed: int | None
    prompt: list[Message]
    episodes: list[list[Message]]
    rewards: list[float | None]
    right: list[bool]
    cut: list[bool]
    turns: list[list[int]]
    calls: list[int]
    failures: list[int]
    room: int

    @property
    def share(self) -> float:
        return sum(self.right) / len(self.right)


@dataclass(frozen=True)
class Task:
    """Describe a task in which the policy acts; everything in it has been checked.

    ``rewards`` are the run's, by name, each with its weight; the environment's own has weight 1. ``options`` are those
    with which prompts are rendered. ``limits`` are the run's, as arguments of ``Player``.
    """

    name: str
    interaction: Interaction
    rewards: Mapping[str, tuple[Reward, float]]
    rows: Dataset
    tokenizer: PreTrainedTokenizerBase
    options: Mapping[str, Any]
    limits: Mapping[str, Any]

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.rows.to_list(), default=str, sort_keys=True).encode()).hexdigest()


def prepare(evaluation: Evaluation, saved: AdapterFolder | None, folder: Path) -> list[Task]:
    """Return the tasks of ``evaluation`` in which the policy acts; raise ValueError for what cannot be played."""
    recipe = {} if saved is None else saved.recipe
    if evaluation.response_template is None:
        evaluation = evaluation.model_copy(update={"response_template": recipe.get("response_template")})
    return [_prepared(name, evaluation, saved, recipe, folder) for name in evaluation.episodes]


def _prepared(
    name: str, evaluation: Evaluation, saved: AdapterFolder | None, recipe: Mapping[str, Any], folder: Path
) -> Task:
    script = _script(name, evaluation, recipe)
    problems: list[str] = []
    seconds = recipe.get("max_tool_seconds", GRPOConfig.max_tool_seconds)
    offered = collect("qerl_tools"), collect("qerl_environments")
    interaction = environments.resolve(script, seconds, *offered, problems)
    functions = {}
    weights = recipe.get("reward_weights") or [1.0] * len(script.reward_funcs)
    for reward, weight in zip(script.reward_funcs, weights, strict=False):
        try:
            functions[reward] = rewards.resolve(reward, script, collect("qerl_rewards")), float(weight)
        except ValueError as error:
            problems.append(str(error))
    if not script.reward_funcs and not interaction.rewards() and not problems:
        problems.append("the environment has no get_reward, and the adapter's run no reward_funcs for it")
    if problems:
        raise ValueError(f"{name}: " + "; ".join(problems))
    rows = _rows(name, evaluation, script, saved)
    for reward, (function, _) in functions.items():
        if missing := sorted(rewards.required_columns(function) - set(rows.column_names)):
            problems.append(f"reward {reward} reads the column {', '.join(missing)}, which the problems lack")
        problems += rewards.answer_problems(reward, rows, "held-out")
    named = rows[COLUMN] if COLUMN in rows.column_names else ()
    problems += environments.row_problems(interaction, "held-out", rows.column_names, named)
    if problems:
        raise ValueError(f"{name}: " + "; ".join(problems))
    starts_by_seed = environments.takes_seed(rows.column_names, interaction.resets())
    if evaluation.seed is not None and evaluation.temperature == 0 and not starts_by_seed:
        raise ValueError(f"seed is {evaluation.seed}, but {name} starts by none, and temperature 0 draws nothing")
    tokenizer = prompts.tokenizer(folder, evaluation)
    options = environments.rendering(tokenizer, evaluation, interaction)
    rows = prompts.load(script, tokenizer, (rows, None), options, interaction)[0]
    length = evaluation.max_model_length or most_positions(read_config(folder))
    longest = max(prompts.counts(rows, tokenizer, options, interaction))  # before an environment adds to it
    if length is not None and longest >= length:
        raise ValueError(
            f"{name}: a prompt has {longest} tokens, tools included, and max_model_length is {length}: there is no "
            "room for an answer; raise max_model_length"
        )
    limits = {
        "most_turns": recipe.get("max_tool_calling_iterations") or sys.maxsize,
        "tool_tokens": recipe.get("max_tool_tokens"),
        "tool_seconds": seconds,
    }
    return Task(name, interaction, functions, rows, tokenizer, options, limits)


def _script(name: str, evaluation: Evaluation, recipe: Mapping[str, Any]) -> ScriptArguments:
    """Return a recipe's keys for a task, of another environment without tools and rewards, or raise ValueError."""
    known = {field.name for field in fields(ScriptArguments) if field.init}
    keys = {key: value for key, value in recipe.items() if key in known and not key.startswith("dataset_")}
    keys["system_prompt"] = evaluation.system_prompt
    trained, named = recipe.get("environments"), name.partition(":")[2]
    if name == TOOLS and trained:
        raise ValueError(f"task {TOOLS}: the adapter's run has environments; evaluate it in environment:NAME")
    if name == TOOLS and not recipe.get("tools"):
        raise ValueError(f"task {TOOLS}: the adapter's run names no tools")
    if not acts_as_in(name, recipe):
        keys |= {"environments": named, "environment_kwargs": None, "environment_python": None}
        keys |= {"tools": [], "reward_funcs": [], "rollout_func": None}
    elif recipe.get("rollout_func"):
        raise ValueError(f"{name}: the adapter's run takes its turns in rollout_func, which needs its trainer")
    elif isinstance(trained, dict):
        arguments = (recipe.get("environment_kwargs") or {}).get(named)
        keys |= {"environments": {named: trained[named]}}
        keys |= {"environment_kwargs": None if arguments is None else {named: arguments}}
    return ScriptArguments(**keys)


def _rows(name: str, evaluation: Evaluation, script: ScriptArguments, saved: AdapterFolder | None) -> Dataset:
    """Return a task's problems: of a file, held out by the run, or empty; raise ValueError where there are none."""
    file, most = evaluation.problems, evaluation.max_samples
    recipe = {} if saved is None else saved.recipe
    if file is None and saved is not None and acts_as_in(name, recipe) and recipe.get("dataset_name"):
        places = [saved.path / HELD_OUT, saved.path.parent / HELD_OUT]
        if (file := next((place for place in places if place.is_file()), None)) is None:
            raise ValueError(
                f"{name}: {saved.path.parent} holds no {HELD_OUT}, in which qerl train leaves the problems that the "
                "data hold out; name a file of JSON lines, with the columns of the training data, with --problems"
            )
    if file is None and name == TOOLS:
        raise ValueError(f"task {TOOLS}: the adapter's run names no data; name a file of JSON lines with --problems")
    if file is None:
        return Dataset.from_list([{"prompt": prompts.NOTHING}] * (most or EPISODES))
    lines = [line for _, line in read_lines(file, "a JSON object with the columns of the training data")]
    if isinstance(script.environments, dict):
        lines = [line for line in lines if line.get(COLUMN) in {None, *script.environments}]
    if not lines:
        raise ValueError(f"{name}: {file} holds no problems for it")
    try:
        columns = dict.fromkeys(column for line in lines for column in line)
        rows = Dataset.from_dict({column: [line.get(column) for line in lines] for column in columns})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: its columns have values of several types ({error})") from error
    named = replace(script)
    named.dataset_name = str(file)
    if "prompt" not in columns:  # held_out.jsonl has it
        named.dataset_prompt_column = recipe.get("dataset_prompt_column")
    has_environments = script.environments is not None
    rows, _ = prompts.read(named, {str(file): lambda _: (rows, None)}, may_lack_prompts=has_environments)
    return rows if most is None else rows.select(range(min(most, len(rows))))


class _Engine:
    """Take the turns of episodes from number ``first`` on; ``is_cut`` says whose last turn ran out of tokens."""

    episodes = contextlib.nullcontext  # the engine serves one policy, and is always ready

    def __init__(self, llm: "LLM", request: "LoRARequest | None", evaluation: Evaluation, task: str) -> None:
        self._llm, self._request, self._evaluation, self._task = llm, request, evaluation, task
        self.longest: int = llm.llm_engine.model_config.max_model_len
        self.first, self.is_cut = 0, dict[int, bool]()

    def _seed(self, place: int, number: int) -> int:
        """Return the seed of a turn: the same for base and adapter, another one for each sample of each problem."""
        problem, sample = divmod(self.first + place, self._evaluation.num_samples)
        return seed_of(self._evaluation.seed or 0, self._task, problem, sample, number)

    def play(self, turns: Sequence[Turn], go_on: GoOn, num_generations: int = 1, profiler: Profiler = None) -> None:
        """Take ``turns`` and what ``go_on`` returns; log-probabilities are not asked for, and are None."""
        from vllm import SamplingParams

        evaluation, parameters = self._evaluation, for_sampling_params(self._evaluation.generation_kwargs or {})
        parameters |= {"temperature": evaluation.temperature, "top_p": evaluation.top_p}
        parameters["detokenize"] = bool(parameters.get("stop"))  # the messages are read from the tokens
        asked: list[Turn] = []

        def requests(turns: Sequence[Turn]) -> list[tuple[list[int], SamplingParams]]:
            asked.extend(turns)
            given = [Request(turn.tokens, self._seed(turn.place, turn.number), turn.most) for turn in turns]
            return [(one.prompt, SamplingParams(**{**parameters, **one.limits(parameters)})) for one in given]

        def follow(ended: list[Ended]) -> list[tuple[list[int], SamplingParams]]:
            self.is_cut |= {asked[one.number].place: one.is_cut for one in ended}
            taken: list[Taken] = [(asked[one.number], one.completion) for one in ended]
            return requests(go_on(sorted(taken, key=lambda one: one[0].place)))

        inputs, samplings = zip(*requests(turns), strict=True)
        sampling.generate(self._llm, inputs, samplings, self._request, follow)


def play(llm: "LLM", request: "LoRARequest | None", task: Task, evaluation: Evaluation, label: str) -> list[Played]:
    """Play ``evaluation.num_samples`` episodes on each problem with the policy that the engine serves now."""
    group, factories = evaluation.num_samples, list(task.interaction.environments.values())
    rows = [dict(row) for row in task.rows for _ in range(group)]
    starts = Starts(evaluation.seed or 0)
    starts.open("evaluation")
    rows = starts.seeded(rows, task.interaction.resets(), 0, group)
    # new instances for each policy: what one keeps over resets is then the same
    pool = [factories[0]() if factories else None for _ in rows[:AT_ONCE]]
    engine = _Engine(llm, request, evaluation, task.name)
    played: list[dict[str, Any]] = []
    thread, loop, is_ready = start_event_loop_in_daemon(name="episodes")  # of async tools and rewards, as in TRL
    is_ready.wait()
    with contextlib.ExitStack() as stack:
        stack.callback(shutdown_event_loop_in_daemon, thread, loop)
        progress = stack.enter_context(tqdm(total=len(rows), desc=f"evaluating {label}", leave=False))
        player = Player(engine, task.tokenizer, task.options, evaluation.max_new_tokens, **task.limits, loop=loop)
        for engine.first in range(0, len(rows), AT_ONCE):
            part = rows[engine.first : engine.first + AT_ONCE]
            played += _played(engine, player, task, evaluation, part, pool[: len(part)])
            progress.update(len(part))
    problems = []
    for number, first in enumerate(range(0, len(rows), group)):
        episodes = played[first : first + group]
        columns: dict[str, Any] = {key: [one[key] for one in episodes] for key in episodes[0]}
        columns["room"] = min(columns["room"])
        problems.append(Played(str(number), columns.pop("seed")[0], columns.pop("prompt")[0], **columns))
    return problems


def _played(
    engine: _Engine,
    player: Player,
    task: Task,
    evaluation: Evaluation,
    rows: Sequence[Mapping[str, Any]],
    instances: Sequence[Environment | None],
) -> list[dict[str, Any]]:
    """Play one episode on each of ``rows`` together, and return what ``Played`` says of each."""
    tokenizer, environments = task.tokenizer, task.interaction.environments
    ((name, factory),) = environments.items() or ((None, None),)
    pairs = zip(rows, instances, strict=True)
    conversations = [begun(row, one, is_one_of_several=name is not None) for row, one in pairs]
    options = {**task.options, "tools": task.interaction.schemas(name)}
    episodes = []
    for conversation, one in zip(conversations, instances, strict=True):
        ids = prompts.ids(conversation, tokenizer, options)
        if engine.longest - len(ids) < 1:
            raise ValueError(
                f"{task.name}: a prompt has {len(ids)} tokens with what the environment adds, and max_model_length is "
                f"{engine.longest}: there is no room for an answer; raise max_model_length"
            )
        tools = [*task.interaction.tools, *(factory.methods_of(one) if factory and one else ())]
        episodes.append(Episode(ids, {tool.__name__: tool for tool in tools}))
    player.play(episodes)
    scores = _scores(task, rows, conversations, episodes, instances, player.loop)
    return [
        {
            "seed": row.get("seed"),
            "prompt": conversation,
            "episodes": episode.messages,
            "rewards": score,
            "right": score is not None and score >= evaluation.least_reward,
            "cut": episode.is_cut or engine.is_cut[place],
            "turns": episode.turns,
            "calls": episode.calls,
            "failures": episode.failures,
            "room": engine.longest - len(episode.prompt),
        }
        for place, (row, conversation, episode, score) in enumerate(
            zip(rows, conversations, episodes, scores, strict=True)
        )
    ]


def _scores(
    task: Task,
    rows: Sequence[Mapping[str, Any]],
    conversations: list[list[Message]],
    episodes: Sequence[Episode],
    instances: Sequence[Any],
    loop: Any,
) -> list[float | None]:
    """Return the weighted sum of all rewards of each episode, None where none applies."""

    def settled(value: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(value, loop).result() if inspect.iscoroutine(value) else value

    columns: dict[str, Any] = {key: [row[key] for row in rows] for key in rows[0] if key != "prompt"}
    columns |= dict.fromkeys(("log_extra", "log_metric"), lambda *_, **__: None) | {"trainer_state": TrainerState()}
    columns["tool_mask"] = [one.mask for one in episodes]
    if task.interaction.environments:
        columns["environments"] = list(instances)
    columns |= {"completions": [one.messages for one in episodes], "completion_ids": [one.ids for one in episodes]}
    parts: list[list[float]] = [[] for _ in rows]
    given = [(name, weight, settled(f(prompts=conversations, **columns))) for name, (f, weight) in task.rewards.items()]
    for name in task.interaction.rewards():
        given.append((name, 1.0, [settled(one.get_reward()) for one in instances]))
    for name, weight, values in given:
        if len(values) != len(rows):
            raise ValueError(f"{task.name}: reward {name} returned {len(values)} values for {len(rows)} episodes")
        for part, value in zip(parts, values, strict=True):
            if value is None or math.isnan(value):
                continue
            if math.isinf(value):
                raise ValueError(f"{task.name}: the reward {name} gave {value}; rewards must be finite")
            part.append(weight * float(value))
    # summed exactly: 0.7 + 0.2 + 0.1 is less than 1 otherwise, and no success
    return [math.fsum(part) if part else None for part in parts]


def side_by_side(policies: Mapping[str, Sequence[Played]]) -> dict[str, Any]:
    """Return one problem with the first episode of each policy on it, to be read side by side.

    It is the first problem on which these episodes differ in success, else in reward; else the first of all. ``turns``
    holds [speaker, text] of each message, with calls as Python would write them.
    """

    def differing(key: str) -> list[int]:
        firsts = zip(*([getattr(problem, key)[0] for problem in played] for played in policies.values()), strict=True)
        return [number for number, values in enumerate(firsts) if len(set(values)) > 1]

    number, episodes = next(iter([*differing("right"), *differing("rewards"), 0])), {}
    for label, played in policies.items():
        problem = played[number]
        turns = [_line(message) for message in (*problem.prompt, *problem.episodes[0])]
        episodes[label] = {"reward": problem.rewards[0], "cut": problem.cut[0], "turns": turns}
    return {"problem": str(number), "episodes": episodes}


def _line(message: Message) -> tuple[str, str]:
    content = message.get("content") or ""
    parts = [content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)]
    for name, given in map(named, message.get("tool_calls") or ()):
        arguments = ", ".join(f"{key}={value!r}" for key, value in given.items()) if isinstance(given, dict) else given
        parts.append(f"{name}({arguments})")
    speaker = message["role"] if message["role"] != "tool" else f"tool {message.get('name')}"
    return speaker, "\n".join(part for part in parts if part.strip())
