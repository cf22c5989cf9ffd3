"""The engine benchmarks on a CPU, where their figures mean nothing and their wiring can be seen."""

import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from qerl_recipes import cli
from qerl_recipes.bench import random_model, rollout_arm
from qerl_recipes.bench import rollout as bench_rollout
from qerl_recipes.bench import swap as bench_swap
from qerl_recipes.bench.rollout_cases import Case, make_cases
from qerl_recipes.recipe.shapes import ATTENTION, config_json
from qerl_recipes.rollout import answers, arms
from qerl_vllm_plugin.compat import scheduler


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, classes_looked_at_here: None) -> Iterator[None]:
    """A swap is measured here and not in a process of its own, which would import all of vLLM once more; the slow test
    over HTTP has one."""
    engines: list[Any] = []
    start = random_model.start

    def ask(module: str, request: dict[str, Any], *, has_core: bool) -> dict[str, Any]:
        assert (module, has_core) == (bench_swap.__name__, True)
        found: dict[str, Any] = {}
        bench_swap.measure(request, found)
        return found

    def keep(*given: Any, **options: Any) -> Any:
        engines.append(start(*given, **options))
        return engines[-1]

    monkeypatch.setattr(random_model, "start", keep)
    monkeypatch.setattr(bench_swap, "in_own_process", ask)
    yield
    for llm in engines:
        llm.llm_engine.engine_core.shutdown()


def test_a_swap_is_measured_with_and_without_emptying_the_prefix_cache(in_this_process: None) -> None:
    (found,) = bench_swap.run("tiny", rank=16)["ways"].values()
    for what in ("swap", "noise", "prefix_cache"):
        assert 0 < found[what]["least"] <= found[what]["median"] <= found[what]["most"]
    for what, inside in (("swap", {"pack", "receive", "check", "free"}), ("noise", set())):
        parts = found[what]["parts"]
        assert set(parts) == {"empty", "way", "stage", "agree", "commit", "device"} | inside
        assert all(seconds >= 0 for seconds in parts.values())
        assert 0.5 * found[what]["least"] < sum(parts.values()) < 1.5 * found[what]["most"]  # in seconds, too
    values = sum(tensor.numel() for tensor in random_model.adapter(config_json("tiny"), 16)[0].values())
    assert found["blocks"] > 0 and found["tensors"] == "cpu" and found["bytes"] == 4 * values


