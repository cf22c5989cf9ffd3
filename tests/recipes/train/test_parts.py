"""Test that a step is the same however it is split into parts, each with a forward and a backward of its own."""

import math

import pytest
import scripted_rollouts
import torch
from digit_rewards import digits_of_some

from qerl_recipes.train import loss

COMPLETIONS = 16  # of a rollout: four groups
SHORT = {"dtype": torch.float32, "rollout_engine": scripted_rollouts.NAME, "max_steps": 2, "learning_rate": 1e-3}
WHOLE = {"per_device_train_batch_size": COMPLETIONS, "gradient_accumulation_steps": 1}


@pytest.fixture
def train(make_trainer, make_nvfp4, scripted, read_metrics, tmp_path):
    """Return train(name, **settings) -> lines of metrics.jsonl, TRL's log, weights, and the tokens of each forward.

    A run is two steps in fp32.
    """

    def run(name, **settings):
        trainer = make_trainer(
            make_nvfp4("qwen2"), digits_of_some, output_dir=str(tmp_path / name), **{**SHORT, **settings}
        )
        forwards = []
        trainer.model.get_base_model().model.register_forward_pre_hook(
            lambda module, args, given: forwards.append(given["input_ids"].numel()), with_kwargs=True
        )
        trainer.train()
        weights = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
        log = {k: v for entry in trainer.state.log_history if "loss" in entry for k, v in entry.items()}
        return read_metrics(trainer), log, weights, forwards

    return run


def by_tokens(**settings):
    """Return settings of a run that names its completions alone, so that the trainer splits its steps."""
    unset = {"per_device_train_batch_size": None, "gradient_accumulation_steps": None}
    return {**unset, "generation_batch_size": COMPLETIONS, **settings}


def assert_same(one, other, rel=1e-3, weights=2e-5):
    """Compare the lines of metrics.jsonl, TRL's own figures and the weights of two runs.

    The share of packed tokens may differ: a prompt is computed once a part.
    """
    for ours, theirs in zip(one[0], other[0], strict=True):
        assert {**ours, "packed_share": 0} == pytest.approx({**theirs, "packed_share": 0}, rel=rel, abs=1e-6)
    assert one[1].keys() == other[1].keys()
    for name, theirs in other[1].items():
        if not name.endswith(("step_time", "_tokens_per_s", "share")):
            assert one[1][name] == pytest.approx(theirs, rel=rel, abs=1e-5, nan_ok=True), name
    for name, weight in other[2].items():
        torch.testing.assert_close(one[2][name], weight, rtol=0, atol=weights, msg=name)


LOSSES = [
    {"loss_type": "dapo", "epsilon_high": 0.28},
    {"loss_type": "bnpo", "use_bias_correction_kl": True, "beta": 0.1},
    {"loss_type": "dr_grpo", "vllm_importance_sampling_mode": "sequence_mask", "skip_zero_advantage": False},
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    {"loss_type": "vespo"},
    {"loss_type": "grpo", "entropy_coef": 0.1, "off_policy_mask_threshold": 0.5},
    {"loss_type": "dapo", "use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 2.9},
    {"loss_type": "dapo", "dynamic_sampling": True, "dynamic_sampling_max_rounds": 1},
    {"loss_type": "grpo", "num_iterations": 2, "max_steps": 3},
]


@pytest.mark.parametrize("settings", LOSSES, ids=lambda settings: "-".join(map(str, settings.values())))
def test_a_step_is_the_same_whatever_its_parts(settings, train):
    whole = train("whole", **WHOLE, **settings)
    split = train("split", **by_tokens(pack_tokens=40), **settings)
    assert_same(split, whole)
    assert len(split[3]) > 2 * len(whole[3]) and max(split[3]) <= 40
    assert any(line["grad_norm"] > 0 for line in whole[0])


@pytest.mark.parametrize("pack_tokens", [1, 0])
def test_single_rows_and_padded_rows_are_parts_too(pack_tokens, train, monkeypatch):
    monkeypatch.setattr(loss, "FAST_TOKENS", 60)
    settings = {"loss_type": "grpo", "beta": 0.1}  # the reference policy's log-probabilities are of a whole rollout
    settings |= {"max_steps": 1} if pack_tokens else {}
    whole = train("whole", **WHOLE, pack_tokens=pack_tokens, **settings)
    split = train("split", **by_tokens(pack_tokens=pack_tokens), **settings)
    assert_same(split, whole)
    assert max(split[3]) <= 60


@pytest.mark.parametrize("settings", [{"loss_type": "bnpo"}, {"entropy_coef": 0.1}], ids=["bnpo", "entropy"])
def test_a_mean_over_a_micro_batch_is_over_trls(settings, train):
    two = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": 1, "loss_type": "dapo"}
    padded, packed = (train(str(size), pack_tokens=size, **{**two, **settings}) for size in (0, 100))
    assert packed[0][0]["loss"] == pytest.approx(padded[0][0]["loss"], rel=1e-4)
    assert packed[0][0]["grad_norm"] == pytest.approx(padded[0][0]["grad_norm"], rel=1e-3)


def test_a_rollout_serves_several_steps(train):
    settings = {"loss_type": "grpo", "max_steps": 4}
    by_trl = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "steps_per_generation": 2}
    whole = train("whole", **by_trl, **settings)
    split = train("split", **by_tokens(pack_tokens=40, steps_per_generation=2), **settings)
    assert_same(split, whole)
    assert max(line["logp_staleness_mean"] for line in whole[0]) > 1e-4


@pytest.mark.parametrize(
    ("settings", "rel", "weights"),
    [
        ({"dtype": torch.float16, "learning_rate": 1e-4}, 2e-2, 2e-4),
        ({"gradient_checkpointing": True, "recompute_layers": 1}, 1e-3, 2e-5),
    ],
    ids=["float16", "recomputed"],
)
def test_gradients_are_scaled_and_blocks_recomputed_part_by_part(settings, rel, weights, train):
    whole = train("whole", **WHOLE, **settings)
    assert_same(train("split", **by_tokens(pack_tokens=40), **settings), whole, rel, weights)


def test_a_part_that_comes_later_has_no_gradient_yet():
    places = [torch.tensor([0, 1, 4]), torch.tensor([6, 7]), torch.tensor([9])]  # of completions of three tokens
    parts = [loss.Part(packed=[type("Row", (), {"places": where})]) for where in places]
    ordered = loss.in_order(parts, (4, 3))
    pending = [None if part.pending is None else part.pending.tolist() for part in ordered]
    assert pending == [[False, False, True, True], [False, False, False, True], None]
    sampled = torch.tensor([[-1.0], [-2.0], [-3.0], [math.nan]])
    batch = loss.MicroBatch(torch.ones(4, 1), sampled, torch.ones(4), torch.ones(4))
    logps = torch.zeros(4, 1, requires_grad=True)
    filled = loss.fill_pending(logps, batch, ordered[0])
    filled.sum().backward()
    assert filled.flatten().tolist() == [0, 0, -3, 0] and logps.grad.flatten().tolist() == [1, 1, 0, 0]
