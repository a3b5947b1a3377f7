"""Compile the native kernels into one shared object, with whatever C++ compiler is there, in seconds."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

COMPILER = "CXX"  # environment: the compiler to use
SOURCES = Path(__file__).parent / "src"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-pthread",
)
WARNINGS = ("-Wall", "-Wextra")
SANITIZE = (
    "-O1",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-g",
    "-fno-omit-frame-pointer",
)
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mavx512bf16")
X86_FLAGS = {
    "isa_avx512.cpp": (*AVX512, "-mprefer-vector-width=512"),
    "isa_avx2.cpp": AVX2,
    "isa_avxvnni.cpp": (*AVX2, "-mavxvnni"),
}


class NoCompilerError(RuntimeError):
    """No C++ compiler could be found; PyTorch's own operations serve instead."""


class BuildError(RuntimeError):
    """The compiler was there and failed: what was run, what it said, and the line of it that says most."""

    def __init__(self, command: tuple[str, ...], output: str) -> None:
        super().__init__(f"{' '.join(command)}\n{output}")
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()]
        self.reason = (errors or lines or [f"{command[0]} failed without a word"])[0]


def find_compiler() -> str:
    """`$CXX`, else g++, clang++ or c++; NoCompilerError when none is there."""
    for name in (os.environ.get(COMPILER, ""), "g++", "clang++", "c++"):
        if name.strip() and shutil.which(name.split()[0]):
            return name
    raise NoCompilerError("no C++ compiler found")


def _run(command: tuple[str, ...]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        raise BuildError(command, done.stderr)
    if done.stderr:
        print(done.stderr, file=sys.stderr)


def build(output: Path, *, sanitize: bool = False, werror: bool = False) -> Path:
    """Write the shared object to `output`, put there whole or not at all; a program that runs keeps its copy.

    Raises NoCompilerError, BuildError, or OSError where the folder cannot be written.
    """
    compiler = tuple(find_compiler().split())
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    common = (*FLAGS, *WARNINGS, *(("-DTE_X86",) if x86 else ()), *(SANITIZE if sanitize else ()))
    common = (*common, *(("-Werror",) if werror else ()))
    if not x86 and platform.machine().lower() in ("arm64", "aarch64") and sys.platform == "darwin":
        common = (*common, "-mcpu=apple-m1")
    sources = [s for s in sorted(SOURCES.glob("*.cpp")) if x86 or s.name not in X86_FLAGS]
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:  # beside it: moving there is atomic
        objects = [Path(folder) / (source.stem + ".o") for source in sources]
        commands = [
            (*compiler, *common, *(X86_FLAGS.get(s.name, ()) if x86 else ()), "-c", str(s), "-o", str(o))
            for s, o in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(_run, commands))
        fresh = Path(folder) / output.name
        _run((*compiler, *common, "-shared", "-o", str(fresh), *map(str, objects)))
        os.replace(fresh, output)
    return output
