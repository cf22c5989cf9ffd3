"""The memory plan of every recipe: its parts, what lowers them, and what it advises where it does not fit."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from qerl_recipes.machine.gpu import GB, Gpu
from qerl_recipes.memory import table as memory_table
from qerl_recipes.memory.activation_bytes import MicroBatch, at_work
from qerl_recipes.memory.model_size import measure
from qerl_recipes.memory.parts import Part, Plan
from qerl_recipes.memory.plan import make
from qerl_recipes.recipe import shapes
from qerl_recipes.recipe.configs import GRPOConfig, parse
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.study.plan import flags

RECIPES = Path(__file__).parents[3] / "recipes"
ON_A_GPU = sorted(path for path in RECIPES.glob("*/grpo/*.yaml") if path.parts[-3] != "demo")
CPU = ["--use_cpu", "true", "--bf16", "false"]
NVFP4_32B = RECIPES / "Qwen2.5-32B-Instruct/grpo/nvfp4_lora_aqn.yaml"
NVFP4_32B_NO_NOISE = NVFP4_32B.with_name("nvfp4_lora.yaml")
HOPPER, NO_HOPPER = Gpu(80 * GB, is_hopper=True), Gpu(80 * GB, is_hopper=False)


def plan(path: Path, *flags: str, gpu: Gpu = HOPPER) -> Plan:
    """With all blocks recomputed where no flag says how many."""
    settings = parse(["--config", str(path), *CPU, *flags])
    if "--recompute_layers" not in flags:
        settings[1].recompute_layers = None
    return make(*settings, gpu=gpu)


def part(plan: Plan, name: str) -> Part:
    return next(part for part in plan.parts if part.name == name)


@pytest.mark.parametrize("path", ON_A_GPU, ids=[f"{path.parts[-3]}/{path.stem}" for path in ON_A_GPU])
def test_every_recipe_fits_the_gpu_that_its_header_names(path: Path) -> None:
    """On any GPU of that size: from 80 GB on there are some with tiles and some with Marlin."""
    found = re.search(r"^# GPU: meant for one of (\d+) GB", path.read_text(), re.MULTILINE)
    assert found is not None
    settings = parse(["--config", str(path), *CPU])
    if str(settings[2].model_name_or_path).startswith("runs/models/SmolLM2-135M"):  # a folder that a command makes
        settings[2].model_name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    for is_hopper in {False, int(found.group(1)) >= 80}:
        planned = make(*settings, gpu=Gpu(int(found.group(1)) * GB, is_hopper))
        assert planned.fits, planned.obstacles()
        assert part(planned, "KV cache").rollout > 0


def test_32b_on_one_copy_of_its_weights_takes_less_than_45_gb() -> None:
    planned = plan(NVFP4_32B)
    assert planned.peak < 45 * GB
    assert part(planned, "trainer's weights").training < 0.01 * GB
    assert part(planned, "engine's weights").training == pytest.approx(20.7e9, rel=0.01)


@pytest.mark.parametrize("gpu", [HOPPER, NO_HOPPER], ids=["tiles", "Marlin"])
def test_without_sharing_there_is_a_second_copy(gpu: Gpu) -> None:
    own = part(plan(NVFP4_32B, "--share_weights", "false", gpu=gpu), "trainer's weights")
    assert own.training == pytest.approx(20.7e9, rel=0.01)
    assert own.detail == "own copy: share_weights: false"
    assert "share_weights: true" in own.knobs


def test_beside_marlins_layout_there_is_no_second_copy_unless_share_weights_says_so() -> None:
    """The trainer has norms alone, and at work a layer in the checkpoint's layout before it is expanded."""
    gpu, norms = NO_HOPPER, (2 * 64 + 1) * 5120 * 4
    apart, shared = plan(NVFP4_32B, "--share_weights", "false", gpu=gpu), plan(NVFP4_32B, gpu=gpu)
    assert shared == plan(NVFP4_32B, "--share_weights", "true", gpu=gpu)
    assert part(shared, "trainer's weights").detail == "reads the engine's weights; its own: norms"
    assert norms <= part(shared, "trainer's weights").training < norms + 1e6
    assert not any("share_weights" in knob for knob in part(shared, "trainer's weights").knobs)
    assert shared.peak < apart.peak
    size = measure(shapes.config_json("7B"))
    batch, options = MicroBatch(64, 64, 64, 0, 64), {"checkpointing": True, "expands": True}
    (expanded, _), (rearranged, _) = (at_work(size, batch, 0, **options, rearranges=r) for r in (False, True))
    assert rearranged - expanded == 18944 * 3584 * 9 // 16


