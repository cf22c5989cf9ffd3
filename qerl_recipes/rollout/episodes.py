"""Play episodes: the policy calls tools, reads what they return, and goes on, turn by turn.

TRL asks for the first turn of every completion with ``generate``. ``Player.play`` takes the turns after it, as TRL
1.16 does (``GRPOTrainer._tool_call_loop``): with the same messages, tokens, masks and log-probabilities. It adds:

* A turn has the seed of its place and number, and asks for no more tokens than its episode has left.
* A tool has a limit of time and of tokens, and whatever it returns becomes text. If it fails, the policy reads why.
* The async tools of all episodes run at the same time. Other tools run one after another in the main thread, where
  they may use signals.

All episodes take a turn together. What the engine computes at once, and with it the last bits, does not depend on how
long tools take.
"""

import asyncio
import concurrent.futures
import inspect
import json
import time
import warnings
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from trl import GRPOTrainer
from trl.chat_template_utils import parse_response

from qerl_recipes.rollout.interface import RolloutEngine, TakesTurns, Turn
from qerl_recipes.tasks.environments import COLUMN
from qerl_recipes.tasks.interface import Environment, Tool
from qerl_recipes.tasks.time_limit import ToolTimeout, time_limit, wait_for

Message = dict[str, Any]
GRACE = 5.0  # seconds that an async tool has to end after its time is up
SHOWN = 80  # characters of a tool's answer in the log of completions


@dataclass
class Episode:
    """Hold one episode: its prompt, and what has followed so far.

    ``ids``, ``logprobs`` and ``mask`` cover all tokens after ``prompt``; the mask is 1 where the policy sampled the
    token, and 0 where a tool or the chat template wrote it. ``messages`` are the same as messages. ``turns`` holds the
    number of sampled tokens of each turn. ``tools`` are those that this episode may call, by name.

    ``is_cut`` says that the tokens ran out while a call was open.
    """

    prompt: list[int]
    ids: list[int]
    logprobs: list[float | None]
    messages: list[Message]
    tools: Mapping[str, Tool]
    mask: list[int] = field(init=False)
    turns: list[int] = field(init=False)
    calls: int = 0
    failures: int = 0
    is_cut: bool = False

    def __post_init__(self) -> None:
        self.mask, self.turns = [1] * len(self.ids), [len(self.ids)]

    def goes_on(self) -> bool:
        """Return True if the last turn calls tools and they may be called."""
        return not self.is_cut and bool(self.messages[-1].get("tool_calls"))

    def append(self, ids: Sequence[int], logprobs: Sequence[float | None], is_sampled: bool) -> None:
        """Add tokens that the policy has sampled, or that it only reads."""
        self.ids, self.logprobs = [*self.ids, *ids], [*self.logprobs, *logprobs]
        self.mask += [int(is_sampled)] * len(ids)

    def table(self) -> str:
        """Describe each turn in a line: its number, its tokens, and what it called with which answer."""
        answers = [message for message in self.messages if message["role"] == "tool"]
        turns = (message for message in self.messages if message["role"] == "assistant")
        lines = []
        for number, (tokens, turn) in enumerate(zip(self.turns, turns, strict=False), start=1):
            parts = [f"{number}: {tokens} tokens"]
            for call in turn.get("tool_calls") or ():
                shown, name = described(call), _named(call)[0]
                answer = next((message for message in answers if message["name"] == name), None)
                if answer is None:
                    parts.append(f"{shown}: {'no tokens left' if self.is_cut else 'not called'}")
                else:
                    answers.remove(answer)
                    text = str(answer["content"])
                    parts.append(f"{shown} -> {text if len(text) <= SHOWN else f'{text[:SHOWN]}...'}")
            lines.append("; ".join(parts))
        return "\n".join(lines)


class Answer(NamedTuple):
    """Hold a tool's message, and its ``text`` that the policy reads.

    Rewards see a list as it was returned, as in TRL. The policy reads it as text, which most chat templates leave out.
    """

    message: Message
    text: str


