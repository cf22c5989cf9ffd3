"""The benchmarks of ``qerl evaluate``: lighteval's own, AMC 2023, and local ones that need no network.

gsm8k, math_500, aime24, aime25     lighteval's definitions, from the Hugging Face hub
amc23                               40 problems of AMC 12, 2023 (math-ai/amc23), asked as lighteval asks AIME
running_sum                         the demo's 512 held-out problems; the whole completion must be right
jsonl:PATH                          a file of {"prompt", "answer"} lines, answers compared as mathematics
jsonl-exact:PATH                    the same, answers compared as text without surrounding spaces
"""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qerl_recipes import running_sum
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

LIGHTEVAL = {"gsm8k": "gsm8k", "math_500": "math_500", "aime24": "aime", "aime25": "aime"}  # task -> module
NAMES = (*LIGHTEVAL, "amc23", "running_sum")
MATH, EXACT = "jsonl:", "jsonl-exact:"
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


def check(names: Sequence[str]) -> None:
    """Raises ValueError for a task that does not exist, is named twice, or whose file cannot be read."""
    if not names:
        raise ValueError(f"name at least one task: {_known()}")
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"task {name} is named twice")
        if name.startswith((MATH, EXACT)):
            _read_lines(Path(name.split(":", 1)[1]))
        elif name not in NAMES:
            raise ValueError(f"there is no task {name!r}; choose from {_known()}")


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
    rows = _read_lines(Path(name.split(":", 1)[1]))
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

    metric = copy.deepcopy(Metrics.pass_at_k_math.value.sample_level_fn)
    metric.k = metric.n = 1
    return metric.compute


def _exact_judge(doc: Doc, response: ModelResponse) -> float:
    return float(response.text[0].strip() == doc.get_golds()[0].strip())


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


def _read_lines(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        raise ValueError(f"there is no file {path}; a local task is written jsonl:PATH")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt, answer = row["prompt"], row["answer"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f'{path}, line {number}: each line must be {{"prompt": TEXT, "answer": TEXT}} ({error!r})'
            ) from error
        if not isinstance(prompt, str) or not isinstance(answer, str | int | float):
            raise ValueError(f"{path}, line {number}: prompt must be a text, and answer a text or a number")
        rows.append({"prompt": prompt, "answer": str(answer)})
    if not rows:
        raise ValueError(f"{path} holds no problems")
    return rows


def _known() -> str:
    return ", ".join((*NAMES, f"{MATH}PATH", f"{EXACT}PATH"))
