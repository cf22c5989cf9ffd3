import gc
import json
import math
import weakref

import pytest
import scripted_rollouts
import torch
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file

from qerl_recipes.model import norms
from qerl_recipes.train import loss
from qerl_vllm_plugin import noise

AQN = {"sigma_start": 0.2, "sigma_end": 0.2, "num_stages": 1, "max_steps": 4}


@pytest.mark.parametrize("mode", ["none", "engine", "engine_is", "both"])
def test_promise_06_rollout_and_trainer_agree_in_noise_modes(mode, make_trainer, make_nvfp4, read_metrics, monkeypatch):
    trainer = make_trainer(make_nvfp4("qwen2"), **({"noise_mode": mode, **AQN} if mode != "none" else {"max_steps": 4}))
    seen = []
    inner = loss.weigh

    def watch(*args):
        noisy = [name for name, norm in norms.named_norms(trainer.model) if norm.noise is not None]
        weights, measured = inner(*args)
        seen.append((weights, len(noisy)))
        return weights, measured

    monkeypatch.setattr(loss, "weigh", watch)
    trainer.train()
    records = read_metrics(trainer)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert [record["adapter_version"] for record in records] == [1, 2, 3, 4]
    assert all(math.isfinite(record[key]) for record in records for key in ("reward", "entropy", "loss", "grad_norm"))
    mismatch = [record["logp_diff_mean"] for record in records]
    assert max(mismatch[:2]) < 0.05  # stage 0: no noise in any mode
    assert [record["sigma"] for record in records] == ([0.0] * 4 if mode == "none" else [0.0, 0.0, 0.2, 0.2])
    assert [record["noisy_norms"] for record in records] == ([0] * 4 if mode == "none" else [0, 0, 4, 4])
    if mode in ("none", "both"):
        assert max(mismatch) < 0.05
    else:
        assert min(mismatch[2:]) > 0.08  # the policy that sampled is not the one that learns
    weighted = [not bool((ratio == 1).all()) for ratio, _ in seen]
    assert weighted == [mode != "engine"] * 4
    assert [count for _, count in seen] == ([0, 0, 4, 4] if mode == "both" else [0] * 4)


def test_beta_compares_with_a_reference_under_the_same_noise(make_trainer, make_nvfp4, read_metrics):
    """Check that the divergence is only what the adapter has learnt.

    It is 0 where nothing is learnt, however large the noise.
    """
    keys = {"noise_mode": "both", "beta": 0.1, "dtype": torch.float32, **AQN}
    trainer = make_trainer(make_nvfp4("qwen2"), learning_rate=0.0, **keys)
    trainer.train()
    records = read_metrics(trainer)
    assert [record["noisy_norms"] for record in records] == [0, 0, 4, 4]
    assert all(abs(record["kl"]) < 1e-9 for record in records)


def test_temperature_and_noise_keys_reach_both_sides(make_trainer, make_bf16, read_metrics):
    """Check in fp32, where rounding hides nothing.

    Engine and trainer each quantize their own copy of a BF16 base.
    """
    keys = {"temperature": 0.6, "noise_seed": 7, "noise_targets": ["norm"]}
    trainer = make_trainer(make_bf16("qwen2"), dtype=torch.float32, noise_mode="both", **{**AQN, **keys})
    shares, inner = [], trainer.compute_loss

    def watch(model, inputs, *args, **kwargs):
        masks = inputs["prompt_mask"]
        prompts = {tuple(ids.tolist()): int(m.sum()) for ids, m in zip(inputs["prompt_ids"], masks, strict=True)}
        tokens = sum(prompts.values()) + int(inputs["completion_mask"].sum())
        width = inputs["prompt_ids"].shape[1] + inputs["completion_ids"].shape[1]
        shares.append(tokens / (8 * width))
        return inner(model, inputs, *args, **kwargs)

    trainer.compute_loss = watch
    trainer.train()
    records = read_metrics(trainer)
    assert max(record["logp_diff_mean"] for record in records) < 1e-4
    assert [record["noisy_norms"] for record in records] == [0, 0, 1, 1]
    state = trainer.vllm_generation.policy.state()
    assert (state.sigma, state.seed, state.rollout, state.targets) == (0.2, 7, 3, ("norm",))
    noisy = {name: norm.noise for name, norm in norms.named_norms(trainer.model) if norm.noise is not None}
    expected = 0.2 * noise.draw(7, 3, "model.norm.weight", 64)
    assert list(noisy) == ["model.norm.weight"] and torch.equal(noisy["model.norm.weight"], expected)
    assert [record["packed_share"] for record in records] == shares  # a prompt of four completions is computed once


