"""What a completion says: its text and the answer in it. Needs nothing but the standard library."""

import re
from decimal import Decimal
from math import isfinite
from typing import Any

# the innermost: a text that mentions the opening tag before it opens a block means the block
ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
BRACE = re.compile(r"\\boxed\{|\\.|[{}]", re.DOTALL)
# a/b and \frac{a}{b}, but no date; then whole numbers and decimals, with a power of ten or without. A minus between two
# numbers is none of the second's sign, and a comma belongs to a number only where three digits follow.
NUMBER = re.compile(
    r"(?P<sign>-?)\\[dt]?frac\{(?P<minus>-?)(?P<top>\d+)\}\{(?P<under>0*[1-9]\d*)\}"
    r"|(?<![\d./])(?P<a>-?\d+)/(?P<b>0*[1-9]\d*)(?![\d/]|\.\d)"
    r"|(?P<plain>(?<!\d)(?<!\d\.)-?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.)\]}])\.\d+)"
    r"(?:[eE][-+]?\d{1,3}(?!\d))?)"
)
Completion = str | list[dict[str, Any]]  # a text or, where prompts are conversations, a list of messages


def text_of(completion: Completion) -> str:
    """The text of a completion: itself, or the content of its last message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def answer_block(text: str) -> str | None:
    """What stands in the last ``<answer>`` block, else None."""
    found = ANSWER.findall(text)
    return found[-1].strip() if found else None


def last_box(text: str) -> str | None:
    r"""What stands in the last ``\boxed{}`` that is closed, with whatever braces it holds, else None."""
    opened: list[int | None] = []  # where the content of each open box begins; None is another brace
    last, found = -1, None
    for brace in BRACE.finditer(text):
        if brace.group() == "}":
            begin = opened.pop() if opened else None
            if begin is not None and begin > last:
                last, found = begin, text[begin : brace.start()].strip()
        elif brace.group() == "{" or brace.group().startswith("\\boxed"):
            opened.append(None if brace.group() == "{" else brace.end())
    return found


def answer_in(text: str) -> str | None:
    r"""What stands in the last ``<answer>`` block, else in the last ``\boxed{}``, else None."""
    block = answer_block(text)
    return last_box(text) if block is None else block


def written(value: Any) -> str:
    """An answer of the data as a text: a number in digits alone (1e22 has 23 of them), nothing where there is none."""
    if value is None:
        return ""
    return format(Decimal(repr(value)), "f") if isinstance(value, float) and isfinite(value) else str(value)


def is_exactly(text: str, answer: str) -> bool:
    """Whether ``text`` gives ``answer``, letter for letter: in its last block or box, or as all that it says.

    The reward ``exact_answer`` and the evaluation ``jsonl-exact:`` both judge by this.
    """
    given = answer_in(text)
    return answer.strip() == (text.strip() if given is None else given)


def last_number(text: str) -> Decimal | None:
    """The last number that a text names, thousands with or without commas; None where it names none.

    A fraction of whole numbers is one number, to Decimal's 28 digits. The reward ``last_number`` and the evaluation
    ``jsonl-number:`` both judge by this.
    """
    found = list(NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-")))
    if not found:
        return None
    last = found[-1]
    if last["plain"] is not None:
        return Decimal(last["plain"].replace(",", ""))
    if last["top"] is not None:
        value = Decimal(last["top"]) / Decimal(last["under"])
        return -value if bool(last["sign"]) != bool(last["minus"]) else value
    return Decimal(last["a"]) / Decimal(last["b"])
