"""Test training with tools and rollout functions as TRL has them.

The engine is scripted and follows from the history, so that TRL's own loop can be compared with ours.
"""

import copy
import itertools
import json
import random
from pathlib import Path
from types import SimpleNamespace

import calling
import pandas as pd
import pytest
import scripted_rollouts
import torch
from calling import in_turn
from datasets import Dataset
from trl import GRPOTrainer

from qerl_recipes.recipe.configs import ScriptArguments
from qerl_recipes.rollout import episodes
from qerl_recipes.rollout.interface import TakesTurns
from qerl_recipes.tasks.rewards import FACTORIES
from qerl_recipes.train import loss
from qerl_recipes.train.turns import TurnsTrainer

pytestmark = pytest.mark.usefixtures("scripted")


def drawn(tokens):
    """Say a few tokens that follow from the history alone: digits and calls, up to an end."""
    dice, choices = random.Random(str(tokens)), calling.ids("234{double 4}{double 4}{wait}{double x}{nobody}")
    return [*dice.choices(choices, k=dice.randint(0, 3)), 1]


def differs(completions, **columns):
    """Give each completion another reward, so that there is something to learn."""
    return [float(i) for i in range(len(completions))]


@pytest.mark.parametrize("tokens", [56, 12])
@pytest.mark.parametrize("calls", [None, 2])
def test_turns_are_those_of_trls_own_loop(calls, tokens, train, monkeypatch):
    compared, ours = [], TurnsTrainer._tool_call_loop

    def both(trainer, *given):
        longest = SimpleNamespace(model_config=SimpleNamespace(max_model_len=trainer.vllm_generation.longest))
        trainer.vllm_generation.llm = SimpleNamespace(llm_engine=longest)  # where TRL looks
        found = ours(trainer, *given)  # played before the first turns were given to TRL
        with monkeypatch.context() as patched:
            patched.setattr(TurnsTrainer, "_generate_single_turn", GRPOTrainer._generate_single_turn)
            expected = GRPOTrainer._tool_call_loop(trainer, *copy.deepcopy(given))
        compared.append((found, expected))
        return compared[-1][0]

    monkeypatch.setattr(TurnsTrainer, "_tool_call_loop", both)
    settings = {"max_tool_calling_iterations": calls, "max_completion_length": tokens, "vllm_max_model_length": 64}
    trainer, records = train(drawn, per_device_train_batch_size=32, **settings)
    ((found, expected),) = compared
    assert found == expected and isinstance(trainer.vllm_generation, TakesTurns)
    assert found[4] > found[5] > 0, "calls, and failed ones"
    turns, cut = max(len(one.turns) for one in trainer._episodes), sum(one.is_cut for one in trainer._episodes)
    assert cut and records[0]["episodes_cut"] == cut / 32
    assert turns > 1 if tokens == 12 else (turns == 3 if calls else turns > 3)


def test_what_stands_between_two_turns_is_as_in_trl(make_trainer, make_nvfp4):
    """Check the values that TRL's method reads of a trainer; its other tests see the loop's own template alone."""
    options, said = {"mark": "+"}, [{"role": "tool", "name": "double", "content": text} for text in "78"]
    engine = {"rollout_engine": scripted_rollouts.NAME, "chat_template_kwargs": options}
    trainer = make_trainer(make_nvfp4("qwen2"), turns=calling.TOOLS, **engine)
    for template in (None, calling.TEMPLATE + "{{ '=' if tools else mark }}"):
        trainer.chat_template = template
        between = trainer._get_tool_suffix_ids(said)
        assert episodes.between_turns(said, trainer._tokenizer, {**options, "chat_template": template}) == between
        assert between == calling.ids("<tool>7<tool>8<assistant>" + ("+" if template else ""))
    assert trainer._player.options == {**options, "chat_template": template}


