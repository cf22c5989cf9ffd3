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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, TrainerState
from trl import GRPOTrainer
from trl.chat_template_utils import parse_response
from trl.trainer.utils import shutdown_event_loop_in_daemon, start_event_loop_in_daemon

from qerl_recipes.evaluate.as_trained import HELD_OUT, has_data
from qerl_recipes.evaluate.request import TOOLS, Evaluation
from qerl_recipes.files.adapter import AdapterFolder
from qerl_recipes.files.base_model import read_config
from qerl_recipes.files.json_files import read_lines
from qerl_recipes.hooks import collect
from qerl_recipes.model.families import most_positions
from qerl_recipes.recipe.configs import GRPOConfig, ScriptArguments
from qerl_recipes.recipe.generation import for_sampling_params
from qerl_recipes.rollout.episodes import Episode, Message, Player, described
from qerl_recipes.rollout.interface import Turn
from qerl_recipes.rollout.sampling import Request
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

    ``prompt`` holds the messages before the first turn, with what the environment adds to them. ``episodes`` are the
    messages of the turns. ``rewards`` are None where no reward applied. ``turns`` are the numbers of sampled tokens of
    each turn. ``cut`` says which ended because tokens ran out.
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

    @property
    def share(self) -> float:
        """Return the share of episodes that are a success."""
        return sum(self.right) / len(self.right)


@dataclass(frozen=True)
class Task:
    """Describe a task in which the policy acts; everything in it has been checked.

    ``rewards`` are the run's, by name, each with its weight; the environment's own has weight 1. ``options`` are those
    with which prompts are rendered. ``most_turns`` limits the turns after the first.
    """

    name: str
    interaction: Interaction
    rewards: Mapping[str, tuple[Reward, float]]
    rows: Dataset
    tokenizer: PreTrainedTokenizerBase
    options: Mapping[str, Any]
    most_turns: int
    tool_tokens: int | None
    tool_seconds: float | None

    def digest(self) -> str:
        """Return a SHA-256 hash of the problems, in order."""
        return hashlib.sha256(json.dumps(self.rows.to_list(), default=str, sort_keys=True).encode()).hexdigest()


def prepare(evaluation: Evaluation, saved: AdapterFolder | None, folder: Path) -> list[Task]:
    """Return the tasks of ``evaluation`` in which the policy acts; ``folder`` is the base, ``saved`` the adapter.

    Raises ValueError, before the engine starts, for tools, environments, templates, problems and rewards that cannot be
    used, for prompts that leave no room for an answer, and for a seed that nothing depends on.
    """
    recipe = {} if saved is None else saved.recipe
    if evaluation.response_template is None:
        evaluation = evaluation.model_copy(update={"response_template": recipe.get("response_template")})
    return [_prepared(name, evaluation, saved, recipe, folder) for name in evaluation.episodes]


def _prepared(
    name: str, evaluation: Evaluation, saved: AdapterFolder | None, recipe: Mapping[str, Any], folder: Path
) -> Task:
    script, is_of_run = _script(name, evaluation, recipe)
    problems: list[str] = []
    seconds = recipe.get("max_tool_seconds", _default("max_tool_seconds"))
    offered = collect("qerl_tools"), collect("qerl_environments")
    interaction = environments.resolve(script, seconds, *offered, problems)
    functions = {}
    weights = (recipe.get("reward_weights") if is_of_run else None) or [1.0] * len(script.reward_funcs)
    for reward, weight in zip(script.reward_funcs, weights, strict=True):
        try:
            functions[reward] = rewards.resolve(reward, script, collect("qerl_rewards")), float(weight)
        except ValueError as error:
            problems.append(str(error))
    if not script.reward_funcs and not interaction.rewards() and not problems:
        problems.append("the environment has no get_reward, and the adapter's run no reward_funcs for it")
    if problems:
        raise ValueError(f"{name}: " + "; ".join(problems))
    rows = _rows(name, evaluation, script, saved, is_of_run)
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
    _refuse_long(name, rows, tokenizer, options, interaction, evaluation, folder)
    most_turns = recipe.get("max_tool_calling_iterations") or sys.maxsize
    limits = most_turns, recipe.get("max_tool_tokens"), seconds
    return Task(name, interaction, functions, rows, tokenizer, options, *limits)


def _default(key: str) -> Any:
    return next(field.default for field in fields(GRPOConfig) if field.name == key)


