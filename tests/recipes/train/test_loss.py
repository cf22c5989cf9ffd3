"""Test the loss's tensors against values worked out by hand, and in whole runs.

Covered are rows without an advantage, importance weights, staleness and KL.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from qerl_recipes.model.packing import pack
from qerl_recipes.recipe.configs import GRPOConfig, parse
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.train import loss, metrics
from qerl_recipes.train.preflight import check
from qerl_recipes.train.trainer import QerlGRPOTrainer

NAN = math.nan
ARGS = GRPOConfig(output_dir="unused", loss_type="grpo", use_cpu=True, bf16=False)
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def micro_batch(mask, **values):
    """Return a micro-batch whose other tensors are zeros, unless ``values`` has them."""
    mask = torch.tensor(mask)
    zeros = {"sampled": torch.zeros(mask.shape), "advantages": torch.zeros(len(mask)), "lengths": mask.sum(dim=1)}
    return loss.MicroBatch(mask, **{**zeros, **values})


def figures(*measured):
    """Return the figures of a step of one process from those of its micro-batches."""
    sums = metrics.StepSums()
    for each in measured:
        sums.add(each)
    return sums.take(lambda own: own, torch.device("cpu"))


# importance weights


def by_hand(differences, mode, smallest, largest):
    """Compute the importance weights of one sequence number by number."""
    known = [0.0 if math.isnan(difference) else difference for difference in differences]
    whole = [sum(known)] if mode.startswith("sequence") else known
    weights = [math.exp(difference) for difference in whole]
    low, high = smallest if smallest is not None else -math.inf, largest if largest is not None else math.inf
    if mode.endswith("mask"):
        return [weight if low <= weight <= high else 0.0 for weight in weights]
    return [min(max(weight, low), high) for weight in weights]


@pytest.mark.parametrize("limits", [(None, 2.0), (0.5, 2.0), (0.5, None), (None, None)], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_weights_by_hand(mode, limits):
    generator = torch.Generator().manual_seed(0)
    logps, sampled = (-3 * torch.rand(5, 7, generator=generator) for _ in range(2))
    sampled[1, 2] = torch.nan  # the engine reported no log-probability
    mask = (torch.arange(7) < torch.tensor([[7], [5], [1], [3], [6]])).long()
    found = loss.importance_weights(logps, sampled, mask, mode, *limits)
    for row in range(5):
        differences = [float(d) if m else 0.0 for d, m in zip(logps[row] - sampled[row], mask[row], strict=True)]
        assert found[row].tolist() == pytest.approx(by_hand(differences, mode, *limits), rel=1e-5)


def test_micro_batches_are_measured_as_the_whole_batch():
    generator = torch.Generator().manual_seed(0)
    logps, sampled = (-3 * torch.rand(6, 7, generator=generator) for _ in range(2))
    sampled[4, 0] = torch.nan
    mask = (torch.arange(7) < torch.tensor([[7], [5], [1], [3], [6], [2]])).long()
    weights = loss.importance_weights(logps, sampled, mask, "token_truncate", None, 2.0)
    parts = (slice(0, 1), slice(1, 4), slice(4, 6))
    measured = [loss.agreement(logps[part], sampled[part], mask[part], weights[part]) for part in parts]
    known, counted = (logps - sampled).abs()[mask.bool() & ~sampled.isnan()], weights[mask.bool()]
    assert figures(*measured) == pytest.approx(
        {
            "sampling/sampling_logp_difference/mean": known.mean().item(),
            "sampling/sampling_logp_difference/max": known.max().item(),
            "sampling/importance_sampling_ratio/min": counted.min().item(),
            "sampling/importance_sampling_ratio/mean": counted.mean().item(),
            "sampling/importance_sampling_ratio/max": counted.max().item(),
        }
    )


def test_a_weight_at_a_limit_is_kept():
    same, mask = torch.zeros(1, 3), torch.ones(1, 3)
    for limits in ((1.0, 2.0), (0.5, 1.0)):
        assert loss.importance_weights(same, same, mask, "token_mask", *limits).tolist() == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize("weighs", [True, False])
def test_without_the_correction_weights_are_one_and_measured(weighs):
    limits = {"vllm_importance_sampling_clip_min": 0.75, "vllm_importance_sampling_clip_max": 1.5}
    args = replace_args(vllm_importance_sampling_correction=weighs, **limits)
    weights, measured = loss.weigh(torch.tensor([[1.0, -1.0]]), micro_batch([[1, 1]]), args)
    assert weights.tolist() == ([[1.5, 0.75]] if weighs else [[1.0, 1.0]])
    assert figures(measured)["sampling/importance_sampling_ratio/mean"] == 1.125


def replace_args(**changes):
    return SimpleNamespace(**{**vars(ARGS), **changes})


OF_SAMPLED = {
    "importance weights by token": {"vllm_importance_sampling_mode": "token_truncate"},
    "importance weights by sequence": {"vllm_importance_sampling_mode": "sequence_mask"},
    "entropy and KL": {"use_bias_correction_kl": True, "importance_sampling_level": "sequence"},
    "staleness": {"loss_type": "dapo"},
}


@pytest.mark.parametrize("case", OF_SAMPLED)
def test_figures_do_not_depend_on_what_tools_have_written(case):
    """Change every value at a tool's tokens, and compare all figures, and the weights of sampled tokens."""
    args = replace_args(**{"vllm_importance_sampling_clip_max": 2.0, **OF_SAMPLED[case]})
    generator = torch.Generator().manual_seed(0)
    names = ("sampling_per_token_logps", "old_per_token_logps", "ref_per_token_logps", "logps", "entropies")
    values = {name: -3 * torch.rand(3, 6, generator=generator) for name in names}
    whole, of_tool = torch.ones(3, 6, dtype=torch.long), torch.tensor([[0, 0, 1, 1, 0, 0]] * 2 + [[0] * 6]).bool()

    def measured(shift):
        batch = {name: torch.where(of_tool, value * shift, value) for name, value in values.items()}
        batch |= {"completion_mask": whole, "tool_mask": (~of_tool).long(), "prompt_mask": whole}
        batch["advantages"] = torch.tensor([1.0, -1.0, 0.5])
        micro, logps = loss.MicroBatch.of(batch, skips_zero_advantage=True), batch["logps"]
        weights, agreement = loss.weigh(logps, micro, args)
        means = loss.token_means(logps, batch["entropies"], micro, args)
        counted = weights if weights.shape[1] == 1 else weights[~of_tool]
        return figures(agreement, loss.sampled_entropy(micro), means), counted.tolist()

    found = measured(1.0)
    assert found == measured(7.0) and len(found[0]) >= 8