@pytest.mark.parametrize("leaks", [False, True], ids=["masked", "tools' tokens counted"])
def test_promise_06_engine_and_trainer_agree_over_turns(leaks, make_trainer, make_nvfp4, read_metrics, monkeypatch):
    """Check vLLM itself with noise; the model is random, and a turn ends with a call, or with tokens of no meaning."""
    if leaks:
        monkeypatch.setattr(loss, "mask_of", lambda batch: batch["completion_mask"])
    noise = {"noise_mode": "both", "sigma_start": 0.1, "sigma_end": 0.1, "num_stages": 1, "max_steps": 2}
    settings = {"max_completion_length": 40, "generation_kwargs": {"stop_token_ids": calling.ENDS}, **noise}
    trainer = make_trainer(make_nvfp4("qwen2"), turns=calling.TOOLS, max_tool_calling_iterations=3, **settings)
    play, swap, events = trainer.vllm_generation.play, trainer.vllm_generation.policy.swap, []
    monkeypatch.setattr(trainer.vllm_generation, "play", lambda *given: events.append("play") or play(*given))
    monkeypatch.setattr(trainer.vllm_generation.policy, "swap", lambda *a, **k: events.append("swap") or swap(*a, **k))
    trainer.train()
    records = read_metrics(trainer)
    assert [record["noisy_norms"] for record in records] == [0, 4]
    assert events == ["swap", "play"] * 2, "one policy a rollout"
    assert all(1 < record["turns"] < 4 and record["tool_calls"] > 0 for record in records)
    mismatch = [record["logp_diff_mean"] for record in records]
    assert min(mismatch) > 1 if leaks else max(mismatch) < 0.05


def test_a_step_counts_what_its_episodes_did(train):
    trainer, (record,) = train(
        in_turn("{double 4}{nobody}<eos>", "7<eos>"), log_completions=True, num_completions_to_print=1
    )
    expected = {"tool_calls": 2.0, "tool_failures": 0.5, "turns": 2.0, "episodes_cut": 0.0, "completion_clipped": 0.0}
    assert {name: record[name] for name in expected} == expected and record["completion_length"] == 5.0
    assert 0 < json.loads(Path(trainer.args.output_dir, "metrics.jsonl").read_text())["tool_seconds"] < 10
    assert trainer.vllm_generation.tokens == 8 * 5
    table = pd.read_parquet(f"{trainer.args.output_dir}/completions/completions_00001.parquet")
    assert [message["role"] for message in table["completion"][0]] == ["assistant", "tool", "tool", "assistant"]
    assert table["completion"][0][0]["tool_calls"][0]["function"]["arguments"] == '{"number": 4}'


def double_in_the_loop():
    async def double(number: int) -> int:
        """Double a number.

        Args:
            number: The number.
        """
        return 2 * number

    return double


