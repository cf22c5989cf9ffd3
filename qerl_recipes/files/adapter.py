"""Open the folder of a saved adapter: PEFT's two files, the trained norms, and the state of the run that trained it."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qerl_recipes.files.json_files import read_object
from qerl_recipes.files.run_state import LAST, CheckpointMismatch, whole_checkpoints
from qerl_recipes.recipe.keys import ENGINE_RANKS, WITHOUT_ADAPTER, with_current_names
from qerl_vllm_plugin.adapter.check import AdapterError, check_config
from qerl_vllm_plugin.adapter.folder import ADAPTER_FILE, CONFIG_FILE, NORMS_FILE, STATE_FILE, read, read_config

CONFIG, TENSORS, NORMS = CONFIG_FILE, ADAPTER_FILE, NORMS_FILE
TEMPLATE = "chat_template.jinja"  # transformers saves the tokenizer's template under this name


@dataclass(frozen=True)
class AdapterFolder:
    """Describe an adapter's folder: adapter_config.json, and qerl_state.json, which is empty if PEFT alone wrote it."""

    path: Path
    config: dict[str, Any]
    state: dict[str, Any]

    @property
    def base(self) -> str | None:
        """Return the base checkpoint it was trained on, as a folder or model id; None if no file names it."""
        return self.state.get("base") or self.config.get("base_model_name_or_path")

    @property
    def quantization(self) -> str | None:
        """Return the base-weight format in training (qerl_nvfp4, bf16 or nf4); None if no file names it."""
        return self.state.get("quantization")

    @property
    def recipe(self) -> dict[str, Any]:
        """Return the ``run_state.recorded`` keys of the run that trained it; empty if no file has them."""
        return with_current_names(self.state.get("recipe") or {})

    @property
    def rank(self) -> int:
        """Return the LoRA rank; raise ValueError if adapter_config.json has no usable one."""
        rank = self.config.get("r")
        if type(rank) is not int or rank < 1:
            raise ValueError(f"{self.path / CONFIG}: r is {rank!r}; it must be a whole number of at least 1")
        return rank

    def check_plain(self) -> None:
        """Raise ValueError for an adapter other than plain LoRA of one rank of at most 512."""
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

    def check_base(self, base_hash: str) -> None:
        """Raise CheckpointMismatch if ``state`` says that the adapter was trained on another base."""
        if self.state.get("base_hash", base_hash) != base_hash:
            raise CheckpointMismatch(
                f"{self.path} was trained on another base ({self.base}); name that one, as it was then"
            )

    def read(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return LoRA tensors and trained norms; raise ValueError if they are damaged, missing or not finite."""
        saved = read(self.path)
        tensors, norms = saved.tensors, saved.norms or {}
        for name, tensor in {**tensors, **norms}.items():
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{self.path}: {name} holds NaN or infinite values; use an earlier checkpoint")
        if not tensors:
            raise ValueError(f"{self.path / TENSORS} holds no tensors; save the adapter again")
        return tensors, norms

    def sha256(self) -> str:
        """Return the SHA-256 of adapter_model.safetensors and, if it exists, norms.safetensors, names included."""
        sha = hashlib.sha256()
        for name in (TENSORS, NORMS):
            file = self.path / name
            if file.is_file():
                sha.update(name.encode() + file.read_bytes())
        return sha.hexdigest()


def open_adapter(folder: str | Path) -> AdapterFolder:
    """Open the adapter in ``folder``, or the final one of the run whose folder it is; raise ValueError for none."""
    folder = Path(folder)
    if not (folder / CONFIG).is_file() and (folder / LAST / CONFIG).is_file():
        folder = folder / LAST
    for name in (CONFIG, TENSORS):
        if not (folder / name).is_file():
            whole = whole_checkpoints(folder)
            way_out = f"its run has not ended; name {whole[-1]}" if whole else "name a folder that qerl train has saved"
            raise ValueError(f"{folder} is no adapter: it has no {name}; {way_out}")
    state = read_object(folder / STATE_FILE, "save the adapter again")
    return AdapterFolder(folder, read_config(folder), state)


def engine_rank(rank: int) -> int:
    """Return vLLM's smallest ``max_lora_rank`` that holds ``rank``; raise ValueError above 512."""
    if rank > ENGINE_RANKS[-1]:
        raise ValueError(f"an adapter of rank {rank} cannot be served: vLLM holds at most rank {ENGINE_RANKS[-1]}")
    return next(allowed for allowed in ENGINE_RANKS if rank <= allowed)
