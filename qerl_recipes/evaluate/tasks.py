"""Load the benchmarks of ``qerl evaluate`` with lighteval's problems and metrics; ``request`` lists their names.

This module alone imports lighteval. Importing lighteval 0.13 turns torch's gradients off for the whole process, so
training in the same process would fail. The imports here restore the previous mode.
"""

import copy
import hashlib
import importlib
import json
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from qerl_recipes.evaluate import request
from qerl_recipes.evaluate.request import Evaluation, check_tasks, has_episodes, read_problems
from qerl_recipes.tasks import running_sum
from qerl_recipes.tasks.answers import answer_block, answer_in, is_exactly, last_number

with torch.set_grad_enabled(torch.is_grad_enabled()):  # restores the gradient mode after the imports
    from latex2sympy2_extended import NormalizationConfig
    from lighteval.metrics.metrics import Metrics
    from lighteval.metrics.metrics_sample import PassAtK
    from lighteval.models.model_output import ModelResponse
    from lighteval.tasks.lighteval_task import LightevalTask, LightevalTaskConfig
    from lighteval.tasks.prompt_manager import PromptManager
    from lighteval.tasks.requests import Doc
    from lighteval.utils.utils import remove_reasoning_tags
    from math_verify import LatexExtractionConfig, parse, verify

logging.getLogger("lighteval").setLevel(logging.ERROR)  # it warns about few-shot splits, which are not used here
__all__ = ["Benchmark", "Doc", "PromptManager", "load", "load_evaluation", "task_module"]

REASONING = [("<think>", "</think>")]  # the text between these tags is not part of an answer
LEAST_NEW_TOKENS = 1024  # lighteval's 256 for GSM8K cuts many worked answers in the middle

Judge = Callable[[Doc, str], bool]  # True if the text answers the problem correctly
Vote = Callable[[str], Hashable]  # the result that a text votes for, or None if it gives none


@dataclass(frozen=True)
class Benchmark:
    """Hold a task whose problems are drawn once, for all models; ``generation_size`` is the limit of an answer."""

    name: str
    problems: list[Doc]
    is_right: Judge
    vote: Vote

    def digest(self) -> str:
        content = [(problem.query, problem.choices, problem.gold_index) for problem in self.problems]
        return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()

    def majority(self, texts: Sequence[str]) -> int | None:
        """Return the index of the first text with the majority answer, of equals the first; None without an answer."""
        votes = [self.vote(text) for text in texts]  # they may have no hash
        firsts = [votes.index(vote) for vote in votes if vote is not None]  # of each, the first that is equal
        return max(firsts, key=firsts.count, default=None)


@dataclass
class _Mathematics:
    """Hold what math-verify has parsed from an answer; two are equal if math-verify verifies one against the other."""

    parsed: list[Any]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Mathematics):
            return NotImplemented
        return verify(self.parsed, other.parsed) or verify(other.parsed, self.parsed)


def load(names: Sequence[str], *, max_samples: int | None = None, num_samples: int = 1) -> list[Benchmark]:
    """Load the named benchmarks with at most ``max_samples`` problems each.

    Each problem is to be answered ``num_samples`` times, without solved problems before it. Raises ValueError as
    ``check_tasks`` does, or if the answers of a local file cannot be read. Raises ConnectionError if a data set cannot
    be fetched.
    """
    check_tasks(names)
    benchmarks = []
    for name in names:
        rows, config, judge, vote = _definition(name)
        config.num_fewshots = 0
        task = LightevalTask(config)
        task.num_samples = [num_samples]
        if rows is None:
            try:
                LightevalTask.load_datasets({name: task})
            except (OSError, ValueError) as error:  # datasets raises either if network or cache is missing
                raise ConnectionError(
                    f"task {name}: the data set {task.dataset_path} could not be fetched from the Hugging Face hub "
                    f"({type(error).__name__}: {error}); connect to the hub, or use a local task ({request.MATH}PATH)"
                ) from error
        else:
            task.dataset = {"test": rows}
        benchmark = Benchmark(name, task.get_docs(max_samples), judge, vote)
        if name.startswith((request.MATH, request.ACCURACY, request.NUMBER)):
            _refuse_unreadable(benchmark)
        benchmarks.append(benchmark)
    return benchmarks


def load_evaluation(evaluation: Evaluation, load: Callable[..., list[Benchmark]] = load) -> list[Benchmark]:
    """Load the benchmarks of one evaluation by ``load``, which may keep them; tasks of episodes are none."""
    options = {name: getattr(evaluation, name) for name in ("max_samples", "num_samples")}
    names = tuple(name for name in evaluation.tasks if not has_episodes(name))
    return load(names, **options) if names else []


def _definition(name: str) -> tuple[list[dict[str, str]] | None, LightevalTaskConfig, Judge, Vote]:
    """Return a task's rows (None: the hub has them), lighteval's configuration, and how answers are judged and read."""
    if name in request.LIGHTEVAL or name == "amc23":
        config = _amc23() if name == "amc23" else _lightevals_config(name)
        if config.generation_size is not None:
            config.generation_size = max(config.generation_size, LEAST_NEW_TOKENS)
        metric = _for_one_answer(config.metrics[0].sample_level_fn)
        return None, config, lambda doc, text: bool(metric.compute(doc, _without_reasoning(text))), _mathematics
    if name == "running_sum":
        task, answer = _local(name, running_sum.LONGEST_COMPLETION), running_sum.answer_of
        return running_sum.held_out(), task, lambda doc, text: answer(text) == doc.get_golds()[0], answer
    kind, _, path = name.partition(":")
    judge, vote = {
        request.MATH: (_math_judge(), _mathematics),
        request.ACCURACY: (_accuracy_judge, _marked),
        request.EXACT: (lambda doc, text: is_exactly(text, doc.get_golds()[0]), _text),
        request.NUMBER: (_number_judge, last_number),
    }[f"{kind}:"]
    return read_problems(Path(path)), _local(name, None), judge, vote


