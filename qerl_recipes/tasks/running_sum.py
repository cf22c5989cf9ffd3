"""The task of the demo: a sum of single digits, answered at once or worked out step by step.

    prompt         7+5-3+8=
    terse          <answer>17</answer>
    step by step   <think>7+5=12;12-3=9;9+8=17</think><answer>17</answer>

Four to six terms, and no partial sum is negative. A model of a few hundred thousand weights learns the second style
almost without a mistake and guesses with the first, so that a policy which mixes the two has something to find out.
"""

import random
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerFast

TERMS = (4, 5, 6)
LARGEST_DIGIT = 9
HELD_OUT = 512
HELD_OUT_SEED = 999
LONGEST_COMPLETION = 56  # tokens; a step-by-step answer of six terms has at most 49

THINK, END_THINK, ANSWER, END_ANSWER = "<think>", "</think>", "<answer>", "</answer>"
# the order is the token id, which the shipped starting model depends on
VOCABULARY = ("<pad>", "<eos>", "<unk>", *"0123456789+-=;", THINK, END_THINK, ANSWER, END_ANSWER, "\n", " ")
TOKEN = r"</?think>|</?answer>|[\s\S]"

# the whole completion, so that neither a second answer nor text around it counts
COMPLETION = re.compile(r"(?:<think>[^<]+</think>)?<answer>([0-9]{1,3})</answer>")


@dataclass(frozen=True)
class Problem:
    """One sum: ``prompt`` ends with "=", ``steps`` are the partial sums in writing, ``answer`` is a decimal number."""

    prompt: str
    steps: tuple[str, ...]
    answer: str

    @property
    def terse(self) -> str:
        return f"{ANSWER}{self.answer}{END_ANSWER}"

    @property
    def step_by_step(self) -> str:
        return f"{THINK}{';'.join(self.steps)}{END_THINK}{self.terse}"


def draw(rng: random.Random) -> Problem:
    """One random problem; each call moves ``rng`` on."""
    terms = rng.choice(TERMS)
    value = rng.randint(1, LARGEST_DIGIT)
    expression, steps = str(value), []
    for _ in range(terms - 1):
        digit = rng.randint(1, LARGEST_DIGIT)
        minus = rng.random() < 0.5 and value >= digit
        result = value - digit if minus else value + digit
        steps.append(f"{value}{'-' if minus else '+'}{digit}={result}")
        expression += f"{'-' if minus else '+'}{digit}"
        value = result
    return Problem(expression + "=", tuple(steps), str(value))


def problems(count: int, seed: int, exclude: Collection[str] = ()) -> list[Problem]:
    """``count`` different problems, always the same for the same seed, none with a prompt of ``exclude``."""
    rng, seen = random.Random(seed), set(exclude)
    found: list[Problem] = []
    while len(found) < count:
        problem = draw(rng)
        if problem.prompt not in seen:
            seen.add(problem.prompt)
            found.append(problem)
    return found


def held_out(count: int = HELD_OUT) -> list[Problem]:
    """The first ``count`` of the 512 problems that evaluation alone uses, whatever the seed of a run.

    Raises ValueError if ``count`` is not between 1 and 512.
    """
    if not 0 < count <= HELD_OUT:
        raise ValueError(f"running_sum holds out {HELD_OUT} problems; ask for 1 to {HELD_OUT}, not {count}")
    return problems(HELD_OUT, HELD_OUT_SEED)[:count]


def training_set(count: int, seed: int) -> Dataset:
    """``count`` problems for reinforcement learning, columns ``prompt`` and ``answer``; never a held-out one."""
    drawn = problems(count, 7000 + seed, exclude={problem.prompt for problem in held_out()})
    return Dataset.from_dict({"prompt": [p.prompt for p in drawn], "answer": [p.answer for p in drawn]})


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character and one a tag: 27 tokens, padded on the left."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(TOKEN), behavior="isolated")
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def answer_of(completion: str) -> str | None:
    """The number in a well-formed completion, as written; None where the completion is anything else."""
    match = COMPLETION.fullmatch(completion)
    return match.group(1) if match else None


def running_sum_correct(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 where the whole completion is well formed and its number is the answer, digit for digit; else 0."""
    return [float(answer_of(c) == a) for c, a in zip(completions, answer, strict=True)]


def running_sum_format(completions: list[str], **columns: Any) -> list[float]:
    """1 where the whole completion is one answer, with or without steps before it; else 0."""
    return [float(answer_of(c) is not None) for c in completions]


REWARDS: dict[str, Callable[..., list[float]]] = {
    "running_sum_correct": running_sum_correct,
    "running_sum_format": running_sum_format,
}