@pytest.mark.parametrize("tool", [calling.double, double_in_the_loop()], ids=["sync", "async"])
def test_one_call_of_two_fails_and_the_policy_learns(tool, train):
    """Check rows of which one calls well, one with a wrong argument, and two not at all."""
    said, before = itertools.cycle(["{double 4}<eos>", "{double x}<eos>", "7<eos>", "77<eos>"]), {}

    def say(tokens):
        is_first = tokens.count(calling.VOCABULARY.index("<assistant>")) == 1
        return calling.ids(next(said) if is_first else "8<eos>")

    def note(trainer):
        before.update((name, weight.detach().clone()) for name, weight in trainer.model.named_parameters())

    trainer, (record,) = train(say, {"tools": [tool]}, differs, note)
    assert (record["tool_calls"], record["tool_failures"], record["turns"]) == (0.5, 0.5, 1.5)
    roles = [[message["role"] for message in one.messages] for one in trainer._episodes]
    assert roles == [["assistant", "tool", "assistant"]] * 2 + [["assistant"]] * 2 + roles[:4]
    assert [trainer._episodes[row].messages[1]["content"][:9] for row in (0, 1)] == ["8", "{'error':"]
    changed = {name for name, weight in trainer.model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == {name for name in before if ".lora_B." in name}, "all of B; A follows once B is not zero"


@pytest.mark.parametrize("call", ["broken", "deep"])
@pytest.mark.parametrize("turn", [0, 1])
def test_a_call_that_cannot_be_read_is_text(call, turn, train):
    said = [["{double 4}<eos>"], []][turn == 0]
    trainer, (record,) = train(in_turn(*said, f"7{{{call}}}<eos>"))
    assert (record["turns"], record["tool_calls"], record["tool_failures"]) == (turn + 1, turn, 0.0)
    assert trainer._episodes[0].messages[-1]["content"].startswith("7<call>")


@pytest.mark.parametrize("masks", [True, False])
def test_an_episode_out_of_tokens_counts_as_cut(masks, train):
    """Check that it is logged as cut off and left out of the loss, though it ends with a call and its end token."""
    seen = []

    def say(tokens):
        return calling.ids("{double 4}<eos>" if sum(tokens) % 2 else "7<eos>")

    def watch(trainer):
        inner = trainer.compute_loss
        trainer.compute_loss = lambda model, inputs, *rest, **more: (
            seen.append((inputs["completion_mask"].sum(dim=1), inputs["num_items_in_batch"]))
            or inner(model, inputs, *rest, **more)
        )

    settings = {"max_completion_length": 4, "mask_truncated_completions": masks}
    trainer, (record,) = train(say, before=watch, reward=differs, **settings)
    cut = [one.is_cut for one in trainer._episodes]
    assert 0 < sum(cut) < 8 and record["episodes_cut"] == record["completion_clipped"] == sum(cut) / 8
    ((tokens, items),) = seen
    assert sorted(tokens.tolist()) == sorted(0 if masks and one else 2 for one in cut) and items == tokens.sum()


def test_a_stop_string_in_a_tools_text_ends_nothing(train):
    stops = {"generation_kwargs": {"stop": ["8"]}}
    _, (record,) = train(in_turn("{double 4}<eos>", "7"), **stops)
    assert record["completion_clipped"] == 1.0


@pytest.mark.parametrize("kind", ["tools", "rollout function"])
def test_a_rollout_has_one_policy_whatever_its_turns(kind, train):
    turns = {"tools": calling.TOOLS, "rollout function": {"rollout_func": asks_twice}}[kind]
    trainer, records = train(in_turn("{double 4}<eos>", "7<eos>"), turns, max_steps=2)
    assert [record["adapter_version"] for record in records] == [1, 2] and trainer.vllm_generation.version == 2
    assert len(trainer.vllm_generation.asked) == 4, "of two turns each"


@pytest.mark.parametrize("kind", ["tools", "rollout function"])
def test_turns_have_ended_when_processes_gather(kind, train):
    """Check that no process waits in TRL's gathering for one that needs it in a shared engine."""
    turns, held = {"tools": calling.TOOLS, "rollout function": {"rollout_func": asks_twice}}[kind], []

    def watch(trainer):
        engine, gather = trainer.vllm_generation, trainer.accelerator.gather
        complete = engine._complete
        engine._complete = lambda *given: held.append(("turn", engine._seeds._is_held)) or complete(*given)
        trainer.accelerator.gather = lambda own: held.append(("gather", engine._seeds._is_held)) or gather(own)

    train(in_turn("{double 4}<eos>", "7<eos>"), turns, before=watch)
    assert set(held) == {("turn", True), ("gather", False)} and held.count(("turn", True)) == (
        1 if kind == "tools" else 2
    )


@pytest.mark.parametrize("kind", [scripted_rollouts.NAME, "vllm"])
def test_promise_08_turns_resume_to_the_same_bits(kind, train, tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "rollout_engine": kind}
    saves |= {"generation_kwargs": {"stop_token_ids": calling.ENDS}}  # the model is random
    whole, records = train(None, **saves)
    folder = f"{whole.args.output_dir}/checkpoint-1"
    resumed, rest = train(None, output_dir=str(tmp_path / "resumed"), checkpoint=folder, **saves)
    assert rest == records[1:] and rest[0]["turns"] > 1
    ours, theirs = (dict(one.model.named_parameters()) for one in (resumed, whole))
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())


def test_an_evaluation_plays_the_same_episodes_every_time(train):
    """Check that what training has drawn before does not change what an evaluation draws."""
    evaluates = {"eval_strategy": "steps", "eval_steps": 1, "learning_rate": 0.0, "max_steps": 2}
    _, (_, first, _, second) = train(None, **evaluates)
    assert {**first, "step": 2} == second and first["eval/turns"] > 1 and first["eval/tool_calls"] > 0
    assert first["eval/completion_clipped"] == 1.0 and first["eval/episodes_cut"] > 0


@pytest.mark.parametrize("kind", ["plain", "dynamic sampling", "several steps"])
def test_the_divisor_is_of_sampled_tokens(kind, train):
    settings = {
        "plain": {},
        "dynamic sampling": {"dynamic_sampling": True, "dynamic_sampling_metric": "total"},
        "several steps": {"steps_per_generation": 2, "per_device_train_batch_size": 4},
    }[kind]
    batches = []

    def watch(trainer):
        score = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = lambda inputs: batches.append(score(inputs)) or batches[-1]

    train(in_turn("{double 4}<eos>", "7<eos>"), before=watch, reward=differs, **settings)
    (batch,) = batches
    assert int(batch["num_items_in_batch"]) == 8 * 4 < int(batch["completion_mask"].sum()) == 8 * 7


