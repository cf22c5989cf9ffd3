"""The table that ``linear_tiles`` reads, from what tune.py and tune_adapter.py wrote.

``python make_table.py tune.json adapter.json``. What tune_adapter.py timed again counts in place of the older time;
lines that it did not time run with an adapter as they do without.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from qerl_kernels import linear_tiles
from qerl_kernels.adapter import Shrink
from qerl_kernels.linear_tiles import Layer, Line
from times import configuration, ours

EXPAND_FROM = 4096  # tokens, where nothing was measured
WORTH = 1.01  # a second variant is loaded for an adapter only where it is faster than this


def expand_from(rows: list[dict]) -> int:
    """The tokens of one layer from which on expanding its weight was faster than every variant, wherever measured."""
    first = EXPAND_FROM
    for row in sorted(rows, key=lambda row: -row["M"]):
        us = dict(row["us"])
        del us["bf16"]
        if "expand" not in us or min(us, key=us.__getitem__) != "expand":
            break
        first = min(first, row["M"])
    return first


def line(row: dict, timed: dict | None) -> Line:
    """The fastest of one row of tune.json, by itself and, where tune_adapter.py ``timed`` it again, with an adapter."""
    M = max(row["M"], 8)  # the narrowest tile holds 8 tokens
    us = ours(row["us"]) if timed is None else timed["alone"]
    alone = min(us, key=us.__getitem__)
    if timed is None:
        return Line(M, configuration(alone), configuration(alone), None)
    adapted = {(name, how): us for name, times in timed["adapted"].items() for how, us in times.items()}
    name, how = min(adapted, key=lambda one: adapted[one] * (1 if one[0] == alone else WORTH))
    return Line(M, configuration(alone), configuration(name), Shrink.read(json.loads(how)))


def as_list(line: Line) -> list:
    """A line as it stands in the table."""
    adapted = None if line.adapted == line.product else asdict(line.adapted)
    fields = [line.M, asdict(line.product), adapted, line.shrink]
    while fields[-1] is None:
        fields.pop()
    return fields


def main() -> None:
    """Keep the fastest configuration for each layer and number of tokens; what was not measured stays as it is."""
    tuned, *more = [json.loads(Path(file).read_text()) for file in sys.argv[1:]]
    timed = {(row["N"], row["K"], row["M"]): row for file in more for row in file["rows"]}
    rows_of: dict[tuple[int, int], list[dict]] = {}
    for row in tuned["rows"]:
        rows_of.setdefault((row["N"], row["K"]), []).append(row)
    table = dict(linear_tiles.table())
    for (N, K), rows in rows_of.items():
        old = table.get((N, K), Layer([], EXPAND_FROM))
        new = [line(row, timed.get((N, K, row["M"]))) for row in rows]
        lines = {one.M: one for one in (*old.lines, *new)}
        expanded = expand_from(rows) if any("expand" in row["us"] for row in rows) else old.expand_from
        table[N, K] = Layer([lines[M] for M in sorted(lines)], expanded)
    layers = []
    for (N, K), layer in sorted(table.items()):
        lines = ",\n  ".join(json.dumps(as_list(one)) for one in layer.lines)
        head = json.dumps({"N": N, "K": K, "expand_from": layer.expand_from})[:-1]
        layers.append(f'{head}, "configurations": [\n  {lines}]}}')
    listed = ",\n".join(layers)
    text = f'{{"gpu": {json.dumps(tuned["gpu"])}, "layers": [\n{listed}\n]}}\n'
    linear_tiles.TABLE.write_text(text)


if __name__ == "__main__":
    main()
