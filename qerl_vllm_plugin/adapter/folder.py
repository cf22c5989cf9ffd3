"""Read a saved adapter: PEFT's two files, ``norms.safetensors`` where norms were trained, and the hash of its base.

``check_folder``, ``check_modules`` and ``check_tensors`` check adapters that vLLM itself reads for LoRA requests:
``--lora-modules``, ``lora_local_path`` of lm-evaluation-harness, ``/v1/load_lora_adapter``. vLLM (0.26 to 0.32,
``vllm/lora``) reads the tensors, and from the config only the rank, alpha and whether it is rank-stabilized. It reads
no other file and drops tensors for which it has no layer, so its completions would come from another policy. Such
adapters are refused.
"""

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qerl_vllm_plugin.adapter.check import AdapterError, check_config, first_of
from qerl_vllm_plugin.wire.safetensors_file import DOWNLOAD_AGAIN, CheckpointError, read_header, read_tensor
from qerl_vllm_plugin.wire.shared_file import content

ADAPTER_FILE, CONFIG_FILE, NORMS_FILE = "adapter_model.safetensors", "adapter_config.json", "norms.safetensors"
STATE_FILE = "qerl_state.json"  # written by `qerl train`, with the hash of the base that was trained on
FILES = (ADAPTER_FILE, CONFIG_FILE, NORMS_FILE)
BLOCKS, BLOCK = 64, 4096  # how many blocks of a file, of how many bytes, ``base_hash`` reads
# |A| |B| of a linear: an MLP multiplies three of them, and beyond 1e17 a norm's sum of squares is infinite
STRONGEST = 1e5
EXPERTS = ".experts"  # vLLM stores the adapters of a layer's experts together, under its own names

Pair = tuple[torch.Tensor | None, torch.Tensor | None]  # A and B of a module
Size = tuple[int, int]  # inputs and outputs of a module


@dataclass(frozen=True)
class SavedAdapter:
    """Hold an adapter as read from its folder.

    ``config`` is the content of ``adapter_config.json``. ``norms`` is None where none were trained.
    """

    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]
    norms: dict[str, torch.Tensor] | None

    def digest(self) -> str:
        """Return the SHA-256 of the config, the tensors and the norms."""
        sha = hashlib.sha256(json.dumps([self.config, self.norms is None], sort_keys=True).encode())
        for name, tensor in {**self.tensors, **(self.norms or {})}.items():
            sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            sha.update(content(tensor).numpy())
        return sha.hexdigest()


def read(folder: str | Path) -> SavedAdapter:
    """Read the adapter into memory of its own.

    Its files are not memory-mapped: rewriting a mapped file would change the tensors or crash this process.
    Raises AdapterError for a folder that lacks a file, holds a damaged one, or is written to during the read.
    """
    folder = Path(folder)
    _check_files(folder)
    stamps = _stamps(folder)
    tensors = _tensors(folder / ADAPTER_FILE)
    norms = _tensors(folder / NORMS_FILE) if (folder / NORMS_FILE).exists() else None
    saved = SavedAdapter(tensors, read_config(folder), norms)
    if _stamps(folder) != stamps:
        raise AdapterError(f"{folder} is being written to; name it again when it is whole")
    return saved


def _check_files(folder: Path) -> None:
    if not folder.is_dir():
        raise AdapterError(f"{folder}: there is no such folder; name one that PEFT or `qerl train` has saved")
    for name in (ADAPTER_FILE, CONFIG_FILE):
        if not (folder / name).is_file():
            raise AdapterError(f"{folder} holds no {name}; name a folder that PEFT or `qerl train` has saved")


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return the content of ``adapter_config.json``. Raises AdapterError for a missing or damaged file."""
    return _json(Path(folder) / CONFIG_FILE)


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    with _named_damage(file):
        return {name: read_tensor(header) for name, header in read_header(file).items()}


@contextmanager
def _named_damage(file: Path) -> Iterator[None]:
    try:
        yield
    except (CheckpointError, OSError) as error:
        text = str(error).replace(DOWNLOAD_AGAIN, "save the adapter again")
        raise AdapterError(f"{file.parent} is damaged: {text}") from error


def _stamps(folder: Path) -> list[tuple[int, ...]]:
    """Return each file's inode, size and times, which change when it is written to or replaced."""
    found = list[os.stat_result]()
    for name in FILES:
        with suppress(FileNotFoundError):  # norms are there only if some were trained
            found.append((folder / name).stat())
    return [(file.st_ino, file.st_size, file.st_mtime_ns, file.st_ctime_ns) for file in found]


def check_base(folder: str | Path, base: Path) -> None:
    """Raise AdapterError if a folder names the hash of another base; PEFT's names prove nothing, and pass."""
    hashed = trained_on(folder)
    if hashed is not None and hashed != base_hash(base):
        raise AdapterError(
            f"{folder} was trained on another base ({_json(Path(folder) / STATE_FILE).get('base')}) than the one "
            f"served here ({base}); serve that one"
        )


