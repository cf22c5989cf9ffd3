"""Measure the accuracy of a base and of its trained adapter on one engine: ``qerl evaluate``.

Base and adapter answer the same problems with the same seeds, and without noise unless asked for. lighteval supplies
the problems and judges the answers. Every accuracy comes with a 95 % interval and the share of answers that ended by
themselves. The result is written to ``evaluation.json``, the answers to ``answers.jsonl`` beside it.
"""

import datetime
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from qerl_recipes.evaluate import as_trained
from qerl_recipes.evaluate.figures import episode_rows, noisy, of_episodes, summarize, too_many_cut, unscored
from qerl_recipes.evaluate.request import Evaluation
from qerl_recipes.files import run_state
from qerl_recipes.files.adapter import AdapterFolder, engine_rank, open_adapter
from qerl_recipes.files.base_model import local_folder, read_config
from qerl_recipes.files.json_files import read_object, shown
from qerl_recipes.files.whole_folder import write_text
from qerl_recipes.machine.environment import warm_compiler
from qerl_recipes.rollout.arms import ENGINE_QUANTIZATION, engine_on_cpu, engine_options
from qerl_vllm_plugin.noise import DEFAULT_TARGETS
from qerl_vllm_plugin.weights.checkpoint import inspect_folder

if TYPE_CHECKING:
    from vllm import LLM

    from qerl_recipes.evaluate.episodes import Task
    from qerl_recipes.evaluate.tasks import Benchmark

RESULT, ANSWERS = "evaluation.json", "answers.jsonl"


@dataclass(frozen=True)
class EngineSettings:
    """Hold the settings of an engine, which equal ones can share; ``rank`` is the adapter's, None without one."""

    folder: Path
    quantization: str
    rank: int | None
    dtype: str
    max_model_length: int | None = None
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None


@dataclass(frozen=True)
class Settled:
    """Hold an evaluation whose open choices are resolved; ``evaluate`` says what the two lists are."""

    evaluation: Evaluation
    saved: AdapterFolder | None
    base_hash: str
    adapter_hash: str | None
    as_in_training: list[str]
    not_as_in_training: list[str]
    engine: EngineSettings

    @property
    def policies(self) -> list[str]:
        return ["base"] if self.saved is None else ["adapter"] if self.evaluation.adapter_only else ["base", "adapter"]

    def settings(self) -> dict[str, Any]:
        """Return the entries of ``evaluation.json`` that say what is evaluated, and how."""
        evaluation = self.evaluation
        seed = (evaluation.seed or 0) if evaluation.episodes else evaluation.drawn_with
        return {
            "base_sha256": self.base_hash,
            "adapter_sha256": self.adapter_hash,
            "quantization": self.engine.quantization,
            "dtype": self.engine.dtype,
            "sampling": {**evaluation.sampling(), "seed": seed, "num_samples": evaluation.num_samples},
            "max_model_length": evaluation.max_model_length,
            "max_samples": evaluation.max_samples,
            "noise_sigma": evaluation.noise_sigma,
            "noise_seed": evaluation.noise_seed or 0,
            **({"noise_targets": self.noise_targets()} if evaluation.noise_sigma else {}),
            **({"acting": self.acting()} if evaluation.episodes else {}),
        }

    def noise_targets(self) -> list[str]:
        """Return the norms that carry noise: those of the adapter's training, or where none are known the default."""
        recipe = {} if self.saved is None else self.saved.recipe
        return list(recipe.get("noise_targets") or DEFAULT_TARGETS)

    def acting(self) -> dict[str, Any]:
        """Return what tells how the policy acts: the recipe's keys, and the reward from which an episode succeeds."""
        recipe = {} if self.saved is None else as_trained.acting(self.saved.recipe, self.evaluation.tasks)
        own = self.evaluation.response_template
        return {**recipe, **({"response_template": own} if own else {}), "success_at": self.evaluation.least_reward}


