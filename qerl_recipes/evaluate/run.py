"""``qerl evaluate``: the accuracy of a base and of its trained adapter, through one harness, on one engine.

Base and adapter answer the same problems with the same seeds; the noise is off. lighteval asks and judges; every
accuracy comes with a 95 % interval. The result is ``evaluation.json``, the answers lie beside it in ``answers.jsonl``.
"""

import contextlib
import datetime
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

from qerl_recipes.evaluate.intervals import several, summary
from qerl_recipes.evaluate.request import Sampling, template_options, template_text
from qerl_recipes.evaluate.request import check as check_tasks
from qerl_recipes.files import run_state
from qerl_recipes.files.adapter import AdapterFolder, engine_rank, open_adapter
from qerl_recipes.files.base_model import local_folder
from qerl_recipes.files.whole_folder import write_text
from qerl_recipes.memory.model_size import read_config
from qerl_recipes.rollout.arms import ENGINE_QUANTIZATION, engine_on_cpu, engine_options
from qerl_vllm_plugin.checkpoint import inspect_folder

if TYPE_CHECKING:
    from vllm import LLM

    from qerl_recipes.evaluate.answers import Judged

RESULT, ANSWERS = "evaluation.json", "answers.jsonl"


def evaluate(
    base: str,
    adapter: str | None,
    tasks: Sequence[str],
    *,
    output_dir: str | Path,
    quantization: str | None = None,
    dtype: str | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    max_new_tokens: int | None = None,
    max_model_length: int | None = None,
    tensor_parallel_size: int = 1,
    num_samples: int = 1,
    max_samples: int | None = None,
    num_fewshot: int = 0,
    seed: int = 0,
    use_chat_template: bool | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: str | Mapping[str, Any] | None = None,
    system_prompt: str | None = None,
    gpu_memory_utilization: float = 0.9,
    kv_cache_memory_bytes: int | None = None,
    adapter_only: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Evaluate ``base`` alone and, where given, with ``adapter`` -> the content of ``output_dir/evaluation.json``.

    ``base`` is a checkpoint folder or a model id, ``adapter`` a folder that PEFT or ``qerl train`` has saved or the
    output folder of a run, ``tasks`` names of ``request``. ``quantization`` is the arm: ``qerl_nvfp4`` (a BF16
    checkpoint is quantized on the way in), ``bf16`` or ``nf4``; ``dtype`` bfloat16, float16 or float32. ``num_samples``
    answers a problem need a temperature above 0; ``max_samples`` takes that many problems a task, ``num_fewshot`` shows
    that many solved ones first. Lengths are in tokens. ``kv_cache_memory_bytes`` is vLLM's: for several engines on one
    GPU. ``adapter_only`` leaves the base out, where it was judged before. ``quiet`` prints nothing.

    What is None is as in the adapter's training, where its folder says so: arm, dtype, system prompt, chat template and
    its options, the length of an answer; base and adapter are asked alike. The result says it under ``as_in_training``.
    Without an adapter: qerl_nvfp4, bfloat16, the tokenizer's template, no system prompt, each task's own length (GSM8K:
    1024 tokens).

    In the result ``tasks[name]["base" or "adapter"]`` has ``accuracy``, ``n`` (problems), ``num_samples``, ``ci95``
    (low, high), ``interval``, the kind of interval, ``cut``, the share of answers that ended at the limit of length,
    and for several samples ``pass_at`` and ``maj_at``, each ``{k: {value, ci95}}``.

    Raises ValueError, before vLLM is imported, for an unknown task, numbers without sense, a missing or damaged
    checkpoint or adapter, or an adapter trained on another base.
    """
    _need_lighteval()
    check_tasks(tasks, num_fewshot)
    sampling = Sampling(
        temperature,
        top_p,
        max_new_tokens,
        seed,
        use_chat_template,
        system_prompt,
        None if chat_template is None else template_text(chat_template),
        template_options(chat_template_kwargs),
    )
    sampling.check(num_samples)
    if max_samples is not None and max_samples < 1:
        raise ValueError(f"max_samples is {max_samples}; it must be at least 1")
    if adapter_only and adapter is None:
        raise ValueError("adapter_only leaves the base out, and there is no adapter to judge; name one with --adapter")
    saved = None if adapter is None else open_adapter(adapter)
    as_in_training: list[str] = []
    if saved is not None:
        sampling, as_in_training = sampling.as_in_training(saved)
    arm = quantization or (saved.quantization if saved is not None else None) or "qerl_nvfp4"
    dtype = dtype or (saved.recipe.get("dtype") if saved is not None else None) or "bfloat16"
    folder = _check_base(base, arm, dtype, saved)
    base_hash = run_state.base_hash(folder)
    rank = None
    if saved is not None:
        saved.check_base(base_hash)
        rank = engine_rank(saved.rank)
        if not quiet:
            Console().print(_as_trained(saved, arm, as_in_training), markup=False, highlight=False)
    # they import vLLM, for which nobody should wait who has mistyped a name
    from qerl_recipes.evaluate import tasks as evaluation_tasks
    from qerl_recipes.evaluate.answers import ask, uses_template

    output = Path(output_dir)
    output.mkdir(parents=True, exist_ok=True)
    with _quiet_lighteval():
        benchmarks = evaluation_tasks.load(
            tasks, max_samples=max_samples, num_fewshot=num_fewshot, num_samples=num_samples
        )
        memory = {"gpu_memory_utilization": gpu_memory_utilization, "kv_cache_memory_bytes": kv_cache_memory_bytes}
        llm = _start(folder, arm, rank, max_model_length, tensor_parallel_size, memory, dtype)
        try:
            arms: dict[str, dict[str, list[Judged]]] = {}
            judged = ("base",) if saved is None else ("adapter",) if adapter_only else ("base", "adapter")
            for label in judged:
                request = None if saved is None else _install(llm, saved if label == "adapter" else None)
                arms[label] = ask(llm, request, benchmarks, sampling, label)
            length, templated = llm.llm_engine.model_config.max_model_len, uses_template(llm.get_tokenizer(), sampling)
        finally:
            close(llm)
    result = {
        "tasks": {task: {label: summarize(arms[label][task], num_samples) for label in arms} for task in tasks},
        "base": str(base),
        "base_sha256": base_hash,
        "adapter": None if saved is None else str(saved.path),
        "adapter_sha256": None if saved is None else saved.sha256(),
        "quantization": arm,
        "dtype": dtype,
        "trained_on": None if saved is None else saved.quantization,
        "as_in_training": as_in_training,
        "sampling": {**asdict(sampling), "use_chat_template": templated, "num_samples": num_samples},
        "max_new_tokens": {b.name: sampling.max_new_tokens or b.problems[0].generation_size for b in benchmarks},
        "max_model_length": length,
        "max_samples": max_samples,
        "num_fewshot": num_fewshot,
        "tensor_parallel_size": tensor_parallel_size,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": {**run_state.versions(), "lighteval": importlib.metadata.version("lighteval")},
    }
    write_text(output / ANSWERS, "".join(_lines(arms)))
    write_text(output / RESULT, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    if not quiet:
        Console().print(table(result))
        Console().print(f"wrote {output / RESULT} and {ANSWERS} beside it", markup=False, highlight=False)
    return result


def summarize(judged: "Sequence[Judged]", num_samples: int) -> dict[str, Any]:
    """The figures of one policy on one task."""
    cut = [cut for problem in judged for cut in problem.cut]
    found = {**summary([problem.share for problem in judged], num_samples), "cut": sum(cut) / len(cut)}
    if num_samples > 1:
        found |= several([problem.right for problem in judged], [problem.vote for problem in judged])
    return found


def table(result: Mapping[str, Any]) -> Table:
    """The accuracies as a table for the terminal."""
    sampling = result["sampling"]
    drawn = "greedy" if not sampling["temperature"] else f"temperature {sampling['temperature']:g}"
    view = Table(title=f"accuracy, 95 % interval ({result['quantization']}, {drawn})")
    view.add_column("task")
    labels = list(next(iter(result["tasks"].values())))
    for label in labels:
        view.add_column(label, justify="right", overflow="fold")
    view.add_column("problems", justify="right", overflow="fold")
    view.add_column("longest answer", justify="right", overflow="fold")
    view.add_column("cut there", justify="right", overflow="fold")
    for task, arms in result["tasks"].items():
        longest = result["max_new_tokens"][task]
        cut = " / ".join(f"{arms[label]['cut']:.0%}" for label in labels)
        cells = [_with_interval(arms[label], "accuracy") for label in labels]
        view.add_row(task, *cells, str(arms[labels[0]]["n"]), f"{longest or result['max_model_length']} tokens", cut)
        for kind, name in (("pass_at", "pass@"), ("maj_at", "maj@")):
            for k in arms[labels[0]].get(kind, {}):
                view.add_row(f"  {name}{k}", *(_with_interval(arms[label][kind][k], "value") for label in labels))
    return view


def _with_interval(found: Mapping[str, Any], key: str) -> str:
    low, high = found["ci95"]
    return f"{found[key]:.1%}  [{low:.1%}, {high:.1%}]"


def _as_trained(saved: AdapterFolder, arm: str, settled: Sequence[str]) -> str:
    """What is taken over from the training, as one line, and what is not."""
    line = f"{saved.path}: "
    if saved.quantization not in (None, arm):
        line += f"trained on {saved.quantization} weights, judged on {arm} ones as --quantization asks; "
    elif saved.quantization is not None:
        settled = [f"{arm} weights", *settled]
    return line + (f"as in training: {', '.join(settled)}" if settled else "says nothing of its training's prompts")


def close(llm: "LLM") -> None:
    """Shut an engine down, so that another one can start in this process."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def _need_lighteval() -> None:
    for package in ("lighteval", "vllm"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"qerl evaluate needs {package}, which is not installed: pip install 'qerl-vllm[eval]'")


def _check_base(base: str, quantization: str, dtype: str, saved: AdapterFolder | None) -> Path:
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"dtype is {dtype!r}; it is bfloat16, float16 or float32")
    if quantization not in ENGINE_QUANTIZATION:
        raise ValueError(f"quantization is {quantization!r}; it is one of {', '.join(ENGINE_QUANTIZATION)}")
    folder = local_folder(base)
    if inspect_folder(folder).scheme is not None and quantization != "qerl_nvfp4":
        why = f" (what {saved.path} was trained on)" if saved is not None and saved.quantization == quantization else ""
        raise ValueError(
            f"{base} is an NVFP4 checkpoint; quantization={quantization}{why} starts from the BF16 checkpoint; name "
            "that one, or ask for --quantization qerl_nvfp4"
        )
    return folder


def _start(
    folder: Path,
    quantization: str,
    rank: int | None,
    length: int | None,
    parallel: int,
    memory: Mapping[str, Any],
    dtype: str = "bfloat16",
) -> "LLM":
    # requests that arrive from another process fall into other batches in every run, and the last bits with them
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM
    from vllm.platforms import current_platform

    if quantization == "nf4" and not current_platform.is_cuda():
        raise ValueError("quantization=nf4 (bitsandbytes) needs a CUDA GPU; on this machine use qerl_nvfp4 or bf16")
    return LLM(
        model=str(folder),
        dtype=dtype,
        max_model_len=length,
        tensor_parallel_size=parallel,
        **memory,
        disable_log_stats=True,
        seed=0,
        **({} if current_platform.is_cuda() else engine_on_cpu(str(folder))),
        **engine_options(quantization, rank, read_config(folder)),
    )


def _install(llm: "LLM", adapter: AdapterFolder | None) -> Any:
    """Serve the base alone (None) or the adapter, without noise -> the request to generate with."""
    from qerl_vllm_plugin.policy import Policy

    policy = Policy(llm)
    if adapter is None:
        policy.swap(None)
    else:
        policy.swap_folder(adapter.path)
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
