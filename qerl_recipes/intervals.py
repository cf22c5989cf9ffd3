"""Confidence intervals for an accuracy: every accuracy that QeRL prints comes with one."""

from math import sqrt

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
