"""Test how episodes are played: on an engine that follows a script, with tools of all kinds."""

import asyncio
import functools
import queue
import threading
import time
import warnings
from types import SimpleNamespace

import calling
import pytest
from waiting import PATIENCE

from qerl_recipes.rollout import calls, episodes
from qerl_recipes.rollout.calls import as_text, in_one_type
from qerl_recipes.rollout.episodes import Episode, Player, begun

TOKENIZER = calling.tokenizer()
MEGABYTES = "7" * 10_000_000


class Scripted:
    """Answer each turn with the next line of a script, as far as the turn's tokens reach.

    ``ends`` holds the places whose turns end at each step; without it all that are open end together.
    """

    def __init__(self, *lines, longest=64, ends=()):
        self.longest, self.lines, self.asked, self.ends = longest, list(lines), [], list(ends)

    def play(self, turns, go_on, num_generations, profiler):
        open_ones = {}
        while turns or open_ones:
            if turns:
                self.asked.append(turns)
            open_ones |= {turn.place: (turn, calling.ids(self.lines.pop(0))[: turn.most]) for turn in turns}
            ended = [open_ones.pop(place) for place in (self.ends.pop(0) if self.ends else sorted(open_ones))]
            turns = go_on([(turn, (ids, [-1.5] * len(ids))) for turn, ids in ended])


def episode(said, **tools):
    """Return an episode whose first turn is ``said``; without it, that is still to come."""
    ids, prompt = calling.ids(said or ""), calling.ids("<user>1+2=<assistant>")
    documented = {name: functools.wraps(calling.double)(functools.partial(tool)) for name, tool in tools.items()}
    made = Episode(prompt, documented)
    if said is not None:
        message = episodes.parse_response(TOKENIZER, ids, prefix=prompt, tools=[calling.double])
        made.take(ids, [-1.0] * len(ids), message)
    return made


def play(engine, *begun, tokens=48, turns=9, **limits):
    player = Player(engine, TOKENIZER, {}, tokens, turns, **limits)
    player.play(begun)
    return player


def written(one):
    """Return the tokens of an episode, with those that it has only read in brackets."""
    text, was_read = "", False
    for token, is_sampled in zip(one.ids, one.mask, strict=True):
        text += "[" if was_read == is_sampled == 0 else "]" if was_read and is_sampled else ""
        was_read = not is_sampled
        text += calling.VOCABULARY[token].replace("<assistant>", ">")
    return text


@pytest.fixture
def loop():
    """Run an event loop in a thread, as TRL does."""
    made = asyncio.new_event_loop()
    threading.Thread(target=made.run_forever, daemon=True).start()
    yield made
    made.call_soon_threadsafe(made.stop)


def test_turns_go_on_until_nobody_calls():
    engine = Scripted("8<eos>", "{double 3}<eos>", "9<eos>")
    silent, once, twice = (episode(said, double=calling.double) for said in ("5", "{double 4}<eos>", "{double 2}<eos>"))
    play(engine, silent, once, twice)
    assert [[(turn.place, turn.number) for turn in turns] for turns in engine.asked] == [[(1, 1), (2, 1)], [(2, 2)]]
    assert [len(one.turns) for one in (silent, once, twice)] == [1, 2, 3]
    assert once.ids == calling.ids("{double 4}<eos><tool>8<assistant>8<eos>")
    assert once.mask == [1, 1, 0, 0, 0, 1, 1] and once.logprobs == [-1.0, -1.0, 0.0, 0.0, 0.0, -1.5, -1.5]
    assert [one["role"] for one in once.messages] == ["assistant", "tool", "assistant"]
    assert once.messages[1] == {"role": "tool", "name": "double", "content": "8"}
    assert twice.ids == calling.ids("{double 2}<eos><tool>4<assistant>{double 3}<eos><tool>6<assistant>9<eos>")
    last = engine.asked[1][0]
    assert last.tokens == twice.prompt + twice.ids[:-2] and last.most == 48 - (len(twice.ids) - 2)
    assert twice.turns == [2, 2, 2]


