"""Test the loss in whole runs: with TRL's own weights and clipping, and without rows that have no advantage."""

import math
from dataclasses import replace

import pytest
import torch

from qerl_recipes.model.packing import pack
from qerl_recipes.train import loss
from qerl_recipes.train.trainer import QerlGRPOTrainer


def by_three(completions, **columns):
    return [float(i % 3) for i in range(len(completions))]


SEVERAL_STEPS = {"steps_per_generation": 4, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "dapo", "epsilon_high": 0.28},
        {"loss_type": "dr_grpo", "importance_sampling_level": "sequence", "epsilon": 0.005, "delta": 1.5},
        {"loss_type": "bnpo", "epsilon": 0.02, "delta": 1.01, "pack_tokens": 0},  # nothing is above 1 + epsilon
        {"loss_type": "cispo", "epsilon_high": 5.0},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_the_clipped_share_is_trls(settings, make_trainer, make_nvfp4, read_metrics):
    trainer = make_trainer(
        make_nvfp4("qwen2"), by_three, dtype=torch.float32, max_steps=6, learning_rate=3e-3, **SEVERAL_STEPS, **settings
    )
    logps, compute, forwards, trls = trainer._get_per_token_logps_and_entropies, trainer._compute_loss, [], []
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: forwards.append(logps(*a, **k)) or forwards[-1]

    def watch(model, inputs):
        value = compute(model, inputs)
        change = (forwards[-1][0].detach() - inputs["old_per_token_logps"])[trainer._micro_batch.computed()].abs()
        trls.append((trainer._metrics["train"].get("clip_ratio/region_mean", [None])[-1], change.mean().item()))
        return value

    trainer._compute_loss = watch
    trainer.train()
    records = read_metrics(trainer)
    for record, (clipped, change) in zip(records, trls, strict=True):
        if clipped is None:
            assert "clip_ratio" not in record
        else:
            assert record["clip_ratio"] == pytest.approx(clipped, abs=1e-6)
        assert record["logp_staleness_mean"] == pytest.approx(change, rel=1e-5, abs=1e-9)
    first, later = records[4]["logp_staleness_mean"], [record["logp_staleness_mean"] for record in records[5:]]
    assert first < 1e-5 < 1e-3 < min(later)
    if settings["loss_type"] in loss.CLIPPING_LOSSES:
        assert max(record["clip_ratio"] for record in records) > 0


# rows with an advantage of 0


SETTINGS = {"max_steps": 3, "learning_rate": 1e-3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}


def is_silent(prompt) -> bool:
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return sum(map(ord, text)) % 3 > 0


def uneven(prompts, completion_ids, **columns):
    """Give equal rewards to the answers of two of every three prompts."""
    return [
        1.0 if is_silent(prompt) else float(sum(ids) % 7) for prompt, ids in zip(prompts, completion_ids, strict=True)
    ]


