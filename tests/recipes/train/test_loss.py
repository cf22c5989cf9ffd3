"""Test the loss's tensors against values worked out by hand: importance weights, KL, staleness and skipped rows."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from qerl_recipes.recipe.configs import GRPOConfig, parse
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.train import loss, metrics
from qerl_recipes.train.preflight import check

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


# rows with an advantage of 0


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