def test_what_a_turn_reads_of_tools_and_template_is_read_once(monkeypatch):
    read = []

    def noting(name, make):
        return lambda given: read.append(name) or make(given)

    for module, name in ((episodes, "get_json_schema"), (calls, "load_response_template")):
        monkeypatch.setattr(module, name, noting(name, getattr(module, name)))
    begun = [Episode(calling.ids("<user>1<assistant>"), {"double": calling.double}) for _ in range(2)]
    said = [turn for turn in ("{double 4}<eos>", "{double 3}<eos>", "8<eos>") for _ in begun]
    Player(Scripted(*said), calling.tokenizer(), {}, 48, 9).play(begun)
    expected = "{double 4}<eos><tool>8<assistant>{double 3}<eos><tool>6<assistant>8<eos>"
    assert [one.ids for one in begun] == [calling.ids(expected)] * 2
    assert read == ["get_json_schema", "load_response_template"]


@pytest.mark.parametrize(
    ("limits", "added", "is_cut"),
    [
        ({"tokens": 5}, "[<tool>8>", True),  # exactly full: the answer stays, as in TRL, and nothing follows it
        ({"tokens": 4}, "", True),  # the answer does not fit
        ({"tokens": 6}, "[<tool>8>]7", False),  # one more token
        ({"longest": 12}, "[<tool>8>]7", False),  # the prompt has 6
        ({"longest": 11}, "", True),
        ({"turns": 0}, "", False),  # the call is open, but not for want of tokens
    ],
)
def test_an_episode_keeps_to_its_tokens(limits, added, is_cut):
    engine = Scripted("77777", longest=limits.pop("longest", 64))
    one = episode("{double 4}<eos>", double=calling.double)
    play(engine, one, **limits)
    assert written(one).partition("<eos>")[2] == added and one.is_cut == is_cut
    roles = ["tool"] * bool(added) + ["assistant"] * added.endswith("7")
    assert [message["role"] for message in one.messages] == ["assistant", *roles]
    assert all(turn.most >= 1 for turns in engine.asked for turn in turns)


@pytest.mark.parametrize(
    ("tool", "limits", "is_told"),
    [
        pytest.param(lambda number: MEGABYTES, {}, True, id="of 10 MB"),
        pytest.param(lambda number: "7" * 47, {}, True, id="of an episode and a token"),  # the template adds two
        pytest.param(lambda number: "7" * 46, {}, False, id="of an episode"),
        pytest.param(lambda number: "7" * 57, {"tokens": None}, True, id="of a sequence and a token"),
        pytest.param(lambda number: "7" * 56, {"tokens": None}, False, id="of a sequence"),
        pytest.param(lambda number: MEGABYTES, {"tool_tokens": 5}, False, id="cut"),
    ],
)
def test_a_tool_whose_answer_fits_no_episode_is_named_once(tool, limits, is_told):
    engine = Scripted(*["8<eos>"] * 3)
    *others, last = (episode("{double 4}<eos>", double=tool, brief=lambda: "") for _ in range(3))
    if is_told:
        last.messages[0]["tool_calls"] += [{"type": "function", "function": {"name": "brief", "arguments": {}}}]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        player = play(engine, last, **limits)
        player.play(others)
    assert last.is_cut == (limits != {"tool_tokens": 5})
    assert [str(one.message).partition(";")[0] for one in said] == is_told * [
        "tool double answered with more tokens than an episode has"
    ]


class Silent:
    def __str__(self):
        raise RuntimeError("no words")


def raises(number):
    raise KeyError("lost")


def leaves(number):
    raise SystemExit(3)


def sleeps(number):
    time.sleep(30)


def never_gives_up(number):
    while True:
        try:
            time.sleep(30)
        except Exception:
            continue


async def sleeps_in_the_loop(number):
    await asyncio.sleep(30)


async def blocks_the_loop(number):
    time.sleep(1)


async def raises_in_the_loop(number):
    raise KeyError("lost")


async def leaves_the_loop(number):
    raise SystemExit(3)


