"""Fit the rule that ``qerl_kernels/rule.py`` reads to times of tune.py: ``python fit.py tune.json [more.json ...]``.

Each variant's coefficients have the least squared relative error, and none is negative. Variants are kept, the most
useful first, until on the timed points the best of them is hardly slower than the best of all. The adapter's small
kernel is fitted to the times with an adapter, the expanded product to those of ``expand``.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
from qerl_kernels import cost, rule
from qerl_kernels.adapter import VARIANTS, Shrink
from qerl_kernels.cost import Coefficients, ExpandCoefficients, Machine, ShrinkCoefficients
from qerl_kernels.gemm import Configuration
from scipy import optimize

RATE = 3.9  # TB/s at which weights stream: cuBLAS reads BF16 weights at 4.1, the widest layers of ours at 3.5
CARE = 2  # power of (best time / time) by which a time counts
FEWEST = 16  # times that a variant's coefficients are fitted to
MOST_VARIANTS = 72
WORTH = 0.0002  # of the mean time over all points, that a further variant must save
SHARPEST = 0.05  # relative error beyond which a time counts less, for the adapter
DIGITS = 4


class Times:
    """Read several files of tune.py as one."""

    def __init__(self, files: list[dict]):
        first = files[0]
        sizes = {int(size): count for file in files for size, count in file["at_once"].items()}
        self.machine = Machine(
            first["gpu"], first["multiprocessors"], tuple(sizes.get(size, 0) for size in range(1, max(sizes) + 1)), RATE
        )
        self.points = [point for file in files for point in self.read(file, "rows")]
        self.adapted = [point for file in files for point in self.read(file, "adapted")]

    def read(self, file: dict, part: str) -> list[dict]:
        """Return rows in which ``ours`` maps (configuration, launch or "") to microseconds."""
        variants = [Configuration(*fields) for fields in file["variants"]]
        return [{**row, "ours": self.named(variants, row["us"])} for row in file[part]]

    @staticmethod
    def named(variants: list[Configuration], us: dict[str, float]) -> dict[tuple[Configuration, str], float]:
        times = {}
        for name, time in us.items():
            if ":" in name.split(" ")[0]:
                variant, _, launch = name.partition(" ")
                index, splits = map(int, variant.split(":"))
                times[replace(variants[index], splits=splits), launch] = time
        return times

    def work(self, c: Configuration, row: dict) -> cost.Work:
        return cost.work(c, row["N"], row["K"], row["M"], self.machine.clusters[c.cluster - 1])


def fit_variant(c: Configuration, timed: list[tuple[cost.Work, int, float, float]]) -> Coefficients:
    """Fit a variant to (work, M, time, best time) of every point where it was timed; times near the best count most."""
    us = np.array([time for *_, time, _ in timed])
    weight = np.array([best / time for *_, time, best in timed]) ** CARE
    stages, ends, sums = (np.array([getattr(w, name) for w, *_ in timed]) for name in ("stages", "ends", "sums"))
    memory = np.array([cost.memory_time(c, w, M, RATE) for w, M, *_ in timed])
    exchanged = [sums, (sums > 0) * 1.0] if c.cluster == 1 else []
    columns = np.stack([np.ones_like(us), ends, *exchanged], axis=1) * (weight / us)[:, None]

    def of(stage: float) -> tuple[np.ndarray, float]:
        return optimize.nnls(columns, weight * (1 - (stage**4 + memory**4) ** 0.25 * stages / us))

    stage = min(np.geomspace(0.02, 8, 120), key=lambda stage: of(stage)[1])
    start, end, *more = [*of(stage)[0].tolist(), 0.0, 0.0][:4]
    return Coefficients(start, float(stage), end, more[0], more[1])


def fit_all(times: Times, only: list[Configuration] | None = None) -> dict[Configuration, Coefficients]:
    """Fit every variant that was timed often enough, or those of ``only``."""
    timed: dict[Configuration, list] = {}
    for row in times.points:
        best = min(row["ours"].values(), default=0.0)
        for (c, _), us in row["ours"].items():
            if only is None or replace(c, splits=0) in only:
                timed.setdefault(replace(c, splits=0), []).append((times.work(c, row), row["M"], us, best))
    return {
        c: fit_variant(c, points)
        for c, points in sorted(timed.items(), key=lambda one: astuple(one[0]))
        if len(points) >= FEWEST
    }


def useful(times: Times, fitted: dict[Configuration, Coefficients]) -> list[Configuration]:
    """Choose so many variants that further ones hardly help.

    A variant counts by its time where it was timed, and by its cost elsewhere.
    """
    variants = list(fitted)
    table = np.full((len(times.points), len(variants)), np.inf)
    for r, row in enumerate(times.points):
        measured: dict[Configuration, float] = {}
        for (c, _), us in row["ours"].items():
            kernel = replace(c, splits=0)
            measured[kernel] = min(us, measured.get(kernel, np.inf))
        for v, c in enumerate(variants):
            if c in measured:
                table[r, v] = measured[c]
            elif rule.fits(c, row["K"], row["M"]):
                ways = rule.divisions(c, row["N"], row["K"], row["M"], times.machine)
                costs = [cost.product(d, fitted[c], times.work(d, row), row["M"], RATE) for d in ways]
                table[r, v] = min(costs, default=np.inf) * 1.03  # a cost is not yet a time
    table /= table.min(axis=1, keepdims=True)
    table = np.minimum(table, 4)
    chosen: list[int] = []
    now = np.full(len(times.points), 4.0)
    while len(chosen) < MOST_VARIANTS:
        means = np.minimum(table, now[:, None]).mean(axis=0)
        best = int(means.argmin())
        if now.mean() - means[best] < WORTH:
            break
        chosen.append(best)
        now = np.minimum(now, table[:, best])
    return [variants[v] for v in chosen]


def positive(error: Callable[[np.ndarray], np.ndarray], start: np.ndarray, rounds: int = 60) -> np.ndarray:
    """Return positive numbers of least squared ``error``, by Levenberg and Marquardt's way, from ``start``.

    scipy's ways end elsewhere: the error has several lowest points.
    """
    q, damping = np.sqrt(start), 1e-2
    now = error(q * q)
    for _ in range(rounds):
        slope = np.stack([(error((q + step) ** 2) - now) / 1e-5 for step in np.eye(len(q)) * 1e-5], axis=1)
        square, down = slope.T @ slope, slope.T @ now
        for _ in range(12):
            tried = q - np.linalg.solve(square + damping * np.diag(square.diagonal() + 1e-9), down)
            then = error(tried**2)
            if (then**2).sum() < (now**2).sum():
                q, now, damping = tried, then, damping / 4
                break
            damping *= 3
    return q * q


def fit_shrink(times: Times) -> ShrinkCoefficients:
    """Fit the small kernel, and what an adapter adds, to products timed alone and with it in the same run."""
    lines = []
    for row in times.adapted:
        _N, K, M, R = (row[name] for name in "NKMR")
        for (c, listed), us in row["ours"].items():
            if not listed or listed == "null":
                continue
            how, w = Shrink.read(json.loads(listed)), times.work(c, row)
            if how.beside:
                continue
            room = how.blocks(M, R) <= times.machine.multiprocessors - w.streaming
            rounds, chunks = cost.shrink_work(how, M, K, R, times.machine.multiprocessors)
            columns = c.tokens / 64 * R / 32
            lines.append(
                (us, row["ours"][c, ""], room, VARIANTS.index(how.variant), rounds, rounds * chunks, columns, w.ends)
            )
    us, alone, room, index, rounds, chunks, columns, ends = np.array(lines).T
    index, count = index.astype(int), len(VARIANTS)

    def error(p: np.ndarray) -> np.ndarray:
        small = p[index] + p[count + index] * rounds + p[2 * count + index] * chunks
        added, of_columns, of_end, late = p[3 * count :]
        both = np.where(room > 0, (alone**4 + small**4) ** 0.25, alone + late * small)
        relative = (both + added + of_columns * columns + of_end * ends) / us - 1
        return relative / np.sqrt(1 + np.abs(relative) / SHARPEST)

    fitted = positive(error, np.array([2.0] * count + [1.0] * count + [0.3] * count + [1.8, 0.3, 0.5, 0.9]))
    parts = [tuple(float(x) for x in fitted[i * count : (i + 1) * count]) for i in range(3)]
    return ShrinkCoefficients(*parts, *(float(x) for x in fitted[3 * count :]))


def fit_expand(times: Times) -> ExpandCoefficients:
    """Fit the expanded product to every point where it was timed."""
    rows = [row for row in times.points if "expand" in row["us"]]
    us = np.array([row["us"]["expand"] for row in rows])
    features = [cost.expand_features(row["N"], row["K"], row["M"], times.machine.multiprocessors) for row in rows]
    coefficients, _ = optimize.nnls(np.array(features) / us[:, None], np.ones_like(us))
    return ExpandCoefficients(*(float(x) for x in coefficients))


def shortened(value: object) -> object:
    """Round all numbers in ``value`` to DIGITS digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: shortened(one) for name, one in value.items()}
    return [shortened(one) for one in value] if isinstance(value, list | tuple) else value


