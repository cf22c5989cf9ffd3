import contextlib

import torch

from qerl_recipes.model import loading, logprobs
from qerl_recipes.model.packing import pack


@torch.no_grad()
def test_logits_are_rounded_to_the_heads_dtype(make_nvfp4):
    """Compare with torch's BF16 product of the same hidden states.

    Unrounded logits differ by up to 2^-9 of their size.
    """
    model, states = loading.load(make_nvfp4("qwen2")), []
    ids = torch.randint(2, 27, (1, 24), generator=torch.Generator().manual_seed(1))
    assert logprobs.prepare(model) is None
    model.model.register_forward_hook(lambda module, inputs, out: states.append(out.last_hidden_state[0, 7:-1]))
    rows = pack(ids, torch.ones_like(ids), 16, 64, share_prompts=True)
    found, _ = logprobs.completion_logprobs(model, model, rows, (1, 16), 0.6, contextlib.nullcontext)

    def of(logits):
        return (logits.float() / 0.6).log_softmax(-1).gather(1, ids[0, 8:, None])[:, 0]

    weight = model.lm_head.weight
    assert weight.dtype == states[0].dtype == torch.bfloat16
    rounded, unrounded = of(states[0] @ weight.T), of(states[0].float() @ weight.float().T)
    torch.testing.assert_close(found[0], rounded, rtol=0, atol=1e-5)
    assert (unrounded - rounded).abs().max() > 1e-3  # so this test would see missing rounding
