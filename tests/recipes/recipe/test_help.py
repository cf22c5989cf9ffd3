"""Test that `qerl train --help` lists every key once with its default, and imports no vLLM."""

import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from qerl_recipes import cli
from qerl_recipes.recipe import configs
from qerl_recipes.recipe.configs import parse
from qerl_recipes.recipe.keys import REFUSED, TOPICS


def test_help_lists_every_key_with_its_default(monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    done = CliRunner().invoke(cli.app, ["train", "--help"])
    assert done.exit_code == 0
    text = re.sub(r" +\n? +", " ", done.stdout)  # one line for each key
    parser = configs.parser()
    for key in sorted(parser.keys()):
        default = re.escape(f" (default: {parser.get_default(key)})")
        assert len(re.findall(rf"^ ?--{key} \S.*{default}$", text, re.MULTILINE)) == 1, key
    headings = [line for line in done.stdout.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings[:-1] == [f"{topic}:" for topic in TOPICS]
    assert "--sigma_start First sigma; 0.01 with noise. (default: None)" in text
    assert "One of qerl_nvfp4, bf16, nf4. (default: qerl_nvfp4)" in text
    assert f"--use_dora {REFUSED['use_dora'].way_out}. (default: False)" in text


def test_help_shows_the_defaults_of_a_recipe(tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text("lora_r: 77\n")
    with pytest.raises(SystemExit):
        parse(["--config", str(tmp_path / "recipe.yaml"), "--use_cpu", "true", "--bf16", "false", "--help"])
    assert "(default: 77)" in capsys.readouterr().out


@pytest.mark.integration
def test_preflight_help_and_a_mistyped_name_import_no_vllm(make_nvfp4, tmp_path):
    options = ["--output-dir", str(tmp_path), "--tasks"]
    base = str(make_nvfp4("qwen2"))
    mistyped = [["evaluate", "/nowhere", *options, "running_sum"], ["evaluate", base, *options, "gsm9k"]]
    code = (
        "import sys\n"
        "import qerl_recipes.train.preflight\n"
        "from qerl_recipes import cli\n"
        f"for words in {[['train', '--help'], *mistyped]!r}:\n"
        "    sys.argv = ['qerl', *words]\n"
        "    try: cli.main()\n"
        "    except SystemExit as ended: print('ended with', ended.code)\n"
        "    print({'vllm', 'lighteval'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("ended", "set", "{'"))]
    assert lines == [f"ended with {code}" if i == 0 else "set()" for code in (0, 2, 2) for i in (0, 1)], done.stderr