def test_an_engine_that_sleeps_gives_its_cache_back_and_without_sharing_its_weights_too() -> None:
    shared = plan(NVFP4_32B, "--vllm_enable_sleep_mode", "true")
    apart = plan(NVFP4_32B, "--vllm_enable_sleep_mode", "true", "--share_weights", "false")
    assert part(shared, "KV cache").rollout > 0 == part(shared, "KV cache").training
    assert part(shared, "engine's weights").training == part(shared, "engine's weights").rollout
    assert part(apart, "engine's weights").training == 0
    assert shared.peak == max(shared.total("rollout"), shared.total("training")) < plan(NVFP4_32B).peak


def test_the_engine_takes_its_share_of_the_gpu_and_nothing_more() -> None:
    """vLLM's own rule: the cache is what weights, adapter, profiled scratch and graphs leave of the share."""
    planned = plan(NVFP4_32B, "--vllm_gpu_memory_utilization", "0.5")
    names = ("engine's weights", "engine's adapter", "KV cache", "engine's scratch", "CUDA graphs")
    assert sum(part(planned, name).rollout for name in names) == 40 * GB


def test_the_cache_holds_what_its_bytes_hold() -> None:
    """A token of the 32B model: keys and values of 64 layers, 8 heads of 128, in BF16: 256 KiB."""
    planned = plan(NVFP4_32B)
    tokens = part(planned, "KV cache").rollout // (256 * 1024)
    assert f"{tokens // 2560} of 64 full sequences" in part(planned, "KV cache").detail
    roomy = plan(NVFP4_32B, gpu=Gpu(200 * GB, is_hopper=True))
    assert part(roomy, "KV cache").rollout > 64 * 2560 * 256 * 1024
    assert part(roomy, "KV cache").detail.endswith("; room for all 64 sequences of 2560 tokens")


def test_weights_that_cannot_be_lowered_come_without_advice() -> None:
    """They are read by the trainer, too, so that they stay while the engine sleeps, and are of the smallest arm."""
    assert part(plan(NVFP4_32B), "engine's weights").knobs == ()
    own = part(plan(NVFP4_32B, "--quantization", "bf16"), "engine's weights")
    assert own.knobs == ("vllm_enable_sleep_mode: true", "quantization: qerl_nvfp4")


@pytest.mark.parametrize(
    ("before", "name", "phase", "knob"),
    [
        ([], "KV cache", "training", ["--vllm_enable_sleep_mode", "true"]),
        ([], "KV cache", "training", ["--vllm_gpu_memory_utilization", "0.35"]),
        ([], "optimizer", "training", ["--optim", "adamw_8bit"]),
        ([], "gradients", "training", ["--lora_r", "16"]),
        ([], "activations", "training", ["--max_completion_length", "1024"]),
        (["--gradient_checkpointing", "false"], "activations", "training", ["--gradient_checkpointing", "true"]),
        (["--per_device_train_batch_size", "8"], "activations", "training", ["--per_device_train_batch_size", "4"]),
        (["--per_device_train_batch_size", "8"], "at work", "training", ["--pack_tokens", "2560"]),
        (["--share_weights", "false"], "trainer's weights", "training", ["--share_weights", "true"]),
        (["--share_weights", "false"], "engine's weights", "training", ["--vllm_enable_sleep_mode", "true"]),
        (["--quantization", "bf16"], "engine's weights", "rollout", ["--quantization", "qerl_nvfp4"]),
    ],
    ids=lambda value: value[0][2:] if isinstance(value, list) and value else "",
)
def test_the_key_that_a_part_names_lowers_it(before: list[str], name: str, phase: str, knob: list[str]) -> None:
    first, second = plan(NVFP4_32B_NO_NOISE, *before), plan(NVFP4_32B_NO_NOISE, *before, *knob)
    assert any(knob[0][2:] in words for words in part(first, name).knobs)
    assert getattr(part(second, name), phase) < getattr(part(first, name), phase)


