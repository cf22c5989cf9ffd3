"""Comparisons of two arms over few seeds: t intervals, exact tests, Holm's correction, and what few seeds can see."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan, nan, sqrt

import numpy as np
from scipy import optimize, stats

ALPHA = 0.05
POWER = 0.8
FLIPS = 2**14  # sign flips: all of them up to 14 seeds, beyond that as many drawn at random
EQUAL = 2e-5  # of the values: differences nearer than this are equal, but for the six digits of a table
IF_NORMAL = ", if normal"  # behind a verdict that the exact test alone does not give


@dataclass(frozen=True)
class Comparison:
    """``a`` against ``b``, paired by seed: the mean ``difference`` a - b, and its 95 % interval ``t_low``, ``t_high``.

    ``p`` is two-sided, from the paired t test, which takes the differences for normal; ``p_exact`` is that of flipping
    their signs, which does not. ``p_holm`` and ``exact_holm`` are corrected over the comparisons of the study.
    ``unpaired_low``, ``unpaired_high``: Welch's interval, for arms that a seed does not make alike. ``above``: how many
    runs of a and of b are in the upper of two states (`by_state`); p is then Fisher's, and there is no interval.
    """

    a: str
    b: str
    seeds: int
    difference: float
    p: float
    p_exact: float
    p_holm: float = nan
    exact_holm: float = nan
    t_low: float = nan
    t_high: float = nan
    unpaired_low: float = nan
    unpaired_high: float = nan
    differences: tuple[float, ...] = ()
    above: tuple[int, int] | None = None

    @property
    def is_decided(self) -> bool:
        """Whether the corrected test is below 5 %."""
        return self.p_holm < ALPHA

    def verdict(self) -> str:
        """ "higher" or "lower" where the corrected test is below 5 %, else undecided."""
        if not self.is_decided:
            return "undecided at this size"
        return f"{'higher' if self.difference > 0 else 'lower'}{'' if self.exact_holm < ALPHA else IF_NORMAL}"


def paired(a: str, b: str, of_a: Mapping[int, float], of_b: Mapping[int, float]) -> Comparison:
    """Compare two arms over the seeds that both have: seed -> value. Raises ValueError for fewer than two seeds.

    Where all differences are equal there is nothing to divide by, and p is that of the sign test.
    """
    common = sorted(set(of_a) & set(of_b))
    if len(common) < 2:
        raise ValueError(f"{a} and {b} have {len(common)} seeds in common; a comparison needs at least 2")
    differences = np.array([of_a[s] - of_b[s] for s in common])
    mean = float(differences.mean())
    if isnan(mean):  # of a run whose metric is no number: nothing follows
        return Comparison(a, b, len(common), mean, mean, mean)
    equal = EQUAL * max(abs(of[s]) for of in (of_a, of_b) for s in common)
    if float(differences.std(ddof=1)) <= equal:
        differences = np.full(len(common), mean if abs(mean) > equal else 0.0)
        low = high = mean
        p = _sign_flips(differences)
    else:
        tested = stats.ttest_1samp(differences, 0.0)
        low, high = map(float, tested.confidence_interval(1 - ALPHA))
        p = float(tested.pvalue)
    unpaired = _unpaired(*([of[s] for s in common] for of in (of_a, of_b)))
    return Comparison(
        *(a, b, len(common), mean, p, _sign_flips(differences)),
        t_low=low,
        t_high=high,
        unpaired_low=unpaired[0],
        unpaired_high=unpaired[1],
        differences=tuple(map(float, differences)),
    )


def by_state(a: str, b: str, of_a: Mapping[int, float], of_b: Mapping[int, float], bound: float) -> Comparison:
    """Compare how many runs of two arms end above ``bound``, by Fisher's exact test: for values of two states, which no
    t test fits. ``difference`` is that of the two shares."""
    above = [sum(value > bound for value in of.values()) for of in (of_a, of_b)]
    table = [[k, len(of) - k] for k, of in zip(above, (of_a, of_b), strict=True)]
    p = float(stats.fisher_exact(table).pvalue)
    share = above[0] / len(of_a) - above[1] / len(of_b)
    return Comparison(a, b, min(len(of_a), len(of_b)), share, p, p, above=(above[0], above[1]))


def visible(spread: float, seeds: int, tests: int) -> float:
    """Return the true difference that a paired t test finds in 80 % of studies, at 5 % divided by ``tests``.

    ``spread`` is the standard deviation of the differences between seeds. The power is the mean, over the estimates of
    that spread, of the chance to exceed the test's bound.
    """
    free = seeds - 1
    estimates = np.sqrt(stats.chi2.ppf((np.arange(4000) + 0.5) / 4000, free) / free)
    bounds = stats.t.ppf(1 - ALPHA / tests / 2, free) * estimates
    found = optimize.brentq(lambda shift: stats.norm.cdf(shift - bounds).mean() - POWER, 0.0, 10 + bounds.max())
    return float(found) * spread / sqrt(seeds)


def differ(one: Sequence[float], other: Sequence[float]) -> float:
    """The p of Welch's t test that two groups have one mean; nan where one of them has fewer than two values."""
    return float(stats.ttest_ind(one, other, equal_var=False).pvalue) if min(len(one), len(other)) > 1 else nan


