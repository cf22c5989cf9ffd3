"""Test training on one rollout while the next one is computed; served/test_server.py has the server."""

import threading
from pathlib import Path
from typing import ClassVar

import calling
import pandas as pd
import pytest
import scripted_rollouts
import torch
from digit_rewards import digits
from safetensors.torch import load_file
from transformers import TrainerCallback
from waiting import PATIENCE, until

pytestmark = pytest.mark.usefixtures("scripted")
RUN = {"rollout_engine": scripted_rollouts.NAME, "dtype": torch.float32, "max_steps": 4, "overlap": 1}
NOISE = {"noise_mode": "both", "sigma_start": 0.1, "sigma_end": 0.1, "num_stages": 1}
ONLY_WITH = ("adapter_age", "logp_staleness_mean")  # the lines of other runs lack these
MAIN = threading.main_thread()


@pytest.fixture
def made(make_trainer, make_nvfp4, tmp_path):
    """Return made(folder, reward, **settings), which makes a trainer with the scripted engine."""

    def make(folder="run", reward=digits, **settings):
        return make_trainer(make_nvfp4("qwen2"), reward, **{**RUN, "output_dir": str(tmp_path / folder), **settings})

    return make


class Counted:
    """An environment whose reward is the number of its calls, and which notes the threads that use it."""

    threads: ClassVar[set[tuple[str, bool]]] = set()

    def reset(self, **row):
        Counted.threads.add(("reset", threading.current_thread() is MAIN))
        self.calls = 0

    def double(self, number: int) -> str:
        """Double a number.

        Args:
            number: The number.
        """
        Counted.threads.add(("double", threading.current_thread() is MAIN))
        self.calls += 1
        return str(2 * number)

    def get_reward(self) -> float:
        Counted.threads.add(("reward", threading.current_thread() is MAIN))
        return float(self.calls)


def comparable(lines):
    """Return lines without what only an overlapped run has or measures on other tokens."""
    return [{k: v for k, v in line.items() if k not in ONLY_WITH and "logp_diff" not in k} for line in lines]


def test_a_rollout_is_computed_while_the_one_before_is_trained_on(made, read_metrics):
    trainer, events, adapters = made(), [], []
    trains = [threading.Event() for _ in range(4)]
    engine, compute_loss, complete = trainer.vllm_generation, trainer.compute_loss, trainer.vllm_generation._complete

    def sampled(*given):
        rollout = len(engine.asked)
        assert not rollout or trains[rollout - 1].wait(PATIENCE), "the rollout before is not trained on"
        events.append(("sampled", rollout))
        return complete(*given)

    def trained(*given, **options):
        step = trainer.state.global_step
        adapters.append(next(iter(trainer._lora.values())).detach().clone())
        trains[step].set()
        assert step == 3 or until(lambda: not trainer.overlap.flight._calls.empty()), "it does not end"
        events.append(("trained", step))
        return compute_loss(*given, **options)

    engine._complete, trainer.compute_loss = sampled, trained
    trainer.train()
    first, *later = [("sampled", 0)], *[[("sampled", k + 1), ("trained", k)] for k in range(3)], [("trained", 3)]
    assert events == sum(later, first)
    assert [line["adapter_age"] for line in read_metrics(trainer)] == [0, 1, 1, 1]
    pushed = Path(trainer.args.output_dir, "policies_0").read_text().split()
    assert pushed[0] == pushed[1] and len(set(pushed)) == 3, "the second rollout has the adapter of the first"
    assert not torch.equal(adapters[0], adapters[-1])


