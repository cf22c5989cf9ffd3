"""Send the problems of benchmarks to an engine, and judge its answers.

Answers are not cached between runs. lighteval caches them by the model's name, and an adapter that is trained again
keeps its name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from qerl_recipes.evaluate.request import Sampling
from qerl_recipes.evaluate.tasks import Benchmark, Doc, PromptManager
from qerl_recipes.recipe.generation import blindness, for_sampling_params, refused_by_vllm
from qerl_vllm_plugin.noise import seed_of


@dataclass(frozen=True)
class Judged:
    """Hold one problem with its gold answer and the policy's judged answers; those ``cut`` ended at the limit.

    ``room`` is how many tokens of ``max_model_length`` the prompt leaves.
    """

    problem: str
    prompt: str
    gold: str
    answers: list[str]
    right: list[bool]
    cut: list[bool]
    vote: bool
    share: float
    room: int


class _Prompt(NamedTuple):
    doc: Doc
    text: str
    ids: list[int]


def ask(
    llm: LLM, request: LoRARequest | None, benchmarks: Sequence[Benchmark], sampling: Sampling, label: str
) -> dict[str, list[Judged]]:
    """Answer all problems with the policy that the engine serves now; ``label`` names it in the progress bar."""
    length, tokenizer = llm.llm_engine.model_config.max_model_len, llm.get_tokenizer()
    prompts = {benchmark.name: _prompts(benchmark.problems, tokenizer, sampling) for benchmark in benchmarks}
    samples = [(p, i) for of_benchmark in prompts.values() for p in of_benchmark for i in range(p.doc.num_samples)]
    for prompt, _ in samples:
        if len(prompt.ids) >= length:
            raise ValueError(
                f"problem {prompt.doc.id} of {prompt.doc.task_name} has {len(prompt.ids)} tokens and max_model_length "
                f"is {length}: there is no room for an answer; raise max_model_length"
            )
    templated = uses_template(tokenizer, sampling)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt.ids} for prompt, _ in samples],
        [_parameters(prompt, i, sampling, length, templated) for prompt, i in samples],
        lora_request=request,
        use_tqdm=lambda *args, **options: tqdm(*args, **{**options, "desc": f"evaluating {label}", "leave": False}),
    )
    answers = iter([output.outputs[0] for output in outputs])
    return {
        benchmark.name: [
            _judged(benchmark, prompt, length, [next(answers) for _ in range(prompt.doc.num_samples)])
            for prompt in prompts[benchmark.name]
        ]
        for benchmark in benchmarks
    }


def check(tokenizer: PreTrainedTokenizerBase, sampling: Sampling) -> None:
    """Raise ValueError for sampling that vLLM rejects, and a chat template that is missing or hides the problem."""
    if uses_template(tokenizer, sampling):
        system = [{"role": "system", "content": sampling.system_prompt}] if sampling.system_prompt else []
        turns = [*system, {"role": "user", "content": ""}]
        reason = blindness(tokenizer, turns, sampling.chat_template_kwargs or {}, sampling.chat_template)
        if reason is not None:
            raise ValueError(reason)
    parameters = sampling.generation_kwargs or {}
    if (error := refused_by_vllm({"max_tokens": sampling.max_new_tokens, **parameters})) is not None:
        raise ValueError(f"generation_kwargs: vLLM takes no such SamplingParams: {error}")


def uses_template(tokenizer: PreTrainedTokenizerBase, sampling: Sampling) -> bool:
    """Return True if prompts are built with a chat template; raise ValueError for none, or options of none."""
    has_template = sampling.chat_template is not None or tokenizer.chat_template is not None
    if sampling.use_chat_template and not has_template:
        raise ValueError("use_chat_template was asked for, but this model's tokenizer has none; give --chat_template")
    is_used = has_template if sampling.use_chat_template is None else sampling.use_chat_template
    if sampling.chat_template_kwargs and not is_used:
        raise ValueError(f"chat_template_kwargs {sampling.chat_template_kwargs} would be ignored: no template is used")
    return is_used


def _prompts(docs: Sequence[Doc], tokenizer: PreTrainedTokenizerBase, sampling: Sampling) -> list[_Prompt]:
    """Return each problem as the text and the tokens that the engine gets."""
    manager, templated = PromptManager(system_prompt=sampling.system_prompt or None), uses_template(tokenizer, sampling)
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    options |= {"chat_template": sampling.chat_template, **(sampling.chat_template_kwargs or {})}
    prompts = []
    for doc in docs:
        if templated:  # a template writes the first token itself
            text = tokenizer.apply_chat_template(manager.prepare_prompt_api(doc), **options)
        else:
            text = manager.prepare_prompt(doc)
        prompts.append(_Prompt(doc, text, tokenizer(text, add_special_tokens=not templated)["input_ids"]))
    return prompts


def _parameters(prompt: _Prompt, sample: int, sampling: Sampling, length: int, templated: bool) -> SamplingParams:
    doc, room = prompt.doc, length - len(prompt.ids)
    seed, others = sampling.drawn_with, for_sampling_params(sampling.generation_kwargs or {})
    # With a chat template the model ends its turn itself, and a stop word could cut its reasoning.
    others.setdefault("stop", None if templated else list(doc.stop_sequences or []) or None)
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=min(sampling.max_new_tokens or doc.generation_size or room, room),
        # Base and adapter get the same seed; each sample of each problem gets another one.
        seed=None if seed is None else seed_of(seed, doc.task_name, doc.id, sample),
        **others,
    )


def _judged(benchmark: Benchmark, prompt: _Prompt, length: int, outputs: Sequence[Any]) -> Judged:
    texts = [output.text for output in outputs]
    right = [benchmark.is_right(prompt.doc, text) for text in texts]
    elected = benchmark.majority(texts) if len(texts) > 1 else 0
    return Judged(
        problem=prompt.doc.id,
        prompt=prompt.text,
        gold=prompt.doc.get_golds()[0],
        answers=texts,
        right=right,
        cut=[output.finish_reason == "length" for output in outputs],
        vote=elected is not None and right[elected],
        share=sum(right) / len(right),
        room=length - len(prompt.ids),
    )
