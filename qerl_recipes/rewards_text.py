"""Rewards that read the text of a completion alone. Names and definitions are Open-R1's where it has them."""

import re
from typing import Any

from qerl_recipes.config_file import ConfigError
from qerl_recipes.configs import ScriptArguments
from qerl_recipes.hooks import Reward

THINK_THEN_ANSWER = re.compile(r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$", re.DOTALL | re.MULTILINE)
SOFT_THINK_THEN_ANSWER = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)
TAGS = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
STEP = re.compile(r"(Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,)")
STEPS_WANTED = 3
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
LANGUAGES = ("python", "javascript", "r", "java", "bash", "cpp")


def text_of(completion: str | list[dict[str, Any]]) -> str:
    """The text of a completion: itself, or the content of its last message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def format(completions: list[str], **columns: Any) -> list[float]:
    r"""1 where the completion is ``<think>\n...\n</think>\n<answer>\n...\n</answer>``, each tag on a line; else 0."""
    return [float(THINK_THEN_ANSWER.match(text) is not None) for text in completions]


def soft_format(completions: list[str], **columns: Any) -> list[float]:
    """1 where a think block followed by an answer block stands anywhere, whatever the white space; else 0."""
    return [float(SOFT_THINK_THEN_ANSWER.search(text) is not None) for text in completions]


def tag_count(completions: list[str], **columns: Any) -> list[float]:
    """A quarter for each of the four tags of ``format`` that stands exactly once, with its line breaks."""
    return [sum((text.count(tag) == 1) / len(TAGS) for tag in TAGS) for text in completions]


def reasoning_steps(completions: list[str], **columns: Any) -> list[float]:
    """A third for each visible step ("Step 1:", "First,", a bullet, a leading number), at most 1."""
    return [min(1.0, len(STEP.findall(text)) / STEPS_WANTED) for text in completions]


def answer_block(text: str) -> str | None:
    """What stands in the last ``<answer>`` block, else None."""
    found = ANSWER.findall(text)
    return found[-1].strip() if found else None


def answer_in(text: str) -> str | None:
    r"""What stands in the last ``<answer>`` block, else in the last ``\boxed{}`` without braces inside, else None."""
    if (block := answer_block(text)) is not None:
        return block
    found = BOXED.findall(text)
    return found[-1].strip() if found else None


def exact_answer(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 where the last answer block (or box) holds the column ``answer``, letter for letter; else 0."""
    return [float(answer_in(text) == str(a).strip()) for text, a in zip(completions, answer, strict=True)]


def repetition_penalty(script: ScriptArguments) -> Reward:
    """``repetition_max_penalty`` times the share of word n-grams that are repeats; fewer words than n score 0.

    Source: appendix C.2 of arXiv 2502.03373; words, not tokens, as in Open-R1. Raises ConfigError for a positive
    penalty or an n below 1.
    """
    n, worst = script.repetition_n_grams, script.repetition_max_penalty
    if worst > 0 or n < 1:
        raise ConfigError(f"repetition_max_penalty must be <= 0 and repetition_n_grams >= 1, not {worst} and {n}")

    def repetition_penalty(completions: list[Any], **columns: Any) -> list[float]:
        rewards = []
        for completion in completions:
            words = text_of(completion).lower().split()
            grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
            rewards.append(worst * (1 - len(set(grams)) / len(grams)) if grams else 0.0)
        return rewards

    return repetition_penalty


def code_format(script: ScriptArguments) -> Reward:
    """1 where the completion has the layout of ``format`` with a code block of ``code_language`` in the answer."""
    if script.code_language not in LANGUAGES:
        raise ConfigError(f"code_language cannot be {script.code_language!r}; it is one of {', '.join(LANGUAGES)}")
    pattern = re.compile(
        rf"^<think>\n.*?\n</think>\n<answer>\n.*?```{script.code_language}.*?```.*?\n</answer>$",
        re.DOTALL | re.MULTILINE,
    )

    def code_format(completions: list[Any], **columns: Any) -> list[float]:
        return [float(pattern.match(text_of(completion)) is not None) for completion in completions]

    return code_format