def fitted(files: list[dict]) -> dict:
    """Return the content of linear_tiles.json."""
    times = Times(files)
    coefficients = fit_all(times)
    machine = times.machine
    conditions = [{name: file[name] for name in ("driver", "versions", "commit", "date", "seed")} for file in files]
    kept = sorted(useful(times, coefficients), key=astuple)
    return {
        "gpu": machine.gpu,
        "multiprocessors": machine.multiprocessors,
        "clusters": list(machine.clusters),
        "rate": RATE,
        "fitted_to": conditions,
        "shrink": shortened(fit_shrink(times)._asdict()),
        "expand": shortened(fit_expand(times)._asdict()),
        "variants": [[list(astuple(c)), shortened(list(coefficients[c]))] for c in kept],
    }


def text(data: dict) -> str:
    """Return the file's text, a line a variant."""
    *head, (last, variants) = data.items()
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head]
    listed = ",\n  ".join(json.dumps(variant) for variant in variants)
    return "{\n" + ",\n".join([*lines, f" {json.dumps(last)}: [\n  {listed}]"]) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("times", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=rule.FILE)
    options = parser.parse_args()
    data = fitted([json.loads(file.read_text()) for file in options.times])
    options.out.write_text(text(data))
    print(f"{len(data['variants'])} variants in {options.out}")


if __name__ == "__main__":
    main()
