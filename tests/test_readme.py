"""What the README says exists, and its figures are those of the committed files."""

import json
import re
import shlex
from pathlib import Path

import pytest
import typer

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
RESULTS = ROOT / "kernels" / "results"
PAGES = [ROOT / "README.md", ROOT / "qerl_vllm_plugin" / "README.md", ROOT / "recipes" / "README.md"]
BLOCKS = [block for page in PAGES for block in re.findall(r"```(\w+)\n(.*?)```", page.read_text(), flags=re.S)]


def commands():
    """Every `qerl ...` line of the README, in blocks and in the table of commands."""
    from qerl_recipes.cli import app

    blocks = [block.replace("\\\n", " ") for kind, block in BLOCKS if kind == "bash"]
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`(qerl [^`]+)`", TEXT)
    group = typer.main.get_command(app)
    for line in lines:
        if "qerl " not in line:
            continue
        words = shlex.split(line.replace("[", " ").replace("]", " "), comments=True)
        if words[:1] == ["qerl"] and words[1:2] != ["COMMAND"]:
            yield group, words[1:]


def test_every_command_of_the_readme_is_one_and_has_the_options_that_it_shows():
    seen = 0
    for group, (name, *rest) in commands():
        command = group.commands[name]
        if hasattr(command, "commands") and rest:
            command, rest = command.commands[rest[0].rstrip(",")], rest[1:]
        if name not in ("train", "doctor", "serve"):  # keys of a recipe, or of vLLM, are options there
            known = {option for parameter in command.params for option in parameter.opts}
            given = {word.replace("_", "-") for word in rest if word.startswith("--")}  # the command takes both
            assert given <= known, (name, rest)
        seen += 1
    assert seen >= 10


def test_the_training_commands_of_the_pages_are_accepted(tmp_path, monkeypatch):
    """As printed, but for the model, which a folder stands in for, and for the CPU."""
    from qerl_recipes.recipe.configs import parse
    from qerl_recipes.train.validate import validate

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    lines = [json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) for i in range(64)]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QERL_ADMIN_TOKEN", "what-openssl-prints-for-a-page")  # for rollouts from a server
    monkeypatch.delenv("QERL_ADMIN_TOKEN_FILE", raising=False)
    seen = 0
    for _, (name, *rest) in commands():
        if name == "train" and "--config" in rest and Path(rest[rest.index("--config") + 1]).is_file():
            validate(*parse([*rest, "--use_cpu", "true", "--bf16", "false", "--model_name_or_path", "model"]))
            seen += 1
    assert seen >= 3


def test_every_link_leads_somewhere_and_every_recipe_named_is_there():
    for page in PAGES:
        links = [link for link in re.findall(r"\]\(([^)]+)\)", page.read_text()) if not link.startswith("http")]
        assert all((page.parent / link.partition("#")[0]).exists() for link in links), links
        assert page != ROOT / "README.md" or "kernels/results/README.md" in links
    for recipe in re.findall(r"recipes/[\w./-]+\.yaml", TEXT):
        assert (ROOT / recipe).exists(), recipe


def test_python_blocks_compile_and_import_what_is_there():
    for block in (block for kind, block in BLOCKS if kind == "python"):
        compile(block, "README.md", "exec")
        for line in re.findall(r"^from (qerl_\S+) import ([\w, ]+)", block, flags=re.M):
            module = __import__(line[0], fromlist=["*"])
            assert all(hasattr(module, name.strip()) for name in line[1].split(","))


def test_the_first_table_holds_the_figures_of_the_committed_files():
    rows = [re.split(r"\s*\|\s*", line.strip("| ")) for line in TEXT.splitlines() if line.startswith("| ")]
    arms = json.loads((RESULTS / "rollout_7B_interleaved_NVIDIA_H200.json").read_text())["arms"]
    for batch in (8, 64, 256):
        (row,) = [row for row in rows if re.search(rf"\b{batch} sequences, 256 in", row[0])]
        found = [float(cell.strip("*").replace(",", "")) for cell in row[1:4]]
        expected = [
            round(arms[arm]["batch"][str(batch)]["tokens_per_s"]) for arm in ("bf16_merged", "bf16", "qerl_nvfp4")
        ]
        assert found == expected
        assert row[4] == ", ".join(f"{expected[2] / other:.2f}x" for other in expected[:2])
    steps = json.loads((RESULTS / "train_7B_80GB_NVIDIA_H200.json").read_text())["summary"]
    ours, theirs = (steps[arm]["seconds"]["step"] for arm in ("qerl_nvfp4", "bf16"))
    (row,) = [row for row in rows if row[0].startswith("a whole GRPO step")]
    assert row[2:] == [f"{theirs:.1f}", f"**{ours:.1f}**", f"{theirs / ours:.2f}x"]
    assert len({arm["commit"] for arm in steps.values() if "commit" in arm}) <= 1


@pytest.mark.parametrize("page", [ROOT / "README.md", RESULTS / "README.md"], ids=["README", "results"])
def test_files_of_results_that_a_page_names_are_there(page):
    for name in re.findall(r"`([\w*]+\.json)`", page.read_text()):
        assert list(RESULTS.glob(name)) or list(RESULTS.parent.glob(f"**/{name}")), name


def test_each_promise_has_tests_of_its_number():
    promises = re.findall(r"^(\d+)\. \*\*", TEXT.partition("## Promises")[2], flags=re.M)
    assert promises == [str(number) for number in range(1, 11)]
    named = " ".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__))
    assert {f"promise_{int(number):02d}" for number in promises} <= set(re.findall(r"promise_\d\d", named))