@pytest.mark.parametrize("length", [1, 3])
def test_weights_of_sequences_count_once(length):
    mask = torch.tensor([[1] * length, [0] * length, [1] + [0] * (length - 1)])
    logps, sampled = torch.full((3, length), -1.0), torch.full((3, length), -1.5)
    found = figures(loss.agreement(logps, sampled, mask, torch.tensor([[0.5], [1.0], [3.0]])))
    weights = [found[f"sampling/importance_sampling_ratio/{name}"] for name in ("min", "mean", "max")]
    # With one token a completion, sequence and token weights are equal, and a masked token has no weight.
    assert weights == ([0.5, 1.75, 3.0] if length == 1 else [0.5, 1.5, 3.0])
    assert found["sampling/sampling_logp_difference/mean"] == 0.5


@pytest.mark.parametrize("sampled", [0.0, NAN])
def test_a_step_without_a_token_to_compare_has_no_difference(sampled):
    """Check that nothing is reported where nothing can be compared.

    A difference of 0, or a sequence weight of 1, would say that engine and trainer agree.
    """
    logps, sampled, mask = torch.zeros(1, 2), torch.full((1, 2), sampled), torch.full((1, 2), int(sampled != 0.0))
    for weights in (torch.ones(1, 2), torch.ones(1, 1)):
        assert figures(loss.agreement(logps, sampled, mask, weights)) == {}


