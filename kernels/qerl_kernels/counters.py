"""Keep the counters by which the blocks of one product wait for each other's sums; a launch leaves them zero."""

import functools

import torch

from qerl_kernels.tiles import COUNTERS


def counters_for(own: torch.Tensor, stream: int) -> torch.Tensor:
    """Return the counters of a launch made now: those of its ``stream``, or in a CUDA graph the weight's ``own``.

    A stream runs one product after the other, and none touches the counters before the one ahead has ended. So one
    weight may be used on several streams at a time. Two graphs that hold the same weight may not run at one time.

    A block that waits sets its counter back to zero. No launch finds the counters of one that was stopped halfway,
    because that error ends the CUDA context and its memory (CUDA's manual, cudaErrorLaunchFailure).
    """
    return own if torch.cuda.is_current_stream_capturing() else _of_stream(own.device, stream)


def forget_counters() -> None:
    """Drop the streams' counters; the next launch on a stream allocates new ones."""
    _of_stream.cache_clear()


@functools.cache
def _of_stream(device: torch.device, stream: int) -> torch.Tensor:
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)