def _refuse_unreadable(benchmark: Benchmark) -> None:
    """Raise ValueError if a gold answer itself would be judged wrong, of which lighteval only logs a line."""
    golds = [doc.get_golds()[0] for doc in benchmark.problems]
    pairs = zip(benchmark.problems, golds, strict=True)
    ways = ("<answer>{}</answer>", "${}$", "\\boxed{{{}}}")
    wrong = [gold for doc, gold in pairs if not any(benchmark.is_right(doc, way.format(gold)) for way in ways)]
    if wrong:
        kind = "a number" if benchmark.name.startswith(request.NUMBER) else "mathematics"
        raise ValueError(
            f"{benchmark.name}: the answers to {len(wrong)} of {len(golds)} problems ({wrong[0]!r}, for one) cannot be "
            f"read as {kind}, so that whatever is said would be wrong; {request.EXACT}PATH compares letters"
        )


def task_module(name: str) -> ModuleType:
    """Import lighteval's module of one task: its registry would import all, and one of them downloads a file."""
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        return importlib.import_module(f"lighteval.tasks.tasks.{name}")


def _without_reasoning(text: str) -> ModelResponse:
    return ModelResponse(text=[text], text_post_processed=[remove_reasoning_tags(text, REASONING)])


def _for_one_answer(shared: Any) -> Any:
    """Return a copy, for one answer, of one of lighteval's shared metrics, which hold k and n of pass@k."""
    metric = copy.deepcopy(shared)
    if isinstance(metric, PassAtK):
        metric.k = metric.n = 1
    return metric


def _math_judge() -> Judge:
    """Return a judge of the answer block, with or without a box in it, or else of the whole text."""
    metric = _for_one_answer(Metrics.pass_at_k_math.value.sample_level_fn)

    def judge(doc: Doc, text: str) -> bool:
        answer = answer_block(text)
        if answer is None:
            return bool(metric.compute(doc, _without_reasoning(text)))
        texts = [answer, f"\\boxed{{{answer}}}"]
        return any(metric.compute(doc, ModelResponse(text=[text], text_post_processed=[text])) for text in texts)

    return judge


def _accuracy_judge(doc: Doc, text: str) -> bool:
    """Judge an answer as the reward ``accuracy`` does, which is TRL's accuracy_reward, but without importing TRL."""
    answer = _marked(text)
    return answer is not None and verify(parse(doc.get_golds()[0]), answer.parsed)


def _number_judge(doc: Doc, text: str) -> bool:
    wanted = last_number(doc.get_golds()[0])
    return wanted is not None and wanted == last_number(text)


def _text(text: str) -> str | None:
    answer = answer_in(text)
    return (text.strip() if answer is None else answer) or None


def _marked(text: str) -> Any:
    """Parse what the reward ``accuracy`` reads (LaTeX, a box first), as trl.rewards.accuracy_reward, or None."""
    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
    parsed = parse(text, extraction_config=[latex], extraction_mode="first_match")
    return _Mathematics(parsed) if parsed else None


def _mathematics(text: str) -> Any:
    answer = answer_block(text)
    parsed = parse(remove_reasoning_tags(text, REASONING) if answer is None else f"\\boxed{{{answer}}}")
    return _Mathematics(parsed) if parsed else None


def _lightevals_config(name: str) -> LightevalTaskConfig:
    """Return a copy of lighteval's own configuration of a task."""
    return copy.copy(next(config for config in task_module(request.LIGHTEVAL[name]).TASKS_TABLE if config.name == name))


def _amc23() -> LightevalTaskConfig:
    """Return the configuration of amc23, which is asked as lighteval asks AIME."""
    config = _lightevals_config("aime24")
    ask = config.prompt_function
    config.name, config.full_name = "amc23", "amc23|0"
    config.hf_repo, config.hf_subset, config.hf_avail_splits = "math-ai/amc23", "default", ("test",)
    config.evaluation_splits = ("test",)

    def prompt(line: dict[str, Any], task_name: str | None = None) -> Doc:
        answer = str(line["answer"]).removesuffix(".0")  # the data set writes whole numbers as 27.0
        return ask({"problem": line["question"], "answer": answer}, task_name)

    config.prompt_function = prompt
    return config


def _local(name: str, longest: int | None) -> LightevalTaskConfig:
    """Return the configuration of a task over rows of prompt and answer, of at most ``longest`` tokens."""
    return LightevalTaskConfig(
        name=name,
        prompt_function=lambda line, task_name=None: Doc(
            task_name=task_name, query=line["prompt"], choices=[line["answer"]], gold_index=0
        ),
        hf_repo="",
        hf_subset="",
        metrics=[],
        hf_avail_splits=["test"],
        evaluation_splits=["test"],
        generation_size=longest,
    )
