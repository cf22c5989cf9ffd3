"""Give the completions of a rollout different lengths, as those of a reasoning model have.

The default follows arXiv 2507.19766 (UloRL): with a limit of 128k tokens, 80 % of the completions end within 64k. Of
the default's, 80 % end within half of its limit of 4,096, and 4 % reach the limit. The article gives no density: that
it is log-normal, with a mean of 1,440 before lengths are cut, is chosen here.
"""

import math
import random
import re

DEFAULT = "lognormal:1440,0.8,4096"
SEED = 0


def draw(chosen: str, count: int) -> list[int]:
    """Draw ``count`` lengths in tokens, the same on every call; raise ValueError where that is not possible.

    MEAN is that of the distribution before lengths above MAX are cut to it, and SIGMA the standard deviation of a
    length's natural logarithm.
    """
    chosen, generator = DEFAULT if chosen == "lognormal" else chosen, random.Random(SEED)
    number = r"(\d+(?:\.\d+)?)"
    match = re.fullmatch(rf"lognormal:{number},{number},(\d+)", chosen)
    mean, sigma, most = map(float, match.groups()) if match else (0.0, 0.0, 0.0)
    if not 1 <= mean <= most or most < 2:
        raise ValueError(f"--lengths is {chosen!r}; it is lognormal:MEAN,SIGMA,MAX with 1 <= MEAN <= MAX, as {DEFAULT}")
    center = math.log(mean) - sigma**2 / 2
    return [min(max(round(generator.lognormvariate(center, sigma)), 1), int(most)) for _ in range(count)]
