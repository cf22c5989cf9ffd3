"""The benchmarks of ``qerl evaluate`` as lighteval's tasks; ``evaluation_request`` says which there are."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qerl_recipes import running_sum
from qerl_recipes.evaluation_request import EXACT, LIGHTEVAL, MATH, check, read_lines
from qerl_recipes.lighteval_import import (
    Doc,
    LightevalTask,
    LightevalTaskConfig,
    Metrics,
    ModelResponse,
    PassAtK,
    SampleLevelComputation,
    SampleLevelMetric,
    SamplingMethod,
    task_module,
)
from qerl_recipes.rewards_text import answer_block

METRIC = "accuracy"

Judge = Callable[[Doc, ModelResponse], float]  # 1 where the one text of a response is right, else 0


@dataclass(frozen=True)
class Benchmark:
    """A task and the problems to ask, drawn once, so that every model gets the same ones in the same order."""

    name: str
    task: LightevalTask
    problems: list[Doc]


class ShareOfSamples(SampleLevelComputation):
    """The share of a problem's samples that ``judge`` calls right."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge

    def compute(self, doc: Doc, model_response: ModelResponse, **kwargs: Any) -> float:
        texts = model_response.text
        processed = model_response.text_post_processed or texts  # without what stands between <think> and </think>
        samples = [
            ModelResponse(text=[text], text_post_processed=[other])
            for text, other in zip(texts, processed, strict=True)
        ]
        return float(np.mean([self.judge(doc, sample) for sample in samples]))


def load(names: Sequence[str], *, num_samples: int = 1, max_samples: int | None = None) -> list[Benchmark]:
    """The benchmarks with their problems, ``num_samples`` answers to each, at most ``max_samples`` problems a task.

    Raises ValueError for what ``check`` refuses, and ConnectionError where a data set cannot be fetched.
    """
    check(names)
    benchmarks = []
    for name in names:
        task = _task(name)
        task.num_samples = [num_samples]
        if task.dataset is None:
            try:
                LightevalTask.load_datasets({name: task})
            except (OSError, ValueError) as error:  # datasets raises either, for a missing network or cache
                raise ConnectionError(
                    f"task {name}: the data set {task.dataset_path} could not be fetched from the Hugging Face hub "
                    f"({type(error).__name__}: {error}); connect to the hub, or use a local task ({MATH}PATH)"
                ) from error
        benchmarks.append(Benchmark(name, task, task.get_docs(max_samples)))
    return benchmarks


def _task(name: str) -> LightevalTask:
    if name in LIGHTEVAL:
        module = task_module(LIGHTEVAL[name])
        original = next(config for config in module.TASKS_TABLE if config.name == name)
        return LightevalTask(_config_like(original, _judge(original)))
    if name == "amc23":
        return LightevalTask(_amc23())
    if name == "running_sum":
        rows = [{"prompt": problem.prompt, "answer": problem.answer} for problem in running_sum.held_out()]
        return _local(name, rows, _running_sum_judge, running_sum.LONGEST_COMPLETION)
    rows = read_lines(Path(name.split(":", 1)[1]))
    return _local(name, rows, _exact_judge if name.startswith(EXACT) else _math_judge(), None)


def _config_like(original: LightevalTaskConfig, judge: Judge) -> LightevalTaskConfig:
    config = copy.copy(original)
    config.metrics = (_metric(judge),)
    return config


def _metric(judge: Judge) -> SampleLevelMetric:
    return SampleLevelMetric(
        metric_name=METRIC,
        sample_level_fn=ShareOfSamples(judge),
        category=SamplingMethod.GENERATIVE,
        corpus_level_fn=np.mean,
        higher_is_better=True,
    )


def _judge(config: LightevalTaskConfig) -> Judge:
    """lighteval's own metric of a task, for one answer. Copied: its metrics are shared and hold k and n."""
    metric = copy.deepcopy(config.metrics[0].sample_level_fn)
    if isinstance(metric, PassAtK):
        metric.k = metric.n = 1
    return metric.compute


def _math_judge() -> Judge:
    """lighteval's, of an answer block where there is one: its content need not be in a box of LaTeX too."""
    metric = copy.deepcopy(Metrics.pass_at_k_math.value.sample_level_fn)
    metric.k = metric.n = 1

    def judge(doc: Doc, response: ModelResponse) -> float:
        answer = answer_block(response.text[0])
        if answer is None:
            return metric.compute(doc, response)
        texts = [answer, f"\\boxed{{{answer}}}"]
        return max(metric.compute(doc, ModelResponse(text=[text], text_post_processed=[text])) for text in texts)

    return judge


def _exact_judge(doc: Doc, response: ModelResponse) -> float:
    gold = doc.get_golds()[0].strip()
    return float(gold in (response.text[0].strip(), answer_block(response.text[0])))


def _running_sum_judge(doc: Doc, response: ModelResponse) -> float:
    return float(running_sum.answer_of(response.text[0]) == doc.get_golds()[0])


def _amc23() -> LightevalTaskConfig:
    aime = task_module("aime")
    original = next(config for config in aime.TASKS_TABLE if config.name == "aime24")
    config = _config_like(original, _judge(original))
    config.name, config.full_name = "amc23", "amc23|0"
    config.hf_repo, config.hf_subset, config.hf_avail_splits = "math-ai/amc23", "default", ("test",)
    config.evaluation_splits = ("test",)

    def prompt(line: dict[str, Any], task_name: str | None = None) -> Doc:
        answer = str(line["answer"]).removesuffix(".0")  # the data set writes whole numbers as 27.0
        return original.prompt_function({"problem": line["question"], "answer": answer}, task_name)

    config.prompt_function = prompt
    return config


def _local(name: str, rows: list[dict[str, str]], judge: Judge, longest: int | None) -> LightevalTask:
    """A task over ``rows`` of prompt and answer; ``longest`` completion in tokens, None for what the model can hold."""
    task = LightevalTask(
        LightevalTaskConfig(
            name=name,
            prompt_function=_prompt_and_answer,
            hf_repo="",
            hf_subset="",
            metrics=[_metric(judge)],
            hf_avail_splits=["test"],
            evaluation_splits=["test"],
            generation_size=longest,
        )
    )
    task.dataset = {"test": rows}
    return task


def _prompt_and_answer(line: dict[str, str], task_name: str | None = None) -> Doc:
    return Doc(task_name=task_name, query=line["prompt"], choices=[line["answer"]], gold_index=0)
