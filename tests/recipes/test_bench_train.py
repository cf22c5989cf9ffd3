"""``qerl bench train``: a whole run on a CPU, what is refused, what is planned for a GPU, and the figures."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from qerl_recipes import bench_checkpoint, bench_train, bench_train_process, cli, model
from qerl_recipes.bench_conditions import Device
from qerl_recipes.bench_train_process import ArmFailedError, ArmProcess
from qerl_recipes.bench_train_summary import PARTS, goals, summarize
from qerl_recipes.bench_train_workload import Workload, parse_overrides, random_reward
from qerl_recipes.shapes import config_json

TINY = Workload("tiny", groups=2, generations=2, prompt=8, completion=8, steps=2, rank=4, seed=0)
H200 = Device("NVIDIA H200", "580", 150_000_000_000, is_hopper=True)


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize("arms", ["qerl_nvfp4", "bf16,qerl_nvfp4"], ids=["one", "two"])
def test_arms_make_whole_steps_on_a_cpu(arms: str, tmp_path: Path) -> None:
    """Through the command, so that the way from its options to the engine's completions is the users'."""
    file = tmp_path / "tiny.json"
    options = f"--shape tiny --arms {arms} --groups 2 --generations 2 --prompt 8 --completion 8 --steps 2"
    line = [
        "bench",
        "train",
        *options.split(),
        "--rank",
        "4",
        "--pack_tokens",
        "48",
        "--profile",
        "--output",
        str(file),
    ]
    done = CliRunner().invoke(cli.app, line)
    assert done.exit_code == 0, done.output
    assert "1.00x" in done.output and "log p" in done.output
    result = json.loads(file.read_text())
    assert result["order"].startswith("in turn")
    assert {"torch", "trl", "peft"} < result["versions"].keys() and result["date"] and result["seed"] == 0
    for arm, found in result["arms"].items():
        assert found["recipe"]["quantization"] == arm
        assert len(found["steps"]) == len(found["training_part"]) == 2
        for step in found["steps"]:
            seconds = dict(step["seconds"])
            assert all(seconds[part] > 0 for part in ("rollout", "scoring", "training", "swap", "rest"))
            assert sum(seconds[part] for part in PARTS) == pytest.approx(seconds["step"])
            assert 0 < step["metrics"]["logp_mismatch_mean"] < 0.02
            assert step["metrics"]["grad_norm"] > 0
        assert found["training_part"][0]["tokens"] == 48
        (profile,) = found["profile"]
        assert any("mm" in kernel["name"] for kernel in profile["kernels"])
        assert 0 < sum(kernel["ms"] for kernel in profile["kernels"]) <= profile["kernels_ms"]
        summary = result["summary"][arm]
        assert summary["seconds"]["step"] == found["steps"][1]["seconds"]["step"]
        assert summary["rollout_tokens_per_s"] == pytest.approx(2 * 2 * 8 / summary["seconds"]["rollout"])
    assert file.with_suffix(".png").stat().st_size > 10_000


REFUSALS: dict[str, tuple[list[str], str]] = {
    "unknown shape": (["--shape", "9B"], "unknown shape '9B'"),
    "unknown arm": (["--arms", "bf16,fp8"], "unknown arm 'fp8'"),
    "an arm twice": (["--arms", "bf16,bf16"], "name each of them once"),
    "nf4 without a GPU": (["--arms", "bf16,nf4"], "arm nf4 \\(bitsandbytes\\) needs a CUDA GPU"),
    "a limit without a GPU": (["--gpu_memory_gb", "80"], "a limit of GPU memory needs a CUDA GPU"),
    "one step": (["--steps", "1"], "steps is 1, and must be at least 2"),
    "unknown part": (["--part", "rollout"], "part is 'rollout'"),
    "a plan for a step, in all parts": (["--checkpointed_layers", "-1"], "measure --part step"),
    "a fixed key": (["--lora_r", "8"], "lora_r is not for a flag"),
    "a stray word": (["fast"], "'fast' is neither an option"),
    "uneven micro-batches": (["--per_device_train_batch_size", "7"], "does not divide the 64 completions"),
}


@pytest.mark.parametrize(("options", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_train, "ArmProcess", lambda *a: pytest.fail("an arm was started"))
    line = ["bench", "train", "--shape", "tiny", "--arms", "bf16,qerl_nvfp4", *options]
    with pytest.raises(ValueError, match=message):
        CliRunner().invoke(cli.app, line, catch_exceptions=False)


def test_checkpoints_that_do_not_fit_on_the_disk_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 10_000_000_000}))
    with pytest.raises(OSError, match=r"10\.0 GB free and the checkpoints take 21\.1 GB"):
        bench_train._check_disk(replace(TINY, shape="7B"), bench_train.ARMS, tmp_path)


def test_a_run_that_is_terminated_leaves_no_checkpoint_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def terminated(*arguments: Any) -> None:
        (folder,) = tmp_path.glob("scratch/*")
        (folder / "checkpoint").write_text("")
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(bench_train, "_measure", terminated)
    (tmp_path / "scratch").mkdir()
    with pytest.raises(SystemExit, match="143"):
        bench_train.run(TINY, arms=["bf16"], scratch=tmp_path / "scratch", output=tmp_path / "out.json")
    assert not list(tmp_path.glob("scratch/*")) and not (tmp_path / "out.json").exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_flag_counts_for_every_arm_and_stands_above_the_recipe() -> None:
    overrides = parse_overrides(["--pack_tokens=300", "--learning-rate", "1e-3"])
    work = replace(TINY, groups=6, generations=8, completion=16, overrides=overrides)
    recipe = work.recipe("bf16", cuda=True)
    assert recipe["learning_rate"] == "1e-3" and recipe["pack_tokens"] == "300"
    # a group has 8 + 8 * 16 tokens: two of them make a micro-batch, and three micro-batches a step
    assert (recipe["per_device_train_batch_size"], recipe["gradient_accumulation_steps"]) == (16, 3)
    smaller = replace(work, overrides=parse_overrides(["--per_device_train_batch_size", "4"]))
    assert smaller.recipe("bf16", cuda=True)["gradient_accumulation_steps"] == 12
    other = work.recipe("qerl_nvfp4", cuda=True)
    assert {key for key in recipe if recipe[key] != other[key]} == {"quantization"}


def test_each_arm_keeps_as_much_as_its_weights_leave_room_for_within_the_limit() -> None:
    device = Device("H200", "580", 150 * 10**9, True)
    work = Workload("7B", 8, 8, 256, 1024, 2, 32, 0, (("checkpointed_layers", "-1"),))
    found = {arm: bench_train._recipe(work, arm, device, 64 * 10**9) for arm in bench_train.ARMS}
    blocks = {arm: recipe["recipe"]["checkpointed_layers"] for arm, recipe in found.items()}
    assert blocks["qerl_nvfp4"] < blocks["nf4"] < blocks["bf16"] < 28
    assert all(recipe["planned_bytes"] < 64 * 10**9 for recipe in found.values())
    unlimited = bench_train._recipe(work, "bf16", device, None)
    assert unlimited["recipe"]["checkpointed_layers"] == 0


@pytest.mark.parametrize("arm", bench_train.ARMS)
def test_the_engine_gets_room_for_every_sequence_and_the_trainer_the_rest(arm: str) -> None:
    from qerl_recipes import memory_plan
    from qerl_recipes.bench_train_workload import flags
    from qerl_recipes.configs import parse
    from qerl_recipes.memory_parts import Gpu

    work = Workload("7B", groups=8, generations=8, prompt=256, completion=1024, steps=3, rank=32, seed=0)
    planned = bench_train._recipe(work, arm, H200, None)
    share = float(planned["recipe"]["vllm_gpu_memory_utilization"])
    settings = parse(flags(work.recipe(arm, cuda=False, engine_share=share)))
    plan = memory_plan.make(*settings, gpu=Gpu(H200.memory, True), config=config_json("7B"))
    cache = next(part.rollout for part in plan.parts if part.name == "KV cache")
    sequences = 64 * 1280 * 2 * 28 * 4 * 128 * 2  # 28 layers, 4 heads of 128 for keys and for values, 2 bytes
    assert sequences < cache < sequences + 4_000_000_000
    assert planned["planned_bytes"] == plan.peak and plan.fits


def test_the_two_checkpoints_hold_the_same_weights(tmp_path: Path) -> None:
    """Up to rounding to 4 bits, and the packed one is what quantizing the other while it loads gives."""
    config = TINY.config()
    for packed in (False, True):
        bench_checkpoint.write(tmp_path / str(packed), config, packed=packed, seed=3, device="cpu")
    on_the_way = model.load(tmp_path / "False", quantization="qerl_nvfp4").state_dict()
    packed = model.load(tmp_path / "True").state_dict()
    assert on_the_way.keys() == packed.keys()
    assert all(torch.equal(value, packed[name]) for name, value in on_the_way.items() if "placeholder" not in name)
    sizes = {name: sum(t.nbytes for f in (tmp_path / name).glob("*.safetensors") for t in load_file(f).values())
             for name in ("False", "True")}  # fmt: skip
    assert sizes["False"] == bench_checkpoint.size(config, packed=False)
    assert sizes["True"] == bench_checkpoint.size(config, packed=True) + 2 * 7 * 4
    bench_checkpoint.write(tmp_path / "other", config, packed=False, seed=4, device="cpu")
    shard = "model-00002-of-00003.safetensors"
    first, other = (load_file(tmp_path / name / shard) for name in ("False", "other"))
    assert all(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("vocabulary", [512, 152064])
def test_every_character_of_a_prompt_is_one_token(vocabulary: int, tmp_path: Path) -> None:
    """As transformers loads a Qwen2 checkpoint's tokenizer, whatever class it was saved as."""
    from transformers import AutoTokenizer

    made = bench_checkpoint.tokenizer(vocabulary)
    made.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TINY.config()))
    text = bench_checkpoint.CHARACTERS
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for tokenizer in (made, loaded):
        assert tokenizer(text)["input_ids"] == list(range(2, 2 + len(text)))
        assert len(tokenizer) == vocabulary