@pytest.mark.parametrize(
    ("turns", "text"),
    [
        ({"train_dataset": None}, "`train_dataset` is required unless"),
        ({"rollout_func": lambda prompts, trainer: {"prompt_ids": []}}, r"must return keys .*completion_ids"),
        (
            {**calling.TOOLS, "train_dataset": Dataset.from_dict({"prompt": ["1+2="]})},
            "and these are texts; write each as",
        ),
    ],
)
def test_what_cannot_be_played_is_refused(turns, text, train):
    with pytest.raises(ValueError, match=text):
        train(drawn, turns)


def test_an_engine_of_one_turn_is_refused_by_name(train, monkeypatch):
    monkeypatch.delattr(scripted_rollouts.SeededRollouts, "play")
    with pytest.raises(ValueError, match=r"engine ScriptedRollouts takes one .* use rollout_engine: vllm"):
        train(drawn)


def test_a_punishment_for_length_leaves_tools_tokens_out(train):
    script = ScriptArguments(max_completion_len=6, soft_punish_cache=4)
    punishment, given = FACTORIES["soft_overlong_punishment"](script), []

    def soft(completions, completion_ids, tool_mask, **columns):
        given.extend(zip(map(len, completion_ids), map(sum, tool_mask), strict=True))
        return punishment(completion_ids=completion_ids, tool_mask=tool_mask)

    _, (record,) = train(in_turn("{double 4}<eos>", "7<eos>"), reward=soft)
    assert set(given) == {(7, 4)} and record["reward"] == (2 - 4) / 4


# rollout functions


def asks_twice(prompts, trainer):
    ids = [calling.ids(f"<user>{prompt[0]['content']}<assistant>") for prompt in prompts]
    _, first, logprobs, _ = trainer.vllm_generation.generate(ids, None, trainer.num_generations)
    read = calling.ids("<tool>88<assistant>")
    histories = [[*prompt, *said, *read] for prompt, said in zip(ids, first, strict=True)]
    _, second, more, _ = trainer.vllm_generation.generate(histories, None, 1)
    flat = [[[each[0] for each in row] for row in of] for of in (logprobs, more)]
    return {
        "prompt_ids": ids,
        "completion_ids": [[*a, *read, *b] for a, b in zip(first, second, strict=True)],
        "logprobs": [[*a, *[0.0] * len(read), *b] for a, b in zip(*flat, strict=True)],
        "env_mask": [[1] * len(a) + [0] * len(read) + [1] * len(b) for a, b in zip(first, second, strict=True)],
        "steps": [2.0] * len(ids),
    }


def test_a_rollout_function_takes_the_place_of_the_turns(train):
    def reward(completions, steps, **columns):
        return steps

    trainer, (record,) = train(in_turn("5<eos>", "66<eos>"), {"rollout_func": asks_twice}, reward)
    assert record["reward"] == 2.0 and record["completion_length"] == 5.0 and "turns" not in record
    first, second = trainer.vllm_generation.asked
    seeds = [request.seed for request in [*first, *second]]
    assert len(set(seeds)) == 16
    trainer.vllm_generation.begin(0, None)
    with trainer.vllm_generation.episodes():
        again = trainer.vllm_generation._seeds.draw(0, 8, 4)
        assert [*again, *(trainer.vllm_generation._seeds.of(place, 1) for place in range(8))] == seeds


def test_tools_go_on_from_what_a_rollout_function_has_sampled(train):
    def asks_once(prompts, trainer):
        ids = [calling.ids(f"<user>{prompt[0]['content']}<assistant>") for prompt in prompts]
        _, said, logprobs, _ = trainer.vllm_generation.generate(ids, None, trainer.num_generations)
        flat = [[each[0] for each in row] for row in logprobs]
        return {"prompt_ids": ids, "completion_ids": said, "logprobs": flat}

    trainer, (record,) = train(in_turn("{double 4}<eos>", "7<eos>"), {**calling.TOOLS, "rollout_func": asks_once})
    assert (record["turns"], record["tool_calls"]) == (2.0, 1.0)
    first, second = trainer.vllm_generation.asked
    assert all(late.prompt[: len(early.prompt)] == early.prompt for early, late in zip(first, second, strict=True))
    assert len({request.seed for request in [*first, *second]}) == 16