def test_without_autocast_the_adapter_has_copies_of_its_inputs_in_fp32() -> None:
    """``use_cpu`` only says that the recipe is read on a machine without a GPU."""
    settings = parse(["--config", str(NVFP4_32B), *CPU, "--gradient_checkpointing", "false"])
    read_without_a_gpu = part(make(*settings, gpu=HOPPER), "activations")
    settings[1].use_cpu, settings[1].bf16 = False, True
    assert part(make(*settings, gpu=HOPPER), "activations") == read_without_a_gpu
    settings[1].bf16 = False
    copies = 4 * (5 * 5120 + 5120 + 27648) - 2 * (2 * 5120 + 27648)  # o_proj takes what the attention keeps
    hidden = (4 - 2) * 7 * 32  # x A^T of 7 adapters of rank 32
    room = 2 * (64 - 32)  # behind the input of down_proj, where x A^T stands
    more = part(make(*settings, gpu=HOPPER), "activations").training - read_without_a_gpu.training
    assert more == 2560 * 64 * (copies + hidden - room)  # tokens and layers


def test_the_advice_names_the_keys_of_the_largest_parts_first() -> None:
    planned = plan(NVFP4_32B, "--per_device_train_batch_size", "16", "--gradient_checkpointing", "false")
    assert planned.worse_phase == "training"
    assert planned.largest("training", 1)[0].name == "activations"
    with pytest.raises(ValueError, match=r"way out: gradient_checkpointing: true \(activations, "):
        planned.check()


def test_sleeping_is_no_advice_for_a_rollout() -> None:
    planned = plan(NVFP4_32B)
    assert "vllm_enable_sleep_mode" in planned.advice(planned.largest("training"), "training")
    assert "vllm_enable_sleep_mode" not in planned.advice(planned.largest("rollout"), "rollout")


