"""Use vLLM's drafts on a CPU and beside a trainer, as read in vLLM 0.26 to 0.31.

vLLM gives each drafted token its request's temperature, top_k and top_p through a kernel. The one for CPUs fills a copy
of the output, which is then dropped. So tokens are drawn, and reported, at whatever the memory held before. Source:
``vllm.utils.cpu_triton_utils._expand_kernel_impl``.
"""

import os

import torch
from vllm.platforms import current_platform


def expand(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Return each request's value of ``x: (requests,)`` once for each of its tokens: (num_tokens,).

    ``cu_num_tokens: (requests,)`` counts the tokens up to and with each request. ``replace_to`` stands in for values
    of ``replace_from``.
    """
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return values.repeat_interleave(cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)))


def expand_on_cpu() -> None:
    """Let vLLM call ``expand`` in place of its kernel; do nothing except on a CPU."""
    if current_platform.is_cpu():
        from vllm.v1.sample import rejection_sampler

        rejection_sampler.expand_batch_to_tokens = expand


def search_beside_torch() -> None:
    """Let numba, with which vLLM finds n-grams, use threads of its own, unless NUMBA_THREADING_LAYER is set.

    Call it before vLLM imports numba. OpenMP's threads stay busy between the calls, and training in the same process
    then takes four times as long on a CPU.
    """
    os.environ.setdefault("NUMBA_THREADING_LAYER", "workqueue")
