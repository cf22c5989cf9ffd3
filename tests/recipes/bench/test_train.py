"""Test ``qerl bench train``: a whole run on a CPU, the memory planned for a GPU, and the figures."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from qerl_recipes import cli
from qerl_recipes.bench import random_model
from qerl_recipes.bench import train as bench_train
from qerl_recipes.bench.train import PARTS, Workload, flags, parse_overrides, summarize
from qerl_recipes.files import base_model
from qerl_recipes.hooks import get_plugin_manager
from qerl_recipes.machine.gpu import GB, Gpu
from qerl_recipes.memory.plan import make
from qerl_recipes.recipe.configs import parse
from qerl_recipes.recipe.keys import HONOURED
from qerl_recipes.recipe.shapes import config_json

TINY = Workload("tiny", groups=2, generations=2, prompt=8, completion=8, steps=2, rank=4, seed=0)
H200 = Gpu(150_000_000_000, is_hopper=True)


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "names"),
    [("tiny", "qerl_nvfp4"), ("tiny", "bf16,qerl_nvfp4"), ("tiny-moe", "qerl_nvfp4")],
    ids=["one", "two", "a mixture"],
)
def test_arms_make_whole_steps_on_a_cpu(shape: str, names: str, tmp_path: Path) -> None:
    """Run the command, so that the test takes the users' way from its options to the engine's completions."""
    file = tmp_path / "tiny.json"
    options = f"--shape {shape} --arms {names} --groups 2 --generations 2 --prompt 8 --completion 8 --steps 2"
    line = f"bench train {options} --rank 4 --pack_tokens 48 --output {file}"
    done = CliRunner().invoke(cli.app, line.split())
    assert done.exit_code == 0, done.output
    assert "1.00x" in done.output and "log p" in done.output
    result = json.loads(file.read_text())
    assert {"torch", "trl", "peft"} < result["versions"].keys() and result["date"] and result["seed"] == 0
    for arm, found in result["arms"].items():
        assert found["recipe"]["quantization"] == arm
        assert len(found["steps"]) == 2
        for step in found["steps"]:
            seconds = dict(step["seconds"])
            assert all(seconds[part] > 0 for part in ("rollout", "scoring", "training", "swap", "rest"))
            assert sum(seconds[part] for part in PARTS) == pytest.approx(seconds["step"])
            assert 0 < step["metrics"]["logp_diff_mean"] < 0.02
            assert step["metrics"]["grad_norm"] > 0
        summary = result["summary"][arm]
        assert summary["seconds"]["step"] == found["steps"][1]["seconds"]["step"]
        assert summary["rollout_tokens_per_s"] == pytest.approx(2 * 2 * 8 / summary["seconds"]["rollout"])


@pytest.mark.integration
@pytest.mark.slow
def test_other_stacks_make_whole_steps_on_a_cpu(tmp_path: Path) -> None:
    """Learn so fast that an engine left behind by a step or two differs from the trainer ten times as much."""
    file = tmp_path / "others.json"
    options = "--shape tiny --arms trl_stock,fp8_rollout --groups 2 --generations 2 --prompt 8 --completion 8 --steps 4"
    line = f"bench train {options} --rank 4 --learning_rate 0.01 --pack_tokens 48 --output {file}"
    done = CliRunner().invoke(cli.app, line.split())
    assert done.exit_code == 0, done.output
    assert "TRL has no pack_tokens: left out" in done.output
    result = json.loads(file.read_text())
    for arm, least, most in (("trl_stock", 1e-4, 0.005), ("fp8_rollout", 0.005, 0.02)):
        found = result["arms"][arm]
        assert len(found["steps"]) == 4
        for step in found["steps"]:
            seconds = dict(step["seconds"])
            assert all(seconds[part] > 0 for part in ("rollout", "scoring", "training", "swap", "rest"))
            assert sum(seconds[part] for part in PARTS) == pytest.approx(seconds["step"])
            assert least < step["metrics"]["logp_diff_mean"] < most, arm
            assert step["metrics"]["grad_norm"] > 0
        assert result["summary"][arm]["logp_diff_mean"] < most
    of_trl = result["arms"]["trl_stock"]["recipe"]
    assert (of_trl["per_device_train_batch_size"], of_trl["gradient_accumulation_steps"]) == (4, 1)


def test_checkpoints_too_large_for_the_disk_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 10_000_000_000}))
    with pytest.raises(OSError, match=r"10\.0 GB free and the checkpoints take 21\.1 GB"):
        random_model.check_disk(config_json("7B"), tmp_path, {True, False})
    with pytest.raises(OSError, match=r"10\.0 GB free and the checkpoints take 15\.2 GB"):  # `qerl bench rollout`
        random_model.start(config_json("7B"), length=8, sequences=1, scratch=tmp_path, quantization="bitsandbytes")
    assert not list(tmp_path.glob("**/*.safetensors"))


def test_a_flag_overrides_the_recipe_of_every_arm() -> None:
    overrides = parse_overrides(["--pack_tokens=300", "--learning-rate", "1e-3"])
    work = replace(TINY, groups=6, generations=8, completion=16, overrides=overrides)
    recipe = work.recipe("bf16", cuda=True)
    assert recipe["learning_rate"] == "1e-3" and recipe["pack_tokens"] == "300"
    assert recipe["generation_batch_size"] == 48 and "per_device_train_batch_size" not in recipe
    smaller = replace(work, overrides=parse_overrides(["--per_device_train_batch_size", "4"])).recipe("bf16", cuda=True)
    assert smaller["gradient_accumulation_steps"] == 12 and "generation_batch_size" not in smaller
    other = work.recipe("qerl_nvfp4", cuda=True)
    assert {key for key in recipe if recipe[key] != other[key]} == {"quantization"}


RECIPES = Path(__file__).parents[3] / "recipes"
SHIPPED = [*RECIPES.glob("Qwen3-[3-4]*B/grpo/nvfp4_lora.yaml"), *RECIPES.glob("Qwen2.5-7B-Instruct/grpo/[bn]*.yaml")]
SHIPPED += RECIPES.glob("Qwen2.5-32B-Instruct/grpo/paper_dapo_nvfp4_lora_aqn.yaml")


def test_a_recipe_is_timed_as_it_is_trained() -> None:
    """Compare each key that the trainer, the engine or the plan reads with that of `qerl train`."""
    own = {"generation_kwargs", "max_steps", "use_cpu", "bf16"}
    for path in SHIPPED:
        work, arm = Workload.of(path, 256, 3, ())
        work.check()
        timed = parse(flags({**work.recipe(arm, cuda=False), "output_dir": "unused"}))
        trained = parse(["--config", str(path), "--use_cpu", "true", "--bf16", "false"])
        keys = HONOURED - bench_train.REPLACED - own
        for before, now in zip(trained, timed, strict=True):
            differing = [key for key in keys if getattr(before, key, None) != getattr(now, key, None)]
            assert not differing, (path, differing)
        assert timed[1].splits_by_tokens and arm == trained[1].quantization
        config = base_model.read_config(str(trained[2].model_name_or_path))
        gpu = Gpu(80 * GB, is_hopper=True)
        chosen, planned = bench_train._recipe(work, arm, gpu, None)["recipe"], make(*trained, gpu=gpu, config=config)
        assert (chosen["pack_tokens"], chosen["recompute_layers"]) == (planned.pack_tokens, planned.checkpointed)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, light_engines: None) -> Iterator[None]:
    """Train an arm in this process, because another would import torch, vLLM and TRL again."""
    from qerl_recipes.bench import train_arm

    trainers: list[Any] = []

    def begin(request: Any) -> Any:
        begun = train_arm.begin(request)
        trainers.append(begun[0])
        return begun

    def ask(module: str, request: dict[str, Any]) -> dict[str, Any]:
        assert module == train_arm.__name__
        figures: dict[str, Any] = {}
        train_arm.measure(json.loads(json.dumps(request)), figures, begin)
        return json.loads(json.dumps(figures))

    monkeypatch.setattr(bench_train, "ask_once", ask)
    yield
    get_plugin_manager().unregister(train_arm)
    for trainer in trainers:
        trainer.vllm_generation.close()


@pytest.mark.integration
def test_a_recipe_makes_whole_steps_on_a_cpu(
    tmp_path: Path, in_this_process: None, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(config_json("tiny")))
    recipe = {"model_name_or_path": str(tmp_path / "model"), "lora_r": 4, "output_dir": "unused", "dtype": "float32"}
    recipe |= {
        "dataset_name": "gsm8k",
        "max_prompt_length": 16,
        "system_prompt": "Think.",
        "reward_weights": [1.0, 0.1],
    }
    recipe |= {"num_generations": 2, "max_completion_length": 8, "generation_batch_size": 8, "pack_tokens": 24}
    recipe |= {"reward_funcs": ["accuracy", "soft_format"], "learning_rate": 1e-4, "save_steps": 50}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    line = f"bench train --config {tmp_path}/recipe.yaml --prompt 8 --steps 2 --output {tmp_path}/out.json"
    cli.app(line.split(), standalone_mode=False)  # vLLM needs a standard output that is a file
    (found,) = json.loads((tmp_path / "out.json").read_text())["arms"].values()
    assert len(found["steps"]) == 2


@pytest.mark.parametrize("arm", bench_train.OWN_ARMS)
def test_the_engine_gets_room_for_every_sequence(arm: str) -> None:
    from qerl_recipes.memory import plan as memory_plan
    from qerl_recipes.recipe.configs import parse

    work = Workload("7B", groups=8, generations=8, prompt=256, completion=1024, steps=3, rank=32, seed=0)
    planned = bench_train._recipe(work, arm, H200, None)
    share = float(planned["recipe"]["vllm_gpu_memory_utilization"])
    settings = parse(flags(work.recipe(arm, cuda=False, engine_share=share)))
    plan = memory_plan.make(*settings, gpu=H200, config=config_json("7B"))
    cache = next(part.rollout for part in plan.parts if part.name == "KV cache")
    # 28 layers, 4 heads of 128 for keys and values each, 2 bytes per number
    sequences = 64 * 1280 * 2 * 28 * 4 * 128 * 2
    assert sequences < cache < sequences + 4_000_000_000
    assert planned["planned_bytes"] == plan.at_full_length < plan.peak and plan.fits


def test_trl_s_engine_gets_what_trl_s_model_leaves() -> None:
    work = Workload("14B", groups=8, generations=8, prompt=256, completion=1024, steps=3, rank=32, seed=0)
    chosen = bench_train._recipe(work, "trl_stock", H200, 80_000_000_000)["recipe"]
    engine = float(chosen["vllm_gpu_memory_utilization"]) * H200.memory
    assert 30_000_000_000 < engine < 80_000_000_000 - 2 * 14_770_033_664 - 2_000_000_000  # 14.8 billion BF16 weights
    asked = replace(work, overrides=(("vllm_gpu_memory_utilization", "0.5"),))
    recipe = bench_train._recipe(asked, "trl_stock", H200, 80_000_000_000)["recipe"]
    assert recipe["vllm_gpu_memory_utilization"] == "0.5"


def test_the_parts_of_a_step_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qerl_recipes.bench import train_arm
    from qerl_recipes.rollout.engine import VLLMRollouts

    clock, model = [100.0], torch.nn.Linear(1, 1)

    def takes(seconds: float) -> None:
        clock[0] += seconds

    def sync(engine: Any) -> None:
        engine._wake()
        takes(3)

    def generate(engine: Any) -> tuple[Any, ...]:
        takes(10)
        engine._sleep()
        return None, [[0] * 20, [0] * 12], None, None

    def roll_out(inputs: Any) -> None:
        engine.sync_weights()
        engine.generate()
        takes(5)  # time for rewards and advantages

    monkeypatch.setattr(train_arm, "now", lambda: clock[0])
    monkeypatch.setattr(VLLMRollouts, "_wake", lambda engine: takes(2))
    monkeypatch.setattr(VLLMRollouts, "_sleep", lambda engine: takes(4))
    monkeypatch.setattr(VLLMRollouts, "sync_weights", sync)
    monkeypatch.setattr(VLLMRollouts, "generate", generate)
    engine = VLLMRollouts.__new__(VLLMRollouts)
    trainer = SimpleNamespace(vllm_generation=engine, model=model, _generate_and_score_completions=roll_out)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.1}\n{"step": 2, "reward": 0.5, "kl": 1}\n')
    answers: list[dict[str, Any]] = []
    steps, args = train_arm.TimedSteps(trainer, 32, answers), (SimpleNamespace(output_dir=tmp_path), None, None)
    for _ in range(2):
        steps.on_step_begin(*args)
        trainer._generate_and_score_completions(None)
        with torch.no_grad():
            model(torch.ones(1))
        takes(1)  # this was no forward pass of the training
        model(torch.ones(1))
        takes(6)
        model(torch.ones(1))  # belongs to the next micro-batch
        takes(7)
        steps.on_optimizer_step(*args)
        takes(0.5)
        steps.on_step_end(*args)
    parts = {"rollout": 10, "scoring": 5, "training": 13, "swap": 3, "sleep": 6, "rest": 1.5}
    assert [answer["seconds"] for answer in answers] == [{"step": 38.5, **parts}] * 2
    assert parts.keys() == set(PARTS) and answers[0]["metrics"] == {"reward": 0.5}
    steps.expected_tokens = 31
    with pytest.raises(RuntimeError, match="generated 32 tokens and not 31"):
        steps.on_step_end(*args)


def step(seconds: float, process: int = 0) -> dict[str, Any]:
    parts = {"step": seconds, **dict.fromkeys(PARTS, seconds / 8)}
    memory = {"allocated": 10, "reserved": 10, "process": process}
    return {"seconds": parts, "memory": memory, "metrics": {"logp_diff_mean": 1e-3}}


def made_up(*steps: dict[str, Any]) -> dict[str, Any]:
    """Summarize an arm with these steps."""
    arms = {"bf16": {"steps": list(steps)}}
    return summarize({"groups": 2, "generations": 4, "prompt": 10, "completion": 30, "arms": arms})["bf16"]


def test_the_first_step_is_not_counted() -> None:
    seconds = [900.0, 8.0, 12.0, 9.0]
    summary = made_up(*(step(s, process=5_000_000_000 + i) for i, s in enumerate(seconds)))
    assert summary["seconds"]["step"] == 9.0
    assert (summary["repeats"], summary["spread"]) == (3, pytest.approx(4 / 9))
    assert summary["rollout_tokens_per_s"] == pytest.approx(2 * 4 * 30 / (9 / 8))
    assert summary["training_tokens_per_s"] == pytest.approx(2 * 4 * 40 / (9 / 8))
    assert summary["peak_gb"]["process"] == pytest.approx(5.000000003)
    once = made_up(step(900.0), step(8.0))
    assert (once["repeats"], once["spread"]) == (1, None)
