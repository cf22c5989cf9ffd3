"""Test that the trainer's NF4 weights are those of the file, whatever CUDA stream is current and however long its work
waits.
"""

import pytest
import torch

from qerl_recipes.model.loading import load

pytestmark = pytest.mark.gpu


def test_weights_loaded_behind_other_work_are_those_loaded_alone(checkpoints):
    """Load the weights on a stream with and without queued work.

    An engine in the same process leaves this thread on its own stream, whose work comes late on a busy GPU.
    """

    def weights(cycles):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(cycles)
            model = load(checkpoints[0], torch.bfloat16, quantization="nf4")
            torch.cuda.synchronize()
            return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    alone = weights(0)
    for _ in range(3):
        late = weights(4_000_000_000)  # about two seconds
        assert alone.keys() == late.keys()
        assert [name for name in alone if not torch.equal(alone[name], late[name])] == []
