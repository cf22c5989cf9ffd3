"""Asking an engine the problems of some benchmarks, and judging what it answers.

No answer is kept from one run for the next, as lighteval would do by the model's name: an adapter that is trained again
keeps its name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest

from qerl_recipes.evaluate.request import Sampling
from qerl_recipes.evaluate.tasks import Benchmark, Doc, PromptManager
from qerl_recipes.recipe.chat_template import blindness
from qerl_recipes.rollout.sampling import for_sampling_params, wrong_bias
from qerl_vllm_plugin.noise import seed_of


@dataclass(frozen=True)
class Judged:
    """One problem: what was asked, the answers, which of them are right, and which ended at the limit of length.

    ``share`` of the answers is right; ``vote`` says whether the one that most agree on is.
    """

    problem: str
    prompt: str
    gold: str
    answers: list[str]
    right: list[bool]
    cut: list[bool]
    vote: bool
    share: float


@dataclass(frozen=True)
class _Prompt:
    doc: Doc
    text: str
    ids: list[int]


def ask(
    llm: LLM, request: LoRARequest | None, benchmarks: Sequence[Benchmark], sampling: Sampling, label: str
) -> dict[str, list[Judged]]:
    """Every problem of every benchmark, answered by the policy that the engine serves now, judged, in their order.

    ``label`` names the policy in the progress bar. Raises ValueError, before anything is generated, for a prompt that
    leaves no room for an answer and for a chat template that there is none of.
    """
    length = llm.llm_engine.model_config.max_model_len
    prompts = {benchmark.name: _prompts(benchmark.problems, llm.get_tokenizer(), sampling) for benchmark in benchmarks}
    for prompt in (prompt for asked in prompts.values() for prompt in asked):
        if len(prompt.ids) >= length:
            raise ValueError(
                f"problem {prompt.doc.id} of {prompt.doc.task_name} has {len(prompt.ids)} tokens and max_model_length "
                f"is {length}: there is no room for an answer; raise max_model_length"
            )
    templated = uses_template(llm.get_tokenizer(), sampling)
    samples = [(p, i) for asked in prompts.values() for p in asked for i in range(p.doc.num_samples)]
    outputs = llm.generate(
        [{"prompt_token_ids": prompt.ids} for prompt, _ in samples],
        [_parameters(prompt, i, sampling, length, templated) for prompt, i in samples],
        lora_request=request,
        use_tqdm=lambda *args, **options: tqdm(*args, **{**options, "desc": f"evaluating {label}", "leave": False}),
    )
    answers = iter([output.outputs[0] for output in outputs])
    return {
        benchmark.name: [
            _judged(benchmark, prompt, [next(answers) for _ in range(prompt.doc.num_samples)])
            for prompt in prompts[benchmark.name]
        ]
        for benchmark in benchmarks
    }


def check(tokenizer: PreTrainedTokenizerBase, sampling: Sampling) -> None:
    """Raise ValueError for a chat template that is not there or leaves the problem out, and for sampling parameters
    that vLLM does not take."""
    if uses_template(tokenizer, sampling):
        system = [{"role": "system", "content": sampling.system_prompt}] if sampling.system_prompt else []
        turns = [*system, {"role": "user", "content": ""}]
        reason = blindness(tokenizer, turns, sampling.chat_template_kwargs or {}, sampling.chat_template)
        if reason is not None:
            raise ValueError(reason)
    given = sampling.generation_kwargs or {}
    if (wrong := wrong_bias(given)) is not None:
        raise ValueError(f"generation_kwargs: {wrong}")
    try:
        SamplingParams(max_tokens=sampling.max_new_tokens, **for_sampling_params(given))
    except (TypeError, ValueError, VLLMValidationError) as error:
        raise ValueError(f"generation_kwargs: vLLM takes no such SamplingParams: {error}") from error


def uses_template(tokenizer: PreTrainedTokenizerBase, sampling: Sampling) -> bool:
    """Whether problems are asked through a chat template. Raises ValueError for one that is asked for and not there."""
    there = sampling.chat_template is not None or tokenizer.chat_template is not None
    if sampling.use_chat_template and not there:
        raise ValueError("use_chat_template was asked for, but this model's tokenizer has none; give --chat_template")
    used = there if sampling.use_chat_template is None else sampling.use_chat_template
    if sampling.chat_template_kwargs and not used:
        raise ValueError(
            f"chat_template_kwargs {sampling.chat_template_kwargs} would be ignored: no chat template is used"
        )
    return used


def _prompts(docs: Sequence[Doc], tokenizer: PreTrainedTokenizerBase, sampling: Sampling) -> list[_Prompt]:
    manager = PromptManager(system_prompt=sampling.system_prompt or None)
    if not uses_template(tokenizer, sampling):
        texts = [manager.prepare_prompt(doc) for doc in docs]
        return [_Prompt(doc, text, tokenizer(text)["input_ids"]) for doc, text in zip(docs, texts, strict=True)]
    options: Mapping[str, Any] = sampling.chat_template_kwargs or {}
    texts = [
        tokenizer.apply_chat_template(
            manager.prepare_prompt_api(doc),
            chat_template=sampling.chat_template,
            tokenize=False,
            add_generation_prompt=True,
            **options,
        )
        for doc in docs
    ]
    return [
        _Prompt(doc, text, tokenizer(text, add_special_tokens=False)["input_ids"])
        for doc, text in zip(docs, texts, strict=True)
    ]


def _parameters(prompt: _Prompt, sample: int, sampling: Sampling, length: int, templated: bool) -> SamplingParams:
    doc, room = prompt.doc, length - len(prompt.ids)
    seed, others = sampling.drawn_with, for_sampling_params(sampling.generation_kwargs or {})
    # with a chat template the model ends its turn itself, and a stop word could cut its reasoning
    others.setdefault("stop", None if templated else list(doc.stop_sequences or []) or None)
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=min(sampling.max_new_tokens or doc.generation_size or room, room),
        # the same for base and adapter, different for every sample of every problem
        seed=None if seed is None else seed_of(seed, doc.task_name, doc.id, sample),
        **others,
    )


def _judged(benchmark: Benchmark, prompt: _Prompt, outputs: Sequence[Any]) -> Judged:
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
    )
