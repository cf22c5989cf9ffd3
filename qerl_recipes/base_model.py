"""The model an adapter belongs to: where it lies, and a hash that tells it from every other one."""

import hashlib
import json
from pathlib import Path

from qerl_vllm_plugin.checkpoint import CheckpointError, CheckpointReport, inspect_folder

SAMPLE = 4096  # bytes read at the start, the middle and the end of each tensor
WANTED = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]


def local_folder(base: str | Path) -> Path:
    """The folder of a checkpoint: ``base`` itself, or where the hub's model of that id has been downloaded to.

    Raises CheckpointError if there is neither.
    """
    folder = Path(base)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(str(base), allow_patterns=WANTED))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise CheckpointError(
            f"{base}: there is no such folder, and no such model could be fetched from the Hugging Face hub"
            f" ({type(error).__name__}); give the folder of a checkpoint, or a model id where the hub can be reached"
        ) from error


def fingerprint(base: str | Path) -> str:
    """SHA-256 (hexadecimal) of a checkpoint's tensors: names, dtypes, shapes and samples of their bytes.

    Three samples of 4 KiB a tensor instead of all bytes: milliseconds instead of a minute for a 32B model, the same
    for a checkpoint that was only split into other shards, and another for the same architecture with other weights.
    config.json does not count: it may be edited without making it another model.

    Raises CheckpointError where the checkpoint is damaged or missing.
    """
    return fingerprint_of(inspect_folder(local_folder(base)))


def fingerprint_of(report: CheckpointReport) -> str:
    """``fingerprint`` of a folder that has been inspected already."""
    sha = hashlib.sha256()
    for name, tensor in sorted(report.tensors.items()):
        sha.update(json.dumps([name, tensor.dtype, list(tensor.shape)]).encode())
        with tensor.file.open("rb") as stream:
            for start in (0, (tensor.nbytes - SAMPLE) // 2, tensor.nbytes - SAMPLE):
                start = max(start, 0)
                stream.seek(tensor.offset + start)
                sha.update(stream.read(min(SAMPLE, tensor.nbytes - start)))
    return sha.hexdigest()
