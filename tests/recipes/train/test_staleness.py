"""How far the policy has gone since a rollout's first optimizer step: counted over tokens, beside TRL's own figure."""

import pytest
import torch

from qerl_recipes.recipe.configs import GRPOConfig
from qerl_recipes.train import staleness


def rewards(completions, **columns):
    return [float(i % 3) for i in range(len(completions))]


SEVERAL_STEPS = {"steps_per_generation": 4, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "grpo"},
        {"loss_type": "dapo", "epsilon_high": 0.28},
        {"loss_type": "dr_grpo", "importance_sampling_level": "sequence", "epsilon": 0.005, "delta": 1.5},
        {"loss_type": "bnpo", "epsilon": 0.02, "delta": 1.01, "pack_tokens": 0},  # nothing is above 1 + epsilon
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss_type": "sapo"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_the_clipped_share_is_trls_and_the_difference_is_of_the_computed_tokens(
    settings, make_trainer, make_nvfp4, read_metrics
):
    trainer = make_trainer(
        make_nvfp4("qwen2"), rewards, dtype=torch.float32, max_steps=8, learning_rate=3e-3, **SEVERAL_STEPS, **settings
    )
    logps, compute, forwards, trls = trainer._get_per_token_logps_and_entropies, trainer._compute_loss, [], []
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: forwards.append(logps(*a, **k)) or forwards[-1]

    def watch(model, inputs):
        loss = compute(model, inputs)
        here = inputs["completion_mask"].bool()
        if "left_out" in inputs:
            here = here & ~inputs["left_out"][:, None]
        change = (forwards[-1][0].detach() - inputs["old_per_token_logps"])[here].abs()
        trls.append((trainer._metrics["train"].get("clip_ratio/region_mean", [None])[-1], change.mean().item()))
        return loss

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
    if settings["loss_type"] in staleness.CLIPPING_LOSSES:
        assert max(record["clip_ratio"] for record in records) > 0


def test_a_step_weighs_its_micro_batches_by_tokens(make_trainer, make_nvfp4, read_metrics):
    """One completion a micro-batch, most of them masked: the mean of means is another number."""
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "steps_per_generation": 16}
    settings |= {"mask_truncated_completions": True, "learning_rate": 1e-2, "epsilon": 0.01, "loss_type": "grpo"}
    trainer = make_trainer(make_nvfp4("qwen2"), rewards, dtype=torch.float32, max_steps=4, **settings)
    logps, compute, forwards, seen = trainer._get_per_token_logps_and_entropies, trainer._compute_loss, [], []
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: forwards.append(logps(*a, **k)) or forwards[-1]

    def watch(model, inputs):
        loss = compute(model, inputs)
        mask, advantage = inputs["completion_mask"].bool()[0], inputs["advantages"].item()
        change = (forwards[-1][0].detach() - inputs["old_per_token_logps"])[0][mask]
        clipped = (change.exp() > 1.01) if advantage > 0 else (change.exp() < 0.99)
        seen.append((float(clipped.sum()) if advantage else 0.0, int(mask.sum())))
        return loss

    trainer._compute_loss = watch
    trainer.train()
    steps = [seen[first : first + 8] for first in range(0, 32, 8)]
    assert any(0 < tokens < 12 for step in steps for _, tokens in step)
    counted = 0
    for record, step in zip(read_metrics(trainer), steps, strict=True):
        if tokens := sum(number for _, number in step):
            assert record["clip_ratio"] == pytest.approx(sum(total for total, _ in step) / tokens, abs=1e-6)
            counted += record["clip_ratio"] > 0
        else:
            assert not {"logp_staleness_mean", "clip_ratio"} & record.keys()
    assert counted


def test_a_rollout_for_one_step_has_no_staleness(make_trainer, make_nvfp4, read_metrics):
    trainer = make_trainer(make_nvfp4("qwen2"), rewards, max_steps=1)
    trainer.train()
    assert not {"logp_staleness_mean", "clip_ratio"} & read_metrics(trainer)[0].keys()


def test_rows_that_are_left_out_count_for_the_share_and_not_for_the_difference():
    """By hand: two rows of three tokens, one without advantage, the last token of the other masked."""
    old = torch.log(torch.tensor([[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]))
    now = torch.log(torch.tensor([[0.75, 0.5, 0.9], [0.9, 0.9, 0.9]]))
    inputs = {
        "completion_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
        "advantages": torch.tensor([1.0, 0.0]),
        "old_per_token_logps": old,
        "left_out": torch.tensor([False, True]),
    }
    found = staleness.measured(now, inputs, GRPOConfig(output_dir="unused", loss_type="grpo", use_cpu=True, bf16=False))
    total, number = found[staleness.DIFFERENCE]
    assert (number.item(), total.item()) == (2, pytest.approx(0.405465, abs=1e-5))  # log 1.5
    assert [float(x) for x in found[staleness.CLIPPED]] == [1.0, 5.0]