def _script(name: str, evaluation: Evaluation, recipe: Mapping[str, Any]) -> tuple[ScriptArguments, bool]:
    """Return a recipe's keys for one task, and whether the task is the run's own.

    Another environment than the run's gets neither its tools nor its rewards.
    """
    known = {field.name for field in fields(ScriptArguments) if field.init}
    keys = {key: value for key, value in recipe.items() if key in known and not key.startswith("dataset_")}
    keys["system_prompt"] = evaluation.system_prompt
    trained, named = recipe.get("environments"), name.partition(":")[2]
    is_of_run = not trained if name == TOOLS else named == trained or (isinstance(trained, dict) and named in trained)
    if name == TOOLS and not is_of_run:
        raise ValueError(f"task {TOOLS}: the adapter's run has environments; evaluate it in environment:NAME")
    if is_of_run and recipe.get("rollout_func"):
        raise ValueError(f"{name}: the adapter's run takes its turns in rollout_func, which needs its trainer")
    if name == TOOLS:
        if not recipe.get("tools"):
            raise ValueError(f"task {TOOLS}: the adapter's run names no tools")
    elif not is_of_run:
        keys |= {"environments": named, "environment_kwargs": None, "environment_python": None}
        keys |= {"tools": [], "reward_funcs": [], "rollout_func": None}
    elif isinstance(trained, dict):
        arguments = (recipe.get("environment_kwargs") or {}).get(named)
        keys |= {"environments": {named: trained[named]}}
        keys |= {"environment_kwargs": None if arguments is None else {named: arguments}}
    return ScriptArguments(**keys), is_of_run


def _rows(
    name: str, evaluation: Evaluation, script: ScriptArguments, saved: AdapterFolder | None, is_of_run: bool
) -> Dataset:
    """Return the problems of a task: of a file, of those that the run has held out, or empty ones for an environment.

    Raises ValueError where a run with data has left no problems, and for a file that cannot be used.
    """
    file = evaluation.problems
    if file is None and saved is not None and is_of_run and has_data(saved.recipe):
        places = [saved.path / HELD_OUT, saved.path.parent / HELD_OUT]
        if (file := next((place for place in places if place.is_file()), None)) is None:
            raise ValueError(
                f"{name}: {saved.path.parent} holds no {HELD_OUT}, in which qerl train leaves the problems that the "
                "data hold out; name a file of JSON lines, with the columns of the training data, with --problems"
            )
    if file is None and name == TOOLS:
        raise ValueError(f"task {TOOLS}: the adapter's run names no data; name a file of JSON lines with --problems")
    most = evaluation.max_samples
    if file is None:
        return Dataset.from_list([{"prompt": prompts.NOTHING}] * (most or EPISODES))
    lines = [line for _, line in read_lines(file, "a JSON object with the columns of the training data")]
    if isinstance(script.environments, dict):
        (environment,) = script.environments
        lines = [line for line in lines if line.get(COLUMN, environment) == environment]
    if not lines:
        raise ValueError(f"{name}: {file} holds no problems for it")
    try:
        columns = dict.fromkeys(column for line in lines for column in line)
        rows = Dataset.from_dict({column: [line.get(column) for line in lines] for column in columns})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: its columns have values of several types ({error})") from error
    named = replace(script)
    named.dataset_name = str(file)
    has_environments = script.environments is not None
    rows, _ = prompts.read(named, {str(file): lambda _: (rows, None)}, may_lack_prompts=has_environments)
    return rows if most is None else rows.select(range(min(most, len(rows))))


def _refuse_long(
    name: str,
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    options: Mapping[str, Any],
    interaction: Interaction,
    evaluation: Evaluation,
    folder: Path,
) -> None:
    """Raise ValueError if a prompt leaves no room for an answer, before an environment adds to it."""
    length = evaluation.max_model_length or most_positions(read_config(folder))
    longest = max(prompts.counts(rows, tokenizer, options, interaction))
    if length is not None and longest >= length:
        raise ValueError(
            f"{name}: a prompt has {longest} tokens, tools included, and max_model_length is {length}: there is no "
            "room for an answer; raise max_model_length"
        )