def run(make_trainer, folder, output, **settings):
    trainer = make_trainer(folder, uneven, dtype=torch.float32, output_dir=str(output), **SETTINGS, **settings)
    seen, inner = [], trainer.compute_loss

    def watch(model, inputs, *args, **kwargs):
        seen.append(inputs)
        return inner(model, inputs, *args, **kwargs)

    trainer.compute_loss = watch
    trainer.train()
    weights = {
        name: weight.detach().clone() for name, weight in trainer.model.named_parameters() if weight.requires_grad
    }
    return trainer, seen, weights


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "grpo", "noise_mode": "both", "sigma_start": 0.1, "sigma_end": 0.1, "num_stages": 1},
        # several steps a rollout: ratios to old log-probabilities
        {"loss_type": "dapo", "num_iterations": 2, "importance_sampling_level": "sequence", "delta": 2.0},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_skipped_rows_change_neither_loss_nor_adapter(settings, make_trainer, make_nvfp4, read_metrics, tmp_path):
    runs = {}
    for skip in (False, None):
        output = tmp_path / str(skip)
        trainer, _, weights = run(make_trainer, make_nvfp4("qwen2"), output, skip_zero_advantage=skip, **settings)
        runs[skip] = read_metrics(trainer), weights
    left_out = [step.pop("frac_zero_advantage") for step in runs[None][0]]
    assert all("frac_zero_advantage" not in step for step in runs[False][0])
    assert 0 < sum(left_out) < len(left_out)
    for whole, part in zip(runs[False][0], runs[None][0], strict=True):
        assert whole.keys() == part.keys()
        assert whole.get("reward") == part.get("reward")  # later steps of a rollout report no reward
        for name in ("loss", "grad_norm"):
            assert math.isclose(whole[name], part[name], rel_tol=1e-4, abs_tol=1e-6), name
    for name, weight in runs[False][1].items():
        torch.testing.assert_close(runs[None][1][name], weight, rtol=0, atol=2e-5, msg=name)


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "grpo", "num_iterations": 2},
        {"loss_type": "bnpo", "vllm_importance_sampling_mode": "sequence_mask"},
        {"loss_type": "dr_grpo", "importance_sampling_level": "sequence", "delta": 2.0},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_skipped_rows_change_no_bit_of_a_gradient(settings, make_trainer, make_nvfp4, monkeypatch, tmp_path):
    """Check that a row without advantage adds an exact zero to the gradient.

    Skipping it in a model changes only the order of sums.
    """
    trainer, seen, _ = run(make_trainer, make_nvfp4("qwen2"), tmp_path, **settings)
    inputs = next(one for one in seen if 0 < int((one["advantages"] == 0).sum()) < len(one["advantages"]))
    assert trainer.loss_settings.skips_zero_advantage
    loud = inputs["advantages"] != 0
    away = 0.3 * torch.randn(inputs["sampling_per_token_logps"].shape, generator=torch.Generator().manual_seed(0))
    given = inputs["sampling_per_token_logps"].nan_to_num() + away
    results = []
    for skip in (False, True):
        logps = given.clone().requires_grad_()
        entropies = logps.detach() ** 2
        settings = replace(trainer.loss_settings, skips_zero_advantage=skip)
        monkeypatch.setattr(trainer, "loss_settings", settings)
        monkeypatch.setattr(
            "qerl_recipes.model.logprobs.completion_logprobs", lambda *a, values=(logps, entropies), **k: values
        )
        value = trainer.compute_loss(trainer.model, {**inputs})
        value.backward()
        results.append((value.detach(), logps.grad))
    (whole, of_all), (part, of_some) = results
    assert torch.equal(whole, part) and whole != 0
    assert torch.equal(of_all, of_some) and bool(of_all[loud].any())
    assert not of_all[~loud].any()


def test_figures_are_of_the_rows_that_are_computed(make_trainer, make_nvfp4, read_metrics, monkeypatch, tmp_path):
    packed, entropies, compared = [], [], []
    inner_logps, agreement = QerlGRPOTrainer._get_per_token_logps_and_entropies, loss.agreement

    def logps_and_entropies(*args, **keywords):
        results = inner_logps(*args, **keywords)
        entropies.append(results[1].detach())
        return results

    def compare(logps, sampled, mask, weights):
        compared.append(int(mask.sum()))
        return agreement(logps, sampled, mask, weights)

    monkeypatch.setattr(loss, "pack", lambda *a, **k: packed.append(pack(*a, **k)) or packed[-1])
    monkeypatch.setattr(QerlGRPOTrainer, "_get_per_token_logps_and_entropies", logps_and_entropies)
    monkeypatch.setattr(loss, "agreement", compare)
    trainer, seen, _ = run(make_trainer, make_nvfp4("qwen2"), tmp_path / "run", pack_tokens=4096)
    records, micro_batches = read_metrics(trainer), SETTINGS["gradient_accumulation_steps"]
    assert len(seen) == len(packed) == len(entropies) == len(compared) == micro_batches * len(records)
    some_were_empty = False
    for step, record in enumerate(records):
        rows, tokens, total = 0, 0, 0.0
        sampled = [loss.mask_of(seen[i]) for i in range(step * micro_batches, (step + 1) * micro_batches)]
        of_all = [(seen[step * micro_batches + i]["sampling_per_token_logps"] * m).sum() for i, m in enumerate(sampled)]
        estimate = -float(sum(of_all)) / int(sum(m.sum() for m in sampled))
        assert record["sampled_entropy"] == pytest.approx(estimate, rel=1e-5)  # includes rows without advantage
        for i in range(step * micro_batches, (step + 1) * micro_batches):
            loud = seen[i]["advantages"] != 0
            if not loud.any():  # one row stays, so that there is something to compare
                some_were_empty = loud[0] = True
            rows += int((~loud).sum())
            mask = loss.mask_of(seen[i]) * loud[:, None]
            assert sum(len(row.targets) for row in packed[i]) == compared[i] == mask.sum() > 0
            tokens, total = tokens + int(mask.sum()), total + float((entropies[i] * mask).sum())
        assert record["frac_zero_advantage"] == pytest.approx(rows / (4 * micro_batches))
        assert record["entropy"] == pytest.approx(total / tokens, rel=1e-5)
        assert 0 < record["logp_diff_mean"] < 1e-4
    assert some_were_empty, "no micro-batch was without an advantage: this test proves less than it says"


