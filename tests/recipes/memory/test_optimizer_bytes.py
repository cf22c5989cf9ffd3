"""What is planned for an optimizer is what it allocates."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from qerl_recipes.memory.optimizer_bytes import state


def allocated(found: object) -> int:
    """Bytes of all tensors but single numbers, such as counters of steps."""
    if isinstance(found, torch.Tensor):
        return found.nbytes if found.numel() > 1 else 0
    return sum(map(allocated, found.values())) if isinstance(found, dict) else 0


@pytest.mark.parametrize("rank", [2, 32])
@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused", "adafactor", "adagrad", "rmsprop", "sgd"])
def test_a_state_has_the_bytes_that_transformers_optimizer_allocates(name: str, rank: int, tmp_path) -> None:
    """An adapter of rank 2 or 32 on a layer, and a norm."""
    shapes = [(rank, 192), (96, rank), (192,)]
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(shape)) for shape in shapes)
    arguments = TrainingArguments(output_dir=str(tmp_path), optim=name, use_cpu=True, report_to=[])
    optimizer = Trainer(model=model, args=arguments).create_optimizer()
    torch.stack([parameter.square().sum() for parameter in model]).sum().backward()
    optimizer.step()
    assert state(name, shapes) == sum(map(allocated, optimizer.state.values()))


def test_states_of_eight_bits_have_scales_and_small_tensors_stay_in_fp32() -> None:
    """bitsandbytes: a scale for 256 numbers; below 4096 numbers fp32. Lion has one moment, AdEMAMix three."""
    large, small = [(32, 1024)], [(2, 1024)]
    assert state("adamw_8bit", large) == state("paged_adamw_8bit", large) == 2 * (32768 + 128 * 4)
    assert state("lion_8bit", large) == 32768 + 128 * 4 and state("lion_32bit", large) == 4 * 32768
    assert state("ademamix_8bit", large) == 3 * (32768 + 128 * 4) and state("ademamix", large) == 12 * 32768
    assert state("adamw_8bit", small) == 2 * 2048 * 4 and state("rmsprop_bnb_8bit", small) == 2048 * 4
    assert state("schedule_free_sgd", large) == 4 * 32768 and state("schedule_free_adamw", large) == 8 * 32768
    assert state("adamw_torch_4bit", large) == 2 * (16384 + 256 * 4)
