"""Compile the native kernels into one shared object, with whatever C++ compiler is there, in seconds."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

Command = tuple[str, ...]

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
    "-g1",  # lines, which is all that a report names; more of it doubles the time of compiling
    "-fno-omit-frame-pointer",
)
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mavx512bf16")


@dataclass(frozen=True)
class Family:
    """Machines that can run the same instruction sets.

    machines: what `platform.machine()` says on them. macro: what the sources test for. flags: the files that only this
    family compiles, with the flags that each of them needs beside the common ones.
    """

    machines: tuple[str, ...]
    macro: str
    flags: dict[str, tuple[str, ...]]


FAMILIES = (
    Family(
        ("x86_64", "amd64"),
        "TE_X86",
        {
            "isa_avx512.cpp": (*AVX512, "-mprefer-vector-width=512"),
            "isa_avx2.cpp": AVX2,
            "isa_avxvnni.cpp": (*AVX2, "-mavxvnni"),
        },
    ),
    Family(("aarch64", "arm64"), "TE_ARM", {"isa_neon.cpp": ("-march=armv8.2-a+dotprod",)}),
)


class NoCompilerError(RuntimeError):
    """No C++ compiler could be found; PyTorch's own operations serve instead."""


class BuildError(RuntimeError):
    """The compiler was there and failed. The message holds command and output, `reason` the most telling line."""

    def __init__(self, command: Command, output: str) -> None:
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


def run_all(these: Iterable[Command]) -> None:
    """Run these commands side by side; BuildError for the first that fails."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(_run, these))


def _run(command: Command) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        raise BuildError(command, done.stderr)
    if done.stderr:
        print(done.stderr, file=sys.stderr)


def compile_commands(
    compiler: str, machine: str, folder: Path, flags: Sequence[str] = ()
) -> dict[Path, Command]:
    """Objects in `folder` and the command that compiles each, for what `platform.machine()` calls `machine`."""
    family = next((family for family in FAMILIES if machine.lower() in family.machines), None)
    own = family.flags if family else {}
    others = {name for other in FAMILIES if other is not family for name in other.flags}
    common = (*compiler.split(), *FLAGS, *WARNINGS, *flags, *((f"-D{family.macro}",) if family else ()))
    sources = [source for source in SOURCES.glob("*.cpp") if source.name not in others]
    # Of an inline function that several objects hold the linker keeps the first: one that every machine can run.
    sources.sort(key=lambda source: (source.name in own, source.name))
    objects = {folder / f"{source.stem}.o": source for source in sources}
    return {o: (*common, *own.get(s.name, ()), "-c", str(s), "-o", str(o)) for o, s in objects.items()}


def is_whole(library: Path) -> bool:
    """Whether a library is there as it was built. The loader of the system does not look: it maps what is missing of a
    file too, and the program ends where that is read first.
    """
    try:
        return _seal_of(library).read_text() == _seal(library.read_bytes())
    except (OSError, ValueError):
        return False


def _seal_of(library: Path) -> Path:
    return library.with_name(f"{library.name}.seal")


def _seal(content: bytes) -> str:
    """Against damage, not malice: a start has no time for more."""
    return f"{len(content)} {zlib.crc32(content):08x}\n"


def build(output: Path, *, sanitize: bool = False, werror: bool = False) -> Path:
    """Write the shared object to `output`, whole or not at all, and its seal beside it, for `is_whole`. A program that
    has the old one loaded keeps it.

    Raises NoCompilerError, BuildError, or OSError where the folder cannot be written.
    """
    compiler = find_compiler()
    flags = (*(SANITIZE if sanitize else ()), *(("-Werror",) if werror else ()))
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:  # beside it: moving there is atomic
        compiling = compile_commands(compiler, platform.machine(), Path(folder), flags)
        run_all(compiling.values())
        fresh = Path(folder) / output.name
        linking = (*compiler.split(), *FLAGS, *flags, "-shared", "-o", str(fresh), *map(str, compiling))
        run_all([linking])
        seal = _seal_of(fresh)
        seal.write_text(_seal(fresh.read_bytes()))
        os.replace(fresh, output)
        os.replace(seal, _seal_of(output))
    return output
