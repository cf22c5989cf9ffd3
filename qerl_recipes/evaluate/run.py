"""Implements ``qerl evaluate``: measures the accuracy of a base and of its trained adapter on one engine.

Base and adapter answer the same problems with the same seeds and without noise. lighteval supplies the problems and
judges the answers. Every accuracy comes with a 95 % interval and the share of answers that ended by themselves. The
result is written to ``evaluation.json``, the answers to ``answers.jsonl`` beside it.
"""

import datetime
import importlib.metadata
import itertools
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from qerl_recipes.evaluate.by_problem import packed
from qerl_recipes.evaluate.ended import too_many_cut
from qerl_recipes.evaluate.intervals import several, summary
from qerl_recipes.evaluate.request import is_of_training
from qerl_recipes.evaluate.settled import EngineSettings, Evaluation, Settled, settle
from qerl_recipes.evaluate.unlike_training import shown
from qerl_recipes.files import run_state
from qerl_recipes.files.adapter import AdapterFolder
from qerl_recipes.files.whole_folder import write_text
from qerl_recipes.memory.model_size import read_config
from qerl_recipes.rollout.arms import engine_on_cpu, engine_options

if TYPE_CHECKING:
    from vllm import LLM

    from qerl_recipes.evaluate.answers import Judged
    from qerl_recipes.evaluate.tasks import Benchmark

RESULT, ANSWERS = "evaluation.json", "answers.jsonl"


def evaluate(base: str, adapter: str | None, tasks: Sequence[str], **options: Any) -> dict[str, Any]:
    """Evaluate ``base`` alone and, if given, with ``adapter``; return the content of ``output_dir/evaluation.json``.

    ``options`` are the fields of ``settled.Evaluation``. In the result, ``tasks[name]["base" or "adapter"]`` has:

    * ``accuracy``, ``n`` (problems), ``num_samples``, ``ci95`` (low, high) and ``interval`` (the kind of interval).
    * ``ended`` and ``cut``: the shares of answers that ended by themselves, and that the length limit ended.
    * ``pass_at`` and ``maj_at`` for several samples, each ``{k: {value, ci95}}``.
    * ``by_problem``: one bit per answer for ``right`` and for ``ended``, encoded by ``by_problem.packed``. The
      problems have the order of ``problems_sha256`` and of ``answers.jsonl``.

    A cut answer is judged by its text so far. A warning names the tasks on which more than a tenth were cut.
    ``as_in_training`` lists the choices that the adapter's training settled. ``of_training`` lists the tasks whose
    problems come from the file that the adapter was trained on. Raises ValueError as ``settle`` does.
    """
    return evaluate_each([Evaluation(base=base, adapter=adapter, tasks=list(tasks), **options)])[0]


