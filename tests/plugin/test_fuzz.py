"""Fuzz the readers of untrusted input: each refuses bad input by its own error, soon, and without taking memory.

Each test runs a few hundred examples; ``make fuzz`` tries many more. An input that once came through is kept as an
``example``. Atheris 3.0.0, a coverage-guided fuzzer, found nothing on 2026-11-23. It ran ten minutes each on the body
(223,000 inputs), on a header in a file that fits it (311,000) and on the adapter's config (28.5 million).
"""

import asyncio
import contextlib
import json
import resource
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from starlette.requests import Request

from qerl_vllm_plugin.adapter import check
from qerl_vllm_plugin.adapter.check import AdapterError, Target
from qerl_vllm_plugin.options import Options
from qerl_vllm_plugin.weights.checkpoint import inspect_folder
from qerl_vllm_plugin.wire import body
from qerl_vllm_plugin.wire.safetensors_file import CheckpointError, read_header
from qerl_vllm_plugin.wire.shared_segment import Segments

FIXTURE = Path(__file__).parents[1] / "fixtures" / "llmcompressor" / "qwen2-nvfp4"
LIMIT = 1 << 16  # bytes of a body
SOON = 1.0  # seconds
MOST_MEMORY = 256 << 10  # KiB that all examples of a test together may allocate

PEFT = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
TARGETS = {
    "model.layers.0.self_attn.q_proj": Target("qkv", 0, 8, 8),
    "model.layers.1.mlp.up_proj": Target("up", 0, 8, 8),
}
PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"
TENSORS = {f"{PREFIX}.lora_A.weight": torch.ones(2, 8), f"{PREFIX}.lora_B.weight": torch.ones(8, 2)}
ADAPTER = save(TENSORS, metadata={"adapter_config": json.dumps(PEFT)})
CONFIG = json.loads((FIXTURE / "config.json").read_text())
MANY_EXPERTS = {"model_type": "qwen3_moe", "num_hidden_layers": 1000, "num_experts": 4096, "moe_intermediate_size": 16}

