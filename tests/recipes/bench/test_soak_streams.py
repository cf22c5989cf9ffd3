"""What the soak makes of an answer of several sequences: each of them is judged, and none may be missing."""

import asyncio
import json

import httpx
import openai
import pytest

from qerl_recipes.bench import soak_streams
from qerl_recipes.bench.soak_streams import SILENT, ask

NAMED = "X-QeRL-Policy-Version"


def choice(index, tokens, reason=None):
    logprobs = {"token_logprobs": [-float(token) for token in tokens]}
    return {"index": index, "text": "", "token_ids": tokens, "logprobs": logprobs, "finish_reason": reason}


def asked(content, n, headers, stop_after=None):
    async def run():
        def respond(request):
            given = json.loads(request.content)
            assert (given["n"], given["max_tokens"], given["prompt"], given["model"]) == (n, 3, [5, 6], "policy")
            assert given.get("stream", False) == content.startswith(b"data")
            assert given["ignore_eos"] and given["return_token_ids"] and given["logprobs"] is not None
            return httpx.Response(200, content=content, headers=headers)

        transport = httpx.MockTransport(respond)
        async with httpx.AsyncClient(transport=transport) as http:
            client = openai.AsyncOpenAI(base_url="http://x/v1", api_key="none", max_retries=0, http_client=http)
            is_stream = content.startswith(b"data")
            return await ask(client, "policy", [5, 6], 3, n, stream=is_stream, stop_after=stop_after)

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
    "content",
    [
        stream(*PIECES[:3]),
        stream(*PIECES, end="data: [DONE]\n\n"),
        stream(*PIECES, end=""),
        stream(choice(0, [], "abort"), choice(1, [], "abort"), end="data: [DONE]\n\n"),
    ],
)
def test_a_sequence_without_its_end_or_a_policy_is_lost(content):
    with pytest.raises(RuntimeError, match="without its end"):
        asked(content, 2, {"content-type": "text/event-stream"})


@pytest.mark.parametrize(("stop_after", "is_given_up"), [(1, True), (4, True), (5, False), (None, False)])
def test_a_stream_is_given_up_after_so_many_pieces_and_counts_as_no_answer(stop_after, is_given_up):
    found = asked(stream(*PIECES), 2, {"content-type": "text/event-stream"}, stop_after)
    assert (found is None) == is_given_up


def test_what_a_stream_hears_is_an_answer_or_lost_or_given_up(monkeypatch):
    """Whatever a question ends with is counted once, and the next one is asked."""
    questions, ends = [], [ConnectionError("gone"), None, ["one", "other"], RuntimeError("not whole"), ["third"]]
    heard, pool = soak_streams.Heard(), soak_streams.prompts(64, 0)

    async def ask(client, model, prompt, length, n, *, stream, stop_after):
        end = ends[len(questions) % len(ends)]
        questions.append((length, n, stream, stop_after))
        assert prompt in pool and 8 <= length <= soak_streams.LONGEST_ANSWER
        if isinstance(end, Exception):
            raise end
        return end

    monkeypatch.setattr(soak_streams, "ask", ask)
    asyncio.run(soak_streams.run_stream(3, None, "policy", pool, 0, lambda: len(questions) == 500, heard))
    assert heard.answers == ["one", "other", "third"] * 100 and heard.cancelled == 100
    assert heard.lost == ["ConnectionError: gone", "RuntimeError: not whole"] * 100
    assert {n for _, n, *_ in questions} == {1, 5} and {stream for *_, stream, _ in questions} == {True, False}
    stopped = [(length, stream, after) for length, _, stream, after in questions if after is not None]
    assert 10 < len(stopped) < 50 and all(stream and 1 <= after <= length // 2 for length, stream, after in stopped)
    lengths = [length for length, *_ in questions]
    assert sum(length > 48 for length in lengths) == pytest.approx(500 / 8, rel=0.3)


def test_prompts_reach_over_a_block_of_any_cache_and_fill_none():
    drawn = soak_streams.prompts(64, 0)
    assert drawn == soak_streams.prompts(64, 0) != soak_streams.prompts(64, 1)
    assert len(drawn) == 24 and len({tuple(prompt) for prompt in drawn}) == 24
    assert all(128 < len(prompt) < 262 and len(prompt) % 16 for prompt in drawn)
    assert {min(map(min, drawn)), max(map(max, drawn))} == {2, 63}


def test_an_answer_without_a_stream_has_all_sequences_or_is_lost():
    content = json.dumps({"choices": [choice(0, [8], "length"), choice(1, [9], "length")]}).encode()
    headers = {"content-type": "application/json", NAMED: "4-5"}
    assert [(one.tokens, one.policy) for one in asked(content, 2, headers)] == [([8], "4-5"), ([9], "4-5")]
    with pytest.raises(RuntimeError, match="2 of 3 sequences were answered"):
        asked(content, 3, headers)
