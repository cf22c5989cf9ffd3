import math

import pytest

from qerl_recipes.train.schedule import sigma, stage


def test_the_papers_schedule_by_hand():
    # 110 rollouts in 10 stages: 11 intervals of 10 rollouts, the first without noise
    values = [sigma(r, 110, 1e-2, 5e-4, 10) for r in range(110)]
    assert values[:10] == [0.0] * 10
    assert values[10] == values[19] == 1e-2
    assert math.isclose(values[20], 1e-2 * 0.05 ** (1 / 9))
    assert math.isclose(values[-1], 5e-4)
    assert len(set(values)) == 11


def test_every_rollout_has_a_stage_and_stages_never_go_back():
    for rollouts in (1, 3, 7, 10, 11, 12, 199):
        stages = [stage(r, rollouts, 10) for r in range(rollouts)]
        assert stages == sorted(stages)
        assert set(stages) <= set(range(11))


def test_one_stage_has_the_first_sigma():
    assert [sigma(r, 4, 0.1, 0.001, 1) for r in range(4)] == [0.0, 0.0, 0.1, 0.1]


def test_equal_ends_are_the_same_noise_in_every_stage():
    assert [sigma(r, 4, 0.1, 0.1, 3) for r in range(4)] == [0.0, 0.1, 0.1, 0.1]


@pytest.mark.parametrize(
    "ends", [(0.0, 0.0), (1e-3, 1e-2), (math.nan, 1e-3), (1e-2, math.nan), (-1e-2, -1e-3), (math.inf, 1)]
)
def test_ends_that_cannot_be_annealed_are_refused(ends):
    with pytest.raises(ValueError, match="must be positive"):
        sigma(5, 10, *ends, 4)


@pytest.mark.parametrize(
    ("rollout", "stages", "message"), [(10, 4, "rollout 10"), (-1, 4, "rollout -1"), (0, 0, "num_stages")]
)
def test_a_rollout_or_stage_count_out_of_range_is_refused(rollout, stages, message):
    with pytest.raises(ValueError, match=message):
        sigma(rollout, 10, 1e-2, 1e-3, stages)
