"""Compute the standard deviation of the noise for each rollout, which is one batch of sampled completions.

Source: QeRL (arXiv 2510.11696), section 3.3: noise falls exponentially over num_stages stages, after a first stage
without noise.
"""

import math


def stage(rollout: int, rollouts: int, num_stages: int) -> int:
    """Return the stage, 0 to ``num_stages``, that ``rollout`` (0 is the first) of ``rollouts`` belongs to.

    Raises ValueError unless 0 <= rollout < rollouts and num_stages >= 1.
    """
    if num_stages < 1:
        raise ValueError(f"num_stages is {num_stages}; noise needs at least one stage")
    if not 0 <= rollout < rollouts:
        raise ValueError(f"rollout {rollout} is not one of the {rollouts} rollouts 0 to {rollouts - 1}")
    return rollout * (num_stages + 1) // rollouts


def sigma(rollout: int, rollouts: int, sigma_start: float, sigma_end: float, num_stages: int) -> float:
    """Return the standard deviation of a rollout's noise: 0 in stage 0, then from ``sigma_start`` to ``sigma_end``.

    Stage k of 1 to K has sigma_start * (sigma_end / sigma_start)^((k - 1) / (K - 1)); a single stage has sigma_start.
    Raises ValueError unless 0 < sigma_end <= sigma_start and both are finite, and where ``stage`` does.
    """
    if not (math.isfinite(sigma_start) and 0 < sigma_end <= sigma_start):
        raise ValueError(f"sigma falls from {sigma_start} to {sigma_end}; both must be positive, the second not larger")
    k = stage(rollout, rollouts, num_stages)
    if k == 0:
        return 0.0
    if num_stages == 1:
        return sigma_start
    return sigma_start * (sigma_end / sigma_start) ** ((k - 1) / (num_stages - 1))
