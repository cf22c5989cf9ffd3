"""Compare two arms over few seeds: t intervals, exact tests, Holm's correction, and what few seeds can show."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import nan, sqrt

import numpy as np
import pandas as pd
from scipy import optimize, stats

ALPHA = 0.05
POWER = 0.8
FLIPS = 2**14  # sign flips: all of them up to 14 seeds, beyond that as many drawn at random
EQUAL = 2e-5  # differences nearer than this share of the values are equal: tables round to six digits
NOT_SIGNIFICANT = "not significant"
INCONCLUSIVE = "inconclusive"
T_ONLY = " (t test only)"  # ends a verdict that the exact test alone does not give


@dataclass(frozen=True)
class Comparison:
    """Hold the comparison of arm ``a`` with arm ``b``, paired by seed.

    ``difference`` is the mean of a - b, ``low`` and ``high`` its 95 % interval. ``p`` is the two-sided p of the paired
    t test, which assumes normal differences; ``p_exact`` is that of flipping their signs, which does not. ``p_holm``
    and ``exact_holm`` are both corrected by Holm. ``unpaired_low`` and ``unpaired_high`` are Welch's interval, for
    arms that a seed does not make alike. ``above`` counts the runs of a and of b in the upper of two states; p is then
    Fisher's, and there is no interval.
    """

    a: str
    b: str
    seeds: int
    difference: float
    p: float
    p_exact: float
    p_holm: float = nan
    exact_holm: float = nan
    low: float = nan
    high: float = nan
    unpaired_low: float = nan
    unpaired_high: float = nan
    differences: tuple[float, ...] = ()
    above: tuple[int, int] | None = None

    @property
    def is_significant(self) -> bool:
        return self.p_holm < ALPHA

    def verdict(self) -> str:
        """Return "higher" or "lower" if the corrected test is below 5 %, else "not significant"."""
        if not self.is_significant:
            return NOT_SIGNIFICANT
        return f"{'higher' if self.difference > 0 else 'lower'}{'' if self.exact_holm < ALPHA else T_ONLY}"


def compare(pair: tuple[str, str], of_a: pd.Series, of_b: pd.Series, bound: float | None = None) -> Comparison | None:
    """Compare two arms, each given as seed -> value; return None if fewer than two seeds have a value of both.

    With ``bound`` their runs above it are counted, and compared by Fisher's exact test: no t test fits values of two
    states. Where all differences are equal there is no spread to divide by, and p is that of the sign test.
    """
    both = pd.concat({"a": of_a, "b": of_b}, axis=1).dropna().sort_index()
    if len(both) < 2:
        return None
    if bound is not None:
        above = int((both.a > bound).sum()), int((both.b > bound).sum())
        p = float(stats.fisher_exact([above, [len(both) - count for count in above]]).pvalue)
        return Comparison(*pair, len(both), (above[0] - above[1]) / len(both), p, p, above=above)
    differences = (both.a - both.b).to_numpy()
    mean = float(differences.mean())
    equal = EQUAL * both.abs().to_numpy().max()
    if differences.std(ddof=1) <= equal:
        differences = np.full(len(both), mean if abs(mean) > equal else 0.0)
        low = high = mean
        p = _sign_flips(differences)
    else:
        tested = stats.ttest_1samp(differences, 0.0)
        low, high = map(float, tested.confidence_interval(1 - ALPHA))
        p = float(tested.pvalue)
    # Welch's interval of the difference of two means; scipy's own warns where one arm's values are equal
    squares = both.var() / len(both)
    square = float(squares.sum())
    freedom = square**2 / float((squares**2 / (len(both) - 1)).sum()) if square else 1.0
    unpaired = float(stats.t.ppf(1 - ALPHA / 2, freedom)) * sqrt(square)
    return Comparison(
        *(*pair, len(both), mean, p, _sign_flips(differences)),
        low=low,
        high=high,
        unpaired_low=mean - unpaired,
        unpaired_high=mean + unpaired,
        differences=tuple(map(float, differences)),
    )


def _sign_flips(differences: Sequence[float] | np.ndarray) -> float:
    """Return the two-sided p of the sum among all ways to flip the signs; sums equal up to rounding count as equal."""
    values = np.asarray(differences)
    if 2 ** len(values) <= FLIPS:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(values))))
    else:  # the signs as they are count as one of those drawn
        signs = np.random.default_rng(0).choice((1.0, -1.0), (FLIPS + 1, len(values)))
        signs[0] = 1.0
    return float(np.mean(abs(signs @ values) >= abs(values.sum()) - 1e-9 * abs(values).max()))


def judge(found: Comparison, expect: str, margin: float) -> str:
    """Return what a comparison says about a claim: "supported", "not supported" or "inconclusive".

    "higher" and "lower" are supported if the corrected test is below 5 % in that direction, and not if the interval
    holds no effect of ``margin`` or more in it. "not lower" is supported if the interval's lower end is above -margin,
    and not if its upper end is below. A verdict ends in "(t test only)" if the exact test alone does not give it.
    """
    sign = -1 if expect == "lower" else 1
    bound = margin if expect == "higher" else -margin  # the difference is tested to be on one side of this
    if expect != "not lower" and found.is_significant and sign * found.difference > 0:
        return f"supported{'' if found.exact_holm < ALPHA else T_ONLY}"
    if expect == "not lower":
        verdict = "supported" if found.low > bound else "not supported" if found.high < bound else INCONCLUSIVE
    else:
        verdict = "not supported" if (found.high < bound if sign > 0 else found.low > bound) else INCONCLUSIVE
    if verdict != INCONCLUSIVE and _sign_flips([value - bound for value in found.differences]) >= ALPHA:
        verdict += T_ONLY
    return verdict


def correct(comparisons: Sequence[Comparison], planned: int | None = None) -> list[Comparison]:
    """Return the comparisons with ``p_holm`` and ``exact_holm``, for ``planned`` of them (default: for all)."""
    many = planned or len(comparisons)
    of_t, exact = (holm(p, many) for p in ([c.p for c in comparisons], [c.p_exact for c in comparisons]))
    return [replace(c, p_holm=p, exact_holm=e) for c, p, e in zip(comparisons, of_t, exact, strict=True)]


def holm(p: Sequence[float], planned: int) -> list[float]:
    """Return each p corrected for ``planned`` tests (S. Holm, 1979)."""
    values = np.asarray(p, dtype=float)
    order = np.argsort(values, kind="stable")
    corrected = np.empty(len(values))
    corrected[order] = np.maximum.accumulate(np.minimum(1.0, values[order] * (planned - np.arange(len(values)))))
    return corrected.tolist()


def visible(spread: float, seeds: int, tests: int) -> float:
    """Return the true difference that 80 % of paired t tests find at 5 % / ``tests``; ``spread`` is over seeds."""
    bound = stats.t.ppf(1 - ALPHA / tests / 2, seeds - 1)
    shift = optimize.brentq(lambda shift: stats.nct.sf(bound, seeds - 1, shift) - POWER, 0.0, 2 * (1 + bound))
    return float(shift) * spread / sqrt(seeds)
