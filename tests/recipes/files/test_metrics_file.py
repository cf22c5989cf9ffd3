"""Test that metrics.jsonl is read under today's names, whichever version wrote it."""

import json

import pytest

from qerl_recipes.files.metrics_file import RENAMED, current_name, read_metrics, requested_name
from qerl_recipes.train.metrics import MetricsFile

OLDER = [
    {"step": 1, "equal_groups": 0.25, "silent_rows": 0.5, "logp_mismatch_mean": 0.1, "touched_norms": 4},
    {"step": 1, "eval/equal_groups": 0.75, "eval/reward": 0.5},
    {"step": 2, "logp_mismatch_max": 0.3, "rewards/mismatch/mean": 1.0},
]
TODAYS = [
    {"step": 1, "frac_reward_zero_std": 0.25, "frac_zero_advantage": 0.5, "logp_diff_mean": 0.1, "noisy_norms": 4},
    {"step": 1, "eval/frac_reward_zero_std": 0.75, "eval/reward": 0.5},
    {"step": 2, "logp_diff_max": 0.3, "rewards/mismatch/mean": 1.0},
]


@pytest.fixture
def older(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in OLDER))
    return tmp_path / "metrics.jsonl"


def test_older_names_are_read_as_todays(older):
    assert read_metrics(older) == TODAYS


def test_a_resumed_run_writes_todays_names(older):
    file = MetricsFile(older.parent)
    file.restart(read_metrics(older)[:2])
    file.append(TODAYS[2])
    assert [json.loads(line) for line in older.read_text().splitlines()] == TODAYS


@pytest.mark.parametrize("name", RENAMED)
def test_an_older_name_of_a_user_is_taken_with_a_warning(name):
    with pytest.warns(FutureWarning, match=f"{name} is called {RENAMED[name]} now"):
        assert requested_name(name) == current_name(name) == RENAMED[name]


def test_todays_names_are_taken_without_a_word(recwarn):
    assert [requested_name(name) for name in RENAMED.values()] == list(RENAMED.values()) and not recwarn