def test_what_comes_before_a_change_and_what_warms_up_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, left = [0.0], [99.0] * bench_swap.WARM_UP + [float(i) for i in range(bench_swap.REPEATS)]

    def takes(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(bench_swap, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    found = bench_swap._spread(lambda: takes(left.pop(0)), lambda: takes(50), lambda: {"stage": clock[0] % 50})
    assert left == [] and (found["least"], found["median"], found["most"]) == (0.0, 4.5, 9.0)
    assert found["parts"]["device"] == 0.0


@pytest.mark.slow
def test_a_swap_is_measured_over_http() -> None:
    (found,) = bench_swap.run("tiny", rank=4, transports=["http"])["ways"].values()
    assert found["swap"]["median"] > 0 and found["noise"]["median"] > 0
    inside = {"pause", "empty", "way", "resume", "stage", "agree", "commit", "device"}
    assert set(found["noise"]["parts"]) == inside
    assert set(found["swap"]["parts"]) == inside | {"body", "digest", "receive", "check"}


def test_unknown_ways_to_measure_a_swap_are_refused() -> None:
    with pytest.raises(ValueError, match=r"transport .*pigeon.* is unknown; it is one of auto, ipc, shared, http"):
        bench_swap.run("tiny", transports=["http", "pigeon"])
    with pytest.raises(ValueError, match="transport ipc needs an NVIDIA GPU"):
        bench_swap.run("tiny", transports=["ipc"])


@pytest.mark.integration
def test_each_case_of_an_arm_is_measured_as_a_whole_and_its_decoding_alone(tmp_path: Path) -> None:
    """Through the command, so that the way from its options to the engine's completions is the users'."""
    file = tmp_path / "rollout.json"
    line = "bench rollout --shape tiny --batch 1,3 --input_len 8 --output_len 40,20 --rank 4 --repeats 2"
    arms, engine = ["bf16_merged", "qerl_nvfp4"], {"max_num_batched_tokens": 777, "compilation_config": {"mode": 0}}
    options = ["--arms", ",".join(arms), "--output", str(file), "--engine", json.dumps(engine), "--interleave"]
    done = CliRunner().invoke(cli.app, [*line.split(), *options])
    assert done.exit_code == 0, done.output
    result = json.loads(file.read_text())
    assert result["engine"] == engine and result["interleaved"] is True
    assert list(result["arms"]) == arms
    assert result["cached_tokens"] == 64 * 48, "the prefill is the most"
    for found in result["arms"].values():
        assert found["kv_cache_tokens"] * 2 * 2 * 64 * 2 == 2**30, "VLLM_CPU_KVCACHE_SPACE; keys and values, 2 layers"
        rows = found["batch"]
        assert {key: (row["input"], row["output"]) for key, row in rows.items()} == {"1": (8, 40), "3": (8, 20)}
        for row in (*rows.values(), found["prefill"]):
            assert len(row["seconds"]) == 2 and row["tokens_per_s"] > 0 and row["spread"] >= 0
        for key, row in rows.items():
            seconds, first = statistics.median(row["seconds"]), statistics.median(row["prefill_seconds"])
            assert row["tokens_per_s"] == pytest.approx(int(key) * row["output"] / seconds)
            alone = int(key) * (row["output"] - 1) / (seconds - first) if seconds > first else None
            assert row["decode"]["tokens_per_s"] == pytest.approx(alone)
            assert 0 < min(row["prefill_seconds"]) < max(row["seconds"]), "whatever else this machine does"
    assert "3 x" in done.output and "ratios to the faster of bf16_merged" in done.output


def test_an_engine_gets_what_it_is_to_have_beside_what_the_benchmark_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def start(config: dict[str, Any], **options: Any) -> None:
        given.update(options)
        raise InterruptedError

    monkeypatch.setattr(random_model, "start", start)
    engine = {"async_scheduling": False, "compilation_config": {"inductor_compile_config": {"triton.enable_pdl": True}}}
    request = {"shape": "tiny", "cases": [(2, 8, 20), (1, 8, 20)], "rank": 4, "tensor_parallel": 1, "scratch": None}
    request |= {"arm": "qerl_nvfp4", "kv_cache_dtype": "auto", "engine": engine, "memory": {"kv_cache_memory_bytes": 7}}
    with pytest.raises(InterruptedError):
        rollout_arm.begin(request)
    assert given["async_scheduling"] is False and given["kv_cache_memory_bytes"] == 7
    assert given["scheduler_cls"] == scheduler.NAME
    assert given["compilation_config"] == engine["compilation_config"] | {"cudagraph_capture_sizes": [1, 2]}
    with pytest.raises(InterruptedError):
        rollout_arm.begin({**request, "engine": {"scheduler_cls": None}})
    assert given["scheduler_cls"] is None  # vLLM's own
    given.clear()
    with pytest.raises(InterruptedError):
        rollout_arm.begin({**request, "arm": "bf16_merged"})
    assert "scheduler_cls" not in given


@pytest.mark.parametrize(
    ("arm", "asked"),
    [("bf16_merged", "vLLM"), ("bf16", "vLLM"), ("nf4", "vLLM"), ("stock_nvfp4", "vLLM"), ("qerl_nvfp4", "ours")],
)
def test_what_one_would_run_without_this_project_is_asked_in_vllms_way(
    arm: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    class Engine:
        def generate(self, prompts: list[Any], *_: Any, **__: Any) -> list[Any]:
            seen.append("vLLM")
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1, 2])]) for _ in prompts]

    def ours(llm: Any, prompts: list[Any], *_: Any) -> list[Any]:
        seen.append("ours")
        return [SimpleNamespace(ids=[1, 2]) for _ in prompts]

    monkeypatch.setattr(rollout_arm, "start", lambda request: (Engine(), SimpleNamespace(request=None)))
    monkeypatch.setattr(answers, "generate", ours)
    monkeypatch.setattr(rollout_arm, "_cache_tokens", lambda llm: 1)
    _, work = rollout_arm.begin({"arm": arm, "tensor_parallel": 2, "shape": "tiny"})
    assert work({"number": 0, "repeat": 1, "batch": 3, "input": 4, "output": 2})["seconds"] >= 0
    assert seen == [asked]


