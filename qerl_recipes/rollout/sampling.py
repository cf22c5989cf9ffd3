"""How every engine draws completions, wherever it runs: their seeds, and the sampling parameters of the recipe."""

from typing import Any

from qerl_recipes.recipe.configs import GRPOConfig
from qerl_vllm_plugin.noise import seed_of

SMALLEST_TEMPERATURE = 0.01  # vLLM's: it samples with this one in place of a smaller, and greedily at 0


def completion_seed(run_seed: int, phase: str, rollout: int, call: int, prompt: int, sample: int) -> int:
    """The seed of one completion, different for each and the same in a resumed run.

    ``phase`` is ``train``, ``evaluation`` or ``calibration``; ``call`` counts the batches of this rollout (dynamic
    sampling draws several), ``prompt`` is the place of the prompt in its batch over all ranks, ``sample`` that of the
    completion.
    """
    return seed_of(run_seed, phase, rollout, call, prompt, sample)


class Seeds:
    """The seeds of the rollout or evaluation that is open."""

    def __init__(self, run_seed: int) -> None:
        self._run_seed = run_seed
        self.open("train", 0)

    def open(self, phase: str, rollout: int) -> None:
        """From here on those of this rollout, or of an evaluation, which is rollout 0 each time."""
        self._phase, self._rollout, self._call = phase, rollout, 0

    def draw(self, first: int, count: int, num_generations: int) -> list[int]:
        """Those of the next batch, of which this process has ``count`` completions from place ``first`` on."""
        key = (self._run_seed, self._phase, self._rollout, self._call)
        self._call += 1
        places = range(first, first + count)
        return [completion_seed(*key, place // num_generations, place % num_generations) for place in places]


def sampling_parameters(training: GRPOConfig) -> dict[str, Any]:
    """Those of a recipe under vLLM's names, without the seed; of each token the log-probability is wanted."""
    found: dict[str, Any] = {
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
        found["structured_outputs"] = {"regex": training.vllm_structured_outputs_regex}
    return found


def for_sampling_params(training: GRPOConfig) -> dict[str, Any]:
    """The same for ``vllm.SamplingParams``, which takes structured outputs as an object; a request has them as JSON."""
    from vllm.sampling_params import StructuredOutputsParams

    found = sampling_parameters(training)
    if isinstance(found.get("structured_outputs"), dict):
        found["structured_outputs"] = StructuredOutputsParams(**found["structured_outputs"])
    return found
