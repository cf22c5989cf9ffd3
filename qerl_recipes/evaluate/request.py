"""Checks the tasks and the sampling of ``qerl evaluate`` without importing lighteval or vLLM.

gsm8k, math_500, aime24, aime25     lighteval's definitions, from the Hugging Face hub
amc23                               40 problems of AMC 12, 2023 (math-ai/amc23), asked as lighteval asks AIME
running_sum                         the demo's 512 held-out problems; the whole completion must be right
jsonl:PATH                          a file of {"prompt", "answer"} lines, answers compared as mathematics: the last
                                    answer block counts, or without one the last number or formula
jsonl-accuracy:PATH                 the same, judged as the reward accuracy judges: LaTeX in a box, between dollars in
                                    an answer block or after "the final answer is"; a bare 9 is not an answer
jsonl-exact:PATH                    the same, judged as the reward exact_answer judges: letter for letter
jsonl-number:PATH                   the same, judged as the reward last_number judges: by the last number of the answer
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qerl_recipes.files.adapter import TEMPLATE, AdapterFolder
from qerl_recipes.files.json_lines import numbered

LIGHTEVAL = {"gsm8k": "gsm8k", "math_500": "math_500", "aime24": "aime", "aime25": "aime"}  # task -> module
NAMES = (*LIGHTEVAL, "amc23", "running_sum")
MATH, ACCURACY, EXACT, NUMBER = "jsonl:", "jsonl-accuracy:", "jsonl-exact:", "jsonl-number:"
LOCAL = (MATH, ACCURACY, EXACT, NUMBER)
# reward of a recipe -> the local task that judges like it; the first reward of this table that a recipe uses counts
JUDGED_BY = {
    "exact_answer": EXACT,
    "last_number": NUMBER,
    **dict.fromkeys(("accuracy", "dapo_score", "cosine", "length"), ACCURACY),
}
WITH_FEWSHOT = ("gsm8k",)  # the other tasks have no problems besides the test problems
# data set of a recipe -> the task that tests what it teaches; a local file is its own task (``_task_of``)
TASK_OF = {
    "gsm8k": "gsm8k",
    "openai/gsm8k": "gsm8k",
    "running_sum": "running_sum",
    "bigmath": "math_500",
    "open-r1/Big-Math-RL-Verified-Processed": "math_500",
    "dapo_math_17k": "math_500",
    "open-r1/DAPO-Math-17k-Processed": "math_500",
}

# fields of vLLM's SamplingParams that other options set, and fields on which reading an answer depends
FIXED = {
    *("n", "seed", "temperature", "top_p", "max_tokens"),
    *("logprobs", "flat_logprobs", "prompt_logprobs", "detokenize", "output_kind"),
}
# also fields that only change the text made from the tokens: the trainer decodes tokens itself, without them
OF_TEXT = {*FIXED, "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"}

DRAW = "set temperature (0.6, say), or leave this out"


@dataclass(frozen=True)
class Sampling:
    """How problems are prompted and how answers are sampled.

    None leaves a choice open: the adapter's training settings fill it first, then the defaults below.

    ``temperature``: 0 is greedy decoding. ``max_new_tokens``: None takes each task's own limit. ``seed``: None is 0.
    ``use_chat_template``: None uses a template if there is one. ``chat_template`` is Jinja text that replaces the
    tokenizer's template. ``chat_template_kwargs`` are passed to the template. An empty ``system_prompt`` means no
    system prompt. ``generation_kwargs`` are further fields of vLLM's SamplingParams, by name, such as stop strings.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int | None = None
    seed: int | None = None
    use_chat_template: bool | None = None
    system_prompt: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    generation_kwargs: Mapping[str, Any] | None = None

    @property
    def drawn_with(self) -> int | None:
        """Return the sampling seed, or None for greedy decoding."""
        return None if self.temperature == 0 else self.seed or 0

    def as_in_training(self, adapter: AdapterFolder) -> tuple["Sampling", list[str]]:
        """Fill the open choices from the training settings of ``adapter``.

        Returns the filled copy, and a short text for each choice that was filled.
        """
        template, recipe = adapter.path / TEMPLATE, adapter.recipe
        in_training = {
            "system_prompt": recipe.get("system_prompt"),
            "max_new_tokens": recipe.get("max_completion_length"),
        }
        if self.use_chat_template is not False:
            in_training["chat_template"] = template.read_text(encoding="utf-8") if template.is_file() else None
            in_training["chat_template_kwargs"] = recipe.get("chat_template_kwargs") or None
        in_training["generation_kwargs"] = narrowed_in(recipe, self.temperature) or None
        filled = {key: value for key, value in in_training.items() if value is not None and getattr(self, key) is None}
        described = [key if key in ("system_prompt", "chat_template") else f"{key} {filled[key]}" for key in filled]
        return replace(self, **filled), described

    def unlike(self, recipe: Mapping[str, Any]) -> list[str]:
        """Return a text for each of temperature and top_p that differs from training.

        An evaluation never takes these two over. At temperature 0 top_p is not compared.
        """
        keys = ("temperature",) if self.temperature == 0 else ("temperature", "top_p")
        pairs = [(key, getattr(self, key), recipe.get(key)) for key in keys]
        return [f"{key} {mine:g}, there {theirs:g}" for key, mine, theirs in pairs if theirs not in (None, mine)]

    def check(self, num_samples: int) -> None:
        """Raise ValueError for numbers out of range, and for options that would be ignored.

        At temperature 0, top_p below 1, a seed and several samples have no effect. With ``use_chat_template`` False, a
        chat template and its options have none. ``generation_kwargs`` must not repeat what other options set.
        """
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must lie above 0 and be at most 1")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if num_samples < 1:
            raise ValueError(f"num_samples is {num_samples}; it must be at least 1")
        if num_samples > 1 and self.temperature == 0:
            raise ValueError(
                f"num_samples is {num_samples}, but temperature 0 gives the same answer each time; "
                "set temperature (0.6, say) or num_samples=1"
            )
        if self.temperature == 0 and self.top_p < 1:
            raise ValueError(f"top_p is {self.top_p}, but temperature 0 (greedy) draws nothing; {DRAW}")
        if self.temperature == 0 and self.seed is not None:
            raise ValueError(f"seed is {self.seed}, but temperature 0 (greedy) draws nothing; {DRAW}")
        if wrong := sorted(FIXED & (self.generation_kwargs or {}).keys()):
            raise ValueError(
                f"generation_kwargs cannot set {', '.join(wrong)}: temperature, top_p, seed, num_samples and "
                "max_new_tokens are options of their own, and answers are judged as texts; remove it"
            )
        for name in ("chat_template", "chat_template_kwargs"):
            if self.use_chat_template is False and getattr(self, name):
                raise ValueError(
                    f"{name} would be ignored: no chat template is used (use_chat_template is false, which is "
                    "--no-chat-template); remove one of the two"
                )


