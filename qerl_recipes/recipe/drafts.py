"""Check ``vllm_speculative_config``: drafts of several tokens, which the policy checks in one step."""

import importlib.util
from collections.abc import Iterator

from qerl_recipes.recipe.configs import GRPOConfig
from qerl_recipes.recipe.generation import sampling_parameters

SUFFIX_DECODING = ("max_tree_depth", "max_spec_factor", "min_token_prob", "max_cached_requests")
# vLLM's ways to draft without a second model -> the fields that each needs, and the others that it has
DRAFTS = {
    **dict.fromkeys(("ngram", "ngram_gpu"), (("num_speculative_tokens", "prompt_lookup_max"), ("prompt_lookup_min",))),
    "suffix": (("num_speculative_tokens",), tuple(f"suffix_decoding_{name}" for name in SUFFIX_DECODING)),
}


def not_for_drafts(training: GRPOConfig) -> str:
    """Return the names of the recipe's sampling parameters that vLLM does not apply to drafts, "" for none."""
    parameters = sampling_parameters(training)
    return " and ".join(name for name in ("min_p", "logit_bias") if parameters.get(name))


def problems(training: GRPOConfig) -> Iterator[str]:
    """Yield what is wrong with ``vllm_speculative_config``, and what vLLM cannot sample with drafts."""
    if (drafts := training.vllm_speculative_config) is None:
        return
    here = "vllm_speculative_config"
    if not isinstance(drafts, dict) or drafts.get("method") not in DRAFTS:
        found = drafts.get("method") if isinstance(drafts, dict) else drafts
        yield (
            f"{here}: method is {found!r}; a run takes {', '.join(DRAFTS)}, which draft from the tokens that there are "
            "and need no second model"
        )
        return
    needed, known = DRAFTS[method := drafts["method"]]
    if unknown := sorted(drafts.keys() - {"method", *needed, *known}):
        yield f"{here}: {method} has no {', '.join(unknown)}; it has {', '.join((*needed, *known))}"
    for name in needed:
        if type(drafts.get(name)) is not int or drafts[name] < 1:
            yield f"{here}: {name} is {drafts.get(name)!r}; {method} needs a whole number of at least 1"
    if drafts.get("suffix_decoding_max_cached_requests"):
        yield f"{here}: suffix_decoding_max_cached_requests must be 0; a resumed run would lack what is cached"
    if method == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        yield f"{here}: suffix needs the package arctic-inference, which is not installed; use ngram"
    if wrong := not_for_drafts(training):
        yield f"vLLM does not apply {wrong} to drafts; remove it or {here}"
