"""Test the turns of episodes in one engine: what they compute, in which steps, and on several ranks."""

import random

import pytest
import torch

from qerl_recipes.rollout import sampling
from qerl_recipes.rollout.arms import ENGINE_ON_CPU
from qerl_recipes.rollout.interface import Turn
from qerl_recipes.rollout.sampling import Completion, Request
from qerl_recipes.tasks import running_sum
from qerl_vllm_plugin.compat.scheduler import scheduler_here

TOKENIZER = running_sum.tokenizer()
PROMPTS = [TOKENIZER(p["prompt"])["input_ids"] for p in running_sum.held_out(4) for _ in range(4)]


@pytest.fixture(scope="module")
def counted(start_engine):
    """Return an engine with blocks of 32 tokens, and the list of the steps that it has scheduled."""
    with pytest.MonkeyPatch.context() as patched:
        blocks = {**ENGINE_ON_CPU, "block_size": 32}
        patched.setattr("qerl_recipes.rollout.engine.engine_on_cpu", lambda base: blocks)
        engine = start_engine(16, generation_kwargs={"min_tokens": 8}, vllm_max_model_length=256)
        scheduler, steps = scheduler_here(engine.llm), []
        schedule = scheduler.schedule
        patched.setattr(scheduler, "schedule", lambda *a, **o: steps.append(schedule(*a, **o)) or steps[-1])
        yield engine, steps
        engine.close()


def take(engine, turns):
    """Return what each of ``turns`` brings; nothing follows."""
    found = {}
    engine.play(turns, lambda ended: found.update((turn.place, Completion(*answer)) for turn, answer in ended) or ())
    return [found[turn.place] for turn in turns]


def test_turns_of_one_batch_keep_the_cache_and_their_tokens(counted):
    engine, steps = counted
    engine.begin(0, None)
    prompts = [[5 + row, *range(3, 33)] for row in range(8)]  # 31 tokens
    with engine.episodes():
        drawn = engine.generate(prompts, None, 4)[1]
        before, tokens = len(steps), engine.tokens
        asked = [Turn([*prompts[row], *drawn[row], 9], row, 1, most) for row, most in ((2, 3), (5, 40))]
        first, again = take(engine, asked), take(engine, asked)
    assert len(first[0].ids) == 3 and 8 <= len(first[1].ids) <= 40
    assert first == again, "the seed is of place and number alone"
    assert engine.tokens == tokens + 2 * sum(len(one.ids) for one in first)
    sampled = sum(len(one.ids) - 1 for one in [*first, *again])
    read = sum(step.total_num_scheduled_tokens for step in steps[before:]) - sampled
    assert read == 2 * sum(len(turn.tokens) - 32 for turn in asked), "a whole block comes from the cache"


@pytest.mark.parametrize("is_emptied", [False, True], ids=["kept", "emptied between turns"])
def test_an_episode_of_six_turns_computes_its_tokens_once(is_emptied, counted):
    """Check that a turn computes only what the turn before it has not: all after its last whole block."""
    engine, steps = counted
    engine.begin(1, None)
    steps.clear()
    history, cached, expected = [5, *range(3, 33)], 0, 0
    with engine.episodes():
        for number in range(6):
            if number == 0:
                (drawn,) = engine.generate([history], None, 1)[1]
            else:
                ((drawn, _),) = take(engine, [Turn(history, 0, number, 9)])
            computed = len(history) + len(drawn) - 1  # not the token that was sampled last
            expected += computed - cached
            cached = computed // 32 * 32
            history = [*history, *drawn, *range(3, 33)]  # what a tool answers
            if is_emptied:
                engine.llm.reset_prefix_cache()
    found = sum(step.total_num_scheduled_tokens for step in steps)
    assert (found > 2 * expected) if is_emptied else (found == expected < computed + 5 * 32)


