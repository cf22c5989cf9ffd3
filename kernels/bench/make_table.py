"""The table that ``linear_tiles`` reads, from the times of tune.py: ``python make_table.py tune.json``."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from qerl_kernels import gemm, linear_tiles


def main() -> None:
    """Keep the fastest configuration for each layer and number of tokens."""
    measured = json.loads(Path(sys.argv[1]).read_text())
    layers: dict[tuple[int, int], list] = {}
    for row in measured["rows"]:
        ours = {gemm.Configuration(*json.loads(name)): us for name, us in row["us"].items() if name.startswith("[")}
        fastest = min(ours, key=ours.__getitem__)
        lines = layers.setdefault((row["N"], row["K"]), [])
        lines.append((max(row["M"], 8), asdict(fastest)))  # the narrowest tile holds 8 tokens
    table = {
        "gpu": measured["gpu"],
        "layers": [
            {"N": N, "K": K, "configurations": sorted(lines, key=lambda line: line[0])}
            for (N, K), lines in sorted(layers.items())
        ],
    }
    text = json.dumps(table).replace('{"N"', '\n{"N"').replace("[[", "[\n  [").replace("}], [", "}],\n  [")
    linear_tiles.TABLE.write_text(text + "\n")


if __name__ == "__main__":
    main()
