"""Finds the settings in which an evaluation differs from the training of the run that it judges."""

from collections.abc import Iterator, Mapping
from typing import Any

from qerl_recipes.evaluate.request import narrowed_in

TOKENIZERS = "the tokenizer's own"
OTHER = "another one"
LONGEST = 100  # characters of a text that are shown


def differences(
    evaluation: Mapping[str, Any], state: Mapping[str, Any], template: str | None
) -> list[tuple[str, str, str]]:
    """Return (name, value in the evaluation, value in training) for each setting that differs.

    ``evaluation`` is the content of evaluation.json. ``state`` is the content of qerl_state.json, empty if there is
    none, and ``template`` is the chat template saved beside it. Settings that no file records are not compared.
    """
    pairs = [*_of_weights(evaluation, state)]
    recipe, sampling = state.get("recipe") or {}, evaluation.get("sampling") or {}
    if state:
        pairs.append(("solved problems shown", evaluation.get("num_fewshot") or 0, 0))
    if "system_prompt" in recipe and "system_prompt" in sampling:
        pairs.append(("system prompt", sampling["system_prompt"] or "none", recipe["system_prompt"] or "none"))
    if recipe and "use_chat_template" in sampling:
        pairs.append(("chat template", *_templates(sampling, recipe, template)))
    if "chat_template_kwargs" in recipe and "chat_template_kwargs" in sampling:
        options = [of["chat_template_kwargs"] or "none" for of in (sampling, recipe)]
        pairs.append(("its options", options[0], options[1]))
    if recipe and sampling:  # a file that does not name generation_kwargs had none
        trained = narrowed_in(recipe, sampling.get("temperature") or 0)
        pairs.append(("sampling parameters", sampling.get("generation_kwargs") or "none", trained or "none"))
    return [(name, shown(judged), shown(trained)) for name, judged, trained in pairs if judged != trained]


def _of_weights(evaluation: Mapping[str, Any], state: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    arm, trained = evaluation.get("quantization"), state.get("quantization") or evaluation.get("trained_on")
    if arm and trained:
        yield "weights", arm, trained
    recipe = state.get("recipe") or {}
    if evaluation.get("dtype") and "dtype" in recipe:
        yield "dtype", evaluation["dtype"], recipe["dtype"] or "bfloat16"
    hashes = [evaluation.get("base_sha256"), state.get("base_hash")]
    if all(hashes) and hashes[0] != hashes[1]:  # a path proves nothing: weights move, and are replaced
        names = [evaluation.get("base"), state.get("base")]
        yield "base", names[0], names[1] if names[0] != names[1] else f"{names[1]}, as it was then"


def _templates(sampling: Mapping[str, Any], recipe: Mapping[str, Any], template: str | None) -> tuple[str, str]:
    """Return short names for the chat templates of the evaluation and of the training.

    The names are equal if the templates are. A template itself is too long to be shown.
    """
    source = TOKENIZERS if recipe.get("chat_template") is None else "the recipe's"
    trained = "none" if template is None else source
    if not sampling["use_chat_template"]:
        return "none", trained
    if (override := sampling.get("chat_template")) is not None:
        return (trained if override == template else OTHER), trained
    return TOKENIZERS, trained


def shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
