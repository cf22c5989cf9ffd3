"""The folder of a saved adapter: PEFT's two files, the trained norms beside them, and whose they are."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from qerl_recipes.files.run_state import LAST, STATE_FILE, CheckpointMismatch, whole_checkpoints
from qerl_vllm_plugin.adapter import AdapterError, check_config

CONFIG, TENSORS, NORMS = "adapter_config.json", "adapter_model.safetensors", "norms.safetensors"
TEMPLATE = "chat_template.jinja"  # where transformers saves the tokenizer's
# vLLM's --max-lora-rank takes one of these
ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
WITHOUT_ADAPTER = {"lm_head", "embed_tokens"}


@dataclass(frozen=True)
class AdapterFolder:
    """A folder with an adapter, its tensors unread.

    ``config`` is the content of adapter_config.json, ``state`` that of qerl_state.json, empty where PEFT alone has
    written the folder.
    """

    path: Path
    config: dict[str, Any]
    state: dict[str, Any]

    @property
    def base(self) -> str | None:
        """The checkpoint it was trained on, by folder or model id; None where nothing says."""
        return self.state.get("base") or self.config.get("base_model_name_or_path")

    @property
    def quantization(self) -> str | None:
        """The arm it was trained on, None where nothing says."""
        return self.state.get("quantization")

    @property
    def recipe(self) -> dict[str, Any]:
        """``binding.recorded`` of the run that trained it; empty where nothing says."""
        return self.state.get("recipe") or {}

    @property
    def rank(self) -> int:
        """Raises ValueError for an adapter_config.json without a usable rank."""
        rank = self.config.get("r")
        if type(rank) is not int or rank < 1:
            raise ValueError(f"{self.path / CONFIG}: r is {rank!r}; it must be a whole number of at least 1")
        return rank

    def check_plain(self) -> None:
        """Raises ValueError for what no engine of ours serves: anything but plain LoRA, of one rank that vLLM takes."""
        try:
            check_config(self.config, ENGINE_RANKS[-1])
        except AdapterError as error:
            raise ValueError(f"{self.path / CONFIG}: {error}") from error

    def check_tensors(self) -> None:
        """Raise ValueError as ``read`` does, and for an adapter of the embeddings or the output layer."""
        for name in self.read()[0]:
            if not name.endswith((".lora_A.weight", ".lora_B.weight")) or WITHOUT_ADAPTER & set(name.split(".")):
                raise ValueError(
                    f"{self.path / TENSORS}: {name} is not of a linear layer of the blocks, and nothing else carries "
                    "an adapter here (embeddings and lm_head cannot); train one without it"
                )

    @property
    def has_norms(self) -> bool:
        """Whether norms were trained with it."""
        return (self.path / NORMS).is_file()

    def check_base(self, base_hash: str) -> None:
        """Raises CheckpointMismatch if the folder says that the adapter was trained on another base."""
        if self.state.get("base_hash", base_hash) != base_hash:
            raise CheckpointMismatch(
                f"{self.path} was trained on another base ({self.base}); name that one, as it was then"
            )

    def read(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """(LoRA tensors by PEFT's names, trained norms by the checkpoint's), all of them finite.

        Raises ValueError for a file that is damaged or empty.
        """
        try:
            tensors = load_file(self.path / TENSORS)
            norms = load_file(self.path / NORMS) if self.has_norms else {}
        except SafetensorError as error:
            raise ValueError(f"{self.path} is damaged: {error}; save the adapter again") from error
        for name, tensor in {**tensors, **norms}.items():
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{self.path}: {name} holds NaN or infinite values; use an earlier checkpoint")
        if not tensors:
            raise ValueError(f"{self.path / TENSORS} holds no tensors; save the adapter again")
        return tensors, norms

    def sha256(self) -> str:
        """Of the tensors: adapter_model.safetensors, then norms.safetensors where there is one."""
        sha = hashlib.sha256()
        for name in (TENSORS, NORMS):
            file = self.path / name
            if file.is_file():
                sha.update(name.encode() + file.read_bytes())
        return sha.hexdigest()


def open_adapter(folder: str | Path) -> AdapterFolder:
    """The adapter in ``folder``, or the one in which the run with this output folder has ended.

    Raises ValueError for a folder without one, naming a checkpoint of the run where there is one, and for a config or
    state that is damaged.
    """
    folder = Path(folder)
    if not (folder / CONFIG).is_file() and (folder / LAST / CONFIG).is_file():
        folder = folder / LAST
    for name in (CONFIG, TENSORS):
        if not (folder / name).is_file():
            whole = whole_checkpoints(folder)
            way_out = f"its run has not ended; name {whole[-1]}" if whole else "name a folder that qerl train has saved"
            raise ValueError(f"{folder} is no adapter: it has no {name}; {way_out}")
    return AdapterFolder(folder, _object(folder / CONFIG), _object(folder / STATE_FILE))


def _object(file: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise TypeError(f"{type(found).__name__} instead of an object")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is damaged ({error!r}); save the adapter again") from error
    return found


def engine_rank(rank: int) -> int:
    """The smallest ``max_lora_rank`` of vLLM that holds an adapter of ``rank``. Raises ValueError above 512."""
    for allowed in ENGINE_RANKS:
        if rank <= allowed:
            return allowed
    raise ValueError(f"an adapter of rank {rank} cannot be served: vLLM holds at most rank {ENGINE_RANKS[-1]}")
