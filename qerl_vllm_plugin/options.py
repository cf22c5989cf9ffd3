"""Parse the options that `--additional-config` may hold under "qerl".

This module needs neither vLLM nor torch, so a command can check the options at once.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from qerl_vllm_plugin.wire.timing import PATIENCE

KNOWN_OPTIONS = {"ignore", "policy_adapter", "kernel", "policy_folders", "weight_only", "untested_models"}
KNOWN_OPTIONS |= {"policy_timeout"}
KERNELS = ("auto", "tiled", "marlin", "dequantize", "batch_invariant")
NO_WEIGHT_TRANSFER = (
    "--weight-transfer-config has no place here: the weights of a qerl_nvfp4 engine are frozen, and no adapter fits "
    "into those calls: they have no field for its config, a rank cannot refuse for the others, and the prefix cache "
    "stays as it is (qerl_vllm_plugin/lora_updates.md). Push adapters with PUT /v1/qerl/policy or "
    "qerl_vllm_plugin.client"
)
ONE_CARRIER = (
    '"qerl.policy_adapter" and --enable-lora exclude each other: the policy adapter is part of every layer and on for '
    "every request. Use --enable-lora alone for several adapters"
)
MAX_ADAPTER_RANK = 512  # vLLM's own limit for --max-lora-rank


@dataclass(frozen=True)
class Options:
    """The options of ``--additional-config '{"qerl": {...}}'``.

    ``ignore``: layers of a BF16 checkpoint that stay in BF16, by name or ``re:`` pattern (compressed-tensors' syntax).
    It is None if not given.
    ``adapter_rank`` and ``adapter_path``: the rank and path of "policy_adapter". ``{"rank": R}`` keeps one adapter of
    rank up to R in the layers themselves, for all requests. With ``"path": FOLDER``, that adapter is installed at
    start.
    ``policy_folders``: the directory whose folders a running server may install by name.
    ``policy_timeout``: seconds after which a running server gives up an engine that does not answer to a change.
    ``kernel``: "auto" takes our tiled kernel on Hopper, Marlin on other GPUs, and dequantization on a CPU; or one of
    them by name. "batch_invariant" is an experiment for VLLM_BATCH_INVARIANT=1: tiled, with a fixed order of sums.
    ``weight_only``: also read checkpoints with more than packed weights (ModelOpt's NVFP4, W4A4, FP8 layers), for their
    weights alone. Activation scales are dropped, and FP8 layers are expanded to BF16.
    ``untested_models``: also serve a model family that was never compared with transformers (families.py).
    """

    ignore: tuple[str, ...] | None = None
    adapter_rank: int = 0
    kernel: str = "auto"
    adapter_path: str | None = None
    policy_folders: str | None = None
    weight_only: bool = False
    untested_models: bool = False
    policy_timeout: float = PATIENCE

    @classmethod
    def parse(cls, additional_config: Any) -> "Options":
        """Return the options in vLLM's ``additional_config``; raise ValueError for an unknown key or unusable value."""
        given = additional_config.get("qerl", {}) if isinstance(additional_config, dict) else {}
        if not isinstance(given, dict):
            raise ValueError(f'--additional-config: "qerl" must be an object, not {given!r}')
        others = additional_config if isinstance(additional_config, dict) else {}
        if beside := sorted(KNOWN_OPTIONS & others.keys()):
            raise ValueError(
                f'--additional-config: "{beside[0]}" stands beside "qerl", where nothing reads it; write '
                f'{{"qerl": {{"{beside[0]}": ...}}}}'
            )
        if alike := get_close_matches("qerl", [str(key) for key in others if key != "qerl"], n=1, cutoff=0.7):
            raise ValueError(f'--additional-config: nothing reads the key {alike[0]!r}; write "qerl"')
        if unknown := sorted(set(given) - KNOWN_OPTIONS):
            raise ValueError(
                f'--additional-config: unknown key {unknown[0]!r} under "qerl"; known: {sorted(KNOWN_OPTIONS)}'
            )
        ignore, adapter = given.get("ignore"), given.get("policy_adapter")
        if ignore is not None and (
            not isinstance(ignore, list | tuple) or not all(isinstance(name, str) for name in ignore)
        ):
            raise ValueError(f'--additional-config: "qerl.ignore" must be a list of layer names, not {ignore!r}')
        rank, path = _adapter(adapter) if "policy_adapter" in given else (0, None)
        folders = given.get("policy_folders")
        if not isinstance(folders, str | None):
            raise ValueError(
                f'--additional-config: "qerl.policy_folders" must be the path of a directory, not {folders!r}'
            )
        kernel = given.get("kernel", "auto")
        if kernel not in KERNELS:
            raise ValueError(f'--additional-config: "qerl.kernel" is {kernel!r}; it is one of {", ".join(KERNELS)}')
        switches = [given.get(key, False) for key in ("weight_only", "untested_models")]
        for key, value in zip(("weight_only", "untested_models"), switches, strict=True):
            if not isinstance(value, bool):
                raise ValueError(f'--additional-config: "qerl.{key}" must be true or false, not {value!r}')
        timeout = given.get("policy_timeout", PATIENCE)
        if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not 0 < timeout < float("inf"):
            raise ValueError(
                f'--additional-config: "qerl.policy_timeout" must be a number of seconds above 0, not {timeout!r}'
            )
        weight_only, untested = switches
        ignored = tuple(ignore) if ignore is not None else None
        return cls(ignored, rank, kernel, path, folders, weight_only, untested, timeout)

    def check_folders(self) -> None:
        """Raise ValueError if ``policy_folders`` is given and is no directory."""
        if self.policy_folders is not None and not Path(self.policy_folders).is_dir():
            raise ValueError(
                f'--additional-config: "qerl.policy_folders": {self.policy_folders} is no directory; make it first'
            )


def _adapter(given: Any) -> tuple[int, str | None]:
    """Return the rank and the folder, or None, of "policy_adapter". Raises ValueError for anything else."""
    found: dict[str, Any] = {"rank": None}
    if isinstance(given, dict) and {"rank"} <= set(given) <= {"rank", "path"}:
        found = given
    rank, path = found["rank"], found.get("path")
    is_rank = isinstance(rank, int) and not isinstance(rank, bool) and 0 < rank <= MAX_ADAPTER_RANK
    if not is_rank or not isinstance(path, str | None):
        raise ValueError(
            '--additional-config: "qerl.policy_adapter" must be {"rank": R} with a whole number R from 1 to '
            f'{MAX_ADAPTER_RANK}, and "path": FOLDER for an adapter that is there at start, not {given!r}; for a '
            "server without one leave it out"
        )
    return rank, path
