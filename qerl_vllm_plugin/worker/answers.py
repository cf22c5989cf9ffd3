"""Turn the answers of an engine's workers into an exception if any of them refused."""

from typing import Any

from qerl_vllm_plugin.adapter.check import AdapterError
from qerl_vllm_plugin.worker.policy import ANOTHER_RANK


class PolicyLostError(RuntimeError):
    """The engine holds half of a policy, or does not answer, and serves nothing any more."""


def check_answers(results: list[dict[str, Any]], refusal: type[Exception] = AdapterError) -> None:
    """Raise ``refusal`` if any worker refused, or PolicyLostError if the policy is lost; else do nothing."""
    errors = [result for result in results if "error" in result]
    if not errors:
        return
    # the rank that refused says why; the other ranks say only that another one did
    texts = [error["error"] for error in errors]
    text = next((text for text in texts if ANOTHER_RANK not in text), texts[0])
    raise PolicyLostError(text) if any(error.get("lost") for error in errors) else refusal(text)
