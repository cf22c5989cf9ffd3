"""One run of lighteval: a model answers the problems of some benchmarks, and lighteval's metrics judge the answers."""

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory

from qerl_recipes.evaluation_tasks import METRIC, Benchmark
from qerl_recipes.lighteval_import import (
    Doc,
    EvaluationTracker,
    ParallelismManager,
    Pipeline,
    PipelineParameters,
    SamplingMethod,
)
from qerl_recipes.lighteval_model import EngineModel


@dataclass(frozen=True)
class Judged:
    """One problem: what was asked, the answers, and the share of them that is right."""

    problem: str
    prompt: str
    gold: str
    answers: list[str]
    share: float


class _Pipeline(Pipeline):
    """lighteval's pipeline over problems that are already drawn, instead of task names for its registry."""

    def __init__(self, benchmarks: Sequence[Benchmark], model: EngineModel, tracker: EvaluationTracker) -> None:
        self._benchmarks = benchmarks
        parameters = PipelineParameters(launcher_type=ParallelismManager.CUSTOM, bootstrap_iters=0)
        super().__init__(tasks="", pipeline_parameters=parameters, evaluation_tracker=tracker, model=model)

    def _init_tasks_and_requests(self, tasks: str) -> None:
        self.registry = None
        self.tasks_dict = {benchmark.task.full_name: benchmark.task for benchmark in self._benchmarks}
        self.documents_dict = {benchmark.task.full_name: benchmark.problems for benchmark in self._benchmarks}
        self.sampling_docs: dict[SamplingMethod, list[Doc]] = collections.defaultdict(list)
        for benchmark in self._benchmarks:
            self.sampling_docs[SamplingMethod.GENERATIVE] += benchmark.problems
        self.evaluation_tracker.task_config_logger.log(self.tasks_dict)


def run(model: EngineModel, benchmarks: Sequence[Benchmark]) -> dict[str, list[Judged]]:
    """Every problem of every benchmark, judged, in the order of the benchmark's problems."""
    with TemporaryDirectory() as folder:  # lighteval wants one, and writes only when asked to
        tracker = EvaluationTracker(output_dir=folder, save_details=False)
        pipeline = _Pipeline(benchmarks, model, tracker)
        pipeline.evaluate()
    details = tracker.details_logger.details
    return {
        benchmark.name: [
            Judged(d.doc.id, d.model_response.input, d.doc.get_golds()[0], d.model_response.text, d.metric[METRIC])
            for d in details[benchmark.task.full_name]
        ]
        for benchmark in benchmarks
    }
