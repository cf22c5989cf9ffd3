"""The order of a change on a running server: one at a time, the engine paused, its caches empty, all ranks or none."""

import asyncio
import json
import os
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from vllm.logger import init_logger

from qerl_vllm_plugin import adapter_folder, compat, compat_client, shared_file
from qerl_vllm_plugin.adapter import AdapterError
from qerl_vllm_plugin.change_log import ChangeLog
from qerl_vllm_plugin.in_time import SILENT
from qerl_vllm_plugin.laps import Laps
from qerl_vllm_plugin.policy import PolicyLostError, check_answers
from qerl_vllm_plugin.segment import Segments
from qerl_vllm_plugin.server import metrics
from qerl_vllm_plugin.server.body import Refused
from qerl_vllm_plugin.server.turn import turn
from qerl_vllm_plugin.server.versions import tell_versions

logger = init_logger("vllm.qerl")
T = TypeVar("T")

MODES = ("keep", "wait", "abort")  # what happens to running requests
LOOK = 1.0  # seconds between two looks at what other API server processes have found out
LOST_TO_OTHERS = "the engine was given up, or holds half of a policy: another API server's log says why; restart it"
DRAIN = 600.0  # seconds that running requests may take under "wait"
GLANCE = 0.02  # seconds between two looks at an engine that somebody else lets come to rest
STILL_RUNNING = "requests still ran after {:.0f} s; use requests={}"
RESUMED = "somebody resumed the engine in the middle of a change, so that a few tokens may be of both policies"
FROZEN = (
    "somebody else has paused the engine in the middle of requests, which cannot end so; resume it first, or use "
    "requests=keep or abort"
)


