"""``qerl evaluate``: the accuracy of a base and of its trained adapter, through one harness, on one engine.

Base and adapter answer the same problems with the same seeds; the noise is off. lighteval asks and judges; every
accuracy comes with a 95 % interval. The result is ``evaluation.json``, the answers lie beside it in ``answers.jsonl``.
"""

import contextlib
import datetime
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from qerl_recipes import checkpoints
from qerl_recipes.arms import ENGINE_ON_CPU, ENGINE_QUANTIZATION, engine_options
from qerl_recipes.base_model import local_folder
from qerl_recipes.evaluation_request import Sampling
from qerl_recipes.evaluation_request import check as check_tasks
from qerl_recipes.intervals import wilson
from qerl_recipes.model_card import engine_rank
from qerl_vllm_plugin.checkpoint import inspect_folder

if TYPE_CHECKING:
    from vllm import LLM

    from qerl_recipes.lighteval_pipeline import Judged

RESULT, ANSWERS = "evaluation.json", "answers.jsonl"
ADAPTER_FILES = ("adapter_model.safetensors", "norms.safetensors")  # the second only where norms were trained


def evaluate(
    base: str,
    adapter: str | None,
    tasks: Sequence[str],
    *,
    output_dir: str | Path,
    quantization: str = "qerl_nvfp4",
    temperature: float = 0.0,
    top_p: float = 1.0,
    max_new_tokens: int | None = None,
    max_model_length: int | None = None,
    tensor_parallel_size: int = 1,
    num_samples: int = 1,
    max_samples: int | None = None,
    seed: int = 0,
    use_chat_template: bool | None = None,
    system_prompt: str | None = None,
    gpu_memory_utilization: float = 0.9,
    quiet: bool = False,
) -> dict[str, Any]:
    """Evaluate ``base`` alone and, where given, with ``adapter`` -> the content of ``output_dir/evaluation.json``.

    ``base`` is a checkpoint folder or a model id, ``adapter`` a folder that PEFT or ``qerl train`` has saved, ``tasks``
    names of ``evaluation_tasks``. ``quantization`` is the arm: ``qerl_nvfp4`` (a BF16 checkpoint is quantized on the
    way in), ``bf16`` or ``nf4``. ``num_samples`` answers a problem need a temperature above 0; ``max_samples`` takes
    that many problems a task. Lengths are in tokens. ``quiet`` prints no table.

    In the result ``tasks[name]["base" or "adapter"]`` has ``accuracy``, ``n`` (problems), ``num_samples``, ``ci95``
    (low, high) and ``interval``, the kind of interval.

    Raises ValueError, before vLLM is imported, for an unknown task, numbers without sense, a missing or damaged
    checkpoint or adapter, or an adapter trained on another base.
    """
    _need_lighteval()
    check_tasks(tasks)
    sampling = Sampling(temperature, top_p, max_new_tokens, seed, use_chat_template, system_prompt)
    sampling.check(num_samples)
    if max_samples is not None and max_samples < 1:
        raise ValueError(f"max_samples is {max_samples}; it must be at least 1")
    folder = _check_base(base, quantization)
    base_hash = checkpoints.base_hash(folder)
    rank = None if adapter is None else check_adapter(adapter, base_hash)
    # they import vLLM, for which nobody should wait who has mistyped a name
    from qerl_recipes import evaluation_tasks
    from qerl_recipes.lighteval_model import EngineModel
    from qerl_recipes.lighteval_pipeline import run

    output = Path(output_dir)
    output.mkdir(parents=True, exist_ok=True)
    with _quiet_lighteval():
        benchmarks = evaluation_tasks.load(tasks, num_samples=num_samples, max_samples=max_samples)
        llm = _start(folder, quantization, rank, max_model_length, tensor_parallel_size, gpu_memory_utilization)
        try:
            arms: dict[str, dict[str, list[Judged]]] = {}
            for label in ("base",) if adapter is None else ("base", "adapter"):
                request = None if adapter is None else _install(llm, adapter if label == "adapter" else None)
                model = EngineModel(llm, request, sampling, label)
                arms[label] = run(model, benchmarks)
        finally:
            close(llm)
    result = {
        "tasks": {
            task: {label: summary([p.share for p in arms[label][task]], num_samples) for label in arms}
            for task in tasks
        },
        "base": str(base),
        "base_sha256": base_hash,
        "adapter": adapter,
        "adapter_sha256": None if adapter is None else adapter_hash(adapter),
        "quantization": quantization,
        "sampling": {**asdict(sampling), "use_chat_template": model.use_chat_template, "num_samples": num_samples},
        "max_model_length": model.max_length,
        "max_samples": max_samples,
        "tensor_parallel_size": tensor_parallel_size,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": {**checkpoints.versions(), "lighteval": importlib.metadata.version("lighteval")},
    }
    _write(output / ANSWERS, "".join(_lines(arms)))
    _write(output / RESULT, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    if not quiet:
        Console().print(table(result))
    return result


def summary(shares: Sequence[float], num_samples: int = 1) -> dict[str, Any]:
    """Accuracy and its 95 % interval; ``shares`` has the share of right answers, of ``num_samples``, to each problem.

    One sample a problem: Wilson's interval. Several: answers to one problem resemble each other, so Wilson's interval
    is taken at the effective number of samples, accuracy * (1 - accuracy) / variance of the mean over problems; where
    that variance says nothing (one problem, or all answers alike) at the number of problems.
    Source: E. L. Korn and B. I. Graubard, Confidence intervals for proportions with small expected number of positive
    counts estimated from survey data, Survey Methodology 24 (1998).
    """
    n = len(shares)
    accuracy = sum(shares) / n
    size: float = n
    if num_samples > 1 and n > 1 and 0 < accuracy < 1:
        variance = sum((share - accuracy) ** 2 for share in shares) / (n * (n - 1))
        size = min(n * num_samples, accuracy * (1 - accuracy) / variance) if variance > 0 else n * num_samples
    return {
        "accuracy": accuracy,
        "n": n,
        "num_samples": num_samples,
        "ci95": list(wilson(accuracy * size, size)),
        "interval": "Wilson" if num_samples == 1 else "Wilson, effective sample size, clustered by problem",
    }


def table(result: Mapping[str, Any]) -> Table:
    """The accuracies as a table for the terminal."""
    view = Table(title=f"accuracy, 95 % interval ({result['quantization']})")
    view.add_column("task")
    labels = list(next(iter(result["tasks"].values())))
    for label in labels:
        view.add_column(label, justify="right")
    view.add_column("problems", justify="right")
    for task, arms in result["tasks"].items():
        cells = [
            f"{arms[label]['accuracy']:.1%}  [{arms[label]['ci95'][0]:.1%}, {arms[label]['ci95'][1]:.1%}]"
            for label in labels
        ]
        view.add_row(task, *cells, str(arms[labels[0]]["n"]))
    return view


def check_adapter(folder: str | Path, base_hash: str) -> int:
    """The rank of a saved adapter. Raises ValueError if it is missing, damaged or was trained on another base."""
    folder = Path(folder)
    for name in ("adapter_config.json", ADAPTER_FILES[0]):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} is no adapter: it has no {name}; name a folder that qerl train has saved")
    try:
        rank = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["r"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / 'adapter_config.json'} is damaged ({error!r}); save the adapter again") from error
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"{folder / 'adapter_config.json'}: r is {rank!r}; it must be a whole number of at least 1")
    checkpoints.check_adapter_base(folder, base_hash)
    return engine_rank(rank)


