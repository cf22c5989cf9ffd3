"""Change a running server's policy: bring the engine to rest, empty its caches, and change all ranks or none."""

import asyncio
import json
import os
from collections.abc import Coroutine
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from qerl_vllm_plugin.adapter import folder as adapter_folder
from qerl_vllm_plugin.compat import engine, engine_client
from qerl_vllm_plugin.server import metrics
from qerl_vllm_plugin.server.engine import Engine
from qerl_vllm_plugin.server.quiesce import Look, Quiesce, is_there
from qerl_vllm_plugin.server.versions import tell_versions
from qerl_vllm_plugin.wire import shared_file
from qerl_vllm_plugin.wire.body import Refused
from qerl_vllm_plugin.wire.shared_segment import Segments
from qerl_vllm_plugin.worker.change_log import ChangeLog

logger = init_logger("vllm.qerl")

MODES = ("keep", "wait", "abort")  # what happens to running requests


class PolicyServer:
    """Hold the policy of one API server; call ``open`` before the first request."""

    def __init__(self) -> None:
        self.changes: ChangeLog
        self.segments = Segments(Refused)

    async def open(
        self,
        client: Any,
        vllm_config: Any,
        base: Path | None,
        folders: str | None,
        patience: float,
    ) -> None:
        """Open the engine's policy.

        ``client`` is vLLM's engine client. ``base`` is the checkpoint's folder, None if it is not known. ``folders`` is
        the directory whose folders may be installed by name. ``patience`` is the seconds that the engine may take to
        answer, unless it waits for running requests. Raises Refused if the engine refuses.
        """
        self._engine, self._base = Engine(client, patience), base
        self._watch = asyncio.create_task(self._engine.watch())
        self._folders = Path(folders).resolve() if folders is not None else None
        self._has_connector = vllm_config.kv_transfer_config is not None
        opened = await self._engine.rpc("qerl_open", os.getpid())
        self.carrier, self.rank, self.limit = opened["carrier"], opened["max_rank"], opened["max_bytes"]
        self.changes = self._engine.changes = ChangeLog(opened["changes"])
        is_shared = engine.api_servers(vllm_config) > 1
        self._quiesce = Quiesce(self._engine, self.changes, opened["instance"], is_shared=is_shared)
        metrics.VERSION.set(opened["version"])
        self.base_hash = adapter_folder.base_hash(base) if base is not None else None
        model = vllm_config.model_config
        self._engine_state = {
            "instance": opened["instance"],  # a new one after each restart
            "quantization": model.quantization,
            "dtype": str(model.dtype).removeprefix("torch."),
            "logprobs_mode": model.logprobs_mode,
            "max_model_len": model.max_model_len,
            "speculative": None if (drafts := vllm_config.speculative_config) is None else drafts.method,
            "machine": shared_file.machine(),
            "gpus": opened["gpus"],
        }
        if self.carrier != "lora":  # with LoRA slots, a request itself names the adapter that answers it
            tell_versions(client)

    async def state(self) -> dict[str, Any]:
        count = self.changes.count  # read first, so that a change made before the next line shows in a later count
        state = await self._engine.rpc("qerl_state")
        return {
            "version": state["version"],
            "changes": count,
            "paused": self.changes.is_paused,
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
        self,
        path: str | None,
        config: dict[str, Any],
        digest: str,
        version: int | None,
        mode: str,
        is_gone: Look = is_there,
        held: ExitStack | None = None,
    ) -> dict[str, Any]:
        """Install an adapter as ``version`` and return the version and the change's seconds.

        ``path`` is a safetensors file or a description of GPU memory; None serves the base alone. ``mode`` says what
        happens to running requests. ``is_gone`` says whether the caller has stopped waiting; a change that has not
        begun is not made then. ``held`` is closed when the change has ended. Raises Refused.
        """
        return await _to_the_end(self._swap(path, config, digest, version, mode, is_gone), held)

    async def _swap(
        self, path: str | None, config: dict[str, Any], digest: str, version: int | None, mode: str, is_gone: Look
    ) -> dict[str, Any]:
        if self.carrier != "resident":
            raise Refused(
                409,
                "no_carrier",
                "this server has no resident adapter; start it with --quantization qerl_nvfp4 --additional-config "
                """'{"qerl": {"policy_adapter": {"rank": R}}}'""",
            )
        # refuse a stale version before waiting for anything; without a version there is nothing to compare
        served = await self._engine.rpc("qerl_state") if version is not None else {}
        if version is not None and version <= served["version"]:
            if version == served["version"] and digest == served["hash"]:
                return {"version": version, "unchanged": True}
            raise Refused(
                409, "stale_version", f"version {version} is not newer than {served['version']}, which is served"
            )
        text = json.dumps(config)  # vLLM's own message format has no integers above 64 bits
        answer = await self._change("swap", mode, is_gone, "qerl_swap", path, text, path, False, version, digest)
        metrics.VERSION.set(answer["version"])
        return answer

    async def set_noise(
        self, sigma: Any, seed: Any, rollout: Any, targets: Any, mode: str, is_gone: Look = is_there
    ) -> dict[str, Any]:
        change = self._change("noise", mode, is_gone, "qerl_set_noise", sigma, seed, rollout, targets)
        return await _to_the_end(change)

    def folder(self, name: str) -> Path:
        """Return the folder of that name; raise Refused without one, and AdapterError for one of another base."""
        if self._folders is None:
            raise Refused(
                404, "no_folders", 'this server was started without "qerl.policy_folders"; send the adapter itself'
            )
        try:
            folder = (self._folders / name).resolve()
            is_known = folder.parent == self._folders and folder.is_dir()
        except (OSError, ValueError, RuntimeError):  # the name is impossible for a file, or is a link to itself
            is_known = False
        if not is_known:
            raise Refused(404, "no_folder", f"there is no folder {name[:80]!r} directly below policy_folders")
        if self._base is not None:
            adapter_folder.check_base(folder, self._base)
        return folder

    async def _change(self, kind: str, mode: str, is_gone: Look, method: str, *args: Any) -> dict[str, Any]:
        """Change all ranks with the engine at rest, and return their answer with the change's seconds.

        Nothing runs between the emptying of the caches and the change, so nothing that another policy computed is read
        again. A refused change costs running requests only their cache.
        """
        self._engine.check()
        async with self._quiesce.at_rest(kind, mode, is_gone) as timer:
            await self._empty_caches(mode)
            timer.end("empty")
            answer = await self._engine.rpc(method, *args)
            timer.end("way")
        timer.end("resume")
        if answer.get("unchanged"):  # an earlier change, for which this one waited, has already made it
            return {"version": answer["version"], "unchanged": True}
        of_worker = answer.get("parts", {})
        timer.seconds["way"] -= sum(of_worker.values())
        took = sum({**timer.seconds, **of_worker}.values())
        parts = {part: round(seconds, 4) for part, seconds in {**timer.seconds, **of_worker}.items()}
        metrics.SWAPS.labels(kind).inc()
        metrics.SECONDS.observe(took)
        return {**answer, "seconds": round(took, 4), "parts": parts}

    async def _empty_caches(self, mode: str) -> None:
        """Empty the prefix cache and the KV connector's cache.

        With "keep", running requests are computed again from their beginning; in the other modes none is left. Raises
        Refused if the engine could not empty its caches; nothing has changed then.
        """
        try:
            done = await self._engine.in_time(
                self._engine.client.reset_prefix_cache(
                    reset_running_requests=mode == "keep", reset_connector=self._has_connector
                )
            )
        except Refused:
            raise
        except Exception as error:
            if engine_client.is_engine_death(error):
                raise
            logger.exception("the caches could not be emptied")
            raise Refused(503, "cannot_reset", f"the caches could not be emptied: {error}") from error
        if not done:
            raise Refused(503, "cannot_reset", "the engine could not empty its caches; nothing has changed")


async def _to_the_end(change: Coroutine[Any, Any, dict[str, Any]], held: ExitStack | None = None) -> dict[str, Any]:
    """Run a change to its end, even if its caller goes away with the engine paused; then close ``held``."""

    async def run() -> dict[str, Any]:
        with held or nullcontext():
            return await change

    return await asyncio.shield(asyncio.create_task(run()))
