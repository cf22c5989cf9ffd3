"""Test log-probabilities from hidden states: values and gradients against fp64 autograd, chunks, and refusals."""

import pytest
import torch
from qerl_kernels import linear_logprob as module
from qerl_kernels.linear_logprob import linear_logprob, reference

T, H, V = 7, 24, 301


def example():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, H, generator=generator)
    w = torch.randn(V, H, generator=generator)
    targets = torch.randint(0, V, (T,), generator=generator)
    return hidden, w, targets, torch.randn(3, T, generator=generator)


@pytest.mark.parametrize("rows", [1, 3, 100], ids=["a token a chunk", "three tokens a chunk", "one chunk"])
def test_values_and_gradient_agree_with_fp64(rows, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", 4 * V * rows)
    hidden, w, targets, upstream = example()
    ours = hidden.clone().requires_grad_()
    exact = hidden.double().requires_grad_()
    results = linear_logprob(ours, w, targets, 0.7)
    expected = reference(exact, w.double(), targets, 0.7)
    for name, a, b in zip(("logp", "logsumexp", "entropy"), results, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5, msg=name)
    sum((a * g).sum() for a, g in zip(results, upstream, strict=True)).backward()
    sum((a * g).sum() for a, g in zip(expected, upstream.double(), strict=True)).backward()
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_no_chunk_of_logits_takes_more_memory_than_it_may(rows, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", 4 * V * rows)
    made, inner = [], module._logits
    monkeypatch.setattr(module, "_logits", lambda *given: made.append(inner(*given)) or made[-1])
    hidden, w, targets, _ = example()
    linear_logprob(hidden, w, targets)
    assert [len(logits) for logits in made] == {1: [1] * 7, 3: [3, 3, 1], 100: [7]}[rows]


def test_rounded_logits_are_those_of_an_output_layer_that_writes_bf16():
    hidden, w, targets, upstream = example()
    ours, w = hidden.bfloat16().requires_grad_(), w.bfloat16()
    results = linear_logprob(ours, w, targets, 0.7, rounded=True)
    exact = linear_logprob(ours, w, targets, 0.7)
    theirs = ours.detach().clone().requires_grad_()
    log_p = torch.log_softmax((theirs @ w.t()).float() / 0.7, dim=-1)
    expected = log_p.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(results[0], expected, rtol=1e-6, atol=1e-5)
    assert float((results[0] - exact[0]).detach().abs().max()) > 1e-3
    (results[0] * upstream[0]).sum().backward()
    (expected * upstream[0]).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=2e-2, atol=2e-2)


def test_an_unused_result_leaves_no_gradient():
    hidden, w, targets, _ = example()
    ours, exact = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    linear_logprob(ours, w, targets)[0].sum().backward()
    reference(exact, w.double(), targets)[0].sum().backward()
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounded", [False, True])
def test_the_gradient_prepared_ahead_is_that_of_the_backward_with_two_products_not_three(dtype, rounded, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", 4 * V * 3)
    hidden, w, targets, upstream = example()
    products, inner = [], module._logits
    monkeypatch.setattr(module, "_logits", lambda *arguments: products.append(1) or inner(*arguments))
    found, logits = {}, {}
    for ahead in (True, False):
        ours = hidden.to(dtype).requires_grad_()
        products.clear()
        logp, *_ = linear_logprob(ours, w.to(dtype), targets, 0.7, rounded=rounded, ahead=ahead)
        (logp * upstream[0]).sum().backward()
        found[ahead], logits[ahead] = ours.grad, len(products)
    assert logits == {True: 3, False: 6}  # products, one per chunk
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7  # relative to the largest value: BF16 adds one rounding
    torch.testing.assert_close(found[True], found[False], rtol=0, atol=tolerance * float(found[False].abs().max()))


def test_with_a_gradient_of_entropy_or_none_at_all_ahead_changes_nothing():
    hidden, w, targets, upstream = example()
    gradients = []
    for ahead in (True, False):
        ours = hidden.clone().requires_grad_()
        logp, _, entropy = linear_logprob(ours, w, targets, 0.7, ahead=ahead)
        (logp * upstream[0] + entropy * upstream[2]).sum().backward()
        gradients.append(ours.grad)
    assert torch.equal(*gradients)
    with torch.no_grad():
        assert torch.ops.qerl.linear_logprob(hidden, w, targets, 1.0, False, False)[3].shape == (0, H)
        assert all(value.grad_fn is None for value in linear_logprob(hidden.requires_grad_(), w, targets))


def test_large_logits_do_not_overflow():
    hidden, w, targets, _ = example()
    results = linear_logprob(hidden * 200, w, targets)
    assert all(torch.isfinite(value).all() for value in results)
    expected = reference(hidden.double() * 200, w.double(), targets)[0]
    torch.testing.assert_close(
        results[0].double(), expected, rtol=2e-6, atol=0
    )  # fp32 sums of 24 products in any order


def test_operators_pass_torch_library_checks():
    hidden, w, targets, _ = example()
    torch.library.opcheck(torch.ops.qerl.linear_logprob.default, (hidden.requires_grad_(), w, targets, 1.0, True, True))
    torch.library.opcheck(torch.ops.qerl.linear_logprob.default, (hidden, w, targets, 1.0, True, False))


def test_refusals():
    hidden, w, targets, _ = example()
    with pytest.raises(ValueError, match="no gradient for w"):
        linear_logprob(hidden, w.clone().requires_grad_(), targets)
    with pytest.raises(ValueError, match="shapes"):
        linear_logprob(hidden, w[:, :-1], targets)
    with pytest.raises(ValueError, match=r"\(6,\)\); they must be"):
        linear_logprob(hidden, w, targets[:-1])
    with pytest.raises(ValueError, match="temperature is 0"):
        linear_logprob(hidden, w, targets, 0)


def test_in_float16_the_gradient_of_small_probabilities_is_as_exact_as_in_bfloat16():
    """Use a large vocabulary of similar tokens: each has probability 7e-6, where float16 has few bits left."""
    generator = torch.Generator().manual_seed(0)
    T, V, H = 4, 152064, 32
    w = (0.05 * torch.randn(V, H, generator=generator) + 0.02).half()
    hidden, targets = 2 * torch.randn(T, H, generator=generator), torch.arange(T)
    errors = {}
    for dtype in (torch.float16, torch.bfloat16):
        x, weight = hidden.to(dtype).requires_grad_(), w.to(dtype)
        linear_logprob(x, weight, targets)[0].sum().backward()
        exact = x.detach().double().requires_grad_()
        reference(exact, weight.double(), targets)[0].sum().backward()
        errors[dtype] = ((x.grad.double() - exact.grad).norm() / exact.grad.norm()).item()
    assert 0 < errors[torch.float16] < errors[torch.bfloat16] < 3e-3
