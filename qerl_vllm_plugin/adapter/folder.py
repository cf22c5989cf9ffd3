"""Read a saved adapter: PEFT's two files, ``norms.safetensors`` where norms were trained, and the hash of its base.

``check_folder`` and ``check_modules`` are for adapters that vLLM reads itself, one for each LoRA request:
``--lora-modules``, ``lora_local_path`` of lm-evaluation-harness, ``/v1/load_lora_adapter``. vLLM (0.26 to 0.32,
``vllm/lora``) takes the tensors, and of the config rank, alpha and whether it is rank-stabilized. It looks at no other
file, and drops tensors for which it has no layer: the answers would be another policy's. Such adapters are refused.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qerl_vllm_plugin.adapter.check import AdapterError, check_config
from qerl_vllm_plugin.wire.safetensors_file import DOWNLOAD_AGAIN, CheckpointError, read_header, read_tensor

ADAPTER_FILE, CONFIG_FILE, NORMS_FILE = "adapter_model.safetensors", "adapter_config.json", "norms.safetensors"
STATE_FILE = "qerl_state.json"  # written by `qerl train`, with the hash of the base that was trained on

FILES = (ADAPTER_FILE, CONFIG_FILE, NORMS_FILE)
BLOCKS, BLOCK = 64, 4096

Stamps = tuple[tuple[int, ...] | None, ...]  # of each of FILES, None where it is not there


@dataclass(frozen=True)
class SavedAdapter:
    """``config`` is the content of ``adapter_config.json``; ``norms`` is None where none were trained.

    ``stamps`` tell whether the folder still holds what was read.
    """

    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]
    norms: dict[str, torch.Tensor] | None
    stamps: Stamps


def read(folder: str | Path) -> SavedAdapter:
    """The adapter, in memory of its own: of a file that is mapped, whoever writes it anew would change the tensors, or
    end this process.

    Raises AdapterError for a folder that lacks a file or holds a damaged one, or is written to meanwhile.
    """
    folder = Path(folder)
    for name in (ADAPTER_FILE, CONFIG_FILE):
        if not (folder / name).is_file():
            raise AdapterError(f"{folder} holds no {name}; name a folder that PEFT or `qerl train` has saved")
    stamps = _stamps(folder)
    tensors = _tensors(folder / ADAPTER_FILE)
    norms = _tensors(folder / NORMS_FILE) if (folder / NORMS_FILE).exists() else None
    saved = SavedAdapter(tensors, read_config(folder), norms, stamps)
    _check_stamps(folder, saved)
    return saved


def read_config(folder: str | Path) -> dict[str, Any]:
    """The content of ``adapter_config.json``. Raises AdapterError for a damaged file."""
    return _json(Path(folder) / CONFIG_FILE)


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        return {name: read_tensor(header) for name, header in read_header(file).items()}
    except (CheckpointError, OSError) as error:
        text = str(error).replace(DOWNLOAD_AGAIN, "save the adapter again")
        raise AdapterError(f"{file.parent} is damaged: {text}") from error


def _stamps(folder: Path) -> Stamps:
    """What changes when one of the files is written to, or replaced."""

    def stamp(file: Path) -> tuple[int, ...] | None:
        try:
            found = file.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    return tuple(stamp(folder / name) for name in FILES)


def _check_stamps(folder: Path, saved: SavedAdapter) -> None:
    if _stamps(folder) != saved.stamps:
        raise AdapterError(f"{folder} is being written to; name it again when it is whole")


def check_base(folder: str | Path, base: Path) -> None:
    """Raises AdapterError if an adapter's folder says that it was trained on another checkpoint than ``base``.

    A folder that PEFT alone has written says nothing about that and passes: a name is no proof.
    """
    hashed = trained_on(folder)
    if hashed is not None and hashed != base_hash(base):
        raise AdapterError(
            f"{folder} was trained on another base ({_json(Path(folder) / STATE_FILE).get('base')}) than the one "
            f"served here ({base}); serve that one"
        )


def trained_on(folder: str | Path) -> str | None:
    """The hash of the base that an adapter's folder says it was trained on. Raises AdapterError for a damaged file."""
    state = Path(folder) / STATE_FILE
    return _json(state).get("base_hash") if state.is_file() else None


def digest(folder: str | Path, saved: SavedAdapter) -> str:
    """SHA-256 of the files that ``saved`` was read from. Raises AdapterError if they are others by now."""
    sha = hashlib.sha256()
    try:
        for name in FILES:
            file = Path(folder) / name
            if file.is_file():
                sha.update(name.encode() + hashlib.sha256(file.read_bytes()).digest())
    except OSError as error:
        raise AdapterError(f"{folder} cannot be read: {error}") from error
    _check_stamps(Path(folder), saved)
    return sha.hexdigest()


def base_hash(folder: str | Path) -> str:
    """SHA-256 that tells one base checkpoint from another without reading all of it.

    Over config.json without its ``_name_or_path`` and version, and, for each safetensors file in the order of names,
    its name, its size and 64 evenly spaced blocks of 4 KiB, the header's among them.
    """
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for key in ("_name_or_path", "transformers_version"):
        config.pop(key, None)
    sha = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        sha.update(f"{file.name}:{size}".encode())
        with open(file, "rb") as content:
            for i in range(BLOCKS):
                content.seek(max(0, size - BLOCK) * i // (BLOCKS - 1))
                sha.update(content.read(BLOCK))
    return sha.hexdigest()


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise AdapterError(f"{file} is damaged: {error}; save the adapter again") from error
    if not isinstance(content, dict):
        raise AdapterError(f"{file} holds no JSON object; save the adapter again")
    return content


EXPERTS = ".experts"  # vLLM keeps the adapters of a layer's experts as one, under names of its own


def check_folder(folder: Path, base: Path | None, max_rank: int) -> None:
    """Raises AdapterError for an adapter of another checkpoint than ``base`` (where that is known), with trained norms,
    or with a config whose product vLLM would not compute. ``max_rank`` is the engine's ``max_lora_rank``."""
    if base is not None:
        check_base(folder, base)
    if (folder / NORMS_FILE).exists():
        raise AdapterError(
            f"{folder} holds trained norms ({NORMS_FILE}), and a LoRA request would be answered without "
            'them, by another policy. Leave LoRA out and start the engine with additional_config={"qerl": '
            f'{{"policy_adapter": {{"rank": R, "path": "{folder}"}}}}}}, or use `qerl evaluate`, Policy.swap_folder or '
            "`qerl export --merge`"
        )
    try:  # vLLM has slots for experts, and reads what PEFT saves of them
        check_config(read_config(folder), max_rank, besides=("target_parameters",))
    except AdapterError as error:
        raise AdapterError(f"{folder}: {error}") from error


def check_modules(folder: Path, adapted: Iterable[str], slots: Iterable[str]) -> None:
    """Raises AdapterError if ``adapted``, the modules of an adapter by vLLM's names, are not all among ``slots``."""
    left_out = sorted(name for name in set(adapted) - set(slots) if EXPERTS not in name)
    if left_out:
        raise AdapterError(
            f"{folder} adapts {left_out[0]} (and {len(left_out) - 1} more), for which this engine has no LoRA slot: "
            "that part would be left out. Was it trained on another base, or does lora_target_modules exclude it?"
        )