def evaluate(base: str, adapter: str | Path | None, tasks: str | Sequence[str], **options: Any) -> dict[str, Any]:
    """Evaluate ``base`` alone and, if given, with ``adapter``; return the content of ``output_dir/evaluation.json``.

    ``options`` are the fields of ``request.Evaluation``. In the result, ``tasks[name]["base" or "adapter"]`` has:

    * ``accuracy``, ``n`` (problems), ``num_samples``, ``ci95`` (low, high), and ``ended`` and ``cut``, the shares of
      answers that ended by themselves and that the length limit ended. ``room_of_cut``: the fewest and the most tokens
      that the prompts of cut answers leave of ``max_model_length``.
    * ``pass_at`` and ``maj_at`` for several samples, each ``{k: {value, ci95}}``.
    * of episodes, where accuracy is the share whose reward is at least ``acting.success_at``: ``reward`` as ``{value,
      ci95}``, the number of ``unscored`` ones, and the means of ``turns``, ``calls`` and ``failures``.
    * ``by_problem``: one bit per answer for ``right`` and for ``ended``, encoded by ``figures.packed``, in the order of
      ``problems_sha256`` and of ``answers.jsonl``.

    ``as_in_training`` lists the choices that the adapter's training settled, ``not_as_in_training`` those that were
    made otherwise, and ``of_training`` the tasks whose problems the adapter was trained on. Raises ValueError as
    ``settle``.
    """
    return evaluate_each([Evaluation.of(base=base, adapter=adapter, tasks=tasks, **options)])[0]


