"""lighteval's view of one policy on a vLLM engine.

lighteval keeps answers on disk by model name, and an adapter that is trained again keeps its name. There is no such
store here: every answer is generated.
"""

import hashlib
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from qerl_recipes.evaluation_request import Sampling
from qerl_recipes.lighteval_import import (
    Doc,
    GenerationParameters,
    LightevalModel,
    ModelConfig,
    ModelResponse,
    PromptManager,
)


class NoAnswerCache:
    """What lighteval's pipeline expects in place of its answer cache; it remembers nothing."""

    def _init_registry(self, registry: Any) -> None:
        return


class EngineModel(LightevalModel):
    """Answers with the policy that the engine serves at the moment of the call; ``label`` names it in progress bars."""

    def __init__(self, llm: LLM, request: LoRARequest | None, sampling: Sampling, label: str) -> None:
        self._llm, self._request, self._sampling, self._label = llm, request, sampling, label
        self._tokenizer = llm.get_tokenizer()
        chat = sampling.use_chat_template
        self.use_chat_template = self._tokenizer.chat_template is not None if chat is None else chat
        if self.use_chat_template and self._tokenizer.chat_template is None:
            raise ValueError("use_chat_template was asked for, but this model's tokenizer has none")
        self.prompt_manager = PromptManager(self.use_chat_template, self._tokenizer, sampling.system_prompt)
        self.config = ModelConfig(
            model_name=label,
            generation_parameters=GenerationParameters(
                temperature=sampling.temperature, top_p=sampling.top_p, max_new_tokens=sampling.max_new_tokens
            ),
            system_prompt=sampling.system_prompt,
        )
        self._cache = NoAnswerCache()

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    @property
    def add_special_tokens(self) -> bool:
        return not self.use_chat_template

    @property
    def max_length(self) -> int:
        return self._llm.llm_engine.model_config.max_model_len

    def greedy_until(self, docs: list[Doc]) -> list[ModelResponse]:
        """``doc.num_samples`` answers to each problem; each answer has a seed of its own.

        Raises ValueError, before anything is generated, for a prompt that leaves no room for an answer.
        """
        texts = [self.prompt_manager.prepare_prompt(doc) for doc in docs]
        ids = [self._tokenizer(text, add_special_tokens=self.add_special_tokens)["input_ids"] for text in texts]
        for doc, prompt in zip(docs, ids, strict=True):
            if len(prompt) >= self.max_length:
                raise ValueError(
                    f"problem {doc.id} of {doc.task_name} has {len(prompt)} tokens and max_model_length is "
                    f"{self.max_length}: there is no room for an answer; raise max_model_length"
                )
        requests, parameters = [], []
        for doc, prompt in zip(docs, ids, strict=True):
            for sample in range(doc.num_samples):
                requests.append({"prompt_token_ids": prompt})
                parameters.append(self._parameters(doc, len(prompt), sample))
        outputs = self._llm.generate(
            requests,
            parameters,
            lora_request=self._request,
            use_tqdm=self._bar,
        )
        answers = iter([output.outputs[0] for output in outputs])
        responses = []
        for doc, text, prompt in zip(docs, texts, ids, strict=True):
            own = [next(answers) for _ in range(doc.num_samples)]
            responses.append(
                ModelResponse(
                    input=text,
                    input_tokens=prompt,
                    text=[answer.text for answer in own],
                    output_tokens=[list(answer.token_ids) for answer in own],
                )
            )
        return responses

    def loglikelihood(self, docs: list[Doc]) -> list[ModelResponse]:
        raise ValueError("only tasks that generate an answer are supported, not those that compare likelihoods")

    def loglikelihood_rolling(self, docs: list[Doc]) -> list[ModelResponse]:
        raise ValueError("only tasks that generate an answer are supported, not perplexity")

    def _bar(self, *args: Any, **options: Any) -> tqdm:
        """vLLM's progress bar, named after what is evaluated and gone when it is done."""
        return tqdm(*args, **{**options, "desc": f"evaluating {self._label}", "leave": False})

    def _parameters(self, doc: Doc, prompt_length: int, sample: int) -> SamplingParams:
        sampling, room = self._sampling, self.max_length - prompt_length
        greedy = sampling.temperature == 0
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=1.0 if greedy else sampling.top_p,
            max_tokens=min(sampling.max_new_tokens or doc.generation_size or room, room),
            # with a chat template the model ends its turn itself, and a stop word could cut its reasoning
            stop=None if self.use_chat_template else list(doc.stop_sequences or []) or None,
            seed=None if greedy else answer_seed(sampling.seed, doc.task_name, doc.id, sample),
        )


def answer_seed(seed: int, task: str, problem: str, sample: int) -> int:
    """The seed of one answer: the same for base and adapter, different for every sample of every problem."""
    key = f"{seed}:{task}:{problem}:{sample}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1
