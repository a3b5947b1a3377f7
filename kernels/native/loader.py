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
from dataclasses import dataclass
from pathlib import Path

from treeeagle_edge.errors import reason_of
from treeeagle_edge.kernels.native import build
from treeeagle_edge.paths import cache_dir

OVERRIDE = "TREEEAGLE_NATIVE"  # environment: a library to use as it is, for tests of other builds


@dataclass(frozen=True)
class Problem:
    """Why there is no native library: a sentence and a hint."""

    reason: str
    hint: str


def library_path() -> Path:
    """Where the library of these sources lies, or will lie once built."""
    override = os.environ.get(OVERRIDE)
    if override:
        return Path(override)
    flags = (*build.FLAGS, *build.FAMILIES)
    digest = hashlib.sha256(f"{platform.machine()} {sys.platform} {flags}".encode())
    for source in sorted(build.SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return cache_dir() / "native" / digest.hexdigest()[:16] / "libtreeeagle.so"


@functools.cache
def problem() -> Problem | None:
    """Why there is no library to use; None where it loads. Builds it first where it is missing or damaged.

    Never raises.
    """
    return _problem_of_files() or _problem_of_loading()


def _problem_of_files() -> Problem | None:
    override = os.environ.get(OVERRIDE)
    if override:  # somebody's own build: not ours to write
        if Path(override).is_file():
            return None
        return Problem(f"{OVERRIDE} names {override}, where no library is", f"unset {OVERRIDE}")
    try:
        path = library_path()
        if not build.is_whole(path):
            build.build(path)
    except build.NoCompilerError:
        return Problem(
            "no C++ compiler is installed", "install g++ or clang++ for kernels several times as fast"
        )
    except build.BuildError as error:
        return Problem(
            f"the native kernels did not compile: {error.reason}",
            f"set {build.COMPILER} to another C++ compiler",
        )
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        file = getattr(error, "filename", None)
        place = f" ({file})" if file else ""
        return Problem(
            f"the native kernels cannot be kept: {reason_of(error)}{place}",
            "set TREEEAGLE_CACHE to a folder you can write to",
        )
    return None


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
    found = problem()
    print(
        f"native kernels: {library_path()}" if found is None else f"{found.reason}; {found.hint}",
        file=sys.stderr,
    )
