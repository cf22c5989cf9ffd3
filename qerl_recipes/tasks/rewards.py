"""Define the rewards by name: Open-R1's under its names, the demo's and reasoning-gym's. Plugins may add others.

A factory takes the script arguments and returns ``reward(completions, *, <columns>, **rest) -> list[float | None]``. A
parameter without a default that TRL does not pass itself is a column that the data set must have. Rewards that compare
with the column ``solution`` use math-verify through TRL. A solution that it cannot read gives None, and TRL leaves such
a completion out of the mean.
"""

import functools
import inspect
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from qerl_recipes.recipe.configs import ScriptArguments
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.tasks import answers, code_rewards, reasoning_gym, running_sum
from qerl_recipes.tasks.answers import Completion, is_exactly, text_of
from qerl_recipes.tasks.imported import imported
from qerl_recipes.tasks.interface import Reward, RewardFactory
from qerl_recipes.tasks.sources import EXAMPLE

if TYPE_CHECKING:
    import torch
    from datasets import Dataset

THINK_THEN_ANSWER = re.compile(r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$", re.DOTALL | re.MULTILINE)
SOFT_THINK_THEN_ANSWER = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)
TAGS = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
STEP = re.compile(r"(Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,)")
STEPS_WANTED = 3
LARGEST = 1e16  # beyond it, squared rewards of a batch overflow fp32, in which advantages are computed
OPEN_R1_ONLY = ("cf_code", "ioi_code")  # its rewards that are not built in
LANGUAGES = ("python", "javascript", "r", "java", "bash", "cpp")
# arguments that the trainer passes to every reward, besides the columns of the data set; tool_mask is not TRL's: a list
# for each completion, 1 where the policy has sampled the token
PASSED_BY_TRL = {
    *("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"),
    "tool_mask",
}

# Types that a value may have. A float keeps its value, but not how it was written (3.0 or 3, 1e3 or 1000).
LETTERS, VALUES = (str, int), (str, int, float)
COMPARED = {
    "exact_answer": ("answer", LETTERS),
    "running_sum_correct": ("answer", LETTERS),
    "last_number": ("answer", VALUES),
    **dict.fromkeys(("accuracy", "cosine", "dapo_score", "length"), ("solution", VALUES)),
}


def format(completions: list[str], **columns: Any) -> list[float]:
    r"""Give 1 for ``<think>\n...\n</think>\n<answer>\n...\n</answer>``, with each tag on a line of its own; else 0."""
    return [float(THINK_THEN_ANSWER.match(text) is not None) for text in completions]


def soft_format(completions: list[str], **columns: Any) -> list[float]:
    """Give 1 for a think block followed by an answer block, anywhere and with any white space between them; else 0."""
    return [float(SOFT_THINK_THEN_ANSWER.search(text) is not None) for text in completions]


def tag_count(completions: list[str], **columns: Any) -> list[float]:
    """Give a quarter for each of the four tags of ``format`` that occurs exactly once, with its line breaks."""
    return [sum((text.count(tag) == 1) / len(TAGS) for tag in TAGS) for text in completions]


def reasoning_steps(completions: list[str], **columns: Any) -> list[float]:
    """Give a third for each visible step ("Step 1:", "First,", a bullet, a leading number), at most 1."""
    return [min(1.0, len(STEP.findall(text)) / STEPS_WANTED) for text in completions]


