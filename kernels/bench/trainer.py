"""Time the trainer's kernels.

They are dequantize, quantize, the operands of an adapted layer, norms, activations, rotations and linear
log-probabilities.

``python trainer.py``
"""

from functools import partial

import torch
from qerl_kernels import nvfp4_triton, wide
from qerl_kernels.linear_logprob import linear_logprob
from qerl_kernels.rms_norm import rms_norm
from qerl_kernels.rotate import rotate
from qerl_kernels.silu_mul import scaled_silu_mul, silu_mul
from timing import interleaved


def chunked_logprob(hidden: torch.Tensor, w: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compute as a trainer does without the kernel: BF16 logits, log-softmax in fp32, 1024 tokens at a time."""
    parts = []
    for rows in range(0, hidden.shape[0], 1024):
        log_p = torch.log_softmax((hidden[rows : rows + 1024] @ w.t()).float(), dim=-1)
        parts.append(log_p.gather(1, targets[rows : rows + 1024, None]))
    return torch.cat(parts)


def with_gradient(function, hidden: torch.Tensor, *arguments: torch.Tensor) -> None:
    """Run one forward and one backward."""
    hidden.grad = None
    result = function(hidden, *arguments)
    (result[0] if isinstance(result, tuple) else result).sum().backward()


def seconds(call) -> float:
    """Return the seconds of one call without a graph, after one to warm up."""
    call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def operands() -> None:
    """Time what is written for down_proj of 7B behind a gate, at 8192 tokens, and behind W0 of its q."""
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


def passes() -> None:
    """Time kernels that read their operands once and write once, in shapes of 7B and Qwen3-30B-A3B at 8192 tokens."""
    T = 8192
    calls = {}
    for rows, H in ((T, 3584), (32 * T, 128)):
        x, w = torch.randn(rows, H, device="cuda", dtype=torch.bfloat16), torch.ones(H, device="cuda")
        calls[f"RMSNorm ({rows}, {H})"] = partial(rms_norm, x, w, 1e-6), 4 * x.numel()
    cosine, sine = torch.rand(2, 1, T, 128, device="cuda")
    for heads in (28, 4):
        x = torch.randn(1, T, heads, 128, device="cuda", dtype=torch.bfloat16)
        calls[f"rotation of {heads} heads"] = partial(rotate, x, cosine, sine), 4 * x.numel() + 8 * cosine.numel()
    N, rows = 768, 8 * T
    joined = torch.randn(rows, 2 * N, device="cuda", dtype=torch.bfloat16)
    scales, dy = torch.rand(rows, 2, device="cuda"), torch.randn(rows, N, device="cuda", dtype=torch.bfloat16)
    calls[f"scaled silu(gate) * up ({rows}, {N})"] = partial(scaled_silu_mul, joined, scales), 6 * dy.numel()
    backward = partial(torch.ops.qerl.scaled_silu_mul_backward, dy, joined, scales)
    calls["its gradient"] = backward, 10 * dy.numel()
    times = interleaved({name: [call] for name, (call, _) in calls.items()})
    for name, (_, size) in calls.items():
        print(f"{name}: {times[name]:.1f} us, {size / times[name] / 1e6:.2f} TB/s")


def main() -> None:
    operands()
    passes()
    N, K = 37888, 3584
    weights = [torch.randn(N, K, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    packed = [nvfp4_triton.quantize(w) for w in weights]
    targets = [torch.empty_like(w) for w in weights]
    times = interleaved(
        {
            "copy": [partial(target.copy_, w) for target, w in zip(targets, weights, strict=True)],
            "dequantize": [partial(nvfp4_triton.dequantize, p.codes, p.block_scales) for p in packed],
            "dequantize, rows apart": [partial(nvfp4_triton.dequantize, p.codes, p.block_scales, 64) for p in packed],
            "quantize": [partial(nvfp4_triton.quantize, w, p.divisor) for w, p in zip(weights, packed, strict=True)],
        }
    )
    for name, us in times.items():
        bytes_each = 4 if name == "copy" else 2.5625
        print(f"{name} ({N}, {K}): {us:.1f} us, {N * K * bytes_each / us / 1e6:.2f} TB/s")
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
