"""Check an engine's version and configuration, time its start, and find its model, as read in vLLM 0.26 to 0.32."""

import atexit
import functools
import gc
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import vllm
from packaging.version import InvalidVersion, Version
from vllm.logger import init_logger
from vllm.platforms import current_platform

from qerl_vllm_plugin import TESTED_VLLM
from qerl_vllm_plugin.compat.worker import model_of

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig

logger = init_logger("vllm.qerl")

OLDEST, FIRST_UNSUPPORTED = Version("0.26"), Version("0.33")
START_PHASES = {  # methods of a worker that its start calls, in this order -> what they do
    "load_model": "weights",
    "determine_available_memory": "memory profile",
    "compile_or_warm_up_model": "warm-up",
}
UNSTEADY = "Error in memory profiling. "  # an assertion of vLLM's begins so
FIRST_THAT_COUNTS = Version("0.31")  # the first tested release of which counts_released_memory is true


def check_vllm_version(version: str = vllm.__version__) -> None:
    """Raise RuntimeError for a vLLM that the plugin does not support; warn once for one it was not tested with."""
    release = _release(version)
    if release is None:
        logger.warning_once(
            "cannot read vLLM's version %r; qerl_nvfp4 was tested with %s", version, ", ".join(TESTED_VLLM)
        )
        return
    if not OLDEST <= release < FIRST_UNSUPPORTED:
        raise RuntimeError(f"qerl_nvfp4 supports vLLM >= {OLDEST}, < {FIRST_UNSUPPORTED}; this is {version}")
    if str(release) not in TESTED_VLLM:
        logger.warning_once("qerl_nvfp4 was tested with vLLM %s; this is %s", ", ".join(TESTED_VLLM), version)


def counts_released_memory(version: str = vllm.__version__) -> bool:
    """Return True if an engine with sleep mode counts memory that loading took and gave back as free once, not twice.

    vLLM 0.26 counts it twice. It subtracts what torch has reserved from what the GPU has in use, but torch does not
    learn that the pool of weights gave some back. The KV cache then exceeds the engine's share by as much as repacking
    has freed (17 GB of a 32B model on an H200).
    """
    release = _release(version)
    return release is None or release >= FIRST_THAT_COUNTS


def _release(version: str) -> Version | None:
    """Return the version without its build or candidate suffix, or None if it is not a version."""
    try:
        return Version(Version(version).base_version)
    except InvalidVersion:
        return None


def check_kv_cache(vllm_config: Any) -> None:
    """Raise ValueError for a 16-bit KV cache under float32 activations, which vLLM's CPU attention reads wrongly.

    Seen with 0.31: log-probabilities of a prompt off by 0.5, without an error.
    """
    stored, computed = vllm_config.cache_config.cache_dtype, vllm_config.model_config.dtype
    if current_platform.is_cpu() and computed == torch.float32 and stored in ("bfloat16", "float16"):
        raise ValueError(
            f"--kv-cache-dtype {stored} with --dtype float32: vLLM's CPU attention computes wrong answers from such a "
            "cache; leave --kv-cache-dtype out, or use --dtype bfloat16"
        )


def check_kv_connector(vllm_config: Any) -> None:
    """Raise ValueError for a KV connector that keeps keys and values of an earlier policy and cannot empty them."""
    if vllm_config.kv_transfer_config is None:
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    connector = KVConnectorFactory.get_connector_class(vllm_config.kv_transfer_config)
    if connector.reset_cache is KVConnectorBase_V1.reset_cache:
        raise ValueError(
            f"{connector.__name__} keeps keys and values outside the engine and cannot empty them, so that answers of "
            "one policy would be made from those of another; start the engine without it"
        )


def workers_share_this_machine(vllm_config: Any) -> bool:
    """Return True if every worker can open a file that this process has written."""
    parallel = vllm_config.parallel_config
    return parallel.distributed_executor_backend in ("mp", "uni") and getattr(parallel, "nnodes", 1) == 1


def api_servers(vllm_config: Any) -> int:
    """Return how many API server processes serve one engine."""
    return int(vllm_config.parallel_config._api_process_count)


@functools.cache  # once in a process
def end_start_on_sigterm() -> None:
    """Let SIGTERM end a server of this process that is still starting its engine.

    ``vllm serve`` turns the signal into a KeyboardInterrupt, which the context of the start's socket swallows. The
    server would start all the same, or wait 600 s for an engine that the same signal has ended.
    """
    from vllm.v1.engine import utils

    swallowing = utils.zmq_socket_ctx

    @contextmanager
    def passing_on(*args: Any, **options: Any) -> Iterator[Any]:
        with swallowing(*args, **options) as socket:
            try:
                yield socket
            except KeyboardInterrupt as told:
                if told.args:  # vLLM's, for the signal; a user's Ctrl-C has none
                    raise SystemExit(128 + signal.SIGTERM) from told
                raise

    utils.zmq_socket_ctx = passing_on


