"""The one place that imports lighteval.

lighteval 0.13 turns torch's gradients off for the whole process when it is imported; training in the same process would
fail. Here they are left as they were.
"""

import importlib
from types import ModuleType

import torch

with torch.set_grad_enabled(torch.is_grad_enabled()):  # the mode before comes back at the end of the block
    from lighteval.logging.evaluation_tracker import EvaluationTracker
    from lighteval.metrics.metrics import Metrics
    from lighteval.metrics.metrics_sample import PassAtK, SampleLevelComputation
    from lighteval.metrics.utils.metric_utils import SampleLevelMetric
    from lighteval.models.abstract_model import LightevalModel, ModelConfig
    from lighteval.models.model_input import GenerationParameters
    from lighteval.models.model_output import ModelResponse
    from lighteval.pipeline import ParallelismManager, Pipeline, PipelineParameters
    from lighteval.tasks.lighteval_task import LightevalTask, LightevalTaskConfig
    from lighteval.tasks.prompt_manager import PromptManager
    from lighteval.tasks.requests import Doc, SamplingMethod

__all__ = [
    "Doc",
    "EvaluationTracker",
    "GenerationParameters",
    "LightevalModel",
    "LightevalTask",
    "LightevalTaskConfig",
    "Metrics",
    "ModelConfig",
    "ModelResponse",
    "ParallelismManager",
    "PassAtK",
    "Pipeline",
    "PipelineParameters",
    "PromptManager",
    "SampleLevelComputation",
    "SampleLevelMetric",
    "SamplingMethod",
    "task_module",
]


def task_module(name: str) -> ModuleType:
    """lighteval's module of one task; its registry would import all of them, and one downloads a file."""
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        return importlib.import_module(f"lighteval.tasks.tasks.{name}")
