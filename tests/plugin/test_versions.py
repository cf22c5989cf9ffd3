"""Test which policies an answer names, given the moments of its first and last token."""

import asyncio
import time
from types import SimpleNamespace

import httpx
import pytest

from qerl_vllm_plugin.server.versions import HEADER, StampVersions, tell_versions
from qerl_vllm_plugin.worker import change_log
from qerl_vllm_plugin.worker.change_log import ChangeLog


@pytest.fixture
def history(monkeypatch):
    """Return a log: version 4 from second 10, with other noise from second 20, and version 5 from second 30."""
    made = ChangeLog()
    for moment, version in ((10.0, 4), (20.0, 4), (30.0, 5)):
        monkeypatch.setattr(time, "monotonic", lambda moment=moment: moment)
        made.add(version)
    return made


@pytest.mark.parametrize(
    ("spans", "text"),
    [
        ([(11, 12)], "4"),
        ([(21, 29)], "4"),
        ([(31, 99)], "5"),
        ([(11, 21)], "4-4"),  # the noise changed in between, so no single policy computed it
        ([(11, 31)], "4-5"),
        ([(21, 31)], "4-5"),
        ([(11, 12), (22, 23)], "4-4"),
        ([(31, 32), (11, 12)], "4-5"),
        ([(1, 2)], "4"),
    ],
)
def test_an_answer_names_one_version_or_a_range(history, spans, text):
    assert history.text(spans) == text
    assert ChangeLog(history.path).text(spans) == text, "another process reads the same"


def stamps(first, last):
    return SimpleNamespace(first_token_ts=float(first), last_token_ts=float(last))


@pytest.mark.parametrize(
    ("sequences", "kind", "status", "header", "comment"),
    [
        ([stamps(31, 32)], "application/json", 200, "5", None),
        # vLLM's output for n > 1 has the times of the sequence that ended last
        ([stamps(11, 12), stamps(31, 32)], "application/json", 200, "4-5", None),
        ([stamps(31, 32), stamps(21, 22)], "application/json", 200, "4-5", None),
        # one sequence has not begun, so it ends now
        ([stamps(11, 12), stamps(0, 0)], "text/event-stream", 200, "4", "4-5"),
        ([stamps(11, 31)], "text/event-stream; charset=utf-8", 200, "4-5", "4-5"),
        # without statistics the span is from the request's arrival to now
        ([None], "application/json", 200, "5", None),
        ([], "application/json", 200, None, None),
        # one sequence ended now, without a token
        ([stamps(11, 12), stamps(0, 0)], "application/json", 200, "4-5", None),
        # the only sequence of a stream ended now, without a token
        ([stamps(0, 0)], "text/event-stream", 200, "5", "5"),
        ([stamps(0, 0)], "application/json", 500, None, None),
        ([stamps(31, 32)], "application/json", 400, None, None),
    ],
)
def test_an_answer_names_the_policies_of_all_its_sequences(
    history, monkeypatch, sequences, kind, status, header, comment
):
    answer = answered(history, monkeypatch, sequences, kind, status)
    assert answer.headers.get(HEADER) == header
    assert answer.text == "data: [DONE]" + (f": {HEADER}: {comment}\n\n" if comment else "")


@pytest.mark.parametrize("sequences", [[stamps(31, 32)], [stamps(0, 0)], [None]])
def test_an_answer_before_its_tokens_names_no_policy(history, monkeypatch, sequences):
    """Such are answers of /v1/responses with background: true, whose tokens may come from a later policy."""
    answer = answered(history, monkeypatch, sequences, "application/json", 200, over=0)
    assert HEADER not in answer.headers
    more = [stamps(11, 12), *sequences]
    assert HEADER not in answered(history, monkeypatch, more, "application/json", 200, over=1).headers
    assert HEADER in answered(history, monkeypatch, more, "application/json", 200, over=2).headers


def test_what_is_no_request_passes_as_it_is():
    """Such are the server's start and end (lifespan), and WebSockets."""
    seen = []

    async def app(*given):
        seen.append(given)

    given = {"type": "lifespan"}, object(), object()
    asyncio.run(StampVersions(app, None)(*given))
    assert seen == [given]


def answered(history, monkeypatch, sequences, kind, status, over=None):
    """Return the answer to a request for which the engine computes ``sequences``. It is given once the first ``over``
    of them have ended, or all."""
    monkeypatch.setattr(time, "monotonic", lambda: 40.0)
    states = {}
    processor = SimpleNamespace(request_states=states, add_request=lambda request: states.update(request.new))
    tell_versions(engine := SimpleNamespace(output_processor=processor))

    async def app(scope, receive, send):
        for i, found in enumerate(sequences):
            request = SimpleNamespace(request_id=str(i), new={str(i): SimpleNamespace(stats=found)})
            engine.output_processor.add_request(request)
        engine.output_processor.add_request(SimpleNamespace(request_id="ended already", new={}))
        if not kind.startswith("text/event-stream"):
            for i in range(len(sequences) if over is None else over):
                del states[str(i)]  # vLLM forgets requests that have ended
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind.encode())]})
        await send({"type": "http.response.body", "body": b"data: ", "more_body": True})
        await send({"type": "http.response.body", "body": b"[DONE]", "more_body": False})

    async def ask():
        transport = httpx.ASGITransport(StampVersions(app, SimpleNamespace(changes=history)))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.get("/")

    return asyncio.run(ask())


def test_a_log_goes_on_when_it_is_full_and_forgets_the_oldest(monkeypatch):
    monkeypatch.setattr(change_log, "KEPT", 3)
    log = ChangeLog()
    reader = ChangeLog(log.path)
    for moment in range(1, 6):
        monkeypatch.setattr(time, "monotonic", lambda moment=moment: float(moment))
        log.add(10 * moment)
    assert [reader.text([(moment, moment + 0.5)]) for moment in (5, 4, 3, 2)] == ["50", "40", "30", "30"]
    assert reader.text([(3.5, 5.5)]) == "30-50"


def test_a_pause_is_known_to_every_process_until_it_ends():
    log = ChangeLog()
    reader = ChangeLog(log.path)
    for is_so in (True, False):
        log.is_paused = is_so
        assert reader.is_paused is is_so and not reader.is_lost and reader.count == 0


def test_a_lost_engine_is_known_to_every_process():
    log = ChangeLog()
    reader = ChangeLog(log.path)
    log.add(1)
    assert not reader.is_lost
    reader.lose()
    log.add(2)
    assert log.is_lost and reader.text([(time.monotonic(), time.monotonic())]) == "2"
