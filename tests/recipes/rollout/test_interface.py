"""Test a rollout engine that is not ours: transformers' own sampling, written only against the protocol."""

import time
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils import set_peft_model_state_dict

from qerl_recipes import hooks
from qerl_recipes.model import loading, norms


class TransformersRollouts:
    """Sample one prompt after the other, and lend no weights."""

    def __init__(self, base, training, *, rank, dtype, snapshot, accelerator):
        self.training, self.snapshot = training, snapshot
        self.model, self.rank = loading.load(base, dtype), rank
        self.tokens, self.seconds, self.version, self.closed = 0, 0.0, 0, 0

    def sync_weights(self):
        policy = self.snapshot()
        assert policy.config["r"] == self.rank
        if self.version == 0:
            self.model = get_peft_model(self.model, LoraConfig(**policy.config))
        set_peft_model_state_dict(self.model, policy.tensors)
        self.version += 1

    def begin(self, rollout, sigma):
        self.sync_weights()
        self.tokens, self.seconds = 0, 0.0
        if sigma is None:
            return 0
        return norms.set_noise(
            self.model, sigma, self.training.noise_seed, rollout, self.training.noise_targets
        )  # sigma 0 gives no noise

    def begin_evaluation(self):
        self.sync_weights()
        norms.clear_noise(self.model)

    @torch.no_grad()
    def generate(self, prompts, images, num_generations, profiler=None):
        began, completions, logprobs = time.perf_counter(), [], []
        length = self.training.max_completion_length
        for prompt in prompts:
            ids = torch.tensor([prompt])
            whole = self.model.generate(input_ids=ids, do_sample=True, top_k=0, max_new_tokens=length)
            logps = self.model(whole).logits[0, ids.shape[1] - 1 : -1].log_softmax(-1)
            completion = whole[0, ids.shape[1] :]
            completions.append(completion.tolist())
            logprobs.append([[value] for value in logps.gather(1, completion[:, None])[:, 0].tolist()])
        self.tokens += sum(map(len, completions))
        self.seconds += time.perf_counter() - began
        return prompts, completions, logprobs, None

    def close(self):
        self.closed += 1


@pytest.fixture
def third_party():
    class Plugin:
        @hooks.implementation
        def qerl_rollout_engines(self):
            return {"transformers": TransformersRollouts}

    manager, plugin = hooks.get_plugin_manager(), Plugin()
    manager.register(plugin)
    yield
    manager.unregister(plugin)


def test_an_engine_that_is_not_ours_trains_a_policy(third_party, make_trainer, make_nvfp4, read_metrics):
    settings = {"noise_mode": "both", "sigma_start": 0.2, "sigma_end": 0.2, "num_stages": 1, "max_steps": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # no vLLM key is set or reported missing
        trainer = make_trainer(
            make_nvfp4("qwen2"),
            dtype=torch.float32,
            rollout_engine="transformers",
            max_completion_length=6,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            **settings,
        )
        trainer.train()
    *records, evaluation = read_metrics(trainer)
    assert evaluation["eval/reward"] >= 0
    assert [record["sigma"] for record in records] == [0.0, 0.2]
    assert [record["adapter_version"] for record in records] == [1, 2]
    assert [record["noisy_norms"] for record in records] == [0, 4]
    assert max(record["logp_diff_mean"] for record in records) < 1e-5
    assert all(record["grad_norm"] > 0 for record in records)
    assert isinstance(trainer.vllm_generation, TransformersRollouts)
    assert not isinstance(trainer.vllm_generation, hooks.LendsWeights)