class _Engine:
    """Take the turns of a task's episodes (``rollout.interface.TakesTurns``).

    ``first`` is the number of the first episode that is played now. ``is_cut`` says of the last turn of each place
    whether its tokens ran out.
    """

    def __init__(self, llm: "LLM", request: "LoRARequest | None", evaluation: Evaluation, task: str) -> None:
        self._llm, self._request, self._evaluation, self._task = llm, request, evaluation, task
        self.longest: int = llm.llm_engine.model_config.max_model_len
        self.first, self.is_cut = 0, dict[int, bool]()

    def episodes(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: the engine serves one policy, and is always ready."""
        return contextlib.nullcontext()

    def _seed(self, place: int, number: int) -> int:
        """Return the seed of a turn: the same for base and adapter, another one for each sample of each problem."""
        problem, sample = divmod(self.first + place, self._evaluation.num_samples)
        return seed_of(self._evaluation.seed or 0, self._task, problem, sample, number)

    def turn(self, turns: Sequence[Turn]) -> list[tuple[list[int], list[float | None]]]:
        """Return the ids of each turn; log-probabilities are not asked for, and are None."""
        from vllm import SamplingParams

        evaluation, parameters = self._evaluation, for_sampling_params(self._evaluation.generation_kwargs or {})
        requests = [Request(turn.tokens, self._seed(turn.place, turn.number), turn.most) for turn in turns]
        warm = {"temperature": evaluation.temperature, "top_p": evaluation.top_p}
        outputs = self._llm.generate(
            [{"prompt_token_ids": one.prompt} for one in requests],
            [SamplingParams(**{**parameters, **warm, **one.limits(parameters)}) for one in requests],
            lora_request=self._request,
            use_tqdm=False,
        )
        answers = [output.outputs[0] for output in outputs]
        if given_up := [answer for answer in answers if answer.finish_reason not in ("stop", "length")]:
            raise RuntimeError(f"vLLM gave {len(given_up)} turns up, the first with {given_up[0].finish_reason}")
        self.is_cut |= {
            turn.place: answer.finish_reason == "length" for turn, answer in zip(turns, answers, strict=True)
        }
        return [(list(answer.token_ids), [None] * len(answer.token_ids)) for answer in answers]


def play(llm: "LLM", request: "LoRARequest | None", task: Task, evaluation: Evaluation, label: str) -> list[Played]:
    """Play ``evaluation.num_samples`` episodes on each problem with the policy that the engine serves now.

    ``label`` names the policy in the progress bar. Raises ValueError for a reset that fails, for a prompt that leaves
    no room once the environment has added to it, and for an infinite reward.
    """
    group = evaluation.num_samples
    rows = [dict(row) for row in task.rows for _ in range(group)]
    starts = Starts(evaluation.seed or 0)
    starts.open("evaluation")
    rows = starts.seeded(rows, task.interaction.resets(), 0, group)
    pool: list[Environment] = []  # new ones for each policy: what an instance keeps over resets is then the same
    played: list[dict[str, Any]] = []
    engine = _Engine(llm, request, evaluation, task.name)
    with _event_loop() as loop, tqdm(total=len(rows), desc=f"evaluating {label}", leave=False) as progress:
        limits = evaluation.max_new_tokens, task.most_turns, task.tool_tokens, task.tool_seconds
        player = Player(engine, task.tokenizer, _suffix_ids(task.tokenizer, task.options), *limits, loop)
        for engine.first in range(0, len(rows), AT_ONCE):
            part = rows[engine.first : engine.first + AT_ONCE]
            played += _played(engine, player, task, evaluation, part, pool)
            progress.update(len(part))
    return [_joined(number, played[first : first + group]) for number, first in enumerate(range(0, len(rows), group))]


@contextlib.contextmanager
def _event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Run the event loop of async tools and rewards in a thread, as TRL does."""
    thread, loop, is_ready = start_event_loop_in_daemon(name="episodes")
    is_ready.wait()
    try:
        yield loop
    finally:
        shutdown_event_loop_in_daemon(thread, loop)


def _joined(number: int, episodes: Sequence[Mapping[str, Any]]) -> Played:
    """Return the episodes of one problem as one."""
    common: dict[str, Any] = {"problem": str(number), "seed": episodes[0]["seed"], "prompt": episodes[0]["prompt"]}
    return Played(**{key: [one[key] for one in episodes] for key in episodes[0]} | common)


def _played(
    engine: _Engine,
    player: Player,
    task: Task,
    evaluation: Evaluation,
    rows: Sequence[Mapping[str, Any]],
    pool: list[Environment],
) -> list[dict[str, Any]]:
    """Play one episode on each of ``rows`` together, and return what ``Played`` says of each."""
    interaction, tokenizer = task.interaction, task.tokenizer
    ((environment, made),) = interaction.environments.items() or ((None, None),)
    while made is not None and len(pool) < len(rows):
        pool.append(made())
    instances: Sequence[Environment | None] = pool[: len(rows)] or [None] * len(rows)
    conversations = [_begun(task, row, one) for row, one in zip(rows, instances, strict=True)]
    options = {**task.options, "tools": interaction.schemas(environment)}
    turns = []
    for place, conversation in enumerate(conversations):
        ids = prompts.ids(conversation, tokenizer, options)
        if (room := engine.longest - len(ids)) < 1:
            raise ValueError(
                f"{task.name}: a prompt has {len(ids)} tokens with what the environment adds, and max_model_length is "
                f"{engine.longest}: there is no room for an answer; raise max_model_length"
            )
        turns.append(Turn(ids, place, 0, min(evaluation.max_new_tokens or room, room)))
    episodes = []
    for turn, (ids, logprobs), one in zip(turns, engine.turn(turns), instances, strict=True):
        own = [] if made is None or one is None else made.methods_of(one)
        tools = [*interaction.tools, *own]
        message = parse_response(tokenizer, ids, prefix=turn.tokens, tools=tools)
        episodes.append(Episode(turn.tokens, ids, logprobs, [message], {tool.__name__: tool for tool in tools}))
    player.play(episodes)
    assert player.loop is not None
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
        }
        for place, (row, conversation, episode, score) in enumerate(
            zip(rows, conversations, episodes, scores, strict=True)
        )
    ]


