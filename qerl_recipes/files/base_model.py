"""Find the checkpoint that a command names by folder or by model id, and read its config.json."""

import contextlib
import json
from pathlib import Path
from typing import Any

from qerl_recipes.files.json_files import read_object
from qerl_recipes.recipe.shapes import BY_MODEL_ID
from qerl_vllm_plugin.wire.safetensors_file import CheckpointError

WANTED = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]


def local_folder(base: str | Path, revision: str | None = None) -> Path:
    """Return the absolute folder of a checkpoint, of a model id downloaded; raise CheckpointError for neither."""
    folder = Path(base)
    if folder.is_dir():
        return folder.absolute()
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(base), revision=revision, allow_patterns=WANTED))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{base}: there is no such folder, and no such model could be fetched from the Hugging Face hub"
            f" ({type(error).__name__}); give the folder of a checkpoint, or a model id where the hub can be reached"
        ) from error


def written_name(base: str | Path, revision: str | None = None, folder: Path | None = None) -> str:
    """Return a name for ``base`` that stays valid when written down: an absolute folder, or a model id of main."""
    if Path(base).is_dir() or revision not in (None, "main"):
        return str(folder or local_folder(base, revision))
    return str(base)


def hub_name(base: str) -> str:
    """Return the hub's model that gives the weights of ``base``; ``base`` itself if ``qerl quantize`` noted none."""
    report = read_object(Path(base) / "quantize_report.json", "write the checkpoint anew with qerl quantize")
    return report.get("hub") or base


def known_config(name: str | Path, revision: str | None = None) -> dict[str, Any] | None:
    """Return the config.json of a checkpoint folder or model id, as far as it is known without a download.

    For models that recipes/ name, a built-in copy of the sizes is used. Returns None for any other model that the hub's
    cache does not hold. Raises OSError or ValueError for a folder whose config.json cannot be read.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    folder, file = Path(name).expanduser(), None
    if folder.is_dir():
        file = str(folder / "config.json")
    else:
        with contextlib.suppress(HFValidationError):
            file = try_to_load_from_cache(str(name), "config.json", revision=revision)
    if isinstance(file, str):
        return json.loads(Path(file).read_text(encoding="utf-8"))
    if str(name) in BY_MODEL_ID and revision in (None, "main"):
        return dict(BY_MODEL_ID[str(name)])
    return None


def read_config(name: str | Path, revision: str | None = None) -> dict[str, Any]:
    """Return ``known_config``, or else the config.json of a model on the hub; raise ValueError if there is neither."""
    from huggingface_hub import hf_hub_download

    try:
        config = known_config(name, revision)
        if config is None:
            file = hf_hub_download(str(name), "config.json", revision=revision)
            config = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name}: no config.json in a folder of that name or on the Hugging Face hub ({type(error).__name__}); give"
            " the folder of a checkpoint"
        ) from error
    return config
