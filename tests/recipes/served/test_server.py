"""Test training against a server in another process: it must give the same bits as in process, whatever happens to the
server."""

import json
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import calling
import numpy as np
import pytest
from safetensors.torch import load_file
from transformers import TrainerCallback
from waiting import PATIENCE, until

from qerl_recipes.rollout import engine
from qerl_recipes.rollout.server_link import ServerLostError

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
CHECKPOINT = "checkpoint-2/adapter_model.safetensors"


@pytest.fixture(scope="module")
def inside(running, make_module_trainer, watched, tmp_path_factory):
    """Train in process, for the result that every other run must reach; the server starts meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.estimates, "sequences", lambda training: 1)
        trainer = watched(make_module_trainer, tmp_path_factory.mktemp("inside"))
    trainer.norms = {name: norm.detach().clone() for name, norm in trainer.vllm_generation._snapshot().norms.items()}
    trainer.train()
    trainer.vllm_generation.close()
    return trainer


@pytest.fixture
def same(inside, read_metrics):
    """Return a check that a run in ``folder`` ended in the bits, metrics and rewards of the one in process."""

    def check(folder):
        assert read_metrics(folder) == read_metrics(inside)
        for name in ("adapter_model.safetensors", "norms.safetensors"):
            ours, theirs = (load_file(Path(of) / "checkpoint-3" / name) for of in (folder, inside.args.output_dir))
            assert ours.keys() == theirs.keys()
            assert all(np.array_equal(ours[key].numpy(), theirs[key].numpy()) for key in theirs)
        assert any(not np.array_equal(theirs[key].numpy(), norm.numpy()) for key, norm in inside.norms.items())

    return check


@pytest.mark.slow
def test_a_server_that_drafts_gives_the_bits_of_drafts_in_process(
    serve_policy, running, watched, make_trainer, hold_port, read_metrics, tmp_path, monkeypatch
):
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    url = f"http://127.0.0.1:{(port := hold_port())}"
    server = serve_policy(running.model, port, *running.alone, "--speculative-config", json.dumps(drafts))
    with monkeypatch.context() as patch:
        patch.setattr(engine.estimates, "sequences", lambda training: 1)
        here = watched(make_trainer, tmp_path / "here", vllm_speculative_config=drafts)
    here.train()
    here.vllm_generation.close()
    assert until(lambda: server.poll() is not None or running.answers(url), 500), server.log.read_text()[-4000:]
    there = watched(make_trainer, tmp_path / "there", vllm_mode="server", vllm_server_base_url=url)
    there.train()
    assert read_metrics(there) == read_metrics(here)
    assert max(line.get("logp_diff_mean", 0) for line in read_metrics(here)) < 0.03


def at_first_answer(trainer, rollout, act):
    """Call ``act()`` when the first completion of a rollout has come and the others are being computed."""
    client, done = trainer.vllm_generation._client, []
    one = client._one

    async def ask(*args):
        answer = await one(*args)
        if trainer.rollout() == rollout and not done:
            done.append(time.monotonic())
            act()
        return answer

    client._one = ask
    return done


def test_a_silent_server_ends_the_run_in_time_and_the_run_resumes_to_the_bits_of_one_in_process(
    against, running, inside, same, capfd, resume
):
    trainer = against(vllm_server_timeout=5)  # longer than a busy machine stays silent
    stopped = at_first_answer(trainer, 1, lambda: os.killpg(running.process.pid, signal.SIGSTOP))
    try:
        with pytest.raises(ServerLostError) as lost:
            trainer.train()
        assert 1 < time.monotonic() - stopped[0] < PATIENCE, "neither at once nor after 500 s"
    finally:
        os.killpg(running.process.pid, signal.SIGCONT)
    assert running.url in str(lost.value) and "has not answered for 5 s" in str(lost.value)
    assert f"nothing up to {trainer.args.output_dir}/checkpoint-1 is lost: go on from it with --res" in str(lost.value)
    assert "waiting for it for up to 5 s" in capfd.readouterr().err
    again = against()
    resume(again)
    assert again.outputs == inside.outputs[-len(again.outputs) :] and len(again.outputs) > 3, "it asks more than once"
    logprobs = [value for output in again.outputs for steps in output[2] for (value,) in steps]
    assert all(float(np.float32(value)) == value for value in logprobs) and len(set(logprobs)) > 100
    assert trainer.sigmas | again.sigmas == {(True, 0.0), (True, 0.1), (False, 0.0)}, "no noise in an evaluation"
    same(again.args.output_dir)


@pytest.mark.slow  # test_server_replies.py has restarts without a server
def test_a_server_that_is_killed_and_started_again_ends_the_run_in_the_same_bits(against, running, same, capfd):
    trainer = against()
    before = running.process

    def kill():
        os.killpg(before.pid, signal.SIGKILL)
        before.wait()
        running.restart()

    killed = at_first_answer(trainer, 1, kill)
    trainer.train()
    assert killed and before.poll() == -signal.SIGKILL
    said = capfd.readouterr().err
    waited = [float(seconds) for seconds in re.findall(r"answers, after ([\d.]+) s", said)]
    assert waited and 0 <= sum(waited) <= time.monotonic() - killed[0] + 0.1
    assert "does not answer" in said and "was restarted: the policy is pushed again" in said
    same(trainer.args.output_dir)


def test_turns_against_a_server_have_the_bits_of_those_in_process(
    against, make_module_trainer, watched, read_metrics, tmp_path, monkeypatch
):
    settings = {"max_completion_length": 40, "max_tool_calling_iterations": 3, "max_steps": 2, "save_steps": 2}
    settings |= {"train_norms": False, "eval_strategy": "no"}
    settings |= {"turns": {"tools": [calling.double]}, "generation_kwargs": {"stop_token_ids": calling.ENDS}}
    with monkeypatch.context() as patched:
        patched.setattr(engine.estimates, "sequences", lambda training: 1)
        inside = watched(make_module_trainer, tmp_path / "inside", **settings)
    inside.train()
    inside.vllm_generation.close()
    trainer = against(**settings)
    trainer.train()
    records = read_metrics(trainer)
    assert records == read_metrics(inside) and all(record["turns"] > 1 for record in records)
    ours, theirs = (load_file(Path(of.args.output_dir) / CHECKPOINT) for of in (trainer, inside))
    assert all(np.array_equal(ours[name].numpy(), theirs[name].numpy()) for name in ours)


OVERLAP = {"overlap": 1, "dynamic_sampling": False, "max_steps": 4, "train_norms": False, "eval_strategy": "no"}
OVERLAP |= {"max_completion_length": 16}


def overlapped(trainer, lines):
    """Check that a run with OVERLAP was a rollout ahead, and that engine and trainer agree on one adapter."""
    assert [line["adapter_age"] for line in lines] == [0, 1, 1, 1]
    assert [line["noisy_norms"] for line in lines] == [0, 0, 4, 4] and trainer.vllm_generation.version == 4
    differences = [line["logp_diff_mean"] for line in lines]  # of the adapter and the noise that sampled
    assert all(0 < difference < 0.03 for difference in differences), differences
    assert min(line["logp_staleness_mean"] for line in lines[1:]) > 0.05, "steps of 1e-2 move the adapter far"
    return load_file(Path(trainer.args.output_dir) / "checkpoint-4" / "adapter_model.safetensors")


def test_promise_06_engine_and_trainer_agree_a_rollout_ahead(against, resume, read_metrics):
    whole = against(**OVERLAP)
    whole.train()
    lines = read_metrics(whole)
    theirs = overlapped(whole, lines)
    resumed = against(**OVERLAP)
    resume(resumed, Path(whole.args.output_dir) / "checkpoint-2")
    assert read_metrics(resumed) == lines
    ours = load_file(Path(whole.args.output_dir) / "checkpoint-4" / "adapter_model.safetensors")
    assert all(np.array_equal(ours[name].numpy(), theirs[name].numpy()) for name in theirs)


@pytest.mark.slow
def test_a_server_killed_under_a_rollout_in_flight_changes_nothing(against, running, read_metrics, capfd):
    whole = against(**OVERLAP)
    whole.train()
    lines, theirs = read_metrics(whole), overlapped(whole, read_metrics(whole))
    shutil.rmtree(whole.args.output_dir)
    trainer, before, killed = against(**OVERLAP), running.process, []
    client, asked, restarted = trainer.vllm_generation._client, threading.Event(), threading.Event()
    one = client._one

    class Kill(TrainerCallback):
        def on_step_end(self, args, state, control, **named):
            if state.global_step == 2:  # the adapter has moved since the third rollout began
                assert asked.wait(PATIENCE)
                killed.append(os.killpg(before.pid, signal.SIGKILL))
                before.wait()
                running.restart()
                restarted.set()

    async def ask(*given):
        answer = await one(*given)
        if trainer.vllm_generation._seeds._rollout == 2 and not killed:
            asked.set()
            assert restarted.wait(PATIENCE)
        return answer

    client._one = ask
    trainer.add_callback(Kill())
    trainer.train()
    assert killed and "was restarted: the policy is pushed again" in capfd.readouterr().err
    ours = overlapped(trainer, read_metrics(trainer))
    assert read_metrics(trainer) == lines
    assert all(np.array_equal(ours[name].numpy(), theirs[name].numpy()) for name in theirs)


def test_a_rollout_keeps_to_the_recipes_length_and_counts_all_of_it(against, monkeypatch):
    rollouts = against(vllm_max_model_length=32, max_completion_length=16).vllm_generation
    rollouts.begin(0, None)
    prompts, began = [[5] * 24] * 8, time.perf_counter()
    first = rollouts.generate(prompts=prompts, images=None, num_generations=4)[1]
    assert max(map(len, first)) == 8, "of the 16 of max_completion_length and the 40 that the server has room for"
    seconds = rollouts.seconds
    second = rollouts.generate(prompts=prompts[:1], images=None, num_generations=4)[1]
    assert rollouts.tokens == sum(map(len, first + second))
    assert 0 < seconds < rollouts.seconds < time.perf_counter() - began
    rollouts.begin(0, None)
    assert rollouts.tokens == rollouts.seconds == 0
    monkeypatch.setattr(rollouts, "_accelerator", SimpleNamespace(process_index=1))
    others = rollouts.generate(prompts=prompts, images=None, num_generations=4)[1]
    assert others != first, "the second process draws answers of its own"