def _begun(task: Task, row: Mapping[str, Any], environment: Environment | None) -> list[Message]:
    """Reset an environment, and return the row's prompt with the text that it adds, as TRL does."""
    prompt: list[Message] = list(row["prompt"])
    if environment is None:
        return prompt
    text = environment.reset(**{key: row[key] for key in environments.given(row, task.interaction.environments)})
    if text is None:
        return prompt
    if not isinstance(text, str):
        raise ValueError(f"{task.name}: its reset returned {text!r}, and this policy reads text")
    content = prompt[-1]["content"]
    added = [{"type": "text", "text": text}] if isinstance(content, list) else text
    return [*prompt[:-1], {**prompt[-1], "content": content + added}]


def _suffix_ids(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> Callable[[list[Message]], list[int]]:
    """Return TRL's function for the tokens between two turns, which is a method of its trainer."""
    kwargs = dict(options)
    template = kwargs.pop("chat_template", None)
    trainer: Any = SimpleNamespace(
        processing_class=tokenizer,
        _tokenizer=tokenizer,
        _is_vlm=False,
        chat_template=template,
        chat_template_kwargs=kwargs,
    )
    return lambda messages: GRPOTrainer._get_tool_suffix_ids(trainer, messages)


def _scores(
    task: Task,
    rows: Sequence[Mapping[str, Any]],
    conversations: list[list[Message]],
    episodes: Sequence[Episode],
    instances: Sequence[Any],
    loop: asyncio.AbstractEventLoop,
) -> list[float | None]:
    """Return the weighted sum of all rewards of each episode, None where none applies."""

    def settled(value: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(value, loop).result() if inspect.iscoroutine(value) else value

    columns: dict[str, Any] = {key: [row[key] for row in rows] for key in rows[0] if key != "prompt"}
    columns |= {"trainer_state": TrainerState(), "log_extra": _ignore, "log_metric": _ignore}
    columns["tool_mask"] = [one.mask for one in episodes]
    if task.interaction.environments:
        columns["environments"] = list(instances)
    completions, ids = [one.messages for one in episodes], [one.ids for one in episodes]
    given: list[tuple[str, float, Sequence[Any]]] = []
    for name, (reward, weight) in task.rewards.items():
        values = settled(reward(prompts=conversations, completions=completions, completion_ids=ids, **columns))
        if len(values) != len(rows):
            raise ValueError(f"{task.name}: reward {name} returned {len(values)} values for {len(rows)} episodes")
        given.append((name, weight, values))
    for name in task.interaction.rewards():
        given.append((name, 1.0, [settled(one.get_reward()) for one in instances]))
    sums: list[float | None] = [None] * len(rows)
    for name, weight, values in given:
        for place, value in enumerate(values):
            if value is None or math.isnan(value):
                continue
            if math.isinf(value):
                raise ValueError(f"{task.name}: the reward {name} gave {value}; rewards must be finite")
            sums[place] = (sums[place] or 0.0) + weight * float(value)
    return sums


def _ignore(*values: Any, **others: Any) -> None:
    """Take what rewards log in training."""


def side_by_side(policies: Mapping[str, Sequence[Played]]) -> dict[str, Any]:
    """Return one problem with the first episode of each policy on it, to be read side by side.

    It is the first problem on which these episodes differ in success, else in reward; else the first of all. ``turns``
    holds [speaker, text] of each message, with calls as Python would write them.
    """

    def differing(key: str) -> list[int]:
        firsts = zip(*([getattr(problem, key)[0] for problem in played] for played in policies.values()), strict=True)
        return [number for number, values in enumerate(firsts) if len(set(values)) > 1]

    number = next(iter([*differing("right"), *differing("rewards"), 0]))
    problems = {label: played[number] for label, played in policies.items()}
    return {
        "problem": str(number),
        "episodes": {
            label: {
                "reward": problem.rewards[0],
                "cut": problem.cut[0],
                "turns": [_line(message) for message in (*problem.prompt, *problem.episodes[0])],
            }
            for label, problem in problems.items()
        },
    }


def _line(message: Message) -> tuple[str, str]:
    content = message.get("content") or ""
    parts = [content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)]
    parts += [described(call) for call in message.get("tool_calls") or ()]
    speaker = message["role"] if message["role"] != "tool" else f"tool {message.get('name')}"
    return speaker, "\n".join(part for part in parts if part.strip())
