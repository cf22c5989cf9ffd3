"""Run the checks of interpreted.py, which run the Triton kernels in Triton's interpreter on a CPU, in a separate
process.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

CHECKS = [
    "dequantize_is_exact_for_every_code_and_scale",
    "quantize_gives_the_bits_of_the_reference",
    "logprob_kernels_agree_with_torch",
    "silu_mul_agrees_with_the_reference",
    "wide_operands_are_those_of_the_reference",
    "scaled_silu_mul_agrees_with_the_reference",
    "rotate_agrees_with_the_reference",
    "rms_norm_agrees_with_the_reference",
]


@pytest.fixture(scope="module")
def said():
    """Run all checks in one process and return what each printed.

    Importing torch and Triton takes longer than any check.
    """
    command = [sys.executable, str(Path(__file__).with_name("interpreted.py")), *CHECKS]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(part.strip().split("\n", 1) for part in re.split("^== ", done.stdout, flags=re.MULTILINE)[1:])


@pytest.mark.parametrize("check", CHECKS)
def test_interpreted(check, said):
    assert said[check] == "passed", said[check][-2000:]