def test_an_adapter_to_go_on_from_keeps_its_bits_on_4_bit_weights(
    scripted, make_trainer, make_nvfp4, save_adapter, tmp_path
):
    """TRL rounds the adapter of such a base to BF16."""
    saved = save_adapter(tmp_path / "adapter", 0)

    def mark(model):
        model.is_loaded_in_4bit = True

    settings = {"rollout_engine": scripted_rollouts.NAME, "dtype": torch.float32}
    trainer = make_trainer(make_nvfp4("qwen2"), adapter=saved, change=mark, **settings)
    found = trainer.snapshot().tensors
    expected = load_file(saved / "adapter_model.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_snapshot_is_pefts_state_dict_without_a_copy(make_trainer, make_nvfp4, tmp_path, resume):
    settings = {"save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}
    trainer = make_trainer(make_nvfp4("qwen2"), max_steps=1, **settings)
    trainer.train()
    resumed = make_trainer(make_nvfp4("qwen2"), max_steps=2, **settings)
    resume(resumed)
    expected = get_peft_model_state_dict(resumed.model, save_embedding_layers=False)
    found = resumed.snapshot().tensors
    assert list(found) == list(expected)
    assert all(found[name].data_ptr() == tensor.data_ptr() for name, tensor in expected.items())


def test_a_trainer_that_nobody_holds_is_freed_though_its_engine_runs(make_trainer, make_nvfp4):
    """Check an engine of vLLM's, which takes the objects of its time out of garbage collection."""
    trainer = make_trainer(make_nvfp4("qwen2"), max_steps=1)
    trainer.train()
    held = [weakref.ref(one) for one in (trainer, trainer.model, trainer.optimizer)]
    del trainer
    getattr(gc, "everything", gc.collect)()
    assert [one() for one in held] == [None] * 3


@pytest.mark.parametrize(("checkpointed", "forwards"), [(None, [4, 4]), (1, [4, 2])])
def test_blocks_that_keep_their_activations_change_nothing_else(
    checkpointed, forwards, make_trainer, make_nvfp4, recwarn
):
    """Train two rollouts, because TRL turns every block's checkpointing off and on again in each."""
    settings = {"gradient_checkpointing": True, "max_steps": 2}
    trainer = make_trainer(make_nvfp4("qwen2"), recompute_layers=checkpointed, **settings)
    assert any("all blocks are recomputed" in str(w.message) for w in recwarn) == (checkpointed is None)
    calls = [[], []]
    for block, counted in zip(trainer.model.get_base_model().model.layers, calls, strict=True):
        block.register_forward_pre_hook(lambda module, args, counted=counted: counted.append(module))
    trainer.train()
    # Each step runs a forward, and the backward of a checkpointed block runs another.
    assert [len(counted) for counted in calls] == forwards
    adapter = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    plain = make_trainer(make_nvfp4("qwen2"), max_steps=2)
    plain.train()
    assert all(torch.equal(adapter[n], p) for n, p in plain.model.named_parameters() if p.requires_grad)


def test_the_bf16_arm_trains_through_the_same_trainer(make_trainer, make_bf16, read_metrics):
    trainer = make_trainer(make_bf16("qwen2"), quantization="bf16", noise_mode="both", **AQN)
    with pytest.warns(UserWarning, match="rounding swallowed"):
        trainer.train()
    records = read_metrics(trainer)
    assert max(record["logp_diff_mean"] for record in records) < 0.05
    assert records[-1]["noisy_norms"] == 4


def test_every_arm_of_a_seed_is_asked_the_same_prompts(make_trainer, make_nvfp4, make_bf16):
    def asked(base, **settings):
        seen = []

        def reward(prompts, completions, **columns):
            seen.append(list(prompts))
            return [float(len(completion) % 3) for completion in completions]

        make_trainer(base, reward, **{"max_steps": 3, "seed": 5, **settings}).train()
        return seen

    first = asked(make_nvfp4("qwen2"))
    assert len(first) == 3 and len({prompt for prompts in first for prompt in prompts}) > 1
    assert asked(make_bf16("qwen2"), quantization="bf16", rank=8, learning_rate=1e-2) == first
    assert asked(make_nvfp4("qwen2"), noise_mode="both", **{**AQN, "max_steps": 3}) == first
    assert asked(make_nvfp4("qwen2"), seed=6) != first


def test_evaluation_has_no_noise_and_training_gets_it_back(make_trainer, make_nvfp4, read_metrics):
    trainer = make_trainer(
        make_nvfp4("qwen2"), noise_mode="both", **{**AQN, "max_steps": 2}, eval_strategy="steps", eval_steps=1
    )
    states, inner = [], trainer.vllm_generation.generate

    def watch(*args, **kwargs):
        trainer_noise = sum(norm.noise is not None for _, norm in norms.named_norms(trainer.model))
        states.append((trainer.model.training, trainer.vllm_generation.policy.state().sigma, trainer_noise))
        return inner(*args, **kwargs)

    trainer.vllm_generation.generate = watch
    trainer.train()
    assert [state for state in states if state[0]] == [(True, 0.0, 0), (True, 0.2, 4)]
    evaluations = [state for state in states if not state[0]]
    assert evaluations
    assert set(evaluations) == {(False, 0.0, 0)}
    assert all(norm.noise is not None for name, norm in norms.named_norms(trainer.model) if noise.is_target(name))
    rewards = [entry["eval_reward"] for entry in trainer.state.log_history if "eval_reward" in entry]
    assert len(rewards) == 2
    trainer.evaluate()  # the same adapter and the same seeds: the same answers
    assert trainer.state.log_history[-1]["eval_reward"] == rewards[-1]


def test_trained_norms_travel_without_the_noise(make_trainer, make_nvfp4, tmp_path):
    trainer = make_trainer(make_nvfp4("qwen2"), noise_mode="both", train_norms=True, **AQN)
    start = {name: norm.weight.detach().clone() for name, norm in norms.named_norms(trainer.model)}
    trainer.train()
    assert max(e["sampling/sampling_logp_difference/mean"] for e in trainer.state.log_history if "loss" in e) < 0.05
    trainer.save_adapter(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "norms.safetensors")
    assert set(saved) == {name for name in start if noise.is_target(name)}
    for name, weight in saved.items():
        moved = (weight - start[name]).abs().max()
        assert 0 < moved < 4 * 2e-2, name  # four steps of Adam; noise of 0.2 is not saved
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["modules_to_save"] is None
    assert "norms" in (tmp_path / "adapter" / "README.md").read_text()


def test_loaded_norms_that_are_not_trained_stay(make_trainer, make_nvfp4, read_metrics, tmp_path):
    settings = {"noise_mode": "none", "max_steps": 1, "dtype": torch.float32}
    first = make_trainer(make_nvfp4("qwen2"), train_norms=True, **settings)
    for name, weight in first.model.named_parameters():
        if weight.requires_grad and "norm" in name:
            weight.data += 0.3
    first.save_adapter(tmp_path / "first")
    trainer = make_trainer(make_nvfp4("qwen2"), adapter=tmp_path / "first", **settings)
    trainer.train()
    assert read_metrics(trainer)[0]["logp_diff_mean"] < 1e-4
    trainer.save_adapter(tmp_path / "second")
    before, after = (load_file(tmp_path / name / "norms.safetensors") for name in ("first", "second"))
    assert len(before) == 4 and before.keys() == after.keys()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_one_rollout_may_serve_several_steps(make_trainer, make_nvfp4, read_metrics):
    trainer = make_trainer(
        make_nvfp4("qwen2"), noise_mode="both", **AQN, steps_per_generation=2, per_device_train_batch_size=4
    )
    trainer.train()
    records = read_metrics(trainer)
    assert [record["adapter_version"] for record in records] == [1, 1, 2, 2]
    assert [record["sigma"] for record in records] == [0.0, 0.0, 0.2, 0.2]
    assert ["reward" in record for record in records] == [True, False, True, False]
    mismatch = [record["logp_diff_mean"] for record in records]
    assert max(mismatch) < 0.05
    assert len(set(mismatch)) == 4  # each step measures its own completions


def test_the_norms_that_are_trained_are_those_of_noise_targets(make_trainer, make_nvfp4):
    trainer = make_trainer(make_nvfp4("qwen2"), train_norms=True, noise_targets=["input_layernorm"])
    trained = [name for name, weight in trainer.model.named_parameters() if weight.requires_grad and "norm" in name]
    assert len(trained) == 2 and all("input_layernorm" in name for name in trained), trained
