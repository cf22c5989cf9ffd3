"""Test that what the pages mention exists: commands, options, links, recipes, Python blocks and promises."""

import json
import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import typer

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TEXT = README.read_text()
RESULTS = ROOT / "kernels" / "results"
FOLDERS = ("recipes", "qerl_vllm_plugin", "kernels", "kernels/results", "tests")
PAGES = [README, *(page for folder in FOLDERS for page in sorted((ROOT / folder).glob("*.md")))]
BLOCKS = [block for page in PAGES for block in re.findall(r"```(\w+)\n(.*?)```", page.read_text(), flags=re.S)]
BLOCKS.append(("bash", (ROOT / "tests" / "published" / "run.sh").read_text()))
OTHERS = ("bf16_merged", "fp8_merged", "stock_nvfp4_humming")
SWAPS = ("7B", "32B_tp2")
PACKAGES = ("qerl_recipes", "qerl_vllm_plugin", "kernels", "tests")


def commands():
    """Yield the group and the words of every `qerl ...` line of the pages, in code blocks and in the text."""
    from qerl_recipes.cli import app

    blocks = [block.replace("\\\n", " ") for kind, block in BLOCKS if kind == "bash"]
    lines = [line for block in blocks for line in block.splitlines()]
    lines += [line for page in PAGES for line in re.findall(r"`(qerl [^`]+)`", page.read_text())]
    group = typer.main.get_command(app)
    for line in lines:
        if "qerl " not in line:
            continue
        words = shlex.split(line.replace("[", " ").replace("]", " "), comments=True)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # variables of the environment before the command
            words = words[1:]
        if words[:1] == ["qerl"] and words[1:2] != ["COMMAND"]:
            yield group, words[1:]


def test_every_command_is_one_and_has_the_options_that_it_shows():
    from qerl_recipes.recipe.configs import GRPOConfig
    from qerl_recipes.recipe.keys import FORMER_KEYS

    seen = 0
    for group, (name, *rest) in commands():
        command = group.commands[name]
        if hasattr(command, "commands"):
            if rest[:1] == ["..."]:
                continue
            command, rest = command.commands[rest[0].rstrip(",")], rest[1:]
        if name not in ("train", "doctor", "serve"):  # the others also take keys of a recipe or of vLLM
            known = {option for parameter in command.params for option in parameter.opts}
            # the command accepts both spellings
            given = {word.replace("_", "-") for word in rest if word.startswith("--")}
            if command.name == "train":  # bench train passes keys of a recipe on
                known |= {f"--{field.name.replace('_', '-')}" for field in fields(GRPOConfig)}
                # commands of committed results use these
                known |= {f"--{key.replace('_', '-')}" for key in FORMER_KEYS}
            assert given <= known, (name, rest)
        seen += 1
    assert seen >= 10


def test_the_training_commands_of_the_pages_are_accepted(tmp_path, monkeypatch):
    """Parse and check the commands as printed, except that a folder stands in for the model and they run on a CPU."""
    from qerl_recipes.recipe.configs import parse
    from qerl_recipes.train.preflight import check

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    lines = [json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) for i in range(64)]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    (program,) = [block for kind, block in BLOCKS if kind == "json" and "verification_info" in block]
    (tmp_path / "programs.jsonl").write_text(program * 64)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    for name in ("my_rewards.py", "my_tools.py", "my_math.py"):
        (module,) = [block for kind, block in BLOCKS if kind == "python" and block.startswith(f"# {name}\n")]
        (tmp_path / name).write_text(module)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QERL_ADMIN_TOKEN", "what-openssl-prints-for-a-page")  # rollouts from a server need it
    monkeypatch.delenv("QERL_ADMIN_TOKEN_FILE", raising=False)
    seen = 0
    for _, (name, *rest) in commands():
        if name == "train" and "--config" in rest and Path(rest[rest.index("--config") + 1]).is_file():
            check(*parse([*rest, "--use_cpu", "true", "--bf16", "false", "--model_name_or_path", "model"]))
            seen += 1
    assert seen >= 3


