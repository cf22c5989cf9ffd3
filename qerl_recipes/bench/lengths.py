"""Give the completions of a rollout different lengths, as those of a reasoning model have.

The default follows arXiv 2507.19766 (UloRL): with a limit of 128k tokens, 80 % of the completions end within 64k. Of
the default's, 80 % end within half of its limit of 4,096, and 4 % reach the limit. The article gives no density: that
it is log-normal, with a mean of 1,440 before lengths are cut, is chosen here.
"""

import json
import math
import random
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DEFAULT = "lognormal:1440,0.8,4096"
SEED = 0


def draw(chosen: str, count: int) -> list[int]:
    """Draw ``count`` lengths in tokens, the same on every call; raise ValueError where that is not possible.

    MEAN is that of the distribution before lengths above MAX are cut to it, and SIGMA the standard deviation of a
    length's natural logarithm. A file has a number of tokens in each line, or one JSON list of them; each is drawn once
    at most.
    """
    chosen, generator = DEFAULT if chosen == "lognormal" else chosen, random.Random(SEED)
    if not chosen.startswith("lognormal:"):
        found = _read(Path(chosen))
        if len(found) < count:
            raise ValueError(f"--lengths {chosen} has {len(found)} lengths, and a case has {count} sequences")
        return generator.sample(found, count)
    number = r"(\d+(?:\.\d+)?)"
    match = re.fullmatch(rf"lognormal:{number},{number},(\d+)", chosen)
    mean, sigma, most = map(float, match.groups()) if match else (0.0, 0.0, 0.0)
    if not 1 <= mean <= most or most < 2:
        raise ValueError(f"--lengths is {chosen!r}; it is lognormal:MEAN,SIGMA,MAX with 1 <= MEAN <= MAX, as {DEFAULT}")
    center = math.log(mean) - sigma**2 / 2
    return [min(max(round(generator.lognormvariate(center, sigma)), 1), int(most)) for _ in range(count)]


def summary(lengths: Sequence[int]) -> dict[str, Any]:
    """Return what describes the lengths of one case, in tokens, and the lengths themselves."""
    ordered = sorted(lengths)
    return {
        "tokens": sum(ordered),
        "mean": statistics.mean(ordered),
        **{f"p{share}": ordered[math.ceil(share / 100 * len(ordered)) - 1] for share in (50, 80, 95)},
        "longest": ordered[-1],
        "each": list(lengths),
    }


def _read(file: Path) -> list[int]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--lengths {file}: {error.strerror}; it is a file or lognormal:MEAN,SIGMA,MAX") from error
    try:
        found = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.split()]
    except ValueError as error:
        raise ValueError(f"--lengths {file}: {error}; it has a number of tokens in each line or a JSON list") from error
    if wrong := [value for value in found if type(value) is not int or value < 1]:
        raise ValueError(f"--lengths {file} has {wrong[0]!r}; a length is a whole number of tokens, at least 1")
    return found
