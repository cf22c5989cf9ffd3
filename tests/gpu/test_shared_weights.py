"""One copy of the frozen weights on a GPU: what loading the trainer allocates, and what it computes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qerl_recipes import model as models
from qerl_recipes.frozen_linear import FrozenNVFP4Linear, FrozenTiledLinear
from qerl_vllm_plugin.frozen_weights import NotShareableError, frozen_weights

pytestmark = pytest.mark.gpu

IDS = torch.randint(2, 500, (4, 200), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def lent(checkpoints: tuple[Path, Path]) -> Any:
    """The weights of an engine; skips where they lie in Marlin's layout."""
    from vllm import LLM

    llm = LLM(
        str(checkpoints[1]),
        quantization="qerl_nvfp4",
        dtype="bfloat16",
        gpu_memory_utilization=0.2,
        max_model_len=512,
        max_num_seqs=16,
        enforce_eager=True,
        disable_log_stats=True,
        additional_config={"qerl": {"policy_adapter": {"rank": 16}}},
    )
    try:
        return frozen_weights(llm)
    except NotShareableError as error:
        pytest.skip(str(error))


def logits_and_gradient(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x = model.get_input_embeddings()(IDS.to(model.device)).detach().requires_grad_()
    logits = model(inputs_embeds=x).logits.float()
    logits.log_softmax(-1)[..., 3].sum().backward()
    return logits.detach(), x.grad.float()


def test_the_trainer_allocates_no_second_copy_and_computes_the_same(
    lent: Any, checkpoints: tuple[Path, Path], record: Callable[[str, Any], None]
) -> None:
    """Own weights lie in the checkpoint's layout and run on another kernel: equal up to the order of sums."""
    before = torch.cuda.memory_allocated()
    shared = models.load(checkpoints[1], weights=lent)
    shared_bytes = torch.cuda.memory_allocated() - before
    own = models.load(checkpoints[1]).to("cuda")
    own_bytes = torch.cuda.memory_allocated() - before - shared_bytes
    kinds = {type(module) for module in shared.modules() if isinstance(module, FrozenNVFP4Linear)}
    assert kinds == ({FrozenTiledLinear} if torch.cuda.get_device_capability() == (9, 0) else {FrozenNVFP4Linear})
    record("memory of the trainer's model, shared / own copy", f"{shared_bytes} / {own_bytes} bytes")
    assert shared_bytes < own_bytes / 20
    names = ("logits", "gradient")
    for name, ours, theirs in zip(names, logits_and_gradient(shared), logits_and_gradient(own), strict=True):
        distance = float((ours - theirs).norm() / theirs.norm())
        record(f"trainer on shared weights to trainer on its own, {name}: relative distance", f"{distance:.5f}")
        assert distance < 0.02