def test_weights_that_two_layers_share_are_counted_once() -> None:
    model = torch.nn.Module()
    model.embedding = torch.nn.Parameter(torch.empty(2**28), requires_grad=False)  # 1 GiB that nobody touches
    model.head = torch.nn.Parameter(model.embedding.data, requires_grad=False)
    model.register_buffer("more", torch.empty(2**27))
    worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))
    executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=worker))
    llm: Any = SimpleNamespace(llm_engine=SimpleNamespace(model_executor=executor))
    assert rollout_arm._weights_gib(llm) == 1.5


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ('{"kv_cache_dtype": "fp8"}', "engine names 'kv_cache_dtype', which this benchmark sets itself"),
        ("async_scheduling=0", "is not JSON"),
        ("[1]", "it is a JSON object"),
    ],
)
def test_what_is_no_more_argument_of_an_engine_is_refused(engine: str, message: str) -> None:
    done = CliRunner().invoke(cli.app, ["bench", "rollout", "--shape", "tiny", "--engine", engine])
    assert done.exit_code != 0
    assert message in " ".join((done.output + str(done.exception)).replace("│", " ").split())


@pytest.mark.slow
@pytest.mark.parametrize("interleave", [False, True])
def test_a_mixture_is_measured_on_a_checkpoint_that_is_written_once(tmp_path: Path, interleave: bool) -> None:
    options: dict[str, Any] = {
        "arms": ["bf16_merged", "qerl_nvfp4", "qerl_nvfp4_base"],
        "rank": 4,
        "repeats": 1,
        "scratch": tmp_path,
    }
    result = bench_rollout.run("tiny-moe", [Case(2, 8, 20)], interleave=interleave, **options)
    assert not [found for found in result["arms"].values() if "failed" in found]
    assert not list(tmp_path.iterdir())


def test_a_mixture_s_adapter_is_of_attention_and_its_routers_stay_in_bf16() -> None:
    config = config_json("tiny-moe")
    tensors, adapter_config = random_model.adapter(config, 4)
    assert adapter_config["target_modules"] == sorted(ATTENTION) and len(tensors) == 2 * 4 * 2
    assert random_model.in_bf16(config) == ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    assert random_model.in_bf16(config_json("tiny")) == ["lm_head"]


def test_slots_in_a_mixture_are_of_attention_and_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_json("tiny-moe")
    with pytest.raises(ValueError, match="quantization: bf16 keeps the adapter in vLLM's LoRA slots"):
        arms.engine_options("bf16", 4, config)
    monkeypatch.setattr(arms, "runs_on_cuda", lambda variables: True)
    assert arms.engine_options("bf16", 4, config)["lora_target_modules"] == list(ATTENTION)
    assert "lora_target_modules" not in arms.engine_options("bf16", 4, config_json("tiny"))
    assert "lora_target_modules" not in arms.engine_options("qerl_nvfp4", 4, config)


def test_numbers_stand_side_by_side_and_one_counts_for_all() -> None:
    assert make_cases([8, 64], [256], [512, 1024]) == [(8, 256, 512), (64, 256, 1024)]
    assert make_cases([64], [256], [512, 1024]) == [(64, 256, 512), (64, 256, 1024)]
    with pytest.raises(ValueError, match=r"input_len is \[1, 2\]; give one number, or 3 of them"):
        make_cases([1, 2, 3], [1, 2], [5])
    with pytest.raises(ValueError, match="output_len is at least 2"):
        make_cases([1], [1], [1])


