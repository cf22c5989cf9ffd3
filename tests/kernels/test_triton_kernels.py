"""The Triton kernels on a CPU, by Triton's interpreter: each check of interpreted.py in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize(
    "check",
    [
        "dequantize_is_exact_for_every_code_and_scale",
        "quantize_gives_the_bits_of_the_reference",
        "logprob_kernels_agree_with_torch",
        "silu_mul_agrees_with_the_reference",
        "rms_norm_agrees_with_the_reference",
    ],
)
def test_interpreted(check):
    command = [sys.executable, str(Path(__file__).with_name("interpreted.py")), check]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