def test_rewards_are_spread_and_depend_on_the_completion_alone() -> None:
    ids = [[i, i + 1] for i in range(500)]
    rewards = random_reward(ids)
    assert rewards == random_reward(ids) and len(set(rewards)) == 500
    assert 0.4 < sum(rewards) / 500 < 0.6


def answer(seconds: float, allocated: int, before: int = 0, peak: int = 0, after: int = 0) -> dict[str, Any]:
    memory = {"allocated": allocated, "reserved": allocated, "used_before": before, "used_peak": peak}
    return {"seconds": seconds, "memory": {**memory, "used_after": after}, "process_bytes": 0}


def step(seconds: float, mismatch: float = 1e-3) -> dict[str, Any]:
    parts = {"step": seconds, **dict.fromkeys(PARTS, seconds / 8)}
    return {**answer(0, 10), "seconds": parts, "metrics": {"logp_mismatch_mean": mismatch}}


def made_up(**arms: tuple[list[float], list[float]]) -> dict[str, Any]:
    """A result on a GPU: seconds of the steps and of the training part of each arm."""
    found = {
        arm: {
            "steps": [step(seconds) for seconds in steps],
            "training_part": [{**answer(seconds, 7), "tokens": 100} for seconds in pieces],
            "held_bytes": 5_000_000_000,
        }
        for arm, (steps, pieces) in arms.items()
    }
    result = {
        "shape": "7B",
        "groups": 2,
        "generations": 4,
        "prompt": 10,
        "completion": 30,
        "driver": "1",
        "arms": found,
    }
    return {**result, "summary": summarize(result)}


