"""What the soak makes of an answer of several sequences: each of them is judged, and none may be missing."""

import asyncio
import json

import httpx
import openai
import pytest

from qerl_recipes.bench.soak_streams import SILENT, ask

NAMED = "X-QeRL-Policy-Version"


def choice(index, tokens, reason=None):
    logprobs = {"token_logprobs": [-float(token) for token in tokens]}
    return {"index": index, "text": "", "token_ids": tokens, "logprobs": logprobs, "finish_reason": reason}


def asked(content, n, headers):
    async def run():
        transport = httpx.MockTransport(lambda request: httpx.Response(200, content=content, headers=headers))
        async with httpx.AsyncClient(transport=transport) as http:
            client = openai.AsyncOpenAI(base_url="http://x/v1", api_key="none", max_retries=0, http_client=http)
            is_stream = content.startswith(b"data")
            return await ask(client, "policy", [5, 6], 3, n, stream=is_stream, stop_after=None)

    return asyncio.run(run())


def stream(*pieces, end=f"data: [DONE]\n\n: {NAMED}: 4-5\n\n"):
    lines = [f"data: {json.dumps({'choices': [piece]})}\n\n" for piece in pieces]
    return ("".join(lines) + end).encode()


PIECES = (choice(1, [7]), choice(0, [8]), choice(1, [9], "length"), choice(0, [3, 2], "length"))


def test_the_tokens_of_a_stream_go_to_their_sequences_and_one_without_tokens_is_silent():
    first, second, third = asked(stream(*PIECES), 3, {"content-type": "text/event-stream"})
    assert (first.tokens, first.logprobs) == ([8, 3, 2], [-8.0, -3.0, -2.0])
    assert (second.tokens, second.reason, second.policy) == ([7, 9], "length", "4-5")
    assert (third.tokens, third.reason) == ([], SILENT)


@pytest.mark.parametrize(
    "content", [stream(*PIECES[:3]), stream(*PIECES, end="data: [DONE]\n\n"), stream(*PIECES, end="")]
)
def test_a_sequence_without_its_end_or_a_policy_is_lost(content):
    with pytest.raises(RuntimeError, match="without its end"):
        asked(content, 2, {"content-type": "text/event-stream"})


def test_an_answer_without_a_stream_has_all_sequences_or_is_lost():
    content = json.dumps({"choices": [choice(0, [8], "length"), choice(1, [9], "length")]}).encode()
    headers = {"content-type": "application/json", NAMED: "4-5"}
    assert [(one.tokens, one.policy) for one in asked(content, 2, headers)] == [([8], "4-5"), ([9], "4-5")]
    with pytest.raises(RuntimeError, match="2 of 3 sequences were answered"):
        asked(content, 3, headers)
