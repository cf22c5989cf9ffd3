"""Play episodes: the policy calls tools, reads what they return, and goes on, turn by turn.

``Player.play`` takes turns as TRL 1.16 does (``GRPOTrainer._tool_call_loop``): with the same messages, tokens, masks
and log-probabilities. It differs from TRL in this:

* No episode waits for another: the next turn joins those that the engine is computing. The answers of an in-process
  engine's step come in order of place before its next step, so that the last bits do not depend on tools' time.
* A turn has the seed of its place and number, and asks for no more tokens than its episode has left.
* A tool has a limit of time and of tokens, and whatever it returns becomes text. If it fails, the policy reads why.
* Tools run one after another in the main thread, where they may use signals. Async tools run on while the engine
  computes. Their episodes stand aside until they are a quarter of all that go on, and are waited for together. Were
  each waited for alone, 64 episodes of 6 turns would wait about 280 times; so it is 25 to 30 times, for 6 to 9 % more
  decode steps (simulated, of lengths of three kinds).
"""

import asyncio
import concurrent.futures
import inspect
import time
import warnings
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema
from trl import GRPOTrainer
from trl.chat_template_utils import parse_response

from qerl_recipes.rollout.calls import Message, as_text, named, read_any_text
from qerl_recipes.rollout.interface import RolloutEngine, Taken, TakesTurns, Turn
from qerl_recipes.tasks.environments import COLUMN
from qerl_recipes.tasks.interface import Environment, Tool
from qerl_recipes.tasks.time_limit import ToolTimeout, time_limit, wait_for

GRACE = 5.0  # seconds that an async tool has to end after its time is up
ASIDE = 4  # one of so many episodes stands aside for its async tools until they are waited for
HOLDS_UP = (
    ". Calls that hang wait one after another, those of an async tool together; set max_tool_seconds to no more than a "
    "call may need"
)


@dataclass
class Episode:
    """Hold one episode: its prompt, the tools that it may call by name, and what has followed so far.

    ``ids``, ``logprobs`` and ``mask`` cover all tokens after ``prompt``; the mask is 1 where the policy sampled the
    token, and 0 where a tool or the chat template wrote it. ``messages`` are the same as messages. ``turns`` holds the
    number of sampled tokens of each turn.

    ``is_cut`` says that the tokens ran out while a call was open.
    """

    prompt: list[int]
    tools: Mapping[str, Tool]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    calls: int = 0
    failures: int = 0
    is_cut: bool = False

    def goes_on(self) -> bool:
        """Return True if the last turn calls tools and they may be called."""
        return not self.is_cut and bool(self.messages[-1].get("tool_calls"))

    def take(self, ids: Sequence[int], logprobs: Sequence[float | None], message: Message) -> None:
        self.append(ids, logprobs, is_sampled=True)
        self.turns.append(len(ids))
        self.messages.append(message)

    def append(self, ids: Sequence[int], logprobs: Sequence[float | None], is_sampled: bool) -> None:
        self.ids, self.logprobs = [*self.ids, *ids], [*self.logprobs, *logprobs]
        self.mask += [int(is_sampled)] * len(ids)


class Answer(NamedTuple):
    """Hold a tool's message as rewards see it, a list as it was returned, and its ``text`` for the policy."""

    message: Message
    text: str


class Calls(NamedTuple):
    """Hold what the calls of an episode's last turn have given: answers, and by name the async tools that run on."""

    episode: Episode
    answers: list[Answer]
    running: list[tuple[str, "concurrent.futures.Future[Any]"]]


def for_trl(episodes: Sequence[Episode]) -> tuple[Any, ...]:
    """Return what ``GRPOTrainer._tool_call_loop`` returns: masks, messages, ids, log-probabilities, counts, images."""
    columns = zip(*((one.mask, one.messages, one.ids, one.logprobs) for one in episodes), strict=True)
    counts = sum(one.calls for one in episodes), sum(one.failures for one in episodes)
    return *map(list, columns), *counts, [[] for _ in episodes]


def check_turns(engine: RolloutEngine, rows: Any) -> None:
    """Raise ValueError where completions cannot have several turns; ``rows`` is the training set, or None."""
    if not isinstance(engine, TakesTurns):
        raise ValueError(
            f"tools and environments need several turns, and the rollout engine {type(engine).__name__} takes one "
            "(rollout.interface.TakesTurns); use rollout_engine: vllm, or a rollout_func"
        )
    if rows is not None and isinstance(next(iter(rows)).get("prompt"), str):
        raise ValueError(
            "tools and environments need prompts that are lists of messages, and these are texts; write each as "
            '[{"role": "user", "content": TEXT}]'
        )