def test_ranks_of_one_engine_have_different_numbers_of_turns(engine, monkeypatch):
    theirs = [Request(PROMPTS[0], seed, 4) for seed in range(3)]
    waiting = [theirs, theirs[:1], []]  # what the other rank asks for: it goes on after this one

    def gather(gathered, own, group):
        gathered[:] = [(waiting.pop(0), False), own]

    engine.begin(0, None)
    with engine.episodes():
        alone = engine.generate(PROMPTS[:1], None, 4)
    monkeypatch.setattr(engine, "_tensor_parallel_group", "of two")
    monkeypatch.setattr(engine, "_tensor_parallel", 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setattr(torch.distributed, "barrier", lambda device_ids: None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 1)
    computed, generate = [], sampling.generate
    monkeypatch.setattr(sampling, "generate", lambda llm, asked, *o: computed.append(asked) or generate(llm, asked, *o))
    engine.begin(0, None)
    with engine.episodes():
        assert engine.generate(PROMPTS[:1], None, 4)[1] == alone[1]
    assert [len(prompts) for prompts in computed] == [4, 1] and not waiting
    waiting.append(theirs)
    with pytest.raises(KeyError), engine.episodes():
        raise KeyError("the rank that fails waits for nobody")


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_one_engine_go_on_together(engine, rank, monkeypatch):
    """Check that both ranks take the turns of both, whoever asks for them, and each gets its own."""
    theirs = [[Request(PROMPTS[1], seed, 4) for seed in range(3)], [Request(PROMPTS[1], 9, 2)]]
    asked, own = [], []

    def gather(gathered, given, group):
        asked.append(given[0])
        others = (theirs.pop(0) if theirs else [], False)
        gathered[:] = [others, given] if rank else [given, others]

    engine.begin(0, None)
    turns = [Turn(PROMPTS[row], row, 0, 3 + row) for row in (0, 1)]

    def go_on(ended):
        own.extend((turn.place, turn.number, len(answer[0])) for turn, answer in ended)
        return [Turn([*turn.tokens, *answer[0]], turn.place, 1, 5) for turn, answer in ended if turn.number == 0]

    monkeypatch.setattr(engine, "_sampling", {**engine._sampling, "ignore_eos": True})
    monkeypatch.setattr(engine, "_tensor_parallel_group", "of two")
    monkeypatch.setattr(engine, "_tensor_parallel", 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setattr(torch.distributed, "barrier", lambda device_ids: None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: rank)
    with engine.episodes():
        engine.play(turns, go_on, 4)
    assert own == [(0, 0, 3), (1, 0, 4), (0, 1, 5), (1, 1, 5)] and not theirs
    assert [len(requests) for requests in asked[:3]] == [2, 1, 1] and asked[-1] == []


def lengths_of(turns, episodes=64):
    """Return unequal lengths of the turns of each episode: most are short, some are of up to 24 tokens."""
    dice = random.Random(0)
    return [[min(24, 2 + int(dice.expovariate(0.2))) for _ in range(turns)] for _ in range(episodes)]


@pytest.fixture(scope="module")
def endless(start_engine):
    """Return an engine whose turns end with their tokens, and what it has scheduled in each step."""
    engine, steps = start_engine(64, generation_kwargs={"ignore_eos": True}, vllm_max_model_length=192), []
    scheduler = scheduler_here(engine.llm)
    with pytest.MonkeyPatch.context() as patched:
        schedule = scheduler.schedule

        def noted(*given, **named):
            scheduled = schedule(*given, **named)
            steps.append(sorted(scheduled.num_scheduled_tokens.values()))
            return scheduled

        patched.setattr(scheduler, "schedule", noted)
        yield engine, steps
        engine.close()


def played(endless, lengths, goes_on=True):
    """Play episodes with turns of these lengths, each followed by two tokens of a tool; return steps and tokens.

    Unless ``goes_on``, all episodes take a turn together.
    """
    engine, steps = endless
    engine.begin(0, None)
    steps.clear()
    histories = [[5 + row % 9, 7, 9] for row in range(len(lengths))]

    def turn(place, number):
        return Turn(histories[place], place, number, lengths[place][number])

    def go_on(ended):
        assert ended == sorted(ended, key=lambda one: one[0].place), "tools are called in order of place"
        for one, (ids, _) in ended:
            assert len(ids) == one.most
            histories[one.place] = [*histories[one.place], *ids, 3, 4]
        following = [(one.place, one.number + 1) for one, _ in ended]
        return [turn(*one) for one in following if one[1] < len(lengths[one[0]])] if goes_on else []

    with engine.episodes():
        turns = [turn(place, 0) for place in range(len(lengths))]
        engine.play(turns, go_on, 4)
        for number in range(1, len(lengths[0])) if not goes_on else ():
            engine.play([turn(place, number) for place in range(len(lengths))], go_on)
    return [step for step in steps if step], histories


def test_64_episodes_of_unequal_turns_take_the_steps_of_one_turn(endless):
    """Check the steps beside those of one turn with as many tokens, and those of episodes that wait for each other."""
    lengths = lengths_of(6)
    whole, _ = played(endless, [[sum(turns)] for turns in lengths])
    steps, histories = played(endless, lengths)
    waiting, same = played(endless, lengths, goes_on=False)
    assert 0 <= len(whole) - max(map(sum, lengths)) <= 1
    assert len(steps) <= 1.15 * len(whole) < 1.5 * len(whole) < len(waiting)
    assert histories == same, "what is sampled depends on place and turn alone"


def test_an_error_between_turns_leaves_nothing_in_the_engine(endless):
    engine, _ = endless
    lengths = lengths_of(2, episodes=4)

    def go_on(ended):
        raise KeyError("a tool")

    with pytest.raises(KeyError, match="a tool"), engine.episodes():
        engine.play([Turn([5, 7, 9], place, 0, most) for place, (most, _) in enumerate(lengths)], go_on, 4)
    assert not engine.llm.llm_engine.has_unfinished_requests()
    played(endless, lengths)


def test_tools_draw_as_if_there_were_no_engine(endless):
    engine, _ = endless
    torch.manual_seed(3)
    alone = torch.rand(6)
    torch.manual_seed(3)
    drawn, turns = [], [Turn([5, 7, 9], place, 0, 2 + place) for place in range(3)]
    with engine.episodes():
        engine.play(turns, lambda ended: drawn.append(torch.rand(2)) or (), 4)
    assert torch.equal(torch.cat(drawn), alone)
