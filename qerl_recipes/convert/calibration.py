"""``qerl calibration-texts``: what GPTQ is calibrated on where nothing better is at hand, the model's own answers.

The weights are rounded for the inputs that they will see: the recipe's training problems, asked as the training asks
them, and what the model in BF16 answers to them.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_recipes.evaluate.run import close
from qerl_recipes.files.base_model import local_folder
from qerl_recipes.files.whole_folder import write_text
from qerl_recipes.memory.model_size import read_config
from qerl_recipes.recipe.configs import GRPOConfig, parse
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.rollout.arms import engine_on_cpu, engine_options
from qerl_recipes.rollout.sampling import completion_seed, sampling_parameters
from qerl_recipes.tasks import prompts
from qerl_vllm_plugin.checkpoint import inspect_folder

if TYPE_CHECKING:
    from vllm import LLM

SAMPLES = 256  # texts, as in the paper and in `qerl quantize`


def write_own_answers(recipe: Sequence[str], output: Path, samples: int = SAMPLES) -> str:
    """Let the model of a recipe answer its first ``samples`` training problems -> what was written, as one line.

    ``recipe``: ``["--config", "recipe.yaml", "--key", "value", ...]``. The model is taken in BF16 (or the recipe's
    dtype), whatever the arm, and samples as the rollouts do. ``output`` has a JSON line for each problem: ``text``,
    prompt and answer as the model sees them, and ``input_ids``, their tokens. Raises ValueError, before the engine
    starts, where ``output`` exists, for a model that is NVFP4 already and for fewer problems than ``samples``.
    """
    if samples < 1:
        raise ValueError(f"--samples is {samples}; it must be at least 1")
    if output.exists():
        raise FileExistsError(f"{output} exists; name another file, or remove it")
    script, training, model = parse(list(recipe))
    if not model.model_name_or_path:
        raise ConfigError("model_name_or_path is missing; name the BF16 model that is to be quantized")
    folder = local_folder(model.model_name_or_path, model.model_revision)
    if inspect_folder(folder, weight_only=True).scheme is not None:
        raise ValueError(f"{folder} has NVFP4 weights already; name the BF16 model as --model_name_or_path")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if training.chat_template is not None:
        tokenizer.chat_template = training.chat_template
    problems, _ = prompts.load(script, tokenizer, training.chat_template_kwargs)
    if len(problems) < samples:
        raise ValueError(f"--samples is {samples}, and the recipe has {len(problems)} training problems; lower it")
    asked = [
        prompts.ids(prompt, tokenizer, training.chat_template_kwargs or {}) for prompt in problems[:samples]["prompt"]
    ]
    llm = _engine(folder, training, model.dtype or "bfloat16")
    try:
        answered, cut = _answers(llm, asked, training)
    finally:
        close(llm)
    rows = [[*prompt, *answer] for prompt, answer in zip(asked, answered, strict=True)]
    texts = tokenizer.batch_decode(rows, clean_up_tokenization_spaces=False)
    lines = [{"text": text, "input_ids": ids} for text, ids in zip(texts, rows, strict=True)]
    write_text(output, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    total = sum(len(ids) for ids in rows)
    return f"{output}: {samples} problems with an answer each, {total} tokens; {cut} answers end at the limit of length"


def _engine(folder: Path, training: GRPOConfig, dtype: str) -> "LLM":
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the same batches, and so the same bits, in each run
    from vllm import LLM
    from vllm.platforms import current_platform

    return LLM(
        model=str(folder),
        dtype=dtype,
        max_model_len=training.vllm_max_model_length,
        gpu_memory_utilization=training.vllm_gpu_memory_utilization,
        kv_cache_memory_bytes=training.vllm_kv_cache_memory_bytes,
        disable_log_stats=True,
        seed=0,
        **({} if current_platform.is_cuda() else engine_on_cpu(str(folder))),
        **engine_options("bf16", None, read_config(folder)),
    )


def _answers(llm: "LLM", asked: list[list[int]], training: GRPOConfig) -> tuple[list[list[int]], int]:
    """An answer to each prompt, as token ids with what ends them, and how many end at the limit of length."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import StructuredOutputsParams

    options: dict[str, Any] = {**sampling_parameters(training), "logprobs": None}
    if isinstance(options.get("structured_outputs"), dict):
        options["structured_outputs"] = StructuredOutputsParams(**options["structured_outputs"])
    assert training.seed is not None
    seeds = [completion_seed(training.seed, "calibration", 0, 0, place, 0) for place in range(len(asked))]
    requests = [TokensPrompt(prompt_token_ids=ids) for ids in asked]
    drawn = llm.generate(requests, [SamplingParams(**options, seed=seed) for seed in seeds])
    found = [request.outputs[0] for request in drawn]
    return [list(one.token_ids) for one in found], sum(one.finish_reason == "length" for one in found)