def trained_on(folder: str | Path) -> str | None:
    """Return the hash of the base that an adapter's folder records, or None; raise AdapterError for a damaged file."""
    state = Path(folder) / STATE_FILE
    return _json(state).get("base_hash") if state.is_file() else None


def base_hash(folder: str | Path) -> str:
    """Return a SHA-256 that tells one base checkpoint from another without reading all of it.

    It covers config.json without ``_name_or_path`` and ``transformers_version``. For each safetensors file, in the
    order of names, it covers the name, the size and 64 evenly spaced blocks of 4 KiB. The first block holds the start
    of the header.
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


def check_before_load(folder: str | Path, base: Path | None, max_rank: int) -> None:
    """Raise AdapterError for a folder that the policy adapter of rank ``max_rank`` cannot be installed from.

    It may lack a file, be of another checkpoint than ``base`` (not checked if None), or have a config that does not
    fit. Its tensors are not read: they are checked against the layers, once those are there.
    """
    folder = Path(folder)
    _check_files(folder)
    if base is not None:
        check_base(folder, base)
    _check_config(folder, max_rank)


def _check_config(folder: Path, max_rank: int, besides: Collection[str] = ()) -> None:
    try:
        check_config(read_config(folder), max_rank, besides)
    except AdapterError as error:
        raise AdapterError(f"{folder}: {error}") from error


def check_folder(folder: Path, base: Path | None, max_rank: int) -> None:
    """Raise AdapterError for an adapter that vLLM would not serve as it was trained.

    That is one of another checkpoint than ``base`` (not checked if None), one with trained norms, a damaged one, or one
    with a config whose product vLLM would not compute. ``max_rank`` is the engine's ``max_lora_rank``.
    """
    if base is not None:
        check_base(folder, base)
    if (folder / NORMS_FILE).exists():
        raise AdapterError(
            f"{folder} holds trained norms ({NORMS_FILE}), and a LoRA request would be answered without "
            'them, by another policy. Leave LoRA out and start the engine with additional_config={"qerl": '
            f'{{"policy_adapter": {{"rank": R, "path": "{folder}"}}}}}}, or use `qerl evaluate`, Policy.swap_folder or '
            "`qerl export --merge`"
        )
    if (folder / ADAPTER_FILE).is_file():  # vLLM also reads a file of torch's
        with _named_damage(folder / ADAPTER_FILE):
            read_header(folder / ADAPTER_FILE)
    # vLLM has LoRA slots for experts and reads the tensors that PEFT saves under target_parameters
    _check_config(folder, max_rank, besides=("target_parameters",))


def check_modules(folder: Path, adapted: Iterable[str], slots: Iterable[str]) -> None:
    """Raise AdapterError if a module in ``adapted`` (vLLM's names), experts aside, is not in ``slots``."""
    left_out = sorted(name for name in set(adapted) - set(slots) if EXPERTS not in name)
    if left_out:
        raise AdapterError(
            f"{folder} adapts {first_of(left_out)}, for which this engine has no LoRA slot: "
            "that part would be left out. Was it trained on another base, or does lora_target_modules exclude it?"
        )


def check_tensors(folder: Path, pairs: Mapping[str, Pair], rank: int, sizes: Mapping[str, Size]) -> None:
    """Raise AdapterError for tensors, experts' aside, that vLLM would not serve as they are: it compares no sizes.

    ``pairs`` has A and B of each module, ``sizes`` the inputs and outputs of those whose sizes are known. A smaller
    tensor would be filled up with zeros, and another rank than the config's would change the adapter's strength. NaN
    that is there, or that too strong an adapter makes, would stay in blocks of the KV cache, and spoil the answers of
    other adapters.
    """
    for name, (a, b) in pairs.items():
        if EXPERTS in name:
            continue
        if a is None or b is None:
            raise AdapterError(f"{folder}: {name} lacks one of its two tensors; save the whole adapter again")
        inputs, outputs = sizes.get(name, (a.shape[-1], b.shape[0]))
        if (a.shape, b.shape) != ((rank, inputs), (outputs, rank)):
            raise AdapterError(
                f"{folder}: {name} has tensors of shape {tuple(a.shape)} and {tuple(b.shape)}, this model and rank "
                f"{rank} need {(rank, inputs)} and {(outputs, rank)}; was the adapter trained on another base or with "
                "another rank?"
            )
        if not (a.isfinite().all() and b.isfinite().all()):
            raise AdapterError(f"{folder}: the adapter of {name} holds NaN or infinite values; use an earlier one")
        if (strength := float(a.double().norm() * b.double().norm())) > STRONGEST:
            raise AdapterError(
                f"{folder}: the adapter of {name} stretches inputs by up to {strength:.2g}; beyond {STRONGEST:g} "
                "answers may be NaN, and spoil those of other adapters. Was the learning rate too high?"
            )
