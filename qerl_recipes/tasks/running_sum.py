"""Define the demo's task: a sum of single digits, answered at once or step by step.

    prompt         7+5-3+8=
    terse          <answer>17</answer>
    step by step   <think>7+5=12;12-3=9;9+8=17</think><answer>17</answer>

A model of a few hundred thousand weights learns the second style almost without a mistake, but only guesses with the
first. A policy that mixes the two can therefore improve by reinforcement learning.
"""

import random
import re
from typing import Any

from transformers import PreTrainedTokenizerFast

from qerl_recipes import SHIPPED
from qerl_recipes.tasks.generators import Generator, Problem

TERMS = (4, 5, 6)
LARGEST_DIGIT = 9
HELD_OUT = 512
LONGEST_COMPLETION = 56  # tokens; a step-by-step answer of six terms has at most 44, and <eos>

# matches the whole completion: neither a second answer nor text around it is allowed
COMPLETION = re.compile(r"(?:<think>[^<]+</think>)?<answer>([0-9]{1,3})</answer>")


def draw(rng: random.Random) -> Problem:
    """Draw one random sum, whose prompt ends with "="; this advances ``rng``."""
    terms = rng.choice(TERMS)
    value = rng.randint(1, LARGEST_DIGIT)
    expression = str(value)
    for _ in range(terms - 1):
        digit = rng.randint(1, LARGEST_DIGIT)
        minus = rng.random() < 0.5 and value >= digit
        expression += f"{'-' if minus else '+'}{digit}"
        value += -digit if minus else digit
    return {"prompt": f"{expression}=", "answer": str(value)}


GENERATOR = Generator("running_sum", draw, held_out_count=HELD_OUT)
problems, held_out, training_set = GENERATOR.problems, GENERATOR.held_out, GENERATOR.training_set


def tokenizer() -> PreTrainedTokenizerFast:
    """Return the demo's tokenizer, with one token per character and per tag: 23 tokens, padded on the left."""
    return PreTrainedTokenizerFast.from_pretrained(SHIPPED / "demo/starting_model")


def answer_of(completion: str) -> str | None:
    """Return the number in a well-formed completion, as written; None if the completion is malformed."""
    match = COMPLETION.fullmatch(completion)
    return match.group(1) if match else None


def running_sum_correct(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Give 1 if the whole completion is well formed and its number equals the answer, digit for digit; else 0."""
    return [float(answer_of(c) == a) for c, a in zip(completions, answer, strict=True)]


def running_sum_format(completions: list[str], **columns: Any) -> list[float]:
    """Give 1 if the whole completion is one answer, with or without steps before it; else 0."""
    return [float(answer_of(c) is not None) for c in completions]
