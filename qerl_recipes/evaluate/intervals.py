"""Confidence intervals: every accuracy that QeRL prints comes with one."""

from collections.abc import Sequence
from math import comb, sqrt
from typing import Any

import numpy as np

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


def over_seeds_and_problems(differences: Sequence[np.ndarray]) -> tuple[float, float, float]:
    """Return the mean difference of two arms and its 95 % interval (low, high), over seeds and problems alike.

    ``differences[t][s, p]``: the share of right answers of one arm less that of the other, to problem p of task t by
    the runs with seed s. The mean is over the tasks' means. Seeds and problems are crossed random factors without
    replication, for which the analysis of variance estimates the variance of the mean without bias: that over the
    seeds' means, plus (MS_problems - MS_rest) / (seeds * problems) of each task, where that is above zero. Degrees of
    freedom are Satterthwaite's. Over few seeds such an interval may come out below that over seeds alone, for these
    problems; the wider one of the two is returned.
    Sources: S. R. Searle, G. Casella and C. E. McCulloch, Variance Components (1992), chapter 4; F. E. Satterthwaite,
    An approximate distribution of estimates of variance components, Biometrics Bulletin 2 (1946).

    Raises ValueError for fewer than two seeds or two problems of a task.
    """
    from scipy import stats

    shapes = [of.shape for of in differences]
    if any(seeds < 2 or problems < 2 for seeds, problems in shapes) or len({seeds for seeds, _ in shapes}) != 1:
        raise ValueError(f"an interval needs the same seeds of each task, two or more, and two problems; got {shapes}")
    seeds = shapes[0][0]
    means = np.mean([of.mean(axis=1) for of in differences], axis=0)  # a seed's, over the tasks
    mean, of_seeds = float(means.mean()), float(means.var(ddof=1)) / seeds
    variance, fluctuation = of_seeds, of_seeds**2 / (seeds - 1)  # the second gives the degrees of freedom
    for of in differences:
        problems = of.shape[1]
        parts = of.mean(axis=0)  # a problem's, over the seeds
        rest = of - of.mean(axis=1, keepdims=True) - parts + of.mean()
        freedom = (seeds - 1) * (problems - 1)
        scale = seeds * problems * len(differences) ** 2
        of_problems, of_rest = seeds * float(parts.var(ddof=1)) / scale, float((rest**2).sum()) / freedom / scale
        if of_problems > of_rest:
            variance += of_problems - of_rest
            fluctuation += of_problems**2 / (problems - 1) + of_rest**2 / freedom
    if variance == 0:
        return mean, mean, mean
    half = stats.t.ppf(0.975, variance**2 / fluctuation) * sqrt(variance)
    half = float(max(half, stats.t.ppf(0.975, seeds - 1) * sqrt(of_seeds)))
    return mean, mean - half, mean + half


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
