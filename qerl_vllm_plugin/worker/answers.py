"""What the workers of an engine have answered, as one answer or as the error that it is."""

from typing import Any

from qerl_vllm_plugin.adapter.check import AdapterError
from qerl_vllm_plugin.worker.policy import ANOTHER_RANK


class PolicyLostError(RuntimeError):
    """The engine holds half of a policy, or does not answer, and serves nothing any more."""


def check_answers(results: list[dict[str, Any]], refusal: type[Exception] = AdapterError) -> None:
    """Raises what the workers answered, if they refused: ``refusal``, or PolicyLostError."""
    errors = [result for result in results if "error" in result]
    if not errors:
        return
    # a rank that refuses says why; the others say that one of them did
    texts = [error["error"] for error in errors]
    text = next((text for text in texts if ANOTHER_RANK not in text), texts[0])
    raise PolicyLostError(text) if any(error.get("lost") for error in errors) else refusal(text)