def test_an_adapter_to_continue_from_and_trained_norms_are_counted(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").touch()
    saved = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
    settings = parse(["--config", str(NVFP4_32B), *CPU, "--adapter_name_or_path", str(tmp_path)])
    planned = make(*settings, gpu=HOPPER)
    numbers = 64 * 8 * ((5120 + 5120) + (5120 + 1024))
    assert part(planned, "trained adapter").rollout == 4 * numbers
    assert part(planned, "trained adapter").training == (4 + 2) * numbers  # autocast's copies
    assert part(planned, "gradients").training == 4 * numbers
    assert part(planned, "optimizer").rollout == 8 * numbers
    with_norms = plan(NVFP4_32B, "--adapter_name_or_path", str(tmp_path), "--train_norms", "true")
    assert part(with_norms, "gradients").training == 4 * (numbers + 2 * 64 * 5120)
    assert part(with_norms, "gradients").detail == f"fp32, {2 * 64 * 5120} of norms"
    assert part(plan(NVFP4_32B, "--optim", "adamw_8bit"), "optimizer").knobs == ("lora_r below 32",)


def test_an_adapter_on_no_layer_is_refused_and_not_planned_as_nothing() -> None:
    with pytest.raises(ValueError, match=r"lora_target_modules: .*'q_projj', which is no linear layer of this"):
        plan(NVFP4_32B, "--lora_target_modules", "q_projj")


def test_processes_sum_their_gradients_in_buckets_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = part(plan(NVFP4_32B), "gradients")
    monkeypatch.setattr(GRPOConfig, "world_size", 2)
    several = part(plan(NVFP4_32B), "gradients")
    assert alone.rollout == 0 < alone.training == several.rollout == several.training / 2


def test_two_gpus_of_one_engine_hold_half_of_its_weights_each() -> None:
    whole, half = plan(NVFP4_32B), plan(NVFP4_32B, "--vllm_tensor_parallel_size", "2")
    assert part(half, "engine's weights").rollout == pytest.approx(part(whole, "engine's weights").rollout / 2, abs=1)


def test_an_engine_whose_share_is_too_small_is_told_how_large_it_must_be() -> None:
    planned = plan(NVFP4_32B, "--vllm_gpu_memory_utilization", "0.25")
    assert planned.remark == "", "of an engine that does not start there is no more to say"
    with pytest.raises(ValueError, match=r"use vllm_gpu_memory_utilization: (0\.\d\d) or more") as error:
        planned.check()
    enough = re.search(r"utilization: (0\.\d\d) or more", str(error.value)).group(1)  # type: ignore[union-attr]
    assert plan(NVFP4_32B, "--vllm_gpu_memory_utilization", enough).fits
    with pytest.raises(ValueError, match="the GPU is too small for this model; use quantization: qerl_nvfp4"):
        plan(RECIPES / "Qwen2.5-32B-Instruct/grpo/bf16_lora.yaml", gpu=Gpu(48 * GB, is_hopper=False)).check()


def test_an_engine_that_holds_few_of_its_sequences_says_so_and_what_holds_all() -> None:
    few = plan(NVFP4_32B, "--vllm_gpu_memory_utilization", "0.31")
    held = re.search(r"the engine holds (\d+) of 64 sequences .*utilization: (0\.\d\d) holds all 64", few.remark)
    assert held is not None and 0 < int(held.group(1)) < 64
    assert plan(NVFP4_32B, "--vllm_gpu_memory_utilization", held.group(2)).remark == ""
    assert plan(NVFP4_32B, "--vllm_gpu_memory_utilization", f"{float(held.group(2)) - 0.01:.2f}").remark
    assert few.remark in memory_table.verdict(few)


def test_beside_a_server_no_engine_is_planned_and_the_table_says_so() -> None:
    inside, beside = plan(NVFP4_32B), plan(NVFP4_32B, "--vllm_mode", "server", "--vllm_gpu_memory_utilization", "0.01")
    engine = {"engine's weights", "engine's adapter", "KV cache", "engine's scratch", "CUDA graphs"}
    assert {held.name for held in inside.parts} - {held.name for held in beside.parts} == engine
    assert part(beside, "trainer's weights").training > part(inside, "trainer's weights").training
    assert "own copy: vllm_mode: server: the engine's are in another process" in str(beside.parts)
    assert beside.fits and "the server's memory is not in this plan" in memory_table.verdict(beside)
    assert not plan(NVFP4_32B, "--vllm_gpu_memory_utilization", "0.01").fits  # the same, with an engine


def test_a_share_that_is_too_small_is_told_how_many_sequences_a_larger_one_holds() -> None:
    small = plan(NVFP4_32B, "--vllm_gpu_memory_utilization", "0.2")
    assert re.search(r"use vllm_gpu_memory_utilization: 0\.\d\d or more \(0\.\d\d holds all 64\)", small.problem)
    crowded = plan(NVFP4_32B, "--vllm_gpu_memory_utilization", "0.2", gpu=Gpu(32 * GB, is_hopper=True))
    assert re.search(r"\(0\.95 holds \d+ of 64\)", crowded.problem)


@pytest.mark.parametrize("counts", [False, True], ids=["vLLM 0.26", "vLLM 0.31"])
def test_an_engine_that_would_take_more_than_its_share_is_told_the_size_of_its_cache(
    counts: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from qerl_recipes.rollout import engine as rollout
    from qerl_vllm_plugin.compat import engine as compat

    flags = ["--vllm_enable_sleep_mode", "true", "--output_dir", str(tmp_path)]
    script, training, model_config = parse(["--config", str(NVFP4_32B), *CPU, *flags])
    planned = make(script, training, model_config, gpu=HOPPER)
    engine: Any = object.__new__(rollout.VLLMRollouts)
    engine._training, engine._tensor_parallel, engine._processes = training, 1, 1
    engine._accelerator = type("Accelerator", (), {"process_index": 0})()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(rollout, "this_gpu", lambda: HOPPER)
    monkeypatch.setattr(compat, "counts_released_memory", lambda: counts)
    options = engine._options(model_config.model_name_or_path, model_config.lora_r, torch.bfloat16)
    assert options.get("kv_cache_memory_bytes") == (None if counts else part(planned, "KV cache").rollout)


def test_a_cache_of_a_given_size_is_planned_and_asked_for_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from qerl_recipes.rollout import engine as rollout

    flags = ["--vllm_kv_cache_memory_bytes", "3000000000", "--vllm_gpu_memory_utilization", "0.9"]
    script, training, model_config = parse(["--config", str(NVFP4_32B), *CPU, *flags, "--output_dir", str(tmp_path)])
    planned = make(script, training, model_config, gpu=HOPPER)
    cache = part(planned, "KV cache")
    assert cache.rollout == 3_000_000_000 and cache.detail.startswith("vllm_kv_cache_memory_bytes; ")
    assert cache.knobs[-1] == "vllm_kv_cache_memory_bytes below 3000000000"
    assert planned.peak < plan(NVFP4_32B, "--vllm_gpu_memory_utilization", "0.9").peak
    assert "vllm_kv_cache_memory_bytes: " in planned.remark  # 3 GB do not hold all sequences
    engine: Any = object.__new__(rollout.VLLMRollouts)
    engine._training, engine._tensor_parallel, engine._processes = training, 1, 1
    engine._accelerator = type("Accelerator", (), {"process_index": 0})()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(rollout, "this_gpu", lambda: HOPPER)
    options = engine._options(model_config.model_name_or_path, model_config.lora_r, torch.bfloat16)
    assert options["kv_cache_memory_bytes"] == 3_000_000_000
    assert options["gpu_memory_utilization"] == pytest.approx(planned.engine_share(0) + 3e9 / HOPPER.memory)
    small = plan(NVFP4_32B, "--vllm_kv_cache_memory_bytes", "1000")
    assert "vllm_kv_cache_memory_bytes: 1000 does not hold one sequence" in small.problem and not small.fits
    with pytest.raises(ConfigError, match="vllm_kv_cache_memory_bytes must be at least 1"):
        parse(["--config", str(NVFP4_32B), *CPU, "--vllm_kv_cache_memory_bytes", "0"])


def test_blocks_that_are_not_checkpointed_keep_all_that_they_compute() -> None:
    planned = [plan(NVFP4_32B, "--recompute_layers", str(layers)) for layers in (64, 32, 0)]
    kept = [part(p, "activations").training for p in planned]
    assert kept[0] == part(plan(NVFP4_32B), "activations").training
    assert kept[1] == pytest.approx((kept[0] + kept[2]) / 2)
    assert kept[2] == part(plan(NVFP4_32B, "--gradient_checkpointing", "false"), "activations").training
    assert "recompute_layers: 64" in part(planned[1], "activations").knobs


@pytest.mark.parametrize("gigabytes", [60, 80, 100, 200])
def test_as_few_blocks_are_checkpointed_as_leave_a_little_of_the_gpu(gigabytes: int) -> None:
    gpu = Gpu(gigabytes * GB, is_hopper=True)
    flags = ["--vllm_gpu_memory_utilization", "0.5", "--vllm_enable_sleep_mode", "true"]
    chosen = plan(NVFP4_32B, *flags, "--recompute_layers", "-1", gpu=gpu)
    exactly = plan(NVFP4_32B, *flags, "--recompute_layers", str(chosen.checkpointed), gpu=gpu)
    assert chosen == exactly and chosen.peak <= 0.97 * gpu.memory
    if chosen.checkpointed:
        fewer = plan(NVFP4_32B, *flags, "--recompute_layers", str(chosen.checkpointed - 1), gpu=gpu)
        assert fewer.peak > 0.97 * gpu.memory


def test_all_blocks_are_checkpointed_where_nothing_fits_and_where_nothing_is_said() -> None:
    small = plan(NVFP4_32B, "--recompute_layers", "-1", gpu=Gpu(20 * GB, is_hopper=True))
    assert small.checkpointed == 64 and not small.fits
    assert plan(NVFP4_32B).checkpointed == 64  # make() for settings that were not parsed
    assert plan(NVFP4_32B, "--gradient_checkpointing", "false").checkpointed == 0


def test_a_recipe_recomputes_as_few_blocks_as_fit_if_it_says_nothing() -> None:
    as_few = parse(["--config", str(NVFP4_32B), *CPU])
    assert as_few[1].recompute_layers == -1
    large = Gpu(200 * GB, is_hopper=True)
    small = Gpu(64 * GB, is_hopper=True)
    assert make(*as_few, gpu=small).checkpointed > make(*as_few, gpu=large).checkpointed == 0
    without = parse(["--config", str(NVFP4_32B), *CPU, "--gradient_checkpointing", "false"])
    assert without[1].recompute_layers is None


def test_a_limit_below_the_gpus_memory_decides_how_much_is_kept() -> None:
    script, training, model = parse(["--config", str(NVFP4_32B), *CPU, "--recompute_layers", "-1"])
    limits = (60 * GB, 70 * GB, 80 * GB)
    plans = [make(script, training, model, gpu=HOPPER, limit=limit) for limit in limits]
    assert [p.peak <= 0.97 * limit for p, limit in zip(plans, limits, strict=True)] == [True] * 3
    assert plans[0].checkpointed > plans[1].checkpointed > plans[2].checkpointed


def test_recompute_layers_without_checkpointing_is_refused() -> None:
    with pytest.raises(ValueError, match="has no effect with gradient_checkpointing: false"):
        plan(NVFP4_32B, "--recompute_layers", "3", "--gradient_checkpointing", "false")
    with pytest.raises(ValueError, match="recompute_layers is 65, and this model has 64 blocks"):
        plan(NVFP4_32B, "--recompute_layers", "65")


def test_the_plan_names_the_type_of_embedding_and_head() -> None:
    for dtype, named in (("bfloat16", "BF16"), ("float16", "FP16")):
        assert f"embedding and head in {named}" in part(plan(NVFP4_32B, "--dtype", dtype), "engine's weights").detail


MEASURED = sorted((RECIPES.parent / "kernels/results").glob("train_*.json"))
# since one call of the attention takes all sequences; the runs before kept its outputs twice
AT_ONCE = [f"train_{of}_NVIDIA_H200" for of in ("7B_80GB", "30B-A3B")]


@pytest.mark.parametrize("file", MEASURED, ids=lambda file: file.stem)
def test_a_plan_is_what_a_run_took(file: Path) -> None:
    """The most memory of each process in whole steps on a GPU, with all, some or none of the blocks recomputed."""
    result = json.loads(file.read_text())
    config = shapes.config_json(result["shape"])
    gpu = Gpu(143_771 * 2**20, is_hopper=True)  # an H200, as the driver tells
    assert result["gpu"] == "NVIDIA H200"
    for arm, found in result["arms"].items():
        recipe = {"recompute_layers": config["num_hidden_layers"], **found["recipe"], "output_dir": "unused"}
        given = {**recipe, "use_cpu": True, "bf16": False}
        planned = make(*parse(flags(given)), gpu=gpu, config=config)
        measured = result["summary"][arm]["peak_gb"]["process"] * GB
        if file.stem in AT_ONCE:
            assert planned.peak == pytest.approx(measured, rel=0.035), arm
        else:
            assert 0.945 * measured < planned.peak < 1.035 * measured, arm


def tokens(*flags: str) -> str:
    """What the plan of a recipe of 4 prompts with 8 completions says of the activations of 8 sequences."""
    sizes = "--num_generations 8 --per_device_train_batch_size 8 --gradient_accumulation_steps 4"
    lengths = "--max_prompt_length 256 --max_completion_length 1024 --vllm_max_model_length 1280"
    return part(plan(NVFP4_32B, *sizes.split(), *lengths.split(), *flags), "activations").detail


def test_a_shared_prompt_is_planned_once_in_each_packed_row() -> None:
    assert "of 8448 tokens, prompts of a group once" in tokens()  # 256 + 8 * 1024
    assert "of 9216 tokens, prompts of a group once" in tokens("--pack_tokens", "2304")  # two completions fit a row
    assert "of 10240 tokens" in tokens("--pack_tokens", "1280")  # one does


@pytest.mark.parametrize(
    "flags",
    [
        ["--steps_per_generation", "8"],  # completions of a prompt fall into different steps
        ["--loss_type", "bnpo"],
        ["--entropy_coef", "0.01"],
        ["--top_entropy_quantile", "0.5"],
        ["--num_generations", "16"],
        ["--pack_tokens", "0"],
    ],
    ids=lambda flags: flags[0][2:],
)
def test_where_completions_of_a_prompt_may_be_apart_each_has_its_own(flags: list[str]) -> None:
    assert "of 10240 tokens" in tokens(*flags) and "once" not in tokens(*flags)