STOPPED = "{'error': 'took longer than 0.1 s (max_tool_seconds) and was stopped'}"
HOSTILE = {
    "raises": (raises, """{'error': "'lost'"}""", True),
    "exits": (leaves, "{'error': '3'}", True),
    "hangs": (sleeps, STOPPED, True),
    "hangs and catches all": (never_gives_up, STOPPED, True),
    "async raises": (raises_in_the_loop, """{'error': "'lost'"}""", True),
    "async exits": (leaves_the_loop, "{'error': '3'}", True),
    "async hangs": (sleeps_in_the_loop, STOPPED, True),
    "async blocks": (blocks_the_loop, STOPPED, True),
    "10 MB": (lambda number: MEGABYTES, "7" * 5, False),
    "10 MB of error": (lambda number: Silent.__str__(1) if number < 0 else int(MEGABYTES[:5000] + "x"), None, True),
    "bytes": (lambda number: b"77", "77", False),
    "other bytes": (lambda number: b"\xff", None, True),
    "half a pair": (lambda number: "7\ud800", "7?", False),
    "nothing": (lambda number: None, "None", False),
    "list": (lambda number: [7], "[7]", False),
    "blocks": (lambda number: [{"type": "text", "text": "7"}] * 2, "77", False),
    "picture": (lambda number: [{"type": "image", "image": 1}], None, True),
    "no text": (lambda number: Silent(), None, True),
    "other parameters": (lambda: 7, None, True),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_whatever_a_tool_does_the_episode_goes_on(case, loop, monkeypatch):
    tool, content, has_failed = HOSTILE[case]
    monkeypatch.setattr(episodes, "GRACE", 0.1)
    engine, one = Scripted("8<eos>", "8<eos>"), episode("{double 4}<eos>", double=tool)
    began = time.monotonic()
    limits = {"tool_tokens": 5 if content and not has_failed else None, "tool_seconds": 0.1, "loop": loop}
    read = []
    between = lambda messages, *_: read.extend(messages) or calling.ids("<tool>7<assistant>")  # noqa: E731
    monkeypatch.setattr(episodes, "between_turns", between)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        player = play(engine, one, **limits)
        again = episode("{double 4}<eos>", double=tool)
        player.play([again])
    assert time.monotonic() - began < 30 and (one.calls, one.failures, len(one.turns)) == (1, has_failed, 2)
    answer = read[0]["content"]
    returned = tool(4) if case in ("list", "blocks") else answer
    assert one.messages[1] == {"role": "tool", "name": "double", "content": returned}
    assert in_one_type(one.messages)[1]["content"] == str(returned)
    assert answer == content or (content is None and answer.startswith("{'error': "))
    assert sum("tool double failed" in str(each.message) for each in said) == has_failed, "it is told once"
    assert any("set max_tool_seconds to no more" in str(each.message) for each in said) == (content == STOPPED)


def test_a_tools_timer_is_its_own(monkeypatch):
    """Check that a tool may use the alarm that limits it, and that a test's own alarm is put back."""
    import signal

    def rings(number):
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        time.sleep(0.1)
        return 7

    before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0
    one = episode("{double 4}<eos>", double=rings)
    play(Scripted("8<eos>"), one, tool_seconds=5.0)
    assert one.failures == 0 and one.messages[1]["content"] == "7"
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0) == before


def places_of(engine):
    return [[(turn.place, turn.number) for turn in turns] for turns in engine.asked]


def test_no_episode_waits_for_another():
    """Check that what ends together is answered by place, and goes on at once beside the others."""
    called = []

    def double(number):
        called.append(number)
        return 2 * number

    lines = ["{double 3}", "{double 1}", "{double 2}", "{double 0}", "7<eos>", "9<eos>", "8<eos>"]
    engine = Scripted(*lines, ends=[[0, 2], [0], [1], [0, 1, 2]])
    short, *_ = begun = [episode(None, double=double) for _ in range(3)]
    play(engine, *begun, tokens=20)
    assert places_of(engine) == [[(0, 0), (1, 0), (2, 0)], [(0, 1), (2, 1)], [(0, 2)], [(1, 1)]]
    assert called == [3, 2, 0, 1] and [len(one.turns) for one in begun] == [3, 2, 2]
    assert [turn.most for turn in engine.asked[0]] == [20] * 3
    assert short.ids == calling.ids("{double 3}<tool>6<assistant>{double 0}<tool>0<assistant>9<eos>")


