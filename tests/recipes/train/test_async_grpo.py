"""Test what this package adds to TRL's AsyncGRPO; served/test_async_grpo.py plays on a server."""

import asyncio
from types import SimpleNamespace
from unittest.mock import AsyncMock, MagicMock

import pytest
import torch
from trl.experimental.async_grpo import packing

from qerl_recipes.rollout.server_link import AnotherPolicyError
from qerl_recipes.train import async_grpo
from qerl_vllm_plugin.client import VERSION_HEADER


def test_segments_attend_as_whole_sequences_do():
    """Check a row of two sequences with a common beginning against each of them alone."""
    torch.manual_seed(0)
    row, samples = packing.TreeRow(), [[5, 6, 7, 8, 9], [5, 6, 7, 3]]
    for ids in samples:
        sample = {
            "input_ids": ids,
            "completion_mask": [0] * 3 + [1] * (len(ids) - 3),
            "old_log_probs": [0.0] * len(ids),
        }
        row.add({**{name: torch.tensor(value) for name, value in sample.items()}, "advantage": 1.0, "group_id": 0})
    packed, nodes = row.pack(), row.sample_nodes
    assert len(packed["input_ids"]) < sum(map(len, samples))
    order = {node: place for place, node in enumerate(sorted(range(len(row.tokens))))}
    query, key, value = (torch.randn(len(row.tokens), heads, 8) for heads in (4, 2, 2))
    starts, key_starts, index = (packed[f"tree_{name}"] for name in ("cu_seqlens_q", "cu_seqlens_k", "kv_index"))
    found = async_grpo.attention(
        query, key[index], value[index], starts, key_starts, 0, 0, softmax_scale=None, causal=True, window_size=(-1, -1)
    )
    for of in nodes:
        places = [order[node] for node in of]
        q, k, v = (x[places].transpose(0, 1)[None] for x in (query, key, value))
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(found[places], expected[0].transpose(0, 1))


@pytest.mark.parametrize(
    ("header", "is_ours"), [("7", True), ("7-8", True), ("6-7", False), ("9", False), (None, False)]
)
def test_an_answer_of_another_policy_ends_the_run(header, is_ours):
    """Check answers to a request that was sent at version 7, before and while 8 is pushed."""

    class Answer:
        status = 200
        headers = {} if header is None else {VERSION_HEADER: header}
        raise_for_status = MagicMock()
        json = AsyncMock(return_value={"choices": []})

    async def once(call, **options):
        return await call()

    session = MagicMock()
    session.post.return_value.__aenter__.return_value = Answer
    loop = SimpleNamespace(model_version=7, session=session, vllm_server_url="", _retry=once, _rates={})
    loop._rates = {"sampling/mixed_versions": [0, 0]}
    post = async_grpo.CheckedLoop._post(loop, "/v1/completions", {}, 1.0)
    if is_ours:
        assert asyncio.run(post) == {"choices": []}
        assert loop._rates == {"sampling/mixed_versions": [header == "7-8", 1]}
        return
    with pytest.raises(AnotherPolicyError, match="this run had pushed 7 before and 7 after"):
        asyncio.run(post)
