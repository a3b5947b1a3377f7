"""The tests of the native kernels find nothing on a build with Address- and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from treeeagle_edge.kernels.native import build, loader

SUBJECTS = ("matmul", "attention", "decoder", "screen", "head", "tree", "draw", "refusals", "pointers")
READS_BEYOND = """
import numpy as np
from treeeagle_edge.kernels.native.library import library
values = np.zeros(8, np.float32)
library().te_unpack(0, 0, values.ctypes.data, 16 * 32 * 4, 16, 32, np.zeros((16, 32), np.float32).ctypes.data)
"""


def runtime_of(compiler: str, name: str) -> str | None:
    """Path of one of the compiler's own libraries; None where it has none of that name."""
    command = [*compiler.split(), f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return path if os.path.isabs(path) and Path(path).exists() else None


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which Python loads a sanitized build."""
    if sys.platform != "linux":
        pytest.skip("the sanitizers are preloaded as on Linux")
    try:
        compiler = build.find_compiler()
    except build.NoCompilerError:
        pytest.skip("no C++ compiler")
    runtimes = [path for name in ("libasan.so", "libubsan.so") if (path := runtime_of(compiler, name))]
    if len(runtimes) < 2:
        pytest.skip(f"{compiler} has no libasan and libubsan")
    path = build.build(tmp_path_factory.mktemp("sanitized") / "libtreeeagle.so", sanitize=True, werror=True)
    return {
        **os.environ,
        loader.OVERRIDE: str(path),
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself leaves memory to the end of the process
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }


@pytest.mark.slow
def test_the_kernel_tests_pass_under_sanitizers(sanitized: dict[str, str], repository: Path) -> None:
    files = [f"tests/kernels/test_native_{subject}.py" for subject in SUBJECTS]
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=repository, env=sanitized, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert " passed" in said
    assert "skipped" not in said


@pytest.mark.slow
def test_the_sanitizers_are_awake(sanitized: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", READS_BEYOND], env=sanitized, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "AddressSanitizer" in done.stderr
