"""Find the checkpoint that a command names by folder or by model id."""

from pathlib import Path

from qerl_vllm_plugin.wire.safetensors_file import CheckpointError

WANTED = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]


def local_folder(base: str | Path, revision: str | None = None) -> Path:
    """Return the absolute folder of a checkpoint.

    It is ``base`` itself, or the folder to which the hub's model of that id is downloaded. ``revision`` is a branch,
    tag or commit of the hub; None is its main branch. Raises CheckpointError if there is neither.
    """
    folder = Path(base)
    if folder.is_dir():
        return folder.absolute()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(str(base), revision=revision, allow_patterns=WANTED))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise CheckpointError(
            f"{base}: there is no such folder, and no such model could be fetched from the Hugging Face hub"
            f" ({type(error).__name__}); give the folder of a checkpoint, or a model id where the hub can be reached"
        ) from error


def written_name(base: str | Path, revision: str | None = None) -> str:
    """Return a name for ``base`` that stays valid when it is written down.

    It is a folder's absolute path, or the model id. A model id alone means its main branch; for another ``revision``,
    the name is the folder of the download.
    """
    if Path(base).is_dir() or revision not in (None, "main"):
        return str(local_folder(base, revision))
    return str(base)