@pytest.mark.parametrize("steps", [1, 2])
def test_with_a_fixed_adapter_a_run_is_the_one_without(steps, made, read_metrics):
    """Check prompts, seeds and noise over three epochs: only the age of the adapter may make a difference."""
    settings = {"learning_rate": 0.0, "rows": 4, "max_steps": 5 * steps, "per_device_train_batch_size": 8 // steps}
    settings |= {"steps_per_generation": steps, **NOISE}
    found = []
    for overlap in (0, 1):
        trainer = made(f"{overlap}", overlap=overlap, **settings)
        trainer.train()
        found.append((read_metrics(trainer), trainer.vllm_generation.asked))
    (plain, asked), (overlapped, asked_ahead) = found
    assert asked == asked_ahead and len(asked) == 5
    assert comparable(plain) == comparable(overlapped)
    assert [line["adapter_age"] for line in overlapped] == [0] * steps + [1] * 4 * steps


def test_rewards_are_computed_in_the_main_thread(made, read_metrics):
    Counted.threads.clear()
    turns = {"environment_factory": Counted}
    settings = {"turns": turns, "max_completion_length": 24, "max_tool_seconds": None}

    def say(tokens):
        return calling.ids("{double 4}<eos>" if sum(tokens) % 3 else "7<eos>")

    lines = []
    for evaluates in ("no", "steps"):
        trainer = made(evaluates, [], eval_strategy=evaluates, eval_steps=1, **settings)
        trainer.vllm_generation.say = say
        trainer.eval_dataset = calling.prompts(2)
        trainer.train()
        names = ("reward", "turns", "tool_calls", "adapter_age")
        lines.append([[line[name] for name in names] for line in read_metrics(trainer) if "reward" in line])
    assert lines[0] == lines[1], "an evaluation takes the environments of a rollout that has been scored"
    assert len({reward for reward, *_ in lines[0]}) > 1
    during_training = {("reset", False), ("double", False), ("reward", True)}
    assert Counted.threads == during_training | {("reset", True), ("double", True)}


@pytest.mark.parametrize("steps", [1, 2])
def test_promise_08_a_resumed_run_goes_on_with_the_rollout_in_flight(steps, made, resume, read_metrics):
    settings = {"save_strategy": "steps", "save_steps": steps, "max_steps": 4 * steps, "log_completions": True, **NOISE}
    settings |= {"steps_per_generation": steps, "per_device_train_batch_size": 8 // steps, "train_norms": True}
    whole = made("whole", **settings)
    whole.train()
    resumed = made("resumed", **settings)
    resume(resumed, Path(whole.args.output_dir) / f"checkpoint-{2 * steps}")
    assert len(resumed.vllm_generation.asked) == 1, "that of the third rollout is not asked for again"
    lines = read_metrics(whole)
    assert read_metrics(resumed)[-2 * steps :] == lines[-2 * steps :]
    ours, theirs = (
        load_file(Path(of.args.output_dir) / f"checkpoint-{4 * steps}" / "adapter_model.safetensors")
        for of in (resumed, whole)
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert resumed.state.num_input_tokens_seen == whole.state.num_input_tokens_seen
    ours, theirs = (
        pd.read_parquet(Path(of.args.output_dir) / "completions" / f"completions_{2 * steps + 1:05d}.parquet")
        for of in (resumed, whole)
    )
    assert ours.equals(theirs)


def test_a_server_that_restarts_gets_the_adapter_that_the_rollout_began_with(made):
    """Check what an engine is given in flight, after the trainer's step: it would push that again."""
    trainer, moved, given = made(max_steps=2, train_norms=True), threading.Event(), {}
    engine, complete = trainer.vllm_generation, trainer.vllm_generation._complete

    def values():
        policy = engine._snapshot()
        return torch.cat(
            [tensor.detach().flatten().clone() for tensor in (*policy.tensors.values(), *policy.norms.values())]
        )

    def sampled(*given_requests):
        if engine.asked:
            given["at the start"] = values()
            assert moved.wait(PATIENCE)
            given["after the step"] = values()
        return complete(*given_requests)

    class Moved(TrainerCallback):
        def on_step_end(self, *_, **named):
            moved.set()

    engine._complete = sampled
    trainer.add_callback(Moved())
    trainer.train()
    assert torch.equal(given["at the start"], given["after the step"])
    assert not torch.equal(given["at the start"], values())


@pytest.mark.parametrize("where", ["engine", "reward"])
def test_an_error_in_flight_ends_the_run(where, made):
    seen = []

    def reward(completions, **columns):
        seen.append(len(completions))
        if where == "reward" and len(seen) == 2:
            raise ArithmeticError("the second rollout")
        return digits(completions)

    trainer = made("run", reward)
    complete = trainer.vllm_generation._complete

    def sampled(*given):
        if where == "engine" and trainer.vllm_generation.asked:
            raise ArithmeticError("the second rollout")
        return complete(*given)

    trainer.vllm_generation._complete = sampled
    with pytest.raises(ArithmeticError, match="the second rollout"):
        trainer.train()
    assert trainer.state.global_step == 1 and trainer.overlap.flight is None