class PolicyServer:
    """The policy of one API server; ``open`` comes before the first request."""

    def __init__(self) -> None:
        self.changes: ChangeLog
        self.lost: str | None = None
        self.segments = Segments(Refused)
        self._is_silent = False
        self._lock = asyncio.Lock()

    async def open(
        self,
        engine: Any,
        vllm_config: Any,
        base: Path | None,
        folders: str | None,
        patience: float,
    ) -> None:
        """``folders``: the directory whose folders may be installed by name. Raises ValueError if there is none.

        ``patience``: seconds that the engine may take to answer, unless it waits for running requests.
        """
        self._patience = patience
        if folders is not None and not Path(folders).is_dir():
            raise ValueError(f'--additional-config: "qerl.policy_folders": {folders} is no directory')
        self._engine, self._base = engine, base
        self._folders = Path(folders).resolve() if folders is not None else None
        self._has_connector = vllm_config.kv_transfer_config is not None
        self._is_shared = compat.api_servers(vllm_config) > 1
        opened = await self._rpc("qerl_open", os.getpid())
        self.carrier, self.rank, self.limit = opened["carrier"], opened["max_rank"], opened["max_bytes"]
        self.changes, self._instance = ChangeLog(opened["changes"]), opened["instance"]
        self._watch = asyncio.create_task(self._watch_others())
        metrics.VERSION.set(opened["version"])
        self.base_hash = adapter_folder.base_hash(base) if base is not None else None
        model = vllm_config.model_config
        self._engine_state = {
            "instance": opened["instance"],  # another one after a restart
            "quantization": model.quantization,
            "dtype": str(model.dtype).removeprefix("torch."),
            "logprobs_mode": model.logprobs_mode,
            "max_model_len": model.max_model_len,
            "machine": shared_file.machine(),
            "gpus": opened["gpus"],
        }
        if self.carrier != "lora":  # there a request names the adapter that answers it
            tell_versions(engine)

    async def state(self) -> dict[str, Any]:
        state = await self._rpc("qerl_state")
        return {
            "version": state["version"],
            "hash": state["hash"] or None,
            "noise": {key: state[key] for key in ("sigma", "seed", "rollout", "targets")},
            "max_rank": self.rank,
            "max_bytes": self.limit,
            "base": str(self._base) if self._base is not None else None,
            "base_hash": self.base_hash,
            "carrier": self.carrier,
            "counters": metrics.counted(),
            **self._engine_state,
        }

    async def swap(
        self, path: str | None, config: dict[str, Any], digest: str, version: int | None, mode: str
    ) -> dict[str, Any]:
        """Installs the safetensors file ``path``, or what a description says, or no adapter, as ``version`` -> version
        and seconds."""
        return await _to_the_end(self._swap(path, config, digest, version, mode))

    async def _swap(
        self, path: str | None, config: dict[str, Any], digest: str, version: int | None, mode: str
    ) -> dict[str, Any]:
        if self.carrier != "resident":
            raise Refused(
                409,
                "no_carrier",
                "this server has no resident adapter; start it with --quantization qerl_nvfp4 --additional-config "
                """'{"qerl": {"policy_adapter": {"rank": R}}}'""",
            )
        async with self._lock, turn(self._instance):
            # before the engine is paused; without a version there is nothing to ask
            served = await self._rpc("qerl_state") if version is not None else {}
            if version is not None and version <= served["version"]:
                if version == served["version"] and digest == served["hash"]:
                    return {"version": version, "unchanged": True}
                raise Refused(
                    409, "stale_version", f"version {version} is not newer than {served['version']}, which is served"
                )
            text = json.dumps(config)  # vLLM's own message format has no whole numbers above 64 bits
            answer = await self._change("swap", mode, "qerl_swap", path, text, path, False, version, digest)
            metrics.VERSION.set(answer["version"])
            return answer

    async def set_noise(self, sigma: Any, seed: Any, rollout: Any, targets: Any, mode: str) -> dict[str, Any]:
        return await _to_the_end(self._set_noise(sigma, seed, rollout, targets, mode))

    async def _set_noise(self, sigma: Any, seed: Any, rollout: Any, targets: Any, mode: str) -> dict[str, Any]:
        async with self._lock, turn(self._instance):
            return await self._change("noise", mode, "qerl_set_noise", sigma, seed, rollout, targets)

    def folder(self, name: str) -> Path:
        """The folder that may be installed under this name. Raises Refused."""
        if self._folders is None:
            raise Refused(
                404, "no_folders", 'this server was started without "qerl.policy_folders"; send the adapter itself'
            )
        folder = (self._folders / name).resolve()
        if folder.parent != self._folders or not folder.is_dir():
            raise Refused(404, "no_folder", f"there is no folder {name!r} among those that may be installed")
        if self._base is not None:
            adapter_folder.check_base(folder, self._base)
        return folder

    async def _change(self, kind: str, mode: str, method: str, *args: Any) -> dict[str, Any]:
        """Pauses, empties every cache, changes, resumes. Nothing that another policy computed is read again, for
        nothing runs from the emptying on; a change that is refused costs running requests their cache and no more."""
        start, laps = time.perf_counter(), Laps()
        self._check()
        was_paused = await self._is_at_rest(mode)
        try:
            if not was_paused or mode == "abort":
                try:
                    await asyncio.wait_for(compat_client.pause(self._engine, mode, is_shared=self._is_shared), DRAIN)
                except asyncio.TimeoutError:
                    raise Refused(503, "still_running", STILL_RUNNING.format(DRAIN, "keep or abort")) from None
            laps.end("pause")
            await self._empty_caches(mode)
            laps.end("empty")
            answer = await self._rpc(method, *args)
            laps.end("way")
            if not await self._in_time(self._engine.is_paused()):
                await self._empty_again()
        finally:
            if not was_paused and not self._is_silent:  # a lost engine too: what waits is refused, and waits no longer
                await self._in_time(self._engine.resume_generation())
        laps.end("resume")
        of_worker = answer.get("parts", {})
        laps.seconds["way"] -= sum(of_worker.values())
        parts = {part: round(seconds, 4) for part, seconds in {**laps.seconds, **of_worker}.items()}
        metrics.SWAPS.labels(kind).inc()
        metrics.SECONDS.observe(time.perf_counter() - start)
        return {**answer, "seconds": round(time.perf_counter() - start, 4), "parts": parts}

    async def _is_at_rest(self, mode: str) -> bool:
        """Whether somebody else has paused the engine (vLLM's own ``/pause``, or a sleep that is about to begin).

        One that is to let its requests end does so first: a change waits its turn, unless it aborts them. Raises
        Refused if that takes too long.
        """
        end = time.monotonic() + DRAIN
        while await self._in_time(self._engine.is_paused()):
            self._check()
            if mode == "abort" or not await self._in_time(compat_client.is_working(self._engine)):
                if mode == "wait" and await compat_client.have_begun(self._engine):
                    raise Refused(503, "still_running", FROZEN)
                return True
            if time.monotonic() > end:
                raise Refused(503, "still_running", STILL_RUNNING.format(DRAIN, "abort"))
            await asyncio.sleep(GLANCE)
        return False

    async def _empty_caches(self, mode: str) -> None:
        """Requests under way begin their computing anew under "keep" alone; elsewhere none is left.

        Raises Refused if the engine could not empty them; nothing has changed then.
        """
        try:
            done = await self._in_time(
                self._engine.reset_prefix_cache(
                    reset_running_requests=mode == "keep", reset_connector=self._has_connector
                )
            )
        except Refused:
            raise
        except Exception as error:
            logger.exception("the caches could not be emptied")
            raise Refused(503, "cannot_reset", f"the caches could not be emptied: {error}") from error
        if not done:
            raise Refused(503, "cannot_reset", "the engine could not empty its caches; nothing has changed")

    async def _empty_again(self) -> None:
        """After a change in whose middle somebody else has resumed the engine, which has computed since the emptying:
        nothing of that is read again. Raises Refused if that cannot be, and then nobody is answered any more."""
        logger.warning("%s", RESUMED)
        try:
            await self._empty_caches("keep")
        except Refused as refused:
            self._lose(f"{RESUMED}, and {refused}; restart it")
            raise Refused(503, "lost", str(self.lost)) from refused

    async def _rpc(self, method: str, *args: Any) -> dict[str, Any]:
        """The first rank's answer. Raises Refused if a rank refused."""
        self._check()
        results = await self._in_time(self._engine.collective_rpc(method, args=args))
        try:
            check_answers(results)
        except AdapterError as error:
            unreachable = any(result.get("unreachable") for result in results)
            raise Refused(422, "unreachable" if unreachable else "refused", str(error)) from error
        except PolicyLostError as error:
            self._lose(str(error))
            raise Refused(503, "lost", str(error)) from error
        return dict(results[0])

    def _check(self) -> None:
        """Raises Refused if the engine was given up."""
        if self.lost is not None:
            raise Refused(503, "lost", self.lost)

    async def _in_time(self, answer: Coroutine[Any, Any, T]) -> T:
        """What the engine answers. Raises Refused if it does not: that engine is lost, for its answers no longer belong
        to the questions."""
        try:
            return await asyncio.wait_for(answer, self._patience)
        except asyncio.TimeoutError:
            self._is_silent = True
            self._lose(SILENT.format(self._patience))
            compat_client.end_requests(self._engine, str(self.lost))
            raise Refused(503, "lost", str(self.lost)) from None

    def _lose(self, reason: str) -> None:
        self.lost = reason
        logger.error("%s", reason)
        compat_client.refuse_requests(self._engine, reason)
        if hasattr(self, "changes"):
            self.changes.lose()

    async def _watch_others(self) -> None:
        """What another API server process of this engine has found out holds for this one."""
        while self.lost is None:
            await asyncio.sleep(LOOK)
            if self.changes.is_lost and self.lost is None:
                self._lose(LOST_TO_OTHERS)
                compat_client.end_requests(self._engine, LOST_TO_OTHERS)


async def _to_the_end(change: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """Lets a change end though its caller has gone: half-way the engine is paused."""
    return await asyncio.shield(asyncio.create_task(change))
