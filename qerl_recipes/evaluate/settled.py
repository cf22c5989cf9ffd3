"""Defines the options of an evaluation, and resolves or refuses them before vLLM is imported."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from qerl_recipes.evaluate.request import Sampling, json_object
from qerl_recipes.evaluate.request import check as check_tasks
from qerl_recipes.files import run_state
from qerl_recipes.files.adapter import AdapterFolder, engine_rank, open_adapter
from qerl_recipes.files.base_model import local_folder
from qerl_recipes.recipe.generation import template_text
from qerl_recipes.rollout.arms import ENGINE_QUANTIZATION
from qerl_vllm_plugin.weights.checkpoint import inspect_folder


class Evaluation(BaseModel):
    """The options of one evaluation, of ``base`` alone and, if given, with ``adapter``.

    ``base`` is a checkpoint folder or a model id. ``adapter`` is a folder saved by PEFT or ``qerl train``, or the
    output folder of a run. ``tasks`` are task names of the module ``request``. ``quantization`` is the format of the
    base weights: ``qerl_nvfp4`` (a BF16 checkpoint is quantized while it loads), ``bf16`` or ``nf4``. ``dtype`` is
    bfloat16, float16 or float32. ``num_samples`` is the number of answers per problem. Several samples, ``top_p`` below
    1 and a ``seed`` (None is 0) need a temperature above 0. ``max_samples`` limits the problems per task.
    ``num_fewshot`` is the number of solved problems shown first. Lengths are in tokens. ``kv_cache_memory_bytes`` is
    vLLM's option, for several engines on one GPU. ``adapter_only`` skips the base, if it was judged before. ``quiet``
    prints only warnings.

    None takes the setting from the adapter's training, if its folder records one. This applies to ``quantization``,
    ``dtype``, ``system_prompt``, ``chat_template``, ``chat_template_kwargs``, ``max_new_tokens`` and
    ``generation_kwargs``. The last are SamplingParams of vLLM, such as stop strings or a regex; {} sets none. Base and
    adapter get the same prompts. Without an adapter the defaults are qerl_nvfp4, bfloat16, the tokenizer's template, no
    system prompt and each task's own length (GSM8K: 1024 tokens).

    Raises ValueError for an unknown option and for a value of another type.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    base: str
    adapter: str | Path | None
    tasks: list[str]
    output_dir: Path
    quantization: str | None = None
    dtype: str | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int | None = None
    max_model_length: int | None = None
    tensor_parallel_size: int = 1
    num_samples: int = 1
    max_samples: int | None = None
    num_fewshot: int = 0
    seed: int | None = None
    use_chat_template: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: str | Mapping[str, Any] | None = None
    system_prompt: str | None = None
    generation_kwargs: str | Mapping[str, Any] | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    adapter_only: bool = False
    quiet: bool = False

    def sampling(self) -> Sampling:
        """Return the checked sampling settings.

        Raises ValueError for an unknown task, for options that are not JSON objects, and as ``Sampling.check`` does.
        """
        check_tasks(self.tasks, self.num_fewshot)
        sampling = Sampling(
            self.temperature,
            self.top_p,
            self.max_new_tokens,
            self.seed,
            self.use_chat_template,
            self.system_prompt,
            None if self.chat_template is None else template_text(self.chat_template),
            json_object("chat_template_kwargs", self.chat_template_kwargs, '{"enable_thinking": false}'),
            json_object("generation_kwargs", self.generation_kwargs, '{"stop": ["</answer>"]}'),
        )
        sampling.check(self.num_samples)
        if self.max_samples is not None and self.max_samples < 1:
            raise ValueError(f"max_samples is {self.max_samples}; it must be at least 1")
        return sampling


@dataclass(frozen=True)
class EngineSettings:
    """The settings an engine is started with; evaluations with equal settings can share one engine."""

    folder: Path
    quantization: str
    rank: int | None
    max_model_length: int | None
    tensor_parallel_size: int
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    dtype: str


@dataclass(frozen=True)
class Settled:
    """An evaluation whose open choices are all resolved.

    ``saved`` is the adapter, or None. ``as_in_training`` lists the sampling choices that the adapter's training
    settled.
    """

    asked: Evaluation
    sampling: Sampling
    saved: AdapterFolder | None
    base_hash: str
    as_in_training: list[str]
    engine: EngineSettings


def settle(asked: Evaluation) -> Settled:
    """Resolve the open choices of an evaluation, before vLLM is imported.

    Raises ValueError for an unknown task, and for numbers out of range or without effect. The same holds for a missing
    or damaged checkpoint or adapter, and if lighteval or vLLM is not installed. An adapter is also refused if it is not
    finite, belongs to another base, or cannot be served.
    """
    for package in ("lighteval", "vllm"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"qerl evaluate needs {package}, which is not installed: pip install 'qerl-vllm[eval]'")
    sampling = asked.sampling()
    if asked.adapter_only and asked.adapter is None:
        raise ValueError("adapter_only leaves the base out, and there is no adapter to judge; name one with --adapter")
    saved = None if asked.adapter is None else open_adapter(asked.adapter)
    as_in_training: list[str] = []
    if saved is not None:
        sampling, as_in_training = sampling.as_in_training(saved)
    arm = asked.quantization or (saved.quantization if saved is not None else None) or "qerl_nvfp4"
    dtype = asked.dtype or (saved.recipe.get("dtype") if saved is not None else None) or "bfloat16"
    folder = _check_base(asked.base, arm, dtype, saved)
    base_hash = run_state.base_hash(folder)
    rank = None
    if saved is not None:
        saved.check_base(base_hash)
        rank = engine_rank(saved.rank)
        saved.check_plain()
        saved.check_tensors()
    engine = EngineSettings(
        folder,
        arm,
        rank,
        asked.max_model_length,
        asked.tensor_parallel_size,
        asked.gpu_memory_utilization,
        asked.kv_cache_memory_bytes,
        dtype,
    )
    return Settled(asked, sampling, saved, base_hash, as_in_training, engine)


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