def begun(row: Mapping[str, Any], environment: Environment | None, *, is_one_of_several: bool) -> list[Message]:
    """Reset a row's ``environment``; return its prompt with the text that it adds, as TRL does, or raise ValueError."""
    prompt: list[Message] = list(row["prompt"])
    if environment is None:
        return prompt
    text = environment.reset(**{key: value for key, value in row.items() if key != COLUMN or not is_one_of_several})
    if text is None:
        return prompt
    if not isinstance(text, str):
        name = type(environment).__qualname__
        raise ValueError(f"environment {name}: its reset returned {text!r}, and this policy reads text")
    content = prompt[-1]["content"]
    added = [{"type": "text", "text": text}] if isinstance(content, list) else text
    return [*prompt[:-1], {**prompt[-1], "content": content + added}]


def between_turns(answers: list[Message], tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> list[int]:
    """Return the tokens that the chat template, with its ``options``, puts around ``answers`` between two turns."""
    # TRL has this as a method of its trainer, which reads nothing but these values of it
    kwargs = {name: value for name, value in options.items() if name != "chat_template"}
    of_ends = SimpleNamespace(eos_token_id=tokenizer.eos_token_id)  # asked for each token, and slow to look up
    values: Any = SimpleNamespace(processing_class=tokenizer, _tokenizer=of_ends, _is_vlm=False)
    values.chat_template, values.chat_template_kwargs = options.get("chat_template"), kwargs
    return GRPOTrainer._get_tool_suffix_ids(values, answers)  # type: ignore[no-any-return]


@dataclass
class Player:
    """Play the episodes of one run.

    ``options`` are those with which prompts are rendered (``tasks.environments.rendering``). ``most_tokens`` limits all
    tokens of an episode after its prompt, ``most_turns`` the turns after the first, ``tool_tokens`` and
    ``tool_seconds`` each call of a tool. ``loop`` runs async tools in another thread.
    """

    engine: TakesTurns
    tokenizer: PreTrainedTokenizerBase
    options: Mapping[str, Any]
    most_tokens: int | None
    most_turns: int
    tool_tokens: int | None = None
    tool_seconds: float | None = None
    loop: asyncio.AbstractEventLoop | None = None
    _told: set[str] = field(default_factory=set, init=False)
    _schemas: dict[Tool, Any] = field(default_factory=dict, init=False)
    _characters: int = field(init=False)
    _seconds: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._characters = max(map(len, self.tokenizer.get_vocab()))  # of a token, at most
        read_any_text(self.tokenizer)

    def play(self, episodes: Sequence[Episode], num_generations: int = 1, profiler: Any = None) -> float:
        """Play ``episodes``, of none or one turn each, to their ends; return the seconds that tools took."""
        self._seconds, computed, called = 0.0, 0, dict[int, Calls]()

        def go_on(ended: Sequence[Taken]) -> list[Turn]:
            nonlocal computed
            computed -= len(ended)
            for turn, (ids, logprobs) in ended:
                tools = [self._schema(tool) for tool in episodes[turn.place].tools.values()]
                message = parse_response(self.tokenizer, ids, prefix=turn.tokens, tools=tools)
                episodes[turn.place].take(ids, logprobs, message)
            return following(turn.place for turn, _ in ended)

        def following(places: Iterable[int]) -> list[Turn]:
            """Return the next turns of the episodes at ``places``, and of those that stood aside for long enough."""
            nonlocal computed
            for place in places:
                if episodes[place].goes_on() and len(episodes[place].turns) <= self.most_turns:
                    called[place] = self._call(episodes[place])
            turns: list[Turn] = []
            while called:
                aside = [one for one in called.values() if one.running]
                if len(aside) * ASIDE >= len(called) + computed:
                    self._wait(aside)
                for place in sorted(place for place, one in called.items() if not one.running):
                    episode, answers, _ = called.pop(place)
                    if room := self._continue(episode, answers):
                        turns.append(Turn(episode.prompt + episode.ids, place, len(episode.turns), room))
                if turns or computed:
                    break
            computed += len(turns)
            return turns

        if any(episode.turns for episode in episodes):
            first = following(range(len(episodes)))
        else:
            rooms = [self.engine.longest - len(episode.prompt) for episode in episodes]
            most = [room if self.most_tokens is None else min(self.most_tokens, room) for room in rooms]
            first = [Turn(one.prompt, place, 0, most[place]) for place, one in enumerate(episodes)]
            computed = len(first)
        self.engine.play(first, go_on, num_generations, profiler)
        return self._seconds

    def _schema(self, tool: Tool) -> Any:
        """Return what a call's arguments are cast by; instances of an environment share their methods'."""
        function = getattr(tool, "__func__", tool)
        if function not in self._schemas:
            self._schemas[function] = get_json_schema(tool) if inspect.isroutine(tool) else tool
        return self._schemas[function]

    def _continue(self, episode: Episode, answers: list[Answer]) -> int:
        """Add the tools' ``answers`` to an episode, if they fit; return how many tokens its next turn may have."""
        read = [{**answer.message, "content": answer.text} for answer in answers]
        ids = between_turns(read, self.tokenizer, self.options)
        used = len(episode.ids) + len(ids)
        room = self.engine.longest - len(episode.prompt) - used
        left = room if self.most_tokens is None else self.most_tokens - used
        if min(left, room) + len(episode.ids) < 0:  # no episode of this prompt can read as much
            longest = max(answers, key=lambda answer: len(answer.text)).message["name"]
            self._tell(
                f"tool {longest} answered with more tokens than an episode has;",
                "the episode ends at that call, and episodes_cut counts all that do. With max_tool_tokens the policy "
                "reads the beginning of an answer",
            )
        episode.is_cut = left < 1 or room < 1
        if left >= 0 and room >= 1:
            episode.messages += [answer.message for answer in answers]
            episode.append(ids, [0.0] * len(ids), is_sampled=False)
        return max(0, min(left, room))

    def _call(self, episode: Episode) -> Calls:
        """Call the tools that the last turn of an episode asks for; async ones begin when the others have ended."""
        began, called, coroutines = time.perf_counter(), Calls(episode, [], []), []
        for call in episode.messages[-1]["tool_calls"]:
            episode.calls += 1
            name, result = self._result(call, episode.tools)
            if inspect.iscoroutine(result) and self.loop is not None:
                coroutines.append((name, _outcome(result, self.tool_seconds)))
            else:
                called.answers.append(self._answer(name, result, episode))
        for name, coroutine in coroutines:
            assert self.loop is not None
            called.running.append((name, asyncio.run_coroutine_threadsafe(coroutine, self.loop)))
        self._seconds += time.perf_counter() - began
        return called

    def _wait(self, several: Sequence[Calls]) -> None:
        """Wait for the async tools that run, and add their answers."""
        began, limit = time.perf_counter(), self.tool_seconds
        futures = [future for called in several for _, future in called.running]
        done, _ = concurrent.futures.wait(futures, None if limit is None else limit + GRACE)
        for called in several:
            for name, future in called.running:
                is_stuck = future not in done  # one of them blocks the loop, where none can be stopped
                result = ToolTimeout(limit) if is_stuck and future.cancel() else future.result()
                called.answers.append(self._answer(name, result, called.episode))
            called.running.clear()
        self._seconds += time.perf_counter() - began

    def _result(self, call: Mapping[str, Any], tools: Mapping[str, Tool]) -> tuple[str, Any]:
        """Return a tool's name and what it returns; that is the error if it has failed."""
        name, arguments = named(call)
        try:
            if call.get("type") != "function":
                raise ValueError(f"Unsupported tool call type: {call.get('type')}")
            if name not in tools:
                raise ValueError(f"Tool {name} not found.")
            with time_limit(self.tool_seconds):
                return name, tools[name](**arguments)
        except (Exception, SystemExit, ToolTimeout) as error:
            return name, error

    def _answer(self, name: str, result: Any, episode: Episode) -> Answer:
        """Return what a tool answers; an error is counted, and a tool's first one is told."""
        if not isinstance(result, BaseException):
            try:
                text = self._fitted(as_text(result))
                content = result if isinstance(result, list) else text
                return Answer({"role": "tool", "name": name, "content": content}, text)
            except Exception as error:  # those of its __str__ too
                result = error
        episode.failures += 1
        if name in episode.tools:
            advice = HOLDS_UP if isinstance(result, ToolTimeout) else ""
            self._tell(
                f"tool {name} failed",
                f"({type(result).__name__}: {str(result)[:200]}); the policy reads that, and the run goes on. "
                f"tool_failures counts all failures{advice}",
            )
        text = self._fitted(str({"error": str(result)}))
        return Answer({"role": "tool", "name": name, "content": text}, text)

    def _tell(self, what: str, more: str) -> None:
        """Warn of ``what``, which names a tool, for the first time that it happens; say ``more`` of this time."""
        if what not in self._told:
            self._told.add(what)
            warnings.warn(f"{what} {more}", stacklevel=2)

    def _fitted(self, text: str) -> str:
        """Return the beginning of a tool's text that it may have; no tokenizer sees what cannot fit anyway."""
        limit = self.engine.longest if self.tool_tokens is None else self.tool_tokens
        text = text[: (limit + 1) * self._characters].encode(errors="replace").decode()  # no half of a surrogate pair
        if self.tool_tokens is None:
            return text
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return (
            text if len(ids) <= limit else str(self.tokenizer.decode(ids[:limit])).rstrip("\N{REPLACEMENT CHARACTER}")
        )


async def _outcome(coroutine: Coroutine[Any, Any, Any], seconds: float | None) -> Any:
    """Return what an async tool returns, or its error."""

    async def caught() -> Any:
        try:
            return await coroutine
        except (Exception, SystemExit) as error:  # the latter would end the loop
            return error

    try:
        return await wait_for(caught(), seconds)
    except (ToolTimeout, asyncio.CancelledError) as error:
        return error