@pytest.mark.parametrize("answers", ["at once", "when it is waited for"])
def test_async_tools_are_waited_for_by_count_and_not_by_time(answers, loop, monkeypatch):
    """Check that episodes stand aside until they are a quarter of those that go on, however long a tool takes."""
    waits, running, waited = threading.Event(), queue.SimpleQueue(), []

    async def tool(number):
        if answers != "at once":
            await asyncio.to_thread(waits.wait, PATIENCE)
        running.put(number)
        return number

    class Watched(Player):
        def _call(self, episode):
            called = super()._call(episode)
            if answers == "at once":
                running.get(timeout=PATIENCE)
            return called

        def _wait(self, several):
            waited.append(len(several))
            waits.set()
            super()._wait(several)

    ends = [[5], [0], [6], [1], [2, 3, 4, 7]]
    engine = Scripted(*["{double 1}"] * 8, *["7<eos>"] * 8, ends=ends)
    Watched(engine, TOKENIZER, {}, 20, 9, loop=loop).play([episode(None, double=tool) for _ in range(8)])
    asked = [[place for place, _ in turns] for turns in places_of(engine)]
    assert asked == [list(range(8)), [0, 5], [1, 6], [2, 3, 4, 7]] and waited == [2, 2, 4]


def test_an_episode_that_stood_aside_goes_on_when_the_others_have_ended(loop):
    async def tool(number):
        return number

    lines = ["{double 1}", *["7{double 2}"] * 4, "9"]
    begun = [episode(None, double=tool), *(episode(None, double=calling.double) for _ in range(4))]
    engine = Scripted(*lines, ends=[[0, 1, 2, 3, 4]])
    play(engine, *begun, tokens=5, loop=loop)  # the others have no room for another turn
    assert [len(one.turns) for one in begun] == [2, 1, 1, 1, 1] and begun[0].messages[1]["content"] == "1"


def test_async_tools_of_all_episodes_run_at_once(loop):
    four = asyncio.Barrier(4)

    async def waits(number):
        await four.wait()
        return number

    begun = [episode("{double 1}{double 2}<eos>", double=waits) for _ in range(4)]
    play(Scripted(*["8"] * 4), *begun, loop=loop, tool_seconds=PATIENCE)
    assert [[each["content"] for each in one.messages[1:3]] for one in begun] == [["1", "2"]] * 4


def test_calls_that_nobody_can_answer_are_failures():
    calls = [
        {"type": "function", "function": {"name": "nobody", "arguments": {}}},
        {"type": "custom", "name": "double"},
        {"name": "double", "arguments": {"number": 4}},
        {"type": "function", "function": {"name": "double", "arguments": "4"}},
        {"type": "function", "function": {"name": "double", "arguments": {"number": 4}}},
    ]
    one = episode("5", double=calling.double)
    one.messages[0]["tool_calls"] = calls
    with pytest.warns(UserWarning, match="tool double failed"):
        play(Scripted("8<eos>", longest=999), one, tokens=999)
    assert (one.calls, one.failures) == (5, 4)
    assert [each["content"] for each in one.messages[1:6]][::4] == ["{'error': 'Tool nobody not found.'}", "8"]
    flat = [call["function"]["arguments"] for call in in_one_type(one.messages)[0]["tool_calls"]]
    assert flat == ["{}", '{"": null}', '{"number": 4}', '{"": "4"}', '{"number": 4}']
    assert one.messages[0]["tool_calls"] is calls, "what rewards have seen stays"


def test_a_text_has_at_most_its_tokens():
    player = Player(SimpleNamespace(longest=8), TOKENIZER, {}, 48, 9, tool_tokens=3)
    assert [player._fitted(text) for text in ("123", "1234", "", "12ab34")] == ["123", "123", "", "12<unk>"]
    assert as_text([]) == "[]" and as_text({"type": "text"}) == "{'type': 'text'}"


def test_a_reset_gets_its_row_and_adds_a_text():
    walk, row = calling.Walk(), {"prompt": [{"role": "user", "content": "1+"}], "answer": "3", "environment": "walk"}
    assert begun(row, walk, is_one_of_several=True) == [{"role": "user", "content": "1+7"}]
    assert walk.row == {"prompt": row["prompt"], "answer": "3"}
    assert begun(row, walk, is_one_of_several=False)[0]["content"] == "1+7" and walk.row == row
    blocks = [{"role": "user", "content": [{"type": "text", "text": "1+"}]}]
    (message,) = begun({"prompt": blocks}, walk, is_one_of_several=False)
    assert message["content"] == [*blocks[0]["content"], {"type": "text", "text": "7"}]
    walk.reset = lambda **row: [{"type": "image"}]
    with pytest.raises(ValueError, match=r"environment Walk: its reset returned .*image.*, and this policy reads text"):
        begun(row, walk, is_one_of_several=False)
