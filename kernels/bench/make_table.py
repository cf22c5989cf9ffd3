"""The table that ``linear_tiles`` reads, from the times of tune.py: ``python make_table.py tune.json``."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from qerl_kernels import gemm, linear_tiles

EXPAND_FROM = 4096  # tokens, where nothing was measured


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


def main() -> None:
    """Keep the fastest configuration for each layer and number of tokens; what was not measured stays as it is."""
    measured = json.loads(Path(sys.argv[1]).read_text())
    layers: dict[tuple[int, int], list[dict]] = {}
    for row in measured["rows"]:
        layers.setdefault((row["N"], row["K"]), []).append(row)
    table = {
        layer: ({line.M: line for line in old.lines}, old.expand_from) for layer, old in linear_tiles.table().items()
    }
    for layer, rows in layers.items():
        lines, expanded = table.get(layer, ({}, EXPAND_FROM))
        for row in rows:
            ours = {gemm.Configuration(*json.loads(name)): us for name, us in row["us"].items() if name.startswith("[")}
            lines[max(row["M"], 8)] = min(ours, key=ours.__getitem__)  # the narrowest tile holds 8 tokens
        if any("expand" in row["us"] for row in rows):
            expanded = expand_from(rows)
        table[layer] = lines, expanded
    text = json.dumps(
        {
            "gpu": measured["gpu"],
            "layers": [
                {
                    "N": N,
                    "K": K,
                    "expand_from": expanded,
                    "configurations": [(up_to, asdict(c)) for up_to, c in sorted(lines.items())],
                }
                for (N, K), (lines, expanded) in sorted(table.items())
            ],
        }
    )
    text = text.replace('{"N"', '\n{"N"').replace("[[", "[\n  [").replace("}], [", "}],\n  [")
    linear_tiles.TABLE.write_text(text + "\n")


if __name__ == "__main__":
    main()