def evaluate_each(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """Run several evaluations and return their results, each of which is written as soon as it is known.

    Neighbours with an adapter share an engine if their settings are equal; every change of policy empties the prefix
    cache. Raises ValueError for unusable settings before the first engine starts.
    """
    settled = [settle(one) for one in evaluations]
    for one in settled:
        _refuse_another(one)
        if one.saved is not None and not one.evaluation.quiet:
            Console().print(_as_trained(one), markup=False, highlight=False)
    # These modules import vLLM, which takes long: a mistyped name is refused before.
    from transformers import AutoTokenizer

    from qerl_recipes.evaluate import answers
    from qerl_recipes.evaluate import tasks as evaluation_tasks

    tokenizers = {folder: AutoTokenizer.from_pretrained(folder) for folder in {one.engine.folder for one in settled}}
    load = functools.cache(evaluation_tasks.load)  # evaluations of a study ask for the same problems
    measured: dict[int, tuple[list[Benchmark], list[Task]]] = {}
    for one in settled:
        answers.check(tokenizers[one.engine.folder], one.evaluation)
        tasks: list[Task] = []
        if one.evaluation.episodes:  # they alone need TRL
            from qerl_recipes.evaluate.episodes import prepare

            tasks = prepare(one.evaluation, one.saved, one.engine.folder)
        measured[id(one)] = evaluation_tasks.load_evaluation(one.evaluation, load), tasks
        _refuse_another(one, list(itertools.chain(*measured[id(one)])))
    for one in settled:
        one.evaluation.output_dir.mkdir(parents=True, exist_ok=True)
    results = []
    # An evaluation without an adapter gets its own engine: no change of policy would empty the prefix cache.
    for (engine, _), those in itertools.groupby(settled, key=lambda one: (one.engine, 0 if one.saved else id(one))):
        llm = start(engine)
        try:
            results += [_answered(llm, one, *measured[id(one)]) for one in those]
        finally:
            close(llm)
    return results


def settle(evaluation: Evaluation) -> Settled:
    """Resolve the open choices of an evaluation, before vLLM is imported; raise ValueError for what cannot be done."""
    for package in ("lighteval", "vllm"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"qerl evaluate needs {package}, which is not installed: pip install '.[eval]' in a clone")
    evaluation, saved, rank = evaluation.checked(), None, None
    as_in_training, unlike = list[str](), list[str]()
    if evaluation.adapter is not None:
        saved = open_adapter(evaluation.adapter)
        unlike = as_trained.overridden(evaluation, saved) + as_trained.without_actions(evaluation.tasks, saved.recipe)
        evaluation, as_in_training = as_trained.taken_over(evaluation, saved)
        if evaluation.episodes:
            keys = as_trained.acting(saved.recipe, evaluation.tasks).items()
            as_in_training += [key if key == "response_template" else f"{key} {shown(value)}" for key, value in keys]
    quantization = evaluation.quantization or (saved and saved.quantization) or "qerl_nvfp4"
    dtype = evaluation.dtype or (saved and saved.recipe.get("dtype")) or "bfloat16"
    folder = _check_base(evaluation.base, quantization, dtype, saved)
    base_hash = run_state.base_hash(folder)
    if saved is not None:
        formats = ("weights", quantization, saved.quantization), ("dtype", dtype, saved.recipe.get("dtype"))
        unlike += [f"{name} {here}, there {there}" for name, here, there in formats if there not in (None, here)]
        saved.check_base(base_hash)
        rank = engine_rank(saved.rank)
        saved.check_plain()
        saved.check_tensors()
    of_engine = {field.name for field in fields(EngineSettings)} & Evaluation.model_fields.keys()
    settings = evaluation.model_dump(include=of_engine) | {"quantization": quantization, "dtype": dtype}
    engine = EngineSettings(folder=folder, rank=rank, **settings)
    adapter_hash = None if saved is None else saved.sha256()
    return Settled(evaluation, saved, base_hash, adapter_hash, as_in_training, unlike, engine)


def _check_base(base: str, quantization: str, dtype: str, saved: AdapterFolder | None) -> Path:
    """Return the folder of a base that can be served in this format and dtype; raise ValueError if it cannot."""
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


def _refuse_another(one: Settled, benchmarks: "Sequence[Benchmark | Task] | None" = None) -> None:
    """Raise ValueError if the output folder holds another evaluation's result: models, tasks, sampling, problems."""
    file = one.evaluation.output_dir / RESULT
    if not file.is_file():
        return
    wanted = {"tasks": sorted(one.evaluation.tasks), "models": one.policies, **one.settings()}
    wanted |= wanted.pop("sampling")
    if benchmarks is not None:
        wanted["problems_sha256"] = {benchmark.name: benchmark.digest() for benchmark in benchmarks}
    way_out = "name another output_dir, or remove it"
    earlier = read_object(file, way_out)
    try:
        earlier["models"] = list(next(iter(earlier["tasks"].values())))
        earlier |= {"generation_kwargs": None, **earlier["sampling"], "tasks": sorted(earlier["tasks"])}
    except (LookupError, TypeError, AttributeError, StopIteration) as error:
        raise ValueError(f"{file} is no evaluation that can be read; {way_out}") from error
    for key, value in json.loads(json.dumps(wanted)).items():
        is_open = value is None and key in ("use_chat_template", "max_model_length")  # the engine decides these
        if key in earlier and not is_open and (value or None) != (earlier[key] or None):
            raise ValueError(
                f"{file} is of another evaluation, which would be lost: its {key} is {shown(earlier[key])}, and here "
                f"it is {shown(value)}; name another output_dir, or remove the file"
            )


def _answered(llm: "LLM", one: Settled, benchmarks: "Sequence[Benchmark]", tasks: "Sequence[Task]") -> dict[str, Any]:
    """Evaluate each policy on the running engine, write the result and the answers, and return the result."""
    from qerl_recipes.evaluate.answers import ask, uses_template

    evaluation, saved, output = one.evaluation, one.saved, one.evaluation.output_dir
    if tasks:
        from qerl_recipes.evaluate.episodes import play, side_by_side
    settings = one.settings()
    answered: dict[str, dict[str, Sequence[Any]]] = {label: {} for label in one.policies}  # task -> Judged or Played
    for label in reversed(one.policies):  # an adapter that does not fit is refused before the base is judged
        request = None if saved is None else install(llm, saved if label == "adapter" else None)
        if evaluation.noise_sigma:
            from qerl_vllm_plugin.policy import Policy

            how = {"seed": settings["noise_seed"], "targets": settings["noise_targets"]}
            Policy(llm).set_noise(evaluation.noise_sigma, rollout=0, **how)
        answered[label] = {**ask(llm, request, benchmarks, evaluation, label)} if benchmarks else {}
        for task in tasks:
            answered[label][task.name] = play(llm, request, task, evaluation, label)
    settings["sampling"]["use_chat_template"] = uses_template(llm.get_tokenizer(), evaluation)
    figures_of = {name: of_episodes if name in evaluation.episodes else summarize for name in evaluation.tasks}
    recipe, problems = {} if saved is None else saved.recipe, evaluation.problems
    result = {
        "tasks": {
            name: {label: figures_of[name](of[name], evaluation.num_samples) for label, of in answered.items()}
            for name in evaluation.tasks
        },
        "shown": {task.name: side_by_side({label: of[task.name] for label, of in answered.items()}) for task in tasks},
        "base": evaluation.base,
        "adapter": None if saved is None else str(saved.path),
        "trained_on": None if saved is None else saved.quantization,
        "as_in_training": one.as_in_training,
        "not_as_in_training": one.not_as_in_training,
        "of_training": [name for name in evaluation.tasks if as_trained.is_of_training(name, recipe, problems)],
        **settings,
        "problems_sha256": {b.name: b.digest() for b in benchmarks} | {task.name: task.digest() for task in tasks},
        "max_new_tokens": {
            **{b.name: evaluation.max_new_tokens or b.problems[0].generation_size for b in benchmarks},
            **{task.name: evaluation.max_new_tokens for task in tasks},
        },
        "max_model_length": llm.llm_engine.model_config.max_model_len,
        "tensor_parallel_size": evaluation.tensor_parallel_size,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": {**run_state.versions(), "lighteval": importlib.metadata.version("lighteval")},
    }
    of_all = ((label, name, problem) for label, of in answered.items() for name in of for problem in of[name])
    lines = ({"task": name, "model": label, **asdict(problem)} for label, name, problem in of_all)
    write_text(output / ANSWERS, "".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines))
    write_text(output / RESULT, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    for warning in [*too_many_cut(result), *unscored(result)]:
        warnings.warn(warning, stacklevel=4)
    if not evaluation.quiet:
        console, seen = Console(), "is what the adapter was trained on, whole or in part: these are no unseen problems"
        console.print(table(result))
        said = [f"{task} {seen}" for task in result["of_training"]]
        for line in [*said, f"wrote {output / RESULT} and {ANSWERS} beside it"]:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    return result


def table(result: Mapping[str, Any]) -> Table:
    """Return the accuracies as a table for the terminal."""
    sampling = result["sampling"]
    decoding = "greedy" if not sampling["temperature"] else f"temperature {sampling['temperature']:g}"
    view = Table(title=f"accuracy, 95 % interval ({result['quantization']}, {decoding}{noisy(result)})")
    view.add_column("task")
    labels = list(next(iter(result["tasks"].values())))
    for column in (*labels, "problems", "longest answer", "ended"):
        view.add_column(column, justify="right", overflow="fold")
    for task, arms in result["tasks"].items():
        longest = result["max_new_tokens"][task] or result["max_model_length"]
        ended = " / ".join(f"{arms[label]['ended']:.0%}" for label in labels)
        cells = [_with_interval(arms[label], "accuracy") for label in labels]
        success = f", reward >= {result['acting']['success_at']:g}" if "unscored" in arms[labels[0]] else ""
        view.add_row(task + success, *cells, str(arms[labels[0]]["n"]), f"{longest} tokens", ended)
        for kind, name in (("pass_at", "pass@"), ("maj_at", "maj@")):
            for k in arms[labels[0]].get(kind, {}):
                values = [_with_interval(arms[label][kind][k], "value") for label in labels]
                view.add_row(f"  {name}{k}", *values, "", "", ended)
        for name, values in episode_rows(arms):
            view.add_row(f"  {name}", *values)
    return view


def _with_interval(figures: Mapping[str, Any], key: str) -> str:
    low, high = figures["ci95"]
    return f"{figures[key]:.1%}  [{low:.1%}, {high:.1%}]"


def _as_trained(one: Settled) -> str:
    """Return one line that says which settings are the same as in the adapter's training, and which differ."""
    saved, arm, settled = one.saved, one.engine.quantization, one.as_in_training
    assert saved is not None
    if saved.quantization == arm:
        settled = [f"{arm} weights", *settled]
    said = f"as in training: {', '.join(settled)}" if settled else "says nothing of its training's prompts"
    unlike = as_trained.warmer_or_colder(one.evaluation, saved.recipe) + one.not_as_in_training
    return f"{saved.path}: {said}" + (f"; not as in training: {'; '.join(unlike)}" if unlike else "")


def start(engine: EngineSettings) -> "LLM":
    """Start an engine in this process; raise ValueError if this machine cannot serve its weights."""
    # An engine core in another process would batch the requests differently in each run, which changes the last bits.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    warm_compiler()
    from vllm import LLM
    from vllm.platforms import current_platform

    from qerl_vllm_plugin.compat.engine import start_in_this_process

    if engine.quantization == "nf4" and not current_platform.is_cuda():
        raise ValueError("quantization=nf4 (bitsandbytes) needs a CUDA GPU; on this machine use qerl_nvfp4 or bf16")
    as_named = ("dtype", "tensor_parallel_size", "gpu_memory_utilization", "kv_cache_memory_bytes")
    with start_in_this_process():
        return LLM(
            model=str(engine.folder),
            max_model_len=engine.max_model_length,
            **{name: getattr(engine, name) for name in as_named},
            disable_log_stats=True,
            seed=0,
            **({} if current_platform.is_cuda() else engine_on_cpu(str(engine.folder))),
            **engine_options(engine.quantization, engine.rank, read_config(engine.folder)),
        )


def close(llm: "LLM") -> None:
    """Shut down an engine, so that another one can start in this process."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def install(llm: "LLM", adapter: AdapterFolder | None) -> Any:
    """Serve the adapter, or for None the base, without noise; return the LoRA request to generate with."""
    from qerl_vllm_plugin.policy import Policy

    policy = Policy(llm)
    if adapter is None:
        policy.swap(None)
    else:
        policy.swap_folder(adapter.path)
    if policy.state().sigma:
        policy.clear_noise()
    return policy.request
