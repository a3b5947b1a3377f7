"""The tests of the Triton kernels pass on the CPU, under Triton's interpreter.

In processes of their own: Triton has to be imported as an interpreter, and other tests import it as a compiler.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton_cases import interpreter_problem

FILES = {
    "attention": ["attention"],
    "model": ["model"],
    "others": ["write", "rowwise", "matmul", "int8", "noise", "dispatch"],
}
# What all backends have in common holds for one more. Left out: many drawn cases that compare the other two, and what
# the kernel's own tests ask, too.
COMMON = "tests/kernels/test_attention_reference.py"
LEFT_OUT = ("test_both_backends_agree", "test_slots_that_are_not_granted_do_not_matter")


@pytest.mark.slow
@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="this run is interpreted itself")
@pytest.mark.parametrize("subject", FILES)
def test_the_kernel_tests_pass_under_the_interpreter(repository: Path, subject: str) -> None:
    reason = interpreter_problem()
    if reason is not None:
        pytest.skip(reason)
    files = [f"tests/kernels/test_triton_{name}.py" for name in FILES[subject]]
    if subject == "attention":
        files += [COMMON, *(f"--deselect={COMMON}::{name}" for name in LEFT_OUT)]
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert " passed" in said
    assert "skipped" not in said