def keep_compiled_by(digest: str, vllm_config: "VllmConfig", model: torch.nn.Module) -> None:
    """Let vLLM keep what it compiles of ``model`` under ``digest`` too.

    vLLM finds a compiled model by a hash of its config, and takes it without a look at the layers. A model inside
    another, such as the language model of one that reads images, is compiled under a copy of the config.
    """
    inner = (getattr(module, "vllm_config", None) for module in model.modules())
    for config in (vllm_config, *filter(None, inner)):
        if config.additional_config is None or isinstance(config.additional_config, dict):
            config.additional_config = {**(config.additional_config or {}), "qerl_layouts": digest}


def model_in_this_process(llm: Any) -> torch.nn.Module | None:
    """Return the model of a ``vllm.LLM`` whose worker runs in this process, or None if it runs in another one."""
    worker = getattr(getattr(llm.llm_engine, "model_executor", None), "driver_worker", None)
    return None if worker is None else model_of(worker)


def checkpoint_folder(vllm_config: "VllmConfig") -> Path | None:
    """Return the folder, named or of the hub's cache, that an engine's weights came from; None if that is unknown."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    model = vllm_config.model_config
    if Path(model.model).is_dir():
        return Path(model.model)
    try:
        file = try_to_load_from_cache(
            model.model, "config.json", cache_dir=vllm_config.load_config.download_dir, revision=model.revision
        )
    except HFValidationError:  # an address of another kind, such as s3://
        return None
    return Path(file).parent if isinstance(file, str) else None


@functools.cache  # once in a process: later there may be garbage among the objects
def _leave_out_imports() -> None:
    gc.freeze()
    atexit.register(gc.unfreeze)  # else Triton's library finds its functions alive at the end, and says so at length


@contextmanager
def start_in_this_process(warm_up: "SamplingParams | None" = None) -> Iterator[dict[str, float]]:
    """Quicken and time the start of an engine that is made inside the ``with`` block and runs in this process.

    Yields the seconds of each phase, which are there once the block has ended. ``memory profile`` includes the
    compilation, unless vLLM counts that itself. Of an engine in another process there are no seconds.

    vLLM looks at a model's class in a new process, once for each release. This process imports that class anyway, and a
    new one takes as long as importing vLLM.

    A GPU engine samples at its start, so that Triton compiles its kernels. ``warm_up`` takes the place of vLLM's own
    parameters there, which ask for every kernel: penalties, top-k, a grammar, banned words.

    Garbage is collected only where vLLM asks for it, and never among what was imported before the first engine.
    Raises ValueError if another process changed the GPU's free memory while vLLM measured it.
    """
    from vllm import SamplingParams
    from vllm.model_executor.models import registry
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    seconds: dict[str, float] = {}
    workers: list[Any] = []
    init_worker, vllms_own = WorkerWrapperBase.init_worker, SamplingParams.for_sampler_warmup

    def timed(owner: Any, method: str, phase: str) -> Callable[..., Any]:
        call = getattr(owner, method)

        @functools.wraps(call)
        def run(*args: Any, **keywords: Any) -> Any:
            if method == "compile_or_warm_up_model" and hasattr(owner.model_runner, "capture_model"):
                owner.model_runner.capture_model = timed(owner.model_runner, "capture_model", "graphs")
            began = time.perf_counter()
            try:
                return call(*args, **keywords)
            finally:
                seconds[phase] = time.perf_counter() - began
                del owner.__dict__[method]

        return run

    def init_and_time(wrapper: Any, *args: Any, **keywords: Any) -> None:
        init_worker(wrapper, *args, **keywords)
        workers.append(wrapper.worker)
        for method, phase in START_PHASES.items():
            setattr(wrapper.worker, method, timed(wrapper.worker, method, phase))

    _leave_out_imports()
    gc.disable()
    try:
        with (
            patch.object(WorkerWrapperBase, "init_worker", init_and_time),
            patch.object(registry, "_run_in_subprocess", lambda look: look()),
            patch.object(SamplingParams, "for_sampler_warmup", lambda: warm_up or vllms_own()),
        ):
            yield seconds
    except (AssertionError, RuntimeError) as error:  # the second of a worker in another process
        _, is_unsteady, sizes = str(error).partition(UNSTEADY)
        if is_unsteady:
            raise ValueError(
                f"another process gave memory back while vLLM measured this GPU ({sizes.partition('. This ')[0]}); say "
                "how large the KV cache is: --kv_cache_memory_bytes, for qerl train --vllm_kv_cache_memory_bytes"
            ) from error
        raise
    finally:
        gc.enable()
    if not workers:
        return
    compiling = workers[0].vllm_config.compilation_config.compilation_time
    seconds["compile"] = min(compiling, seconds["memory profile"])
    seconds["memory profile"] -= seconds["compile"]
    seconds["warm-up"] -= seconds.get("graphs", 0.0)
