"""What a completion says: its text and the answer in it. Needs nothing but the standard library."""

import re
from decimal import Decimal
from typing import Any

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
# a minus between two numbers is none of the second's sign
NUMBER = re.compile(r"(?<![\d.])-?\d[\d,]*(?:\.\d+)?")
Completion = str | list[dict[str, Any]]  # a text or, where prompts are conversations, a list of messages


def text_of(completion: Completion) -> str:
    """The text of a completion: itself, or the content of its last message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


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


def is_exactly(text: str, answer: str) -> bool:
    """Whether ``text`` gives ``answer``, letter for letter: in its last block or box, or as all that it says.

    The reward ``exact_answer`` and the evaluation ``jsonl-exact:`` both judge by this.
    """
    given = answer_in(text)
    return answer.strip() == (text.strip() if given is None else given)


def last_number(text: str) -> Decimal | None:
    """The last number that a text names, thousands with or without commas; None where it names none.

    The reward ``last_number`` and the evaluation ``jsonl-number:`` both judge by this.
    """
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None
