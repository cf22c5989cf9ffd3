"""Paired comparisons over few seeds: bootstrap intervals, a t test, Holm's correction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import copysign, inf, isnan

import numpy as np
from scipy import stats

RESAMPLES = 10_000
ALPHA = 0.05
EQUAL = 2e-5  # of the values: differences nearer than this are equal, but for the six digits of a table


@dataclass(frozen=True)
class Comparison:
    """``a`` against ``b``, paired by seed. ``difference`` is the mean of a - b; ``low``, ``high`` its 95 % interval.

    ``p`` is two-sided, from the paired t test; ``p_holm`` is corrected over the comparisons of the study.
    ``effect`` is the difference in standard deviations of the paired differences (Cohen's d_z). ``t_low``, ``t_high``:
    the 95 % interval of the t distribution, wider over few seeds, by which claims are judged.
    """

    a: str
    b: str
    seeds: int
    difference: float
    low: float
    high: float
    effect: float
    p: float
    p_holm: float = float("nan")
    t_low: float = float("nan")
    t_high: float = float("nan")

    @property
    def is_decided(self) -> bool:
        """Whether the corrected test is below 5 %."""
        return self.p_holm < ALPHA

    def verdict(self) -> str:
        """ "higher" or "lower" where the corrected test is below 5 %, else undecided."""
        if self.is_decided:
            return "higher" if self.difference > 0 else "lower"
        return "undecided at this size"


def paired(a: str, b: str, of_a: Mapping[int, float], of_b: Mapping[int, float], seed: int = 0) -> Comparison:
    """Compare two arms over the seeds that both have: seed -> value. Raises ValueError for fewer than two seeds.

    The interval is a bootstrap over seeds of the mean difference, by percentiles; over 5 seeds it is somewhat too
    narrow (about 85 to 90 % of such intervals hold the mean), so the verdict follows from the t test.
    Where all differences are equal there is nothing to divide by, and p is that of the sign test.
    Source: B. Efron and R. J. Tibshirani, An Introduction to the Bootstrap (1993), chapters 12 and 13.
    """
    common = sorted(set(of_a) & set(of_b))
    if len(common) < 2:
        raise ValueError(f"{a} and {b} have {len(common)} seeds in common; a comparison needs at least 2")
    differences = np.array([of_a[s] - of_b[s] for s in common])
    spread = float(differences.std(ddof=1))
    equal = EQUAL * max(abs(of[s]) for of in (of_a, of_b) for s in common)
    mean = float(differences.mean())
    if isnan(mean):  # of a run whose metric is no number: nothing follows
        return Comparison(a, b, len(common), mean, mean, mean, mean, p=mean)
    if spread <= equal:
        spread = 0.0
        low = high = mean
    else:
        found = stats.bootstrap(
            (differences,), np.mean, n_resamples=RESAMPLES, method="percentile", rng=np.random.default_rng(seed)
        )
        low, high = map(float, found.confidence_interval)
    effect = mean / spread if spread else copysign(inf, mean) if abs(mean) > equal else 0.0
    if not spread:
        p = 2.0 ** (1 - len(common)) if abs(mean) > equal else 1.0
        return Comparison(a, b, len(common), mean, low, high, effect, p, t_low=mean, t_high=mean)
    tested = stats.ttest_1samp(differences, 0.0)
    t_low, t_high = map(float, tested.confidence_interval(1 - ALPHA))
    p = float(tested.pvalue)
    return Comparison(a, b, len(common), mean, low, high, effect, p, t_low=t_low, t_high=t_high)


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


def holm(comparisons: Sequence[Comparison], planned: int | None = None) -> list[Comparison]:
    """The same with ``p_holm``. Source: S. Holm, A simple sequentially rejective multiple test procedure (1979).

    ``planned``: of how many they are the ones that there are results for; without it they are all. A comparison without
    a p (nan, of a run whose metric is nan) counts as one and has none.
    """
    order = sorted(range(len(comparisons)), key=lambda i: (isnan(comparisons[i].p), comparisons[i].p))
    corrected, running = [float("nan")] * len(order), 0.0
    for rank, i in enumerate(order):
        if isnan(comparisons[i].p):
            break
        running = max(running, min(1.0, comparisons[i].p * ((planned or len(order)) - rank)))
        corrected[i] = running
    return [replace(comparison, p_holm=p) for comparison, p in zip(comparisons, corrected, strict=True)]
