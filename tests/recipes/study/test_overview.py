"""One page over all studies of a folder, and what the studies took of their devices."""

import shutil
import sys
import time
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from qerl_recipes.cli import app
from qerl_recipes.study import processes, results, table
from qerl_recipes.study.conduct import sum_up
from qerl_recipes.study.overview import overview
from qerl_recipes.study.page import page
from qerl_recipes.study.plan import StudyError, later_runs, read

ROOT = Path(__file__).parents[3]
CLAIMS = [
    {"claim": "noise helps", "pair": ["b", "a"], "expect": "higher", "margin": 0.01},
    {"claim": "larger rates suit b", "pair": ["b", "a"], "expect": "higher", "margin": 0.01, "metric": "sweep_gain"},
]
PLAN = {
    "recipe": "recipe.yaml",
    "arms": {"a": {"quantization": "bf16"}, "b": {"quantization": "qerl_nvfp4"}},
    "seeds": [0, 1, 2],
    "sweep": {"key": "learning_rate", "values": [1e-4, 3e-4, 1e-3], "seeds": [100, 101], "common": 1e-4},
    "evaluations": {"greedy": {"tasks": "running_sum"}},
    "primary": "greedy",
    "comparisons": [["b", "a"]],
    "claims": CLAIMS,
    "afterwards": {
        "claims": [{**CLAIMS[0], "claim": "b gains more"}],
        "untested": {"more steps help": "no run has them"},
    },
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the plans ``one`` and ``two``."""
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text("model_name_or_path: base\n")
    Path("studies").mkdir()
    for name in ("one", "two"):
        Path(f"studies/{name}.yaml").write_text(yaml.safe_dump({**PLAN, "about": f"what {name} is of"}))
    return Path("studies")


def of_the_sweep(gain_of_b=(0.2, 0.3)):
    """Rows of the sweep: 3e-4 is the best rate of both arms, ``b`` gains more from the largest rate, by seed."""
    for i, seed in enumerate((100, 101)):
        for value, a, b in (("0.0001", 0.1, 0.1), ("0.0003", 0.7, 0.8), ("0.001", 0.2, 0.1 + gain_of_b[i])):
            yield from ((f"a@{value}", seed, 60, "accuracy", a), (f"b@{value}", seed, 60, "accuracy", b))


def put(folder, name, rows):
    table.write_table(rows, folder / name / table.TABLE)


def test_every_claim_has_a_line_with_what_was_measured_and_a_study_that_was_not_run_says_so(folder):
    compared = [(f"{arm}@0.0003", s, 60, "accuracy", v + 0.001 * s * (arm == "b")) for s in (0, 1, 2) for arm, v in
                (("a", 0.5), ("b", 0.6))]  # fmt: skip
    took = [("a@0.0003", 0, 60, "hours/NVIDIA H200", 0.25), ("b@0.0003", 1, 60, "hours/NVIDIA H200", 0.5)]
    put(folder, "one", [*of_the_sweep(), *compared, *took])
    text = sum_up(folder).read_text()
    assert text == (folder / "README.md").read_text() == overview(folder)
    of_claims = text.partition(
        "| claim | supported | not supported | undecided | not tested |\n|---|---|---|---|---|\n"
    )[2]
    assert of_claims.startswith("| noise helps | one +0.101 (+0.0985 to +0.103), if normal |  |  | two |\n")
    # a gains 0.1, b 0.2 and 0.3: over two seeds that may be chance
    assert "| larger rates suit b |  |  | one +0.15 (-0.485 to +0.785) | two |" in text
    assert "| more steps help |  |  |  | no run has them |" in text
    assert "All of them together: They took 0.8 hours of NVIDIA H200, " in text
    assert "| one | b | a | 3 | +10.1% | +9.9% to +10.3% | 0.000 | 0.000 | 0.25 | higher, if normal |" in text
    assert "Corrected over all 1, 1 are left: b - a of one. 1 of the 1 ask one question" in text
    assert "## Looked at afterwards" in text and "| b gains more | one +0.101 (" in text.partition("Looked at")[2]
    assert "## The 1 of 1 planned comparisons" in text and text.count("below 5% in that direction") == 1
    assert "| what two is of | not run yet |" in text
    # 12 of the sweep and 6 at the best value of 12 + 12: those at the common one are missing
    assert (
        "| what one is of | 18 of 24 runs are there. They took 0.8 hours of NVIDIA H200, other programs there counted "
        "in. |" in text
    )
    assert "| one | b@0.0003 | 3 |  | 0.601 ± 0.001 |" in text and "| two | " not in text.split("## Every arm")[1]
    assert "one/curves_best.png" in text and "two/curves_best.png" not in text
    assert (folder / "one/curves_best.png").is_file() and not (folder / "two").exists()
    assert "18 of 24 runs are there" in (folder / "one/README.md").read_text()


def test_what_is_decided_in_its_study_is_corrected_over_all_planned_comparisons_too(folder):
    """p is 0.034 in either: decided alone, and not among two."""
    for name in ("one", "two"):
        made = [(f"{arm}@0.0003", s, 60, "accuracy", 0.5 + (arm == "b") * (0.1, 0.06, 0.12)[s]) for s in (0, 1, 2)
                for arm in "ab"]  # fmt: skip
        put(folder, name, [*of_the_sweep(), *made])
    text = overview(folder)
    assert "## The 2 of 2 planned" in text and "Corrected over all 2, 0 are left. 2 of the 2 ask one question" in text
    assert "| 0.034 | 0.068 | 0.25 | higher, if normal |" in text


def test_a_study_in_the_middle_says_how_far_it_is_and_judges_nothing(folder):
    put(folder, "one", [("a@0.0001", 100, 60, "accuracy", 0.5)])
    text = overview(folder)
    assert "| 1 of at most 24 runs are there. |" in text
    assert "|  |  | one (no seed has accuracy of both) | two |" in text
    put(folder, "one", [*of_the_sweep(), *((f"{arm}@0.0003", 0, 60, "accuracy", 0.5) for arm in "ab")])
    assert "|  |  | one (only one seed has accuracy of both) | two |" in overview(folder)


def test_a_folder_takes_no_options_and_holds_studies(folder, tmp_path):
    for options in (["--jobs", "2"], ["--dry-run"], ["--minutes", "1"], ["--output", "x"]):
        refused = CliRunner().invoke(app, ["study", str(folder), *options])
        assert (
            refused.exit_code == 2 and "it takes no options" in refused.output and not (folder / "README.md").exists()
        )
    assert CliRunner().invoke(app, ["study", str(folder)]).output.strip() == "studies/README.md"
    with pytest.raises(StudyError, match="has no study file"):
        overview(tmp_path / "none")


def test_the_committed_pages_are_those_of_the_committed_tables_and_plans(monkeypatch):
    monkeypatch.chdir(ROOT)
    studies = Path("recipes/studies")
    assert overview(studies) == (studies / "README.md").read_text(), "run: qerl study recipes/studies"
    for found in studies.glob(f"*/{table.TABLE}"):
        file, made = Path(f"{found.parent}.yaml"), (found.parent / "README.md").read_text()
        title = f"Study: {file.stem.replace('_', ' ')}"
        assert made.startswith(page(read(file), table.read_table(found), title, f"qerl study {file} --table {found}"))


def test_the_time_of_a_gpu_is_divided_among_those_on_it_at_every_moment(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    shares = processes.Shares()
    shares.begin("0", "first")
    shares.begin("1", "alone")
    now[0] = 10.0
    shares.begin("0", "second")
    now[0] = 16.0
    assert shares.end("0", "first") == 13.0  # ten alone, six with another
    now[0] = 20.0
    shares.begin("0", "third")
    now[0] = 24.0
    assert (shares.end("0", "second"), shares.end("0", "third")) == (9.0, 2.0)
    assert shares.end("1", "alone") == 24.0
    now[0] = 100.0  # nobody was there
    shares.begin("0", "fourth")
    now[0] = 101.0
    assert shares.end("0", "fourth") == 1.0


def test_what_a_run_took_is_written_down_call_by_call_and_comes_into_the_table(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "CLI", "timeit")  # a module that ends at once
    machine = processes.Machine(None, Console(file=sys.stderr), "NVIDIA H200")
    plan = read(folder / "one.yaml")
    (one, *_) = later_runs(plan, {"a": 1e-4, "b": 1e-4})
    run = tmp_path / "out" / one.folder
    (run / "evaluation/greedy").mkdir(parents=True)
    assert machine.call(["-n", "1", "-r", "1", "import time; time.sleep(0.3)"], run / "log.txt", None) == 0
    assert machine.call(["--no-such-option"], run / "log.txt", None) == 2  # what failed took its time, too
    seconds = processes.seconds_of(run)["NVIDIA H200"]
    assert seconds >= 0.3 and len((run / processes.HOURS).read_text().splitlines()) == 2
    (run / "evaluation/greedy/evaluation.json").write_text('{"tasks": {"running_sum": {"adapter": {"accuracy": 1}}}}')
    (run / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    monkeypatch.setattr(results, "all_runs", lambda *_: [one])
    rows = results.collect(plan, tmp_path / "out")
    assert results.hours(rows) == {"NVIDIA H200": pytest.approx(seconds / 3600)}
    shutil.rmtree(run)
    assert processes.seconds_of(run) == {}