def for_trl(episodes: Sequence[Episode]) -> tuple[Any, ...]:
    """Return what ``GRPOTrainer._tool_call_loop`` returns: masks, messages, ids, log-probabilities, counts, images."""
    columns = zip(*((one.mask, one.messages, one.ids, one.logprobs) for one in episodes), strict=True)
    counts = sum(one.calls for one in episodes), sum(one.failures for one in episodes)
    return *map(list, columns), *counts, [[] for _ in episodes]


def in_one_type(completion: Sequence[Message]) -> list[Message]:
    """Return a completion with text for all that is none: a column of a table has values of one type."""
    written = [{**message, "content": str(message["content"])} for message in completion]
    for message in written:
        if message.get("tool_calls"):
            message["tool_calls"] = list(map(_in_one_type, message["tool_calls"]))
    return written


def _in_one_type(call: Mapping[str, Any]) -> dict[str, Any]:
    name, arguments = _named(call)
    shown = arguments if isinstance(arguments, dict) else {"": arguments}
    return {"type": "function", "function": {"name": name, "arguments": json.dumps(shown, default=str)}}


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
    """Reset a row's ``environment``, and return the row's prompt with the text that it adds, as TRL does.

    Where a run has several environments, the row's column ``environment`` is not for them. Raises ValueError for a
    reset that fails, and for one that returns anything but a text or None.
    """
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
    """Return the tokens that the chat template puts between two turns: ``answers`` of tools, and what opens the next.

    ``options`` are those with which prompts are rendered (``tasks.environments.rendering``).
    """
    # TRL has this as a method of its trainer, which reads nothing but these values of it
    kwargs = {name: value for name, value in options.items() if name != "chat_template"}
    values: Any = SimpleNamespace(processing_class=tokenizer, _tokenizer=tokenizer, _is_vlm=False)
    values.chat_template, values.chat_template_kwargs = options.get("chat_template"), kwargs
    return GRPOTrainer._get_tool_suffix_ids(values, answers)  # type: ignore[no-any-return]