def test_results_say_what_they_were_measured_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, list[str], bool]] = []

    def answer(module: str, request: dict[str, Any], *, has_core: bool) -> dict[str, Any]:
        assert (module, request["shape"], request["rank"]) == ("qerl_recipes.bench.swap", "7B", 16)
        asked.append((request["kind"], request["transports"], has_core))
        seconds = {"median": 0.012, "least": 0.011, "most": 0.02, "parts": {"empty": 0.003, "stage": 0.0091}}
        found = {"swap": seconds, "noise": seconds, "prefix_cache": seconds, "bytes": 2e6, "blocks": 99}
        return dict.fromkeys(request["transports"], found)

    monkeypatch.setattr(bench_swap, "in_own_process", answer)
    monkeypatch.setattr(bench_swap, "check_shape", lambda shape: None)
    monkeypatch.setattr(bench_swap, "_check_ipc", lambda: None)
    ways = ["auto", "ipc", "http", "shared"]
    bench_swap.run("7B", rank=16, transports=ways, output=tmp_path / "new/swap.json")
    assert asked == [("here", ["auto"], True), ("elsewhere", ["ipc", "shared"], False), ("server", ["http"], False)]
    written = json.loads((tmp_path / "new/swap.json").read_text())
    assert {"gpu", "versions", "commit", "date", "command"} <= set(written)
    assert list(written["ways"]) == ["auto", "ipc", "shared", "http"]
    (said,) = [line for line in capsys.readouterr().out.splitlines() if ", ipc: " in line]
    assert "ipc: swap 12.0 ms (11.0 to 20.0: empty 3.00, stage 9.10)" in said
    assert said.endswith(", of 2 MB; vLLM alone empties 99 blocks in 12.0 ms")


def test_arms_alternate_and_one_that_fails_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"bf16_merged": [2.0, 4.0], "bf16": [4.0, 4.0], "qerl_nvfp4": [1.0]}
    asked: list[str] = []

    def take_turns(module: str, requests: dict[str, Any], cases: Any, repeats: int, note: Any, rest: float) -> None:
        (arm,) = requests
        asked.append(arm)
        if not seconds[arm]:
            note(arm, {"failed": "its messages are above"})
            return
        one = seconds[arm].pop(0)
        note(arm, {"weights_gib": 1.0, "kv_cache_tokens": 5000})
        note(arm, {"cases": [{"batch": 4, "input": 10, "output": 21, "seconds": [one], "prefill_seconds": [0.5]}]})
        note(arm, {"prefill": {"tokens": 640, "seconds": [one]}})

    monkeypatch.setattr(bench_rollout, "take_turns", take_turns)
    bench_rollout.run("tiny", [Case(4, 10, 21)], rounds=2, output=tmp_path / "rollout.json")
    assert asked == ["bf16_merged", "bf16", "qerl_nvfp4"] * 2
    arms = json.loads((tmp_path / "rollout.json").read_text())["arms"]
    merged = arms["bf16_merged"]["batch"]["4"]
    assert (merged["seconds"], merged["tokens_per_s"], merged["spread"]) == ([2.0, 4.0], 4 * 21 / 3, 2 / 3)
    assert merged["decode"] == {"tokens_per_s": 4 * 20 / 2.5, "spread": 2 / 2.5}
    assert merged["prefill"]["tokens_per_s"] == 4 * 10 / 0.5
    assert arms["qerl_nvfp4"]["failed"] == "its messages are above"
    assert arms["qerl_nvfp4"]["batch"]["4"]["spread"] is None


def test_each_arm_is_measured_with_each_cache_and_an_unknown_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def take_turns(module: str, requests: dict[str, Any], *rest: Any) -> None:
        asked.extend((request["arm"], request["kv_cache_dtype"]) for request in requests.values())

    monkeypatch.setattr(bench_rollout, "take_turns", take_turns)
    options = {"arms": ["bf16", "qerl_nvfp4"], "kv_cache_dtype": ["auto", "fp8"]}
    result = bench_rollout.run("tiny", [Case(1, 2, 3)], **options)
    assert asked == [("bf16", "auto"), ("bf16", "fp8"), ("qerl_nvfp4", "auto"), ("qerl_nvfp4", "fp8")]
    assert list(result["arms"]) == ["bf16", "bf16, fp8 cache", "qerl_nvfp4", "qerl_nvfp4, fp8 cache"]
    with pytest.raises(ValueError, match="unknown kv_cache_dtype 'int4'; known: auto, bfloat16, fp8"):
        bench_rollout.run("tiny", [Case(1, 2, 3)], kv_cache_dtype=["int4"])


