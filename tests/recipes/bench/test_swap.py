"""Test ``qerl bench swap`` on a CPU, where its figures mean nothing but their parts show."""

from types import SimpleNamespace
from typing import Any

import pytest

from qerl_recipes.bench import random_model, swap
from qerl_recipes.recipe.shapes import config_json


def test_a_swap_is_measured_with_its_parts(light_engines: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure in this process, because a process for the engine would import all of vLLM again."""
    start, engines = random_model.start, []

    def keep(*arguments: Any, **options: Any) -> Any:
        engines.append(start(*arguments, **options))
        return engines[-1]

    def ask(module: str, request: dict[str, Any], *, has_core: bool) -> dict[str, Any]:
        assert (module, has_core) == (swap.__name__, True)
        figures: dict[str, Any] = {}
        swap.measure(request, figures)
        engines.pop().llm_engine.engine_core.shutdown()
        return figures

    monkeypatch.setattr(random_model, "start", keep)
    monkeypatch.setattr(swap, "ask_once", ask)
    monkeypatch.setattr(swap, "REPEATS", 15)  # so many that other processes leave one of them alone
    monkeypatch.setattr(swap, "SEQUENCES", 1)  # before each change so many prompts are computed
    (found,) = swap.run("tiny", rank=16)["ways"].values()
    for what in ("swap", "noise"):
        assert 0 < found[what]["least"] <= found[what]["median"] <= found[what]["most"]
    for what, inside in (("swap", {"pack", "receive", "check", "free"}), ("noise", set())):
        parts = found[what]["parts"]
        assert set(parts) == {"empty", "way", "stage", "agree", "commit", "device"} | inside
        assert all(seconds >= 0 for seconds in parts.values())
        # the parts are in seconds, too
        assert 0.5 * found[what]["least"] < sum(parts.values()) < 1.5 * found[what]["most"]
    values = sum(tensor.numel() for tensor in random_model.adapter(config_json("tiny"), 16)[0].values())
    assert found["tensors"] == "cpu" and found["bytes"] == 4 * values


@pytest.mark.slow
def test_a_swap_is_measured_over_http() -> None:
    ways = swap.run("tiny", rank=4, transports=["http"])["ways"]
    found = ways["http"]
    assert list(ways) == ["http", "http, shared memory"], "without a GPU"
    assert found["swap"]["median"] > 0 and found["noise"]["median"] > 0
    inside = {"pause", "empty", "way", "resume", "stage", "agree", "commit", "device"}
    assert set(found["noise"]["parts"]) == inside
    assert set(found["swap"]["parts"]) == inside | {"body", "digest", "receive", "check"}


def test_what_comes_before_a_change_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, left = [0.0], [99.0] * swap.WARM_UP + [float(i) for i in range(swap.REPEATS)]

    def take(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(swap, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    found = swap._spread(lambda: take(left.pop(0)), lambda: {"stage": clock[0] % 50}, lambda: take(50))
    assert left == [] and (found["least"], found["median"], found["most"]) == (0.0, 4.5, 9.0)
    assert found["parts"]["device"] == 0.0
