"""Test ``qerl bench rollout`` on a CPU, where their figures mean nothing but their wiring shows."""

import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm.platforms import cpu
from vllm.v1.engine.core_client import InprocClient

from qerl_recipes import cli
from qerl_recipes.bench import lengths, linear_kernels, random_model, rollout, rollout_arm, rollout_memory
from qerl_recipes.bench.arms import ArmFailedError
from qerl_recipes.bench.engines import ARMS
from qerl_recipes.bench.rollout_arm import Case
from qerl_recipes.machine.gpu import GB, Gpu
from qerl_recipes.recipe.shapes import config_json
from qerl_vllm_plugin.compat import scheduler

H200 = Gpu(143771 * 2**20, True, "NVIDIA H200")


class ArmHere:
    """Stand in for ``Arm`` with an engine in this process; as in a separate one, every order and answer passes through
    JSON.
    """

    def __init__(self, module: str, request: dict[str, Any]) -> None:
        assert module == rollout_arm.__name__
        self.figures: dict[str, Any] = {}
        self.failed = ""
        try:
            self.carry_out = rollout_arm.begin(json.loads(json.dumps(request)), self.figures)
        except (RuntimeError, ValueError) as error:
            self.failed = str(error)

    def hear(self) -> Any:
        if self.failed:
            raise ArmFailedError(self.failed, self.figures)
        return json.loads(json.dumps(self.figures))

    def ask(self, order: dict[str, Any]) -> Any:
        self.figures = {}
        assert self.carry_out is not None
        self.carry_out(json.loads(json.dumps(order)), self.figures)
        return self.hear()

    def end(self) -> None: ...


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, light_engines: None) -> Iterator[None]:
    """Measure in this process, because a process for each engine would import all of vLLM again.

    By the clock of this fixture, each step of an engine takes a second and nothing else takes any time.
    """
    engines: list[Any] = []
    start, step, clock = random_model.start, InprocClient.get_output, [0.0]

    def tick(engine: InprocClient) -> Any:
        clock[0] += 1.0
        return step(engine)

    def keep(*arguments: Any, **options: Any) -> Any:
        engines.append(start(*arguments, **options))
        return engines[-1]

    monkeypatch.setattr(InprocClient, "get_output", tick)
    monkeypatch.setattr(rollout_arm, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(random_model, "start", keep)
    monkeypatch.setattr(rollout, "Arm", ArmHere)
    yield
    for llm in engines:
        llm.llm_engine.engine_core.shutdown()


@pytest.mark.integration
@pytest.mark.parametrize("where", ["in_this_process", pytest.param("in processes", marks=pytest.mark.slow)])
def test_every_case_of_an_arm_is_measured_whole_and_decoding_alone(
    where: str, request: pytest.FixtureRequest, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Run the command, so that the test takes the users' way from its options to the engine's completions."""
    if where == "in_this_process":
        request.getfixturevalue(where)
    file = tmp_path / "rollout.json"
    line = "bench rollout --shape tiny --batch 1,3 --input_len 8 --output_len 24,12 --rank 8,4 --repeats 2"
    names = ["bf16_merged", "qerl_nvfp4, rank 8", "qerl_nvfp4, rank 4"]
    engine = {"max_num_batched_tokens": 777, "compilation_config": {"mode": 0}}
    options = [
        "--arms",
        "bf16_merged,qerl_nvfp4",
        "--output",
        str(file),
        "--engine",
        json.dumps(engine),
        "--interleave",
    ]
    options += ["--lengths", "lognormal:6,0.8,20"]
    cli.app([*line.split(), *options], standalone_mode=False)  # vLLM needs a standard output that is a file
    printed, noted = capfd.readouterr()
    result = json.loads(file.read_text())
    assert result["engine"] == engine and result["interleaved"] is True and list(result["arms"]) == names
    assert {"gpu", "versions", "commit", "date", "command"} <= set(result)
    assert result["cached_tokens"] == 64 * 32, "the prefill is the most"
    gib = cpu.GiB_bytes if where == "in_this_process" else 2**30
    for found in result["arms"].values():
        assert found["kv_cache_tokens"] * 2 * 2 * 64 * 2 == gib, "VLLM_CPU_KVCACHE_SPACE; keys and values, 2 layers"
        rows = found["batch"]
        assert {key: (row["input"], row["output"]) for key, row in rows.items()} == {"1": (8, 24), "3": (8, 12)}
        for row in (*rows.values(), found["prefill"]):
            assert len(row["seconds"]) == 2 and row["tokens_per_s"] > 0 and row["spread"] >= 0
        for key, row in rows.items():
            seconds, first = statistics.median(row["seconds"]), statistics.median(row["prefill_seconds"])
            assert row["tokens_per_s"] == pytest.approx(int(key) * row["output"] / seconds)
            alone = int(key) * (row["output"] - 1) / (seconds - first) if seconds > first else None
            assert row["decode"]["tokens_per_s"] == pytest.approx(alone)
            assert min(row["prefill_seconds"]) > 0
            if where == "in_this_process":
                assert (row["prefill_seconds"], row["seconds"]) == ([1.0] * 2, [row["output"] * 1.0] * 2)
    drawn = {batch: lengths.draw("lognormal:6,0.8,20", int(batch)) for batch in ("1", "3")}
    assert {batch: found["each"] for batch, found in result["lengths"]["batch"].items()} == drawn
    for found in result["arms"].values():
        for batch, row in found["uneven"].items():
            assert (row["tokens"], len(row["seconds"])) == (sum(drawn[batch]), 2)
            assert row["tokens_per_s"] == pytest.approx(row["tokens"] / statistics.median(row["seconds"]))
            assert row["below_16"] == row["below_64"] == [1.0, 1.0]
            if where == "in_this_process":
                assert row["seconds"] == [max(drawn[batch]) * 1.0] * 2, "until the last token"
    assert "bf16_merged, 3 of unequal lengths: " in noted and "s until the last token" in noted
    assert result["rank"] == [8, 4] and "LoRA rank 8 and 4" in printed
    assert "qerl_nvfp4, rank 4: 8 layers QerlOnlineLinearMethod, Canonical" in printed
    assert "3 x" in printed and "ratios to the faster of bf16_merged" in printed


@pytest.mark.integration
def test_arms_are_checked_against_what_vllm_runs(in_this_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run arms that this machine has, one that it lacks, and one whose engine is made another than its name says."""
    options = rollout_arm.options

    def wrong(arm: str, rank: int, config: dict[str, Any]) -> dict[str, Any]:
        return {} if arm == "fp8_merged" else options(arm, rank, config)

    monkeypatch.setattr(rollout_arm, "options", wrong)
    names = ["fp8_merged", "stock_nvfp4_humming", "fp8", "bf16"]
    arms = rollout.run("tiny", [Case(2, 8, 4)], arms=names, rank=[4], repeats=1)["arms"]
    assert "vLLM runs another kernel than arm fp8_merged names: 8 layers on Unquantized" in arms["fp8_merged"]["failed"]
    assert arms["fp8_merged"]["linears"][0]["method"] == "UnquantizedLinearMethod"
    assert "NVFP4" in arms["stock_nvfp4_humming"]["failed"], "a CPU has none of vLLM's kernels"
    assert arms["fp8"]["batch"]["2"]["tokens_per_s"] > 0 and arms["bf16"]["batch"]["2"]["tokens_per_s"] > 0
    kernel = "ChannelWiseTorchFP8ScaledMMLinearKernel"
    assert arms["fp8"]["linears"] == [{"method": "Fp8PtpcOnlineLinearMethod", "kernel": kernel, "layers": 8}]
    assert arms["bf16"]["linears"] == [{"method": "UnquantizedLinearMethod", "kernel": "none", "layers": 8}]


@pytest.mark.parametrize(
    ("arm", "method", "kernel", "wrong"),
    [
        ("bf16_merged", "UnquantizedLinearMethod", "none", ("Fp8PtpcOnlineLinearMethod", "X")),
        ("fp8", "Fp8PtpcOnlineMoEMethod", "TRITON", ("Fp8PtpcOnlineMoEMethod", "MARLIN")),
        ("stock_nvfp4", "CompressedTensorsLinearMethod", "MarlinNvFp4LinearKernel", ("CompressedTensors", "HUMMING")),
        ("qerl_nvfp4", "QerlLinearMethod", "Tiled", ("CompressedTensorsLinearMethod", "MarlinNvFp4LinearKernel")),
        ("qerl_nvfp4_slots_marlin", "QerlOnlineLinearMethod", "Marlin", ("QerlOnlineLinearMethod", "Tiled")),
    ],
)
def test_a_kernel_must_be_the_named_one(arm: str, method: str, kernel: str, wrong: tuple[str, str]) -> None:
    right = {"method": method, "kernel": kernel, "layers": 9}
    linear_kernels.check(arm, [right])
    for found in ([right, {"method": wrong[0], "kernel": wrong[1], "layers": 1}], []):
        with pytest.raises(RuntimeError, match=f"another kernel than arm {arm} names"):
            linear_kernels.check(arm, found)


@pytest.mark.slow
@pytest.mark.parametrize("interleave", [False, True])
def test_a_mixture_is_measured_on_one_written_checkpoint(tmp_path: Path, interleave: bool) -> None:
    names = ["bf16_merged", "qerl_nvfp4", "qerl_nvfp4_base"]
    options: dict[str, Any] = {"arms": names, "rank": [4], "repeats": 1, "scratch": tmp_path}
    result = rollout.run("tiny-moe", [Case(2, 8, 20)], interleave=interleave, **options)
    assert not [found for found in result["arms"].values() if "failed" in found]
    assert not list(tmp_path.iterdir())


def test_an_engine_gets_its_options_beside_the_benchmarks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: dict[str, Any] = {}

    def start(config: dict[str, Any], **options: Any) -> None:
        passed.clear()
        passed.update(options)
        raise InterruptedError

    monkeypatch.setattr(random_model, "start", start)
    engine = {"async_scheduling": False, "compilation_config": {"inductor_compile_config": {"triton.enable_pdl": True}}}
    request = {"shape": "tiny", "cases": [(2, 8, 20), (1, 8, 20)], "rank": 4, "tensor_parallel": 1, "scratch": None}
    request |= {"arm": "qerl_nvfp4", "kv_cache_dtype": "auto", "engine": engine, "memory": {"kv_cache_memory_bytes": 7}}

    def options_of(**changed: Any) -> dict[str, Any]:
        with pytest.raises(InterruptedError):
            rollout_arm.begin({**request, **changed}, {})
        return passed

    assert "cudagraph_capture_sizes" not in options_of(cases=[(1, 8, 20), (1, 8, 9, [9])])["compilation_config"]
    options = options_of()
    assert options["async_scheduling"] is False and options["kv_cache_memory_bytes"] == 7
    assert options["scheduler_cls"] == scheduler.NAME and (options["length"], options["sequences"]) == (28, 64)
    assert options["compilation_config"] == engine["compilation_config"] | {"cudagraph_capture_sizes": [1, 2]}
    assert options_of(engine={"scheduler_cls": None})["scheduler_cls"] is None  # vLLM's own scheduler
    assert "scheduler_cls" not in options_of(arm="bf16_merged")


def test_bitsandbytes_gets_a_checkpoint_since_it_loads_nothing_else(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(model: str, load_format: str, **options: Any) -> tuple[str, dict[str, torch.Tensor]]:
        weights = {key: value for file in Path(model).glob("*.safetensors") for key, value in load_file(file).items()}
        return load_format, weights

    monkeypatch.setattr("vllm.LLM", load)
    sizes = {"length": 8, "sequences": 1, "scratch": tmp_path}
    load_format, weights = random_model.start(config_json("tiny"), **sizes, quantization="bitsandbytes")
    assert load_format == "auto" and weights["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
    assert random_model.start(config_json("tiny"), **sizes, quantization="qerl_nvfp4") == ("dummy", {})


def test_lengths_have_the_given_mean_and_spread() -> None:
    found = lengths.draw("lognormal:400,0.8,999999", 20_000)
    assert statistics.mean(found) == pytest.approx(400, rel=0.02)
    assert statistics.stdev(map(math.log, found)) == pytest.approx(0.8, rel=0.02)
    assert lengths.draw("lognormal:400,0.8,700", 20_000) == [min(n, 700) for n in found]
    torch.manual_seed(5)
    assert lengths.draw("lognormal:400,0.8,999999", 3) == found[:3] and len(set(found[:3])) == 3


def test_time_with_few_sequences_left_is_counted() -> None:
    ended = [10 + float(second) for second in range(1, 21)]  # of 20 sequences one ends every second
    assert rollout_arm.share_below(16, 10.0, ended) == 15 / 20, "16 are left until the fifth has ended"
    assert rollout_arm.share_below(20, 10.0, ended) == 19 / 20 and rollout_arm.share_below(21, 10.0, ended) == 1
    assert rollout_arm.share_below(1, 10.0, ended) == 0


def groups_of(monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[dict[str, dict[str, Any]]]:
    """Return the requests of each group of arms that exist at the same time."""
    groups: list[dict[str, dict[str, Any]]] = []

    def take(module: str, requests: Any, cases: Any, repeats: int, note: Any) -> None:
        groups.append(requests)

    monkeypatch.setattr(rollout, "take_turns", take)
    rollout.run("tiny", [Case(1, 2, 3)], **{"arms": ["bf16", "qerl_nvfp4"], **options})
    return groups


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_memory, "installed_gpu", lambda: H200)
    monkeypatch.setattr(rollout_memory, "used_bytes", lambda: GB)


def test_arms_are_started_one_by_one_or_at_once(h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    one_by_one = groups_of(monkeypatch)
    assert [list(group) for group in one_by_one] == [["bf16"], ["qerl_nvfp4"]]
    assert one_by_one[0]["bf16"]["memory"] == {}, "vLLM measures"
    (at_once,) = groups_of(monkeypatch, interleave=True)
    assert list(at_once) == ["bf16", "qerl_nvfp4"]
    assert all(request["memory"]["kv_cache_memory_bytes"] > 0 for request in at_once.values())


def test_variants_and_caches_multiply_the_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = {"seed": 1, "compilation_config": {"mode": 0, "inductor_compile_config": {"combo_kernels": True}}}
    pdl = {"compilation_config": {"inductor_compile_config": {"triton.enable_pdl": True}}}
    options: dict[str, Any] = {"engine": engine, "variants": {"pdl": pdl, "s": {"seed": 2}}}
    (group,) = groups_of(monkeypatch, interleave=True, kv_cache_dtype=["auto", "fp8"], **options)
    names = ["bf16", "bf16, fp8 cache", "bf16, pdl", "bf16, pdl, fp8 cache", "bf16, s", "bf16, s, fp8 cache"]
    assert list(group)[:6] == names and len(group) == 12
    assert group["bf16"]["engine"] == engine
    assert group["bf16, s"]["engine"] == {**engine, "seed": 2}
    joined = {"mode": 0, "inductor_compile_config": {"combo_kernels": True, "triton.enable_pdl": True}}
    assert group["qerl_nvfp4, pdl, fp8 cache"]["engine"] == {"seed": 1, "compilation_config": joined}
    assert group["qerl_nvfp4, pdl, fp8 cache"]["kv_cache_dtype"] == "fp8"


def memory_of(shape: str, names: Any, cases: list[Case], cache: str = "auto", parallel: int = 1) -> dict[str, int]:
    request = {"shape": shape, "rank": 32, "tensor_parallel": parallel, "kv_cache_dtype": cache, "engine": {}}
    planned = rollout_memory.plan(shape, {arm: {**request, "arm": arm} for arm in names}, cases)
    return {name: memory["kv_cache_memory_bytes"] for name, memory in planned.items()}


def test_a_cache_holds_the_largest_case_and_the_prefill(h200: None) -> None:
    token, work = 2 * 28 * 4 * 128 * 2, [Case(8, 256, 512), Case(64, 256, 1024), Case(256, 256, 512)]
    assert memory_of("7B", ["bf16"], work) == {"bf16": int(1.1 * 256 * (768 + 16) * token)}
    assert memory_of("7B", ["bf16"], work, "fp8") == {"bf16": int(1.1 * 256 * (768 + 16) * token / 2)}
    stock = memory_of("7B", ["fp8_merged", "stock_nvfp4_humming", "stock_nvfp4_humming_slots", "fp8"], work)
    assert set(stock.values()) == {int(1.1 * 256 * (768 + 16) * token)}
    assert memory_of("7B", ["bf16"], work[:1]) == {"bf16": int(1.1 * 64 * (768 + 16) * token)}, "64 prompts, not 8"
    assert memory_of("7B", ["bf16"], work, parallel=2) == {"bf16": int(1.1 * 256 * (768 + 16) * token / 2)}


def test_engines_that_do_not_fit_together_are_refused(h200: None) -> None:
    work = [Case(256, 128, 128)]
    assert len(memory_of("7B", ["bf16_merged", "bf16", "qerl_nvfp4", "qerl_nvfp4_float16"], work)) == 4
    assert len(memory_of("32B", ["bf16_merged", "bf16", "qerl_nvfp4"], work, parallel=2)) == 3
    with pytest.raises(ValueError, match="--interleave has 3 engines at once, which take") as error:
        memory_of("32B", ["bf16_merged", "bf16", "qerl_nvfp4"], work)
    message = str(error.value)
    assert "149.8 GB of its 150.8 GB are free" in message and "or leave --interleave out" in message
    # The weights of 32B take 65.5 GB, by hand. The cache is 1.1 x 256 x (256 + 16) tokens of 256 KiB.
    assert "bf16_merged" in message and "(cache 20.1 GB, weights 65.5 GB, at work" in message
    with pytest.raises(ValueError, match=f"{len(ARMS)} engines at once"):
        memory_of("7B", ARMS, [Case(256, 256, 512)])


def test_rates_are_of_the_median_and_a_failed_arm_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"bf16_merged": [2.0, 4.0], "qerl_nvfp4": [], "bf16": [4.0]}
    order: list[str] = []

    def take_turns(module: str, requests: dict[str, Any], cases: Any, repeats: int, note: Any) -> None:
        (arm,) = requests
        order.append(arm)
        if not seconds[arm]:
            note(arm, {"failed": "its messages are above"})
            return
        note(arm, {"weights_gib": 1.0, "kv_cache_tokens": 5000})
        case = {"batch": 4, "input": 10, "output": 21, "seconds": seconds[arm], "prefill_seconds": [0.5, 0.5]}
        note(arm, {"case": case})
        note(arm, {"prefill": {"tokens": 640, "seconds": seconds[arm]}})

    monkeypatch.setattr(rollout, "take_turns", take_turns)
    rollout.run("tiny", [Case(4, 10, 21)], arms=list(seconds), output=tmp_path / "rollout.json")
    assert order == list(seconds)
    found = json.loads((tmp_path / "rollout.json").read_text())["arms"]
    merged = found["bf16_merged"]["batch"]["4"]
    assert (merged["seconds"], merged["tokens_per_s"], merged["spread"]) == ([2.0, 4.0], 4 * 21 / 3, 2 / 3)
    assert merged["decode"] == {"tokens_per_s": 4 * 20 / 2.5, "spread": 2 / 2.5}
    assert merged["prefill"]["tokens_per_s"] == 4 * 10 / 0.5
    assert found["bf16_merged"]["prefill"] == {
        "tokens": 640,
        "seconds": [2.0, 4.0],
        "tokens_per_s": 640 / 3,
        "spread": 2 / 3,
    }
    assert found["qerl_nvfp4"] == {"failed": "its messages are above"}
    assert found["bf16"]["batch"]["4"]["spread"] is None


def test_ratios_are_to_the_faster_bf16_arm(capsys: pytest.CaptureFixture[str]) -> None:
    def arm(rate: float, cache: int = 200) -> dict[str, Any]:
        row = {"tokens_per_s": rate, "spread": 0.1}
        rows = {"batch": {"8": {**row, "batch": 8, "input": 1, "output": 2, "decode": row}}, "prefill": row}
        return {**rows, "weights_gib": None, "kv_cache_tokens": cache}

    found = {"qerl_nvfp4": arm(300.0), "bf16": arm(150.0, 199), "bf16_merged": arm(200.0), "nf4": {"failed": "why"}}
    about = {"shape": "7B", "tensor_parallel_size": 2, "rank": [8], "gpu": "x", "date": "y", "cached_tokens": 200}
    rollout._print({**about, "arms": found})
    printed = capsys.readouterr().out
    assert "bf16: its KV cache holds 199 of 200 tokens, so some wait" in printed and printed.count("some wait") == 1
    assert "300 ±5%" in printed and "(1.50x)" in printed and "(0.75x)" in printed and "tensor parallel 2" in printed
    assert "nf4 failed: why" in printed
