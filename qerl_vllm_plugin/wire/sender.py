"""Choose how tensors reach an engine's workers: as they are, as GPU memory, as a shared file, or in the message."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from safetensors.torch import save
from vllm.logger import init_logger

from qerl_vllm_plugin.wire import gpu_memory, shared_file
from qerl_vllm_plugin.wire.cuda_ipc import CudaIPCError
from qerl_vllm_plugin.wire.safetensors_file import Tensors
from qerl_vllm_plugin.wire.shared_segment import NoRoomError, Segments

logger = init_logger("vllm.qerl")

TRANSPORTS = ("auto", "ipc", "shared")


class Sender:
    """Sends tensors from this process to an engine's workers.

    ``transport``: with auto, tensors on a GPU go from GPU to GPU (CUDA IPC) where that is possible, and all others
    through shared memory. ipc and shared allow only one of these two ways.

    ``is_here``: the worker runs in this process. ``is_near``: all workers can open a file of this machine.

    ``refusal``: the error raised for tensors that no allowed way can carry. Code in a block raises it, too, when the
    workers have refused, and so have answered.
    """

    def __init__(self, transport: str, *, is_here: bool, is_near: bool, refusal: type[Exception]) -> None:
        """Raises ValueError for an unknown transport, and for one that this engine cannot use."""
        if transport not in TRANSPORTS:
            raise ValueError(f"transport is {transport!r}; it is one of {', '.join(TRANSPORTS)}")
        self._transport, self.is_here, self._is_near, self._refusal = transport, is_here, is_near, refusal
        if transport != "auto" and (self.is_here or not self._is_near):
            where = "in this process" if self.is_here else "on other machines, or Ray's"
            raise ValueError(f"transport is {transport!r}, and this engine's workers are {where}; leave it out")
        self._segments = Segments(refusal)
        self._unreachable: str | None = None  # why the workers cannot read a GPU of this process

    @contextmanager
    def by_gpu(self, tensors: Tensors) -> Iterator[str | None]:
        """Share the tensors as GPU memory for the ``with`` block; yield the text that describes them to workers.

        Yields None if the tensors must go another way. Raises the refusal if no other way is allowed.
        """
        if self.is_here or not self._is_near or self._transport == "shared":
            yield None
            return
        reason = self._unreachable or gpu_memory.why_not(tensors)
        if reason is None:
            try:
                with gpu_memory.described(tensors) as (text, _):
                    yield text
                return
            except CudaIPCError as error:
                reason = str(error)
        self._without_gpu(reason, tensors)
        yield None

    def refused(self, reason: str, tensors: Tensors) -> None:
        """Record that the workers could not read the GPU, so that tensors go another way from now on.

        Raises the refusal if no other way is allowed.
        """
        self._unreachable = reason
        self._without_gpu(reason, tensors)

    def _without_gpu(self, reason: str, tensors: Tensors) -> None:
        if self._transport == "ipc":
            raise self._refusal(f"transport is 'ipc', and {reason}")
        if any(tensor.is_cuda for tensor in tensors.values()):
            logger.warning_once(
                "adapters reach the workers through the processor and %s, which is slower: %s",
                shared_file.SHARED_MEMORY,
                reason,
            )

    @contextmanager
    def by_memory(self, tensors: Tensors) -> Iterator[Any]:
        """Yield what carries the tensors to the workers without a GPU.

        A worker in this process gets the tensors themselves. Others get the path of a file in shared memory. If that is
        too small, or a worker is on another machine, they get safetensors bytes.
        """
        if self.is_here:
            yield tensors
            return
        with ExitStack() as stack:
            sent = None
            if self._is_near:
                try:
                    sent = stack.enter_context(self._segments.filled(tensors))
                except NoRoomError as error:
                    logger.warning_once("%s: adapters travel through vLLM's message queue, which is slower", str(error))
            yield _serialized(tensors) if sent is None else sent


def _serialized(tensors: Tensors) -> bytes:
    # copies, because safetensors refuses tensors that share memory, such as one A under two names
    return save({name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()})