def evaluate_each(asked: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """Run several evaluations and return their results.

    Neighbouring evaluations with an adapter share an engine if their engine settings are equal. This does not change
    the answers, since every change of policy empties the prefix cache. Each result is written as soon as it is known.
    Unusable settings of any evaluation raise ValueError before the first engine starts.
    """
    settled = [settle(one) for one in asked]
    for one in settled:
        _refuse_another(one)
    for one in settled:
        if one.saved is not None and not one.asked.quiet:
            Console().print(_as_trained(one), markup=False, highlight=False)
    # These modules import vLLM, which takes long: a mistyped name is refused before.
    from transformers import AutoTokenizer

    from qerl_recipes.evaluate import answers
    from qerl_recipes.evaluate import tasks as evaluation_tasks

    tokenizers = {folder: AutoTokenizer.from_pretrained(folder) for folder in {one.engine.folder for one in settled}}
    for one in settled:
        answers.check(tokenizers[one.engine.folder], one.sampling)
    results = []
    # An evaluation without an adapter gets its own engine, since no change of policy would empty the prefix cache.
    for (engine, _), those in itertools.groupby(settled, key=lambda one: (one.engine, 0 if one.saved else id(one))):
        with evaluation_tasks.quietly():
            group = []
            for one in those:
                one.asked.output_dir.mkdir(parents=True, exist_ok=True)
                group.append((one, evaluation_tasks.load_asked(one.asked)))
                _refuse_another(one, group[-1][1])
            llm = start(engine)
            try:
                results += [_answered(llm, one, benchmarks) for one, benchmarks in group]
            finally:
                close(llm)
    return results


def _refuse_another(one: Settled, benchmarks: "Sequence[Benchmark] | None" = None) -> None:
    """Raise ValueError if the output folder holds the result of another evaluation, which would be overwritten.

    The models, the tasks and the sampling are compared. If ``benchmarks`` are given, so are their problems.
    """
    asked, sampling, file = one.asked, one.sampling, one.asked.output_dir / RESULT
    if not file.is_file():
        return
    wanted: dict[str, Any] = {
        "tasks": sorted(asked.tasks),
        "models": _labels(one),
        "base_sha256": one.base_hash,
        "adapter_sha256": None if one.saved is None else one.saved.sha256(),
        "quantization": one.engine.quantization,
        "dtype": one.engine.dtype,
        "max_samples": asked.max_samples,
        "num_fewshot": asked.num_fewshot,
        "max_model_length": one.engine.max_model_length,
        **asdict(sampling),
        "seed": sampling.drawn_with,
        "num_samples": asked.num_samples,
    }
    if benchmarks is not None:
        wanted["problems_sha256"] = {benchmark.name: benchmark.digest() for benchmark in benchmarks}
    try:
        other = json.loads(file.read_text(encoding="utf-8"))
        models = list(next(iter(other["tasks"].values())))
        other = {"generation_kwargs": None, **other, **other["sampling"], "tasks": sorted(other["tasks"])}
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
        raise ValueError(f"{file} is no evaluation that can be read; name another output_dir, or remove it") from error
    other["models"] = models
    for key, value in json.loads(json.dumps(wanted)).items():
        is_open = value is None and key in ("use_chat_template", "max_model_length")  # the engine decides these
        if key in other and not is_open and (value or None) != (other[key] or None):
            raise ValueError(
                f"{file} is of another evaluation, which would be lost: its {key} is {shown(other[key])}, and here it "
                f"is {shown(value)}; name another output_dir, or remove the file"
            )


def _labels(one: Settled) -> list[str]:
    """Return the names of the policies that an evaluation judges, in order."""
    return ["base"] if one.saved is None else ["adapter"] if one.asked.adapter_only else ["base", "adapter"]


def _answered(llm: "LLM", one: Settled, benchmarks: "Sequence[Benchmark]") -> dict[str, Any]:
    """Evaluate each policy on the running engine, write the result and the answers, and return the result."""
    from qerl_recipes.evaluate.answers import ask, uses_template

    asked, saved, sampling = one.asked, one.saved, one.sampling
    arms: dict[str, dict[str, list[Judged]]] = {}
    for label in _labels(one):
        request = None if saved is None else _install(llm, saved if label == "adapter" else None)
        arms[label] = ask(llm, request, benchmarks, sampling, label)
    result = {
        "tasks": {
            task: {label: summarize(arms[label][task], asked.num_samples) for label in arms} for task in asked.tasks
        },
        "base": asked.base,
        "base_sha256": one.base_hash,
        "adapter": None if saved is None else str(saved.path),
        "adapter_sha256": None if saved is None else saved.sha256(),
        "quantization": one.engine.quantization,
        "dtype": one.engine.dtype,
        "trained_on": None if saved is None else saved.quantization,
        "as_in_training": one.as_in_training,
        "of_training": [] if saved is None else [task for task in asked.tasks if is_of_training(task, saved.recipe)],
        "sampling": {
            **asdict(sampling),
            "seed": sampling.drawn_with,
            "use_chat_template": uses_template(llm.get_tokenizer(), sampling),
            "num_samples": asked.num_samples,
        },
        "problems_sha256": {b.name: b.digest() for b in benchmarks},
        "max_new_tokens": {b.name: sampling.max_new_tokens or b.problems[0].generation_size for b in benchmarks},
        "max_model_length": llm.llm_engine.model_config.max_model_len,
        "max_samples": asked.max_samples,
        "num_fewshot": asked.num_fewshot,
        "tensor_parallel_size": asked.tensor_parallel_size,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": {**run_state.versions(), "lighteval": importlib.metadata.version("lighteval")},
    }
    output = asked.output_dir
    write_text(output / ANSWERS, "".join(_lines(arms)))
    write_text(output / RESULT, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    for line in too_many_cut(result):
        warnings.warn(line, stacklevel=4)
    if not asked.quiet:
        Console().print(table(result))
        for task in result["of_training"]:
            line = f"{task} is what the adapter was trained on, whole or in part: these are no unseen problems"
            Console().print(line, markup=False, highlight=False, soft_wrap=True)
        Console().print(f"wrote {output / RESULT} and {ANSWERS} beside it", markup=False, highlight=False)
    return result


def summarize(judged: "Sequence[Judged]", num_samples: int) -> dict[str, Any]:
    """Return the figures of one policy on one task, as ``evaluate`` describes them."""
    ended = [[not cut for cut in problem.cut] for problem in judged]
    figures = summary([problem.share for problem in judged], num_samples)
    count = sum(map(sum, ended))
    figures |= {"ended": count / (len(judged) * num_samples), "cut": 1 - count / (len(judged) * num_samples)}
    figures["by_problem"] = {"right": packed([problem.right for problem in judged]), "ended": packed(ended)}
    if num_samples > 1:
        figures |= several([problem.right for problem in judged], [problem.vote for problem in judged])
    return figures


def table(result: Mapping[str, Any]) -> Table:
    """Return the accuracies as a table for the terminal."""
    sampling = result["sampling"]
    decoding = "greedy" if not sampling["temperature"] else f"temperature {sampling['temperature']:g}"
    view = Table(title=f"accuracy, 95 % interval ({result['quantization']}, {decoding})")
    view.add_column("task")
    labels = list(next(iter(result["tasks"].values())))
    for label in labels:
        view.add_column(label, justify="right", overflow="fold")
    view.add_column("problems", justify="right", overflow="fold")
    view.add_column("longest answer", justify="right", overflow="fold")
    view.add_column("ended", justify="right", overflow="fold")
    for task, arms in result["tasks"].items():
        longest = result["max_new_tokens"][task]
        ended = " / ".join(f"{arms[label]['ended']:.0%}" for label in labels)
        cells = [_with_interval(arms[label], "accuracy") for label in labels]
        view.add_row(task, *cells, str(arms[labels[0]]["n"]), f"{longest or result['max_model_length']} tokens", ended)
        for kind, name in (("pass_at", "pass@"), ("maj_at", "maj@")):
            for k in arms[labels[0]].get(kind, {}):
                values = [_with_interval(arms[label][kind][k], "value") for label in labels]
                view.add_row(f"  {name}{k}", *values, "", "", ended)
    return view


def _with_interval(figures: Mapping[str, Any], key: str) -> str:
    low, high = figures["ci95"]
    return f"{figures[key]:.1%}  [{low:.1%}, {high:.1%}]"


def _as_trained(one: Settled) -> str:
    """Return one line that says which settings are the same as in the adapter's training, and which differ."""
    saved, arm, settled = one.saved, one.engine.quantization, one.as_in_training
    assert saved is not None
    line = f"{saved.path}: "
    if saved.quantization not in (None, arm):
        line += f"trained on {saved.quantization} weights, judged on {arm} ones as --quantization asks; "
    elif saved.quantization is not None:
        settled = [f"{arm} weights", *settled]
    line += f"as in training: {', '.join(settled)}" if settled else "says nothing of its training's prompts"
    unlike = one.sampling.unlike(saved.recipe)
    return line + (f"; not as in training: {'; '.join(unlike)}" if unlike else "")


def close(llm: "LLM") -> None:
    """Shut down an engine, so that another one can start in this process."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def start(engine: EngineSettings) -> "LLM":
    # An engine core in another process would batch the requests differently in each run, which changes the last bits.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM
    from vllm.platforms import current_platform

    if engine.quantization == "nf4" and not current_platform.is_cuda():
        raise ValueError("quantization=nf4 (bitsandbytes) needs a CUDA GPU; on this machine use qerl_nvfp4 or bf16")
    return LLM(
        model=str(engine.folder),
        dtype=engine.dtype,
        max_model_len=engine.max_model_length,
        tensor_parallel_size=engine.tensor_parallel_size,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        kv_cache_memory_bytes=engine.kv_cache_memory_bytes,
        disable_log_stats=True,
        seed=0,
        **({} if current_platform.is_cuda() else engine_on_cpu(str(engine.folder))),
        **engine_options(engine.quantization, engine.rank, read_config(engine.folder)),
    )


def _install(llm: "LLM", adapter: AdapterFolder | None) -> Any:
    """Make the engine serve the adapter, or the base alone for None, without noise.

    Returns the LoRA request to generate with.
    """
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
    """Yield one JSON line for each problem and policy."""
    for label, tasks in arms.items():
        for task, judged in tasks.items():
            for problem in judged:
                line = {"task": task, "model": label, **asdict(problem)}
                yield json.dumps(line, ensure_ascii=False) + "\n"