# KL and staleness


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_kl_to_the_reference_is_the_estimate_k3(level):
    """Compare with the k3 estimate r - 1 - log r, where r is reference over policy.

    The source is J. Schulman, Approximating KL divergence (2020).
    """
    logps = torch.tensor([[-1.0, -2.0, 5.0], [-1.2, 5.0, 5.0]])
    reference = torch.tensor([[-1.5, -1.0, 0.0], [-1.2, 0.0, 0.0]])
    batch = micro_batch([[1, 1, 0], [1, 0, 0]], reference=reference)

    def estimates(batch, corrected):
        args = SimpleNamespace(use_bias_correction_kl=corrected, importance_sampling_level=level)
        kl = loss.reference_kl(logps, batch, args)
        return [*kl[0, :2].tolist(), float(kl[1, 0])]

    k3 = [math.exp(-0.5) - 1 + 0.5, math.exp(1.0) - 1 - 1.0, 0.0]
    assert estimates(batch, False) == pytest.approx(k3)
    assert estimates(batch, True) == pytest.approx(k3), "the first step"
    reference[1, 0] = -0.2
    k3[2] = math.exp(1.0) - 1 - 1.0
    later = replace(batch, old=torch.full((2, 3), -1.4))
    ratios = [math.exp(0.4), math.exp(-0.6), math.exp(0.2)]
    if level == "sequence":
        ratios[:2] = [math.exp(-0.1)] * 2
    assert estimates(later, True) == pytest.approx([k * ratio for k, ratio in zip(k3, ratios, strict=True)])
    assert estimates(later, False) == pytest.approx(k3)
    args = SimpleNamespace(use_bias_correction_kl=True, importance_sampling_level=level)
    assert loss.reference_kl(logps, replace(later, mask=torch.zeros(2, 3)), args).isfinite().all()


def test_skipped_rows_count_for_the_clipped_share_alone():
    """Compare with values worked out by hand for two rows of three tokens.

    One row has no advantage; the last token of the other is masked.
    """
    old = torch.log(torch.tensor([[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]))
    now = torch.log(torch.tensor([[0.75, 0.5, 0.9], [0.9, 0.9, 0.9]]))
    advantages, skipped = torch.tensor([1.0, 0.0]), torch.tensor([False, True])
    batch = micro_batch([[1, 1, 0], [1, 1, 1]], advantages=advantages, old=old, skipped=skipped)
    found = loss.staleness(now, batch, ARGS)
    total, number = found[loss.STALENESS]
    assert (number.item(), total.item()) == (2, pytest.approx(0.405465, abs=1e-5))  # log 1.5
    assert [float(x) for x in found[loss.STALE_CLIPPED]] == [1.0, 5.0]
    assert loss.staleness(now, replace(batch, old=None), ARGS) == {}, "a rollout that serves one step has none"


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


def test_constants_give_ratios_of_one_and_keep_the_mean_entropy():
    logps, entropies = torch.tensor([[-1.0, -2.0], [0.0, 0.0]]), torch.tensor([[0.5, 1.5], [0.0, 0.0]])
    sampled, skipped = torch.tensor([[-9.0, -9], [-3, NAN]]), torch.tensor([False, True])
    batch = micro_batch([[1, 1], [1, 1]], sampled=sampled, skipped=skipped)
    filled, mean = loss.fill_skipped(logps, entropies, batch)
    assert filled.tolist() == [[-1.0, -2.0], [-3.0, 0.0]]
    assert mean.tolist() == [[0.5, 1.5], [1.0, 1.0]]
    old = torch.tensor([[-9.0, -9], [-50, -60]])  # exp(0 - -60) would overflow in half precision
    assert loss.fill_skipped(logps, entropies, replace(batch, old=old))[0][1].tolist() == [-50.0, -60.0]
    assert loss.fill_skipped(logps, entropies, replace(batch, skipped=torch.tensor([True, True])))[1].isnan().all()
    assert loss.fill_skipped(logps, entropies, replace(batch, skipped=None)) == (logps, entropies)


REASONS = {
    "pack_tokens": 0,
    "beta": 0.1,
    "entropy_coef": 0.01,
    "top_entropy_quantile": 0.2,
    "off_policy_mask_threshold": 0.5,
    "loss_type": "vespo",
}


@pytest.mark.parametrize("key", REASONS)
def test_skipping_where_every_row_counts_is_refused(key, write_recipe):
    with pytest.raises(ConfigError, match=f"skip_zero_advantage: true cannot go with {key}"):
        check(*parse(["--config", write_recipe(skip_zero_advantage=True, **{key: REASONS[key]})]))


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
