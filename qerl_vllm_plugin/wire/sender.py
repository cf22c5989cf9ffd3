"""Choose the way of tensors to another process: from GPU to GPU, through shared memory, or in the message itself.

A sender asks ``Ways`` which ways are open, the fastest first, and sends tensors by each until one has carried them.
``Sender`` does so for an engine's workers, and the clients of a server do (client.py).
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from safetensors.torch import save

from qerl_vllm_plugin.wire import cuda_ipc, gpu_memory
from qerl_vllm_plugin.wire.cuda_ipc import CudaIPCError
from qerl_vllm_plugin.wire.safetensors_file import Tensors
from qerl_vllm_plugin.wire.shared_segment import NoRoomError, Segments

T = TypeVar("T")

IPC, SHARED = "ipc", "shared"
ELSEWHERE = "on other machines, or Ray's"


class UnreachableError(Exception):
    """Report that the receiver cannot read tensors that were sent in one way; they may go in another."""


FAILURES = (CudaIPCError, NoRoomError, UnreachableError)  # of one way alone


class Ways:
    """Decide by which ways tensors may go to one receiver, and remember which ways it cannot read.

    ``transport`` is one of ``known``: "auto", or the only way that is allowed. ``refuse`` makes the error for tensors
    that this way cannot carry, and ``warn`` gets one text for each way that is passed by at a loss of speed.
    """

    def __init__(
        self,
        transport: str,
        known: Collection[str],
        refuse: Callable[[str], Exception],
        warn: Callable[[str], None],
    ) -> None:
        """Raise ValueError for an unknown transport."""
        if transport not in known:
            raise ValueError(f"transport is {transport!r}; it is one of {', '.join(known)}")
        self.transport, self._refuse, self._warn = transport, refuse, warn
        self._unreadable: dict[str, str] = {}  # why the receiver cannot read what came by a way
        self._warned: set[str] = set()
        self.far: str | None = None  # why the receiver cannot open a file of this machine
        self.gpus: Collection[str] | None = None  # the UUIDs of the GPUs that it sees, None if that is not known

    def open(self, tensors: Tensors) -> Iterator[str]:
        """Yield IPC and SHARED if they may carry ``tensors``; raise the refusal if the only allowed way is closed."""
        for way in (IPC, SHARED):
            if self.transport not in ("auto", way):
                continue
            reason = self._unreadable.get(way) or (self._obstacle_to_ipc(tensors) if way == IPC else self.far)
            if reason is None:
                yield way
            else:  # no way to another machine is faster than the message
                self._pass_by(way, reason, is_loss=way == IPC and any(tensor.is_cuda for tensor in tensors.values()))

    def close(self, way: str, error: Exception) -> None:
        """Note that ``way`` has failed, for good if it is unreadable; raise the refusal if no other way is allowed."""
        if not isinstance(error, CudaIPCError | NoRoomError):  # those are this sender's, and may pass
            self._unreadable[way] = str(error)
        self._pass_by(way, str(error), is_loss=True)

    def _obstacle_to_ipc(self, tensors: Tensors) -> str | None:
        if (reason := gpu_memory.why_not(tensors) or self.far) is not None or self.gpus is None:
            return reason
        gpu = cuda_ipc.uuid(next(iter(tensors.values())).device)
        return None if gpu in self.gpus else f"the server does not see GPU {gpu} of this machine"

    def _pass_by(self, way: str, reason: str, *, is_loss: bool) -> None:
        if self.transport == way:
            raise self._refuse(
                f"transport is {way!r}, and {reason}; leave it out, and tensors go another way where this one is closed"
            )
        if is_loss and way not in self._warned:
            self._warned.add(way)
            how = "through the CPU" if way == IPC else "in messages"
            self._warn(f"adapters travel {how}, which is slower: {reason}")


class Sender:
    """Send tensors from this process to an engine's workers.

    ``is_here``: the worker runs in this process, and gets the tensors themselves. ``is_near``: all workers can open a
    file of this machine. ``refusal``: the error for tensors that no allowed way can carry; ``send`` raises it, too,
    when the workers have refused, and so have answered.
    """

    def __init__(
        self, transport: str, *, is_here: bool, is_near: bool, refusal: type[Exception], warn: Callable[[str], None]
    ) -> None:
        """Raise ValueError for an unknown transport, and for one that this engine cannot use."""
        self.is_here, self._segments = is_here, Segments(refusal)
        self.ways = Ways(transport, ("auto", IPC, SHARED), refusal, warn)
        if transport != "auto" and (is_here or not is_near):
            where = "in this process" if is_here else ELSEWHERE
            raise ValueError(f"transport is {transport!r}, and this engine's workers are {where}; leave it out")
        self.ways.far = None if is_near else f"this engine's workers are {ELSEWHERE}"

    def deliver(self, tensors: Tensors, send: Callable[[Any], T]) -> T:
        """Call ``send`` with what carries the tensors, until the workers can read it; return what it returns.

        That is the tensors themselves, a text that describes GPU memory, the path of a file in shared memory, or the
        bytes of a safetensors file. ``send`` raises UnreachableError if a worker cannot read them.
        """
        if self.is_here:
            return send(tensors)
        for way in self.ways.open(tensors):
            try:
                with self._encoded(way, tensors) as sent:
                    return send(sent)
            except FAILURES as error:
                self.ways.close(way, error)
        # copies, because safetensors refuses tensors that share memory, such as one A under two names
        return send(save({name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}))

    @contextmanager
    def _encoded(self, way: str, tensors: Tensors) -> Iterator[str]:
        if way == IPC:
            with gpu_memory.described(tensors) as (text, _):
                yield text
        else:
            with self._segments.filled(tensors) as path:
                yield path
