"""Which policies an answer names, from the moments of its first and last token."""

import time

import pytest

from qerl_vllm_plugin.server.versions import History


@pytest.fixture
def history(monkeypatch):
    """Version 4 from second 10 on, with other noise from 20 on, version 5 from 30 on."""
    made = History()
    for moment, version in ((10.0, 4), (20.0, None), (30.0, 5)):
        monkeypatch.setattr(time, "monotonic", lambda moment=moment: moment)
        made.add(version)
    return made


@pytest.mark.parametrize(
    ("spans", "text"),
    [
        ([(11, 12)], "4"),
        ([(21, 29)], "4"),
        ([(31, 99)], "5"),
        ([(11, 21)], "4-4"),  # the noise changed in between: no single policy computed it
        ([(11, 31)], "4-5"),
        ([(21, 31)], "4-5"),
        ([(11, 12), (22, 23)], "4-4"),
        ([(31, 32), (11, 12)], "4-5"),
        ([(1, 2)], "4"),
    ],
)
def test_an_answer_names_one_version_only_if_one_policy_computed_all_of_it(history, spans, text):
    assert history.text(spans) == text