def test_without_any_advantage_the_first_row_is_compared(make_trainer, make_nvfp4, read_metrics, tmp_path):
    mask = torch.tensor([[0, 0], [1, 0], [1, 1]])
    assert loss.zero_advantage(torch.zeros(3), mask).tolist() == [True, False, True]
    assert loss.zero_advantage(torch.tensor([0.0, 0.0, 2.0]), mask).tolist() == [True, True, False]

    def equal(prompts, **columns):
        return [1.0] * len(prompts)

    trainer = make_trainer(make_nvfp4("qwen2"), equal, dtype=torch.float32, output_dir=str(tmp_path), **SETTINGS)
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    trainer.train()
    for record in read_metrics(trainer):
        assert 0 < record["logp_diff_mean"] < 1e-4  # 0 would mean that nothing was compared
        assert record["loss"] == record["grad_norm"] == 0
        assert record["frac_zero_advantage"] == 0.75
    assert all(torch.equal(dict(trainer.model.named_parameters())[name], weight) for name, weight in before.items())


# whole runs with TRL's own weights


def train(make_trainer, base, monkeypatch, *, ours, **settings):
    """Train three steps, and return the adapter, TRL's log and the number of forwards without a gradient."""
    trainer = make_trainer(base, noise_mode="engine_is", sigma_start=0.2, sigma_end=0.2, num_stages=1, **settings)
    if not ours:
        monkeypatch.setattr(trainer, "score", super(type(trainer), trainer)._generate_and_score_completions)
        monkeypatch.setattr(trainer, "_end_turns", lambda: None)
    forwards, inner = [], trainer.model.forward

    def watch(*args, **kwargs):
        forwards.append(torch.is_grad_enabled())
        return inner(*args, **kwargs)

    monkeypatch.setattr(trainer.model, "forward", watch)
    trainer.train()
    adapter = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return adapter, logs, forwards.count(False)


@pytest.mark.parametrize(
    ("mode", "pack_tokens"), [("token_truncate", 4096), pytest.param("sequence_mask", 0, marks=pytest.mark.slow)]
)
def test_a_run_is_the_one_with_trls_own_weights(mode, pack_tokens, make_trainer, make_nvfp4, monkeypatch):
    """Compare with TRL in fp32, where the order of sums hardly shows, on two micro-batches of two groups."""
    settings = {
        "vllm_importance_sampling_mode": mode,
        "pack_tokens": pack_tokens,
        "dtype": torch.float32,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "loss_type": "dapo",
    }
    base = make_nvfp4("qwen2")
    ours, our_logs, scored = train(make_trainer, base, monkeypatch, ours=True, **settings)
    theirs, their_logs, scored_by_trl = train(make_trainer, base, monkeypatch, ours=False, **settings)
    assert scored == 0 < scored_by_trl
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).norm() <= 1e-3 * tensor.norm(), name
    names = [name for name in their_logs[0] if name.startswith("sampling/")]
    assert len(names) == 6  # TRL's five, and the entropy of the samples
    for one, other in zip(our_logs, their_logs, strict=True):
        assert {n: one[n] for n in names} == pytest.approx({n: other[n] for n in names}, rel=2e-3, abs=1e-5)
    assert max(log["sampling/sampling_logp_difference/mean"] for log in our_logs) > 0.05  # so weights differ from 1
