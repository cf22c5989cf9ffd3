"""The numbers by which the blocks of one product wait for each other's sums: zero before and after each launch."""

import functools

import torch

from qerl_kernels.tiles import COUNTERS


def counters_for(own: torch.Tensor, stream: int) -> torch.Tensor:
    """The counters of a launch that is made now: its ``stream``'s, or in a CUDA graph the weight's ``own``.

    A stream takes one product after the other, whatever the weight, and none touches its counters before the one ahead
    has ended. So a weight may be used on several streams; two graphs that hold it may not run at one time. A block that
    waits sets its counter back to zero, and no other's is counted. No launch finds counters of one that was stopped in
    its midst: with that error the CUDA context ends, and they with it (CUDA's manual, cudaErrorLaunchFailure).
    """
    return own if torch.cuda.is_current_stream_capturing() else _of_stream(own.device, stream)


def forget_counters() -> None:
    """Those of streams are made anew when the next launch needs them."""
    _of_stream.cache_clear()


@functools.cache
def _of_stream(device: torch.device, stream: int) -> torch.Tensor:
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)
