"""Compile the native kernels into one shared object, with whatever C++ compiler is there; a matter of seconds."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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


@dataclass(frozen=True)
class BuildError(Exception):
    """The compiler was there and failed: what was run and what it said."""

    command: tuple[str, ...]
    output: str

    def __str__(self) -> str:
        return f"{' '.join(self.command)}\n{self.output}"


def find_compiler() -> str:
    """`$CXX`, else g++, clang++ or c++; NoCompilerError when none is there."""
    for name in (os.environ.get(COMPILER, ""), "g++", "clang++", "c++"):
        if name and shutil.which(name.split()[0]):
            return name
    raise NoCompilerError("no C++ compiler found")


def _run(command: tuple[str, ...]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(command, done.stderr)
    if done.stderr:
        print(done.stderr, file=sys.stderr)


def build(output: Path, *, sanitize: bool = False, werror: bool = False) -> Path:
    """Write the shared object to `output` (replaced at once, so that a running program keeps its copy)."""
    compiler = tuple(find_compiler().split())
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    common = (*FLAGS, *WARNINGS, *(("-DTE_X86",) if x86 else ()), *(SANITIZE if sanitize else ()))
    common = (*common, *(("-Werror",) if werror else ()))
    if not x86 and platform.machine().lower() in ("arm64", "aarch64") and sys.platform == "darwin":
        common = (*common, "-mcpu=apple-m1")
    sources = [s for s in sorted(SOURCES.glob("*.cpp")) if x86 or s.name not in X86_FLAGS]
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        objects = [Path(folder) / (source.stem + ".o") for source in sources]
        commands = [
            (*compiler, *common, *(X86_FLAGS.get(s.name, ()) if x86 else ()), "-c", str(s), "-o", str(o))
            for s, o in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(_run, commands))
        fresh = output.with_suffix(f".{os.getpid()}.tmp")
        _run((*compiler, *common, "-shared", "-o", str(fresh), *map(str, objects)))
        os.replace(fresh, output)
    return output
