"""Change one worker's part of the policy on all ranks or on none.

A change has two phases. Preparing it checks and allocates everything, and touches nothing that serves requests. (An
adapter whose sums may overflow is installed for a trial, with requests paused, and taken back.)
Committing it only copies into existing tensors. In between, all ranks that share the model agree that each of them is
prepared, within one call of the driver: no rank commits what another has refused.

Before a change, ``check_weights`` notices an engine that has slept and lost its frozen weights. vLLM's sleep mode
discards weights at level 2, for a trainer that loads all of them again. Nothing loads frozen weights again, so such an
engine would wake up and answer from whatever its memory holds. Memory is mapped in pages of 2 MiB, so one word of each
page is enough to tell.
"""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from vllm.logger import init_logger

from qerl_vllm_plugin.adapter.check import AdapterError
from qerl_vllm_plugin.compat import worker as vllm_worker
from qerl_vllm_plugin.weights import overflow
from qerl_vllm_plugin.wire import spans
from qerl_vllm_plugin.wire.cuda_ipc import CudaIPCError
from qerl_vllm_plugin.wire.timing import Timer

if TYPE_CHECKING:
    from qerl_vllm_plugin.worker.policy import WorkerPolicy

logger = init_logger("vllm.qerl")

ASLEEP = (
    "this engine sleeps, and the memory of its weights with it: nothing can be written there. Wake it up first, or its "
    'weights alone: wake_up(tags=["weights"])'
)
GONE = (
    "the frozen weights of this engine are no longer those that it has loaded: sleep(level=2) throws them away, and "
    "nothing loads them again. Whatever it has answered since is wrong; restart it, and sleep at level 1"
)
ANOTHER_RANK = "another rank of this engine has refused the change"
LOST = "this engine holds half of a policy and serves nothing any more; restart it. While it was changed: "
PAGE = 2 << 20  # the fewest bytes of GPU memory that CUDA maps
TRIED_TOKENS = 16  # how many tokens are computed under a doubtful change before it serves
TOO_LARGE = (
    "The adapter, the norms or the noise are too large to serve; nothing has changed. Was the learning rate too high? "
    "Use an earlier checkpoint"
)

Answer = dict[str, Any]


class StaleVersionError(AdapterError):
    """Report a swap to an older version than the served one, or to the served version with another content."""


class PolicyLostError(RuntimeError):
    """Report that the engine holds half of a policy, or does not answer, and serves nothing any more."""


MARKS: dict[type[Exception], str] = {CudaIPCError: "unreachable", StaleVersionError: "stale"}  # keys of a refusal


@dataclass(frozen=True)
class Change:
    """Hold a change that has been prepared; ``commit`` makes it and returns the answer.

    ``is_doubtful`` says that activations may become too large under it, so some tokens are computed first.
    """

    commit: Callable[[], Answer]
    is_doubtful: bool = False


@torch.no_grad()
def on_all_ranks(policy: "WorkerPolicy", prepare: Callable[[], Change]) -> Answer:
    """Call ``prepare``, and commit the change that it returns if every rank of this model could prepare it.

    Refusals and failures are returned, not raised. The answer to a change has its seconds as ``parts``. A refusal is
    ``{"error": text}``. It has ``"unreachable": True`` if this rank cannot read the GPU where the tensors lie, and
    ``"stale": True`` if the version is refused. If a commit fails on any rank, no rank holds a policy that can be
    named. The answer is ``{"error": text, "lost": True}`` then, and the model refuses to run on every rank.
    """
    change, error, marks = None, policy.lost, {"lost": True} if policy.lost else {}
    timer = policy.timer = Timer()
    if error is None:
        try:
            if vllm_worker.weights_are_away():
                raise AdapterError(ASLEEP)
            check_weights(policy)
            change = prepare()
        except Exception as refusal:
            error = _reason(refusal)
            marks = {mark: True for kind, mark in MARKS.items() if isinstance(refusal, kind)}
    timer.end("stage")
    refused, doubtful = 2, 1
    state = vllm_worker.highest(refused if change is None else doubtful if change.is_doubtful else 0)
    if state == refused:
        return {"error": error or ANOTHER_RANK, **marks}
    assert change is not None
    timer.end("agree")
    answer, failed = {}, None
    try:
        if state == doubtful:
            error = _why_not(policy, change.commit)
            timer.end("try")
            if vllm_worker.highest(error is not None):
                return {"error": error or ANOTHER_RANK}
        answer = change.commit()
    except Exception as failure:
        logger.exception("the policy could not be changed")
        failed = f"{type(failure).__name__}: {failure}"
    if vllm_worker.highest(failed is not None):
        lose(policy, failed or ANOTHER_RANK)
        return {"error": policy.lost, "lost": True}
    if policy.changes is not None and not answer.get("unchanged"):
        policy.changes.add(policy.version)
    timer.end("commit")
    return {**answer, "parts": timer.seconds}


