"""Test what the pages print for other stacks and servers. It runs as printed, except for model, adapter and CPU
options."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "qerl_vllm_plugin" / "README.md").read_text()


def test_the_program_for_another_stack(boot, make_nvfp4, reference, make_adapter, tmp_path):
    """Run the program with ``boot`` as its LLM, which shuts the engine down even if the program fails."""
    folder = make_nvfp4("qwen2")
    make_adapter(reference(folder), r=4)[2].save_pretrained(tmp_path / "adapter")
    program = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.S) if "Policy(llm)" in block)
    for theirs, ours in (
        ('"MODEL"', "FOLDER"),
        ("from vllm import LLM", "LLM = BOOT"),
        ("RUN/adapter", str(tmp_path / "adapter")),
    ):
        assert program.count(theirs) == 1, theirs
        program = program.replace(theirs, ours)
    told = {"__name__": "__main__", "BOOT": boot, "FOLDER": folder}
    exec(compile(program, "README.md", "exec"), told)
    policy = told["policy"]
    assert (policy.version, policy.request, policy.state().sigma) == (1, None, 0.0)
    assert policy.state().rollout == 0, "the noise is cleared"


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("curl") is None or shutil.which("openssl") is None, reason="no curl or no openssl")
def test_the_commands_that_start_a_server_and_change_its_policy(
    make_nvfp4, reference, make_adapter, hold_port, run_process, tmp_path
):
    """Run the whole block in one shell, with the server in its background."""
    folder, port = make_nvfp4("qwen2"), hold_port()
    for seed, name in enumerate(("first", "second")):
        make_adapter(reference(folder), seed=seed, r=4)[2].save_pretrained(tmp_path / "RUNS" / name)
    block = next(found for found in re.findall(r"```bash\n(.*?)```", PAGE, flags=re.S) if "/v1/qerl/" in found)
    for theirs, ours in (
        ("qerl serve BASE ", f"qerl serve {folder} --port {port} --max-model-len 128 --num-gpu-blocks-override 64 "),
        ("http://127.0.0.1:8000", f"http://127.0.0.1:{port}"),
        ('"RUNS', f'"{tmp_path}/RUNS'),
        (" &\n", f" >{tmp_path}/server.log 2>&1 &\n"),
    ):
        assert theirs in block
        block = block.replace(theirs, ours)
    script, log = tmp_path / "block.sh", tmp_path / "log"
    script.write_text(block + "kill $!\n")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run_process(["bash", "-e", script], log, 500, PATH=path, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    text, answers = log.read_text(), []
    while text.startswith("{"):
        answer, end = json.JSONDecoder().raw_decode(text)
        answers, text = [*answers, answer], text[end:]
    # ``first`` is served from the start; then come ``second``, noise, the state, no noise, and the base alone
    assert [answer.get("version") for answer in answers] == [2, None, 2, None, 3], log.read_text()
    assert (answers[2]["noise"]["sigma"], answers[2]["noise"]["rollout"], answers[2]["max_rank"]) == (0.01, 7, 32)


def test_the_page_has_every_status_and_reason_of_a_refusal():
    source = "".join(file.read_text() for file in (ROOT / "qerl_vllm_plugin").rglob("*.py"))
    pairs = set(re.findall(r'Refused\(\s*(\d{3}),\s*"(\w+)"', source))
    assert len(pairs) > 15
    rows = re.findall(r"^\| ([\d, ]+) \| ([`\w, ]+) \|", PAGE, flags=re.M)
    said = {(code, reason) for codes, reasons in rows for code in codes.split(", ") for reason in reasons.split(", ")}
    assert {(code, f"`{reason}`") for code, reason in pairs} <= said
