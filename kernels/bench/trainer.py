"""The trainer's kernels: dequantize, quantize, the operands of an adapted layer, linear log-probabilities.

``python trainer.py``
"""

from functools import partial

import torch
from qerl_kernels import nvfp4_triton, wide
from qerl_kernels.linear_logprob import linear_logprob
from qerl_kernels.silu_mul import silu_mul
from timing import interleaved


def chunked_logprob(hidden: torch.Tensor, w: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """What a trainer does without the kernel: BF16 logits, log-softmax in fp32, 1024 tokens at a time."""
    parts = []
    for rows in range(0, hidden.shape[0], 1024):
        log_p = torch.log_softmax((hidden[rows : rows + 1024] @ w.t()).float(), dim=-1)
        parts.append(log_p.gather(1, targets[rows : rows + 1024, None]))
    return torch.cat(parts)


def with_gradient(function, hidden: torch.Tensor, *arguments: torch.Tensor) -> None:
    """One forward and one backward."""
    hidden.grad = None
    result = function(hidden, *arguments)
    (result[0] if isinstance(result, tuple) else result).sum().backward()


def seconds(call) -> float:
    """Of one call, after one to warm up, without a graph."""
    call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def operands() -> None:
    """What is written for down_proj of 7B behind a gate, at 8192 tokens, and behind W0 of its q."""
    T, K, R = 8192, 18944, 32
    gates, ups = ([torch.randn(T, K, device="cuda", dtype=torch.bfloat16) for _ in range(2)] for _ in range(2))
    pairs = list(zip(gates, ups, strict=True))
    H, R3, (used, room) = 3584, 3 * R, wide.columns(3 * R)
    w = torch.empty(H, H + room, device="cuda", dtype=torch.bfloat16)[:, : H + used]
    B, bias = torch.randn(H, R, device="cuda"), torch.randn(H, device="cuda").bfloat16()
    times = interleaved(
        {
            "silu(gate) * up, copied": [lambda g=g, u=u: wide.widen(silu_mul(g, u), R) for g, u in pairs],
            "silu(gate) * up in place": [partial(wide.widen_silu_mul, g, u, R) for g, u in pairs],
            "behind W0": [partial(wide.fill, w, H, R3, 0, B, bias, 0.37)],
        }
    )
    for name, us in times.items():
        print(f"{name}: {us:.1f} us")


def main() -> None:
    operands()
    N, K = 37888, 3584
    weights = [torch.randn(N, K, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    packed = [nvfp4_triton.quantize(w) for w in weights]
    targets = [torch.empty_like(w) for w in weights]
    times = interleaved(
        {
            "copy": [partial(target.copy_, w) for target, w in zip(targets, weights, strict=True)],
            "dequantize": [partial(nvfp4_triton.dequantize, p.codes, p.block_scales) for p in packed],
            "quantize": [partial(nvfp4_triton.quantize, w, p.divisor) for w, p in zip(weights, packed, strict=True)],
        }
    )
    for name, bytes_each in (("copy", 4), ("dequantize", 2.5625), ("quantize", 2.5625)):
        print(f"{name} ({N}, {K}): {times[name]:.1f} us, {N * K * bytes_each / times[name] / 1e6:.2f} TB/s")
    del weights, packed, targets

    T, H, V = 8192, 3584, 152064
    hidden = torch.randn(T, H, device="cuda", dtype=torch.bfloat16).requires_grad_()
    w = torch.randn(V, H, device="cuda", dtype=torch.bfloat16) * 0.02
    tokens = torch.randint(0, V, (T,), device="cuda")
    for name, function in (("linear_logprob", linear_logprob), ("torch, 1024 tokens at a time", chunked_logprob)):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            forward = seconds(partial(function, hidden, w, tokens))
        both = seconds(partial(with_gradient, function, hidden, w, tokens))
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        rate = 2 * T * H * V / forward / 1e12
        times = f"forward {forward * 1e3:.1f} ms ({rate:.0f} TFLOP/s), with backward {both * 1e3:.1f} ms"
        print(f"{name}: {times}, {peak:.2f} GiB")


if __name__ == "__main__":
    main()