@dataclass
class Player:
    """Play the episodes of one run.

    ``options`` are those with which prompts are rendered (``tasks.environments.rendering``). ``most_tokens`` limits all
    tokens of an episode after its prompt, and ``most_turns`` the turns after the first. A tool's text has at most
    ``tool_tokens``, and the tool takes at most ``tool_seconds``; None is no limit. ``loop`` runs async tools in another
    thread.
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
    _characters: int = field(init=False)

    def __post_init__(self) -> None:
        self._characters = max(map(len, self.tokenizer.get_vocab()))  # of a token, at most
        read_any_text(self.tokenizer)

    def play(self, episodes: Sequence[Episode]) -> float:
        """Play ``episodes``, whose first turn has been taken, to their ends; return the seconds spent in tools."""
        seconds = 0.0
        for number in range(1, self.most_turns + 1):
            calling = [place for place, episode in enumerate(episodes) if episode.goes_on()]
            if not calling:
                break
            began = time.perf_counter()
            answers = self._answers([episodes[place] for place in calling])
            seconds += time.perf_counter() - began
            turns = []
            for place, messages in zip(calling, answers, strict=True):
                if room := self._continue(episodes[place], messages):
                    turns.append(Turn(episodes[place].prompt + episodes[place].ids, place, number, room))
            if not turns:
                break
            for turn, (ids, logprobs) in zip(turns, self.engine.turn(turns), strict=True):
                episode = episodes[turn.place]
                episode.append(ids, logprobs, is_sampled=True)
                episode.turns.append(len(ids))
                tools = list(episode.tools.values())
                episode.messages.append(parse_response(self.tokenizer, ids, prefix=turn.tokens, tools=tools))
        return seconds

    def _continue(self, episode: Episode, answers: list[Answer]) -> int:
        """Add the tools' ``answers`` to an episode, if they fit; return how many tokens its next turn may have."""
        read = [{**answer.message, "content": answer.text} for answer in answers]
        ids = between_turns(read, self.tokenizer, self.options)
        used = len(episode.ids) + len(ids)
        room = self.engine.longest - len(episode.prompt) - used
        left = room if self.most_tokens is None else self.most_tokens - used
        episode.is_cut = left < 1 or room < 1
        if left >= 0 and room >= 1:
            episode.messages += [answer.message for answer in answers]
            episode.append(ids, [0.0] * len(ids), is_sampled=False)
        return max(0, min(left, room))

    def _answers(self, episodes: Sequence[Episode]) -> list[list[Answer]]:
        """Call the tools that the last turn of each episode asks for; return their answers, async ones last."""
        answers: list[list[Answer]] = [[] for _ in episodes]
        awaited: list[tuple[int, str, Coroutine[Any, Any, Any]]] = []
        for i, episode in enumerate(episodes):
            for call in episode.messages[-1]["tool_calls"]:
                episode.calls += 1
                name, result = self._called(call, episode.tools)
                if inspect.iscoroutine(result) and self.loop is not None:
                    awaited.append((i, name, result))
                else:
                    answers[i].append(self._answer(name, result, episode))
        results = self._awaited([coroutine for *_, coroutine in awaited])
        for (i, name, _), result in zip(awaited, results, strict=True):
            answers[i].append(self._answer(name, result, episodes[i]))
        return answers

    def _called(self, call: Mapping[str, Any], tools: Mapping[str, Tool]) -> tuple[str, Any]:
        """Return a tool's name and what it returns; that is the error if it has failed."""
        name, arguments = _named(call)
        try:
            if call.get("type") != "function":
                raise ValueError(f"Unsupported tool call type: {call.get('type')}")
            if name not in tools:
                raise ValueError(f"Tool {name} not found.")
            with time_limit(self.tool_seconds):
                return name, tools[name](**arguments)
        except (Exception, SystemExit, ToolTimeout) as error:
            return name, error

    def _awaited(self, coroutines: list[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Return what async tools return, or their errors."""
        if not coroutines:
            return []
        assert self.loop is not None
        limit = self.tool_seconds

        async def caught(coroutine: Coroutine[Any, Any, Any]) -> Any:
            try:
                return await coroutine
            except (Exception, SystemExit) as error:  # the latter would end the loop
                return error

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(*(wait_for(caught(one), limit) for one in coroutines), return_exceptions=True)

        future = asyncio.run_coroutine_threadsafe(all_of_them(), self.loop)
        try:
            return future.result(None if limit is None else limit + GRACE)
        except concurrent.futures.TimeoutError:  # one of them blocks the loop, where none can be stopped
            future.cancel()
            return [ToolTimeout(limit)] * len(coroutines)

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
        if name in episode.tools and name not in self._told:
            self._told.add(name)
            warnings.warn(
                f"tool {name} failed ({type(result).__name__}: {str(result)[:200]}); the policy reads that, and the "
                "run goes on. tool_failures counts all failures",
                stacklevel=2,
            )
        text = self._fitted(str({"error": str(result)}))
        return Answer({"role": "tool", "name": name, "content": text}, text)

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


def read_any_text(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let ``tokenizer`` raise ValueError for calls that are nested too deeply; TRL then takes them for plain text."""
    if "parse_response" in vars(tokenizer):
        return  # it does so already
    parse = tokenizer.parse_response

    def parsed(*given: Any, **named: Any) -> Any:
        try:
            return parse(*given, **named)
        except RecursionError as error:  # a thousand brackets, as a policy that repeats itself may write
            raise ValueError("nested too deeply") from error

    tokenizer.parse_response = parsed  # type: ignore[method-assign]


def as_text(result: Any) -> str:
    """Return a tool's result as text.

    Bytes are decoded, and the texts of content blocks joined. Raises ValueError for bytes that are no UTF-8, and for
    other blocks, such as images.
    """
    if isinstance(result, bytes):
        return result.decode()
    if not (isinstance(result, list) and result and all(isinstance(part, dict) and "type" in part for part in result)):
        return str(result)
    if others := sorted({str(part["type"]) for part in result} - {"text"}):
        raise ValueError(f"a block of type {others[0]}, and this policy reads text only")
    return "".join(str(part["text"]) for part in result)


def _named(call: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the name and the arguments of a call as the policy wrote it; chat templates differ in where they are."""
    function = call.get("function") or call
    return str(function.get("name") or "unknown"), function.get("arguments")


def described(call: Mapping[str, Any]) -> str:
    """Return a call as it would be written in Python."""
    name, given = _named(call)
    arguments = ", ".join(f"{key}={value!r}" for key, value in given.items()) if isinstance(given, dict) else given
    return f"{name}({arguments})"
