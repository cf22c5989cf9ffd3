"""Confidence intervals: every accuracy that QeRL prints comes with one."""

from collections.abc import Sequence
from math import comb, sqrt
from typing import Any

Z95 = 1.959963984540054  # the 97.5 % point of the standard normal distribution


def wilson(successes: float, n: float) -> tuple[float, float]:
    """95 % score interval (low, high) for a share of ``successes`` out of ``n`` independent trials.

    Both may be fractions: an effective number of trials, where the trials were not independent.

    Unlike the normal approximation it keeps its coverage near 0 and 1 and never leaves [0, 1].
    Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927).

    Raises ValueError unless 0 <= successes <= n and n > 0.
    """
    if n <= 0 or not 0 <= successes <= n:
        raise ValueError(f"an interval needs 0 <= successes <= n and n > 0; got {successes} of {n}")
    share, z2 = successes / n, Z95 * Z95
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half_width = Z95 / (1 + z2 / n) * sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    low = 0.0 if successes == 0 else centre - half_width
    high = 1.0 if successes == n else centre + half_width
    return low, high


def disjoint(a: tuple[float, float], b: tuple[float, float]) -> bool:
    """True where two intervals (low, high) have no point in common."""
    return a[1] < b[0] or b[1] < a[0]


def summary(shares: Sequence[float], num_samples: int = 1) -> dict[str, Any]:
    """Accuracy and its 95 % interval; ``shares`` has the share of right answers, of ``num_samples``, to each problem.

    One sample a problem: Wilson's interval. Several: answers to one problem resemble each other, so Wilson's interval
    is taken at the effective number of samples, accuracy * (1 - accuracy) / variance of the mean over problems; where
    that variance says nothing (one problem, or all answers alike) at the number of problems.
    Source: E. L. Korn and B. I. Graubard, Confidence intervals for proportions with small expected number of positive
    counts estimated from survey data, Survey Methodology 24 (1998).
    """
    n = len(shares)
    accuracy = sum(shares) / n
    size: float = n
    if num_samples > 1 and n > 1 and 0 < accuracy < 1:
        variance = sum((share - accuracy) ** 2 for share in shares) / (n * (n - 1))
        size = min(n * num_samples, accuracy * (1 - accuracy) / variance) if variance > 0 else n * num_samples
    return {
        "accuracy": accuracy,
        "n": n,
        "num_samples": num_samples,
        "ci95": list(wilson(min(accuracy, 1.0) * size, size)),
        "interval": "Wilson" if num_samples == 1 else "Wilson, effective sample size, clustered by problem",
    }


def pass_at_k(right: int, n: int, k: int) -> float:
    """The chance that one of ``k`` answers is right, from ``n >= k`` answers of which ``right`` are: without bias.

    1 - C(n - right, k) / C(n, k). Source: M. Chen et al., Evaluating large language models trained on code,
    arXiv 2107.03374, section 2.1.
    """
    if not (0 <= right <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= right <= n and 1 <= k <= n; got right {right}, n {n}, k {k}")
    return 1 - comb(n - right, k) / comb(n, k)


def several(right: Sequence[Sequence[bool]], voted: Sequence[bool]) -> dict[str, Any]:
    """pass@k for k = 2, 4, ... and the number of answers, and maj@n, each with its 95 % interval over problems.

    ``right[i]`` says which answers to problem i are right, ``voted[i]`` whether the one that most of them agree on is.
    Source of the vote: X. Wang et al., Self-consistency improves chain of thought reasoning, arXiv 2203.11171.
    """
    n = len(right[0])
    powers = [k for k in (2**i for i in range(1, n.bit_length())) if k < n]
    found = {}
    for k in [*powers, n]:
        values = [pass_at_k(sum(answers), n, k) for answers in right]
        found[str(k)] = _value(values, n if k < n else 1)  # at k = n each value is 0 or 1, a trial of its own
    return {"pass_at": found, "maj_at": {str(n): _value([float(vote) for vote in voted], 1)}}


def _value(values: Sequence[float], num_samples: int) -> dict[str, Any]:
    found = summary(values, num_samples)
    return {"value": found["accuracy"], "ci95": found["ci95"]}
