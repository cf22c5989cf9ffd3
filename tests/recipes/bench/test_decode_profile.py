"""Test that traces of decode steps are read correctly, and that the engine makes the steps asked for."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qerl_recipes.bench import decode_profile, random_model, rollout_arm
from qerl_recipes.bench.decode_profile import FILLING, LAST, kernels_of, mean_step
from qerl_recipes.recipe.shapes import config_json
from qerl_recipes.rollout import sampling as completions

STEPS = FILLING + 2 + LAST
# One step takes 100 us from the start of its graph. Each row is (name, start, end, whether it belongs to the graph).
STEP = (
    ("triton_red_fused_add", 0, 10, True),
    ("adapter_shrink", 12, 20, True),
    ("nvfp4_gemm", 15, 40, True),  # starts before the previous one has ended
    ("reshape_and_cache_flash_kernel", 21, 30, True),  # ends before the previous one
    ("nvjet_tst_64x8", 50, 70, False),
    ("_gumbel_sample_kernel", 75, 80, False),
)


def trace(steps: int = STEPS, last_step: tuple[Any, ...] = STEP) -> list[dict[str, Any]]:
    """Return events in Chrome's format, unordered, with a launch for each graph and for each kernel outside of one."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]
    for step in range(steps):
        for place, (name, start, end, in_graph) in enumerate(last_step if step == steps - 1 else STEP):
            launch = 1000 * step + (0 if in_graph else place)
            event = {"cat": "kernel", "name": name, "ts": 7e6 + 100 * step + start, "dur": end - start}
            events.append({**event, "args": {"correlation": launch}})
        for name, start, took in (
            ("cudaGraphLaunch", -30, 5),
            ("cudaLaunchKernel", 2, 1),
            ("cudaEventSynchronize", 40, 25),
        ):
            events.append({"cat": "cuda_runtime", "name": name, "ts": 7e6 + 100 * step + start, "dur": took})
    return events[::-1]


def test_added_and_idle_time_make_the_step() -> None:
    found = mean_step(kernels_of(trace()), STEPS)
    assert found["profiled_step_us"] == pytest.approx(100)
    assert found["busy_us"] == pytest.approx(10 + 28 + 20 + 5)
    assert found["idle_in_graph_us"] == pytest.approx(2)
    # gaps before the product, the sampler and the next graph
    assert found["idle_between_us"] == pytest.approx(10 + 5 + 20)
    rows = {row["name"]: row for row in found["kernels"]}
    assert {name: row["in_graph"] for name, row in rows.items()} == {name: inside for name, _, _, inside in STEP}
    assert all(row["calls"] == 1 for row in rows.values())
    shrink, product = rows["adapter_shrink"], rows["nvfp4_gemm"]
    assert (shrink["us"], shrink["added_us"], shrink["idle_us"]) == pytest.approx((8, 8, 2))
    assert (product["us"], product["added_us"], product["idle_us"]) == pytest.approx((25, 20, 0))
    assert rows["reshape_and_cache_flash_kernel"]["added_us"] == 0
    assert next(iter(rows)) == "nvfp4_gemm" and rows["triton_red_fused_add"]["idle_us"] == pytest.approx(20)


def test_first_and_last_steps_are_left_out() -> None:
    slow = tuple((name, 3 * start, 3 * end, inside) for name, start, end, inside in STEP)
    assert mean_step(kernels_of(trace(last_step=slow)), STEPS) == mean_step(kernels_of(trace()), STEPS)
    other = trace()
    for event in other:
        if event.get("cat") == "kernel" and event["ts"] < 7e6 + 100 * FILLING:
            event["dur"] /= 2
    assert mean_step(kernels_of(other), STEPS) == mean_step(kernels_of(trace()), STEPS)


def test_steps_that_look_alike_are_refused() -> None:
    with pytest.raises(RuntimeError, match=f"{STEPS} steps launched {STEPS - 1} CUDA graphs"):
        mean_step(kernels_of(trace(STEPS - 1)), STEPS)
    eager = trace()
    for number, event in enumerate(eager):
        event["args"] = {"correlation": number}
    with pytest.raises(RuntimeError, match="launched 0 CUDA graphs"):
        mean_step(kernels_of(eager), STEPS)
    # each step has two graphs
    assert mean_step(kernels_of(trace(2 * STEPS)), STEPS)["profiled_step_us"] == pytest.approx(200)


def test_an_engine_steps_halfway_through_its_completions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, light_engines: None
) -> None:
    """Profile an engine on a CPU with a stand-in trace; the steps are the engine's own."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    output, ours, stepped = decode_profile.LEAST_OUTPUT, 0, []
    own_step = completions.step

    def counted(*given: Any) -> Any:
        nonlocal ours
        ours += 1
        return own_step(*given)

    def fake(step: Callable[[], Any], steps: int, file: Path) -> None:
        stepped.extend(step() for _ in range(steps))
        file.write_bytes(gzip.compress(json.dumps({"traceEvents": trace(steps)}).encode()))

    monkeypatch.setattr(completions, "step", counted)
    monkeypatch.setattr(decode_profile, "_trace", fake)
    llm = random_model.start(config_json("tiny"), length=output + 8, sequences=2)
    try:
        sampling = rollout_arm.sampling(output)
        found = decode_profile.profile(llm, [[5] * 8, [6] * 8], sampling, None, tmp_path / "t.json.gz")
        traced = FILLING + decode_profile.STEPS + LAST
        assert len(stepped) == traced and ours > traced
        assert (found["batch"], found["context"]) == (2, 8 + output // 2)
        assert found["step_us"] > 100 and 0 < found["worked_us"] < 1.1 * found["step_us"]
        assert found["profiled_step_us"] == pytest.approx(100)
        assert found["cpu_us"] == pytest.approx({"least": 75, "median": 75, "most": 75})
        assert not llm.llm_engine.has_unfinished_requests()
        ours = 0
        stepped.clear()
        decode_profile.profile(llm, [[5] * 8], sampling, None, tmp_path / "t.json.gz", is_stock=True)
        assert len(stepped) == traced and ours == 0
        (answer,) = llm.generate({"prompt_token_ids": [7] * 8}, rollout_arm.sampling(3), use_tqdm=False)
        assert len(answer.outputs[0].token_ids) == 3
    finally:
        llm.llm_engine.engine_core.shutdown()
