"""Test TRL's AsyncGRPO on a server with a resident adapter.

How turns become rows and which tools an environment offers is TRL's own code, unchanged: it is not tested again.
"""

import os
import queue
import threading
from types import SimpleNamespace

import calling
import pytest
import torch
from accelerate import PartialState
from digit_rewards import digits
from peft import LoraConfig
from trl.experimental.async_grpo import AsyncGRPOConfig

from qerl_recipes.model import loading
from qerl_recipes.rollout.server_link import ServerRefusedError
from qerl_recipes.train import async_grpo
from qerl_vllm_plugin.client import PolicyClient

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
STEPS = 4


@pytest.fixture
def served(running):
    """Return the base of the server, its address and a client of it, once it answers."""
    running.ready()
    return running.model, running.url, PolicyClient(running.url, os.environ["QERL_ADMIN_TOKEN"])


class Scored(queue.Queue):
    """Take what TRL's loop has scored, and end the loop after a hundred rows, among which each way of playing is."""

    def put_nowait(self, row):
        super().put_nowait(row)
        if self.qsize() == 100:
            self.loop._stop_event.set()


@pytest.fixture
def play(served):
    """Return play(rows, **settings), which lets TRL's loop play on the server; it returns what was scored."""
    PartialState()
    base, url, client = served

    def run(rows, **settings):
        scored = Scored()
        shared = {"model_version_value": client.state()["version"], "heartbeat_value": 0.0}
        queues = {"rollout_buffer": scored, "exception_info_queue": queue.Queue(), "metrics_queue": queue.Queue()}
        scored.loop = async_grpo.CheckedLoop(
            model_name=str(base),
            dataset=rows,
            reward_funcs=[digits],
            processing_class=calling.tokenizer(),
            eos_token_ids=[1],
            failed_event=threading.Event(),
            environment_factory=calling.Walk,
            num_generations=4,
            max_inflight_tasks=4,
            vllm_server_url=url,
            max_tokens=6,
            max_tool_calling_iterations=1,
            **{name: SimpleNamespace(value=value) for name, value in shared.items()},
            **queues,
            **settings,
        )
        scored.loop.run()
        return list(scored.queue)

    return run


@pytest.mark.parametrize("threshold", [1024, 1], ids=["one row of two turns", "a row each"])
def test_rows_are_what_the_server_sampled_over_turns(threshold, play, served):
    """Compare the log-probabilities of sampled tokens with the model's, which sees the whole row."""
    model, differences, ways = loading.load(str(served[0]), torch.float32), [], set()
    for row in play(calling.prompts(4), fork_threshold_tokens=threshold):
        ids, is_sampled = torch.tensor(row.input_ids), torch.tensor(row.completion_mask).bool()
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(dim=-1).gather(1, ids[1:, None])[:, 0]
        differences.append((logprobs - torch.tensor(row.old_log_probs[1:])).abs()[is_sampled[1:]])
        answered = ids.tolist().index(tool) if (tool := calling.ids("<tool>")[0]) in ids[~is_sampled] else len(ids)
        ways.add((bool(is_sampled[:answered].any()), bool(is_sampled[answered:].any())))
    assert torch.cat(differences).mean() < 0.05
    assert ((True, True) if threshold > 1 else (False, True)) in ways, "sampled before a tool's answer, and after it"


def test_a_prompt_that_the_server_refuses_ends_the_run_with_its_words(play):
    (row,) = calling.prompts(1)
    row["prompt"][0]["content"] *= 30
    with pytest.raises(ServerRefusedError, match=r"the server refuses a request: .*256"):
        play([row])


@pytest.mark.slow
def test_trls_asynchronous_trainer_trains_against_the_server(served, tmp_path):
    base, url, client = served
    before, tokenizer = client.state()["version"], calling.tokenizer()
    config = AsyncGRPOConfig(
        output_dir=str(tmp_path),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=12,
        learning_rate=1e-2,
        dtype="bfloat16",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        token_budget=0,
        max_tool_calling_iterations=1,
        max_staleness=2,
        vllm_server_base_url=url,
        report_to="none",
        disable_tqdm=True,
    )
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = async_grpo.QerlAsyncGRPOTrainer(
        base,
        digits,
        args=config,
        train_dataset=calling.prompts(16),
        processing_class=tokenizer,
        peft_config=adapter,
        environment_factory=calling.Walk,
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "ratio" in entry]
    assert len(logs) == STEPS and all(entry["grad_norm"] > 0 for entry in logs)
    assert client.state()["version"] == trainer.model_version == max(before, 1) + STEPS + 1, "one before the first step"
    assert abs(logs[0]["ratio"] - 1) < 0.02, "the adapter that sampled is the one of the first step"
    mixed = [entry["sampling/mixed_versions"] for entry in logs if "sampling/mixed_versions" in entry]
    assert mixed and all(0 <= share <= 1 for share in mixed)
