"""Compute log-probabilities, logsumexp and entropy of a policy from its last hidden state, a chunk of logits at a time.

With logits ``l = hidden W^T / temperature`` of one token, in fp32,

    logsumexp = log sum_j exp(l_j)      logp = l_target - logsumexp      entropy = logsumexp - sum_j p_j l_j

and, with p = exp(l - logsumexp), the incoming gradients (a, b, c) of the three give on the logits

    dl_j = a (1[j = target] - p_j) + b p_j - c p_j (log p_j + entropy).

cuBLAS writes a chunk of logits in fp32, and one Triton kernel reads it once. The logits of all tokens are never in
memory at one time.

Where only logp has a gradient, the hidden state's is a times (W_target - p W) / temperature. That vector does not
depend on a, so the forward multiplies by W while it has the logits and keeps the result in the dtype of ``hidden``. The
backward is then one multiplication. For b and c the backward computes the chunk again, turns it into ``dl`` and
multiplies by W. W is frozen.

With ``rounded`` the product is first rounded to the dtype of ``hidden``, as in an engine whose output layer writes
BF16. That gives the policy that was sampled from. The gradient ignores the rounding.
"""

import torch
import triton
import triton.language as tl

CHUNK_BYTES = 512 * 2**20  # bytes of fp32 logits in memory at one time
COLUMNS = 4096  # logits that one step of a kernel reads


