"""Test the notebook: its cells for a CPU run in order, with fewer steps."""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "recipes" / "quickstart.ipynb"
FULL, SHORT = '"runs/notebook", 60, 128', '"runs/notebook", 2, 8'
SHELL = "import subprocess\ndef shell(line):\n    subprocess.run(line, shell=True, check=True)\n"


def script() -> str:
    """Return the code cells without the tag gpu as one script; lines that begin with ! are for the shell."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    code = "\n".join("".join(cell["source"]) for cell in cells if "gpu" not in cell["metadata"].get("tags", ()))
    return SHELL + re.sub(r"^!(.*)", r'shell(f"\1")', code.replace("\\\n", ""), flags=re.M)


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(600)
def test_the_cells_for_a_cpu_run(run_process: Callable[..., None], tmp_path: Path) -> None:
    code = script()
    assert FULL in code
    run = f"import os\nos.chdir({str(tmp_path)!r})\n{code.replace(FULL, SHORT)}\nassert len(metrics) == STEPS\n"
    run += "assert {arm: result['n'] for arm, result in results.items()} == {'base': PROBLEMS, 'adapter': PROBLEMS}\n"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    run_process([sys.executable, "-c", run], tmp_path / "log", 560, PATH=path, MPLBACKEND="agg")
