"""Run llmcompressor's calibrated methods in a Python environment of their own, in the user's cache folder.

llmcompressor 0.14 pins another compressed-tensors than vLLM does, so the two cannot share an environment.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console

from qerl_recipes.files.whole_folder import locked
from qerl_recipes.machine import processes
from qerl_recipes.machine.gpu import VISIBLE

REQUIREMENTS = ("llmcompressor==0.14.0.1", "compressed-tensors==0.19.0", "transformers==5.17.0")
SCRIPT = Path(__file__).with_name("llmcompressor_script.py")
TAIL_LINES = 15


def run(
    source: Path, destination: Path, *, method: str, ignore: Sequence[str], rows: Sequence[Sequence[int]], device: str
) -> None:
    """Quantize the folder ``source`` into the existing, empty folder ``destination`` with ``gptq`` or ``awq``.

    ``rows`` are the token ids of each calibration text. ``device`` is cpu or cuda. Raise RuntimeError with the
    program's last lines if it fails.
    """
    visible = {VISIBLE: ""} if device == "cpu" else {}
    python = environment()
    with tempfile.TemporaryDirectory() as scratch:
        tokens = Path(scratch) / "rows.json"
        tokens.write_text(json.dumps(list(rows)), encoding="utf-8")
        job = {
            "source": str(source.absolute()),
            "destination": str(destination.absolute()),
            "method": method,
            "ignore": list(ignore),
            "rows": str(tokens),
        }
        # -I keeps the script's own folder (this package) out of the other environment's import path
        _call([str(python), "-I", str(SCRIPT), json.dumps(job)], f"llmcompressor ({method}) failed", visible)


def environment() -> Path:
    """Return the Python of QERL_LLMCOMPRESSOR_PYTHON, or of the environment, which the first call makes."""
    if path := os.environ.get("QERL_LLMCOMPRESSOR_PYTHON"):
        if not Path(path).is_file():
            raise RuntimeError(f"QERL_LLMCOMPRESSOR_PYTHON={path}: no such file; name a Python that has llmcompressor")
        return Path(path)
    folder = _folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    python = folder / "bin" / "python"
    with locked(folder.parent):  # a second `qerl quantize` waits for the first
        if not is_ready():
            shutil.rmtree(folder, ignore_errors=True)  # what an interrupted call left
            release = torch.__version__.partition("+")[0]
            commands = [
                [sys.executable, "-m", "venv", str(folder)],
                # the release of this torch, which a local build (such as +cpu) meets as well
                [str(python), "-m", "pip", "install", "--quiet", *REQUIREMENTS, f"torch=={release}"],
            ]
            for command in commands:
                Console().print("making llmcompressor's own environment:", " ".join(command), highlight=False)
                _call(command, f"{folder} could not be made; by hand (and set QERL_LLMCOMPRESSOR_PYTHON): {commands}")
            (folder / ".ready").touch()
    return python


def is_ready() -> bool:
    return (_folder() / ".ready").is_file()


def _folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "qerl" / REQUIREMENTS[0].replace("==", "-")


def _call(command: list[str], failure: str, extra: Mapping[str, str] | None = None) -> None:
    variables = {name: value for name, value in processes.inherited().items() if not name.startswith("PYTHON")}
    with tempfile.NamedTemporaryFile("r", encoding="utf-8", errors="replace") as log:
        if code := processes.run(command, log=Path(log.name), env={**variables, **(extra or {})}):
            tail = "\n".join(log.read().splitlines()[-TAIL_LINES:])
            raise RuntimeError(f"{failure}\nexit status {code}; its last lines:\n{tail}")
