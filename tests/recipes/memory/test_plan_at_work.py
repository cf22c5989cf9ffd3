"""What a plan takes to be at work: how long its sequences are, what stands beside them, and blocks nobody can use."""

from pathlib import Path
from typing import Any

import pytest

from qerl_recipes.machine.gpu import GB, Gpu
from qerl_recipes.memory import activation_bytes
from qerl_recipes.memory.activation_bytes import MicroBatch, at_work
from qerl_recipes.memory.parts import Part, Plan
from qerl_recipes.memory.plan import make
from qerl_recipes.recipe.configs import parse

RECIPE = Path(__file__).parents[3] / "recipes/Qwen2.5-32B-Instruct/grpo/nvfp4_lora_aqn.yaml"
HOPPER, NO_HOPPER = Gpu(80 * GB, is_hopper=True), Gpu(80 * GB, is_hopper=False)


def plan(*flags: str, gpu: Gpu = HOPPER) -> Plan:
    """With all blocks recomputed where no flag says how many."""
    settings = parse(["--config", str(RECIPE), "--use_cpu", "true", "--bf16", "false", *flags])
    if "--recompute_layers" not in flags:
        settings[1].recompute_layers = None
    return make(*settings, gpu=gpu)


def part(plan: Plan, name: str) -> Part:
    return next(part for part in plan.parts if part.name == name)


def test_the_allocator_has_two_fifths_of_what_comes_and_goes_and_no_more_than_a_gigabyte_and_a_half() -> None:
    """Chosen by what runs took (``kernels/results``); there the second is what nearly all of them have."""
    small = plan("--max_completion_length", "256", "--vllm_max_model_length", "512")
    at_work = sum(part(small, name).training for name in ("activations", "at work"))
    context = 900_000_000
    assert at_work < 3 * GB and part(small, "CUDA and allocator").training == context + int(0.4 * at_work)
    large = plan("--per_device_train_batch_size", "16", "--gradient_accumulation_steps", "4")
    assert part(large, "CUDA and allocator").training == part(large, "CUDA and allocator").rollout == context + 1.5 * GB


@pytest.mark.parametrize(
    ("flags", "length"),
    [
        ([], 2560),  # 512 of a prompt and 2048 of its completion
        (["--vllm_max_model_length", "8192"], 2560),
        (["--vllm_max_model_length", "2000"], 2000),
        (["--max_prompt_length", "null"], 32768),  # as the model allows
        (["--max_prompt_length", "null", "--vllm_max_model_length", "8192"], 8192),
    ],
)
def test_a_sequence_is_planned_as_long_as_prompt_and_completion_may_be(flags: list[str], length: int) -> None:
    fields = plan("--pack_tokens", "0", "--per_device_train_batch_size", "2", *flags)
    assert f" of {2 * length} tokens" in part(fields, "activations").detail


@pytest.mark.parametrize(
    ("flags", "gpu", "expected"),
    [
        ([], HOPPER, {"checkpointing": True, "expands": True, "rearranges": False}),
        ([], NO_HOPPER, {"checkpointing": True, "expands": True, "rearranges": True}),
        (["--share_weights", "false"], NO_HOPPER, {"checkpointing": True, "expands": True, "rearranges": False}),
        (["--quantization", "bf16"], HOPPER, {"checkpointing": True, "expands": False, "rearranges": False}),
        (["--recompute_layers", "0"], HOPPER, {"checkpointing": False, "expands": True, "rearranges": False}),
    ],
)
def test_what_is_at_work_follows_from_the_arm_the_layout_and_who_holds_the_weights(
    flags: list[str], gpu: Gpu, expected: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def noted(size: Any, batch: MicroBatch, block: int, **options: Any) -> tuple[int, int]:
        asked.append({**options, "batch": batch})
        return at_work(size, batch, block, **options)

    monkeypatch.setattr(activation_bytes, "at_work", noted)
    planned = plan("--per_device_train_batch_size", "3", "--pack_tokens", "0", *flags, gpu=gpu)
    batch = asked[0].pop("batch")
    assert asked == [{**expected, "itemsize": 2}]
    assert (batch.rows, batch.length, batch.tokens, batch.scored) == (3, 2560, 3 * 2560, 3 * 2048)
    expected_detail = "hidden states" if expected["checkpointing"] else "all of 64 blocks"
    assert part(planned, "activations").detail.startswith(f"{expected_detail} of 7680 tokens")