def _unpaired(of_a: Sequence[float], of_b: Sequence[float]) -> tuple[float, float]:
    """Welch's 95 % interval of the difference of two means."""
    squares = [np.var(of, ddof=1) / len(of) for of in (of_a, of_b)]
    mean, square = float(np.mean(of_a) - np.mean(of_b)), sum(squares)
    free = square**2 / sum(s**2 / (len(of_a) - 1) for s in squares) if square else 1.0
    half = float(stats.t.ppf(1 - ALPHA / 2, free) * sqrt(square))
    return mean - half, mean + half


def _sign_flips(differences: Sequence[float] | np.ndarray) -> float:
    """The two-sided p of the mean difference among those of all ways to flip the signs."""
    return float(
        stats.permutation_test(
            (np.asarray(differences),),
            lambda values, axis: values.mean(axis=axis),
            permutation_type="samples",
            vectorized=True,
            n_resamples=FLIPS,
            rng=np.random.default_rng(0),
        ).pvalue
    )


def judged(found: Comparison, expect: str, margin: float) -> str:
    """What a comparison says of a claim: "supported", "not supported" or "undecided at this size".

    ``expect`` "higher" or "lower": supported where the corrected test is below 5 % in that direction; not supported
    where the interval holds no effect of ``margin`` or more in it. "not lower": supported where the interval's lower
    end is above -margin, not supported where its upper end is below.
    """
    if expect == "not lower":
        if found.t_low > -margin:
            return "supported"
        return "not supported" if found.t_high < -margin else "undecided at this size"
    sign = 1 if expect == "higher" else -1
    if found.p_holm < ALPHA and sign * found.difference > 0:
        return "supported"
    most = found.t_high if sign > 0 else -found.t_low
    return "not supported" if most < margin else "undecided at this size"


def if_normal(found: Comparison, expect: str, margin: float, verdict: str) -> str:
    """The verdict of `judged`, and `IF_NORMAL` behind it where the exact test alone does not give it."""
    if verdict not in ("supported", "not supported"):
        return verdict
    if verdict == "supported" and expect != "not lower":
        exact = found.exact_holm
    else:  # that the difference is above or below this one
        bound = margin if expect == "higher" else -margin
        exact = _sign_flips([value - bound for value in found.differences])
    return verdict if exact < ALPHA else f"{verdict}{IF_NORMAL}"


def holm(comparisons: Sequence[Comparison], planned: int | None = None) -> list[Comparison]:
    """The same with ``p_holm`` and ``exact_holm``.

    ``planned``: of how many they are the ones that there are results for; without it they are all. A comparison without
    a p (nan, of a run whose metric is nan) counts as one and has none.
    Source: S. Holm, A simple sequentially rejective multiple test procedure (1979).
    """
    many = planned or len(comparisons)
    of_t, exact = (_corrected(of, many) for of in ([c.p for c in comparisons], [c.p_exact for c in comparisons]))
    return [replace(c, p_holm=p, exact_holm=e) for c, p, e in zip(comparisons, of_t, exact, strict=True)]


def _corrected(raw: Sequence[float], many: int) -> list[float]:
    corrected, running = [nan] * len(raw), 0.0
    for rank, i in enumerate(sorted((i for i, p in enumerate(raw) if not isnan(p)), key=lambda i: raw[i])):
        running = max(running, min(1.0, raw[i] * (many - rank)))
        corrected[i] = running
    return corrected
