"""Finds the native library, and builds it where it is missing or damaged and there is a C++ compiler.

The sources are part of the package. The library lies in the cache, under a digest of sources, flags and platform: an
update of the package is built anew, and two installations share one build.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from treeeagle_edge.errors import reason_of
from treeeagle_edge.kernels.native import build
from treeeagle_edge.paths import cache_dir

NAME = "libtreeeagle.so"
OVERRIDE = "TREEEAGLE_NATIVE"  # environment: a library to use as it is, for tests of other builds


@dataclass(frozen=True)
class Problem:
    """Why there is no native library, or why it is not kept: a sentence and a hint."""

    reason: str
    hint: str


_elsewhere: Path | None = None  # while a library is loaded that cannot be kept in the cache


def library_path() -> Path:
    """Where the library of these sources lies, or will lie once built."""
    override = os.environ.get(OVERRIDE)
    if override:
        return Path(override)
    flags = (*build.FLAGS, *build.FAMILIES)
    digest = hashlib.sha256(f"{platform.machine()} {sys.platform} {flags}".encode())
    for source in sorted(build.SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return cache_dir() / "native" / digest.hexdigest()[:16] / NAME


def path_to_load() -> Path:
    """Where the library is loaded from."""
    return _elsewhere or library_path()


def problem() -> Problem | None:
    """Why there is no library to use; None where it loads. Builds it first where it is missing or damaged.

    Never raises.
    """
    return _found()[0]


def must_compile() -> bool:
    """Whether `problem` will compile the library first, which takes some twenty seconds."""
    if os.environ.get(OVERRIDE):
        return False
    try:
        build.find_compiler()
        return not build.is_whole(library_path())
    except (build.NoCompilerError, OSError, RuntimeError):
        return False


def not_kept() -> Problem | None:
    """Why the library in use had to be built for this run alone; None where the cache keeps it."""
    return _found()[1]


@functools.cache
def _found() -> tuple[Problem | None, Problem | None]:
    """What is wrong with the library, and with keeping it."""
    override = os.environ.get(OVERRIDE)
    if override:  # somebody's own build: not ours to write
        missing = Problem(f"{OVERRIDE} names {override}, where no library is", f"unset {OVERRIDE}")
        return _problem_of_loading() if Path(override).is_file() else missing, None
    try:
        path = library_path()
        if not build.is_whole(path):
            build.build(path)
    except build.NoCompilerError:
        return Problem(
            "no C++ compiler is installed", "install g++ or clang++ for kernels several times as fast"
        ), None
    except build.BuildError as error:
        return Problem(
            f"the native kernels did not compile: {error.reason}",
            f"set {build.COMPILER} to another C++ compiler",
        ), None
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        file = getattr(error, "filename", None)
        place = f" ({file})" if file else ""
        kept = Problem(
            f"the native kernels cannot be kept: {reason_of(error)}{place}",
            "set TREEEAGLE_CACHE to a folder you can write to",
        )
        return (None, kept) if _loads_from_elsewhere() else (kept, None)
    return _problem_of_loading(), None


def _loads_from_elsewhere() -> bool:
    """Build the library into a private folder for this run, which is gone once the library is loaded."""
    global _elsewhere
    try:
        with tempfile.TemporaryDirectory(prefix="treeeagle-", ignore_cleanup_errors=True) as folder:
            _elsewhere = build.build(Path(folder) / NAME)
            return _problem_of_loading() is None
    except (build.NoCompilerError, build.BuildError, OSError):
        return False
    finally:
        _elsewhere = None


def _problem_of_loading() -> Problem | None:
    from treeeagle_edge.kernels.native.library import NativeError, library

    try:
        library()
    except (OSError, NativeError) as error:
        override = os.environ.get(OVERRIDE)
        hint = f"unset {OVERRIDE}" if override else f"delete {library_path()} to have them built again"
        return Problem(f"the native kernels did not load: {error}", hint)
    return None


if __name__ == "__main__":
    found = problem() or not_kept()
    print(
        f"native kernels: {library_path()}" if found is None else f"{found.reason}; {found.hint}",
        file=sys.stderr,
    )
