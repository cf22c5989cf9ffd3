"""Completions without an advantage are not computed, and nothing but the figures of what is computed can tell."""

import math

import pytest
import torch

from qerl_recipes.model.packing import even_micro_batches, pack
from qerl_recipes.recipe.checks import needs_every_completion
from qerl_recipes.recipe.configs import GRPOConfig, parse
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.train import silent_rows
from qerl_recipes.train.importance import Differences, mask_of
from qerl_recipes.train.trainer import QerlGRPOTrainer
from qerl_recipes.train.validate import validate

SETTINGS = {"max_steps": 3, "learning_rate": 1e-3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}


def is_silent(prompt) -> bool:
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return sum(map(ord, text)) % 3 > 0


def uneven(prompts, completion_ids, **columns):
    """Two of three prompts have equal rewards."""
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
        {"loss_type": "dapo"},
        {"loss_type": "grpo", "noise_mode": "shared", "sigma_start": 0.1, "sigma_end": 0.1, "num_stages": 1},
        {"loss_type": "dr_grpo", "num_iterations": 2},  # several steps a rollout: ratios to log-probabilities before
        {"loss_type": "dapo", "importance_sampling_level": "sequence", "delta": 2.0},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_loss_gradient_and_adapter_are_those_of_all_rows(settings, make_trainer, make_nvfp4, read_metrics, tmp_path):
    runs = {}
    for skip in (False, None):
        output = tmp_path / str(skip)
        trainer, _, weights = run(make_trainer, make_nvfp4("qwen2"), output, skip_silent_rows=skip, **settings)
        runs[skip] = read_metrics(trainer), weights
    left_out = [step.pop("silent_rows") for step in runs[None][0]]
    assert all("silent_rows" not in step for step in runs[False][0])
    assert 0 < sum(left_out) < len(left_out)
    for whole, part in zip(runs[False][0], runs[None][0], strict=True):
        assert whole.keys() == part.keys()
        assert whole.get("reward") == part.get("reward")  # later steps of a rollout have none
        for name in ("loss", "grad_norm"):
            assert math.isclose(whole[name], part[name], rel_tol=1e-4, abs_tol=1e-6), name
    for name, weight in runs[False][1].items():
        torch.testing.assert_close(runs[None][1][name], weight, rtol=0, atol=2e-5, msg=name)


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "dapo"},
        {"loss_type": "grpo", "num_iterations": 2},
        {"loss_type": "bnpo", "vllm_importance_sampling_mode": "sequence_mask"},
        {"loss_type": "dr_grpo", "importance_sampling_level": "sequence", "delta": 2.0},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_given_the_same_log_probabilities_loss_and_gradient_are_equal_to_the_bit(
    settings, make_trainer, make_nvfp4, monkeypatch, tmp_path
):
    """What a row without advantage adds is an exact zero: the rest is the order in which a model adds up."""
    trainer, seen, _ = run(make_trainer, make_nvfp4("qwen2"), tmp_path, **settings)
    inputs = next(one for one in seen if 0 < int((one["advantages"] == 0).sum()) < len(one["advantages"]))
    assert trainer.loss_forward.skips_silent_rows
    loud = inputs["advantages"] != 0
    away = 0.3 * torch.randn(inputs["sampling_per_token_logps"].shape, generator=torch.Generator().manual_seed(0))
    given = inputs["sampling_per_token_logps"].nan_to_num() + away
    results = []
    for skip in (False, True):
        logps = given.clone().requires_grad_()
        entropies = logps.detach() ** 2
        monkeypatch.setattr(trainer.loss_forward, "skips_silent_rows", skip)
        monkeypatch.setattr(
            "qerl_recipes.model.logprobs.completion_logprobs", lambda *a, values=(logps, entropies), **k: values
        )
        monkeypatch.setattr(trainer.recorder, "add", lambda *a: None)
        loss = trainer.compute_loss(trainer.model, {**inputs})
        loss.backward()
        results.append((loss.detach(), logps.grad))
    (whole, of_all), (part, of_some) = results
    assert torch.equal(whole, part) and whole != 0
    assert torch.equal(of_all, of_some) and bool(of_all[loud].any())
    assert not of_all[~loud].any()


def test_what_is_measured_is_of_the_rows_that_are_computed_and_says_their_share(
    make_trainer, make_nvfp4, read_metrics, monkeypatch, tmp_path
):
    packed, entropies, compared = [], [], []
    inner_logps, inner_add = QerlGRPOTrainer._get_per_token_logps_and_entropies, Differences.add

    def logps_and_entropies(*args, **keywords):
        results = inner_logps(*args, **keywords)
        entropies.append(results[1].detach())
        return results

    def add(self, logps, sampled, mask, ratio):
        compared.append(int(mask.sum()))
        inner_add(self, logps, sampled, mask, ratio)

    monkeypatch.setattr(
        "qerl_recipes.train.loss_forward.pack", lambda *a, **k: packed.append(pack(*a, **k)) or packed[-1]
    )
    monkeypatch.setattr(QerlGRPOTrainer, "_get_per_token_logps_and_entropies", logps_and_entropies)
    monkeypatch.setattr(Differences, "add", add)
    trainer, seen, _ = run(make_trainer, make_nvfp4("qwen2"), tmp_path / "run", pack_tokens=4096)
    records, micro_batches = read_metrics(trainer), SETTINGS["gradient_accumulation_steps"]
    assert len(seen) == len(packed) == len(entropies) == len(compared) == micro_batches * len(records)
    some_were_empty = False
    for step, record in enumerate(records):
        rows, tokens, total = 0, 0, 0.0
        sampled = [mask_of(seen[i]) for i in range(step * micro_batches, (step + 1) * micro_batches)]
        of_all = [(seen[step * micro_batches + i]["sampling_per_token_logps"] * m).sum() for i, m in enumerate(sampled)]
        estimate = -float(sum(of_all)) / int(sum(m.sum() for m in sampled))
        assert record["sampled_entropy"] == pytest.approx(estimate, rel=1e-5)  # silent rows too
        for i in range(step * micro_batches, (step + 1) * micro_batches):
            loud = seen[i]["advantages"] != 0
            if not loud.any():  # one row stays, so that there is something to compare
                some_were_empty = loud[0] = True
            rows += int((~loud).sum())
            mask = mask_of(seen[i]) * loud[:, None]
            assert sum(len(row.targets) for row in packed[i]) == compared[i] == mask.sum() > 0
            tokens, total = tokens + int(mask.sum()), total + float((entropies[i] * mask).sum())
        assert record["silent_rows"] == pytest.approx(rows / (4 * micro_batches))
        assert record["entropy"] == pytest.approx(total / tokens, rel=1e-5)
        assert 0 < record["logp_mismatch_mean"] < 1e-4
    assert some_were_empty, "no micro-batch was without an advantage: this test proves less than it says"