# texts that json.dumps would not write; each replaces a mark in the JSON text
RAW = ["[" * 100_000, '{"a":' * 50_000, "1e999", "-1e999", "NaN", "9" * 4000, "9" * 5000, '"\\ud800"', "1" + "0" * 400]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([f"@{i}@" for i in range(len(RAW))])
    | st.sampled_from([0, -1, 1, 2**31, 2**63, 2**64, "(a+)+$", "(", "F32", "U8", "group_0", "q_proj"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def text_of(value):
    text = json.dumps(value)
    for i, raw in enumerate(RAW):
        text = text.replace(f'"@{i}@"', raw)
    return text.encode("utf-8", "replace")


def places(value, path=()):
    """Return the paths of all values inside a JSON value."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


def changed(value, path, new):
    """Return a copy of a JSON value with ``new`` at ``path``."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


def variants(sound):
    """Draw texts of a sound JSON object with up to three parts replaced, texts of other values, and raw bytes."""

    @st.composite
    def draw(pick):
        value = sound
        for _ in range(pick(st.integers(0, 3))):
            value = changed(value, pick(st.sampled_from(places(value))), pick(VALUES))
            if not places(value):
                break
        return text_of(value)

    return draw() | VALUES.map(text_of) | st.binary(max_size=64)


def damaged(sound):
    """Draw bytes of a sound file that are changed, cut off, or have another header length."""

    @st.composite
    def draw(pick):
        content = bytearray(sound)
        for place, byte in pick(st.lists(st.tuples(st.integers(0, min(len(sound), 600) - 1), st.integers(0, 255)))):
            content[place] = byte
        return bytes(content[: pick(st.integers(0, len(content)))])

    return draw()


def file_of(header, size):
    """Return a safetensors file with this header and ``size`` bytes after it."""
    return len(header).to_bytes(8, "little") + header + bytes(size)


HEADER = {"__metadata__": {"adapter_config": json.dumps(PEFT)}}
HEADER |= {
    name: {"dtype": "F32", "shape": [2, 8], "data_offsets": [64 * i, 64 * i + 64]} for i, name in enumerate("ab")
}
FILES = damaged(ADAPTER) | variants(HEADER).map(lambda text: file_of(text, 128)) | st.binary(max_size=64)
EXAMPLES = settings(suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module", autouse=True)
def memory_is_bounded():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_MEMORY


@contextlib.contextmanager
def refused_soon(*errors):
    """Check that the block ends within a second of CPU time, with one of these errors or with none."""
    start = time.process_time()
    with contextlib.suppress(*errors):
        yield
    assert time.process_time() - start < SOON


def request_of(pieces, length):
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive():
        return messages.pop(0)

    headers = [] if length is None else [(b"content-length", length)]
    return Request({"type": "http", "method": "PUT", "path": "/", "headers": headers}, receive)


@EXAMPLES
@given(
    FILES | variants(PEFT).map(lambda text: save({}, metadata={"adapter_config": text.decode("utf-8", "replace")})),
    st.integers(1, 200),
    st.none() | st.binary(max_size=6) | st.just(b"right"),
)
@example(ADAPTER, 100, b"abc")
@example(ADAPTER, 100, b"-1")
@example(ADAPTER, 100, "²".encode("latin-1"))
@example(ADAPTER, 100, b"9" * 5000)
def test_a_body_is_an_adapter_file_or_refused(content, piece, length):
    piece = max(piece, len(content) // 500)
    pieces = [content[i : i + piece] for i in range(0, len(content), piece)]
    request = request_of(pieces, str(len(content)).encode() if length == b"right" else length)

    async def receive():
        with contextlib.ExitStack() as held:
            upload = await body.received(request, LIMIT, Segments(body.Refused), held)
            assert upload.size == len(content) <= LIMIT and isinstance(upload.config, dict)
            body.check_patterns(upload.config)

    with refused_soon(body.Refused):
        asyncio.run(receive())


@pytest.mark.parametrize(
    ("length", "status", "message"),
    [(b"100", 400, "the body was cut off"), (b"9" * 60, 413, f"the body has {'9' * 40} bytes; at most 65536")],
)
def test_a_body_that_breaks_off_or_is_too_long_is_refused(length, status, message):
    async def receive():
        return {"type": "http.disconnect"}

    async def read():
        scope = {"type": "http", "method": "PUT", "path": "/", "headers": [(b"content-length", length)]}
        return [chunk async for chunk in body.chunks(Request(scope, receive), LIMIT)]

    with pytest.raises(body.Refused, match=message) as refused:
        asyncio.run(read())
    assert refused.value.status == status


@EXAMPLES
@given(variants(PEFT))
def test_a_config_of_an_adapter_names_modules_or_is_refused(text):
    with contextlib.suppress(body.Refused, UnicodeDecodeError):
        given_config = body._object("config", text)
        body.check_patterns(given_config)  # this check runs before a worker sees the config
        with refused_soon(AdapterError):
            assert check.check(TENSORS, given_config, TARGETS, 8).rank == 2


@EXAMPLES
@given(FILES)
@example(file_of(b"[" * 100_000, 0))
@example(file_of(b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [%s, %s]}}' % (b"9" * 4300, b"9" * 4300), 0))
@example(file_of(b'{"a": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]}}', 4))
@example(file_of(b'{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}}', 4))
@example(file_of(b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4.0]}}', 4))
def test_a_header_fits_its_file_or_is_refused(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    file.write_bytes(content)
    with refused_soon(CheckpointError):
        for tensor in read_header(file).values():
            assert 0 <= tensor.offset <= tensor.offset + tensor.nbytes <= len(content)
            assert all(type(n) is int for n in (tensor.offset, tensor.nbytes, *tensor.shape))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a checkpoint folder whose config.json each example overwrites."""
    made = tmp_path_factory.mktemp("fuzzed")
    (made / "model.safetensors").write_bytes((FIXTURE / "model.safetensors").read_bytes())
    return made


@EXAMPLES
@given(variants(CONFIG), st.booleans())
@example(b"[" * 100_000, False)
@example(text_of({**CONFIG, "num_hidden_layers": 10**12}), False)
@example(text_of({**CONFIG, "num_hidden_layers": "2"}), False)
@example(text_of({**CONFIG, **MANY_EXPERTS}), False)
@example(text_of({**CONFIG, "num_attention_heads": 0}), False)
@example(text_of({**CONFIG, "hidden_size": None}), False)
@example(text_of({**CONFIG, "model_type": ["qwen2"]}), False)
@example(text_of({**CONFIG, "text_config": "x", "quantization_config": None}), False)
@example(text_of({**CONFIG, "quantization_config": ["compressed-tensors"]}), False)
def test_a_checkpoints_config_fits_its_tensors_or_is_refused(folder, text, weight_only):
    (folder / "config.json").write_bytes(text)
    with refused_soon(CheckpointError):
        inspect_folder(folder, weight_only=weight_only)


@EXAMPLES
@given(variants({"qerl": {"ignore": ["lm_head"], "policy_adapter": {"rank": 8, "path": "x"}, "kernel": "auto"}}))
def test_options_are_honoured_or_refused(text):
    with contextlib.suppress(ValueError, RecursionError):
        given_options = json.loads(text)
        with refused_soon(ValueError):
            Options.parse(given_options)
