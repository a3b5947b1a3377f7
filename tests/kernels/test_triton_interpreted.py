"""The tests of the Triton kernels pass on the CPU, under Triton's interpreter.

In a process of their own: Triton has to be imported as an interpreter, and other tests import it as a compiler.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton_cases import interpreter_problem

SUBJECTS = ("attention", "write", "rowwise", "matmul", "int8", "noise", "dispatch", "model")


@pytest.mark.slow
@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="this run is interpreted itself")
def test_the_kernel_tests_pass_under_the_interpreter(repository: Path) -> None:
    reason = interpreter_problem()
    if reason is not None:
        pytest.skip(reason)
    files = [f"tests/kernels/test_triton_{subject}.py" for subject in SUBJECTS]
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    # what all backends have in common holds for one more; this one draws many cases to compare the other two
    common = "tests/kernels/test_attention_reference.py"
    command += [common, f"--deselect={common}::test_both_backends_agree"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert " passed" in said
    assert "skipped" not in said