def test_without_any_advantage_the_first_row_with_tokens_is_compared_and_nothing_is_learnt(
    make_trainer, make_nvfp4, read_metrics, tmp_path
):
    inputs = {"advantages": torch.zeros(3), "completion_mask": torch.tensor([[0, 0], [1, 0], [1, 1]])}
    assert silent_rows.silent(inputs).tolist() == [True, False, True]
    inputs["advantages"] = torch.tensor([0.0, 0.0, 2.0])
    assert silent_rows.silent(inputs).tolist() == [True, True, False]

    def equal(prompts, **columns):
        return [1.0] * len(prompts)

    trainer = make_trainer(make_nvfp4("qwen2"), equal, dtype=torch.float32, output_dir=str(tmp_path), **SETTINGS)
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    trainer.train()
    for record in read_metrics(trainer):
        assert 0 < record["logp_mismatch_mean"] < 1e-4  # 0 would be a comparison of nothing
        assert record["loss"] == record["grad_norm"] == 0
        assert record["silent_rows"] == 0.75
    assert all(torch.equal(dict(trainer.model.named_parameters())[name], weight) for name, weight in before.items())


def test_a_step_without_a_token_has_no_difference():
    differences, nothing = Differences(), torch.zeros(1, 2)
    differences.add(nothing, nothing, nothing, torch.ones(1, 2))
    assert differences.take(lambda tensor: tensor) == {}


def test_constants_give_a_ratio_of_one_and_leave_the_mean_entropy_as_it_is():
    logps, entropies = torch.tensor([[-1.0, -2.0], [0.0, 0.0]]), torch.tensor([[0.5, 1.5], [0.0, 0.0]])
    inputs = {
        "completion_mask": torch.ones(2, 2),
        "sampling_per_token_logps": torch.tensor([[-9.0, -9], [-3, math.nan]]),
    }
    left_out = torch.tensor([False, True])
    found, filled = silent_rows.with_constants(logps, entropies, inputs, left_out)
    assert found.tolist() == [[-1.0, -2.0], [-3.0, 0.0]]
    assert filled.tolist() == [[0.5, 1.5], [1.0, 1.0]]
    inputs["old_per_token_logps"] = torch.tensor(
        [[-9.0, -9], [-50, -60]]
    )  # exp(0 - -60) would overflow in half precision
    assert silent_rows.with_constants(logps, entropies, inputs, left_out)[0][1].tolist() == [-50.0, -60.0]
    assert silent_rows.with_constants(logps, entropies, inputs, torch.tensor([True, True]))[1].isnan().all()


def test_micro_batches_are_even_in_what_is_computed():
    lengths, advantages = [7, 1, 1, 1, 6, 6, 1, 1], [0, 0, 0, 0, 1.0, -1.0, 1.0, -1.0]
    mask = torch.tensor([[1] * length + [0] * (8 - length) for length in lengths])
    batch = {
        "prompt_ids": torch.arange(8)[:, None],
        "prompt_mask": torch.ones(8, 1, dtype=torch.long),
        "completion_ids": torch.ones(8, 8, dtype=torch.long),
        "completion_mask": mask,
        "advantages": torch.tensor(advantages),
    }
    halves = [{key: value[i : i + 4] for key, value in batch.items()} for i in (0, 4)]
    for skips in (False, True):
        dealt = even_micro_batches(halves, 2, skips_silent_rows=skips)
        loud = [int((part["completion_mask"].sum(1) * (part["advantages"] != 0)).sum()) for part in dealt]
        assert sorted(torch.cat([part["prompt_ids"] for part in dealt]).flatten().tolist()) == list(range(8))
        assert (loud == [7, 7]) == skips, loud


REASONS = {
    "pack_tokens": 0,
    "beta": 0.1,
    "entropy_coef": 0.01,
    "top_entropy_quantile": 0.2,
    "off_policy_mask_threshold": 0.5,
    "loss_type": "vespo",
}


@pytest.mark.parametrize("key", REASONS)
def test_asked_for_where_silent_rows_count_it_is_refused_by_name(key, write_recipe):
    with pytest.raises(ConfigError, match=f"skip_silent_rows: true cannot go with {key}"):
        validate(*parse(["--config", write_recipe(skip_silent_rows=True, **{key: REASONS[key]})]))


def test_an_ordinary_recipe_has_no_reason_to_keep_them():
    assert needs_every_completion(GRPOConfig(output_dir="unused", use_cpu=True, bf16=False)) is None
