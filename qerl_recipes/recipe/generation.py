"""Turn a recipe's prompts and keys into what vLLM generates from: chat template and sampling parameters.

Training and evaluation share this module, which needs neither TRL nor vLLM.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it imports TRL, which an evaluation does not need
    from qerl_recipes.recipe.configs import GRPOConfig

MOST_BIAS = 100  # vLLM's limit: its server clips a larger bias to this
SMALLEST_TEMPERATURE = 0.01  # vLLM's limit: it raises a smaller temperature to this one, and samples greedily at 0
PROBE = "4815162342"  # replaces the problem; no template contains it, and no filter such as upper changes it


def template_text(source: str) -> str:
    """Return the Jinja text that ``source`` is, or that of the file; raise ValueError where it is neither."""
    if "{{" in source or "{%" in source:
        return source
    try:
        return Path(source).expanduser().read_text(encoding="utf-8")
    except (OSError, RuntimeError, ValueError) as error:  # an impossible file name, an unknown ~user, no UTF-8
        excerpt = source if len(source) <= 80 else f"{source[:77]}..."
        raise ValueError(
            f"chat_template: {excerpt!r} is neither Jinja text nor a file with it ({error}); give one of the two"
        ) from error


def problem_turn(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the index of the message that asks the problem: the user's last one, or without any the last."""
    return max((i for i, message in enumerate(messages) if message["role"] == "user"), default=len(messages) - 1)


def blindness(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], template: str | None = None
) -> str | None:
    """Explain why conversations like ``messages`` would not show the problem to the model; return None if they would.

    The conversation is rendered with a probe text in place of its problem. ``template`` replaces the tokenizer's own
    chat template. ``options`` are the recipe's ``chat_template_kwargs``, with tools also TRL's template.
    """
    probed, index = [dict(message) for message in messages], problem_turn(messages)
    probed[index]["content"] = (
        [{"type": "text", "text": PROBE}] if isinstance(messages[index]["content"], list) else PROBE
    )
    rendering = {"tokenize": False, "add_generation_prompt": True}
    options = {"chat_template": template, **options}  # with tools they hold the template that TRL trains with
    roles = ", ".join(message["role"] for message in messages)
    try:
        if PROBE in tokenizer.apply_chat_template(probed, **rendering, **options):  # options may repeat none of them
            return None
    except Exception as error:  # Jinja's errors, or those that the template itself raises
        reason = f"it cannot render messages of {roles} ({type(error).__name__}: {error})"
    else:
        reason = f"what it makes of messages of {roles} does not contain the problem's text"
    return f"chat_template: {reason}; correct it, or give another one"


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
    """Convert parameters, which a request carries as JSON, to arguments of ``vllm.SamplingParams``."""
    from vllm.sampling_params import StructuredOutputsParams

    converted = dict(parameters)
    if isinstance(converted.get("structured_outputs"), dict):
        converted["structured_outputs"] = StructuredOutputsParams(**converted["structured_outputs"])
    if converted.get("logit_bias"):
        converted["logit_bias"] = {int(token): bias for token, bias in converted["logit_bias"].items()}
    return converted


def refused_by_vllm(parameters: Mapping[str, Any]) -> str | None:
    """Return why vLLM would refuse sampling parameters, a regular expression included; None if it takes them."""
    if (wrong := wrong_bias(parameters)) is not None:
        return wrong
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.structured_output.backend_guidance import validate_guidance_grammar
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    refusals = (TypeError, ValueError, VLLMValidationError)
    try:
        made = SamplingParams(**for_sampling_params(parameters))
        if made.structured_outputs is not None and made.structured_outputs.regex is not None:
            try:
                validate_xgrammar_grammar(made)
            except refusals:  # vLLM then tries the other
                try:
                    validate_guidance_grammar(made)
                except refusals as error:  # its text draws below the expression
                    return f"the regex {made.structured_outputs.regex!r}: {' '.join(str(error).split())}"
    except refusals as error:
        return str(error)
    return None


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
