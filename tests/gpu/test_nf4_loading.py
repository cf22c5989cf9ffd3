"""The trainer's NF4 weights are those of the file whatever stream this thread is on, however long its work waits."""

from pathlib import Path

import pytest
import torch

from qerl_recipes.model.loading import load

pytestmark = pytest.mark.gpu


def test_weights_loaded_behind_other_work_are_those_loaded_alone(checkpoints: tuple[Path, Path]) -> None:
    """An engine in the same process leaves this thread on a stream of its own; on a busy GPU its work comes late."""

    def weights(cycles: int) -> dict[str, torch.Tensor]:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(cycles)
            model = load(checkpoints[0], torch.bfloat16, quantization="nf4")
            torch.cuda.synchronize()
            return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    alone = weights(0)
    for _ in range(3):
        late = weights(4_000_000_000)  # two seconds
        assert alone.keys() == late.keys()
        assert [name for name in alone if not torch.equal(alone[name], late[name])] == []
