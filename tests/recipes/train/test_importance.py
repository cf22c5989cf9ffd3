"""Importance weights from the loss's own forward: TRL's numbers, with one forward less."""

import math
import types

import pytest
import torch

from qerl_recipes.train import importance

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def by_hand(differences, mode, smallest, largest):
    """The weights of one sequence, number by number."""
    known = [0.0 if math.isnan(difference) else difference for difference in differences]
    whole = [sum(known)] if mode.startswith("sequence") else known
    weights = [math.exp(difference) for difference in whole]
    low, high = smallest if smallest is not None else -math.inf, largest if largest is not None else math.inf
    if mode.endswith("mask"):
        return [weight if low <= weight <= high else 0.0 for weight in weights]
    return [min(max(weight, low), high) for weight in weights]


@pytest.mark.parametrize("limits", [(None, 2.0), (0.5, 2.0), (0.5, None), (None, None)], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_weights_are_those_worked_out_by_hand(mode, limits):
    generator = torch.Generator().manual_seed(0)
    logps, sampled = (-3 * torch.rand(5, 7, generator=generator) for _ in range(2))
    sampled[1, 2] = torch.nan  # the engine could not tell
    mask = (torch.arange(7) < torch.tensor([[7], [5], [1], [3], [6]])).long()
    found = importance.weights(logps, sampled, mask, mode, *limits)
    for row in range(5):
        differences = [float(d) if m else 0.0 for d, m in zip(logps[row] - sampled[row], mask[row], strict=True)]
        assert found[row].tolist() == pytest.approx(by_hand(differences, mode, *limits), rel=1e-5)


def test_differences_of_micro_batches_are_those_of_the_whole_batch():
    generator = torch.Generator().manual_seed(0)
    logps, sampled = (-3 * torch.rand(6, 7, generator=generator) for _ in range(2))
    sampled[4, 0] = torch.nan
    mask = (torch.arange(7) < torch.tensor([[7], [5], [1], [3], [6], [2]])).long()
    ratio = importance.weights(logps, sampled, mask, "token_truncate", None, 2.0)
    parts, differences = (slice(0, 1), slice(1, 4), slice(4, 6)), importance.Differences()
    for part in parts:
        differences.add(logps[part], sampled[part], mask[part], ratio[part])
    found = differences.take(lambda tensor: tensor)
    known = (logps - sampled).abs()[mask.bool() & ~sampled.isnan()]
    counted = ratio[mask.bool()]
    assert found == pytest.approx(
        {
            "sampling/sampling_logp_difference/mean": known.mean().item(),
            "sampling/sampling_logp_difference/max": known.max().item(),
            "sampling/importance_sampling_ratio/min": counted.min().item(),
            "sampling/importance_sampling_ratio/mean": counted.mean().item(),
            "sampling/importance_sampling_ratio/max": counted.max().item(),
        }
    )
    assert differences.take(lambda tensor: tensor) == {}


def test_a_weight_at_a_limit_is_kept():
    same, mask = torch.zeros(1, 3), torch.ones(1, 3)
    for limits in ((1.0, 2.0), (0.5, 1.0)):
        assert importance.weights(same, same, mask, "token_mask", *limits).tolist() == [[1.0, 1.0, 1.0]]


def test_what_tools_have_written_was_not_sampled():
    inputs = {"completion_mask": torch.tensor([[1, 1, 1, 0]]), "tool_mask": torch.tensor([[1, 0, 1, 1]])}
    assert importance.mask_of(inputs).tolist() == [[1, 0, 1, 0]]
    assert importance.mask_of({"completion_mask": inputs["completion_mask"]}).tolist() == [[1, 1, 1, 0]]


@pytest.mark.parametrize("length", [1, 3])
def test_weights_of_sequences_count_once_and_those_of_tokens_where_one_was_sampled(length):
    mask = torch.tensor([[1] * length, [0] * length, [1] + [0] * (length - 1)])
    logps, sampled = torch.full((3, length), -1.0), torch.full((3, length), -1.5)
    differences = importance.Differences()
    differences.add(logps, sampled, mask, torch.tensor([[0.5], [1.0], [3.0]]))
    found = differences.take(lambda tensor: tensor)
    weights = [found[f"sampling/importance_sampling_ratio/{name}"] for name in ("min", "mean", "max")]
    # one token a completion: sequence and token are the same, and a masked one has no weight
    assert weights == ([0.5, 1.75, 3.0] if length == 1 else [0.5, 1.5, 3.0])
    assert found["sampling/sampling_logp_difference/mean"] == 0.5


def test_differences_are_those_of_all_processes():
    gathered = []
    for shift, kept in ((0.25, [[1, 1]]), (1.0, [[1, 0]])):
        one, mask = importance.Differences(), torch.tensor(kept)
        logps, sampled = torch.full((1, 2), -1.0), torch.full((1, 2), -1.0 - shift)
        one.add(logps, sampled, mask, importance.weights(logps, sampled, mask, "token_truncate", None, 2.0))
        found = one.take(lambda own: gathered.append(own) or torch.cat(gathered))
    assert list(found.values()) == pytest.approx(
        [(0.25 + 0.25 + 1.0) / 3, 1.0, math.exp(0.25), (2 * math.exp(0.25) + 2.0) / 3, 2.0]
    )
    nothing = importance.Differences()
    nothing.add(logps, sampled, torch.zeros(1, 2), torch.ones(1, 2))
    assert nothing.take(lambda own: own) == {}, "a difference of 0 would say that they agree"


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_divergence_from_the_reference_is_the_estimate_k3(level):
    """J. Schulman, Approximating KL divergence (2020): r - 1 - log r, of r = reference over policy."""
    logps = torch.tensor([[-1.0, -2.0, 5.0], [-1.2, 5.0, 5.0]])
    reference = torch.tensor([[-1.5, -1.0, 0.0], [-1.2, 0.0, 0.0]])
    inputs = {"ref_per_token_logps": reference, "completion_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])}
    args = types.SimpleNamespace(use_bias_correction_kl=False, importance_sampling_level=level)

    def estimates():
        kl = importance.reference_kl(logps, inputs, args)["kl"]
        return [*kl[0, :2].tolist(), float(kl[1, 0])]

    k3 = [math.exp(-0.5) - 1 + 0.5, math.exp(1.0) - 1 - 1.0, 0.0]
    assert importance.reference_kl(logps, {}, args) == {}
    assert estimates() == pytest.approx(k3)
    args.use_bias_correction_kl = True
    assert estimates() == pytest.approx(k3), "the first step"
    reference[1, 0] = -0.2
    k3[2] = math.exp(1.0) - 1 - 1.0
    inputs["old_per_token_logps"] = torch.full((2, 3), -1.4)
    ratios = [math.exp(0.4), math.exp(-0.6), math.exp(0.2)]
    if level == "sequence":
        ratios[:2] = [math.exp(-0.1)] * 2
    assert estimates() == pytest.approx([estimate * ratio for estimate, ratio in zip(k3, ratios, strict=True)])
    args.use_bias_correction_kl = False
    assert estimates() == pytest.approx(k3)
    args.use_bias_correction_kl = True
    inputs["completion_mask"] = torch.zeros(2, 3)
    assert importance.reference_kl(logps, inputs, args)["kl"].isfinite().all()


def train(make_trainer, base, monkeypatch, *, ours, **settings):
    """Three steps -> the adapter, TRL's log, and how many forwards were made without a gradient."""
    trainer = make_trainer(base, noise_mode="corrected", sigma_start=0.2, sigma_end=0.2, num_stages=1, **settings)
    if not ours:
        monkeypatch.setattr(trainer, "score", super(type(trainer), trainer)._generate_and_score_completions)
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
    """In fp32, where the order of sums hardly shows; two micro-batches of two groups."""
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
    names = [name for name in their_logs[0] if name.startswith(importance.PREFIX)]
    assert len(names) == 6  # TRL's five, and the entropy of what was sampled
    for one, other in zip(our_logs, their_logs, strict=True):
        assert {n: one[n] for n in names} == pytest.approx({n: other[n] for n in names}, rel=2e-3, abs=1e-5)
    assert max(log["sampling/sampling_logp_difference/mean"] for log in our_logs) > 0.05  # there is something to weigh


@pytest.mark.slow
def test_a_rollout_for_several_steps_is_weighed_before_the_first(make_trainer, make_nvfp4, monkeypatch):
    settings = {"steps_per_generation": 2, "per_device_train_batch_size": 4, "max_steps": 2}
    _, logs, scored = train(make_trainer, make_nvfp4("qwen2"), monkeypatch, ours=True, **settings)
    assert scored > 0
    assert all(log["sampling/sampling_logp_difference/mean"] > 0 for log in logs)