def exact_answer(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Give 1 if the last block or box, else the text, is the column ``answer``, letter for letter; else 0."""
    return [float(a is not None and is_exactly(text, str(a))) for text, a in zip(completions, answer, strict=True)]


def last_number(completions: list[str], answer: list[Any], **columns: Any) -> list[float]:
    """Give 1 if the completion's last number equals the last one in the column ``answer``; else 0, without one too."""
    expected = [answers.last_number(answers.written(a)) for a in answer]
    stated = [answers.last_number(text) for text in completions]
    return [float(right is not None and right == number) for right, number in zip(expected, stated, strict=True)]


def repetition_penalty(script: ScriptArguments) -> Reward:
    """Return a reward: ``repetition_max_penalty`` times the share of n-grams of words (not tokens) that are repeats.

    Raises ConfigError for a positive penalty or an n below 1. Source: appendix C.2 of arXiv 2502.03373, as in Open-R1.
    """
    from trl.rewards import get_repetition_penalty_reward

    n, worst = script.repetition_n_grams, script.repetition_max_penalty
    if worst > 0 or n < 1:
        raise ConfigError(f"repetition_max_penalty must be <= 0 and repetition_n_grams >= 1, not {worst} and {n}")
    penalty = get_repetition_penalty_reward(n, worst)

    def repetition_penalty(completions: list[Completion], **columns: Any) -> list[float]:
        return penalty(completion_ids=[text_of(completion).lower().split() for completion in completions])

    return repetition_penalty


def code_format(script: ScriptArguments) -> Reward:
    """Return a reward: 1 for the layout of ``format`` with a block of the row's ``language`` or ``code_language``."""
    if script.code_language not in LANGUAGES:
        raise ConfigError(f"code_language cannot be {script.code_language!r}; it is one of {', '.join(LANGUAGES)}")
    default = script.code_language

    def matches(text: str, language: str) -> bool:
        layout = rf"^<think>\n.*?\n</think>\n<answer>\n.*?```{re.escape(language)}.*?```.*?\n</answer>$"
        return re.match(layout, text, re.DOTALL | re.MULTILINE) is not None

    def code_format(completions: list[Completion], language: list[Any] | None = None, **columns: Any) -> list[float]:
        languages = [default] * len(completions) if language is None else language
        texts = [text_of(completion) for completion in completions]
        return [float(matches(text, own or default)) for text, own in zip(texts, languages, strict=True)]

    return code_format


def accuracy(completions: list[Completion], solution: list[Any], **columns: Any) -> list[float | None]:
    """Give 1 if the LaTeX answer equals the solution (a text or a number), else 0; None for an unreadable solution."""
    from trl.rewards import accuracy_reward

    return accuracy_reward(*_for_math_verify(completions, solution), log_extra=columns.get("log_extra"))


def _for_math_verify(completions: list[Completion], solution: list[Any]) -> tuple[list[Any], list[str]]:
    messages = [[{"role": "assistant", "content": text_of(completion)}] for completion in completions]
    return messages, [answers.written(value) for value in solution]


def dapo_score(completions: list[Completion], solution: list[str], **columns: Any) -> list[float | None]:
    """Give 1 if the answer equals the solution, else -1; None for an unreadable one (arXiv 2503.14476, equation 7)."""
    return [None if right is None else 2 * right - 1 for right in accuracy(completions, solution)]


def length(
    completions: list[Completion], solution: list[str], prompts: list[Completion] | None = None, **columns: Any
) -> list[float | None]:
    """Reward short answers: from 1/2 for the shortest answer to a prompt down to -1/2 for the longest, in characters.

    Wrong answers get at most 0, all equally long ones 0, and an unreadable solution None. Source: Kimi k1.5 (arXiv
    2501.12599), section 2.3.3. Open-R1 instead compares with the whole batch, whatever the prompt.
    """
    correct = accuracy(completions, solution)
    lengths = [len(text_of(completion)) for completion in completions]
    keys = ["" if prompts is None else json.dumps(prompts[i], sort_keys=True) for i in range(len(completions))]
    rewards: list[float | None] = []
    for key, size, right in zip(keys, lengths, correct, strict=True):
        group = [other for other, other_key in zip(lengths, keys, strict=True) if other_key == key]
        shortest, longest = min(group), max(group)
        value = 0.5 - (size - shortest) / (longest - shortest) if shortest < longest else 0.0
        rewards.append(None if right is None else value if right else min(0.0, value))
    return rewards


def cosine(script: ScriptArguments) -> Reward:
    """Return a reward: accuracy, scaled by length in characters along a half cosine between two bounds.

    The ``cosine_*_value_*`` keys are the values of the shortest and the longest answer. A longer one than
    ``cosine_max_len`` counts as that long; Open-R1's cosine would rise again. Source: appendix C.1 of arXiv 2502.03373.
    """
    from trl.rewards import get_cosine_scaled_reward

    if script.cosine_max_len < 1:
        raise ConfigError(f"cosine_max_len must be at least 1 character, not {script.cosine_max_len}")
    scaled = get_cosine_scaled_reward(
        script.cosine_max_len,
        script.cosine_min_value_wrong,
        script.cosine_max_value_wrong,
        script.cosine_min_value_correct,
        script.cosine_max_value_correct,
    )

    def cosine(completions: list[Completion], solution: list[str], **columns: Any) -> list[float | None]:
        characters = [text_of(completion) for completion in completions]  # in place of token ids
        return scaled(*_for_math_verify(completions, solution), characters)

    return cosine


def soft_overlong_punishment(script: ScriptArguments) -> Reward:
    """Return a reward: 0 up to ``max_completion_len - soft_punish_cache`` tokens, then a slope to -1.

    Only sampled tokens count, not those of tools, which TRL's reward counts. Source: arXiv 2503.14476, equation 13.
    """
    from trl.rewards import get_soft_overlong_punishment

    if not 0 < script.soft_punish_cache < script.max_completion_len:
        given = f"{script.soft_punish_cache} and {script.max_completion_len}"
        raise ConfigError(f"soft_overlong_punishment needs 0 < soft_punish_cache < max_completion_len, not {given}")
    punishment = get_soft_overlong_punishment(script.max_completion_len, script.soft_punish_cache)

    def soft_overlong_punishment(
        completion_ids: list[list[int]], tool_mask: list[list[int]] | None = None, **columns: Any
    ) -> list[float]:
        lengths = map(len, completion_ids) if tool_mask is None else map(sum, tool_mask)
        return punishment(completion_ids=[range(length) for length in lengths])

    return soft_overlong_punishment


def _plain(reward: Callable[..., list[float]], name: str | None = None) -> RewardFactory:
    """Return a factory for a reward of plain texts without settings; metrics call it ``name``, or as the function."""

    def accept_messages(completions: list[Completion], **columns: Any) -> list[float]:
        return reward([text_of(completion) for completion in completions], **columns)

    accept_messages.__name__ = name or reward.__name__
    accept_messages.__signature__ = inspect.signature(reward)  # type: ignore[attr-defined]
    return lambda script: accept_messages


# first letters of keys -> the built-in reward that alone reads them
READ_BY = {
    "cosine_": "cosine",
    "repetition_": "repetition_penalty",
    "max_completion_len": "soft_overlong_punishment",
    "soft_punish_cache": "soft_overlong_punishment",
    "code_language": "code_format",
}
FACTORIES: dict[str, RewardFactory] = {
    "accuracy": lambda script: accuracy,
    "length": lambda script: length,
    "cosine": cosine,
    "dapo_score": lambda script: dapo_score,
    "format": _plain(format),
    "soft_format": _plain(soft_format),
    "tag_count": _plain(tag_count),
    "reasoning_steps": _plain(reasoning_steps),
    "exact_answer": _plain(exact_answer),
    "last_number": _plain(last_number),
    "repetition_penalty": repetition_penalty,
    "code": code_rewards.code,
    "binary_code": code_rewards.binary_code,
    "code_format": code_format,
    "soft_overlong_punishment": soft_overlong_punishment,
    "reasoning_gym": _plain(reasoning_gym.scores, "reasoning_gym"),
    "running_sum_correct": _plain(running_sum.running_sum_correct),
    "running_sum_format": _plain(running_sum.running_sum_format),
}


def resolve(name: str, script: ScriptArguments, factories: Mapping[str, RewardFactory]) -> Reward:
    """Return the reward of that name or dotted path; raise ConfigError for none, and for settings that it refuses."""
    if name in OPEN_R1_ONLY and name not in factories:
        raise ConfigError(
            f"reward_funcs: {name} is not built in, for it needs Piston servers with Open-R1's own packages; use code, "
            "with tests in the column verification_info, or a function of your own by its path"
        )
    reward = factories[name](script) if name in factories else imported("reward_funcs", name, "rewards", factories)
    if not callable(reward):
        raise ConfigError(f"reward_funcs: {name} is not a function but {reward!r}")
    return reward if name in FACTORIES else _giving_numbers(reward, name)


def _giving_numbers(reward: Reward, name: str) -> Reward:
    """Return the reward, which raises ValueError for values that TRL cannot read, and for NaN, its mark for None."""
    from trl.trainer.utils import get_callable_name, is_async_callable

    def numbers(values: Any) -> list[float | None]:
        try:
            given = list(values)
            wrong = [value for value in given if value is not None and math.isnan(value)]
        except TypeError:  # no list, or a value that is no number
            wrong = [values]
        if wrong:
            raise ValueError(
                f"the reward {name} gave {str(wrong[0])[:100]}; return a list with a finite number for each "
                "completion, or None where the reward does not apply"
            )
        return given

    @functools.wraps(reward)
    def function(*args: Any, **columns: Any) -> list[float | None]:
        return numbers(reward(*args, **columns))

    @functools.wraps(reward)
    async def coroutine(*args: Any, **columns: Any) -> list[float | None]:
        return numbers(await reward(*args, **columns))  # type: ignore[misc]

    wrapped: Any = coroutine if is_async_callable(reward) else function
    wrapped.__name__ = get_callable_name(reward)
    return wrapped


def without_effect(script: ScriptArguments) -> list[str]:
    """Return a line for each key that is set for a built-in reward (``READ_BY``) that is not used."""
    if any(name not in FACTORIES for name in script.reward_funcs):
        return []
    defaults = {key.name: key.default for key in fields(script)}
    return [
        f"{key}: {getattr(script, key)} has no effect without the reward {reward}; add it, or remove the key"
        for start, reward in READ_BY.items()
        for key in defaults
        if key.startswith(start) and reward not in script.reward_funcs and getattr(script, key) != defaults[key]
    ]


def required_columns(reward: Reward) -> set[str]:
    """Return the columns that a reward needs: its parameters without a default, but for those that TRL passes."""
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {
        name
        for name, parameter in inspect.signature(reward).parameters.items()
        if parameter.default is inspect.Parameter.empty and parameter.kind not in variable
    } - PASSED_BY_TRL


def refuse_infinite(values: "torch.Tensor", names: Sequence[str], prompts: Callable[[], Sequence[Any]]) -> None:
    """Raise ValueError for a reward beyond ``LARGEST`` in size, naming function, value and prompt; NaN is accepted.

    TRL would set every advantage of such a group to 0. ``values`` is (completions, rewards); NaN means a reward of
    None.
    """
    wrong = (values.abs() > LARGEST).nonzero().tolist()
    if wrong:
        row, column = wrong[0]
        number, prompt = sum(where == column for _, where in wrong), str(prompts()[row])[:200]
        raise ValueError(
            f"the reward {names[column]} gave {float(values[row, column]):g} to {number} of {len(values)} completions, "
            f"the first of them of the prompt {prompt!r}; rewards must be finite and at most {LARGEST:g} in size. "
            "Return a finite number, or None where the reward does not apply"
        )


def answer_problems(reward: str, rows: "Dataset", split: str) -> Iterator[str]:
    """Yield a line for each reason why the built-in ``reward`` cannot compare with its column in a ``split``."""
    if reward in ("code", "binary_code") and "verification_info" in rows.column_names:
        yield from code_rewards.data_problems(reward, rows, split)
    column, kinds = COMPARED.get(reward, ("", ()))
    if column not in rows.column_names:
        return
    values = rows[column][:]
    if wrong := sorted({type(value).__name__ for value in values if value is not None and type(value) not in kinds}):
        yield (
            f"reward {reward} compares completions with the column {column}, which holds {', '.join(wrong)} in the "
            f"{split} data; write each as a text in quotes ({EXAMPLE}). A text that looks like a date is read as one "
            "from JSON; Parquet keeps it"
        )
    empty = [i for i, value in enumerate(values) if value is None or not str(value).strip()]
    if empty:
        yield (
            f"reward {reward} compares completions with the column {column}, which is empty in {len(empty)} of the "
            f"{len(values)} rows of the {split} data, the first of them row {empty[0] + 1}: no completion could be "
            "right there; leave these problems out"
        )
