"""``qerl calibration-texts``: make calibration texts for GPTQ from the model's own answers.

They serve where nothing better is at hand. GPTQ then rounds the weights for the inputs that training will give them:
the recipe's prompts, and the BF16 model's answers to them.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qerl_recipes.convert.calibration_file import SAMPLES
from qerl_recipes.evaluate.run import close, start
from qerl_recipes.evaluate.settled import EngineSettings
from qerl_recipes.files.base_model import local_folder
from qerl_recipes.files.whole_folder import write_text
from qerl_recipes.hooks import unknown_names
from qerl_recipes.recipe import checks
from qerl_recipes.recipe.configs import SERVER, GRPOConfig, ModelConfig, ScriptArguments, parse
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.recipe.generation import for_sampling_params, sampling_parameters
from qerl_recipes.rollout.sampling import completion_seed
from qerl_recipes.tasks import prompts
from qerl_recipes.train.base_fits import refuse_long_prompts
from qerl_vllm_plugin.weights.checkpoint import inspect_folder

if TYPE_CHECKING:
    from vllm import LLM


def write_own_answers(
    recipe: Sequence[str], output: Path, samples: int = SAMPLES, *, gpu_memory_utilization: float = 0.9
) -> str:
    """Write a model's answers to the first ``samples`` training problems of a recipe; return a summary in one line.

    ``recipe`` is ``["--config", "recipe.yaml", "--key", "value", ...]``. The model runs without an adapter, in BF16 or
    the recipe's dtype, whatever ``quantization`` the recipe sets. It samples as the rollouts do. The engine takes
    ``gpu_memory_utilization`` of the GPU, which it shares with no trainer.

    ``output`` gets a JSON line for each problem: ``text`` is prompt and answer as the model sees them, ``input_ids``
    are their tokens.

    Raise ValueError or OSError before the engine starts if

    * ``output`` exists, or its folder does not,
    * the recipe sets a key that this command does not support,
    * the model has NVFP4 weights already,
    * there are fewer problems than ``samples``, or
    * a prompt leaves no room for its completion.
    """
    if samples < 1:
        raise ValueError(f"--samples is {samples}; it must be at least 1")
    if output.exists():
        raise FileExistsError(f"{output} exists; name another file, or remove it")
    if not output.absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {output.absolute().parent} for {output.name}; make it first")
    script, training, model = parse(list(recipe))
    problems = [*checks.problems(script, training, model), *unknown_names(training)]
    if problems := [*problems, *_unsupported_keys(script, training, model)]:
        raise ConfigError("this recipe cannot be asked:\n" + "\n".join(f"  - {problem}" for problem in problems))
    folder = local_folder(str(model.model_name_or_path), model.model_revision)
    if inspect_folder(folder, weight_only=True).scheme is not None:
        raise ValueError(f"{folder} has NVFP4 weights already; name the BF16 model as --model_name_or_path")
    tokenizer = prompts.tokenizer(folder, training)
    rows, _ = prompts.load(script, tokenizer, training.chat_template_kwargs)
    if len(rows) < samples:
        raise ValueError(f"--samples is {samples}, and the recipe has {len(rows)} training problems; lower it")
    rows = rows.select(range(samples))
    refuse_long_prompts({"training": rows}, tokenizer, script, training, folder)
    prompt_ids = [prompts.ids(prompt, tokenizer, training.chat_template_kwargs or {}) for prompt in rows["prompt"]]
    engine = EngineSettings(
        folder=folder,
        quantization="bf16",
        rank=None,
        max_model_length=training.vllm_max_model_length,
        tensor_parallel_size=training.vllm_tensor_parallel_size,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_memory_bytes=None,
        dtype=model.dtype or "bfloat16",
    )
    llm = start(engine)
    try:
        completion_ids, cut = _completions(llm, prompt_ids, training)
    finally:
        close(llm)
    sequences = [[*prompt, *answer] for prompt, answer in zip(prompt_ids, completion_ids, strict=True)]
    texts = tokenizer.batch_decode(sequences, clean_up_tokenization_spaces=False)
    lines = [{"text": text, "input_ids": ids} for text, ids in zip(texts, sequences, strict=True)]
    write_text(output, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    total = sum(map(len, sequences))
    return f"{output}: {samples} problems with an answer each, {total} tokens; {cut} answers end at the limit of length"


def _unsupported_keys(script: ScriptArguments, training: GRPOConfig, model: ModelConfig) -> Iterator[str]:
    """Yield a message for each key of the recipe that training supports and this command does not."""
    if not model.model_name_or_path:
        yield "model_name_or_path is missing; name the BF16 model that is to be quantized"
    if script.adapter_name_or_path is not None:
        yield "adapter_name_or_path: the model answers without an adapter; leave it out"
    if training.rollout_engine != "vllm":
        yield f"rollout_engine: {training.rollout_engine}: vLLM answers here; leave it out"
    if training.vllm_mode == SERVER:
        yield "vllm_mode: server: an engine of this process answers; use vllm_mode: colocate"


def _completions(llm: "LLM", prompt_ids: list[list[int]], training: GRPOConfig) -> tuple[list[list[int]], int]:
    """Return each prompt's completion, as token ids with the end token, and how many were cut at the length limit."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    options = {**for_sampling_params(sampling_parameters(training)), "logprobs": None}
    assert training.seed is not None
    seeds = [completion_seed(training.seed, "calibration", 0, 0, index, 0) for index in range(len(prompt_ids))]
    requests = [TokensPrompt(prompt_token_ids=ids) for ids in prompt_ids]
    outputs = llm.generate(requests, [SamplingParams(**options, seed=seed) for seed in seeds])
    completions = [request.outputs[0] for request in outputs]
    return [list(one.token_ids) for one in completions], sum(one.finish_reason == "length" for one in completions)
