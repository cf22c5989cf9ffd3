"""Implement ``qerl serve``: vLLM's OpenAI-compatible server with ``--quantization qerl_nvfp4``.

``vllm serve`` does the same where that command works; that of the CPU wheel looks for a distribution named ``vllm`` and
fails. The server's processes start from this module too, so that each prepares its environment.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from qerl_recipes.machine import processes
from qerl_recipes.machine.environment import prepare
from qerl_recipes.machine.gpu import MARLIN, REFERENCE, TILED, installed_gpu
from qerl_vllm_plugin import NAME
from qerl_vllm_plugin.adapter.folder import check_before_load
from qerl_vllm_plugin.options import NO_WEIGHT_TRANSFER, ONE_CARRIER, Options
from qerl_vllm_plugin.server.token import TOKEN, TOKEN_FILE, configured_token
from qerl_vllm_plugin.weights.checkpoint import check_overrides, inspect_folder
from qerl_vllm_plugin.weights.families import check_family
from qerl_vllm_plugin.wire.safetensors_file import CheckpointError

PORT = 8000  # vLLM's
NO_ROUTES = "the server would have no /v1/qerl, and its policy could not be changed"


def command(model: str, arguments: Sequence[str]) -> list[str]:
    """Return the server's command line, in which ``arguments`` of ``vllm serve`` override the defaults."""
    chosen = list(arguments)
    if not any(argument == "--quantization" or argument.startswith("--quantization=") for argument in chosen):
        chosen += ["--quantization", "qerl_nvfp4"]
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":  # without torch.compile, vLLM starts only in eager mode
        chosen.insert(0, "--enforce-eager")
    return [sys.executable, "-m", "qerl_recipes.machine.serve", "serve", model, *chosen]


def check(model: str, arguments: Sequence[str] = ()) -> None:
    """Raise an error, within a second, for what vLLM would refuse only after starting its processes.

    It is CheckpointError for a folder that does not exist or is damaged, or quantizes more than weights unless
    ``arguments`` ask for weight_only; AdapterError for an adapter that cannot be installed; and else ValueError.
    """
    checks = {"additional-config": Options.parse, "hf-overrides": check_overrides}
    has_slots = "enable-lora" in dict(_flags(arguments))
    options = Options()
    for flag, text in _flags(arguments):
        if flag.partition(".")[0] == "weight-transfer-config":
            raise ValueError(NO_WEIGHT_TRANSFER)
        if flag in checks:
            with contextlib.suppress(json.JSONDecodeError):  # vLLM itself reads other forms, such as dotted keys
                found = checks[flag](json.loads(text))
                options = found if isinstance(found, Options) else options
    if options.adapter_rank and has_slots:
        raise ValueError(ONE_CARRIER)
    options.check_folders()
    _check_token(options)
    folder = Path(model).expanduser()
    is_path = model.startswith((".", "/", "~")) or model.count("/") > 1 or ("/" in model and folder.parent.is_dir())
    if is_path and not folder.is_dir():
        raise CheckpointError(f"{model}: there is no such folder; give the folder of a checkpoint, or a model id")
    if folder.is_dir():
        # With --config the flags are in a file. The engine that reads it then refuses what was not asked for.
        weight_only = any("weight_only" in argument or argument.startswith("--config") for argument in arguments)
        untested = any("untested_models" in argument or argument.startswith("--config") for argument in arguments)
        kind = None
        with contextlib.suppress(OSError, ValueError, AttributeError):  # inspect_folder says what is wrong with it
            kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
        if kind is not None and dict(_flags(arguments)).get("quantization", NAME) == NAME:
            check_family(str(kind), untested)
        inspect_folder(folder, weight_only=weight_only)
    if options.adapter_path is not None:
        check_before_load(options.adapter_path, folder if folder.is_dir() else None, options.adapter_rank)


