"""The table of variants follows from the times that are committed beside it."""

import json
import shutil
import sys
from dataclasses import astuple
from pathlib import Path

import pytest
from qerl_kernels import linear_tiles

KERNELS = Path(__file__).parents[2] / "kernels"
TABLE = KERNELS / "qerl_kernels" / "linear_tiles.json"
TIMES = [KERNELS / "results" / f"{name}_NVIDIA_H200.json" for name in ("tune", "tune_adapter")]


@pytest.fixture
def make_table(monkeypatch, tmp_path):
    """make_table.main, writing to a copy of the table -> that file."""
    monkeypatch.syspath_prepend(str(KERNELS / "bench"))
    import make_table

    copy = tmp_path / "table.json"
    shutil.copy(TABLE, copy)
    monkeypatch.setattr(linear_tiles, "TABLE", copy)

    def run(*files: Path) -> Path:
        monkeypatch.setattr(sys, "argv", ["make_table.py", *map(str, files)])
        make_table.main()
        return copy

    return run


def test_the_table_follows_from_the_times(make_table):
    assert make_table(*TIMES).read_text() == TABLE.read_text()


def test_each_line_has_the_fastest_that_was_timed(make_table):
    """Read back by the reader, for one layer and number of tokens whose times are in the file."""
    row = next(row for row in json.loads(TIMES[1].read_text())["rows"] if (row["shape"], row["M"]) == ("7B down", 64))
    line = next(line for line in linear_tiles.table()[3584, 18944].lines if line.M == 64)
    us, name, how = min((us, name, how) for name, times in row["adapted"].items() for how, us in times.items())
    assert list(astuple(line.product)) == json.loads(min(row["alone"], key=row["alone"].__getitem__))
    assert list(astuple(line.adapted)) == json.loads(name) and us < 26.2
    assert json.loads(json.dumps(line.shrink)) == json.loads(how)


def test_without_times_of_the_adapter_it_runs_as_without(make_table):
    layers = json.loads(make_table(TIMES[0]).read_text())["layers"]
    assert all(len(line) == 2 for layer in layers for line in layer["configurations"])
