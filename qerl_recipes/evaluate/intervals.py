"""Compute confidence intervals: QeRL prints one with every accuracy."""

from collections.abc import Sequence
from math import comb, sqrt
from typing import Any

import numpy as np

Z95 = 1.959963984540054  # the 97.5 % point of the standard normal distribution


def wilson(successes: float, n: float) -> tuple[float, float]:
    """Return the 95 % score interval (low, high) for ``successes`` out of ``n`` independent trials.

    Both arguments may be fractional: for dependent trials, pass the effective number of trials.

    Unlike the normal approximation, the interval keeps its coverage near 0 and 1 and never leaves [0, 1].
    Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927).
    """
    share, z2 = successes / n, Z95 * Z95
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half_width = Z95 / (1 + z2 / n) * sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    low = 0.0 if successes == 0 else centre - half_width
    high = 1.0 if successes == n else centre + half_width
    return low, high


def summary(shares: Sequence[float], num_samples: int = 1) -> dict[str, Any]:
    """Return the accuracy and its 95 % interval, of each problem's share of right answers among ``num_samples``.

    With one sample per problem, the interval is Wilson's. With several, answers to one problem resemble each other, so
    it is Wilson's at the effective number of samples: accuracy * (1 - accuracy) / variance of the mean over problems,
    but at most the number of answers. Where that variance says nothing, with one problem or all answers alike, it is
    the number of problems.

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


def mean(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean of one value a problem and its 95 % interval; that is None for fewer than two problems.

    The interval is the percentile bootstrap's, over problems, with 9999 resamples of a fixed seed.
    Source: B. Efron and R. J. Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
    """
    from scipy import stats

    interval = None
    if len(values) > 1:
        drawn = stats.bootstrap((values,), np.mean, n_resamples=9999, method="percentile", random_state=0, batch=100)
        interval = [float(drawn.confidence_interval.low), float(drawn.confidence_interval.high)]
    return {"value": float(np.mean(values)), "ci95": interval, "interval": "bootstrap over problems"}


def over_seeds_and_problems(differences: Sequence[np.ndarray]) -> tuple[float, float, float]:
    """Return the mean accuracy difference of two configurations and its 95 % interval, as (mean, low, high).

    ``differences[t][s, p]`` is the difference in problem p of task t and the runs with seed s; the mean is over the
    tasks' means. Seeds and problems, at least two of each, are crossed random factors without replication. Analysis of
    variance gives an unbiased estimate of the variance of the mean. It is the variance over the seeds' means, plus one
    term for each task where that term is above zero: (MS_problems - MS_rest) / (seeds * problems * tasks^2). The
    degrees of freedom are Satterthwaite's. With few seeds the interval over seeds alone may be wider, and is returned
    then.

    Sources: S. R. Searle, G. Casella and C. E. McCulloch, Variance Components (1992), chapter 4; F. E. Satterthwaite,
    An approximate distribution of estimates of variance components, Biometrics Bulletin 2 (1946).
    """
    from scipy import stats

    seeds = len(differences[0])
    means = np.mean([task.mean(axis=1) for task in differences], axis=0)  # one mean per seed, over the tasks
    mean, of_seeds = float(means.mean()), float(means.var(ddof=1)) / seeds
    variance, fluctuation = of_seeds, of_seeds**2 / (seeds - 1)  # for the degrees of freedom
    for task in differences:
        problems = task.shape[1]
        problem_means = task.mean(axis=0)  # one mean per problem, over the seeds
        residuals = task - task.mean(axis=1, keepdims=True) - problem_means + task.mean()
        freedom = (seeds - 1) * (problems - 1)
        scale = seeds * problems * len(differences) ** 2
        of_problems = seeds * float(problem_means.var(ddof=1)) / scale
        of_residuals = float((residuals**2).sum()) / freedom / scale
        if of_problems > of_residuals:
            variance += of_problems - of_residuals
            fluctuation += of_problems**2 / (problems - 1) + of_residuals**2 / freedom
    if variance == 0:
        return mean, mean, mean
    half = stats.t.ppf(0.975, variance**2 / fluctuation) * sqrt(variance)
    half = float(max(half, stats.t.ppf(0.975, seeds - 1) * sqrt(of_seeds)))
    return mean, mean - half, mean + half


def pass_at_k(right: int, n: int, k: int) -> float:
    """Return an unbiased estimate of the chance that at least one of ``k`` answers is right.

    ``right`` of ``n >= k`` drawn answers are right. The estimate is 1 - C(n - right, k) / C(n, k).
    Source: M. Chen et al., Evaluating large language models trained on code, arXiv 2107.03374, section 2.1.
    """
    return 1 - comb(n - right, k) / comb(n, k)


def several(right: Sequence[Sequence[bool]], voted: Sequence[bool]) -> dict[str, Any]:
    """Return pass@k and maj@n, each with its 95 % interval over problems; n is the number of answers per problem.

    k takes the powers of two from 2 up to n, and n itself. ``right[i]`` says which answers to problem i are right.
    ``voted[i]`` says whether its majority answer is right.
    Source of the vote: X. Wang et al., Self-consistency improves chain of thought reasoning, arXiv 2203.11171.
    """
    n = len(right[0])
    powers = [k for k in (2**i for i in range(1, n.bit_length())) if k < n]
    pass_at = {}
    for k in [*powers, n]:
        values = [pass_at_k(sum(answers), n, k) for answers in right]
        pass_at[str(k)] = _value(values, n if k < n else 1)  # at k = n each value is 0 or 1: one trial per problem
    return {"pass_at": pass_at, "maj_at": {str(n): _value([float(vote) for vote in voted], 1)}}


def _value(values: Sequence[float], num_samples: int) -> dict[str, Any]:
    figures = summary(values, num_samples)
    return {"value": figures["accuracy"], "ci95": figures["ci95"]}