def anchors(page):
    """Return the anchors that GitHub gives the page's headings."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), flags=re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_every_page_and_recipe_that_a_text_names_is_there():
    texts = {file: file.read_text() for name in PACKAGES for file in (ROOT / name).rglob("*.py")}
    texts |= {page: page.read_text() for page in PAGES}
    for file, text in texts.items():
        names = re.findall(r"\b(?:recipes|qerl_vllm_plugin|kernels|tests)/[\w/-]*\.md\b", text)
        if file in PAGES:
            names += re.findall(r"`((?:recipes|qerl_\w+|kernels|tests)/[\w./-]+)`", text)
        for name in names:
            assert (ROOT / name).exists(), (file, name)
    for name in re.findall(r"\brecipes/[\w./-]+\.yaml", "".join(page.read_text() for page in PAGES)):
        assert (ROOT / name).exists(), name


def test_the_table_of_recipes_is_that_of_the_folders():
    lines = (ROOT / "recipes" / "README.md").read_text().partition("| configuration |")[2].partition("\n\n")[0]
    said, there = {}, {}
    for configurations, models in re.findall(r"^\| (`.*`) \| (.*) \|$", lines, flags=re.M):
        for family, sizes in (of.split("-", 1) for of in models.split("; ")):
            for size in sizes.split(", "):
                said.setdefault(f"{family}-{size}", set()).update(re.findall(r"`([^`]+)`", configurations))
    for file in (ROOT / "recipes").glob("Qwen[23]*/grpo/*.yaml"):
        model = file.parts[-3].removesuffix("-Instruct")
        there.setdefault(model, set()).add(re.sub(r"^(paper_\w+?_).*", r"\1*", file.stem))
    assert there.pop("Qwen2.5-Coder-0.5B") and said == there


def test_python_blocks_compile_and_import_what_is_there():
    for block in (block for kind, block in BLOCKS if kind == "python"):
        compile(block, "page", "exec")
        for line in re.findall(r"^from qerl_\S+ import [\w, ]+", block, flags=re.M):
            exec(line, {})


def step(file, arm):
    """Return "seconds s, peak GB" of a step."""
    of = json.loads((RESULTS / f"train_{file}_NVIDIA_H200.json").read_text())["summary"][arm]
    return f"{of['seconds']['step']:.1f} s, {of['peak_gb']['process']:.0f} GB"


def test_the_tables_hold_the_figures_of_the_committed_files():
    rows = [
        re.split(r"\s*\|\s*", line.strip("| "))
        for line in TEXT.partition("## What fits")[0].splitlines()
        if line.startswith("| ")
    ]
    cells = {row[0]: [cell.strip("*") for cell in row[1:]] for row in rows}
    steps = [row for name, row in cells.items() if re.match(r"\d+B(,|$)|Qwen3", name)]
    old = {arm: step("7B_80GB_three_arms", arm).partition(",")[0] for arm in ("bf16", "nf4", "qerl_nvfp4")}
    assert steps == [
        [step("7B_80GB", "bf16"), f"{old['nf4']} [1]", step("7B_80GB", "qerl_nvfp4")],
        [step("7B", arm) for arm in ("bf16", "nf4", "qerl_nvfp4")],
        [step("14B", arm) for arm in ("bf16", "nf4", "qerl_nvfp4")],
        [step("14B_checkpointed", "bf16"), "", step("14B_checkpointed", "qerl_nvfp4")],
        ["does not fit [2]", "not supported", step("30B-A3B_80GB", "qerl_nvfp4")],
        ["does not fit, by plan", "", step("32B", "qerl_nvfp4")],
        ["does not fit, by plan", "", step("72B_80GB", "qerl_nvfp4")],
    ]
    assert f"QeRL took {old['qerl_nvfp4']} and BF16 {old['bf16'].removesuffix(' s')}" in TEXT.replace("\n", " ")
    assert f"takes {step('30B-A3B', 'bf16').split()[2]} GB without" in TEXT.replace("\n", " ")
    arms = json.loads((RESULTS / "rollout_7B_interleaved_NVIDIA_H200.json").read_text())["arms"]
    ours, merged = (
        [arms[arm]["batch"][str(batch)]["tokens_per_s"] for batch in (8, 64, 256)]
        for arm in ("qerl_nvfp4", "bf16_merged")
    )
    assert f"{merged[2]:,.0f} tokens/s to {ours[2]:,.0f}" in TEXT
    assert f"{ours[0] / merged[0]:.2f}x as fast at 8 sequences and {ours[1] / merged[1]:.2f}x at 64" in TEXT


def test_the_ratios_of_unequal_lengths_are_those_of_the_files():
    arms: dict[str, list[float]] = {}
    for name in ("rollout_7B_uneven", "rollout_7B_uneven_merged"):
        for arm, found in json.loads((RESULTS / f"{name}_NVIDIA_H200.json").read_text())["arms"].items():
            arms[arm] = [found["uneven"][batch]["tokens_per_s"] for batch in ("64", "256")]
    ours = arms["qerl_nvfp4"]
    merged, fp8, stock = ([o / t for o, t in zip(ours, arms[arm], strict=True)] for arm in OTHERS)
    said = (
        f"it is {merged[0]:.2f}x and, at 256, {merged[1]:.2f}x",
        f"QeRL is {fp8[0] - 1:.0%} faster at 64 and FP8 {1 / fp8[1] - 1:.0%} at 256",
        f"it is {stock[0] - 1:.0%} and {stock[1] - 1:.0%} slower",
    )
    for text in said:
        assert text.replace("%", " %") in TEXT.replace("\n  ", " ")


def test_the_swaps_that_pages_name_are_the_ledgers():
    of_7b, of_32b = (json.loads((RESULTS / f"swap_{name}_NVIDIA_H200.json").read_text())["ways"] for name in SWAPS)
    idle, over_http = (f"{1e3 * of_7b[way]['swap']['median']:.1f} ms" for way in ("auto", "http, GPU to GPU"))
    text = (ROOT / "qerl_vllm_plugin" / "README.md").read_text()
    assert f"{idle} inside an idle process, and in {over_http} over HTTP from GPU to GPU" in text
    page = (ROOT / "qerl_vllm_plugin" / "lora_updates.md").read_text()
    assert f"{idle.removesuffix(' ms')} to {1e3 * of_32b['http']['swap']['median']:.0f}." in page
    soak = json.loads((RESULTS / "soak_7B_NVIDIA_H200.json").read_text())
    assert (soak["streams"], soak["lost"], soak["wrong"]) == (256, [], [])
    assert f"{soak['changes']} changes: of {soak['answers']:,} answers none" in page


def test_each_promise_has_tests_of_its_number():
    page = (ROOT / "tests" / "README.md").read_text().partition("## Promises")[2]
    linked = re.findall(r"^(\d+)\. \*\*.*\(\[tests\]\((.*)\)\)$", page, flags=re.M)
    assert [number for number, _ in linked] == [str(number) for number in range(1, 11)]
    for number, file in linked:
        assert f"def test_promise_{int(number):02d}_" in (ROOT / "tests" / file).read_text(), number