def test_an_arm_in_float16_is_the_other_but_for_its_type() -> None:
    config = {"model_type": "qwen2"}
    ours = rollout_arm.options("qerl_nvfp4", 8, config)
    assert rollout_arm.options("qerl_nvfp4_float16", 8, config) == {**ours, "dtype": "float16"}
    assert "dtype" not in ours, "that of all other arms"


def test_a_decoding_that_is_lost_in_a_slow_prefill_has_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    measured: dict[str, dict[str, Any]] = {"bf16": {}, "qerl_nvfp4": {}}
    for arm, first in (("bf16", 3.0), ("qerl_nvfp4", 1.0)):
        case = {"batch": 4, "input": 10, "output": 21, "seconds": [2.0, 3.0], "prefill_seconds": [first]}
        found = {"cases": [case], "prefill": {"tokens": 640, "seconds": [1.0]}}
        bench_rollout._add(measured[arm], {**found, "weights_gib": None, "kv_cache_tokens": 200}, [Case(4, 10, 21)])
    decoding = [found["batch"]["4"]["decode"]["tokens_per_s"] for found in measured.values()]
    assert decoding == [None, 4 * 20 / 1.5]
    about = {"shape": "7B", "tensor_parallel_size": 1, "rank": 8, "gpu": "x", "date": "y", "cached_tokens": 0}
    bench_rollout._print({**about, "arms": measured})
    printed = capsys.readouterr().out
    assert "lost in" in printed and "53 ±33%" in printed and printed.count("x)") == 4


def test_ratios_are_to_the_faster_bf16_arm(capsys: pytest.CaptureFixture[str]) -> None:
    def arm(rate: float) -> dict[str, Any]:
        row = {"tokens_per_s": rate, "spread": 0.1}
        return {"batch": {"8": {**row, "batch": 8, "input": 1, "output": 2, "decode": row}}, "prefill": row}

    arms = {"qerl_nvfp4": arm(300.0), "bf16": arm(150.0), "bf16_merged": arm(200.0)}
    arms = {name: {**found, "weights_gib": None, "kv_cache_tokens": 200} for name, found in arms.items()}
    arms["bf16"]["kv_cache_tokens"] = 199
    result = {"arms": arms, "shape": "7B", "tensor_parallel_size": 2, "rank": 8, "gpu": "x", "date": "y"}
    bench_rollout._print({**result, "cached_tokens": 200})
    printed = capsys.readouterr().out
    assert "bf16: its KV cache holds 199 of 200 tokens, so some wait" in printed and printed.count("some wait") == 1
    assert "300 ±5%" in printed and "(1.50x)" in printed and "(0.75x)" in printed and "tensor parallel 2" in printed


def rollout(shape: str) -> None:
    bench_rollout.run(shape, [Case(1, 2, 3)])


@pytest.mark.parametrize("bench", [bench_swap.run, rollout])
def test_an_unknown_shape_is_refused_before_anything_starts(bench: Callable[[str], Any]) -> None:
    with pytest.raises(ValueError, match=r"unknown shape '8B'; known: 0\.5B"):
        bench("8B")


@pytest.mark.parametrize("bench", [bench_swap.run, rollout])
def test_a_large_shape_is_refused_on_a_cpu(bench: Callable[[str], Any]) -> None:
    with pytest.raises(ValueError, match="shape 7B needs a CUDA GPU; on this machine use shape tiny"):
        bench("7B")


@pytest.mark.parametrize("batch", ["0", "1,-2", "a,b"])
def test_a_batch_size_that_is_none_is_refused_by_name(batch: str) -> None:
    done = CliRunner().invoke(cli.app, ["bench", "rollout", "--shape", "tiny", "--batch", batch])
    assert done.exit_code and "batch" in (done.output + str(done.exception))


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are several GPUs")
def test_more_gpus_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size is 2, and this machine has"):
        bench_rollout.run("tiny", [Case(1, 2, 3)], tensor_parallel_size=2)
