"""``qerl bench swap``: how long a change of policy takes, adapter and noise, by each way to an engine.

The adapter is random and in fp32, as it is trained. Before each change prompts have filled a part of the prefix cache,
which the change empties; a server's cache is empty. Engines elsewhere and servers have the plugin's scheduler.
"""

import functools
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qerl_recipes.bench.arms import Figures, answer, ask_once, check_gpus, check_shape, serving
from qerl_recipes.bench.results import conditions, save
from qerl_recipes.machine.gpu import installed_gpu
from qerl_recipes.recipe.shapes import config_json
from qerl_recipes.rollout.arms import engine_options

WARM_UP, REPEATS = 3, 10
TRANSPORTS = ("auto", "ipc", "shared", "http")  # the command's help says what each is
# of a server: (name in the result, transport of its client, device of the tensors)
SERVER_WAYS = (("http", "http", "cpu"), ("http, shared memory", "shared", "cpu"), ("http, GPU to GPU", "ipc", "cuda"))
LENGTH, SEQUENCES = 256, 8


def run(
    shape: str,
    *,
    rank: int = 32,
    transports: Sequence[str] = ("auto",),
    tensor_parallel_size: int = 1,
    output: Path | None = None,
) -> dict[str, Any]:
    """Measure every transport, print the figures, and write them to ``output`` as JSON."""
    check_shape(shape)
    check_gpus(tensor_parallel_size)
    if unknown := [name for name in transports if name not in TRANSPORTS] or not transports:
        raise ValueError(f"transport {unknown} is unknown; it is one of {', '.join(TRANSPORTS)}")
    if "ipc" in transports and installed_gpu() is None:
        raise ValueError("transport ipc needs an NVIDIA GPU; on this machine use shared or http")
    request = {"shape": shape, "rank": rank, "tensor_parallel": tensor_parallel_size}
    ways: dict[str, Figures] = {}
    for kind in dict.fromkeys(_kind(name, tensor_parallel_size) for name in transports):
        named = [name for name in transports if _kind(name, tensor_parallel_size) == kind]
        own = {**request, "kind": kind, "transports": named}
        ways |= ask_once(__name__, own, has_core=kind == "here" or tensor_parallel_size > 1)
    result = {**request, **conditions(), "ways": ways}
    save(result, output)
    for name, figures in ways.items():
        engine = f"{shape}, rank {rank}, tensor parallel {tensor_parallel_size}, {result['gpu']}, {name}"
        print(f"{engine}: {_line(figures)}")
    return result


def _kind(transport: str, ranks: int) -> str:
    """Return where the engine is that a transport is measured with."""
    if transport == "http":
        return "server"
    return "here" if transport == "auto" and ranks == 1 else "elsewhere"


def _line(figures: Figures) -> str:
    parts = []
    for what in ("swap", "noise"):
        ms = {key: 1e3 * figures[what][key] for key in ("median", "least", "most")}
        each = ", ".join(f"{part} {1e3 * seconds:.2f}" for part, seconds in figures[what]["parts"].items())
        parts.append(f"{what} {ms['median']:.1f} ms ({ms['least']:.1f} to {ms['most']:.1f}: {each})")
    return f"{', '.join(parts)}, of {figures['bytes'] / 1e6:.0f} MB"