def linear_logprob(
    hidden: torch.Tensor,
    w: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    *,
    rounded: bool = False,
    ahead: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute logp, logsumexp and entropy, each ``(T,)`` fp32, differentiable with respect to ``hidden`` only.

    ``hidden: (T, H)``, ``w: (V, H)``, ``targets: (T,)`` int64. Every target must be in [0, V). ``rounded`` rounds
    ``hidden W^T`` to the dtype of ``hidden``.

    ``ahead`` lets the forward prepare the gradient of logp. That takes two products in all instead of three, and keeps
    a tensor like ``hidden`` until the backward. Without it the backward computes everything, which is best where
    logsumexp or entropy have a gradient too.

    Raises ValueError where ``w`` wants a gradient, the shapes do not fit or the temperature is not above zero.
    """
    if w.requires_grad:
        raise ValueError("linear_logprob has no gradient for w: freeze the output layer, or use torch.log_softmax")
    if hidden.dim() != 2 or w.dim() != 2 or hidden.shape[1] != w.shape[1] or targets.shape != hidden.shape[:1]:
        shapes = tuple(hidden.shape), tuple(w.shape), tuple(targets.shape)
        raise ValueError(f"hidden, w and targets have shapes {shapes}; they must be (T, H), (V, H) and (T,)")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be above zero")
    ahead = ahead and hidden.requires_grad and torch.is_grad_enabled()
    return torch.ops.qerl.linear_logprob(hidden, w, targets, temperature, rounded, ahead)[:3]


def reference(
    hidden: torch.Tensor, w: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the same three numbers from all logits at once, in the dtype of ``hidden``."""
    log_p = torch.log_softmax(hidden @ w.t() / temperature, dim=-1)
    logsumexp = torch.logsumexp(hidden @ w.t() / temperature, dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], logsumexp, -(log_p.exp() * log_p).sum(dim=-1)


def _chunks(T: int, V: int) -> list[slice]:
    rows = max(1, CHUNK_BYTES // (4 * V))
    return [slice(start, min(start + rows, T)) for start in range(0, T, rows)]


def _logits(hidden: torch.Tensor, w: torch.Tensor, rounded: bool) -> torch.Tensor:
    """Compute a chunk's ``hidden W^T`` in fp32; with ``rounded`` it is rounded to the dtype of ``hidden`` first."""
    if rounded:
        return torch.mm(hidden, w.to(hidden.dtype).t()).float()
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, w.t(), out_dtype=torch.float32)
    return hidden.float() @ w.t().float()


@torch.library.custom_op("qerl::linear_logprob", mutates_args=())
def _linear_logprob(
    hidden: torch.Tensor, w: torch.Tensor, targets: torch.Tensor, temperature: float, rounded: bool, ahead: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logp, logsumexp, entropy and d logp / d hidden.

    The last is (T, H) in the dtype of ``hidden``, or (0, H) without ``ahead``.
    """
    T, device = hidden.shape[0], hidden.device
    out = torch.empty(3, T, dtype=torch.float32, device=device)
    slope = torch.empty_like(hidden) if ahead else hidden.new_empty(0, hidden.shape[1])
    of_logp = None
    if ahead:
        of_logp = torch.zeros(3, T, dtype=torch.float32, device=device)
        of_logp[0].fill_(1.0)  # torch.tensor([1, 0, 0]) would be copied, and wait for the GPU
    statistics = statistics_triton if hidden.is_cuda else statistics_torch
    for rows in _chunks(T, w.shape[0]):
        logits = _logits(hidden[rows], w, rounded)
        statistics(logits, targets[rows], 1 / temperature, out[:, rows])
        if of_logp is not None:
            gradients = of_logp[:, rows].contiguous()
            _hidden_gradients(logits, w, targets[rows], temperature, out[1:, rows], gradients, slope[rows])
    return out[0].clone(), out[1].clone(), out[2].clone(), slope


@_linear_logprob.register_fake
def _(hidden, w, targets, temperature, rounded, ahead):
    numbers = (hidden.new_empty(hidden.shape[0], dtype=torch.float32) for _ in range(3))
    return (*numbers, torch.empty_like(hidden) if ahead else hidden.new_empty(0, hidden.shape[1]))


def _hidden_gradients(
    logits: torch.Tensor,
    w: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    saved: torch.Tensor,
    gradients: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write one chunk's gradient: ``logits: (T, V)``, ``saved: (2, T)``, ``gradients: (3, T)`` -> ``out: (T, H)``."""
    d_logits = torch.empty_like(logits, dtype=out.dtype)
    logit_gradients = logit_gradients_triton if logits.is_cuda else logit_gradients_torch
    logit_gradients(logits, targets, 1 / temperature, saved, gradients, d_logits)
    torch.mm(d_logits, w.to(out.dtype), out=out)


@torch.library.custom_op("qerl::linear_logprob_backward", mutates_args=())
def _backward(
    hidden: torch.Tensor,
    w: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    rounded: bool,
    saved: torch.Tensor,
    gradients: torch.Tensor,
) -> torch.Tensor:
    """Compute the gradient of ``hidden``: (T, H).

    ``saved: (2, T)`` holds logsumexp and entropy, ``gradients: (3, T)`` those of logp, logsumexp and entropy.
    """
    d_hidden = torch.empty_like(hidden)
    for rows in _chunks(hidden.shape[0], w.shape[0]):
        logits = _logits(hidden[rows], w, rounded)
        _hidden_gradients(logits, w, targets[rows], temperature, saved[:, rows], gradients[:, rows], d_hidden[rows])
    return d_hidden


@_backward.register_fake
def _(hidden, w, targets, temperature, rounded, saved, gradients):
    return torch.empty_like(hidden)


def _save(ctx, inputs, output):
    hidden, w, targets, ctx.temperature, ctx.rounded, ctx.ahead = inputs
    ctx.save_for_backward(hidden, w, targets, torch.stack(output[1:3]), output[3])
    ctx.mark_non_differentiable(output[3])
    ctx.set_materialize_grads(False)


def _gradient(ctx, of_logp, of_logsumexp, of_entropy, _):
    hidden, w, targets, saved, slope = ctx.saved_tensors
    if ctx.ahead and of_logsumexp is None and of_entropy is None:
        d_hidden = None if of_logp is None else (of_logp.float()[:, None] * slope).to(hidden.dtype)
    else:
        gradients = (of_logp, of_logsumexp, of_entropy)
        whole = torch.stack([torch.zeros_like(saved[0]) if g is None else g.float() for g in gradients])
        options = (ctx.temperature, ctx.rounded)
        d_hidden = torch.ops.qerl.linear_logprob_backward(hidden, w, targets, *options, saved, whole)
    return d_hidden, *[None] * 5


_linear_logprob.register_autograd(_gradient, setup_context=_save)


# ---- These compute one chunk of logits (T, V), on a CPU and on a GPU.


def statistics_torch(logits: torch.Tensor, targets: torch.Tensor, factor: float, out: torch.Tensor) -> None:
    """Write logp, logsumexp and entropy of ``logits * factor`` into ``out: (3, T)``."""
    logits = logits * factor
    out[1] = torch.logsumexp(logits, dim=-1)
    out[0] = logits.gather(1, targets[:, None])[:, 0] - out[1]
    log_p = logits - out[1][:, None]
    out[2] = -(log_p.exp() * log_p).sum(dim=-1)


def logit_gradients_torch(
    logits: torch.Tensor,
    targets: torch.Tensor,
    factor: float,
    saved: torch.Tensor,
    gradients: torch.Tensor,
    d_logits: torch.Tensor,
) -> None:
    """Write the gradient with respect to the unscaled ``logits`` into ``d_logits``."""
    a, b, c = gradients[:, :, None]
    log_p = logits * factor - saved[0][:, None]
    d = log_p.exp() * (b - a - c * (log_p + saved[1][:, None]))
    d.scatter_add_(1, targets[:, None], a)
    d_logits.copy_(d * factor)


def statistics_triton(logits: torch.Tensor, targets: torch.Tensor, factor: float, out: torch.Tensor) -> None:
    """Do what ``statistics_torch`` does in one pass over memory."""
    T, V = logits.shape
    with torch.cuda.device_of(logits):
        _statistics_kernel[(T,)](logits, targets, out, factor, V, out.stride(0), COLUMNS=COLUMNS, num_warps=8)


def logit_gradients_triton(
    logits: torch.Tensor,
    targets: torch.Tensor,
    factor: float,
    saved: torch.Tensor,
    gradients: torch.Tensor,
    d_logits: torch.Tensor,
) -> None:
    """Do what ``logit_gradients_torch`` does in one pass over memory."""
    T, V = logits.shape
    tensors = (logits, targets, saved, gradients, d_logits)
    strides = (saved.stride(0), gradients.stride(0))
    with torch.cuda.device_of(logits):
        grid = (T, triton.cdiv(V, COLUMNS))
        _logit_gradients_kernel[grid](*tensors, factor, V, *strides, COLUMNS=COLUMNS, num_warps=8)


@triton.jit
def _statistics_kernel(logits, targets, out, factor, V, out_stride, COLUMNS: tl.constexpr):
    """Reduce one row a program, with a running maximum m.

    It keeps the sums of exp(l - m) and of (l - m) exp(l - m).
    """
    row = tl.program_id(0)
    row_logits = logits + row.to(tl.int64) * V
    at = tl.arange(0, COLUMNS)
    largest = float("-inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, V, COLUMNS):
        inside = start + at < V
        x = tl.load(row_logits + start + at, mask=inside, other=float("-inf")) * factor
        new = tl.maximum(largest, tl.max(x, axis=0))
        shift = tl.where(total > 0, largest - new, 0.0)
        rescale = tl.exp(shift)
        e = tl.exp(x - new)
        weighted = (weighted + shift * total) * rescale + tl.sum(tl.where(inside, (x - new) * e, 0.0), axis=0)
        total = total * rescale + tl.sum(e, axis=0)
        largest = new
    logsumexp = largest + tl.log(total)
    target = tl.load(row_logits + tl.load(targets + row)) * factor
    tl.store(out + row, target - logsumexp)
    tl.store(out + out_stride + row, logsumexp)
    tl.store(out + 2 * out_stride + row, tl.log(total) - weighted / total)


@triton.jit
def _logit_gradients_kernel(
    logits, targets, saved, gradients, d_logits, factor, V, saved_stride, gradients_stride, COLUMNS: tl.constexpr
):
    """Compute COLUMNS numbers of one row's gradient a program."""
    row = tl.program_id(0)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < V
    offset = row.to(tl.int64) * V
    logsumexp = tl.load(saved + row)
    entropy = tl.load(saved + saved_stride + row)
    a = tl.load(gradients + row)
    b = tl.load(gradients + gradients_stride + row)
    c = tl.load(gradients + 2 * gradients_stride + row)
    log_p = tl.load(logits + offset + at, mask=inside, other=0.0) * factor - logsumexp
    d = tl.exp(log_p) * (b - a - c * (log_p + entropy))
    d += tl.where(at == tl.load(targets + row), a, 0.0)
    tl.store(d_logits + offset + at, (d * factor).to(d_logits.dtype.element_ty), mask=inside)