def test_the_first_step_is_not_counted_and_the_others_give_median_and_spread() -> None:
    summary = made_up(bf16=([900.0, 8.0, 12.0, 9.0], [100.0, 2.0, 4.0]))["summary"]["bf16"]
    assert summary["seconds"]["step"] == 9.0
    assert summary["spread"] == pytest.approx(4 / 9)
    assert summary["rollout_tokens_per_s"] == pytest.approx(2 * 4 * 30 / (9 / 8))
    assert summary["training_tokens_per_s"] == pytest.approx(2 * 4 * 40 / (9 / 8))
    assert summary["training_part"]["seconds"] == 3.0
    assert summary["peak_gb"]["process"] == 5.0


def test_goals_say_by_how_much_they_are_missed() -> None:
    result = made_up(
        bf16=([9.0, 12.0], [9.0, 1.0]), nf4=([9.0, 15.0], [9.0, 1.0]), qerl_nvfp4=([9.0, 10.0], [9.0, 1.25])
    )
    found = {goal.what.rsplit(" ", 1)[-1]: goal for goal in goals(result)[:2]}
    assert found["BF16"].value == pytest.approx(1.2) and found["BF16"].missed_by == pytest.approx(0.1 / 1.3)
    assert found["NF4"].value == pytest.approx(1.5) and not found["NF4"].is_met
    alone, mismatch, swap = goals(result)[2:]
    assert alone.value == pytest.approx(0.8) and not alone.is_met
    assert mismatch.is_met and mismatch.missed_by == 0
    assert swap.ceiling and not swap.is_met  # an eighth of ten seconds
    assert goals({**result, "driver": None}) == []