def measure(request: Figures, figures: Figures) -> None:
    """Measure each change by each transport; fill ``figures`` with the seconds."""
    import torch

    from qerl_recipes.bench import random_model

    config, rank = config_json(request["shape"]), request["rank"]
    made, adapter_config = random_model.adapter(config, rank)
    changes = functools.partial(_changes, {name: tensor.float() for name, tensor in made.items()}, adapter_config)
    has_gpu = torch.cuda.is_available()
    if request["kind"] == "server":
        _measure_server(request, changes, has_gpu, figures)
        return
    from qerl_vllm_plugin.compat import scheduler
    from qerl_vllm_plugin.policy import Policy

    # nothing is generated: graphs would only take time
    options = {**engine_options("qerl_nvfp4", rank, config), "enforce_eager": True, "enable_prefix_caching": True}
    options["tensor_parallel_size"] = request["tensor_parallel"]
    if request["kind"] != "here":
        options["scheduler_cls"] = scheduler.NAME
    llm = random_model.start(config, length=LENGTH, sequences=SEQUENCES, **options)
    fill = functools.partial(_fill, llm, config["vocab_size"])
    for name in request["transports"]:
        device = "cuda" if has_gpu and name != "shared" else "cpu"
        policy = Policy(llm, transport=name)
        figures[name] = changes(policy, device, lambda policy: policy.parts, fill)


def _measure_server(request: Figures, changes: Callable[..., Figures], has_gpu: bool, figures: Figures) -> None:
    from qerl_vllm_plugin.client import PolicyClient
    from qerl_vllm_plugin.compat import scheduler

    options = ["--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager", "--dtype", "bfloat16"]
    options += ["--max-model-len", str(LENGTH), "--max-num-seqs", str(SEQUENCES), "--scheduler-cls", scheduler.NAME]
    options += ["--tensor-parallel-size", str(request["tensor_parallel"])]
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(has_gpu))}  # 0: no worker process beside the core's
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "config.json").write_text(json.dumps(config_json(request["shape"])), encoding="utf-8")
        log = Path(scratch, "log")
        with serving(scratch, options, request["rank"], log, environment=environment) as (server, token):
            for name, transport, device in SERVER_WAYS:
                if device == "cpu" or has_gpu:
                    client = PolicyClient(server.url, token, transport=transport)
                    figures[name] = changes(client, device, lambda client: client.answered["parts"])


def _fill(llm: Any, vocabulary: int) -> None:
    """Answer prompts, as a rollout does before a change, so that their blocks are in the prefix cache."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [(7 * i + j) % vocabulary for i in range(LENGTH - 1)]} for j in range(SEQUENCES)]
    llm.generate(prompts, SamplingParams(max_tokens=1, detokenize=False, ignore_eos=True), use_tqdm=False)


def _changes(
    tensors: Mapping[str, Any],
    adapter_config: Mapping[str, Any],
    policy: Any,
    device: str,
    parts_of: Callable[[Any], dict[str, float]],
    before: Callable[[], object] | None = None,
) -> Figures:
    """Measure swaps and noise of a client with tensors on ``device``; ``parts_of`` has the parts of its last change."""
    sent = {name: tensor.to(device) for name, tensor in tensors.items()}
    parts = functools.partial(parts_of, policy)
    return {
        "tensors": device,
        "bytes": sum(tensor.nbytes for tensor in sent.values()),
        "swap": _spread(functools.partial(policy.swap, sent, adapter_config), parts, before),
        "noise": _spread(functools.partial(policy.set_noise, 1e-2, seed=0, rollout=1), parts, before),
    }


def _spread(
    change: Callable[[], object], parts: Callable[[], dict[str, float]], before: Callable[[], object] | None = None
) -> Figures:
    """Return median, least and most seconds of a change, and the median of each part; "device" waits for the GPU."""
    import pandas as pd
    import torch

    rows = []
    for _ in range(WARM_UP + REPEATS):
        if before is not None:
            before()
        began = time.perf_counter()
        change()
        returned = time.perf_counter()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        ended = time.perf_counter()
        rows.append({"seconds": ended - began, **parts(), "device": ended - returned})
    counted = pd.DataFrame(rows[WARM_UP:])
    seconds = counted.pop("seconds")
    spread = {"median": seconds.median(), "least": seconds.min(), "most": seconds.max()}
    return {**spread, "parts": counted.median().to_dict()}


if __name__ == "__main__":
    from qerl_recipes.machine.environment import prepare

    prepare()
    answer(measure)
