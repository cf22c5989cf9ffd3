"""Read a completion's text, and the answer in it. This module needs only the standard library."""

import re
from decimal import Decimal
from math import isfinite
from typing import Any

# Match the innermost block, since a text may mention the opening tag before it opens one.
ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
BRACE = re.compile(r"\\boxed\{|\\.|[{}]", re.DOTALL)
# Match a/b and \frac{a}{b}, but no date. Also match whole numbers and decimals, with or without a power of ten.
# A minus between two numbers is not the second one's sign. A comma belongs to a number only if three digits follow.
NUMBER = re.compile(
    r"(?P<sign>-?)\\[dt]?frac\{(?P<minus>-?)(?P<top>\d+)\}\{(?P<under>0*[1-9]\d*)\}"
    r"|(?<![\d./])(?P<a>-?\d+)/(?P<b>0*[1-9]\d*)(?![\d/]|\.\d)"
    r"|(?P<plain>(?<!\d)(?<!\d\.)-?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.)\]}])\.\d+)"
    r"(?:[eE][-+]?\d{1,3}(?!\d))?)"
)
Completion = str | list[dict[str, Any]]  # for a conversational prompt, a list of messages


def text_of(completion: Completion) -> str:
    """Return a completion's text: itself, or what the policy's last message says, "" if there is none."""
    if isinstance(completion, str):
        return completion
    return next((str(one["content"]) for one in reversed(completion) if one["role"] == "assistant"), "")


def answer_block(text: str) -> str | None:
    blocks = ANSWER.findall(text)
    return blocks[-1].strip() if blocks else None


def last_box(text: str) -> str | None:
    r"""Return the content of the last closed ``\boxed{}``, nested braces included, or None."""
    opened: list[int | None] = []  # start of each open box's content; None for another brace
    last_begin, content = -1, None
    for brace in BRACE.finditer(text):
        if brace.group() == "}":
            begin = opened.pop() if opened else None
            if begin is not None and begin > last_begin:
                last_begin, content = begin, text[begin : brace.start()].strip()
        elif brace.group() == "{" or brace.group().startswith("\\boxed"):
            opened.append(None if brace.group() == "{" else brace.end())
    return content


def answer_in(text: str) -> str | None:
    r"""Return the last box in the last ``<answer>`` block, or that block; without one the text's last box, or None."""
    block = answer_block(text)
    box = last_box(text if block is None else block)
    return block if box is None else box


def written(value: Any) -> str:
    """Return an answer of the data as text: "" for None, a float without an exponent (1e22 has 23 digits)."""
    if value is None:
        return ""
    return format(Decimal(repr(value)), "f") if isinstance(value, float) and isfinite(value) else str(value)


def is_exactly(text: str, answer: str) -> bool:
    """Return True if ``text`` gives ``answer`` letter for letter: as its last block, the last box there, or all."""
    extracted = answer_in(text)
    return answer.strip() in (text.strip() if extracted is None else extracted, answer_block(text))


def last_number(text: str) -> Decimal | None:
    """Return the last number (its thousands may have commas) or fraction (to 28 digits) in a text, or None."""
    matches = list(NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-")))
    if not matches:
        return None
    last = matches[-1]
    if last["plain"] is not None:
        return Decimal(last["plain"].replace(",", ""))
    if last["top"] is not None:
        value = Decimal(last["top"]) / Decimal(last["under"])
        return -value if bool(last["sign"]) != bool(last["minus"]) else value
    return Decimal(last["a"]) / Decimal(last["b"])
