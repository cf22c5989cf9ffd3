"""What a result says of where it comes from can be run again as it stands."""

import shlex
import sys

from qerl_recipes.machine.conditions import conditions


def test_the_command_is_one_that_a_shell_reads_as_it_was_given(monkeypatch):
    words = [
        "bench",
        "rollout",
        "--variant",
        'pdl={"a": {"b c": true}}',
        "--output",
        "a folder/x.json",
        "--scratch",
        "",
    ]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/qerl", *words])
    assert shlex.split(conditions()["command"]) == ["qerl", *words]
