"""Test the notebook: its cells for a CPU run in order in a kernel, with fewer steps."""

import os
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
NOTEBOOK = Path(__file__).parents[2] / "recipes" / "quickstart.ipynb"
FULL, SHORT = '"runs/notebook", 60, 128', '"runs/notebook", 2, 8'
# what a shell's line prints is in a cell's output alone, and that it fails is not noticed
CHECK = """
assert len(metrics) == STEPS == 2
assert {arm: result["n"] for arm, result in results.items()} == {"base": PROBLEMS, "adapter": PROBLEMS}
"""


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(600)
def test_the_cells_for_a_cpu_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if "gpu" not in cell.metadata.get("tags", ())]
    (settings,) = [cell for cell in notebook.cells if FULL in cell.source]
    settings.source = settings.source.replace(FULL, SHORT)
    notebook.cells.append(nbformat.v4.new_code_cell(CHECK))
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    nbclient.NotebookClient(notebook, timeout=560, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert [output for output in shown if "image/png" in output.get("data", ())], "the curves are drawn"
