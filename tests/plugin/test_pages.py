"""The program of the README for another stack, as printed but for the model, the adapter and the CPU."""

import re
from pathlib import Path

TEXT = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_program_for_another_stack(boot, make_nvfp4, reference, make_adapter, tmp_path):
    """``boot`` ends the engine, whatever becomes of the program."""
    folder = make_nvfp4("qwen2")
    make_adapter(reference(folder), r=4)[2].save_pretrained(tmp_path / "adapter")
    program = next(block for block in re.findall(r"```python\n(.*?)```", TEXT, flags=re.S) if "Policy(llm)" in block)
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
