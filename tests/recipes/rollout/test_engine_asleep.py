"""Test what an engine releases between rollouts, and when it takes it again."""

import pytest

from qerl_recipes.rollout.interface import Turn
from qerl_recipes.tasks import running_sum
from qerl_vllm_plugin.worker.kv_cache import KVCacheError

TOKENIZER = running_sum.tokenizer()
PROMPTS = [TOKENIZER(p["prompt"])["input_ids"] for p in running_sum.held_out(4) for _ in range(4)]


@pytest.fixture
def sleepy(engine, kv_events, monkeypatch):
    """Return the engine as if started with sleep mode, and the ordered list of what happens to it."""
    events = kv_events

    def note(owner, name, event):
        original = getattr(owner, name)

        def noted(*args, **options):
            events.append(event)
            return original(*args, **options)

        monkeypatch.setattr(owner, name, noted)

    monkeypatch.setattr(engine._training, "vllm_enable_sleep_mode", True)
    monkeypatch.setattr(engine, "_is_lent", False)
    monkeypatch.setattr(engine, "_is_asleep", False)
    monkeypatch.setattr(engine.llm, "sleep", lambda level: events.append(f"sleep {level}"))
    monkeypatch.setattr(engine.llm, "wake_up", lambda: events.append("wake"))
    note(engine, "_snapshot", "swap")
    note(engine.llm, "enqueue", "generate")
    note(engine.llm, "generate", "score")
    yield engine, events
    engine._wake()


def test_an_engine_that_has_lent_its_weights_gives_its_kv_cache_between_rollouts(sleepy):
    engine, events = sleepy
    engine._training.vllm_enable_sleep_mode = False
    engine.begin(3, 0.01)
    expected = [engine.generate(PROMPTS, None, 4) for _ in range(2)]
    engine._training.vllm_enable_sleep_mode = True
    events.clear()
    lent = engine.frozen_weights()
    assert events == ["release"] and len(lent.linears) == 14
    engine.begin(3, 0.01)
    assert events == ["release", "resume", "zero", "swap"]
    assert engine.generate(PROMPTS, None, 4) == expected[0]
    assert events[4:] == ["generate", "release"]
    assert engine.generate(PROMPTS, None, 4) == expected[1]  # dynamic sampling asks again
    assert events[6:] == ["resume", "zero", "generate", "release"]
    engine.begin_evaluation()
    assert events[10:] == ["resume", "zero", "swap"]


def test_a_trainer_that_writes_into_the_lent_weights_ends_the_run(sleepy):
    engine, events = sleepy
    name, weight = next(iter(engine.frozen_weights().linears.items()))
    engine.check_weights()
    weight.weight.codes[3, 5] ^= 1
    with pytest.raises(KVCacheError, match="has changed"):  # the check before a checkpoint is saved
        engine.check_weights()
    with pytest.raises(KVCacheError, match=r"qkv_proj\.weight_packed has changed .* restart from the last checkpoint"):
        engine.begin(4, None)
    assert name.endswith("q_proj") and events == ["release"]
    weight.weight.codes[3, 5] ^= 1
    engine.begin(4, None)


def test_an_engine_stays_awake_for_all_turns_of_a_batch(sleepy):
    engine, events = sleepy
    engine.frozen_weights()
    engine.begin(3, None)
    events.clear()
    with engine.episodes():
        (ids, *_), *_ = engine.generate(PROMPTS, None, 4)
        for number in (1, 2):
            engine.play([Turn(ids, 0, number, 4)], lambda ended: ())
    assert events == ["generate"] * 3 + ["release"]
    with engine.episodes():
        pass
    assert events[4:] == []


def test_an_engine_that_has_lent_nothing_sleeps_whole(sleepy):
    engine, events = sleepy
    engine.begin(3, None)
    engine.generate(PROMPTS, None, 4)
    engine.begin(4, None)
    assert events == ["swap", "generate", "sleep 1", "wake", "swap"]


@pytest.mark.parametrize("lent", [True, False])
def test_whatever_is_asked_of_a_sleeping_engine_wakes_it_and_scores_let_it_sleep_again(sleepy, lent):
    engine, events = sleepy
    asleep, awake = (["release"], ["resume", "zero"]) if lent else (["sleep 1"], ["wake"])
    if lent:
        engine.frozen_weights()
    engine.begin(3, None)
    engine.generate(PROMPTS, None, 4)
    events.clear()
    engine.score(PROMPTS[:2], [[5, 6], [7]])
    assert events == [*awake, "score", *asleep]
    engine.check_weights()
    events.clear()
    engine.serve_base()
    assert events == awake
    events.clear()
    engine.score(PROMPTS[:2], [[5, 6], [7]])
    engine.frozen_weights()
    assert events == ["score", *asleep, *awake, "release"]


@pytest.mark.parametrize("is_changed", [True, False])
def test_an_engine_is_closed_awake_whatever_was_done_to_the_weights_it_lent(is_changed, start_engine, kv_events):
    engine = start_engine(16)
    engine.frozen_weights()
    engine.check_weights()  # an awake engine has nothing to compare with
    engine._training.vllm_enable_sleep_mode = True
    weight = next(iter(engine.frozen_weights().linears.values()))
    weight.weight.codes[3, 5] ^= is_changed
    engine.close()
    assert kv_events == (["release"] if is_changed else ["release", "resume", "zero"])
    engine.close()