CHILD = """
import json, sys
print(json.dumps({"imported": True}), flush=True)
assert sys.stdin.readline() == "load\\n"
print(json.dumps({"load_seconds": 1}), flush=True)
for number, command in enumerate(sys.stdin):
    if number == 2:
        print(json.dumps({"failed": "OutOfMemory: too little"}), flush=True)
        raise SystemExit(1)
    memory = {"used_before": 40, "used_peak": 40 + 100 * (number + 1), "used_after": 45}
    print(json.dumps({"did": command.strip(), "memory": memory}), flush=True)
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """child(source): the module that an arm's process runs."""

    def install(source: str) -> None:
        (tmp_path / "made_up_arm.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(bench_train_process, "MODULE", "made_up_arm")

    return install


def test_the_memory_of_an_arm_is_what_has_come_since_it_started(child: Callable[[str], None]) -> None:
    """It holds 20 bytes from its imports, others hold 1000; loading takes 280 more, and each step keeps 5."""
    child(CHILD)
    readings = iter([1020, 1300])
    with ArmProcess({}) as arm:
        arm.wait_for_imports()
        assert arm.load(lambda: next(readings), already=20) == {"load_seconds": 1, "held_bytes": 300}
        assert arm.ask("step")["process_bytes"] == 300 + 100
        assert arm.ask("step")["process_bytes"] == 305 + 200


def test_an_arm_that_fails_says_why_and_the_others_go_on(child: Callable[[str], None]) -> None:
    child(CHILD)
    found: dict[str, Any] = {arm: {"steps": [], "training_part": []} for arm in ("one", "two")}
    saved: list[str] = []
    bench_train._measure(
        {"one": {}, "two": {}}, {"step": 1, "training": 2}, None, found, lambda: saved.append(json.dumps(found))
    )
    for arm in found.values():
        assert (len(arm["steps"]), len(arm["training_part"])) == (1, 1)
        assert arm["failed"] == "OutOfMemory: too little"
    assert len(saved) == 3 and "failed" not in saved[1]
    child("raise SystemExit(3)")
    with ArmProcess({}) as process, pytest.raises(ArmFailedError, match="ended with code 3"):
        process.wait_for_imports()