def adapter_hash(folder: str | Path) -> str:
    """SHA-256 of an adapter's tensors: adapter_model.safetensors, then norms.safetensors where there is one."""
    sha = hashlib.sha256()
    for name in ADAPTER_FILES:
        file = Path(folder) / name
        if file.is_file():
            sha.update(name.encode() + file.read_bytes())
    return sha.hexdigest()


def close(llm: "LLM") -> None:
    """Shut an engine down, so that another one can start in this process."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def _need_lighteval() -> None:
    for package in ("lighteval", "vllm"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"qerl evaluate needs {package}, which is not installed: pip install 'qerl-vllm[eval]'")


def _check_base(base: str, quantization: str) -> Path:
    if quantization not in ENGINE_QUANTIZATION:
        raise ValueError(f"quantization is {quantization!r}; it is one of {', '.join(ENGINE_QUANTIZATION)}")
    folder = local_folder(base)
    if inspect_folder(folder).scheme is not None and quantization != "qerl_nvfp4":
        raise ValueError(f"{base} is an NVFP4 checkpoint; quantization={quantization} starts from the BF16 checkpoint")
    return folder


def _start(
    folder: Path, quantization: str, rank: int | None, length: int | None, parallel: int, gpu_memory: float
) -> "LLM":
    from vllm import LLM
    from vllm.platforms import current_platform

    if quantization == "nf4" and not current_platform.is_cuda():
        raise ValueError("quantization=nf4 (bitsandbytes) needs a CUDA GPU; on this machine use qerl_nvfp4 or bf16")
    return LLM(
        model=str(folder),
        dtype="bfloat16",
        max_model_len=length,
        tensor_parallel_size=parallel,
        gpu_memory_utilization=gpu_memory,
        disable_log_stats=True,
        seed=0,
        **({} if current_platform.is_cuda() else ENGINE_ON_CPU),
        **engine_options(quantization, rank),
    )


def _install(llm: "LLM", adapter: str | None) -> Any:
    """Serve the base alone (None) or the adapter, without noise -> the request to generate with."""
    from qerl_vllm_plugin.policy import Policy

    policy = Policy(llm)
    if adapter is None:
        policy.swap(None)
    else:
        policy.swap_folder(adapter)
    if policy.state().sigma:
        policy.clear_noise()
    return policy.request


def _lines(arms: Mapping[str, Mapping[str, "list[Judged]"]]) -> Iterator[str]:
    """One JSON line for each problem and model."""
    for label, tasks in arms.items():
        for task, judged in tasks.items():
            for problem in judged:
                line = {"task": task, "model": label, **asdict(problem)}
                yield json.dumps(line, ensure_ascii=False) + "\n"


def _write(file: Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial = file.with_name(f".{file.name}.partial")
    with partial.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(file)


@contextlib.contextmanager
def _quiet_lighteval() -> Iterator[None]:
    """Errors only: lighteval warns about few-shot splits that are not used here."""
    logger = logging.getLogger("lighteval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
