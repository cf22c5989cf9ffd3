"""Give every rollout engine the same seeds and sampling parameters, in the trainer's process or on a server."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from qerl_vllm_plugin.noise import seed_of

if TYPE_CHECKING:  # it imports TRL, which an evaluation does not need
    from qerl_recipes.recipe.configs import GRPOConfig

MOST_BIAS = 100  # vLLM's limit: its server clips a larger bias to this
SMALLEST_TEMPERATURE = 0.01  # vLLM's limit: it raises a smaller temperature to this one, and samples greedily at 0


def completion_seed(run_seed: int, phase: str, rollout: int, call: int, prompt: int, sample: int) -> int:
    """Return the seed of one completion: different for each, and the same in a resumed run.

    ``phase`` is ``train``, ``evaluation`` or ``calibration``. ``call`` counts the batches of this rollout, since
    dynamic sampling draws several. ``prompt`` is the prompt's index in its batch over all ranks, and ``sample`` is the
    completion's index among those of its prompt.
    """
    return seed_of(run_seed, phase, rollout, call, prompt, sample)


class Seeds:
    """Draw the seeds of the rollout or evaluation that is open."""

    def __init__(self, run_seed: int) -> None:
        self._run_seed = run_seed
        self.open("train", 0)

    def open(self, phase: str, rollout: int) -> None:
        """Start the seeds of this rollout anew. An evaluation is always rollout 0."""
        self._phase, self._rollout, self._call = phase, rollout, 0

    def draw(self, first: int, count: int, num_generations: int) -> list[int]:
        """Return this process's seeds of the next batch: its ``count`` completions start at index ``first``."""
        key = (self._run_seed, self._phase, self._rollout, self._call)
        self._call += 1
        places = range(first, first + count)
        return [completion_seed(*key, place // num_generations, place % num_generations) for place in places]


def sampling_parameters(training: "GRPOConfig") -> dict[str, Any]:
    """Return the recipe's sampling parameters by vLLM's names, without a seed; they request log-probabilities."""
    parameters: dict[str, Any] = {
        "temperature": training.temperature,
        "top_p": training.top_p,
        "top_k": training.top_k,
        "min_p": training.min_p or 0.0,
        "repetition_penalty": training.repetition_penalty,
        "max_tokens": training.max_completion_length,
        "logprobs": 0,
        **(training.generation_kwargs or {}),
    }
    if training.vllm_structured_outputs_regex is not None:
        parameters["structured_outputs"] = {"regex": training.vllm_structured_outputs_regex}
    return parameters


def for_sampling_params(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Convert JSON parameters to arguments of ``vllm.SamplingParams``.

    Structured outputs become an object, and the tokens of ``logit_bias`` become numbers. A request to a server carries
    the parameters as JSON.
    """
    from vllm.sampling_params import StructuredOutputsParams

    converted = dict(parameters)
    if isinstance(converted.get("structured_outputs"), dict):
        converted["structured_outputs"] = StructuredOutputsParams(**converted["structured_outputs"])
    if converted.get("logit_bias"):
        converted["logit_bias"] = {int(token): bias for token, bias in converted["logit_bias"].items()}
    return converted


def wrong_bias(parameters: Mapping[str, Any]) -> str | None:
    """Say what is wrong with ``logit_bias`` in sampling parameters and how to mend it; return None if nothing is."""
    bias = parameters.get("logit_bias")
    if bias is None:
        return None
    way_out = f'write it as {{TOKEN: BIAS}}, such as {{"9": 5.0}}, with a bias from -{MOST_BIAS} to {MOST_BIAS}'
    if not isinstance(bias, Mapping):
        return f"logit_bias is {bias!r}; {way_out}"
    for token, value in bias.items():
        if not str(token).isdecimal():
            return f"logit_bias has the key {token!r}, which is no token id; {way_out}"
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MOST_BIAS:
            return f"logit_bias of token {token} is {value!r}; {way_out}"
    return None
