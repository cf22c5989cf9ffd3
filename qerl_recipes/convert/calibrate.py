"""Read the texts on which GPTQ and AWQ are calibrated, and make some of a model's own answers.

The texts are JSON lines with a key "text" and, if known, "input_ids". With own answers GPTQ rounds the weights for the
inputs that training will give them.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_recipes.evaluate.run import EngineSettings, close, start
from qerl_recipes.files.base_model import local_folder, read_config
from qerl_recipes.files.json_files import numbered, read_lines
from qerl_recipes.files.whole_folder import write_text
from qerl_recipes.hooks import collect, unknown_names
from qerl_recipes.model.families import most_positions
from qerl_recipes.recipe import checks
from qerl_recipes.recipe.configs import SERVER, GRPOConfig, ModelConfig, ScriptArguments, parse
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.recipe.generation import for_sampling_params, sampling_parameters
from qerl_recipes.rollout.sampling import completion_seed
from qerl_recipes.tasks import prompts
from qerl_vllm_plugin.weights.checkpoint import inspect_folder

if TYPE_CHECKING:
    from vllm import LLM


SAMPLES = 256  # texts, as in the calibration set of the QeRL paper
LENGTH = 2048  # most tokens of a text, as in the paper


def write_own_answers(
    recipe: Sequence[str], output: Path, samples: int = SAMPLES, *, gpu_memory_utilization: float = 0.9
) -> str:
    """Write a model's answers to the first ``samples`` training problems of a recipe; return a summary in one line.

    The model samples as the rollouts do, without an adapter and in the recipe's dtype; the engine shares the GPU with
    no trainer. ``output`` gets a JSON line for each problem: ``text``, prompt and answer as the model sees them, and
    its ``input_ids``. Raise ValueError or OSError before the engine starts for what cannot be asked or written.
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
    data = prompts.read(script, collect("qerl_datasets"))
    options = training.chat_template_kwargs or {}
    rows, _ = prompts.load(script, tokenizer, data, options)
    if len(rows) < samples:
        raise ValueError(f"--samples is {samples}, and the recipe has {len(rows)} training problems; lower it")
    rows = rows.select(range(samples))
    positions = most_positions(read_config(folder))
    prompts.refuse_long_prompts({"training": rows}, tokenizer, script, training, positions, options)
    prompt_ids = [prompts.ids(prompt, tokenizer, options) for prompt in rows["prompt"]]
    engine = EngineSettings(
        folder,
        "bf16",
        rank=None,
        dtype=model.dtype or "bfloat16",
        max_model_length=training.vllm_max_model_length,
        tensor_parallel_size=training.vllm_tensor_parallel_size,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_memory_bytes=training.vllm_kv_cache_memory_bytes,
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
    if script.tools or script.environments or script.rollout_func:
        yield "tools, environments, rollout_func: the model answers in one turn and alone; leave them out"
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


def read(path: Path, samples: int | None, tokenizer: Any) -> tuple[list[list[int]], dict[str, int]]:
    """Read the first ``samples`` texts (None: up to 256) -> (rows of token ids, counts).

    A line's "input_ids" are its tokens, or else ``tokenizer``'s. Empty texts are dropped, others cut to 2048 tokens.
    Raise ValueError, naming file and line, for a line without a text, or with "input_ids" of another, and for too few.
    """
    total = sum(1 for _ in numbered(path))
    if samples is not None and samples > total:
        raise ValueError(f"calibration_samples is {samples}, and {path} has {total} texts; lower it")
    lines = islice(read_lines(path, 'a JSON object with a text under the key "text"'), samples or SAMPLES)
    token_rows = [_tokens(record, place, tokenizer) for place, record in lines]
    if not any(token_rows):
        raise ValueError(f'{path}: holds no text; write a JSON object with a key "text" in each line')
    rows = [row[:LENGTH] for row in token_rows if row]
    counts = {"texts": len(rows), "of": total, "tokens": sum(map(len, rows)), "longest": LENGTH}
    return rows, {**counts, "cut": sum(len(row) > LENGTH for row in token_rows)}


def _tokens(record: dict[str, Any], place: str, tokenizer: Any) -> list[int]:
    """Return the tokens of a line; raise ValueError if it has no text, or "input_ids" of another text or model."""
    text, ids = record.get("text"), record.get("input_ids")
    if not isinstance(text, str):
        raise ValueError(f'{place}: each line must have a text under the key "text"; it has {text!r}')
    if "input_ids" not in record:
        return list(tokenizer(text)["input_ids"])
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise ValueError(f"{place}: input_ids must be a list of whole numbers; remove the key, or give them")
    if tokenizer.decode(ids, clean_up_tokenization_spaces=False) != text:
        raise ValueError(f"{place}: input_ids are not the tokens of the text in this model; make them anew")
    return ids