def check(names: Sequence[str], num_fewshot: int = 0) -> None:
    """Raise ValueError if a task does not exist, is named twice, or its file is missing or unreadable.

    The same holds if no task is named, or if ``num_fewshot`` is negative or a task has no few-shot examples.
    """
    if not names:
        raise ValueError(f"name at least one task: {_known()}")
    if num_fewshot < 0:
        raise ValueError(f"num_fewshot is {num_fewshot}; it must be at least 0")
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"task {name} is named twice")
        if name.startswith(LOCAL):
            read_lines(Path(name.split(":", 1)[1]))
        elif name not in NAMES:
            raise ValueError(f"there is no task {name!r}; choose from {_known()}")
        if num_fewshot and name not in WITH_FEWSHOT:
            raise ValueError(
                f"num_fewshot is {num_fewshot}, but task {name} has no solved problems besides those that are asked; "
                f"tasks with some: {', '.join(WITH_FEWSHOT)}"
            )


def narrowed_in(recipe: Mapping[str, Any], temperature: float) -> dict[str, Any]:
    """Return a recipe's further sampling parameters as ``generation_kwargs`` of an evaluation.

    ``top_k`` and ``min_p`` are left out at ``temperature`` 0, where they change nothing.
    """
    recipe_kwargs = recipe.get("generation_kwargs") or {}
    kwargs = {key: value for key, value in recipe_kwargs.items() if key not in OF_TEXT}
    if kwargs.keys() & {"stop", "stop_token_ids"}:
        kwargs["include_stop_str_in_output"] = True  # in training, rewards see what ended the completion
    if recipe.get("repetition_penalty") not in (None, 1):
        kwargs["repetition_penalty"] = recipe["repetition_penalty"]
    if temperature > 0:
        kwargs |= {key: value for key in ("top_k", "min_p") if (value := recipe.get(key) or 0) > 0}
    if (regex := recipe.get("vllm_structured_outputs_regex")) is not None:
        kwargs["structured_outputs"] = {"regex": regex}
    return kwargs