def _why_not(policy: "WorkerPolicy", commit: Callable[[], Answer]) -> str | None:
    """Try a change and undo it; return why it must not be made, or None. Raise only if it cannot be undone."""
    if policy.worker is None:  # the model is still being loaded, and is checked once loading has ended
        return None
    vllm_config = policy.worker.vllm_config
    if not overflow.can_check(vllm_config):
        return None
    written = [layer.weight.data for layer in policy.layers.values()]
    written += list(policy.carrier.buffers()) if policy.carrier is not None else []
    before, state = [], dict(vars(policy))
    try:
        before = [tensor.clone() for tensor in written]
        commit()
        with policy.carrier.answering(TRIED_TOKENS) if policy.carrier is not None else contextlib.nullcontext():
            overflow.check_engine(policy.model, vllm_config, TOO_LARGE, TRIED_TOKENS)
    except Exception as error:
        return _reason(error)
    finally:
        if before:
            torch._foreach_copy_(written, before)
            vars(policy).update(state)
    return None


def lose(policy: "WorkerPolicy", reason: str) -> None:
    """Make this worker refuse, from now on, to run its model and to change its policy."""
    policy.lost = text = LOST + reason
    if policy.changes is not None:
        policy.changes.lose()
    if policy.worker is not None:  # otherwise the model is being loaded, and loading fails
        vllm_worker.refuse_to_run(policy.worker, lambda: RuntimeError(text))


def _reason(error: Exception) -> str:
    if isinstance(error, AdapterError | ValueError | CudaIPCError) and str(error):
        return str(error)
    if isinstance(error, SafetensorError):
        return f"this is no whole safetensors file ({error}); save the adapter again, and send all of it"
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of GPU memory before the change; lower gpu_memory_utilization. Nothing changed ({error})"
    logger.error("a change of the policy was refused", exc_info=error)
    return f"{type(error).__name__}: {error}"


def check_answers(results: list[dict[str, Any]], refusal: type[Exception] = AdapterError) -> None:
    """Raise ``refusal`` if any worker refused, or PolicyLostError if the policy is lost; else do nothing."""
    errors = [result for result in results if "error" in result]
    if not errors:
        return
    # the rank that refused says why; the other ranks say only that another one did
    texts = [error["error"] for error in errors]
    text = next((text for text in texts if ANOTHER_RANK not in text), texts[0])
    raise PolicyLostError(text) if any(error.get("lost") for error in errors) else refusal(text)


def check_weights(policy: "WorkerPolicy") -> None:
    """Raise AdapterError if an engine that may sleep has lost its frozen weights since the first such check."""
    if policy.worker is None or not vllm_worker.may_sleep(policy.worker):
        return
    now = page_words(policy.model.parameters(), (layer.weight for layer in policy.layers.values()))
    if policy.page_words is None:
        policy.page_words = now
    elif not torch.equal(now, policy.page_words):
        raise AdapterError(GONE)


@torch.no_grad()
def page_words(parameters: Iterable[torch.Tensor], changing: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return on the CPU the first word of each page of ``parameters``, except those in ``changing``, the norms."""
    ours = {tensor.untyped_storage().data_ptr() for tensor in changing}
    once = {tensor.untyped_storage().data_ptr(): tensor for tensor in parameters}
    words_by_device: dict[torch.device, list[torch.Tensor]] = {}
    for address, tensor in once.items():
        if address not in ours:
            words = spans.as_type(spans.all_bytes(tensor.untyped_storage()), torch.int64)
            words_by_device.setdefault(tensor.device, []).append(words[:: PAGE // 8])
    return torch.cat([torch.cat(parts).cpu() for parts in words_by_device.values()])
