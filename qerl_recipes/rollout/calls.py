"""Read the calls of tools that a policy has written, and write calls and their answers as text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_parsing.response_templates import load_response_template

Message = dict[str, Any]


def in_one_type(completion: Sequence[Message]) -> list[Message]:
    """Return a completion with text for all that is none: a column of a table has values of one type."""

    def written(call: Mapping[str, Any]) -> dict[str, Any]:
        name, arguments = named(call)
        shown = arguments if isinstance(arguments, dict) else {"": arguments}
        return {"type": "function", "function": {"name": name, "arguments": json.dumps(shown, default=str)}}

    texts = [{**message, "content": str(message["content"])} for message in completion]
    for message in texts:
        if message.get("tool_calls"):
            message["tool_calls"] = list(map(written, message["tool_calls"]))
    return texts


def read_any_text(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let ``tokenizer`` raise ValueError for calls that are nested too deeply; TRL then takes them for plain text.

    From now on it also reads its ``response_template`` once, and not for each text.
    """
    if "parse_response" in vars(tokenizer):
        return  # it does so already
    parse, known = tokenizer.parse_response, (None, None)

    def parsed(*given: Any, **named: Any) -> Any:
        nonlocal known
        template = getattr(tokenizer, "response_template", None)
        if template is not known[0]:
            known = template, load_response_template(template)
        try:
            return parse(*given, **{"schema": known[1], **named})
        except RecursionError as error:  # a thousand brackets, as a policy that repeats itself may write
            raise ValueError("nested too deeply") from error

    tokenizer.parse_response = parsed  # type: ignore[method-assign]


def as_text(result: Any) -> str:
    """Return a tool's result as text; raise ValueError for bytes that are no UTF-8, and for blocks of no text."""
    if isinstance(result, bytes):
        return result.decode()
    if not (isinstance(result, list) and result and all(isinstance(part, dict) and "type" in part for part in result)):
        return str(result)
    if others := sorted({str(part["type"]) for part in result} - {"text"}):
        raise ValueError(f"a block of type {others[0]}, and this policy reads text only")
    return "".join(str(part["text"]) for part in result)


def named(call: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the name and the arguments of a call as the policy wrote it; chat templates differ in where they are."""
    function = call.get("function") or call
    return str(function.get("name") or "unknown"), function.get("arguments")