def _check_token(options: Options) -> None:
    token = configured_token()
    if token is None and options.policy_folders is not None:
        raise ValueError(
            f'--additional-config: "qerl.policy_folders" is given, but neither {TOKEN} nor {TOKEN_FILE} is set: '
            f"{NO_ROUTES}. Set one, and VLLM_PLUGINS=qerl"
        )
    if token is not None and "qerl" not in os.environ.get("VLLM_PLUGINS", "").split(","):
        raise ValueError(
            f"an admin token is set, but VLLM_PLUGINS does not name qerl: {NO_ROUTES}. Set VLLM_PLUGINS=qerl, or unset "
            f"{TOKEN} and {TOKEN_FILE}"
        )


def check_address(arguments: Sequence[str]) -> None:
    """Raise ValueError if a server with those options cannot listen at its address, as where another one does."""
    flags = dict(_flags(arguments))
    if {"uds", "headless"} & flags.keys() or ("config" in flags and "port" not in flags):
        return  # it listens at no port, or at one that a file names
    host, port = flags.get("host", ""), flags.get("port", str(PORT))
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            place.bind((host, int(port)))
        except (OSError, ValueError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "a port is a whole number from 0 to 65535"
            raise ValueError(
                f"the server cannot listen at {host or '0.0.0.0'}:{port}: {reason}; choose another address with "
                "--host and --port"
            ) from None


def _flags(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Return the flags of a command line, in order, each with the value or word that follows it."""
    flags = []
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        if argument.startswith("--"):
            name, equals, value = argument.removeprefix("--").partition("=")
            flags.append((name.replace("_", "-"), value if equals else following))
    return flags


def announcement(line: Sequence[str]) -> str:
    """Say what a server with that command line will serve, with which kernel, and where it will listen."""
    model = line[line.index("serve") + 1]
    flags = dict(_flags(line))  # the last value counts, as in argparse
    quantization, host = flags["quantization"], flags.get("host") or "0.0.0.0"
    format_and_kernel = f"quantization {quantization}"
    if quantization == "qerl_nvfp4" and "kernel" not in flags.get("additional-config", ""):
        gpu = installed_gpu()
        format_and_kernel += f", kernel: {MARLIN if gpu and not gpu.is_hopper else TILED if gpu else REFERENCE}"
    remark = " (all addresses of this machine; --host 127.0.0.1 for this machine alone)"
    url = f"http://{host}:{flags.get('port', PORT)}/v1{remark if host == '0.0.0.0' else ''}"
    return f"serving {flags.get('served-model-name', model)} ({format_and_kernel}) at {url}"


def serve(model: str, arguments: Sequence[str]) -> None:
    """Replace this process by the server: signals reach it directly, and it stops when this process would."""
    check(model, arguments)
    check_address(arguments)
    line = command(model, arguments)
    print(announcement(line), flush=True)
    os.execv(line[0], line)


def run() -> None:
    """Run what ``vllm serve`` runs, with this process's arguments, the first of which is ``serve``."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser, subcommand = FlexibleArgumentParser(), ServeSubcommand()
    subcommand.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    arguments = parser.parse_args()
    subcommand.validate(arguments)
    subcommand.cmd(arguments)


@dataclass(frozen=True)
class ServerProcess:
    """Describe a running server; ``url`` is its address without /v1."""

    url: str
    log: Path
    process: "subprocess.Popen[bytes]"


@contextmanager
def started(
    line: Sequence[str], port: int, log: Path, environment: Mapping[str, str], *, seconds: float = 280
) -> Iterator[ServerProcess]:
    """Start a server, yield it once it is ready, and end it; raise RuntimeError, with its log's end, for a failure."""
    import httpx

    process = processes.start(line, log, environment)
    server = ServerProcess(f"http://127.0.0.1:{port}", log, process)
    try:
        deadline = time.monotonic() + seconds
        with httpx.Client() as client:  # reads the machine's certificates, for 65 ms
            while True:
                if process.poll() is not None or time.monotonic() > deadline:
                    state = "is not ready" if process.returncode is None else f"ended with code {process.returncode}"
                    raise RuntimeError(f"the server {state}; the end of its log:\n{log.read_text()[-6000:]}")
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(f"{server.url}/health").status_code == 200:
                        break
                time.sleep(0.2)
        yield server
    finally:
        processes.end(process)


if __name__ in ("__main__", "__mp_main__"):  # the server, and processes that it spawns
    prepare()
if __name__ == "__main__":
    run()