def json_object(name: str, value: str | Mapping[str, Any] | None, example: str) -> dict[str, Any] | None:
    """Return an option that is given as JSON text or as a mapping; None stays None.

    Raises ValueError for text that is not a JSON object. ``name`` and ``example`` appear in the message.
    """
    if value is None or isinstance(value, Mapping):
        return None if value is None else dict(value)
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError:
        parsed = None
    if not isinstance(parsed, dict):
        raise ValueError(f"{name}: {value!r} is no JSON object such as '{example}'")
    return parsed


def command(run: str | Path, state: Mapping[str, Any]) -> str:
    """Return the shell command that evaluates the run in the folder ``run``.

    ``state`` is the content of its qerl_state.json. The task tests what the run's data set teaches; if none is known,
    the word TASKS stands in its place.
    """
    words = ["qerl", "evaluate", str(state.get("base", "BASE")), "--adapter", str(run)]
    words += ["--quantization", str(state.get("quantization", "qerl_nvfp4")), "--tasks"]
    words += [_task_of(state.get("recipe") or {}), "--output_dir", f"{run}/evaluation"]
    return shlex.join(words)


def _task_of(recipe: Mapping[str, Any]) -> str:
    """Return the task that tests what a run has learnt, or the word TASKS if none is known.

    A local data set becomes a local task that judges as the run's reward did. Its test.jsonl is preferred.
    """
    dataset = recipe.get("dataset_name")
    if dataset in TASK_OF:
        return TASK_OF[dataset]
    rewards = recipe.get("reward_funcs") or ()
    judged = next((task for reward, task in JUDGED_BY.items() if reward in rewards), MATH)
    for path in () if dataset is None else (Path(dataset) / "test.jsonl", Path(dataset)):
        try:
            read_lines(path)
        except (ValueError, OSError):
            continue
        return f"{judged}{path.absolute()}"
    return "TASKS"


def is_of_training(task: str, recipe: Mapping[str, Any]) -> bool:
    """Return True if a local task reads a file that the run was trained on, in whole or in part, per its recipe."""
    if not task.startswith(LOCAL):
        return False
    file = Path(task.partition(":")[2]).resolve()
    trained_on = [recipe.get("dataset_name"), (recipe.get("dataset_kwargs") or {}).get("path")]
    places = [Path(place).resolve() for place in trained_on if place is not None]
    return any(file in (place, place / "train.jsonl") for place in places)


class _AsWritten(str):
    """The text of a JSON number with a point or an exponent, exactly as written."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError("a key stands there twice")
    return row


def read_lines(path: Path) -> list[dict[str, str]]:
    """Read the problems of a local file, as rows with the texts "prompt" and "answer".

    Raises ValueError if there is no file or no problem in it, or if a line has another form.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}; a local task is written jsonl:PATH")
    rows = []
    for number, line in numbered(path):
        try:
            row = json.loads(line, parse_float=_AsWritten, object_pairs_hook=_once)
            prompt, answer = row["prompt"], row["answer"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f'{path}, line {number}: each line must be {{"prompt": TEXT, "answer": TEXT}} ({error!r})'
            ) from error
        answers = isinstance(answer, str | int) and not isinstance(answer, bool) and str(answer).strip()
        if not isinstance(prompt, str) or isinstance(prompt, _AsWritten) or not prompt.strip() or not answers:
            raise ValueError(
                f"{path}, line {number}: prompt must be a text, and answer a text or a number, none of them empty"
            )
        rows.append({"prompt": prompt, "answer": str(answer)})
    if not rows:
        raise ValueError(f"{path} holds no problems")
    return rows


def _known() -> str:
    return ", ".join((*NAMES, *(f"{kind}PATH" for kind in LOCAL)))
